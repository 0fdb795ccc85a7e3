"""STR: several ranks train what one process trains on the joined batch."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from torchhal.errors import ConfigurationError, ModelError, UnsupportedCombinationError
from torchhal_conformance._assertions import close, require, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._limits import scaled
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_examples import check_epochs, check_initial_state, check_unusual_models
from torchhal_conformance.checks._strategy_run import (
    TOLERANCE,
    Regression,
    batch,
    clipping,
    make_model,
    reference,
    require_several_ranks,
    running,
    share,
    tolerance_of,
    two_groups,
    values,
    weights_close,
)


@check("STR-13", world_sizes=(2, 3))
def initial_weights(rank: RankContext) -> None:
    """Whatever weights and buffers the ranks came with, after the set-up all have those of rank 0.

    Frozen parameters, and integer and boolean buffers, too.

    Why: without a broadcast every rank trains a model of its own, and the loss goes down all the same.
    Fix: broadcast parameters and buffers before wrapping.
    """
    with running(rank, make_model(rank, rank.rank)) as run:
        weights_close(f"rank {rank.rank} after the set-up, beside rank 0", run.weights(), make_model(rank), 0.0)
        rank.gather("done")
    check_initial_state(rank)


@check("STR-14", world_sizes=(2, 3), after=("STR-13",))
def averaged_gradient(rank: RankContext) -> None:
    """One step of plain SGD is the step on the joined batch: gradients are averaged, not added up.

    A model with tied parameters, or with parameters of another dtype, trains so too, or is an error on every rank.

    Why: a sum in place of a mean is a learning rate that grows with the number of devices.
    Fix: divide by the number of ranks, once.
    """
    with running(rank) as run:
        run.train(0, 1)
        run.require_weights("after one step", reference(rank, 1)[0])
    check_unusual_models(rank)


def _enter_repeatedly(paused: Any) -> None:
    """Raise CheckFailed where the context of no_backward_sync() can't be entered for every micro-batch."""
    try:
        for _ in range(3):
            with contextlib.nullcontext() if paused is None else paused:
                pass
    except Exception as error:
        told = (
            "the context of no_backward_sync(), which is entered for all micro-batches but the last, can't be entered"
        )
        raise CheckFailed(f"{told} again ({type(error).__name__}: {error})") from error


class _Stop(Exception):
    pass


@check("STR-15", world_sizes=(2,), after=("STR-14",))
def accumulation(rank: RankContext) -> None:
    """Micro-batches under no_backward_sync() add up to the step of one batch; while it is entered nothing is sent.

    The context can be entered any number of times. After an error inside it gradients are averaged again.

    Why: synchronizing each micro-batch costs what accumulating was to save, and some did it twice.
    Fix: return the wrapper's no_sync(), or None where there is nothing to switch off.
    """
    with running(rank) as run:
        strategy = run.strategy
        data = batch(rank, 0)
        strategy.zero_grad(run.optimizer)
        parts = [share(strategy, tuple(tensor[i : i + 4] for tensor in data)) for i in (0, 4, 8)]
        paused = strategy.no_backward_sync()
        _enter_repeatedly(paused)
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
        run.require_weights("after three micro-batches", reference(rank, 1)[0])
        if paused is not None:
            with contextlib.suppress(_Stop), paused:
                raise _Stop
            run.train(1, 3)
            run.require_weights("after an error under no_backward_sync()", reference(rank, 3)[0])


@check("STR-16", world_sizes=(2,))
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


@check("STR-17", world_sizes=(2, 3))
def no_drift(rank: RankContext) -> None:
    """After five steps with Adam the weights are the same on every rank, bit for bit.

    Those of a lossy strategy differ by its tolerance of ``"replicas"`` at most.

    Why: replicas that drift apart are noticed when one is saved and another one was measured.
    Fix: reduce in one order on all ranks; broadcast what is computed on one.
    """
    with running(rank, make=torch.optim.Adam, lr=0.01) as run:
        run.train(0, 5)
        states = [state for state in rank.gather(run.weights()) if state]
        tolerance = tolerance_of(run.strategy, "replicas", 0.0)
        for other in states[1:]:
            if not tolerance:
                same("the weights of another rank", other, states[0])
                continue
            same("the names of another rank's weights", list(other), list(states[0]))
            for name, tensor in states[0].items():
                close(f"{name} of another rank", other[name], tensor, tolerance)


@check("STR-18", world_sizes=(2, 3), after=("STR-14",))
def loss_parity(rank: RankContext) -> None:
    """Twenty steps have the losses of one process on the joined batches.

    So have three epochs with accumulation, clipping, a short last batch, two parameter groups and a scheduler.

    Why: everything may look right and the numbers not be.
    Fix: compare the first step (STR-14), then the optimizer's state.
    """
    with running(rank, make=torch.optim.SGD, momentum=0.9) as run:
        losses = run.train(0, 20)
        tolerance = tolerance_of(run.strategy, "losses", 1e-4)
        close("the losses of 20 steps", losses, reference(rank, 20, momentum=0.9)[1], tolerance)
    check_epochs(rank)


class _ByHand(Regression):
    """Model that steps one optimizer for its first layer and another one for the rest, in turn."""

    automatic_optimization = False

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        rest = [*self.body[2].parameters(), *self.body[4].parameters()]
        return [torch.optim.SGD(self.body[0].parameters(), lr=0.05), torch.optim.SGD(rest, lr=0.1)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        strategy, optimizers = self.__dict__["parts"]
        for optimizer in optimizers:
            self.zero_grad()
            strategy.manual_backward(super().training_step(batch, batch_idx))
            strategy.optimizer_step(optimizer)


@check("STR-19", world_sizes=(2,))
def two_optimizers(rank: RankContext) -> None:
    """Two optimizers, stepped by the module itself through manual_backward, train as in one process.

    ``gradients_synced``, where the strategy has it, is true then, and false in the next life.

    Why: wrappers average the gradients of the forward that they saw, and a second backward got none.
    Fix: average in manual_backward; refuse manual optimization where that can't be done.
    """
    owned = sorted(rank.component.declared)
    if any(name.startswith("owns_") for name in owned):
        raise NotApplicable(f"the strategy does the step itself ({', '.join(owned)})")
    plain = _ByHand()
    for number in range(3):
        for optimizer in plain.make_optimizers():
            plain.zero_grad()
            Regression.training_step(plain, batch(rank, number), number).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with rank.set_up_strategy() as strategy:
        module = _ByHand()
        strategy.connect(module)
        strategy.setup_model()
        try:
            strategy.setup_optimizers(module.make_optimizers())
        except (UnsupportedCombinationError, ModelError) as error:
            raise NotApplicable(f"the strategy refuses such a model: {error}") from error
        module.__dict__["parts"] = (strategy, strategy.optimizers)
        step = strategy.step_function("training_step")
        for number in range(3):
            step(share(strategy, batch(rank, number)), number)
        tolerance = tolerance_of(strategy, "weights", TOLERANCE)
        weights_close("after three steps of two optimizers", values(strategy), plain, tolerance)
        require(getattr(strategy, "gradients_synced", True), "gradients_synced is false after manual_backward()")
    with rank.set_up_strategy(strategy):
        strategy.connect(_ByHand())
        require(not getattr(strategy, "gradients_synced", False), "gradients_synced is true in a new life's beginning")


@check("STR-20", world_sizes=(2,), timeout=45, after=("STR-14",))
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
                close(f"{name} beside an unused layer", got[name], plain[name], run.tolerance)


@check("STR-35", world_sizes=(2, 3), after=("STR-14",))
def global_norm(rank: RankContext) -> None:
    """clip_gradients takes the norm of the whole gradient, over all shards, and the step is the clipped one.

    Why: a rank that clips by its own shard's norm changes the direction of the step.
    Fix: add up the squares over the ranks that share the parameters.
    """
    model = make_model(rank)
    model.training_step(batch(rank, 0), 0).backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    expected = float(torch.cat([gradient.flatten() for gradient in grads]).norm())
    with running(rank) as run:
        run.strategy.zero_grad(run.optimizer)
        run.strategy.backward(run.step(share(run.strategy, batch(rank, 0)), 0))
        with clipping(rank):
            norm = run.strategy.clip_gradients(run.optimizer, expected / 3)
        if norm is not None:
            whole: Any = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            tolerance = tolerance_of(run.strategy, "gradient_norm", 1e-4)
            close("the norm that clip_gradients returned", float(whole), expected, tolerance)
        run.strategy.optimizer_step(run.optimizer)
        run.require_weights("after a clipped step", reference(rank, 1, clip=expected / 3)[0])
    with running(rank, make=two_groups) as run:
        run.train(0, 3, clip=expected / 3)
        plain = reference(rank, 3, make=two_groups, clip=expected / 3)[0]
        run.require_weights("after clipped steps of two parameter groups", plain)


class _Empty(nn.Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.zeros((), requires_grad=True)


@check("STR-41", world_sizes=(2,))
def odd_modules(rank: RankContext) -> None:
    """A module without parameters is set up; one on the meta device works or is refused on every rank alike.

    The context of no_backward_sync() can be entered for the former, too; the latter is refused by a ModelError.

    Why: wrappers refuse a module with nothing to train, and an evaluation needs none.
    Fix: skip the wrapper where nothing requires a gradient; name what has no values.
    """
    outcome = ""
    try:
        with running(rank, _Empty()) as run:
            paused = run.strategy.no_backward_sync()
            if paused is not None:
                for _ in range(2):
                    with paused:
                        pass
            run.strategy.barrier("conformance")
    except ConfigurationError as error:
        if not rank.component.arguments:
            raise
        outcome = f"{type(error).__name__}: {error}"  # arguments that name layers, of which there are none
    outcomes = rank.gather(outcome)
    require(len({bool(one) for one in outcomes}) == 1, f"some ranks raised, others didn't: {outcomes}")
    outcome = ""
    try:
        with torch.device("meta"):
            empty = nn.Linear(6, 2)
        with rank.set_up_strategy() as strategy:
            strategy.connect(empty)
            strategy.setup_model()
    except NotApplicable:
        raise
    except ModelError as error:
        outcome = f"{type(error).__name__}: {error}"
    except Exception as error:
        outcome = f"no ModelError, but {type(error).__name__}: {error}"
    outcomes = rank.gather(outcome)
    require(len({bool(one) for one in outcomes}) == 1, f"some ranks raised, others didn't: {outcomes}")
    require(not outcome.startswith("no "), f"a module on the meta device was refused by {outcome}")


@check("STR-42", world_sizes=(2,))
def repeatable(rank: RankContext) -> None:
    """The same seed twice gives the same weights, bit for bit; steps and collectives draw no random number.

    Why: a run that can't be repeated can't be debugged.
    Fix: draw no random number of your own; reduce in a fixed order.
    """
    states = []
    for _ in range(2):
        torch.manual_seed(11)
        with running(rank) as run:
            run.train(0, 2)
            before = torch.get_rng_state()
            run.train(2, 4)
            run.strategy.reduce(torch.ones(2), "sum")
            run.strategy.broadcast(torch.ones(2))
            run.strategy.all_gather(torch.ones(2))
            run.strategy.barrier("conformance")
            require(torch.equal(torch.get_rng_state(), before), "steps and collectives drew random numbers on the CPU")
            states.append(run.weights())
    same("the weights of the second run", states[1], states[0])


@check("STR-47", world_sizes=(2, 3), after=("STR-13", "STR-14"))
def trained_from_rank_zero(rank: RankContext) -> None:
    """With another seed on each rank, training is that of rank 0's model, also after the steps.

    Why: sharding cuts each rank's own weights into one model of pieces that never belonged together.
    Fix: broadcast before sharding.
    """
    with running(rank, make_model(rank, rank.rank)) as run:
        run.train(0, 3)
        run.require_weights("after three steps from rank 0's weights", reference(rank, 3)[0])


@check("STR-48", world_sizes=(2,), timeout=45)
def one_batch_more(rank: RankContext) -> None:
    """Where one rank has a batch more than the others all ranks end, or all get an error, in time.

    Why: the rank with the extra batch waits for gradients that nobody sends.
    Fix: let barriers and collectives have the strategy's timeout, and explain what came of them.
    """
    require_several_ranks(rank)
    strategy = rank.create_strategy()
    strategy.timeout = timedelta(seconds=scaled(2.5))
    rank.gather("ready")  # the set-up has this timeout too
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
