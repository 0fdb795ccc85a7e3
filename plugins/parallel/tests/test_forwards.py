"""Forwards with masks, positions, flags and dataclasses are cut into stages as they are."""

import forwards
import pytest
import torch
from tiers import slow

pytestmark = pytest.mark.timeout(170)


@pytest.mark.parametrize(
    "model", [slow("Language"), slow("Learned"), slow("Keeping"), "Masked", slow("OwnLoss"), slow("InPlace")]
)
def test_parity(world2, model):
    loss, val_loss, expected = forwards.trained("single_device", model)
    assert expected, val_loss
    first, last = world2.run(forwards.trained, "pipeline", model, timeout=100)
    for ours in (first, last):
        assert ours[:2] == pytest.approx((loss, val_loss), rel=1e-5), ours
    for name, value in first[2].items():
        torch.testing.assert_close(value, expected[name], rtol=2e-4, atol=2e-4)


def test_parity_in_mixed_precision(world2):
    loss, val_loss, _ = forwards.trained("single_device", "Masked", {"precision": "bf16-mixed"})
    for ours in world2.run(forwards.trained, "pipeline", "Masked", {"precision": "bf16-mixed"}, timeout=100):
        assert ours[:2] == pytest.approx((loss, val_loss), rel=2e-2), ours


REFUSED = [
    ("Caching", ["Cache", "'body.layers.0'", "use_cache=False"]),
    ("OnValues", ["OnValues", "can't be cut", "branch on their values"]),
    ("Backwards", ["'body.layers.3' in stage 0", "in the order in which they are registered"]),
]


@pytest.mark.parametrize("model, words", REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_unsplittable_forward_refused_early(world2, model, words):
    """What cannot be cut is refused before the first step."""
    for kind, message, steps in world2.run(forwards.trained, "pipeline", model, timeout=60):
        assert kind in ("ModelError", "ConfigurationError") and steps == 0
        for word in words:
            assert word in message
