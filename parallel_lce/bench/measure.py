"""Time and memory of all peers on one set of inputs."""

import gc
import time
from dataclasses import dataclass, field
from statistics import median

import torch

from .accuracy import Judge, Refused
from .memory import peak_memory
from .peers import Peer

FORWARD, FORWARD_BACKWARD = "forward", "forward_backward"
PASSES = (FORWARD, FORWARD_BACKWARD)  # without gradients, as in evaluation; with dX and dW, as in training
CUDA_CALLS = 3  # timed together, so that the GPU's queue does not run empty
CPU_SECONDS = 0.05  # a clock reading is of calls that take at least this long together


@dataclass
class Result:
    """One peer on one shape. `seconds`, `peak` and `alive` are keyed by PASSES; empty where it was refused."""

    peer: Peer
    refused: str = ""
    errors: dict = field(default_factory=dict)  # relative, see accuracy.py; the bare products have none
    seconds: dict = field(default_factory=dict)  # a list, one per round
    peak: dict = field(default_factory=dict)  # bytes above the inputs
    alive: dict = field(default_factory=dict)  # of these, bytes that are results

    def extra_bytes(self, kind):
        """Peak above the inputs and the results, in bytes."""
        return self.peak[kind] - self.alive[kind]

    def speed_against(self, other, kind):
        """[time of `other` / time of this peer], one per round: both of the same round, so that a machine which
        slows down or has other work slows both."""
        return [b / a for a, b in zip(self.seconds[kind], other.seconds[kind])]


def measure(peers, inputs, rounds, device, say=lambda text: None):
    """`(results, judge's limits, torch's errors)`: each peer is checked, its memory measured, then all are timed
    round by round, A B C A B C. `peers` are `(Peer, loss function)`; `say` is told what is going on."""
    say("float64 reference")
    judge = Judge(inputs)
    results, passes = [], {}
    for peer, loss in peers:
        say(f"checking {peer}")
        result = Result(peer)
        results.append(result)
        passes[id(result)] = calls = _bare(inputs) if loss is None else _passes(loss, inputs)
        try:
            if loss is not None:
                result.errors = judge.check(calls[FORWARD], calls[FORWARD_BACKWARD])
            for kind in PASSES:
                result.peak[kind], result.alive[kind] = peak_memory(calls[kind], device)
        except Refused as why:
            result.refused = str(why)
        except Exception as error:  # another library's trouble with this shape or dtype is a row, not an end
            result.refused = f"failed: {type(error).__name__}: {_first_line(error)}"
        if result.refused:
            say(f"{peer} {result.refused}")
        _release(device)
    limits, yardstick = judge.limits, judge.yardstick
    del judge  # and its float64 gradients, before anything is timed
    _release(device)

    timed = [result for result in results if not result.refused]
    for result in timed:
        result.seconds = {kind: [] for kind in PASSES}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        gc.collect()
        for result in timed:
            for kind in PASSES:
                result.seconds[kind].append(_clock(passes[id(result)][kind], device))
    return results, limits, yardstick


def spread(values):
    """(median, min, max)."""
    return median(values), min(values), max(values)


def _passes(loss, inputs):
    """The two calls of a loss function. The gradients go where training has them, to `.grad` of leaf tensors; the
    leaves are new ones on the same storage, so that nothing is accumulated from call to call."""
    x, weight, target = inputs.x, inputs.weight, inputs.target

    def forward():
        with torch.no_grad():
            return loss(x, weight, target)

    def forward_backward():
        leaf_x, leaf_weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        value = loss(leaf_x, leaf_weight, target)
        value.backward()
        return value.detach(), leaf_x.grad, leaf_weight.grad

    return {FORWARD: forward, FORWARD_BACKWARD: forward_backward}


def _bare(inputs):
    """The matrix products nobody can leave out, 6*N*V*D flops, with logits z standing in for their gradient."""
    x, weight = inputs.x, inputs.weight

    def forward():
        x @ weight.T  # not returned: z is what others may do without, no result

    def forward_backward():
        z = x @ weight.T
        return z @ weight, z.T @ x

    return {FORWARD: forward, FORWARD_BACKWARD: forward_backward}


def _clock(fn, device):
    """Seconds of one call. On CUDA between two events on the stream, after one call that is not timed: the peer
    measured before may have made the allocator give back what this one needs."""
    if device.type == "cpu":
        calls, elapsed, start = 0, 0.0, time.perf_counter()
        while elapsed < CPU_SECONDS:
            fn()
            calls += 1
            elapsed = time.perf_counter() - start
        return elapsed / calls
    fn()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(CUDA_CALLS):
        fn()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3 / CUDA_CALLS


def _release(device):
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _first_line(error):
    return (str(error).strip().splitlines() or [""])[0][:160]
