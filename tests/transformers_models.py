"""Small causal language models, of transformers or of the stand-in; and tests that run with each."""

import contextlib
import functools
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

import parallel_lce.transformers as door
from parallel_lce.deferred import DeferredLogits
from releases import folder_of
from tools import on_ranks
from transformers_standin import CausalLM

RELEASE = "5.24.0"
# Beside torch and tokenizers, all that TRL's trainers import.
OTHERS = "accelerate==1.15.0 regex==2026.11.19 psutil==7.2.2 datasets==5.2.0 pandas==3.1.1 pyarrow==26.0.1 dill==0.4.1 "
OTHERS += "multiprocess==0.70.19 xxhash==4.1.0 requests==2.34.2 urllib3==2.8.0 certifi charset_normalizer"
OTHERS += " trl==1.16.0 peft==0.21.2"

RELEASED = pytest.param("release", marks=pytest.mark.slow)
RELEASES = pytest.mark.parametrize("release", ["stand-in", RELEASED])
RELEASE_ALONE = pytest.mark.parametrize("release", [RELEASED])


@functools.cache
def site() -> str:
    """The folder of the release. datasets pickles functions, by dill, which knows installed modules by its name."""
    folder = Path(tempfile.mkdtemp()) / "site-packages"
    folder.symlink_to(folder_of("transformers", RELEASE, others=tuple(OTHERS.split())))
    return str(folder)


def on_releases(ranks: int | None = 1):
    """:func:`tools.on_ranks` for ``body(member, release, **parameters)``."""
    on = on_ranks(ranks, lambda given: site() if given["release"] == "release" else None)
    return lambda body: pytest.mark.parametrize("device", ["cpu"])(on(body))


V, D = 97, 32
STANDIN = {
    "plain": {},
    "capped": {"cap": 2.0, "scale": 1.5},
    "tied, biased": {"tied": True, "bias": True},
    "biased": {"bias": True},
}
TRAININGS = [("stand-in", kind) for kind in STANDIN]
KINDS = *STANDIN, "scaled", "divided", "experts"
TRAININGS += [pytest.param("release", kind, marks=pytest.mark.slow) for kind in KINDS]


def model_of(release: str, kind: str):
    torch.manual_seed(0)
    if release == "stand-in":
        return CausalLM(V, D, **STANDIN[kind])
    import transformers as hf

    sizes = dict(vocab_size=V, hidden_size=D, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    names, more = {
        "plain": ("Llama", {"num_key_value_heads": 2}),
        "capped": ("Gemma2", {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 2.0}),
        "tied, biased": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
        "biased": ("Phi", {"resid_pdrop": 0.0}),
        "scaled": ("Cohere", {"logit_scale": 0.3}),
        "divided": ("Granite", {"logits_scaling": 3.0}),
        "experts": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}),
    }[kind]
    model = getattr(hf, names + "ForCausalLM")(getattr(hf, names + "Config")(**sizes, **more))
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    return model


def batch(seed: int) -> dict:
    ids = torch.randint(3, V, (2, 16), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def fused(output) -> bool:
    """Its logits are a tensor, and not made."""
    return type(output.logits) is DeferredLogits and output.logits.state.real is None


def near(found, expected) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def same(a, b) -> None:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        a, b = a[...].detach(), b[...].detach()
        size = a.float().nan_to_num().abs().max().item() if a.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * max(size, 1.0), equal_nan=True)
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b) and len(a) == len(b), (a, b)
        for x, y in zip(a, b):
            same(x, y)
    else:
        assert a == b, (a, b)


@contextlib.contextmanager
def warned(kinds: tuple[type[Warning], ...] = (door.LogitsWarning,)):
    """Yields a list of what warnings of these kinds say, complete at the end."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(w.message) for w in caught if issubclass(w.category, kinds)]
