import torch


def expand_as_nested(tensor, nested):
    offsets = nested.offsets()
    return torch.nested.nested_tensor_from_jagged(tensor.repeat_interleave(offsets.diff()), offsets)
