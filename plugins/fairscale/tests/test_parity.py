"""What fairscale's strategies train is what a plain loop trains, to the bit."""

import parity_models
import pytest

pytestmark = pytest.mark.usefixtures("fairscale")


@pytest.mark.parametrize("strategy", ["fairscale_oss", "fairscale_sdp"])
@pytest.mark.parametrize("name", parity_models.MODELS)
def test_equals_a_plain_loop_to_the_bit(world2, strategy, name):
    parity_models.same(world2.run(parity_models.trained, name, strategy), parity_models.plain(name))
