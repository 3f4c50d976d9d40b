"""Checks whether this host can train: the number of processes, the GPUs, the folders."""

from training.config import Config, Device, check_for_cpu
from training.refusal import Refusal, check_folder
from training.torchrun import processes_of


def check_host(config: Config, torchrun: list[str]) -> None:
    """Raises a Refusal for a run that cannot work, before its processes start.

    The number of processes that torchrun starts with the arguments `torchrun` must be that of the configuration, the
    host must have the GPUs for them, and the output and cache folders must be writable.
    """
    here = config.parallel.processes
    if torchrun:
        nodes, here = processes_of(torchrun)
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
    """Whether this host's `here` processes train on GPUs. Raises a Refusal if its devices cannot train this."""
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
