"""Strategies whose set-up, numbers before it, or estimates are broken in one way, over ddp."""

import os
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from zoo import caught_by

from torchhal.distributed import collectives
from torchhal.launchers import ExternalLauncher
from torchhal.strategies import DDPStrategy, SingleDeviceStrategy


@caught_by("STR-12", says="(local rank, node rank)")
class CountsNodesFromOne(DDPStrategy):
    @property
    def node_rank(self):
        return super().node_rank + 1


@caught_by("STR-19", says="in a new life's beginning")
class RemembersTheLastLife(DDPStrategy):
    def connect(self, module):
        synced = self.gradients_synced
        super().connect(module)
        self.gradients_synced = synced


@caught_by("STR-39", says="a second teardown")
class DestroysWhatItFinds(DDPStrategy):
    def teardown(self):
        ended = self.module is None and not self.is_set_up
        super().teardown()
        if ended and dist.is_initialized():
            dist.destroy_process_group()


@caught_by("STR-39", says="cannot be called on meta tensors")
class TakesAnyGroup(DDPStrategy):
    def check_group(self, group):
        pass


@caught_by("STR-41", says="no_sync")
class PausesItsWrapper(DDPStrategy):
    """Has a context for a wrapper, which a model with nothing to train hasn't."""

    def no_backward_sync(self):
        return _Paused(self)


class _Paused:
    def __init__(self, strategy):
        self.strategy = strategy

    def __enter__(self):
        self.context = self.strategy.model.no_sync()
        self.context.__enter__()

    def __exit__(self, *exc_info):
        self.context.__exit__(*exc_info)


@caught_by("STR-41", says="refused by no ModelError, but NotImplementedError")
class MovesWithoutALook(DDPStrategy):
    def model_to_device(self):
        self.module.to(self.root_device)


@caught_by("STR-50", says="must name '1'")
class NamesItsOwnNumber(SingleDeviceStrategy):
    def reshard_rank_state(self, states, *, rank, world_size):
        return super().reshard_rank_state(states, rank=rank, world_size=len(states))


NamesItsOwnNumber.reshard_rank_state.__qualname__ = "StrategyState.reshard_rank_state"  # as where it is inherited


@caught_by("STR-53", says="make_launcher() doesn't call")
class LaunchesAtOnce(DDPStrategy):
    def make_launcher(self):
        return ExternalLauncher()


@contextmanager
def joining(environment, join):
    with mock.patch.dict(vars(environment), {"join": join}):
        yield


@caught_by("STR-53", says="the ranks have not met yet")
class LeavesItToTheLauncher(DDPStrategy):
    def setup_environment(self):
        with joining(self.environment, lambda timeout: None):
            super().setup_environment()


@caught_by("STR-53", says="the timeout of join()")
class WaitsAsLongAsItLikes(DDPStrategy):
    def make_launcher(self):
        join = self.environment.join
        with joining(self.environment, lambda timeout: join(timedelta(minutes=30))):
            return super().make_launcher()


@caught_by("STR-53", says="num_nodes after make_launcher()")
class KeepsItsNumberOfNodes(DDPStrategy):
    def make_launcher(self):
        self.left_to_launcher -= {"num_nodes"}
        return super().make_launcher()


@caught_by("STR-54", says="parameters: this rank holds")
class SharesInItsEstimate(DDPStrategy):
    """Counts each rank's share of weights of which each rank has all."""

    def memory_per_rank(self, model, world_size):
        estimate = super().memory_per_rank(model, world_size)
        return replace(estimate, parameters=estimate.parameters // world_size)


@caught_by("STR-54", says="optimizer: this rank holds")
class ForgetsTheOptimizer(DDPStrategy):
    def memory_per_rank(self, model, world_size):
        return replace(super().memory_per_rank(model, world_size), optimizer=0)


@caught_by("STR-100", says="says that a rank holds")
class CountsActivationsAlone(DDPStrategy):
    """Forgets in its phases what is there between steps."""

    def memory_by_phase(self, step, model, world_size):
        found = super().memory_by_phase(step, model, world_size).plus(-self.memory_per_rank(model, world_size).total)
        return replace(found, setup=None, save=None)


@caught_by("STR-100", says="leaves out the activations")
class ForgetsActivations(DDPStrategy):
    def memory_by_phase(self, step, model, world_size):
        return super().memory_by_phase(replace(step, moments=()), model, world_size)


@caught_by("STR-100", says="differs between ranks")
class AnswersForItself(DDPStrategy):
    """Counts what its own rank has more than the others."""

    def memory_by_phase(self, step, model, world_size):
        return super().memory_by_phase(step, model, world_size).plus(int(os.environ["RANK"]))


@caught_by("STR-57", says="a batch norm of a module that was replaced")
class KeepsAllSynchronized(DDPStrategy):
    def connect(self, module):
        self._synchronized = []
        super().connect(module)


@caught_by("STR-60", says="was given, a step later")
class AccumulatesInThem(DDPStrategy):
    def load_accumulated_gradients(self, gradients):
        for name, parameter in self.module.named_parameters():
            parameter.grad = gradients[name].to(parameter.device)


@caught_by("STR-66", says="frozen other layers")
class ComparesNothing(DDPStrategy):
    def check_same_trained(self, changed):
        self.barrier("comparison")


@caught_by("STR-67", says="model_is_connected is true")
class KeepsTheLastWrapper(DDPStrategy):
    def connect(self, module):
        connected = self.model_is_connected
        super().connect(module)
        self.model_is_connected = connected


@caught_by("STR-67", says="ModelError")
class WrapsInEachEpoch(DDPStrategy):
    """Has a new wrapper in each epoch, which it can't have around what the precision has wrapped."""

    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        self._wrap_again()


@caught_by("STR-73", says="which is frozen now")
class AveragesWhatIsTrained(DDPStrategy):
    def sync_gradients(self):
        collectives.average_gradients(list(self.module.parameters()))


@caught_by("STR-74", says="'through' was called")
class GoesBackByItself(DDPStrategy):
    def backward(self, loss, *args, through=None, **kwargs):
        super().backward(loss, *args, **kwargs)


@caught_by("STR-81", says="mode=3")
class TakesAnyWord(DDPStrategy):
    def check_scheduler_state(self, config, state):
        own = config.scheduler.state_dict()
        words = {name: value for name, value in own.items() if isinstance(value, str)}
        super().check_scheduler_state(config, {**state, **words})


@caught_by("STR-90", says="an optimizer of its own list")
class KnowsTorchsOptimizersAlone(DDPStrategy):
    def load_optimizer_state(self, optimizer, state):
        if not type(optimizer).__module__.startswith("torch."):
            raise TypeError("it must be an optimizer of its own list")
        super().load_optimizer_state(optimizer, state)


@caught_by("STR-93", says="different paths")
class WritesWhereItIsTold(DDPStrategy):
    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        if "sharded" not in self.checkpoint_io.features:
            return super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)


@caught_by("STR-95", says="by clip_gradients")
class ClipsByTheScaledNorm(DDPStrategy):
    def clip_gradients(self, optimizer, clip_val, algorithm="norm"):
        return self.precision.clip_gradients(optimizer, clip_val, algorithm)


@caught_by("STR-99", says="before configure()")
class CountsNoProcess(DDPStrategy):
    @property
    def world_size(self):
        return 0 if self.cluster_environment is None else self.cluster_environment.world_size()


@caught_by("STR-99", says="root_device before configure()")
class HasADeviceAtOnce(DDPStrategy):
    @property
    def root_device(self):
        return super().root_device if self.devices else torch.device("cpu")
