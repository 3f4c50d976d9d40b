from types import SimpleNamespace


def forward_with_triton_backend(model, input_ids, temperature, shift_labels, return_dict, **others):
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    hidden = model.model(input_ids=input_ids)[0]
    log_probs, entropy = linear_cross_entropy(hidden, model.lm_head.weight, shift_labels, temperature, "none")
    return SimpleNamespace(log_probs=log_probs, entropy=entropy)
