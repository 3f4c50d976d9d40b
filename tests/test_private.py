"""Private interfaces (core/private.py) do what the package uses them for, where no other test shows it."""

import gc
import re
import weakref
from pathlib import Path

import torch

from parallel_lce.core import private


def test_a_value_is_kept_as_long_as_memory(device):
    class Value:
        pass

    value, x = Value(), torch.ones(1, device=device, requires_grad=True)
    watched, handle = weakref.ref(value), torch.zeros(1, device=device)
    private.keep_with(handle, value)
    assert private.take_from(handle.clone()) is None
    saved = x * handle  # autograd saves it
    del value, handle
    gc.collect()
    assert watched() is not None
    (kept,) = (t for t in (saved.grad_fn._saved_self, saved.grad_fn._saved_other) if t is not None)
    assert private.take_from(kept.view(1)) is watched() and private.take_from(kept) is None
    private.keep_with(kept, found := Value())
    watched = weakref.ref(found)
    del found, kept, saved
    gc.collect()
    assert watched() is None


PRIVATE = re.compile(
    r"\b(torch(\.\w+)*|nn\.Module|forward_ad|dist)\._[a-z]|from torch[\w.]*( import .*\b|\.)_\w"
    r"|_dynamo_marked|_torchdynamo|\._(parameters|modules|call_impl|\w*_hooks)\b"
)


def test_no_other_file_uses_private_names_of_torch():
    package = Path(private.__file__).parents[1]
    found = [file.name for file in package.rglob("*.py") if PRIVATE.search(file.read_text())]
    assert found == ["private.py"]
