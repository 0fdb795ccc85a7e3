"""What Colossal-AI trains is what a plain loop does, to the bit."""

import parity_models
import pytest

ALIASES = ("colossalai", "colossalai_zero1", "colossalai_zero2")

pytestmark = pytest.mark.usefixtures("colossalai")


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("name", parity_models.MODELS)
def test_equals_a_plain_loop_to_the_bit(world2, name, alias):
    parity_models.same(world2.run(parity_models.trained, name, alias), parity_models.plain(name))
