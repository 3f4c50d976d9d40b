"""Refuses to build a package without kernels. pyproject.toml has all settings."""

import sys
from pathlib import Path

from setuptools import setup

if not Path(__file__).with_name("parallel_lce").joinpath("kernels").is_dir():
    sys.exit(
        "error: parallel_lce/kernels is missing: it is a symbolic link to ../kernels in the repository, lost by some "
        "archive tools and by git with core.symlinks=false; clone with symbolic links: git clone -c core.symlinks=true"
    )
setup()
