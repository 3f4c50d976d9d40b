"""Prompt log-probabilities of SGLang from token_statistics, without logits of the prompt.

From hidden states with the same bits they have the trainer's bits (docs/rl.md, "The same bits"). Copy this file, and
enter ``sglang_scores()`` in each process that runs SGLang's model. It replaces ``InputLogprobProcessor.forward`` of
``sglang.srt.layers.logprob_processor``. Each rank of SGLang's tensor-parallel group calls token_statistics with its
shard.

Covered: log-probabilities of the prompt's ids; scale, soft-cap, padding, tensor parallelism, fp32 head. SGLang's own
code runs

- for steps with a request for the largest or for chosen ids, data-parallel attention or ``rl_on_policy_target``;
- for models with a quantized or packed head, or LoRA;
- for requests that score items.

With a bf16 head SGLang rounds the logits to bf16 before the softmax. token_statistics does not. With an fp32 head
(``enable_fp32_lm_head``) neither does.

Tried with SGLang 0.5.23 on a CPU with torch 2.13, on one rank and on two with gloo, for a vocabulary of 500 ids in 512
rows: fp32, scale with soft-cap, and bf16 with an fp32 head. Log-probabilities differ from SGLang's own by at most 3e-6.
It was ``LogitsProcessor.forward`` with its head, without SGLang's CPU kernels. No engine ran.
"""

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
