"""Eleven strategies with one mistake each, over torchhal's DDPStrategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from zoo import caught_by

from torchhal.distributed import collectives
from torchhal.errors import CheckpointMismatchError
from torchhal.pytree import map_tensors
from torchhal.strategies import DDPStrategy


@caught_by("STR-76")
class ComparesOnceStrategy(DDPStrategy):
    """reduce() compares structures, dtypes and shapes of the ranks in the first call of each op only."""

    # strategy.md, reduce: "DistributedError: on every rank, when their structures, types, dtypes or shapes differ."
    # Suffers: metrics that agreed in the first step and differ in a later one (int64 on one rank, float64 on another;
    # other keys) are added up byte by byte or crosswise: the logged number is garbage
    # without an error, and so are early stopping and "best" by it.

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._compared: set[str] = set()

    def setup_environment(self) -> None:
        if not self.is_set_up:
            self._compared = set()
        super().setup_environment()

    def reduce(self, value: Any, op: str = "mean", *, group: Any = None) -> Any:
        if group is not None or op not in self._compared:
            result = super().reduce(value, op, group=group)
            if group is None:
                self._compared.add(op)  # the exchange of descriptions costs more than the values
            return result
        pairs = list(collectives._leaves(value))
        results: list[Any] = [None] * len(pairs)
        with self.guard(f"reduce(op={op!r})"):
            for index in sorted(range(len(pairs)), key=lambda index: pairs[index][0]):
                results[index] = self._reduce_leaf(pairs[index][1], op)
        remaining = iter(results)
        return map_tensors(value, lambda _: next(remaining))

    def _reduce_leaf(self, leaf: Any, op: str) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided:
                raise TypeError(f"'value' must hold dense tensors (got {leaf.layout})")
            return collectives.reduce_tensor(leaf, op, device=self.root_device)
        if isinstance(leaf, bool | int | float):
            dtype = torch.float64 if isinstance(leaf, float) or op in ("mean", "avg") else torch.int64
            where = collectives.host(self.root_device)
            reduced = collectives.reduce_tensor(torch.tensor(leaf, dtype=dtype, device=where), op, device=where).item()
            return bool(reduced) if isinstance(leaf, bool) and op in ("min", "max", "product") else reduced
        return leaf


@caught_by("STR-73", says="the averaged gradient of")
class PositionalAveragingStrategy(DDPStrategy):
    """sync_gradients() joins the gradients that exist on this rank, so ranks with other branches average crosswise."""

    # strategy.md, sync_gradients: "Average over the ranks the gradients that were accumulated under
    # `no_backward_sync`." and backward: "Accumulate the gradients of `loss`, averaged over the ranks".
    # Suffers: with manual optimization, a step in which rank 0 uses expert A and rank 1 expert B of the same size gives
    # A the mean of A's and B's gradients (and B as well, on the other rank): replicas train wrong, or the job hangs
    # where the sizes differ.

    def sync_gradients(self) -> None:
        assert self.module is not None
        present = [each for each in self.module.parameters() if each.requires_grad and each.grad is not None]
        if any(each.grad.is_sparse for each in present):
            super().sync_gradients()
            return
        if self.world_size > 1:
            with self.guard("averaging of the gradients"):
                for dtype in sorted({each.grad.dtype for each in present}, key=str):
                    gradients = [each.grad for each in present if each.grad.dtype is dtype]
                    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
                    dist.all_reduce(flat)
                    flat /= self.world_size
                    parts = flat.split([gradient.numel() for gradient in gradients])
                    for gradient, part in zip(gradients, parts, strict=True):
                        gradient.copy_(part.view_as(gradient))
        self.gradients_synced = True


class _PausedUntilSuccess:
    def __init__(self, pause: AbstractContextManager[Any]) -> None:
        self._pause = pause

    def __enter__(self) -> None:
        self._pause.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self._pause.__exit__(None, None, None)


@caught_by("STR-15")
class StaysPausedStrategy(DDPStrategy):
    """no_backward_sync() doesn't resume the averaging when its body raises."""

    # strategy.md, no_backward_sync: "Return a context in which forward and backward send no gradients"; backward:
    # "Accumulate the gradients of `loss`, averaged over the ranks unless under `no_backward_sync`."
    # Suffers: a loop of one's own that skips a micro-batch whose forward raised (out of memory, a bad sample) goes on,
    # and if the next backward is the last of its step, the ranks average nothing and drift apart.

    def no_backward_sync(self) -> AbstractContextManager[Any] | None:
        pause = super().no_backward_sync()
        return None if pause is None else _PausedUntilSuccess(pause)


@caught_by("STR-51")
class StateOfLastStepStrategy(DDPStrategy):
    """optimizer_state() is kept until the next optimizer step, though schedulers and loads change it in between."""

    # strategy.md, optimizer_state: "Return the optimizer's whole state."
    # Suffers: a checkpoint after the last batch (every n steps), the epoch's scheduler step, then the epoch's
    # checkpoint: the second one has the learning rate of before the scheduler, with which a resumed run goes on. And a
    # save between a load and the first step writes the state of before the load.

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._states: dict[int, dict[str, Any]] = {}

    def setup_optimizers(self, *args: Any, **kwargs: Any) -> None:
        self._states.clear()
        super().setup_optimizers(*args, **kwargs)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if id(optimizer) not in self._states:  # several callbacks may save after one step
            self._states[id(optimizer)] = super().optimizer_state(optimizer)
        return self._states[id(optimizer)]

    def check_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        super().check_optimizer_state(optimizer, state)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        self._states.pop(id(optimizer), None)
        return super().optimizer_step(optimizer, closure)


@caught_by("STR-55")
class RemembersStepsStrategy(DDPStrategy):
    """step_function() is made once per name, so a second module's steps are the first module's."""

    # strategy.md, connect: "Take the user's module. ... It is `module` from now on"; step_function: "Return the
    # function that runs one of `STEPS` with everything decided: wrapper, precision, overrides. Called once per loop".
    # Suffers: a second fit or test with another model on the same Trainer evaluates the first model and reports its
    # numbers; in a second fit the optimizer steps the new model, whose parameters get no gradient.

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._steps: dict[str, Callable[..., Any]] = {}

    def step_function(self, name: str) -> Callable[..., Any]:
        if name not in self._steps:
            self._steps[name] = super().step_function(name)
        return self._steps[name]


def _half_for_large(state, bucket):  # torch compares annotations with classes, and these would be text
    if bucket.buffer().numel() < 1 << 16 or bucket.buffer().dtype is not torch.float32:
        return allreduce_hook(state, bucket)
    return fp16_compress_hook(state, bucket)


@caught_by("STR-72")
class HalvesLargeBucketsStrategy(DDPStrategy):
    """Buckets of 65536 gradients or more are averaged in float16, and "lossy" isn't among the features."""

    # strategy.md, features: "`"lossy"` is no task: the steps differ from those of one process by up to `tolerances`, as
    # gradients are compressed, or averaged in part." This class has no such feature and compresses.
    # Suffers: models with layers of 256x256 or more lose gradients below 6e-8, and get infinite ones above 65504, with
    # 32-true asked for; small models, on which one tests, are exact.

    features: ClassVar[frozenset[str]] = frozenset()

    def configure_ddp(self) -> None:
        super().configure_ddp()
        if self.comm_hook is None and self.world_size > 1 and isinstance(self.model, DistributedDataParallel):
            self.model.register_comm_hook(None, _half_for_large)


@caught_by("STR-77", says="finished reduction")
class AssignsPartialWeightsStrategy(DDPStrategy):
    """load_module_state_dict(strict=False) puts new parameters into the module, which the optimizer doesn't have."""

    # strategy.md, load_module_state_dict: "Load a state into the module, wrapped or not."
    # Suffers: who loads a part of the weights (a backbone) after the set-up fine-tunes nothing: the optimizer and the
    # wrapper have the old parameters, the new ones never move, and the loss of the head still falls.

    def load_module_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        if strict:
            return super().load_module_state_dict(state, strict=True)
        assert self.module is not None
        try:  # assigned, which spares a copy of a large file
            copies = {name: value.clone() if torch.is_tensor(value) else value for name, value in state.items()}
            return self.module.load_state_dict(copies, strict=False, assign=True)
        except RuntimeError as error:
            raise CheckpointMismatchError(
                f"the weights don't belong to {type(self.module).__name__}: {error}"
            ) from error


@caught_by("STR-85")
class EvaluationHeartbeatStrategy(DDPStrategy):
    """Every 16th batch of an evaluation the ranks compare their progress in on_evaluation_batch_end."""

    # strategy.md, on_evaluation_batch_end: "Called ... on the ranks that have such a batch; it must not communicate."
    # Suffers: where rank 0 has 16 batches and rank 1 has 15, as with an uneven test set, the job hangs until the
    # timeout, or rank 0's number meets another collective of rank 1.

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.slowest_rank_at = 0

    def on_evaluation_batch_end(
        self, stage: str, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        super().on_evaluation_batch_end(stage, outputs, batch, batch_idx, dataloader_idx)
        if self.world_size > 1 and (batch_idx + 1) % 16 == 0:
            self.slowest_rank_at = self.reduce(batch_idx, "min")


@caught_by("STR-78", says="persistent=False")
class PersistentBuffersOnlyStrategy(DDPStrategy):
    """The start broadcasts module.state_dict(), so buffers with persistent=False stay each rank's own."""

    # strategy.md, setup_model: "afterwards all ranks have the parameters and buffers of rank 0."
    # Suffers: random features, random masks or noise tables in non-persistent buffers differ between the ranks where
    # these have other seeds: each rank computes another function, the gradients are averaged over different models,
    # weights agree, and a checkpoint works on rank 0's table at best.

    def __init__(self, **options: Any) -> None:
        options.setdefault("init_sync", False)  # sync_module has done it
        options.setdefault("broadcast_buffers", False)
        super().__init__(**options)

    def sync_module(self, module: nn.Module) -> None:
        if self.world_size > 1:
            with self.guard("broadcast of the initial weights"):
                self.check_same_module(module)
                tensors = [value for value in module.state_dict().values() if isinstance(value, torch.Tensor)]
                collectives.broadcast_tensors(tensors)


@caught_by("STR-75")
class ClearsAllGradientsStrategy(DDPStrategy):
    """zero_grad(optimizer) clears the gradients of the whole module."""

    # strategy.md, zero_grad: "Clear the gradients before the first backward of a step. ... `optimizer`: the one whose
    # gradients are cleared."
    # Suffers: with two optimizers of which one accumulates over several batches, each step of the other throws away
    # what the first has accumulated; it steps with the last micro-batch alone, and no number shows it.

    def zero_grad(self, optimizer: Optimizer) -> None:
        if self.module is None:
            super().zero_grad(optimizer)
        else:
            self.module.zero_grad()


@caught_by("STR-86")
class LeavesControlGroupStrategy(DDPStrategy):
    """The set-up makes a gloo group for control messages, which only goes with the default group."""

    # strategy.md, teardown: "Release the model, the device and the communication."
    # Suffers: in a program that has made its own process group, which stays, every run leaves one more group with its
    # threads, connections and file descriptors; a service or a sweep of hundreds of runs ends in "too many open files".

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.control_group: Any = None

    def setup_communication(self) -> Any:
        store = super().setup_communication()
        if self.world_size > 1:
            self.control_group = dist.new_group(backend="gloo", timeout=self.timeout)
        return store

    def reduce_boolean_decision(self, decision: bool, *, all: bool = True) -> bool:
        if self.control_group is None:
            return super().reduce_boolean_decision(decision, all=all)
        flag = torch.tensor(int(bool(decision)))
        with self.guard("reduce_boolean_decision"):
            dist.all_reduce(flag, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX, group=self.control_group)
        return bool(flag.item())

    def teardown(self) -> None:
        self.control_group = None
        super().teardown()
