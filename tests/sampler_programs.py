"""Programs of test_samplers.py, one process a rank: ``python sampler_programs.py PROGRAM RANK RANKS STORE``.

Each compares a package's own prompt log-probabilities with those after the replacement, and prints the largest
difference of each case.
"""

import os
import sys
from types import SimpleNamespace

import torch

V, D = 500, 64  # the packages pad the vocabulary to 512 rows
LENGTHS = 7, 5  # tokens of the two prompts


def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


def vllm_layers(rank: int, ranks: int, store: str) -> None:
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample import prompt_logprob
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    import vllm_scores

    class Scored(GPUModelRunner):
        """The runner's method, and what it reads; ``projected`` are the tokens that got logits."""

        def __init__(self, head, processor, bias, asked):
            self.projected = 0
            self.model = SimpleNamespace(compute_logits=lambda hidden: processor(head, hidden, bias))
            self.device, self.sampler, self._sync_device = torch.device("cpu"), Sampler(), lambda: None
            self.num_prompt_logprobs = {"a": asked, "b": asked}
            self.model_config = SimpleNamespace(logprobs_mode="raw_logprobs")
            ids = torch.arange(3, V, 41)
            request = dict(num_computed_tokens=0, in_progress_prompt_logprobs_cpu=None)
            self.requests = {
                name: SimpleNamespace(prompt_token_ids=(ids[:length] + length).tolist(), **request)
                for name, length in zip("ab", LENGTHS)
            }
            self.input_batch = SimpleNamespace(req_id_to_index={"a": 0, "b": 1})
            self.query_start_loc = SimpleNamespace(np=torch.tensor([0, LENGTHS[0]]).numpy())

        def scores(self, hidden):
            found = self._get_prompt_logprobs_dict(hidden, dict(zip("ab", LENGTHS)))
            return [torch.cat([found[name][i].double() for name in "ab"]) for i in (0, 1)]

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(ranks, rank, f"file://{store}", rank, "gloo")
        initialize_model_parallel(ranks)
        for case, dtype, options, asked in [
            ("plain", torch.float32, {}, 0),
            ("bias", torch.float32, {}, 0),
            ("scale and soft-cap", torch.float32, dict(scale=0.5, soft_cap=3.0), 0),
            ("fp32 head of bf16", torch.bfloat16, {}, 0),
            ("others asked for", torch.float32, {}, 2),
        ]:
            head = ParallelLMHead(V, D, params_dtype=dtype)
            head.weight_loader(head.weight, drawn(V, D, scale=0.3).to(dtype))
            head.quant_method.process_weights_after_loading(head)
            processor = LogitsProcessor(V, **options)
            processor.head_dtype = torch.float32 if dtype is torch.bfloat16 else None
            bias = drawn(512).chunk(ranks)[rank] if case == "bias" else None
            hidden = drawn(sum(LENGTHS), D).to(dtype)
            called, logits = [], LogitsProcessor._get_logits
            own = Scored(head, processor, bias, asked).scores(hidden)
            LogitsProcessor._get_logits = lambda *args: called.append(1) or logits(*args)
            with vllm_scores.vllm_scores():
                mine = Scored(head, processor, bias, asked).scores(hidden)
                if asked == 0:
                    ids = torch.arange(len(hidden)) * 41
                    second = prompt_logprob.compute_prompt_logprobs_with_chunking(
                        ids, hidden, lambda states: processor(head, states, bias), 0
                    )
            LogitsProcessor._get_logits = logits
            assert bool(called) == bool(asked), case
            assert torch.equal(own[0], mine[0])
            difference = (own[1] - mine[1]).abs().max()
            if asked == 0:
                theirs = Sampler.compute_logprobs(processor(head, hidden, bias)).gather(1, ids[:, None])
                assert torch.equal(second[0], ids[:, None]) and not second[2].any()
                difference = torch.maximum(difference, (theirs - second[1]).abs().max())
            print(f"{case}: {difference:.1e}")


def vllm_engine(rank: int, ranks: int, store: str) -> None:
    """The example, on a model that transformers makes."""
    os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_CPU_KVCACHE_SPACE="1", VLLM_HOST_IP="127.0.0.1")
    from transformers import LlamaConfig, LlamaForCausalLM

    import vllm_scores

    sizes = dict(hidden_size=D, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=V)
    model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, max_position_embeddings=256, **sizes))
    model.lm_head.weight.data.copy_(drawn(V, D, scale=0.3))
    model.save_pretrained(store)
    lengths = dict(max_model_len=128, max_num_batched_tokens=128)
    vllm_scores.main(store, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, **lengths)


def sglang_layers(rank: int, ranks: int, store: str) -> None:
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import logits_processor
    from sglang.srt.layers.logits_processor import ForwardMode, LogitsMetadata, LogitsProcessor
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
    from sglang.srt.runtime_context import SpawnRanks
    from sglang.srt.server_args import ServerArgs

    import sglang_scores

    logits_processor._is_cpu = True  # the soft-cap in plain PyTorch. SGLang's own switch needs its CPU kernels.
    served = ServerArgs(model_path="none", device="cpu", tp_size=ranks)
    runtime_context.publish(served, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=0, gpu_id=rank))
    parallel_state.init_distributed_environment(ranks, rank, f"file://{store}", rank, "gloo")
    group = parallel_state.init_model_parallel_group
    gloo_alone = dict(use_pynccl=False, use_custom_allreduce=False)
    parallel_state.init_model_parallel_group = lambda *args, **options: group(*args, **{**options, **gloo_alone})
    parallel_state.initialize_model_parallel("gloo")
    for case, dtype, cap, scale, top in [
        ("plain", torch.float32, None, None, 0),
        ("scale and soft-cap", torch.float32, 3.0, 0.5, 0),
        ("fp32 head of bf16", torch.bfloat16, None, None, 0),
        ("others asked for", torch.float32, None, None, 2),
    ]:
        head = ParallelLMHead(V, D, params_dtype=dtype)
        head.weight_loader(head.weight, drawn(V, D, scale=0.3).to(dtype))
        processor = LogitsProcessor(SimpleNamespace(vocab_size=V, final_logit_softcapping=cap), logit_scale=scale)
        processor.use_fp32_lm_head = dtype is torch.bfloat16
        hidden = drawn(sum(LENGTHS), D).to(dtype)
        rows, own = [], LogitsProcessor._get_logits
        first = 0, 2  # the first token of each prompt whose log-probability is asked for

        def run():
            scored = [length - start for length, start in zip(LENGTHS, first)]
            asked = LogitsMetadata(
                ForwardMode.EXTEND,
                extend_return_logprob=True,
                extend_return_top_logprob=top > 0,
                extend_seq_lens=torch.tensor(LENGTHS),
                extend_seq_lens_cpu=[*LENGTHS],
                extend_logprob_start_lens_cpu=[*first],
                extend_logprob_pruned_lens_cpu=scored,
                top_logprobs_nums=[top, top],
                token_ids_logprobs=[None, None],
                extend_input_logprob_token_ids_gpu=torch.arange(sum(scored)) * 41,
            )
            found = processor(torch.arange(len(hidden)), hidden, head, asked)
            return found.next_token_logits, found.input_token_logprobs

        theirs = run()
        LogitsProcessor._get_logits = lambda self, states, *args, **more: (
            rows.append(len(states)) or own(self, states, *args, **more)
        )
        with sglang_scores.sglang_scores():
            mine = run()
        LogitsProcessor._get_logits = own
        assert sum(rows) == (sum(LENGTHS) - sum(first) if top else len(LENGTHS)), case
        print(f"{case}: {max((a - b).abs().max() for a, b in zip(theirs, mine)):.1e}")


if __name__ == "__main__":
    program, rank, ranks, store = sys.argv[1:]
    globals()[program](int(rank), int(ranks), store)
