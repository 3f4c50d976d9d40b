"""The Python of the pages that no other test runs, on one rank. Pages of doors are run by the tests of their doors, the
page of faults by test_faults.py."""

import re

import pytest
import torch
import torch.distributed as dist

import parallel_lce.megatron
from releases import ROOT

N, D, V = 6, 8, 50257  # the vocabulary of the pages


def _tensors() -> dict:
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    target = torch.randint(V, (N,))
    names = dict(torch=torch, dist=dist, hidden=hidden, weight=weight, target=target, tokens=target, V=V)
    names |= dict(input_ids=target, model=lambda ids: hidden, mask=target > 3, advantage=torch.randn(N))
    names |= dict(student_hidden=hidden, student_weight=weight, teacher_hidden=hidden, teacher_weight=weight.detach())
    return names | dict(tp_group=None, sharding={}, step=300, rows=V, ranks=1)


def _blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/usage.md", "docs/gradient_filter.md"])
def test_every_snippet_of_the_page_runs(page):
    blocks = _blocks(page)
    assert blocks
    for block in blocks:
        names = _tensors()
        exec(block, names)
        for name in {"loss", "policy_loss"} & {*names}:
            assert names[name].isfinite() and names[name].requires_grad


def test_the_losses_of_the_readme_before_and_after_agree():
    (block,), names = _blocks("README.md"), _tensors()
    losses = []
    for line in re.split(r"^(?=loss = )", block, flags=re.MULTILINE):
        exec(line, names)
        losses += [names["loss"]] if "loss" in names else []
    assert len(losses) == 3
    torch.testing.assert_close(losses[1:], losses[:1] * 2)


def test_the_imports_of_the_readmes_table_run_as_they_stand():
    lines = re.findall(r"`(from parallel_lce[^`]*|import parallel_lce)(?:;[^`]*)?`", (ROOT / "README.md").read_text())
    assert len(lines) == 5
    for line in lines:
        exec(line, {})
    patches = re.findall(r"parallel_lce\.(\w+)\.patch\(", (ROOT / "README.md").read_text())
    assert len(patches) == 3 and all(callable(getattr(parallel_lce, name).patch) for name in patches)


def test_the_configuration_of_megatrons_page_fuses():
    (block,) = _blocks("docs/megatron.md")
    names = {"TransformerConfig": lambda *others, **options: options}
    try:
        exec(block, names)
    finally:
        parallel_lce.megatron.unpatch()
    assert names["config"] == dict(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="parallel_lce")
