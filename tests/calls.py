"""A good call of every public function; tests change one thing."""

from collections.abc import Callable

import parallel_lce
from cases import make
from parallel_lce import rl
from parallel_lce.distillation import divergence, top_k_divergence
from world import Member

N, V, D = 6, 10, 4
"""Tokens, vocabulary rows of a rank, hidden size."""


def good(device="cpu") -> dict:
    """The arguments of a call for one shard."""
    t = make(N, V, D, sharpness=D**0.5, device=device)
    return dict(input=t.x, linear_weight=t.weight, target=t.target)


def call(arguments: dict, function=parallel_lce.linear_cross_entropy):
    arguments = dict(arguments)
    positional = [arguments.pop(name) for name in ("input", "linear_weight", "target")]
    return function(*positional, **arguments)


def calls(member: Member) -> dict[str, tuple[Callable, dict]]:
    """Functions and modules by name, each with its arguments, of a shard of V rows on each rank."""
    x, w, y = good(member.device).values()
    w = w + member.rank  # debug mode refuses equal shards
    where, k, start = dict(process_group=member.group), y[:, None], member.rank * V
    layer, student = dict(input=x, linear_weight=w), dict(student_hidden=x, student_weight=w)
    range_ = dict(target=y, vocab_start_index=start, vocab_end_index=start + V, tp_group=member.group)
    logits = dict(vocab_parallel_logits=x @ w.t(), target=y, tp_group=member.group)
    nemo = dict(tensor_parallel_hidden_states=x[:, None], output_weight_layer=w, runtime_gather_output=None)
    nemo |= range_ | dict(target=y.repeat(member.ranks)[None])
    stored = dict(teacher_ids=k, teacher_log_probs=-x[:, :1].abs())
    return {
        "loss": (parallel_lce.linear_cross_entropy, layer | where | dict(target=y)),
        "statistics": (parallel_lce.token_statistics, layer | where | dict(target=y)),
        "token loss": (parallel_lce.token_loss, layer | where | dict(target=y, loss=lambda found: -found.lse)),
        "selected": (parallel_lce.selected_log_probs, layer | where | dict(selected=k)),
        "module": (parallel_lce.LinearCrossEntropy(**where), layer | dict(target=y)),
        "divergence": (divergence, student | where | dict(teacher_hidden=2 * x, teacher_weight=w)),
        "top_k": (top_k_divergence, student | where | stored),
        "logits": (parallel_lce.vocab_parallel_cross_entropy, logits),
        "verl": (rl.linear_cross_entropy, dict(hidden=x, weight=w, labels=y, dist_process_group=member.group)),
        "skyrl": (rl.FusedLinearLogprobTriton.apply, dict(hidden=x, weight=w, chunk_size=None) | range_),
        "nemo": (rl.from_parallel_hidden_states_to_logprobs, nemo),
    }
