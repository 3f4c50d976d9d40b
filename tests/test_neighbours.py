"""The private interfaces of neighbours that the doors use (neighbours.py) do what the doors use them for."""

import importlib

import pytest
import torch
from megatron.core.tensor_parallel import mappings

import megatron_models
import test_verl
import torchtitan_training
import transformers_models
from parallel_lce import neighbours
from parallel_lce.patching import is_own
from releases import folder_of
from tools import on_ranks


@pytest.mark.slow
@on_ranks(2, path_of=lambda given: str(torchtitan_training.release()))
def test_torchtitans_forward_that_distributes_an_output_layer_is_known(member):
    from torchtitan.distributed import parallel_dims
    from torchtitan.models.common.decoder_sharding import colwise_config
    from torchtitan.models.common.linear import Linear

    lm_head = Linear.Config(in_features=4, out_features=6, sharding_config=colwise_config()).build()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_dims, "device_type", "cpu")
        lm_head.parallelize(parallel_dims.ParallelDims(1, 1, 1, 2, 1, 1, 2))  # sets a forward of the instance
    assert is_own(vars(lm_head)["forward"], neighbours.TORCHTITAN_DISTRIBUTED)


@pytest.mark.slow
@on_ranks(1, path_of=lambda given: transformers_models.site())
def test_losses_of_transformers_and_the_function_of_trl_are_known(member):
    from transformers.loss import loss_utils

    assert neighbours.is_causal_lm_loss(loss_utils.ForCausalLMLoss)
    assert not neighbours.is_causal_lm_loss(loss_utils.ForMaskedLMLoss)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_utils, "fixed_cross_entropy", lambda *given, **named: None)
        assert not neighbours.is_causal_lm_loss(loss_utils.ForCausalLMLoss)
    function = getattr(importlib.import_module(neighbours.TRL_USER), neighbours.TRL_FUNCTION)
    assert is_own(function.forward, neighbours.TRL_KERNEL) and is_own(function.backward, neighbours.TRL_KERNEL)


@pytest.mark.slow
@on_ranks(1, path_of=lambda given: str(folder_of("verl", test_verl.RELEASE, others=test_verl.OTHERS)))
def test_verls_modules_hold_its_functions_by_these_names(member):
    names = neighbours.VERL_KERNEL, *neighbours.VERL_USERS
    kernel, *others = [test_verl.verls(name.removeprefix("verl.")) for name in names]
    assert kernel.linear_cross_entropy == kernel.LinearCrossEntropy.apply
    assert all(module.linear_cross_entropy is kernel.linear_cross_entropy for module in others)
    module, kind, name = neighbours.VERL_FSDP
    assert callable(getattr(getattr(test_verl.verls(module.removeprefix("verl.")), kind), name))


@on_ranks(2)
def test_the_mappings_that_sum_the_gradient_have_these_names(member):
    megatron_models.build(member, megatron_models.Model(ranks=2), {})
    summing = mappings.gather_from_sequence_parallel_region, mappings.copy_to_tensor_model_parallel_region
    hidden = torch.ones(2, 3, requires_grad=True, device=member.device)
    names = [type(mapping(hidden).grad_fn).__name__ for mapping in summing]
    assert (*names,) == neighbours.VERL_SUMMED
