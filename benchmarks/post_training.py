"""What post-training asks of the output layer, as losses.

Each returns the mean cross-entropy, made of log-probabilities, plus 0 times what else it computes. So everything has an
upstream gradient, takes its time, and leaves the answer that all peers must give. Only `replay` computes no
cross-entropy, and is not judged.
"""

import torch

from .problem import IGNORE_INDEX

SELECTED, REPLAYED = 64, 8  # entries of each token


def _statistics(budget, group, sequence_parallel, asked):
    from parallel_lce import token_statistics

    from .libraries import mean_of

    options = {"process_group": group, "sequence_parallel": sequence_parallel, "logits_budget": budget}

    def loss(x, weight, target):
        found = token_statistics(x, weight, target, **options, **asked(x, weight, target))
        assert found.target_log_prob is not None  # as it is with a target
        value = mean_of(-found.target_log_prob.where(target != IGNORE_INDEX, 0), target)
        for other in (found.entropy, found.selected_log_prob):
            if other is not None:
                value = value + 0 * other.sum()
        return value

    return loss


def log_probs(budget, group, sequence_parallel):
    return _statistics(budget, group, sequence_parallel, lambda *_: {})


def entropy(budget, group, sequence_parallel):
    return _statistics(budget, group, sequence_parallel, lambda *_: {"expected_logit": True})


def selected(budget, group, sequence_parallel):
    """Log-probabilities of 64 ids of each token."""
    return _statistics(budget, group, sequence_parallel, lambda x, w, y: {"selected": _ids(x, w, y, SELECTED, group)})


def masked(budget, group, sequence_parallel):
    """Half of the tokens count. Their number is known."""

    def asked(x, weight, target):
        return {"mask": torch.arange(len(target), device=x.device) % 2 == 0, "counted_tokens": -(-len(target) // 2)}

    return _statistics(budget, group, sequence_parallel, asked)


def replay(budget, group, sequence_parallel):
    """Log-probabilities among 8 kept ids of each token, as sets of their own."""
    from parallel_lce import selected_log_probs

    options = {"process_group": group, "sequence_parallel": sequence_parallel}

    def loss(x, weight, target):
        ids = _ids(x, weight, target, REPLAYED, group)
        offsets = torch.arange(len(target) + 1, device=x.device) * REPLAYED
        return selected_log_probs(x, weight, (ids.view(-1), offsets), **options).sum()

    return loss


def _ids(x, weight, target, count, group):
    """Ids `[N, count]`, the same in each call and on all ranks."""
    ranks = 1 if group is None else group.size()
    generator = torch.Generator(x.device).manual_seed(0)
    return torch.randint(len(weight) * ranks, (len(target), count), generator=generator, device=x.device)
