"""What engines can't train, by property: nothing for a model that fits, else an error of the class and words given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchhal.errors import ModelError, UnsupportedCombinationError
from torchhal.strategies.model_checks import (
    check_automatic_optimization,
    check_dense_gradients,
    check_disjoint_optimizers,
    check_disjoint_storage,
    check_metric_schedulers,
    check_no_closure,
    check_none_ignored,
    check_one_optimizer,
    check_optimized_parameters,
)

WHY = "acme sums in order"


class Net(nn.Module):
    """Ten parameters, of which two are frozen, and words."""

    def __init__(self, *, sparse: bool = False, automatic: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.words = nn.Embedding(4, 2, sparse=sparse)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def test_a_model_that_fits() -> None:
    module = Net()
    optimizer = sgd(module.words)
    check_automatic_optimization(module, WHY)
    check_automatic_optimization(nn.Linear(1, 1), WHY)
    check_one_optimizer(module, [optimizer], WHY)
    check_no_closure(optimizer, WHY)
    check_dense_gradients(module, WHY)
    check_disjoint_optimizers(module, [optimizer, sgd(module.frozen)], WHY)
    check_disjoint_storage(module, WHY)
    check_optimized_parameters(module, [optimizer], WHY)
    check_none_ignored(module, [optimizer], ["frozen.weight"], WHY)
    check_metric_schedulers([SimpleNamespace(reduce_on_plateau=False)], WHY, "each rank", "leave it out")


def test_each_property_has_its_message() -> None:
    module = Net(sparse=True, automatic=False)
    cases = [
        (lambda: check_automatic_optimization(module, WHY), "Net has automatic_optimization=False: use automatic opti"),
        (lambda: check_one_optimizer(module, [], WHY), "Net.configure_optimizers returned 0: put the parameters into"),
        (lambda: check_one_optimizer(module, [sgd(module)] * 2, WHY, "do"), "Net.configure_optimizers returned 2: do"),
        (
            lambda: check_no_closure(torch.optim.LBFGS(module.parameters()), WHY),
            "LBFGS evaluates the model within a step: use an optimizer that needs no closure",
        ),
        (lambda: check_dense_gradients(module, WHY), "'words' has sparse=True: set it to False"),
        (lambda: check_dense_gradients(module.words, WHY), "'Embedding' has sparse=True: set it to False"),
        (
            lambda: check_optimized_parameters(module, [sgd(module.frozen)], WHY),
            "the optimizer of Net hasn't got 'words.weight': add them, or freeze them with requires_grad_(False)",
        ),
        (
            lambda: check_metric_schedulers(
                [SimpleNamespace(reduce_on_plateau=True, scheduler=1)], WHY, "each rank", "x"
            ),
            "int goes by a metric that each rank has its own of: x",
        ),
    ]
    for check, words in cases:
        with pytest.raises(ModelError) as caught:
            check()
        assert str(caught.value).startswith(f"{WHY}, and {words}")


def test_the_class_of_the_error_is_the_callers() -> None:
    with pytest.raises(UnsupportedCombinationError):
        check_one_optimizer(Net(), [], WHY, error=UnsupportedCombinationError)


class Views(nn.Module):
    """Two parameters in one memory: ``apart`` rows of it, or overlapping."""

    def __init__(self, *, overlap: bool) -> None:
        super().__init__()
        memory = torch.zeros(4, 3)
        self.first = nn.Parameter(memory[: 3 if overlap else 2])
        self.second = nn.Parameter(memory[2:])


def test_one_memory_for_two_parameters() -> None:
    check_disjoint_storage(Views(overlap=False), WHY)
    with pytest.raises(ModelError, match="'first' and 'second' are views of the same memory: make them parameters"):
        check_disjoint_storage(Views(overlap=True), WHY)
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    check_disjoint_storage(tied, WHY)  # one parameter in two places
    check_disjoint_storage(nn.Linear(2, 2, device="meta"), WHY)
    columns = nn.Module()
    columns.left, columns.right = map(nn.Parameter, torch.zeros(2, 4).split(2, 1))
    with pytest.raises(ModelError, match="views of the same memory"):
        check_disjoint_storage(columns, WHY)  # their elements alternate, and their extents overlap


def test_one_parameter_of_two_optimizers() -> None:
    module = Net()
    optimizers = [sgd(module), sgd(module.words)]
    with pytest.raises(ModelError, match=r"two optimizers of Net have 'words.weight': give each parameter to one"):
        check_disjoint_optimizers(module, optimizers, WHY)


def test_a_parameter_that_each_rank_trains_by_itself() -> None:
    module = Net()
    with pytest.raises(ModelError) as caught:
        check_none_ignored(module, [sgd(module.words)], ["words.weight", "frozen.bias"], WHY)
    assert str(caught.value) == (
        f"{WHY}, and each rank is to train 'words.weight' of Net by itself, as DistributedDataParallel was told "
        "(_set_params_and_buffers_to_ignore_for_model): take it out of the optimizer, or use strategy='ddp'"
    )
    module.again = module.words  # the list may have the other name of a tied parameter
    with pytest.raises(ModelError, match=r"'again.weight' of Net"):
        check_none_ignored(module, [sgd(module.words)], ["again.weight"], WHY)
