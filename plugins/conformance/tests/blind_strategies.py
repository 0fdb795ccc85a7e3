"""Strategies of one defect each, written from the contract by somebody who had read no check."""

from contextlib import contextmanager

from sound_components import FlatAverage, SameDDP, SameSingle
from zoo import caught_by

from torchhal.distributed import collectives
from torchhal.strategies import ParallelStrategy


@caught_by("STR-45")
class OwnKeyOrder(SameDDP):
    """Reduces the values of a dict in the order in which this rank has inserted its keys."""

    # strategy.md, reduce: "the keys of a mapping may come in any order"
    # A mean is silently made of one rank's loss and another's accuracy.

    def reduce(self, value, op="mean", *, group=None):
        if type(value) is dict:
            return {key: self.reduce(each, op, group=group) for key, each in value.items()}
        return super().reduce(value, op, group=group)


@caught_by("STR-90")
class FirstOptimizerOnly(SameDDP):
    """Restores the state of the first optimizer only, as an engine with one optimizer would."""

    # strategy.md, load_optimizer_state: "Continue from the saved state of an optimizer." ("optimizer: one of
    # optimizers")
    # The second optimizer silently begins anew in a resumed run.

    def load_optimizer_state(self, optimizer, state):
        if optimizer is self.optimizers[0]:
            super().load_optimizer_state(optimizer, state)


@caught_by("STR-13")
class ForgetsBuffers(FlatAverage):
    """Sends the parameters of rank 0 to all ranks, and no buffers."""

    # strategy.md, setup_model: "afterwards all ranks have the parameters and buffers of rank 0."
    # Each rank silently normalizes with statistics of its own.

    def sync_module(self, module):
        if self.world_size > 1:
            with self.guard("broadcast of the initial weights"):
                self.check_same_module(module)
                collectives.broadcast_tensors(list(module.parameters()))


@caught_by("STR-15", says="can't be entered again")
class AveragesTheLast(FlatAverage):
    """Averages what the last backward of an accumulation has added, and leaves the others' gradients as they are."""

    # strategy.md, backward: "Accumulate the gradients of loss, averaged over the ranks unless under no_backward_sync.";
    # no_backward_sync: "the context is entered for all but the last micro-batch of each step" - so the last one has to
    # average what was accumulated under it.
    # With accumulate_grad_batches the ranks silently train apart.

    _paused = False
    compares_replicas = False

    def no_backward_sync(self):
        return self._pausing()

    @contextmanager
    def _pausing(self):
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def backward(self, loss, *args, **kwargs):
        if self._paused:
            ParallelStrategy.backward(self, loss, *args, **kwargs)
            return
        before = {parameter: parameter.grad for parameter in self.module.parameters()}
        for parameter in before:
            parameter.grad = None
        super().backward(loss, *args, **kwargs)
        for parameter, gradient in before.items():
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


@caught_by("STR-62")
class TeardownStopsAtTheIO(SameDDP):
    """Flushes the checkpoint IO before anything else is torn down, which nothing is when that fails."""

    # strategy.md, teardown: "Each component is torn down even when another one fails; the first error is raised at the
    # end."
    # A failed last save leaves the process group and the other ranks behind.

    def teardown(self):
        if self._checkpoint_io is not None:
            self._checkpoint_io.teardown()
        super().teardown()


@caught_by("STR-91")
class SamplesByLocalRank(SameDDP):
    """Gives the sampler the rank within the node."""

    # strategy.md, distributed_sampler_kwargs: "num_replicas and rank for a sampler" (ParallelStrategy: one share for
    # each process of the job; global_rank is "Rank of this process among all")
    # On two nodes half of the data is silently never seen, and the other half twice.

    @property
    def distributed_sampler_kwargs(self):
        return {"num_replicas": self.world_size, "rank": self.local_rank}


@caught_by("STR-15")
class AveragesTheLastAgain(AveragesTheLast):
    """AveragesTheLast, with a context that can be entered many times (that of the first one can't)."""

    def no_backward_sync(self):
        return _Pause(self)


class _Pause:
    def __init__(self, strategy):
        self.strategy = strategy

    def __enter__(self):
        self.strategy._paused = True

    def __exit__(self, *error):
        self.strategy._paused = False


@caught_by("STR-62")
class TeardownInSequence(SameSingle):
    """Tears the components down one after the other, each once: an error in one leaves the rest as they are."""

    def teardown(self):
        self.release_model()
        for part in (self._checkpoint_io, self._precision, self.cluster_environment, self._accelerator):
            if part is not None:
                part.teardown()
