"""Real process groups for tests: one set of processes per size, kept for the whole session."""

import functools
import gc
import os
import queue
import sys
import tempfile
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel_lce import backends

TIMEOUT = 120.0
_START = 120.0  # seconds in which processes start
# The whole run's, not that of the test that happens to need a world first.
_BACKEND = os.environ.get(backends.VARIABLE, "")
# Of up to seconds each. Processes are forked from one that has those that this process has imported.
_SLOW_IMPORTS = ("torch", "torch._inductor.config", "megatron.core", "parallel_lce.features.filter.gradient")


@dataclass(frozen=True)
class Member:
    rank: int
    ranks: int
    device: torch.device
    group: dist.ProcessGroup


# A job without an answer, once all ranks have answered: another rank may still be connecting a group.
_TIDY_UP = "tidy up"


def _serve(rank: int, ranks: int, device_type: str, store: str, path: str | None, chosen: str, jobs, results) -> None:
    os.environ[backends.VARIABLE] = chosen
    if path is not None:
        sys.path[:0] = path.split(os.pathsep)
    # CUDA asks for this before its first use if cuBLAS is to be deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)
    configure()
    device, backend = torch.device("cpu"), "gloo"
    if device_type == "cuda":
        gpus = torch.cuda.device_count()
        # NCCL refuses two ranks on one GPU.
        device, backend = torch.device("cuda", rank % gpus), "nccl" if ranks <= gpus else "gloo"
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT)
    )
    member = Member(rank, ranks, device, dist.group.WORLD)
    while (job := jobs.get()) is not None:
        if job == _TIDY_UP:
            _destroy_subgroups()
            # Models refer to themselves, and to their groups. What was imported is not looked at again.
            gc.collect()
            gc.freeze()
            continue
        body, arguments = job
        try:
            answer = True, body(member, *arguments)
        except BaseException:  # pytest.raises fails with one that is no Exception
            answer = False, traceback.format_exc()
        results.put(answer)
    dist.destroy_process_group()


_OF_MESHES: list[dist.ProcessGroup] = []


@functools.cache
def mesh_of(device_type: str, shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh over all ranks, made once for each process. DTensor's caches keep the names of its groups for ever."""
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    _OF_MESHES.extend(mesh.get_all_groups())
    return mesh


def _destroy_subgroups() -> None:
    """Those that a test made: each keeps threads of its own awake, megatron-core alone makes dozens."""
    _forget_megatrons()
    kept = {dist.group.WORLD, *_OF_MESHES}
    groups = [group for group in distributed_c10d._world.pg_map if group not in kept]
    while groups:
        dist.destroy_process_group(groups.pop())


def _forget_megatrons() -> None:
    """megatron-core's globals and caches, which hold groups; and what :func:`parallel_lce.megatron.patch` replaces."""
    if switch := sys.modules.get("parallel_lce.megatron"):
        switch.unpatch()
    if state := sys.modules.get("megatron.core.parallel_state"):
        state.destroy_model_parallel()
        for name, value in vars(state).items():  # those that it leaves
            if isinstance(value, dist.ProcessGroup):
                setattr(state, name, None)
    if rotary := sys.modules.get("megatron.core.models.common.embeddings.rotary_pos_embedding"):
        for method in (rotary.RotaryEmbedding.forward, rotary.RotaryEmbedding.get_cos_sin):
            getattr(method, "cache_clear", lambda: None)()  # some releases cache them, by module


def configure() -> None:
    """What every test process sets: memory of ``torch.empty`` is NaN, so that reading it shows. The smallest slices are
    filtered, too. And the plain mainloop on Hopper, if that is asked for."""
    gc.set_threshold(50_000)  # interpreted kernels make many objects, and few that refer to themselves
    gc.freeze()
    gc.unfreeze = lambda: None  # a benchmark would
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    if backends._triton_installed():
        from parallel_lce.features.filter import gradient

        gradient.SMALLEST_FILTERED = 0
    if os.environ.get("PARALLEL_LCE_TEST_MAINLOOP") == "plain":
        from parallel_lce.kernels import product

        product._has_gluon = lambda: False


def forkserver():
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([name for name in _SLOW_IMPORTS if name in sys.modules])
    return context


def launched(ranks: int, program, *arguments, timeout: float = TIMEOUT, device: str = "cpu") -> str:
    """What ``program(*arguments)`` prints on rank 0 of so many processes that find themselves started by torchrun.
    Raises ``AssertionError`` with what a rank prints that fails."""
    context = forkserver() if device == "cpu" else mp.get_context("spawn")  # see World
    # As torchrun's: a free port that a rank opened might be taken by then.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, str(rank)) for rank in range(ranks)]
        given = [(rank, ranks, store.port, files[rank], program, arguments) for rank in range(ranks)]
        processes = [context.Process(target=_launch, args=each, daemon=True) for each in given]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
            process.kill()
            process.join()
        said = [Path(file).read_text() for file in files]
    for rank, process in enumerate(processes):
        assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}:\n{said[rank][-3000:]}"
    return said[0]


def _launch(rank: int, ranks: int, port: int, file: str, program, arguments: tuple) -> None:
    variables = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_PORT=port)
    os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    torch.set_num_threads(1)
    gc.freeze()
    with open(file, "w") as out, redirect_stdout(out), redirect_stderr(out):
        try:
            program(*arguments)
        except BaseException:
            traceback.print_exc()
            raise


def forget(*packages: str) -> None:
    """This process imports them anew, as a new one would."""
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


class World:
    """``ranks`` processes with a default group over gloo, or over NCCL on as many GPUs. ``path``: a folder, or several
    joined by ``os.pathsep``, that they import from before any other."""

    def __init__(self, ranks: int, device_type: str = "cpu", path: str | None = None) -> None:
        # A forked process can use neither CUDA nor another release of what it has imported.
        tops = {name.partition(".")[0] for name in _SLOW_IMPORTS}
        imported = any(Path(folder, top).exists() for folder in (path or "").split(os.pathsep) for top in tops)
        fresh = device_type == "cuda" or path is not None and imported
        context = mp.get_context("spawn") if fresh else forkserver()
        self._folder = tempfile.TemporaryDirectory()
        self._jobs = [context.Queue() for _ in range(ranks)]
        self._results = [context.Queue() for _ in range(ranks)]
        store = os.path.join(self._folder.name, "store")
        self._processes = []
        for rank, queues in enumerate(zip(self._jobs, self._results)):
            given = rank, ranks, device_type, store, path, _BACKEND, *queues
            self._processes.append(context.Process(target=_serve, args=given, daemon=True))
            self._processes[-1].start()
        self._answered = False

    def run(self, body, *arguments, timeout: float = TIMEOUT) -> list:
        """``body(member, *arguments)`` on every rank; the results in rank order. Raises ``AssertionError`` with the
        traceback of the first rank that failed. A rank that does not answer in time ends the world."""
        timeout += 0 if self._answered else _START
        for jobs in self._jobs:
            jobs.put((body, arguments))
        answers, silent = {}, []
        for rank, results in enumerate(self._results):
            try:
                answers[rank] = results.get(timeout=timeout if not silent else 0.1)
            except queue.Empty:
                silent.append(rank)
        for jobs in self._jobs:
            jobs.put(_TIDY_UP)
        failed = {r: text for r, (good, text) in answers.items() if not good}
        if silent:
            self.close(kill=True)
        self._answered = True
        if failed or silent:
            lines = [f"ranks {silent} hang, or died: no answer in {timeout} s"] * bool(silent)
            lines += [f"ranks {[*failed]} failed; rank {r}:\n{text}" for r, text in [*failed.items()][:1]]
            raise AssertionError("\n".join(lines))
        return [answers[rank][1] for rank in range(len(answers))]

    @property
    def alive(self) -> bool:
        return all(p.is_alive() for p in self._processes)

    def close(self, kill: bool = False) -> None:
        for jobs, process in zip(self._jobs, self._processes):
            process.kill() if kill else jobs.put(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()
