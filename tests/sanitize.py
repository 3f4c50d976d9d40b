"""Runs every kernel under compute-sanitizer, on a GPU; not racecheck, which follows no barriers of gl.warp_specialize.
Exit status 1 if a tool reports anything, or a kernel did not run. Whole outputs are in outputs/sanitize."""

import argparse
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "outputs" / "sanitize"
TOOLS = "memcheck", "synccheck", "initcheck"


def run_calls(plain: bool) -> None:
    """All calls. ``plain``: without the stores that initcheck does not see: without TMA, and with zeros in the memory
    to which cuBLAS stores a product. So initcheck does not see a sum that is added to memory which nobody wrote."""
    import torch
    from triton.runtime.jit import JITFunction

    import kernel_calls
    from parallel_lce.kernels import launch, product, selected

    if plain:
        launch.generation = selected.generation = product.generation = lambda *_: 8
        for multiply in (torch.mm, torch.addmm, torch.mv):
            setattr(torch, multiply.__name__, partial(_over_zeros, multiply))
    names, run = set(), JITFunction.run

    def noted(self, *arguments, **options):
        kernel = run(self, *arguments, **options)
        names.add(kernel.metadata.name)
        return kernel

    JITFunction.run = noted
    torch.manual_seed(0)
    os.environ["PARALLEL_LCE_BACKEND"] = "triton"
    for _, call in kernel_calls.every_call("cuda", [None]):
        call()
    torch.cuda.synchronize()
    if missing := kernel_calls.NAMES - names:
        sys.exit(f"did not run: {' '.join(sorted(missing))}")
    print("every kernel ran")


def _over_zeros(product, *arguments, out=None, **options):
    if out is None:
        out = product(*arguments, **options)
    if not any(each is out for each in arguments):
        out.zero_()
    return product(*arguments, out=out, **options)


def main() -> int:
    parser = argparse.ArgumentParser("./launch/sanitize.sh", description=__doc__)
    parser.add_argument("--run", choices=("calls", "plain"), help=argparse.SUPPRESS)
    if program := parser.parse_args().run:
        run_calls(program == "plain")
        return 0
    import torch

    if not torch.cuda.is_available() or not shutil.which("compute-sanitizer"):
        parser.error("needs a GPU, and compute-sanitizer of the CUDA toolkit in PATH")
    FOLDER.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_CACHE_DIR": str(FOLDER / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    subprocess.run([sys.executable, "-P", __file__, "--run", "calls"], env=environment, check=True)  # compiles
    failed = False
    for tool in TOOLS:
        command = ["timeout", "900", "compute-sanitizer", "--tool", tool, sys.executable, "-P", __file__]
        command += ["--run", "plain" if tool == "initcheck" else "calls"]
        with (FOLDER / f"{tool}.log").open("w") as log:
            subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        output = (FOLDER / f"{tool}.log").read_text(errors="replace")
        clean = re.search("^every kernel ran.*ERROR SUMMARY: 0 errors", output, re.M | re.S)
        print(f"{tool}: {'nothing' if clean else output}")
        failed |= not clean
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
