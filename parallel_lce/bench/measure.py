"""Time and memory of all peers on one set of inputs."""

import gc
import math
import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import torch

from .accuracy import Judge, Refused
from .memory import peak_memory
from .peers import FORWARD, FORWARD_BACKWARD, Peer

# A power-limited GPU is faster in its first tens of milliseconds than in training: of each reading, this much is
# not looked at, and this much is.
CUDA_WARM_UP, CUDA_SECONDS = 0.05, 0.15
CUDA_CALLS = 1000  # of one reading at most
CPU_SECONDS = 0.05  # a clock reading is of calls that take at least this long together


@dataclass
class Result:
    """One peer on one shape. `seconds`, `peak` and `gradients` are keyed by pass; empty where it was refused."""

    peer: Peer
    refused: str = ""
    errors: dict = field(default_factory=dict)  # relative, see accuracy.py; the bare products have none
    seconds: dict = field(default_factory=dict)  # a list, one per round
    peak: dict = field(default_factory=dict)  # bytes above the inputs
    gradients: dict = field(default_factory=dict)  # of these, dX and dW in the dtype of the inputs

    def has(self, kind):
        return not self.refused and kind in self.seconds

    def extra_bytes(self, kind):
        """Peak above the inputs and the gradients, in bytes."""
        return self.peak[kind] - self.gradients[kind]

    def speed_against(self, other, kind):
        """[time of `other` / time of this peer], one per round: both of the same round, so that a machine which
        slows down or has other work slows both."""
        return [b / a for a, b in zip(self.seconds[kind], other.seconds[kind])]


class Broken(RuntimeError):
    """A peer after which the device answers nothing any more."""


def measure(peers, inputs, passes, rounds, device, say=lambda text: None):
    """`(results, judge)`: each peer is checked, its memory measured, then all are timed round by round, A B C A B C.

    `peers` are `(Peer, loss function)`; `rounds` 0 checks alone; `say` is told what is going on.
    """
    say("float64 reference")
    judge = Judge(inputs, FORWARD_BACKWARD in passes)
    results, functions = [], {}
    for peer, loss in peers:
        say(f"checking {peer}")
        result = Result(peer)
        results.append(result)
        with failures_in(result, device):
            calls = bare_calls(inputs) if loss is None else passes_of(loss, inputs, peer.main_grad)
            functions[id(result)] = calls = {kind: calls[kind] for kind in passes if kind in peer.passes}
            poison(inputs)
            if loss is not None:
                result.errors = judge.check(calls, peer.main_grad)
            for kind in calls if rounds else ():
                if loss is None:
                    calls[kind]()  # a workspace that a library keeps from its first call on is not counted
                result.peak[kind], _ = peak_memory(calls[kind], device)
                result.gradients[kind] = gradient_bytes(inputs, peer) if kind == FORWARD_BACKWARD else 0
        if result.refused:
            say(f"{peer} {result.refused}")
            functions.pop(id(result), None)
        release(device)
    judge.forget()
    release(device)

    timed = [result for result in results if not result.refused]
    for result in timed if rounds else ():
        result.seconds = {kind: [] for kind in functions[id(result)]}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        gc.collect()
        for result in timed:
            with failures_in(result, device):
                for kind in result.seconds if not result.refused else ():
                    result.seconds[kind].append(clock(functions[id(result)][kind], device))
    functions.clear()
    release(device)
    return results, judge


def spread(values):
    """(median, min, max)."""
    return median(values), min(values), max(values)


class failures_in:
    """Whatever another library raises is a row of the table and no end of the run, but for a broken device."""

    def __init__(self, result, device):
        self.result, self.device = result, device

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if not isinstance(error, Exception):
            return False
        self.result.refused = str(error) if isinstance(error, Refused) else f"failed: {describe(error)}"
        self.result.errors = getattr(error, "errors", None) or self.result.errors
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as fatal:
                name = self.result.peer.name
                raise Broken(
                    f"{self.result.peer} {self.result.refused}, and the device answers nothing any more "
                    f"({describe(fatal)}): run again with --without {name}"
                ) from error
        return True


def describe(error):
    """'ValueError: first line of its message'."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def passes_of(loss, inputs, main_grad):
    """The two calls of a loss function. The gradients go where training has them, to `.grad` of leaf tensors, or to
    one `main_grad` for all calls; the leaves are new ones on the same storage, so that nothing else is accumulated
    from call to call."""
    x, weight, target = inputs.x, inputs.weight, inputs.target
    buffer = torch.zeros_like(weight, dtype=torch.float32) if main_grad else None

    def forward():
        with torch.no_grad():
            return loss(x, weight, target)

    def forward_backward():
        leaf_x, leaf_weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        if buffer is not None:
            leaf_weight.main_grad = buffer
        value = loss(leaf_x, leaf_weight, target)
        value.backward()
        return value.detach(), leaf_x.grad, leaf_weight.grad if buffer is None else buffer

    return {FORWARD: forward, FORWARD_BACKWARD: forward_backward}


def bare_calls(inputs):
    """The matrix products nobody can leave out, 6*N*V*D flops, with logits z standing in for their gradient."""
    x, weight = inputs.x, inputs.weight

    def forward():
        x @ weight.T  # not returned: z is what others may do without, no result

    def forward_backward():
        z = x @ weight.T
        return z @ weight, z.T @ x

    return {FORWARD: forward, FORWARD_BACKWARD: forward_backward}


def gradient_bytes(inputs, peer):
    """dX and dW in the dtype of the inputs; of a peer with main_grad, dX alone: dW exists before the call."""
    size = inputs.x.numel() + (0 if peer.main_grad else inputs.weight.numel())
    return size * inputs.x.element_size()


def poison(inputs):
    """NaN where an allocator may place the next dX and dW: values left there by the peer before would hide a gradient
    that is not written."""
    for like in (inputs.x, inputs.weight):
        torch.full_like(like, math.nan)


def clock(fn, device):
    """Seconds of one call. On CUDA the median of calls between events on the stream, after calls that are not looked
    at: the peer measured before may also have made the allocator give back what this one needs."""
    if device.type == "cpu":
        calls, elapsed, start = 0, 0.0, time.perf_counter()
        while elapsed < CPU_SECONDS:
            fn()
            calls += 1
            elapsed = time.perf_counter() - start
        return elapsed / calls
    (one,) = between_events(fn, 1, device)
    one = median(between_events(fn, calls_in(CUDA_WARM_UP, one), device))
    return median(between_events(fn, calls_in(CUDA_SECONDS, one), device))


def between_events(fn, calls, device, warm_up=0):
    """[seconds], one per call; all are queued before any is waited for, after `warm_up` calls more."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    torch.cuda.synchronize(device)
    for _ in range(warm_up):
        fn()
    events[0].record()
    for event in events[1:]:
        fn()
        event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]


def calls_in(seconds, one):
    return min(CUDA_CALLS, max(1, math.ceil(seconds / max(one, 1e-6))))


def release(device):
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
