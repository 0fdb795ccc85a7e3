"""Train fault-tolerant data parallel: this process is one of the replica groups that train one model together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from torchhal.accelerators import Accelerator
from torchhal.checkpoint import CheckpointIO
from torchhal.cluster import ClusterEnvironment
from torchhal.errors import DistributedError, ModelError
from torchhal.memory_estimate import MemoryEstimate, ModelMemory
from torchhal.plugin import Availability
from torchhal.precision import Precision
from torchhal.strategies import SingleDeviceStrategy, StepResult, Strategy
from torchhal.trainer.data import distribute
from torchhal.trainer.loops import DataPositionChanged, StopOnSignal
from torchhal_torchft import _config as config
from torchhal_torchft import _sdk as sdk
from torchhal_torchft import _state as state
from torchhal_torchft._compatibility import check_model, check_schedulers

if TYPE_CHECKING:
    from torchhal_torchft._group import ReplicaGroup

_MINUTE = timedelta(seconds=60)
_SEED = 0  # of the order in which all groups alike shuffle the data that they share out, with the epoch's number


class TorchFTStrategy(SingleDeviceStrategy):
    """Replica groups train one model through TorchFT; each may leave, fail and rejoin while the others train.

    Each run of the script is one group: one process, one device, its own log and checkpoints. Before a step the
    groups that run form a quorum, through the lighthouse. One that is behind takes over weights, optimizer,
    schedulers, gradient scaler and counters of another, its place in the data included. Then each trains on a batch
    of its own, and all step with the mean of their gradients. If that fails, because one has died, none steps: the
    batch is dropped, and the next quorum is formed without it.

    Arguments that TorchFT has, too, have its names and meanings, and its defaults but for ``quorum_timeout``, a minute
    there.

    Args:
        lighthouse_addr: URL of the lighthouse, a process started with ``torchft_lighthouse``. None:
            ``TORCHFT_LIGHTHOUSE`` in the environment.
        replica_rank: which share of the data is this group's, from 0. None: ``REPLICA_GROUP_ID``.
        num_replica_groups: into how many shares the data is divided: the most groups that there can be. None:
            ``NUM_REPLICA_GROUPS``. Without both, each group reads all data in an order of its own.
        replica_id: this group's name in messages. None: made of ``replica_rank``.
        min_replica_size: the fewest groups to step with; fewer wait. The lighthouse has its own, ``--min_replicas``.
        timeout: how long a collective, or a download of the others' state, may take.
        quorum_timeout: how long to wait for a quorum. More than ``timeout``, and than groups may be apart, for
            example by a validation.
        connect_timeout: how long to try to reach the lighthouse and another group.
        heartbeat_interval: between two heartbeats to the lighthouse, which counts a group as dead after its own
            ``--heartbeat_timeout_ms``.
        quorum_retries: requests to the lighthouse to repeat within ``quorum_timeout``, which a restarted one needs.
        max_retries: steps in a row that may be refused before this group gives up. None: any number.
        init_sync: at step 0 all groups take the weights of one. False where all begin with the same.
        hostname: this host's name or address, as the other groups reach it. None: the host's own name.
        port: where this group's manager listens. None: ``TORCHFT_MANAGER_PORT``, or any free one.
        verbose: log what TorchFT does.

    Raises:
        ConfigurationError: a wrong argument, no lighthouse's address, TorchFT missing or of another version.
        DistributedError: from ``fit``, when the lighthouse does not answer or no quorum is found in time.
        CheckpointMismatchError: from ``fit``, when the other groups train something else.
    """

    @classmethod
    def availability(cls) -> Availability:
        return sdk.TORCHFT.availability()

    def __init__(
        self,
        *,
        lighthouse_addr: str | None = None,
        replica_rank: int | None = None,
        num_replica_groups: int | None = None,
        replica_id: str | None = None,
        min_replica_size: int = 1,
        timeout: timedelta = _MINUTE,
        quorum_timeout: timedelta = 5 * _MINUTE,
        connect_timeout: timedelta = _MINUTE,
        heartbeat_interval: timedelta = timedelta(milliseconds=100),
        quorum_retries: int = 0,
        max_retries: int | None = None,
        init_sync: bool = True,
        hostname: str | None = None,
        port: int | None = None,
        verbose: bool = False,
        accelerator: Accelerator | None = None,
        precision: Precision | None = None,
        precision_plugin: Precision | None = None,
        checkpoint_io: CheckpointIO | None = None,
        cluster_environment: ClusterEnvironment | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            precision=precision,
            precision_plugin=precision_plugin,
            checkpoint_io=checkpoint_io,
            cluster_environment=cluster_environment,
        )
        sdk.TORCHFT.check()
        self.settings = config.check(
            lighthouse_addr=lighthouse_addr,
            replica_id=replica_id,
            replica_rank=replica_rank,
            num_replica_groups=num_replica_groups,
            min_replica_size=min_replica_size,
            timeout=timeout,
            quorum_timeout=quorum_timeout,
            connect_timeout=connect_timeout,
            heartbeat_interval=heartbeat_interval,
            quorum_retries=quorum_retries,
            max_retries=max_retries,
            init_sync=init_sync,
            hostname=hostname,
            port=port,
            verbose=verbose,
        )
        self.timeout = timeout
        self._group: ReplicaGroup | None = None
        self._forget_step()
        self._participants = 0

    def _forget_step(self) -> None:
        self._met = False  # a quorum has been found for the step that is being made
        self._agreed: bool | None = None  # whether that step may be made; None: not decided yet

    @property
    def _me(self) -> str:
        return f"strategy {self.alias or 'torchft'!r}"

    @property
    def participants(self) -> int:
        """The number of replica groups in the latest quorum, this one included; 0 while this one does not train."""
        return self._participants

    @property
    def joining(self) -> dict[str, Any]:
        """The arguments for the strategy of a group that joins this one's run; empty while none can.

        Checks: STR-43.
        """
        return {"lighthouse_addr": self.settings.lighthouse_addr} if self._group is not None else {}

    # -- set-up ----------------------------------------------------------------------------------------------

    def check_sync_batchnorm(self, world_size: int) -> None:
        Strategy.check_sync_batchnorm(self, world_size)  # groups may leave in the midst of a forward

    def setup_optimizers(self, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()) -> None:
        assert self.module is not None
        check_model(self._me, self.module, optimizers)
        check_schedulers(self._me, lr_scheduler_configs)
        super().setup_optimizers(optimizers, lr_scheduler_configs)
        self._leave()
        sdk.load(verbose=self.settings.verbose)
        from torchhal_torchft._group import ReplicaGroup

        self._group = ReplicaGroup(
            self.settings,
            state=lambda: state.collect(self),
            load_state=lambda taken: state.load(self, taken),
            look=self._stop_if_asked,
        )

    def process_dataloader(self, loader: Any, *, training: bool) -> Any:
        """Return the group's share of the training data; evaluation reads all of it."""
        share, trainer = self.settings.share, self.trainer
        if not training or share is None or not isinstance(loader, DataLoader) or not trainer.use_distributed_sampler:
            return loader
        if isinstance(loader.dataset, IterableDataset):
            trainer.warn_once(
                f"the IterableDataset {type(loader.dataset).__name__} is read whole by each replica group unless it "
                "shards itself"
            )
            return loader
        return distribute(loader, training=True, seed=_SEED, **share)

    # -- steps -----------------------------------------------------------------------------------------------

    needs_trainer: ClassVar[str] = (
        "lets a replica group that has fallen behind take another position in the data, which its loops move to"
    )

    def step_function(self, name: str) -> Callable[..., Any]:
        function = super().step_function(name)
        if name != "training_step" or self._group is None:
            return function

        def step(*args: Any) -> Any:
            if not self._met:
                self._meet()
            result = function(*args)
            if result is None:  # the others wait for this group's gradients until they time out
                raise ModelError(
                    "training_step returned None, and the other replica groups wait for this one's gradients: return a "
                    "loss, one of zero for a batch that isn't to count, such as 0.0 * loss"
                )
            return result

        return step

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self._may_step(optimizer):
            super().unscale_gradients(optimizer)

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: str = "norm") -> torch.Tensor | None:
        return super().clip_gradients(optimizer, clip_val, algorithm) if self._may_step(optimizer) else None

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        """Step with the mean gradient; return NOT_DUE where the groups did not all commit, which is no step."""
        if self._group is None:
            return super().optimizer_step(optimizer, closure)
        if closure is not None:  # as of an optimizer that evaluates once; others are refused
            with torch.enable_grad():
                closure()
        try:
            return super().optimizer_step(optimizer) if self._may_step(optimizer) else StepResult.NOT_DUE
        finally:
            self._forget_step()

    def _meet(self, *, before_forward: bool = True) -> bool:
        """Find a quorum for the next step; return True if the gradients will be of the weights that all groups have.

        Raises:
            DataPositionChanged: this group continues at another place in the data.
        """
        group, trainer = self._group, self.trainer
        assert group is not None
        if trainer is not None:
            group.load_state_dict({"step": trainer.global_step, "batches_committed": group.batches_committed()})
        fit = None if trainer is None else trainer.fit_loop
        place = None if fit is None else (fit.epoch, fit.batches_done)
        taken = group.taken
        self._agreed = None
        group.begin()
        self._met = True
        self._tell(group, joined=group.taken != taken)
        if group.taken == taken:
            return True
        if before_forward and fit is not None and (fit.epoch, fit.batches_done) != place:
            raise DataPositionChanged
        return before_forward

    def _may_step(self, optimizer: Optimizer) -> bool:
        """Average the gradients once per step; return True if all groups have them."""
        group = self._group
        if group is None:
            return True
        if self._agreed is None:
            from torchhal_torchft._gradients import average

            # a loop by hand may come here without step_function
            average(group, optimizer, contributes=self._met or self._meet(before_forward=False))
            cause = group.errored()
            try:
                self._agreed = group.should_commit()
            except (RuntimeError, TimeoutError) as error:  # max_retries, or its own server is gone
                raise DistributedError(f"replica group {group.name!r}: {error}") from error
            self._met = False
            if not self._agreed:
                optimizer.zero_grad()
                why = f"only {group.num_participants()} replica group(s)" if cause is None else cause.original_exception
                _say(f"step {group.current_step() + 1} is not taken, and its batch dropped: {_first_line(why)}")
        return self._agreed

    def _tell(self, group: ReplicaGroup, *, joined: bool) -> None:
        count = group.num_participants()
        if joined:
            _say(f"joined at step {group.current_step()}, with the state of another replica group")
        if count != self._participants:
            _say(f"{count} replica group{'s' * (count > 1)} from step {group.current_step() + 1} on")
            if count > 1 and self.settings.share is None and self.trainer is not None:
                self.trainer.warn_once(
                    "each replica group reads all data: give replica_rank= and num_replica_groups= to share it out, or "
                    "see that each shuffles it by a seed of its own"
                )
        self._participants = count

    def _stop_if_asked(self) -> None:
        """Stop the run if that was requested while this group waited: nothing has been done yet for the batch."""
        if (
            self.trainer is not None
            and self.watch.stop_requested
            and (signum := self.watch.agree_on_stop_step()) is not None
        ):
            raise StopOnSignal(signum)

    # -- the end ---------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        group, self._group = self._group, None
        self._forget_step()
        self._participants = 0
        if group is not None:
            group.close()

    def teardown(self) -> None:
        try:
            self._leave()
        finally:
            super().teardown()

    # -- memory ----------------------------------------------------------------------------------------------

    def memory_per_rank(self, model: ModelMemory, world_size: int) -> MemoryEstimate:
        return (
            super()
            .memory_per_rank(model, world_size)
            .plus(model.estimate().gradients, "gradients are averaged in a copy, in host memory")
        )


def _first_line(what: Any) -> str:
    text = str(what) or type(what).__name__
    return text.splitlines()[0]


def _say(text: str) -> None:
    print(f"torchhal: {text}", file=sys.stderr, flush=True)
