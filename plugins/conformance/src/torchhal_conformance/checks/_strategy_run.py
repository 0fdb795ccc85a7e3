"""Train a small model under a strategy, and the same model in plain PyTorch in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from torchhal.errors import ConfigurationError, ModelError, UnsupportedCombinationError
from torchhal.strategies import Strategy
from torchhal_conformance._assertions import close, require
from torchhal_conformance._author_model import GLOBAL_BATCH, collate, create_model
from torchhal_conformance._check import NotApplicable
from torchhal_conformance._rank_context import RankContext

TOLERANCE = 2e-5
"""Of weights after a few steps, unless the strategy is lossy and declares its own."""

BATCH = GLOBAL_BATCH

SGD: Callable[..., Optimizer] = torch.optim.SGD


class Regression(nn.Module):
    """Model whose loss is a mean over samples, so that the mean of the ranks' losses is the joined batch's loss."""

    def __init__(self, seed: int = 0, *, unused: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        self.register_buffer("offset", torch.full((2,), float(seed)))
        if unused:
            self.never_used = nn.Linear(2, 2)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)


def make_model(rank: RankContext, seed: int = 0) -> Any:
    """Return the kit's small net, or the author's model, with the weights of ``seed``."""
    factory = rank.component.model
    if factory is None:
        return Regression(seed)
    model = create_model(factory, seed)
    rank.trained.add(type(model))
    return model


def batch(rank: RankContext, number: int) -> tuple[torch.Tensor, ...]:
    """Return the global batch of that number, the same on every rank: the kit's random one, or of the author's data."""
    if rank.dataset is not None:
        return collate(rank.dataset, number, BATCH)
    return rank.random(BATCH, 6, seed=2 * number), rank.random(BATCH, 2, seed=2 * number + 1)


def share(strategy: Strategy, data: Any) -> Any:
    """Return this rank's share of a global batch, on its device."""
    kwargs = strategy.distributed_sampler_kwargs
    if kwargs is not None:
        rows = slice(kwargs["rank"], None, kwargs["num_replicas"])
        data = tuple(tensor[rows] for tensor in data)
    return strategy.batch_to_device(data)


def require_several_ranks(rank: RankContext) -> None:
    """Raise NotApplicable where the strategy trains in one process."""
    if rank.size == 1:
        raise NotApplicable("there is one rank")


@dataclass
class Refusal:
    """Error with which every rank refuses something; ``reason`` is empty where none does."""

    reason: str = ""


@contextlib.contextmanager
def refused_alike(
    rank: RankContext, what: str, errors: type[Exception] | tuple[type[Exception], ...] = Exception
) -> Iterator[Refusal]:
    """Yield what becomes the refusal of this block, which is an error of the check unless all ranks agree.

    Args:
        rank: of this process; every rank has to come here.
        what: is refused, for the message.
        errors: classes of a refusal.
    """
    refusal = Refusal()
    try:
        yield refusal
    except errors as error:
        refusal.reason = f"{type(error).__name__}: {error}"
    told = rank.gather(refusal.reason)
    require(all(told) or not any(told), f"some ranks refused {what}, others didn't: {told}")


def require_steps_of_the_loop(rank: RankContext) -> None:
    """Raise NotApplicable where the strategy does the step itself; the SYS checks cover it."""
    owned = sorted(name for name in rank.component.declared if name.startswith("owns_"))
    if set(owned) & {"owns_step", "owns_backward", "owns_accumulation"}:
        raise NotApplicable(f"the strategy does the step itself ({', '.join(owned)})")


def require_gradients(module: nn.Module) -> None:
    """Raise NotApplicable where a backward has left no gradients in the parameters."""
    if all(parameter.grad is None for parameter in module.parameters()):
        raise NotApplicable("the strategy keeps the gradients in a place of its own")


@contextlib.contextmanager
def clipping(rank: RankContext) -> Iterator[None]:
    """Raise NotApplicable where a strategy that clips in its own step refuses to clip, or to tell the norm."""
    try:
        yield
    except (ConfigurationError, UnsupportedCombinationError) as error:
        if "owns_clipping" not in rank.component.declared:
            raise
        raise NotApplicable(f"the strategy clips in its own step ('owns_clipping'): {error}") from error


def two_groups(parameters: Any, lr: float, **options: Any) -> Optimizer:
    """Return SGD with momentum over two parameter groups, the second of which has other options."""
    parameters = list(parameters)
    second = {"params": parameters[2:], "lr": lr / 2, "momentum": 0.5, "weight_decay": 0.01}
    return torch.optim.SGD([{"params": parameters[:2]}, second], lr=lr, momentum=0.9)


class StrategyRun:
    """A strategy with a model and an optimizer, driven as the Trainer's loop drives it."""

    def __init__(
        self, rank: RankContext, strategy: Strategy, model: Any = None, make: Any = SGD, **options: Any
    ) -> None:
        self.rank, self.strategy = rank, strategy
        self.module = make_model(rank) if model is None else model
        strategy.connect(self.module)
        strategy.setup_model()
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if trained:
            strategy.setup_optimizers([make(trained, **{"lr": 0.1, **options})])
        self.step = strategy.step_function("training_step")

    @property
    def optimizer(self) -> Optimizer:
        return self.strategy.optimizers[0]

    def train(self, first: int, last: int, clip: float | None = None) -> list[float]:
        """Make steps ``first`` to ``last`` - 1 and return the losses, averaged over the ranks."""
        losses = []
        for number in range(first, last):
            self.strategy.zero_grad(self.optimizer)
            loss = self.step(share(self.strategy, batch(self.rank, number)), number)
            self.strategy.backward(loss)
            if clip is not None:
                self.strategy.clip_gradients(self.optimizer, clip)
            self.strategy.optimizer_step(self.optimizer)
            losses.append(float(self.strategy.reduce(loss.detach(), "mean")))
        return losses

    @property
    def tolerance(self) -> float:
        """The tolerance of weights after a few steps."""
        return tolerance_of(self.strategy, "weights", TOLERANCE)

    def require_weights(self, what: str, expected: nn.Module, exact: float = TOLERANCE) -> None:
        """Fail unless the weights are those of ``expected`` within the strategy's tolerance, or ``exact``."""
        weights_close(what, self.weights(), expected, tolerance_of(self.strategy, "weights", exact))

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the whole state of the module; empty on ranks that write no checkpoints and have no values."""
        return values(self.strategy)


def values(strategy: Strategy) -> dict[str, torch.Tensor]:
    """Return ``strategy.module_state_dict()`` on the CPU, empty where it has no values; rank 0's must have values."""
    state: dict[str, torch.Tensor] = strategy.module_state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        require(not strategy.is_global_zero, "module_state_dict() has no values on rank 0, which saves them")
        return {}
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


@contextlib.contextmanager
def running(
    rank: RankContext,
    model: Any = None,
    make: Any = SGD,
    strategy: Strategy | None = None,
    *,
    may_refuse: bool = False,
    **options: Any,
) -> Iterator[StrategyRun]:
    """Yield a StrategyRun; raise NotApplicable for a strategy that does the step itself.

    With ``may_refuse`` also for one that refuses the model, such as one that steps by hand or has no layers of the
    names that the strategy was given, or the ranks.
    """
    require_steps_of_the_loop(rank)
    with contextlib.ExitStack() as stack:
        try:
            strategy = stack.enter_context(rank.set_up_strategy(strategy))
            run = StrategyRun(rank, strategy, model, make, **options)
        except (UnsupportedCombinationError, ModelError, ConfigurationError) as error:
            if not may_refuse:
                raise
            raise NotApplicable(f"the strategy refuses: {error}") from error
        yield run


def reference(
    rank: RankContext, steps: int, make: Any = SGD, clip: float | None = None, model: Any = None, **options: Any
) -> tuple[Any, list[float]]:
    """Train in plain torch, in one process on the joined batches; return the model and its losses."""
    model = make_model(rank) if model is None else model
    optimizer = make(model.parameters(), **{"lr": 0.1, **options})
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = model.training_step(batch(rank, number), number)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def tolerance_of(strategy: Strategy, name: str, exact: float) -> float:
    """Return the entry ``name`` of a lossy strategy's ``tolerances``; ``exact`` without one, and for others."""
    return float(strategy.tolerances.get(name, exact)) if "lossy" in strategy.features else exact


def weights_close(what: str, got: dict[str, torch.Tensor], expected: nn.Module, tolerance: float) -> None:
    """Fail unless what ``got`` has, where it has values, differs from ``expected`` by ``tolerance`` at most."""
    for name, tensor in expected.state_dict().items():
        if got:
            close(f"{what}: {name}", got[name], tensor, tolerance)
