"""Horovod's averages are a plain loop's, to the bit."""

import parity_models
import pytest

pytestmark = pytest.mark.usefixtures("horovod")


@pytest.mark.parametrize("name", parity_models.MODELS)
def test_equals_a_plain_loop_to_the_bit(world2, name):
    parity_models.same(world2.run(parity_models.trained, name, "horovod"), parity_models.plain(name))
