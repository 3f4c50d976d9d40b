"""Prompt log-probabilities of SGLang from token_statistics, in the process that runs SGLang's model."""

from contextlib import contextmanager
from unittest.mock import patch

from parallel_lce import token_statistics

PLAIN = "UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"  # heads whose weight has a row for each id


@contextmanager
def sglang_scores():
    """For batches that ask for the log-probabilities of the prompts' own ids alone."""
    from sglang.srt.layers.logprob_processor import InputLogprobProcessor, LogprobResult
    from sglang.srt.runtime_context import get_parallel

    own = InputLogprobProcessor.forward

    def forward(
        self,
        pruned_states,
        sample_indices,
        input_logprob_indices,
        token_to_seq_idx,
        lm_head,
        get_logits_fn,
        logits_metadata,
        skip_chunking_for_dp_attn=False,
    ):
        processor = get_logits_fn.__self__  # the LogitsProcessor
        plain = type(getattr(lm_head, "quant_method", None)).__name__ in PLAIN and not hasattr(lm_head, "set_lora")
        packed = getattr(lm_head, "use_intel_amx_backend", False)
        more = logits_metadata.extend_return_top_logprob or logits_metadata.extend_token_ids_logprob
        if not plain or packed or more or skip_chunking_for_dp_attn or processor.rl_on_policy_target:
            rest = token_to_seq_idx, lm_head, get_logits_fn, logits_metadata, skip_chunking_for_dp_attn
            return own(self, pruned_states, sample_indices, input_logprob_indices, *rest)
        group = None
        if processor.do_tensor_parallel_all_gather:
            parallel = get_parallel()
            group = (parallel.attn_tp_group if processor.use_attn_tp_group else parallel.tp_group).device_group
        found = token_statistics(
            pruned_states[input_logprob_indices],
            lm_head.weight,
            logits_metadata.extend_input_logprob_token_ids_gpu,
            logit_scale=1.0 if processor.logit_scale is None else processor.logit_scale,
            logit_softcap=processor.final_logit_softcapping or None,
            process_group=group,
            vocab_size=processor.vocab_size,
        )
        logits = get_logits_fn(pruned_states[sample_indices], lm_head, logits_metadata)  # of the ids to be sampled
        return LogprobResult(token_logprobs=found.target_log_prob), logits

    with patch.object(InputLogprobProcessor, "forward", forward):
        yield
