"""What of Megatron is its own code, and what a program has put in its place. Names and classes do not tell: a replaced
function keeps both."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from types import FrameType, FunctionType
from typing import Any

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_COMPILER = os.path.join(_TORCH, "_dynamo", "")
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
# Decorators of torch.amp that Megatron has around its autograd.Functions.
_AMP = ("custom_fwd.<locals>.decorate_fwd", "custom_bwd.<locals>.decorate_bwd")
# Of 0.18 and newer: its logits are drafts, which a CUDA graph may return.
SINGLE_STEP = "compute_mtp_single_step"
_BETWEEN = (_TORCH, _OURS, "<", functools.__file__, contextlib.__file__)


def _folder() -> str:
    return _folder_of(sys.modules["megatron.core"].__file__)


@functools.cache
def _folder_of(file: str | None) -> str:
    return os.path.dirname(file or "") + os.sep


def is_megatrons(function: Any, *names: str) -> bool:
    """Whether ``function`` is Megatron's own, of one of the qualified ``names`` if there are any. Megatron's own
    decorators may be around it, torch.compile and this package's wrapper of a loss."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return False
    # A program's own function, whose closure may hold a model, is not kept in the cache.
    return function.__code__.co_filename.startswith((_folder(), _OURS, _TORCH)) and _is_megatrons(function, *names)


@functools.lru_cache(maxsize=256)
def _is_megatrons(function: Any, *names: str) -> bool:
    while (code := getattr(function, "__code__", None)) is not None:
        file, inner = code.co_filename, getattr(function, "__wrapped__", None)
        if inner is None:
            return file.startswith(_folder()) and (not names or code.co_qualname in names)
        if not (
            file.startswith((_folder(), _COMPILER, _OURS)) or (file.startswith(_TORCH) and code.co_qualname in _AMP)
        ):
            return False
        function = inner
    return False


def mixin_on_the_way(frame: FrameType | None, layer: object) -> bool:
    """Whether a method of ``layer`` itself that is not Megatron's makes this call of its forward, as of a subclass or a
    mixin of an output layer that soft-caps the logits."""
    while frame is not None and not frame.f_code.co_filename.startswith(_folder()):
        if not frame.f_code.co_filename.startswith(_BETWEEN) and frame.f_locals.get("self") is layer:
            return True
        frame = frame.f_back
    return False


def replaced_on_the_way(frame: FrameType | None, layer: object) -> str | None:
    """Of a call of the output layer from ``frame``, made by a language model's method: what between that method and the
    model's loss is not Megatron's own, but for methods of ``layer`` itself; "" if all is, and
    :data:`SINGLE_STEP` of that method. None if no language model makes the call."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    foreign = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_BETWEEN):
            model = frame.f_locals.get("self")
            if not file.startswith(_folder()) and model is not layer:
                foreign = foreign or frame.f_code.co_qualname
            if isinstance(model, LanguageModule):
                if frame.f_code.co_name == SINGLE_STEP:
                    return SINGLE_STEP
                own = vars(model).get("compute_language_model_loss", type(model).compute_language_model_loss)
                return foreign or ("" if is_megatrons(own) else "compute_language_model_loss")
        frame = frame.f_back
    return None
