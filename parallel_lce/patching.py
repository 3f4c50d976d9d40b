"""How the doors change other projects' code: replace attributes and restore them, and warn."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

_SKIPPED = os.path.dirname(__file__) + os.sep, os.path.dirname(torch.__file__) + os.sep


def warn(message: str, category: type[Warning]) -> None:
    """Warn of the first line outside of this package and of PyTorch, where Python can find it."""
    if sys.version_info >= (3, 12):
        warnings.warn(message, category, skip_file_prefixes=_SKIPPED)
    else:
        warnings.warn(message, category, stacklevel=3)


class Replacements(dict[tuple[Any, str], tuple[Any, Any]]):
    """Replaced attributes, by owner (a module or a class) and name: ours, and the owner's own, None if it inherits."""

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute by ``make(own)``, once."""
        if (owner, name) not in self:
            own = vars(owner).get(name)
            self[owner, name] = make(own), own
            setattr(owner, name, self[owner, name][0])

    def restore(self) -> None:
        """Undo all replacements. What other code has replaced since stays, with a warning."""
        for (owner, name), (ours, own) in [*self.items()]:
            now = vars(owner).get(name)
            if now is ours:
                delattr(owner, name) if own is None else setattr(owner, name, own)
            elif now is not own:
                said = f"{owner.__name__}.{name} has been replaced since patch(), and stays"
                warn(f"parallel_lce: {said}", RuntimeWarning)
                continue
            del self[owner, name]


def is_own(function: Any, module: str, name: str | None = None) -> bool:
    """Whether a function was written in that module, under that qualified name. A wrapper copies names, not globals."""
    there = getattr(function, "__globals__", 0) is getattr(sys.modules.get(module), "__dict__", None)
    return there and name in (None, function.__qualname__)
