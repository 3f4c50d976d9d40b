"""The releases of megatron-core that the tests run on, beside each other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import releases

SUPPORTED = ("0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
# These are for Python 3.12 and newer. What the tests import of them also runs on 3.11.
_PYTHON_312 = ("0.17.1", "0.18.2", "0.19.2")

# Folders that hold megatron/core, such as checkouts of Megatron-LM, to run the same tests on.
CHECKOUTS = [Path(p) for p in os.environ.get("PARALLEL_LCE_TEST_MEGATRON", "").split(os.pathsep) if p]
OTHERS = [v for v in SUPPORTED if v != releases.installed("megatron-core")] + [p.name for p in CHECKOUTS]
# As parameters of a test. Whoever names a checkout asks for it.
OTHER_RELEASES = [pytest.param(v, marks=pytest.mark.slow if v in SUPPORTED else ()) for v in OTHERS]


def path_of(release: str) -> str:
    """A folder to import that release from: a checkout, or what pip installs."""
    for checkout in CHECKOUTS:
        if checkout.name == release:
            return str(checkout)
    return str(releases.folder_of("megatron-core", release, (3, 12) if release in _PYTHON_312 else (3, 11)))
