"""What a run needs of the host that it is started on, checked before its processes start."""

from pathlib import Path

from training.config import Config, Device, check_for_cpu
from training.refusal import Refusal, check_folder
from training.torchrun import processes_of


def check_host(config: Config, torchrun: list[str]) -> None:
    """Raises a Refusal if `torchrun`, its arguments, starts other processes than `config` describes, if this host has
    not the GPUs for them, or if the results have no place."""
    here = config.parallel.processes
    if torchrun:
        nodes, here = processes_of(torchrun)
        check_processes(config, nodes * here)
    uses_cuda(config, here)
    for name, folder in (("output", config.output), ("text.cache", config.text.cache)):
        check_folder(name, folder)


def remove_results(folder: str) -> None:
    """Removes what a run will write anew: fewer ranks would leave fewer weights, and a run that fails none.

    Not config.yaml, which may be what the new run is started with.
    """
    for path in (Path(folder, "metrics.json"), *weights_in(folder)):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise Refusal(f"{path} cannot be removed: {error.strerror}") from None


def weights_in(folder: str | Path) -> list[Path]:
    """The files that a run's ranks left with `save_weights`."""
    return [path for path in Path(folder).glob("weights-*.pt") if path.stem.removeprefix("weights-").isdecimal()]


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
