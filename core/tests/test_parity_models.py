"""Data parallel training of five models is a plain loop's, to the bit."""

import parity_models
import pytest
import torch


@pytest.mark.parametrize("name", parity_models.MODELS)
def test_ddp_equals_a_plain_loop_to_the_bit(world2, name):
    parity_models.same(world2.run(parity_models.trained, name, "ddp"), parity_models.plain(name))


def test_sparse_gradients_that_share_memory_with_others(world2):
    """DistributedDataParallel alone halves the layer's gradient a second time (torch 2.13)."""
    results = world2.run(parity_models.trained, "sparsesum", "ddp")
    parity_models.same(results, parity_models.plain("sparsesum"), torch.allclose)
