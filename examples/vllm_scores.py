"""Prompt log-probabilities of vLLM from token_statistics.

python examples/vllm_scores.py MODEL
"""

import os
import sys
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from unittest.mock import patch

import torch

from parallel_lce import token_statistics

PLAIN = "UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"  # heads whose weight has a row for each id


@contextmanager
def vllm_scores():
    """For requests with ``prompt_logprobs=0``, by both model runners. Ranks are 0: they are not counted."""
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu.sample import prompt_logprob

    v1, logits = gpu_model_runner.GPUModelRunner._get_prompt_logprobs_dict, LogitsProcessor.forward
    v2 = prompt_logprob.compute_prompt_logprobs_with_chunking

    def scorer(self, lm_head, hidden, bias=None, skip_gather=False):  # instead of logits, if the head is covered
        plain = type(self) is LogitsProcessor and type(lm_head.quant_method).__name__ in PLAIN
        whole = lm_head.num_embeddings == lm_head.org_vocab_size == self.org_vocab_size
        if not plain or not whole or self.logits_as_input or self.scale <= 0:
            return logits(self, lm_head, hidden, bias, skip_gather)
        group = (lm_head.parallel_group or get_tp_group()).device_group if lm_head.tp_size > 1 else None
        cap = self.soft_cap and self.soft_cap * self.scale  # vLLM scales what is soft-capped
        options = dict(linear_bias=bias, logit_scale=self.scale, logit_softcap=cap, process_group=group)
        return partial(token_statistics, hidden, lm_head.weight, vocab_size=self.org_vocab_size, **options)

    def scores(found, ids, own):  # as vLLM's ids, log-probabilities and ranks
        if not isinstance(found, partial):
            return own()
        return ids[:, None], found(ids.long()).target_log_prob[:, None], torch.zeros_like(ids)

    def first_runner(self, *args):
        if any(self.num_prompt_logprobs.values()) or "logits" in self.model_config.logprobs_mode:
            return v1(self, *args)
        softmax, gather = self.sampler.compute_logprobs, self.sampler.gather_logprobs
        passed = dict(
            compute_logprobs=lambda found: found if isinstance(found, partial) else softmax(found),
            gather_logprobs=lambda found, k, ids: scores(found, ids, lambda: gather(found, k, ids)),
        )
        try:
            with patch.object(LogitsProcessor, "forward", scorer), patch.multiple(self.sampler, **passed):
                return v1(self, *args)
        except (AttributeError, TypeError):  # of a model that edits its logits
            return v1(self, *args)

    def second_runner(ids, hidden, logits_fn, k, mode="raw_logprobs"):
        found = None
        with patch.object(LogitsProcessor, "forward", scorer), suppress(AttributeError, TypeError):  # as above
            if k == 0 and "logits" not in mode and isinstance(logits_fn(hidden[:1]), partial):
                found = logits_fn(hidden)
        return scores(found, ids, lambda: v2(ids, hidden, logits_fn, k, mode))

    with (
        patch.object(gpu_model_runner.GPUModelRunner, "_get_prompt_logprobs_dict", first_runner),
        patch.object(prompt_logprob, "compute_prompt_logprobs_with_chunking", second_runner),
    ):
        yield


def main(model: str, **options) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, where the function is replaced
    from vllm import LLM, SamplingParams

    engine = LLM(model, enable_prefix_caching=False, **options)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = []
    for replaced in (nullcontext(), vllm_scores()):
        with replaced:
            output = engine.generate({"prompt_token_ids": list(range(3, 99))}, asked)[0]
        found.append([each[i].logprob for i, each in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])])
    print(f"largest difference of {len(found[0])}: {max(abs(a - b) for a, b in zip(*found)):.1e}")


if __name__ == "__main__":
    main(sys.argv[1])
