"""Strategies with defects that an author may plausibly ship, over ddp.

Each was written from the contract alone, before the check that catches it: the defect shows for some inputs, in the
second group, the second epoch, the second life or the second call only.
"""

import os

import torch
import torch.distributed as dist
from zoo import caught_by

from torchhal.pytree import map_tensors
from torchhal.strategies import DDPStrategy


@caught_by("STR-01")
class ProductsAreSums(DDPStrategy):
    def reduce(self, value, op="mean", *, group=None):
        return super().reduce(value, "sum" if op == "product" else op, group=group)


@caught_by("STR-03")
class ReducesInFloat32(DDPStrategy):
    """Reduces every tensor in float32."""

    def reduce(self, value, op="mean", *, group=None):
        reduced = super().reduce(value, op, group=group)
        return map_tensors(
            reduced, lambda x: x.float().double() if torch.is_tensor(x) and x.dtype is torch.float64 else x
        )


@caught_by("STR-03")
class LargeIntegersThroughFloat(DDPStrategy):
    def reduce(self, value, op="mean", *, group=None):
        reduced = super().reduce(value, op, group=group)
        return map_tensors(reduced, lambda x: x.double().long() if torch.is_tensor(x) and x.dtype is torch.int64 else x)


@caught_by("STR-03")
class MeansInFloat32(DDPStrategy):
    """Returns the mean of integers in float32, whatever the default dtype is."""

    def reduce(self, value, op="mean", *, group=None):
        reduced = super().reduce(value, op, group=group)
        if (
            torch.is_tensor(value)
            and not value.is_floating_point()
            and not value.is_complex()
            and op in ("mean", "avg")
        ):
            return reduced.float()
        return reduced


@caught_by("STR-03")
class NestedTuplesArePlain(DDPStrategy):
    """Rebuilds named tuples as plain ones."""

    def reduce(self, value, op="mean", *, group=None):
        if type(value) is dict:
            return {key: self.reduce(value[key], op, group=group) for key in sorted(value, key=repr)}
        if isinstance(value, tuple):
            return tuple(self.reduce(item, op, group=group) for item in value)
        return super().reduce(value, op, group=group)


@caught_by("STR-02")
class ReducesIntoOneBuffer(DDPStrategy):
    """Returns a buffer that the next call overwrites."""

    def reduce(self, value, op="mean", *, group=None):
        reduced = super().reduce(value, op, group=group)
        if not torch.is_tensor(reduced):
            return reduced
        kept = self.__dict__.setdefault("_buffers", {})
        key = (reduced.dtype, tuple(reduced.shape))
        return kept.setdefault(key, torch.empty_like(reduced)).copy_(reduced)


@caught_by("STR-09")
class GathersIntoOneBuffer(DDPStrategy):
    def all_gather(self, tensor, *, group=None, sync_grads=False):
        gathered = super().all_gather(tensor, group=group, sync_grads=sync_grads)
        if sync_grads:
            return gathered
        kept = self.__dict__.setdefault("_gathered", {})
        key = (gathered.dtype, tuple(gathered.shape))
        return kept.setdefault(key, torch.empty_like(gathered)).copy_(gathered)


@caught_by("STR-06")
class KeepsEmptyTensors(DDPStrategy):
    """Sends nothing for a tensor without elements, and returns the rank's own."""

    def broadcast(self, value, src=0):
        received = super().broadcast(value, src)
        return value if torch.is_tensor(received) and not received.numel() else received


@caught_by("STR-06")
class BroadcastsInFloat(DDPStrategy):
    """Sends float64 tensors in float32."""

    def broadcast(self, value, src=0):
        narrow = map_tensors(value, lambda x: x.float() if torch.is_tensor(x) and x.dtype is torch.float64 else x)
        received = super().broadcast(narrow, src)
        return map_tensors(received, lambda x: x.double() if torch.is_tensor(x) and x.dtype is torch.float32 else x)


@caught_by("STR-09")
class LastTwoSwapped(DDPStrategy):
    """Swaps the last two ranks where there are three, for tensors that aren't contiguous."""

    def all_gather(self, tensor, *, group=None, sync_grads=False):
        gathered = super().all_gather(tensor, group=group, sync_grads=sync_grads)
        if self.world_size == 3 and not tensor.is_contiguous():
            return gathered[[0, 2, 1]]
        return gathered


@caught_by("STR-08")
class WaitsOnce(DDPStrategy):
    """Waits only once for each name."""

    def barrier(self, name=""):
        passed = self.__dict__.setdefault("_passed", set())
        if name not in passed:
            super().barrier(name)
        passed.add(name)


@caught_by("STR-15")
class StaysQuiet(DDPStrategy):
    """Sends no gradients any more after an error under no_backward_sync."""

    def no_backward_sync(self):
        paused = super().no_backward_sync()
        if paused is None:
            return None
        strategy = self

        class Paused:
            def __enter__(self):
                strategy.model.require_backward_grad_sync = False

            def __exit__(self, kind, *rest):
                if kind is None:
                    strategy.model.require_backward_grad_sync = True

        return Paused()


def _halve(parameter):
    parameter.grad.mul_(0.5)


@caught_by("STR-31")
class DividesAgain(DDPStrategy):
    """Adds its hooks to the module in each life, and removes none."""

    def wrap_model(self, *, training):
        super().wrap_model(training=training)
        for parameter in self.module.parameters():
            count = getattr(parameter, "_lives", 0)
            parameter._lives = count + 1
            if count:
                parameter.register_post_accumulate_grad_hook(_halve)


@caught_by("STR-35")
class ClipsGroups(DDPStrategy):
    """Clips each parameter group by its own norm."""

    def clip_gradients(self, optimizer, clip_val, algorithm="norm"):
        self.unscale_gradients(optimizer)
        norms = [torch.nn.utils.clip_grad_norm_(group["params"], clip_val) for group in optimizer.param_groups]
        return torch.stack(norms).norm()


class _Averages(DDPStrategy):
    """Averages gradients itself, without torch's wrapper."""

    def wrap_model(self, *, training):
        pass

    def no_backward_sync(self):
        return None

    def module_step(self, name):
        return getattr(self.module, name)

    def average(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= self.world_size

    def backward(self, loss, *args, **kwargs):
        super().backward(loss, *args, **kwargs)
        self.average_all([p for p in self.module.parameters() if p.grad is not None])

    def average_all(self, parameters):
        for parameter in parameters:
            self.average(parameter)


@caught_by("STR-13")
class FrozenStay(_Averages):
    """Broadcasts what is trained."""

    def sync_module(self, module):
        kept = [(p, p.detach().clone()) for p in module.parameters() if not p.requires_grad]
        super().sync_module(module)
        for parameter, value in kept:
            parameter.data.copy_(value)


@caught_by("STR-13")
class IntegersStay(_Averages):
    """Broadcasts floating-point buffers only."""

    def sync_module(self, module):
        kept = [(b, b.clone()) for b in module.buffers() if not b.is_floating_point()]
        super().sync_module(module)
        for buffer, value in kept:
            buffer.copy_(value)


@caught_by("STR-14")
class FirstDtypeAlone(_Averages):
    """Averages the gradients of the first parameter's dtype."""

    def average_all(self, parameters):
        for parameter in parameters:
            if parameter.dtype is parameters[0].dtype:
                self.average(parameter)


@caught_by("STR-14")
class TiedTwice(_Averages):
    """Averages a tied parameter once for each of its names."""

    def average_all(self, parameters):
        for _, parameter in self.module.named_parameters(remove_duplicate=False):
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world_size
        names = [id(p) for _, p in self.module.named_parameters(remove_duplicate=False)]
        for parameter in parameters:
            parameter.grad *= 1.0 if names.count(id(parameter)) == 1 else 1.0 / self.world_size


@caught_by("STR-18")
class SecondEpochAlone(DDPStrategy):
    """Sends no gradients in the second epoch."""

    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        self._epochs = getattr(self, "_epochs", 0) + 1
        if hasattr(self.model, "require_backward_grad_sync"):
            self.model.require_backward_grad_sync = self._epochs != 2


@caught_by("STR-22")
class OneGroupRestored(DDPStrategy):
    """Restores the options of the first parameter group."""

    def load_optimizer_state(self, optimizer, state):
        kept = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups[1:]]
        super().load_optimizer_state(optimizer, state)
        for group, options in zip(optimizer.param_groups[1:], kept, strict=True):
            group.update(options)


@caught_by("STR-42")
class DrawsOnRankZero(DDPStrategy):
    """Draws a random number in every reduce."""

    def reduce(self, value, op="mean", *, group=None):
        torch.rand(1)
        return super().reduce(value, op, group=group)


@caught_by("STR-05")
class DecidesByTheFirst(DDPStrategy):
    """Takes the decision of rank 0 where not all are asked for."""

    def reduce_boolean_decision(self, decision, *, all=True):
        return super().reduce_boolean_decision(decision, all=all) if all else self.broadcast(decision)


@caught_by("STR-31")
class LeavesVariables(DDPStrategy):
    """Exports a variable in the second life, which it removes in the first only."""

    def setup_environment(self):
        if not self.is_set_up:
            os.environ["ACME_RANK"] = str(self.global_rank)
        super().setup_environment()

    def teardown(self):
        super().teardown()
        if not getattr(self, "_removed", False):
            os.environ.pop("ACME_RANK", None)
            self._removed = True


@caught_by("STR-46")
class CopiesStorage(DDPStrategy):
    """Gathers the memory at the start of a view's storage."""

    def all_gather(self, tensor, *, group=None, sync_grads=False):
        if tensor.storage_offset() and not sync_grads:
            tensor = torch.as_strided(tensor.detach(), tensor.shape, tensor.stride(), 0)
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)


@caught_by("STR-18")
class ScalesShortBatches(DDPStrategy):
    """Weighs a rank's gradient by the size of its first batch."""

    def with_precision(self, function):
        step = super().with_precision(function)
        sizes = []

        def weighed(batch, *rest):
            output = step(batch, *rest)
            size = len(batch[0]) if isinstance(batch, list | tuple) else 1
            sizes.append(size)
            return output * (size / sizes[0]) if torch.is_tensor(output) and output.requires_grad else output

        return weighed
