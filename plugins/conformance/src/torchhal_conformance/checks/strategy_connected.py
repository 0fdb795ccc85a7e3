"""STR-67: a model that the precision's connect() has wrapped or replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchhal.errors import ConfigurationError, TorchhalError
from torchhal.precision import SinglePrecision
from torchhal_conformance._assertions import raises, require
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_run import Regression, batch, reference, refused_alike, running


class _Around(nn.Module):
    """A vendor's wrapper, whose forward is the model's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner, self.calls = model, 0

    def forward(self, *args: Any) -> Any:
        self.calls += 1
        return self.inner(*args)


class _InPlace(nn.Module):
    """A vendor's model, which shares the parameters of the user's and has its step."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.body, self.calls = model.body, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls += 1
        return nn.functional.mse_loss(self(batch[0]), batch[1])


class _Connects(SinglePrecision):
    """A precision whose library needs the model."""

    def __init__(self, make: Any) -> None:
        self.make = make
        self.made: Any = None

    def connect(
        self, model: Any = None, optimizers: Sequence[Any] = (), lr_schedulers: Sequence[Any] = ()
    ) -> tuple[Any, Sequence[Any], Sequence[Any]]:
        self.made = self.make(model)
        return self.made, optimizers, lr_schedulers


@check("STR-67", since="0.2", world_sizes=(1, 2), after=("STR-36", "STR-64"))
def connected_models(rank: RankContext) -> None:
    """A training step runs through the wrapper that the precision's connect() returns, or is its replacement's.

    So it is after layers were frozen, or that is an error on every rank. Something else is a ConfigurationError. A
    strategy whose own wrapper is the model may refuse a replacement. A module that is connected afterwards is
    ``module`` and ``model``.

    Why: a vendor's library scales and overlaps in the forward of its wrapper, which no step went through.
    Fix: keep what connect() returns as ``model``; call the inherited setup_optimizers().
    """
    declared = rank.component.cls.precision_methods
    if declared is not None and "connect" not in declared:
        raise NotApplicable("it declares that it doesn't call the precision's connect()")
    _wrapped(rank)
    _replaced(rank)
    strategy = rank.create_strategy(precision=_Connects(lambda model: nn.Linear(1, 1)))
    with rank.set_up_strategy(strategy):
        module = Regression()
        strategy.connect(module)
        strategy.setup_model()
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]
        told = "a connect() that returns another model, without steps,"
        raises(told, ConfigurationError, lambda: strategy.setup_optimizers(optimizers))
        rank.gather("refused")
    _connected_again(rank)


def _wrapped(rank: RankContext) -> None:
    precision = _Connects(_Around)
    with running(rank, Regression(), strategy=rank.create_strategy(precision=precision)) as run:
        if precision.made is None:
            raise NotApplicable("it doesn't call the precision's connect()")
        wrapper: Any = precision.made
        run.train(0, 1)
        run.strategy.on_train_epoch_start()  # has nothing to do: the parameters are those of before
        run.train(1, 2)
        require(wrapper.calls == 2, f"{wrapper.calls} of 2 steps ran through the wrapper that connect() returned")
        run.require_weights("after two steps through a wrapper", reference(rank, 2, model=Regression())[0])
        run.module.body[0].requires_grad_(False)
        with refused_alike(rank, "a frozen layer under a wrapper", TorchhalError) as refusal:
            run.train(2, 3)
        if not refusal.reason:
            require(wrapper.calls == 3, "the step after a layer was frozen didn't run through the wrapper")
        rank.gather("done")
    require(run.strategy.model is run.module, "the model is still wrapped after teardown()")


def _replaced(rank: RankContext) -> None:
    precision = _Connects(_InPlace)
    strategy = rank.create_strategy(precision=precision)
    with rank.set_up_strategy(strategy):
        module = Regression()
        strategy.connect(module)
        strategy.setup_model()
        if strategy.model is not strategy.module:
            return
        strategy.setup_optimizers([torch.optim.SGD(module.parameters(), lr=0.1)])
        made: Any = precision.made
        loss = strategy.step_function("training_step")(strategy.batch_to_device(batch(rank, 0)), 0)
        strategy.backward(loss)
        require(made is not None and made.calls == 1, "a step is not that of the model that connect() returned")
        require(strategy.module is made, "module is not the model that connect() returned in its place")


def _connected_again(rank: RankContext) -> None:
    strategy = rank.create_strategy(precision=_Connects(_Around))
    with rank.set_up_strategy(strategy):
        for module in (Regression(), Regression(1)):
            strategy.connect(module)
            require(strategy.module is module, "module is not the one that was connected last")
            require(strategy.model is module, "model is not the module that was connected last")
            told = "model_is_connected is true before connect() of the precision was called with the module"
            require(not strategy.model_is_connected, told)
            strategy.setup_model()
            strategy.setup_optimizers([torch.optim.SGD(module.parameters(), lr=0.1)])
        rank.gather("connected")
