"""Strategies that are each broken in one way, over ddp."""

import os
import subprocess
import threading
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from zoo import caught_by

from torchhal.checkpoint import TorchCheckpointIO
from torchhal.errors import CheckpointMismatchError, ModelError
from torchhal.precision import SinglePrecision
from torchhal.strategies import DDPStrategy


@caught_by("STR-01")
class IgnoresOp(DDPStrategy):
    def reduce(self, value, op="mean", *, group=None):
        return super().reduce(value, "mean")


@caught_by("STR-01")
class AnyOp(DDPStrategy):
    def reduce(self, value, op="mean", *, group=None):
        return super().reduce(value, op if op in ("sum", "max", "min") else "mean")


@caught_by("STR-52", says="how often the closure ran")
class IgnoresClosure(DDPStrategy):
    def optimizer_step(self, optimizer, closure=None):
        return super().optimizer_step(optimizer)


@caught_by("STR-52", says="after three steps with a closure")
class EvaluatesAfterwards(DDPStrategy):
    """Evaluates the closure when the step is done, whose gradients it then has in the next one."""

    def optimizer_step(self, optimizer, closure=None):
        done = super().optimizer_step(optimizer)
        if closure is not None:
            closure()
        return done


@caught_by("STR-52", says="after three steps with a closure")
class ClearsItsShare(DDPStrategy):
    """Has one group of parameters in the optimizer while it evaluates the closure, as one that divides them has."""

    def optimizer_step(self, optimizer, closure=None):
        if closure is None:
            return super().optimizer_step(optimizer)
        groups = list(optimizer.param_groups)
        del optimizer.param_groups[1:]
        closure()
        optimizer.param_groups[:] = groups
        return super().optimizer_step(optimizer)


@caught_by("STR-02")
class InPlace(DDPStrategy):
    def reduce(self, value, op="mean", *, group=None):
        reduced = super().reduce(value, op, group=group)
        if isinstance(value, torch.Tensor):
            value.copy_(reduced)
            return value
        return reduced


@caught_by("STR-03")
class HalfSum(DDPStrategy):
    """Adds up in the tensor's own dtype."""

    def reduce(self, value, op="mean", *, group=None):
        if isinstance(value, torch.Tensor) and op == "mean" and value.dtype == torch.float16:
            return super().reduce(value * self.world_size, op) / self.world_size
        return super().reduce(value, op, group=group)


@caught_by("STR-03")
class WholeMean(DDPStrategy):
    def reduce(self, value, op="mean", *, group=None):
        reduced = super().reduce(value, op, group=group)
        return reduced.to(value.dtype) if isinstance(value, torch.Tensor) else reduced


@caught_by("STR-03", says="in bfloat16")
class BrainSum(DDPStrategy):
    def reduce(self, value, op="mean", *, group=None):
        if isinstance(value, torch.Tensor) and op == "sum" and value.dtype == torch.bfloat16:
            total = torch.zeros_like(value)
            for one in super().all_gather(value):
                total += one
            return total
        return super().reduce(value, op, group=group)


@caught_by("STR-04", says="rank")
class IgnoresGroup(DDPStrategy):
    def reduce(self, value, op="mean", *, group=None):
        return super().reduce(value, op) if group is None else value * 1

    def all_gather(self, tensor, *, group=None, sync_grads=False):
        return tensor.unsqueeze(0) if group else super().all_gather(tensor)


@caught_by("STR-05")
class OwnDecision(DDPStrategy):
    def reduce_boolean_decision(self, decision, *, all=True):
        return decision


@caught_by("STR-06")
class IgnoresSrc(DDPStrategy):
    def broadcast(self, value, src=0):
        return super().broadcast(value, 0)


@caught_by("STR-07")
class ArrivesOnCPU(DDPStrategy):
    """A broadcast moves a CPU tensor to the meta device, which stands in for a device here."""

    def broadcast(self, value, src=0):
        received = super().broadcast(value, src)
        return {name: tensor.to("meta") for name, tensor in received.items()}


@caught_by("STR-08")
class NoBarrier(DDPStrategy):
    def barrier(self, name=""):
        pass


@caught_by("STR-09")
class Concatenates(DDPStrategy):
    def all_gather(self, tensor, *, group=None, sync_grads=False):
        return super().all_gather(tensor).flatten(0, 1)


@caught_by("STR-09")
class Reversed(DDPStrategy):
    def all_gather(self, tensor, *, group=None, sync_grads=False):
        return super().all_gather(tensor).flip(0)


@caught_by("STR-10")
class Detached(DDPStrategy):
    def all_gather(self, tensor, *, group=None, sync_grads=False):
        gathered = super().all_gather(tensor).clone()
        gathered[self.global_rank] = tensor
        return gathered


@caught_by("STR-11", says="gathered")
class NumbersFromElsewhere(DDPStrategy):
    """Answers every shape, with what nobody has sent where they differ."""

    def all_gather(self, tensor, *, group=None, sync_grads=False):
        return torch.full((self.world_size, 99), -1.0)


@caught_by("STR-11")
class OneRankComplains(DDPStrategy):
    def all_gather(self, tensor, *, group=None, sync_grads=False):
        if tensor.shape != (2,):
            raise ValueError("my shape is odd")
        return tensor.unsqueeze(0)


@caught_by("STR-12")
class EverybodyIsZero(DDPStrategy):
    @property
    def is_global_zero(self):
        return True


@caught_by("STR-12")
class ZeroUntilSetUp(DDPStrategy):
    @property
    def global_rank(self):
        return super().global_rank if dist.is_initialized() else 0


@caught_by("STR-13", "STR-47")
class NoBroadcast(DDPStrategy):
    def sync_module(self, module):
        pass

    def configure_ddp(self):
        self.ddp_options = {"init_sync": False}
        super().configure_ddp()


@caught_by("SYS-02", kind="strategy")
@caught_by("STR-14", "STR-18")
class SumsGradients(DDPStrategy):
    def optimizer_step(self, optimizer, closure=None):
        for parameter in self.precision.main_params(optimizer):
            parameter.grad.mul_(self.world_size)
        return super().optimizer_step(optimizer, closure)


class Pretends:
    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


@caught_by("STR-15")
class SyncsAnyway(DDPStrategy):
    def no_backward_sync(self):
        return Pretends()


@caught_by("STR-15")
class NeverSyncs(DDPStrategy):
    def module_step(self, name):
        step = super().module_step(name)

        def local(*arguments):
            with self.model.no_sync():
                return step(*arguments)

        return local


@caught_by("STR-16")
class StaleOptimizer(DDPStrategy):
    def setup_optimizers(self, optimizers, lr_scheduler_configs=()):
        copies = [type(o)([nn.Parameter(p.detach().clone()) for p in self.module.parameters()]) for o in optimizers]
        super().setup_optimizers(copies, lr_scheduler_configs)


@caught_by("STR-17")
class Drifts(DDPStrategy):
    def optimizer_step(self, optimizer, closure=None):
        stepped = super().optimizer_step(optimizer, closure)
        with torch.no_grad():
            for parameter in self.precision.main_params(optimizer):
                parameter.add_(1e-6 * self.global_rank)
        return stepped


@caught_by("STR-19")
class NoManualSync(DDPStrategy):
    def manual_backward(self, loss, *args, **kwargs):
        self.backward(loss, *args, **kwargs)


@caught_by("STR-20")
class SkipsUnused(DDPStrategy):
    """Makes no step at all when a parameter was not used."""

    def __init__(self, **options):
        super().__init__(find_unused_parameters=True, **options)

    def optimizer_step(self, optimizer, closure=None):
        unused = [p for p in self.module.parameters() if p.grad is None]
        return True if unused else super().optimizer_step(optimizer, closure)


@caught_by("STR-21")
class Prefixed(DDPStrategy):
    def module_state_dict(self):
        return {f"module.{name}": value for name, value in super().module_state_dict().items()}


@caught_by("SYS-03", kind="strategy")
@caught_by("STR-22")
class ForgetsOptimizer(DDPStrategy):
    def load_optimizer_state(self, optimizer, state):
        pass


@caught_by("STR-23")
class SavesHalf(DDPStrategy):
    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        half = {name: tensor.bfloat16() for name, tensor in checkpoint["model"].items()}
        super().save_checkpoint({"model": half}, path)


@caught_by("STR-24")
class SavesByItself(DDPStrategy):
    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        if self.is_global_zero:
            TorchCheckpointIO().save_checkpoint(checkpoint, path)
        self.barrier()


@caught_by("STR-24")
class DropsOptions(DDPStrategy):
    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        super().save_checkpoint(checkpoint, path)


@caught_by("STR-25")
class NeverStrict(DDPStrategy):
    def load_module_state_dict(self, state, *, strict=True):
        return super().load_module_state_dict(state, strict=False)


@caught_by("STR-26")
class StateElsewhere(DDPStrategy):
    def load_optimizer_state(self, optimizer, state):
        super().load_optimizer_state(optimizer, state)
        for values in optimizer.state.values():
            values.update({n: v.to("meta") for n, v in values.items() if isinstance(v, torch.Tensor)})


@caught_by("STR-27")
class AllOnFirst(DDPStrategy):
    @property
    def root_device(self):
        return torch.device("cpu", 0)


@caught_by("STR-28")
class SameDataForAll(DDPStrategy):
    @property
    def distributed_sampler_kwargs(self):
        return {"num_replicas": self.world_size, "rank": 0}


@caught_by("STR-28")
class NoDivision(DDPStrategy):
    @property
    def distributed_sampler_kwargs(self):
        return None


@caught_by("STR-29")
class KeepsTheGroup(DDPStrategy):
    def teardown(self):
        self._owns_process_group = False
        super().teardown()


@caught_by("STR-29")
class LeavesAThread(DDPStrategy):
    def setup_environment(self):
        super().setup_environment()
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


@caught_by("STR-29")
class LeavesAVariable(DDPStrategy):
    def setup_environment(self):
        super().setup_environment()
        os.environ["OMP_NUM_THREADS"] = "7"


@caught_by("STR-29", says="processes are left")
class LeavesAProcess(DDPStrategy):
    def setup_environment(self):
        subprocess.Popen(["sleep", "20"])
        super().setup_environment()


@caught_by("STR-30")
class TeardownNeedsSetup(DDPStrategy):
    def setup_communication(self):
        self.connection = object()
        return super().setup_communication()

    def teardown(self):
        super().teardown()
        del self.connection


@caught_by("STR-31", says="not been initialized")
class OneLife(DDPStrategy):
    done = False

    def setup_environment(self):
        if not self.done:
            super().setup_environment()
        self.done = True


@caught_by("STR-35")
class LocalNorm(DDPStrategy):
    def clip_gradients(self, optimizer, clip_val, algorithm="norm"):
        return super().clip_gradients(optimizer, clip_val / (1 + self.global_rank), algorithm)


@caught_by("STR-36")
class OwnPrecision(DDPStrategy):
    @property
    def precision(self):
        return SinglePrecision()


with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)

    @caught_by("STR-37")
    class TakesWhatItDoesNotDeclare(DDPStrategy):
        """The class says that it works with one precision; its instances take any, so resolve refuses nothing."""

        precisions = frozenset({"32-true"})

        def __init__(self, **options):
            super().__init__(**options)
            self.precisions = None


@caught_by("STR-37")
class CallsMoreThanItDeclares(DDPStrategy):
    """The class says which methods it calls; its instances take a precision that overrides others."""

    precision_methods = frozenset({"setup", "teardown", "convert_module", "check_optimizer", "backward"})

    def __init__(self, **options):
        super().__init__(**options)
        self.precision_methods = None


@caught_by("STR-37", says="must be a frozenset of words")
class LacksOneWord(DDPStrategy):
    lacks = "loss_scaling"


@caught_by("STR-36", says="convert_input was never called")
class DeclaresWhatItNeverCalls(DDPStrategy):
    precision_methods = frozenset({"setup", "convert_input", "convert_module"})

    def with_precision(self, function):
        return function


class Noisy(DDPStrategy):
    """Averages gradients with an error of 1% of each."""

    features = frozenset({"lossy"})

    def optimizer_step(self, optimizer, closure=None):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(1.01)
        return super().optimizer_step(optimizer, closure)


@caught_by("STR-14")
class LossyWithoutTolerances(Noisy):
    pass


@caught_by("STR-14")
class LossierThanItDeclares(Noisy):
    tolerances = {"weights": 1e-4, "losses": 0.1}


@caught_by("STR-18")
class TolerancesWithoutBeingLossy(Noisy):
    features = frozenset()
    tolerances = {"weights": 0.1, "losses": 0.1}


@caught_by("STR-38", says="CollectiveTimeoutError")
class AsksEverybody(DDPStrategy):
    def __init__(self, **options):
        super().__init__(timeout=timedelta(seconds=8), **options)

    @property
    def is_data_leader(self):
        store = self.setup_communication()
        return store is not None


@caught_by("STR-39")
class DestroysAnyGroup(DDPStrategy):
    def teardown(self):
        super().teardown()
        if dist.is_initialized():
            dist.destroy_process_group()


@caught_by("STR-41")
class WrapsAnything(DDPStrategy):
    def wrap_model(self, *, training):
        self.configure_ddp()


@caught_by("STR-42")
class DrawsNumbers(DDPStrategy):
    drawn = torch.Generator()

    def optimizer_step(self, optimizer, closure=None):
        for parameter in self.precision.main_params(optimizer):
            parameter.grad.add_(1e-3 * torch.rand((), generator=self.drawn))
        return super().optimizer_step(optimizer, closure)


@caught_by("STR-45")
class InTheOrderOfKeys(DDPStrategy):
    def reduce(self, value, op="mean", *, group=None):
        if isinstance(value, dict):
            together = super().reduce(torch.stack(list(value.values())), op)
            return dict(zip(value, together, strict=True))
        return super().reduce(value, op, group=group)


@caught_by("STR-46")
class DenseMemory(DDPStrategy):
    """Works on a view's memory from its start, as gloo does."""

    def reduce(self, value, op="mean", *, group=None):
        if isinstance(value, torch.Tensor):
            value = torch.as_strided(value, value.shape, torch.empty(value.shape).stride())
        return super().reduce(value, op, group=group)


@caught_by("STR-48")
class SwallowsErrors(DDPStrategy):
    def barrier(self, name=""):
        try:
            super().barrier(name)
        except Exception:
            if self.global_rank:
                pass
            else:
                raise


@caught_by("SYS-04", kind="strategy")
class PredictsBackwards(DDPStrategy):
    def module_step(self, name):
        step = super().module_step(name)
        return step if name != "predict_step" else lambda *arguments: step(*arguments).flip(0)


class Feedback(DDPStrategy):
    """A strategy of users' that keeps what bfloat16 leaves of each rank's gradients for its next step."""

    def __init__(self, **options):
        super().__init__(**options)
        self.errors = {}

    def backward(self, loss, *args, **kwargs):
        super().backward(loss, *args, **kwargs)
        for name, parameter in self.module.named_parameters():
            whole = parameter.grad + self.errors.get(name, 0.0)
            parameter.grad.copy_(whole.bfloat16())
            self.errors[name] = whole - parameter.grad + 1e-6 * self.global_rank

    def rank_state_dict(self):
        return dict(self.errors)

    def load_rank_state_dict(self, state):
        self.errors = {name: error.clone() for name, error in state.items()}


@caught_by("STR-49", says="after it was loaded")
class ForgetsErrors(Feedback):
    def load_rank_state_dict(self, state):
        pass


@caught_by("STR-49", says="off by")
class ForgetsSomeErrors(Feedback):
    """Lets a resumed run begin with what it doesn't save."""

    def rank_state_dict(self):
        return {"errors": len(self.errors)}

    def load_rank_state_dict(self, state):
        self.errors = dict.fromkeys(map(str, range(state["errors"])), 0.0)


@caught_by("STR-49", says="no plain data")
class SavesObjects(Feedback):
    def rank_state_dict(self):
        return {"errors": threading.local}


@caught_by("STR-50", says="IndexError")
class OwnPlaceOnly(Feedback):
    def reshard_rank_state(self, states, *, rank, world_size):
        return states[rank]


@caught_by("STR-50", says="must name")
class SaysNothing(Feedback):
    def reshard_rank_state(self, states, *, rank, world_size):
        raise CheckpointMismatchError("another world")


@caught_by("STR-50", says="no per-rank state to refuse")
class RefusesNothing(DDPStrategy):
    def reshard_rank_state(self, states, *, rank, world_size):
        raise CheckpointMismatchError(f"{self.alias or type(self).__name__}: {len(states)} ranks, {world_size}")


@caught_by("STR-51", says="dtype of 'exp_avg'")
class CastsMoments(DDPStrategy):
    def load_optimizer_state(self, optimizer, state):
        optimizer.load_state_dict(state)


@caught_by("STR-101", says="after 3 steps of a loop")
class CallsPastItsWrapper(DDPStrategy):
    def module_call(self, forward, *, training):
        return forward


@caught_by("STR-97")
class SparseDividedInPlaceStrategy(DDPStrategy):
    """Wraps the model in DistributedDataParallel, and copies no sparse gradient."""

    def wrap_model(self, *, training: bool) -> None:
        super().wrap_model(training=training)
        for part in self.module.modules():
            if isinstance(part, torch.nn.Embedding) and part.weight._backward_hooks:
                part.weight._backward_hooks.clear()


@caught_by("STR-55", says="set-up")
class SetsUpTwice(DDPStrategy):
    def setup(self, trainer):
        super().setup(trainer)
        self.setup_model(training=trainer.state.fn == "fit")


@caught_by("STR-55", says="leaves trainer set")
class KeepsTheTrainer(DDPStrategy):
    def teardown(self):
        before = self.trainer
        super().teardown()
        self.trainer = before


@caught_by("STR-56", says="must raise DistributedError")
class ComparesNothing(DDPStrategy):
    def check_replicas(self):
        pass


@caught_by("STR-56")
class ComparesAlways(DDPStrategy):
    def check_replicas(self):
        declared, type(self).compares_replicas = self.compares_replicas, True
        try:
            super().check_replicas()
        finally:
            type(self).compares_replicas = declared


@caught_by("STR-57", says="batch_group")
class NormalizesItsShare(DDPStrategy):
    def batch_group(self):
        return None


@caught_by("STR-58")
class RefusesTables(DDPStrategy):
    def setup_model(self, *, training=True):
        for part in self.module.modules():
            if isinstance(part, nn.Embedding) and part.max_norm is not None:
                raise ModelError("an embedding with max_norm")
        super().setup_model(training=training)


@caught_by("STR-58", says="scale_grad_by_freq")
class CountsInItsShare(DDPStrategy):
    """Lets each rank count how often its own share of the batch looks a row up."""

    def setup_model(self, *, training=True):
        tables = [part for part in self.module.modules() if isinstance(part, nn.Embedding)]
        counted = [part.scale_grad_by_freq for part in tables]
        for part in tables:
            part.scale_grad_by_freq = False
        super().setup_model(training=training)
        for part, before in zip(tables, counted, strict=True):
            part.scale_grad_by_freq = before


@caught_by("STR-66", says="after an accumulation")
class LeavesTheFrozen(DDPStrategy):
    """Averages nothing of what was accumulated before a change."""

    def _compare_trained(self):
        pass


@caught_by("STR-66", says="unfroze")
class LeavesTheUnfrozen(DDPStrategy):
    def _unfrozen_in_step(self):
        super()._unfrozen_in_step()
        return []


@caught_by("STR-67", says="ran through the wrapper")
class PassesTheWrapperBy(DDPStrategy):
    def setup_optimizers(self, optimizers, lr_scheduler_configs=()):
        model = self.model
        super().setup_optimizers(optimizers, lr_scheduler_configs)
        self.model, self.model_is_connected = model, False


@caught_by("STR-68", says="with None for a beta")
class ComparesNumbersOfGroups(DDPStrategy):
    def check_optimizer_state(self, optimizer, state):
        if len(state.get("param_groups", ())) != len(optimizer.param_groups) or "state" not in state:
            raise CheckpointMismatchError("other groups")
        for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
            if own.keys() - group.keys():
                raise CheckpointMismatchError("another group")


@caught_by("STR-68", says="must not raise")
class WantsTheSameTypes(DDPStrategy):
    def check_optimizer_state(self, optimizer, state):
        super().check_optimizer_state(optimizer, state)
        for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
            if any(type(group[name]) is not type(value) for name, value in own.items()):
                raise CheckpointMismatchError("another type")


@caught_by("STR-68", says="check_scheduler_state")
class TakesAnySchedule(DDPStrategy):
    def check_scheduler_state(self, config, state):
        pass


@caught_by("STR-69", says="no mark after a validation step")
class MarksTrainingAlone(DDPStrategy):
    def marked(self, name, step):
        return step


@caught_by("STR-69", says="what the validation step returns")
class MarksInPlaceOfTheOutput(DDPStrategy):
    def marked(self, name, step):
        marked = super().marked(name, step)
        return step if marked is step else lambda *arguments: (marked(*arguments), None)[1]


@caught_by("STR-98", says="precision is not what the constructor was given")
class PrecisionOfItsOwn(DDPStrategy):
    def __init__(self, **options):
        super().__init__(**options)
        self._precision = SinglePrecision()


@caught_by("STR-98", says="two precisions")
class TakesTheLastPrecision(DDPStrategy):
    def __init__(self, *, precision=None, precision_plugin=None, **options):
        super().__init__(precision=precision_plugin or precision, **options)


@caught_by("STR-99", says="after the set-up")
class WatchesItselfAlone(DDPStrategy):
    def _watch_ranks(self, store):
        if self._watch is None:
            super()._watch_ranks(store)


@caught_by("STR-59", says="the user's code returns None")
class ExplainsItsOwnErrors(DDPStrategy):
    def explain(self, error):
        return super().explain(error) if isinstance(error, RuntimeError) else None
