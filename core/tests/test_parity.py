"""Data parallel training of five models is a plain loop's, to the bit."""

import parity_models
import pytest


@pytest.mark.parametrize("name", parity_models.MODELS)
def test_ddp_equals_a_plain_loop_to_the_bit(world2, name):
    parity_models.same(world2.run(parity_models.trained, name, "ddp"), parity_models.plain(name))
