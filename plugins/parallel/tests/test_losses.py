"""A loss that is no mean over samples is computed as in one process, or refused by name."""

import losses
import pytest
import torch
from tiers import slow

from torchhal_parallel.hybrid import HybridStrategy

pytestmark = pytest.mark.timeout(120)

REFUSED = ["Summed", "OverTokens", "Ratio", "Contrasting", "MadeInForward", "OverTokensOfLayers", "OverTokensOfState"]


def same(ours, theirs):
    assert not isinstance(ours, str), ours
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", REFUSED)
def test_dp_refuses_other_losses(model):
    """``dp`` refuses a loss that is no mean over samples."""
    kind, message, steps = losses.fitted("dp", model)
    assert (kind, steps) == ("ModelError", 0), message
    for words in (
        model,
        "for the 8 samples of a batch",
        "of 4, 4 samples",
        "'dp'",
        "no mean over samples",
        "devices=1",
    ):
        assert words in message


@pytest.mark.parametrize("model", ["Tagger", "SumAsMean", "TokensOfTheBatch", "Recurrent"])
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.filterwarnings("error:whether the loss")
def test_dp_mean_loss_matches_plain_loop(model, devices):
    """``dp`` trains a mean over samples as a plain loop does."""
    same(losses.fitted("dp", model, devices)[0], losses.in_a_plain_loop(model))


@pytest.mark.parametrize(
    "model, why",
    [
        ("WritesToOutputs", "the step writes to"),
        ("RecurrentState", "not one value for each sample"),
        ("Noisy", "random"),
    ],
)
def test_dp_tells_once_what_it_could_not_compare(model, why):
    with pytest.warns(UserWarning, match=f"the loss of {model} is a mean.*{why}") as found:
        assert losses.fitted("dp", model)[2] == 4
    assert len([each for each in found if "could not be tried" in str(each.message)]) == 1


REPLICAS = [("ddp", "world2", 2), ("zero3", "world2", 2), ("hybrid", "world4", 2)]


@pytest.mark.parametrize("strategy, world, replicas", [REPLICAS[0], slow(*REPLICAS[1]), REPLICAS[2]])
@pytest.mark.parametrize("model, whole", [("SumOfReplicas", "Summed"), ("TokensOfReplicas", "OverTokens")])
def test_the_recipes_for_ranks_with_other_samples(request, strategy, world, replicas, model, whole):
    expected = losses.in_a_plain_loop(whole)
    ranks = 4 if strategy == "hybrid" else 2
    run = request.getfixturevalue(world).run
    given = HybridStrategy(data=2, tensor=2) if strategy == "hybrid" else strategy
    same(run(losses.fitted, given, model, ranks, replicas, timeout=100)[0][0], expected)


@pytest.mark.parametrize("model", ["SumAsMean", slow("TokensOfTheBatch")])
def test_the_recipes_for_microbatches(world2, model):
    same(world2.run(losses.fitted, "pipeline", model, timeout=60)[0][0], losses.in_a_plain_loop(model))
