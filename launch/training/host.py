"""What a run needs of the host that it is started on, checked before its processes start."""

import contextlib
import io
import os
from pathlib import Path

from training.config import Config, Device, Refusal, check_for_cpu

TORCHRUN_SETS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started_by_torchrun() -> bool:
    """Whether torchrun started this process. Raises a Refusal if somebody set a part of what it sets."""
    if "LOCAL_RANK" not in os.environ:
        return False
    missing = [name for name in TORCHRUN_SETS if not os.environ.get(name)]
    if missing:
        raise Refusal(f"LOCAL_RANK is set as torchrun does, but not {', '.join(missing)}: unset it, or use torchrun")
    for name in set(TORCHRUN_SETS) - {"MASTER_ADDR"}:
        if not os.environ[name].isdecimal():
            raise Refusal(f"{name}={os.environ[name]!r} is no number: unset it, or use torchrun")
    return True


def check_host(config: Config, torchrun: list[str]) -> None:
    """Raises a Refusal if `torchrun`, its arguments, starts other processes than `config` describes, if this host has
    not the GPUs for them, or if the results have no place."""
    here = config.parallel.processes
    if torchrun:
        nodes, here = _started(torchrun)
        check_processes(config, nodes * here)
    uses_cuda(config, here)
    for name, folder in (("output", config.output), ("text.cache", config.text.cache)):
        check_folder(name, folder)


def check_processes(config: Config, started: int) -> None:
    parallel = config.parallel
    if started != parallel.processes:
        sizes = f"parallel.tensor={parallel.tensor} * pipeline={parallel.pipeline} * data={parallel.data}"
        raise Refusal(f"{sizes} needs {parallel.processes} processes, torchrun started {started}")


def uses_cuda(config: Config, here: int) -> bool:
    """Whether this host's `here` processes train on GPUs. Raises a Refusal for what its devices cannot do."""
    device = config.parallel.device
    if device is Device.cpu:
        return False
    import torch  # it loads for seconds

    gpus = torch.cuda.device_count()
    if device is Device.cuda and gpus < here:
        raise Refusal(f"parallel.device=cuda needs a GPU for each of this host's {here} processes, found {gpus}")
    if gpus < here:
        check_for_cpu(config)
    return gpus >= here


def check_folder(name: str, folder: str) -> None:
    """Makes the folder. Raises a Refusal if that is impossible."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise Refusal(f"{name}={folder} cannot be made a folder: {getattr(error, 'strerror', None) or error}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Refusal(f"{name}={folder} is a folder that cannot be written to")


def _started(torchrun: list[str]) -> tuple[int, int]:
    """The nodes, and the processes on each, that torchrun starts with these arguments."""
    from torch.distributed import run

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            # torchrun's parser wants a program behind its own arguments.
            arguments = run.get_args_parser().parse_args([*torchrun, "train.py"])
        nodes = run.parse_min_max_nnodes(arguments.nnodes)[1]
        return nodes, run.determine_local_world_size(arguments.nproc_per_node)
    except SystemExit:
        raise Refusal(f"torchrun: {(said.getvalue().splitlines() or ['--help'])[-1]}") from None
    except (RuntimeError, ValueError) as error:
        raise Refusal(f"torchrun: {error}") from None
