"""STR-13 to 26, 35, 41, 42, 47, 48: what several ranks train is what one process trains on the joined batch."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from torchhal.errors import CheckpointMismatchError, UnsupportedCombinationError
from torchhal.strategies import Strategy
from torchhal_conformance._assertions import close, raises, require, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._rank_context import RankContext

TOLERANCE = 2e-5
BATCH = 12
"""Samples of a global batch: divided by the ranks of both worlds."""


class Regression(nn.Module):
    """A body whose loss is a mean: the mean of the ranks' losses is the loss of the joined batch."""

    def __init__(self, seed: int = 0, *, unused: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
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


def batch(rank: RankContext, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of that number."""
    return rank.random(BATCH, 6, seed=2 * number), rank.random(BATCH, 2, seed=2 * number + 1)


def share(strategy: Strategy, data: Any) -> Any:
    """This rank's part of a global batch, on its device."""
    kwargs = strategy.distributed_sampler_kwargs
    if kwargs is not None:
        rows = slice(kwargs["rank"], None, kwargs["num_replicas"])
        data = tuple(tensor[rows] for tensor in data)
    return strategy.batch_to_device(data)


SGD: Callable[..., Optimizer] = torch.optim.SGD


class Run:
    """A strategy with a model and an optimizer, driven as the Trainer's loop drives it."""

    def __init__(
        self, rank: RankContext, strategy: Strategy, model: Any = None, make: Any = SGD, **options: Any
    ) -> None:
        self.rank, self.strategy = rank, strategy
        self.module = Regression() if model is None else model
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
        """Steps ``first`` to ``last`` - 1; the losses, averaged over the ranks."""
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

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole state of the module; nothing on ranks that don't write checkpoints and have no values then."""
        return values(self.strategy)


def values(strategy: Strategy) -> dict[str, torch.Tensor]:
    """``strategy.module_state_dict()`` on the host, where it has values; rank 0's must."""
    state: dict[str, torch.Tensor] = strategy.module_state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        require(not strategy.is_global_zero, "module_state_dict() has no values on rank 0, which saves them")
        return {}
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


@contextlib.contextmanager
def running(
    rank: RankContext, model: Any = None, make: Any = SGD, strategy: Strategy | None = None, **options: Any
) -> Iterator[Run]:
    """A Run; not for strategies that do the step themselves, which the Trainer's checks are for."""
    owned = sorted(name for name in rank.subject.declared if name.startswith("owns_"))
    if set(owned) & {"owns_step", "owns_backward", "owns_accumulation"}:
        raise NotApplicable(f"the strategy does the step itself ({', '.join(owned)})")
    with rank.joined(strategy) as strategy:
        yield Run(rank, strategy, model, make, **options)


def reference(
    rank: RankContext, steps: int, make: Any = SGD, clip: float | None = None, **options: Any
) -> tuple[Any, list[float]]:
    """The same in plain torch, in one process on the joined batches; the model and its losses."""
    model = Regression()
    optimizer = make(model.parameters(), **{"lr": 0.1, **options})
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = model.training_step(batch(rank, number), number)
        loss.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def like(what: str, got: dict[str, torch.Tensor], expected: nn.Module, tolerance: float = TOLERANCE) -> None:
    for name, tensor in expected.state_dict().items():
        if got:
            close(f"{what}: {name}", got[name], tensor, tolerance)


@check("STR-13", worlds=(2, 3))
def initial_weights(rank: RankContext) -> None:
    """Whatever weights and buffers the ranks came with, after the set-up all have those of rank 0.

    Why: without a broadcast every rank trains a model of its own, and the loss goes down all the same.
    Fix: broadcast parameters and buffers before wrapping.
    """
    with running(rank, Regression(rank.rank)) as run:
        like(f"rank {rank.rank} after the set-up, beside rank 0", run.weights(), Regression(0), 0.0)
        rank.gather("done")


@check("STR-14", worlds=(2, 3))
def averaged_gradient(rank: RankContext) -> None:
    """One step of plain SGD is the step on the joined batch: gradients are averaged, not added up.

    Why: a sum in place of a mean is a learning rate that grows with the number of devices.
    Fix: divide by the number of ranks, once.
    """
    with running(rank) as run:
        run.train(0, 1)
        like("after one step", run.weights(), reference(rank, 1)[0])


@check("STR-15", worlds=(2,))
def accumulation(rank: RankContext) -> None:
    """Micro-batches under no_backward_sync() add up to the step of one batch; while it is entered nothing is sent.

    Why: synchronizing each micro-batch costs what accumulating was to save, and some did it twice.
    Fix: return the wrapper's no_sync(), or None where there is nothing to switch off.
    """
    with running(rank) as run:
        strategy = run.strategy
        data = batch(rank, 0)
        strategy.zero_grad(run.optimizer)
        parts = [share(strategy, tuple(tensor[i : i + 4] for tensor in data)) for i in (0, 4, 8)]
        paused = strategy.no_backward_sync()
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            with contextlib.nullcontext() if paused is None or last else paused:
                strategy.backward(run.step(part, number) / len(parts))
            if number == 0 and paused is not None and rank.size > 1:
                gradients = [None if p.grad is None else p.grad.detach().cpu() for p in run.module.parameters()]
                first, *others = rank.gather(gradients)
                alike = all(
                    a is None or b is None or torch.equal(a, b)
                    for other in others
                    for a, b in zip(first, other, strict=True)
                )
                known = any(gradient is not None for gradient in first)
                require(
                    not (known and alike),
                    "gradients under no_backward_sync() are the same on all ranks: they were sent",
                )
        strategy.optimizer_step(run.optimizer)
        like("after three micro-batches", run.weights(), reference(rank, 1)[0])


@check("STR-16", worlds=(2,))
def optimizer_moves_weights(rank: RankContext) -> None:
    """An optimizer step changes the weights that the module, the wrapper and a checkpoint show.

    Why: an optimizer that holds the parameters from before the wrapping moves nothing.
    Fix: make or rebuild the optimizer over the wrapped module's parameters.
    """
    with running(rank) as run:
        before = run.weights()
        run.train(0, 1)
        after = run.weights()
        unmoved = [name for name in before if "offset" not in name and torch.equal(before[name], after[name])]
        require(not unmoved, f"after a step these are as before: {', '.join(unmoved)}")


@check("STR-17", worlds=(2, 3))
def no_drift(rank: RankContext) -> None:
    """After five steps with Adam the weights are the same on every rank, bit for bit.

    Why: replicas that drift apart are noticed when one is saved and another one was measured.
    Fix: reduce in one order on all ranks; broadcast what is computed on one.
    """
    with running(rank, make=torch.optim.Adam, lr=0.01) as run:
        run.train(0, 5)
        states = [state for state in rank.gather(run.weights()) if state]
        for other in states[1:]:
            same("the weights of another rank", other, states[0])


@check("STR-18", worlds=(2, 3))
def loss_parity(rank: RankContext) -> None:
    """Twenty steps have the losses of one process on the joined batches.

    Why: everything may look right and the numbers not be.
    Fix: compare the first step (STR-14), then the optimizer's state.
    """
    with running(rank, make=torch.optim.SGD, momentum=0.9) as run:
        losses = run.train(0, 20)
        close("the losses of 20 steps", losses, reference(rank, 20, momentum=0.9)[1], 1e-4)


class _TwoParts(nn.Module):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 2), nn.Linear(6, 2)

    def loss(self, name: str, data: Any) -> torch.Tensor:
        return F.mse_loss(getattr(self, name)(data[0]), data[1])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        strategy, optimizers = self.__dict__["parts"]
        for name, optimizer in zip(("one", "two"), optimizers, strict=True):
            optimizer.zero_grad()
            strategy.manual_backward(self.loss(name, batch))
            strategy.optimizer_step(optimizer)


@check("STR-19", worlds=(2,))
def two_optimizers(rank: RankContext) -> None:
    """Two optimizers, stepped by the module itself through manual_backward, train as in one process.

    Why: wrappers average the gradients of the forward that they saw, and a second backward got none.
    Fix: average in manual_backward; refuse manual optimization where that can't be done.
    """
    owned = sorted(rank.subject.declared)
    if any(name.startswith("owns_") for name in owned):
        raise NotApplicable(f"the strategy does the step itself ({', '.join(owned)})")
    plain = _TwoParts()
    optimizers = [torch.optim.SGD(part.parameters(), lr=lr) for part, lr in ((plain.one, 0.1), (plain.two, 0.2))]
    for number in range(3):
        for name, optimizer in zip(("one", "two"), optimizers, strict=True):
            optimizer.zero_grad()
            plain.loss(name, batch(rank, number)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with rank.joined() as strategy:
        module = _TwoParts()
        strategy.connect(module)
        strategy.setup_model()
        own = [torch.optim.SGD(module.one.parameters(), lr=0.1), torch.optim.SGD(module.two.parameters(), lr=0.2)]
        try:
            strategy.setup_optimizers(own)
        except UnsupportedCombinationError as error:
            raise NotApplicable(f"the strategy refuses such a model: {error}") from error
        module.__dict__["parts"] = (strategy, strategy.optimizers)
        step = strategy.step_function("training_step")
        for number in range(3):
            step(share(strategy, batch(rank, number)), number)
        like("after three steps of two optimizers", values(strategy), plain)


@check("STR-20", worlds=(2,), timeout=45)
def unused_parameters(rank: RankContext) -> None:
    """A parameter that a step doesn't use trains on, or is an error on every rank; never a hang.

    Why: a wrapper waits for the gradient of every parameter, for ever.
    Fix: turn the wrapper's message into one that names the parameter.
    """
    outcome = ""
    with running(rank, Regression(unused=True)) as run:
        try:
            run.train(0, 3)
        except Exception as error:
            outcome = f"{type(error).__name__}: {run.strategy.explain(error)}"
        outcomes = rank.gather(outcome)
        require(len({bool(one) for one in outcomes}) == 1, f"some ranks raised, others didn't: {outcomes}")
        if not outcome:
            plain = reference(rank, 3)[0].state_dict()
            got = {name: tensor for name, tensor in run.weights().items() if "never_used" not in name}
            for name in got:
                close(f"{name} beside an unused layer", got[name], plain[name], TOLERANCE)


@check("STR-21", worlds=(2,))
def unprefixed(rank: RankContext) -> None:
    """The user's module keeps its attributes and methods, and state dicts have its own names, no wrapper's prefix.

    Changed: torch.compile is left out, whose compiler takes longer than all other checks.

    Why: "module." in a checkpoint's keys makes it unreadable without the strategy that wrote it.
    Fix: take the state of strategy.module, and strip what the wrapper adds.
    """
    with running(rank) as run:
        require(run.strategy.module is run.module, "strategy.module is another object than the user's")
        require(callable(run.module.training_step), "the user's method is gone")
        state = run.strategy.module_state_dict()
        expected = list(Regression().state_dict())
        if state or rank.rank == 0:
            same("the names in module_state_dict()", sorted(state), sorted(expected))


def _checkpoint(run: Run, scheduler: Any) -> dict[str, Any]:
    return {
        "model": run.strategy.module_state_dict(),
        "optimizer": run.strategy.optimizer_state(run.optimizer),
        "scheduler": scheduler.state_dict(),
        "precision": run.strategy.precision.state_dict(),
    }


@check("STR-22", worlds=(2,), timeout=60)
def resume(rank: RankContext) -> None:
    """Two steps, a checkpoint, and two more in a new life are four steps: weights, optimizer, scheduler, precision.

    Changed: random numbers are the Trainer's to save and restore, not a strategy's; core's tests resume with dropout.

    Why: a resume without the optimizer's state jumps, and the curve is smoothed until nobody sees it.
    Fix: gather the optimizer's whole state in optimizer_state, and scatter it in load_optimizer_state.
    """
    path = os.path.join(rank.folder, "x.ckpt")

    def scheduled(run: Run) -> Any:
        return torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=1, gamma=0.7)

    def train(run: Run, scheduler: Any, first: int, last: int) -> None:
        for number in range(first, last):
            run.train(number, number + 1)
            scheduler.step()

    with running(rank, make=torch.optim.Adam, lr=0.05) as run:
        scheduler = scheduled(run)
        train(run, scheduler, 0, 2)
        run.strategy.save_checkpoint(_checkpoint(run, scheduler), path)
        run.strategy.wait_for_checkpoints()
        train(run, scheduler, 2, 4)
        expected = run.weights()
        rank.gather("saved")
    with running(rank, Regression(7), make=torch.optim.Adam, lr=0.05) as run:
        scheduler = scheduled(run)
        loaded = run.strategy.load_checkpoint(path)
        run.strategy.load_module_state_dict(loaded["model"])
        run.strategy.load_optimizer_state(run.optimizer, loaded["optimizer"])
        run.strategy.precision.load_state_dict(loaded["precision"])
        scheduler.load_state_dict(loaded["scheduler"])
        train(run, scheduler, 2, 4)
        for name, tensor in run.weights().items():
            close(f"{name} after a resume", tensor, expected[name], 1e-6)
        rank.gather("done")


@check("STR-23", features=["portable"], worlds=(2,))
def portable(rank: RankContext) -> None:
    """A checkpoint's weights load into the plain module, in one process without the strategy.

    Why: a model that only the cluster it was trained on can open.
    Fix: save whole tensors under the user's names, or let the checkpoint IO put them together.
    """
    path = os.path.join(rank.folder, "x.ckpt")
    with running(rank) as run:
        run.train(0, 1)
        run.strategy.save_checkpoint({"model": run.strategy.module_state_dict()}, path)
        run.strategy.wait_for_checkpoints()
        rank.gather("saved")
    if rank.rank == 0:
        from torchhal.checkpoint import TorchCheckpointIO

        model = Regression(7)
        model.load_state_dict(TorchCheckpointIO().load_checkpoint(path)["model"])
        like("the plain module that loaded it", model.state_dict(), reference(rank, 1)[0])
    rank.gather("done")


@check("STR-25", worlds=(2,))
def strict_load(rank: RankContext) -> None:
    """load_module_state_dict refuses other keys and shapes by name; with strict=False it loads what fits and returns
    the rest.

    Why: half a model from a file and half from the initialization trains without an error.
    Fix: raise CheckpointMismatchError from what load_state_dict raises, and return its result.
    """
    with running(rank) as run:
        state = {name: tensor.clone() for name, tensor in Regression(3).state_dict().items()}
        lacking = {name: tensor for name, tensor in state.items() if name != "body.0.bias"}
        other = {**state, "body.0.bias": torch.zeros(5)}
        load = run.strategy.load_module_state_dict
        raises("a state without a key", CheckpointMismatchError, lambda: load(lacking), "body.0.bias")
        raises("a state with another shape", CheckpointMismatchError, lambda: load(other), "body.0.bias")
        rest = load({**lacking, "extra": torch.zeros(1)}, strict=False)
        same("what strict=False returns as missing", list(rest.missing_keys), ["body.0.bias"])
        same("what strict=False returns as unexpected", list(rest.unexpected_keys), ["extra"])
        load(state)
        like("after the load", run.weights(), Regression(3), 0.0)


@check("STR-26", worlds=(2,))
def optimizer_device(rank: RankContext) -> None:
    """After load_optimizer_state the optimizer's tensors are on the parameters' device.

    Why: a state that came from a file is on the CPU, and the next step raises.
    Fix: let Optimizer.load_state_dict move it, or move it yourself.
    """
    with running(rank, make=torch.optim.Adam) as run:
        run.train(0, 1)
        state = copy.deepcopy(run.strategy.optimizer_state(run.optimizer))
        everybody = rank.gather(state)
        run.strategy.load_optimizer_state(run.optimizer, everybody[0])
        for values in run.optimizer.state.values():
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    same(f"device type of the optimizer's {name}", value.device.type, run.strategy.root_device.type)
        run.train(1, 2)


@check("STR-35", worlds=(2, 3))
def global_norm(rank: RankContext) -> None:
    """clip_gradients takes the norm of the whole gradient, over all shards, and the step is the clipped one.

    Why: a rank that clips by its own shard's norm changes the direction of the step.
    Fix: add up the squares over the ranks that share the parameters.
    """
    model = Regression()
    model.training_step(batch(rank, 0), 0).backward()  # type: ignore[no-untyped-call]
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    expected = float(torch.cat([gradient.flatten() for gradient in grads]).norm())
    with running(rank) as run:
        run.strategy.zero_grad(run.optimizer)
        run.strategy.backward(run.step(share(run.strategy, batch(rank, 0)), 0))
        norm = run.strategy.clip_gradients(run.optimizer, expected / 3)
        if norm is not None:
            whole: Any = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            close("the norm that clip_gradients returned", float(whole), expected, 1e-4)
        run.strategy.optimizer_step(run.optimizer)
        like("after a clipped step", run.weights(), reference(rank, 1, clip=expected / 3)[0])


class _Empty(nn.Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.zeros((), requires_grad=True)


@check("STR-41", worlds=(2,))
def odd_modules(rank: RankContext) -> None:
    """A module without parameters is set up; one on the meta device works or is refused on every rank alike.

    Why: wrappers refuse a module with nothing to train, and an evaluation needs none.
    Fix: skip the wrapper where nothing requires a gradient; name what has no values.
    """
    with running(rank, _Empty()) as run:
        run.strategy.barrier("conformance")
    outcome = ""
    try:
        with torch.device("meta"):
            empty = nn.Linear(6, 2)
        with rank.joined() as strategy:
            strategy.connect(empty)
            strategy.setup_model()
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    outcomes = rank.gather(outcome)
    require(len({bool(one) for one in outcomes}) == 1, f"some ranks raised, others didn't: {outcomes}")


@check("STR-42", worlds=(2,))
def repeatable(rank: RankContext) -> None:
    """The same seed twice gives the same weights, bit for bit.

    Why: a run that can't be repeated can't be debugged.
    Fix: draw no random number of your own; reduce in a fixed order.
    """
    states = []
    for _ in range(2):
        torch.manual_seed(11)
        with running(rank) as run:
            run.train(0, 4)
            states.append(run.weights())
    same("the weights of the second run", states[1], states[0])


@check("STR-47", worlds=(2, 3))
def trained_from_rank_zero(rank: RankContext) -> None:
    """With another seed on each rank, training is that of rank 0's model, also after the steps.

    Why: sharding cuts each rank's own weights into one model of pieces that never belonged together.
    Fix: broadcast before sharding.
    """
    with running(rank, Regression(rank.rank)) as run:
        run.train(0, 3)
        like("after three steps from rank 0's weights", run.weights(), reference(rank, 3)[0])


@check("STR-48", worlds=(2,), timeout=45)
def one_batch_more(rank: RankContext) -> None:
    """Where one rank has a batch more than the others all ranks end, or all get an error, in time.

    Why: the rank with the extra batch waits for gradients that nobody sends.
    Fix: let barriers and collectives have the strategy's timeout, and explain what came of them.
    """
    if rank.size == 1:
        raise NotApplicable("there is one rank")
    strategy = rank.make()
    strategy.timeout = timedelta(seconds=6)
    outcome = ""
    try:
        with running(rank, strategy=strategy) as run:
            run.train(0, 2)
            if rank.rank == 0:
                strategy.backward(run.step(share(strategy, batch(rank, 2)), 2))
                strategy.optimizer_step(run.optimizer)
            strategy.barrier("the end of the epoch")
    except CheckFailed:
        raise
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    outcomes = rank.gather(outcome)
    require(len({bool(one) for one in outcomes}) == 1, f"some ranks raised, others didn't: {outcomes}")
