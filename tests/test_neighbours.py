"""The private interfaces of neighbours (neighbours.py) that no test of a door uses on the release."""

import pytest

import test_verl
import torchtitan_training
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
@on_ranks(1, path_of=lambda given: str(folder_of("verl", test_verl.RELEASE, others=test_verl.OTHERS)))
def test_verls_modules_hold_its_functions_by_these_names(member):
    names = neighbours.VERL_KERNEL, *neighbours.VERL_USERS
    kernel, *others = [test_verl.verls(name.removeprefix("verl.")) for name in names]
    assert kernel.linear_cross_entropy == kernel.LinearCrossEntropy.apply
    assert all(module.linear_cross_entropy is kernel.linear_cross_entropy for module in others)
    module, kind, name = neighbours.VERL_FSDP
    assert callable(getattr(getattr(test_verl.verls(module.removeprefix("verl.")), kind), name))
