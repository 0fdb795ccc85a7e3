"""Train decentralized: this process is one of the peers that train one model together."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.accelerators import Accelerator
from torchhal.capabilities import LOSS_SCALING, store
from torchhal.checkpoint import CheckpointIO
from torchhal.cluster import ClusterEnvironment
from torchhal.distributed.process import describe_exit, leave, write_stderr
from torchhal.errors import (
    CheckpointMismatchError,
    ConfigurationError,
    DistributedError,
    ModelError,
    UnsupportedCombinationError,
)
from torchhal.plugin import Availability
from torchhal.precision import Precision
from torchhal.strategies import SingleDeviceStrategy, StepResult, Strategy, around_call
from torchhal.trainer.logging import batch_size_of
from torchhal.vendor_package import availability_from
from torchhal_hivemind import _config as settings
from torchhal_hivemind import _sdk as sdk
from torchhal_hivemind._compatibility import check_model, check_schedulers
from torchhal_hivemind._optimizer_state import make_state
from torchhal_hivemind._process_cleanup import watch
from torchhal_hivemind._schedule import Schedule

if TYPE_CHECKING:
    from torchhal_hivemind._dht import Network
    from torchhal_hivemind._optimizer import Collaboration

_log = logging.getLogger("torchhal")

EPOCH = "collaboration_epoch"
"""Key of the strategy's state in checkpoints; releases before 0.2 had it in the optimizer's state."""
SAMPLES = "accumulated_samples"
"""Key of the number of samples behind the gradients of an accumulation."""

_GOODBYE = 10.0  # seconds for the averagers to leave the rounds that they are in
_WHAT_TO_DO = "this peer can't go on: run it again, with ckpt_path='last' and an address of another peer"
_LEAVING = 2.0  # seconds for the node after them, which is no longer used


class HivemindStrategy(SingleDeviceStrategy):
    """Peers over the internet train one model through ``hivemind.Optimizer``; they may join and leave at any time.

    Each peer is a run of its own: one process, one device, its own data, log and checkpoints. Together they collect
    ``target_batch_size`` samples for an *epoch of the collaboration*, which ends with the average of all gradients and
    one step on every peer. ``trainer.global_step`` counts these epochs, so it is about the same on all peers; one that
    joins late takes over the state of another and its count.

    Args:
        target_batch_size: samples from all peers together for one step. None: from the environment variable
            ``TORCHHAL_HIVEMIND_TARGET_BATCH_SIZE``.
        run_id: name of the run, the same on all its peers. None: ``TORCHHAL_HIVEMIND_RUN_ID``, or ``"torchhal"``.
        initial_peers: addresses of peers to join, any of the run's; several, or one string with commas between them.
            None: ``TORCHHAL_HIVEMIND_PEERS``. Without any, this is the first peer, which prints its addresses.
        batch_size: samples in a batch. None: the first dimension of the first tensor in each.
        averaging: ``"gradients"``: each epoch is one step with the mean gradient of all samples. ``"state"``: each
            peer steps with every batch of its own, and at the end of an epoch parameters are averaged.
        average_state_every: epochs between two averages of the parameters and the running statistics. With
            ``averaging="gradients"`` this takes out what rounding, compression and missed rounds made different.
        compression: of gradients: ``"none"``, ``"float16"``, ``"scaled_float16"``, ``"uniform8bit"`` or
            ``"quantile8bit"``.
        state_compression: of parameters and running statistics when they are averaged.
        host_addresses: multiaddresses to listen on; all of IPv4 by default.
        announced_addresses: multiaddresses to announce instead of those found, with explicit ports.
        client_mode: accept no connections, for a peer behind a firewall. Such a peer can't be joined.
        matchmaking_time: seconds to wait for other peers before a round of averaging begins.
        averaging_timeout: seconds after which a round that hangs is given up; the peer then uses its own gradients.
        request_timeout: seconds to wait for one peer's answer in matchmaking; None: half of ``matchmaking_time``, at
            most 3.
        join_timeout: seconds to wait for ``initial_peers``, and for one with the run's state.
        refresh_period: least seconds between two reads of the others' progress.
        peer_expiration: seconds without a report after which a peer no longer counts.
        verbose: log what hivemind does.

    Raises:
        ConfigurationError: a wrong argument, hivemind missing or of another version; from ``fit``, also another model
            (names and shapes), optimizer, schedulers, clipping, ``target_batch_size``, ``averaging`` or
            ``average_state_every`` than the run's other peers have.
        DistributedError: from ``fit``, when none of ``initial_peers`` answers in time, or their state can't be taken.
    """

    features: ClassVar[frozenset[str]] = frozenset({"owns_clipping", "owns_schedulers", "owns_optimizer_state"})

    # Averages are made in float32, and gradients of a loss that is scaled would be averaged with each peer's own scale.
    lacks: frozenset[str] = store(torch.float64) | {LOSS_SCALING}

    @classmethod
    def availability(cls) -> Availability:
        return availability_from(sdk.check_usable)

    def __init__(
        self,
        *,
        target_batch_size: int | None = None,
        run_id: str | None = None,
        initial_peers: str | Sequence[str] | None = None,
        batch_size: int | None = None,
        averaging: str = "gradients",
        average_state_every: int = 1,
        compression: str = "none",
        state_compression: str = "none",
        host_addresses: str | Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
        announced_addresses: str | Sequence[str] = (),
        client_mode: bool = False,
        matchmaking_time: float = 15.0,
        averaging_timeout: float = 60.0,
        request_timeout: float | None = None,
        join_timeout: float = 60.0,
        refresh_period: float = 0.5,
        peer_expiration: float = 60.0,
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
        sdk.check_usable()
        self.settings = settings.check(
            target_batch_size=target_batch_size,
            run_id=run_id,
            initial_peers=initial_peers,
            batch_size=batch_size,
            averaging=averaging,
            average_state_every=average_state_every,
            compression=compression,
            state_compression=state_compression,
            host_addresses=host_addresses,
            announced_addresses=announced_addresses,
            client_mode=client_mode,
            matchmaking_time=matchmaking_time,
            averaging_timeout=averaging_timeout,
            request_timeout=request_timeout,
            join_timeout=join_timeout,
            refresh_period=refresh_period,
            peer_expiration=peer_expiration,
            verbose=verbose,
        )
        self.epoch = 0
        """The collaboration's epoch that the parameters belong to."""
        self._from_elsewhere = False  # the checkpoint being continued is of another strategy
        self._has_restored = False  # the epoch of the checkpoint being continued
        self.addresses: tuple[str, ...] = ()
        """This peer's addresses while it trains: what others give as ``initial_peers``."""
        self._network: Network | None = None
        self._collaboration: Collaboration | None = None
        self._schedule: Schedule | None = None
        self._sharing: str | None = None
        self._updated = True  # whether the precision has made the latest step
        self._lost = ""  # which of hivemind's processes has ended, and how
        self._batch = 0  # samples in the batch that is being trained on
        self._samples = 0  # samples behind the gradients since the last optimizer_step
        self._restored_samples = 0  # those of a checkpoint, until its gradients are loaded

    @property
    def joining(self) -> dict[str, Any]:
        """The arguments for the strategy of a peer that joins this one's run; empty while none can.

        Checks: STR-43.
        """
        return {"initial_peers": self.addresses, "run_id": self.settings.run_id} if self.addresses else {}

    def check_sync_batchnorm(self, world_size: int) -> None:
        Strategy.check_sync_batchnorm(self, world_size)  # peers meet once an epoch of theirs, not in a step

    def connect(self, module: nn.Module) -> None:
        if module is not self.module:
            self.epoch = 0
        super().connect(module)

    # -- set-up ----------------------------------------------------------------------------------------------

    def prepare(self, trainer: Any) -> None:
        self._has_restored = False
        super().prepare(trainer)

    def setup_optimizers(self, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()) -> None:
        assert self.module is not None
        me = f"strategy {self.alias or 'hivemind'!r}"
        check_model(me, self.module, optimizers)
        check_schedulers(me, self.module, lr_scheduler_configs)
        super().setup_optimizers(optimizers, lr_scheduler_configs)
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError("strategy 'hivemind' can only train in the main thread: it starts processes there")
        optimizer = self.optimizers[0]
        self._schedule = Schedule(optimizer, self.lr_scheduler_configs, 0)
        self._sharing = sdk.load(verbose=self.settings.verbose)
        from torchhal_hivemind._dht import Network
        from torchhal_hivemind._optimizer import Collaboration

        atexit.register(self._leave)  # for a strategy that is never torn down: multiprocessing would block at exit
        self._network = Network(self.settings)
        self.addresses = self._network.addresses
        self._network.agree({**self.settings.agreement, **self._agreement()})
        self._collaboration = Collaboration(
            self.settings, self._network, optimizer, self._step_together, self._running_statistics()
        )
        lost = partial(self._process_lost, self._collaboration)
        watch(self._collaboration.processes, self._network.daemon, lost)

    def _running_statistics(self) -> list[torch.Tensor]:
        """Return the floating-point buffers that a checkpoint keeps."""
        assert self.module is not None
        kept = self.module.state_dict(keep_vars=True)
        return [buffer for name, buffer in self.module.named_buffers() if name in kept and buffer.is_floating_point()]

    def _agreement(self) -> dict[str, Any]:
        """Return what makes a step of this peer that of the others, of which hivemind compares some shapes only."""
        assert self.module is not None
        (optimizer,) = self.optimizers
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        sent = [*((names.get(parameter), parameter) for parameter in stepped), *enumerate(self._running_statistics())]
        shapes = repr([(name, tuple(tensor.shape)) for name, tensor in sent])
        schedulers = [f"{type(each.scheduler).__name__} every {each.frequency}" for each in self.lr_scheduler_configs]
        return {
            "model": f"{len(sent)} tensors, {sha256(shapes.encode()).hexdigest()[:12]}",
            "optimizer": type(optimizer).__name__,
            "schedulers": ", ".join(schedulers),
            "gradient_clip_val": self.gradient_clip_val,
            "gradient_clip_algorithm": self.gradient_clip_algorithm,
        }

    # -- training --------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Join the other peers: the weights and the optimizer are those of the checkpoint now, if there is one."""
        super().on_train_start()
        if self._collaboration is not None:
            self._join()

    def step_function(self, name: str) -> Callable[..., Any]:
        function = super().step_function(name)
        if name != "training_step" or self._collaboration is None:  # without an optimizer there is nothing to share
            return function
        if self.trainer is None:  # a loop by hand, which calls no hooks
            self._join()
        return self._counting(function)

    def module_call(self, forward: Callable[..., Any], *, training: bool) -> Callable[..., Any]:
        call = super().module_call(forward, training=training)
        return around_call(call, self._counting) if training and self._collaboration is not None else call

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with its batch's samples counted, which the collaboration adds up."""
        fixed = self.settings.batch_size

        def step(batch: Any, *rest: Any) -> Any:
            size = batch_size_of(batch) if fixed is None else fixed
            if size is None:
                raise ModelError(
                    f"the number of samples can't be told from a batch of type {type(batch).__name__}: give "
                    "HivemindStrategy(batch_size=...)"
                )
            self._batch = size
            return function(batch, *rest)

        return step

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        self._samples += self._batch

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        """Give the gradients to the collaboration; return how many epochs it got further.

        With ``averaging="state"`` each call is a step of this peer's own.
        """
        peer, schedule = self._collaboration, self._schedule
        assert peer is not None and schedule is not None
        if closure is not None:  # as of an optimizer that evaluates once; others are refused
            with torch.enable_grad():
                closure()
        samples, self._samples = self._samples, 0
        if not samples:
            return StepResult.NOT_DUE
        if self._lost:
            raise DistributedError(self._lost)
        taken = peer.taken
        peer.step(batch_size=samples)
        if self.mark_step is not None:
            self.mark_step()
        if peer.step_error is not None:
            raise peer.step_error
        replaced = peer.taken != taken
        epoch, before = peer.local_epoch, self.epoch
        if epoch != schedule.epoch or replaced:
            schedule.follow(epoch, replaced=replaced)
        self.epoch = epoch
        if peer.behind_since is not None:
            self._check_not_lost(peer)
        if self.settings.averaging == "state":
            return StepResult.NOT_DUE if replaced else StepResult(1, updated=self._updated)
        return StepResult(epoch - before, updated=self._updated) if epoch > before else StepResult.NOT_DUE

    def _step_together(self) -> None:
        """Step with the averaged gradients, which are in place, in a thread of hivemind's."""
        (optimizer,) = self.optimizers
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                # hivemind has given zeros to what was frozen in all batches, with which weight decay would act
                if not parameter.requires_grad and parameter.grad is not None and not parameter.grad.any():
                    parameter.grad = None
        if self.gradient_clip_val is not None:
            super().clip_gradients(optimizer, self.gradient_clip_val, self.gradient_clip_algorithm)
        self._updated = self.precision.optimizer_step(optimizer)

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: str = "norm") -> torch.Tensor | None:
        """Refuse to clip in a hook of a fit, which has the gradients of this peer's batch; clip in other loops."""
        if self.trainer is not None and self.settings.averaging == "gradients":
            raise UnsupportedCombinationError(
                f"strategy {self.alias or 'hivemind'!r} averages the gradients of all peers when the step is due, and "
                f"clip_gradients({clip_val}) would clip what one batch of this peer adds to it: use "
                "Trainer(gradient_clip_val=...), which clips the average"
            )
        return super().clip_gradients(optimizer, clip_val, algorithm)

    def _check_not_lost(self, peer: Collaboration) -> None:
        limit = self.settings.join_timeout + self.settings.peer_expiration
        if peer.is_synchronized_with_peers():
            peer.behind_since = None
        elif peer.behind_since is not None and time.monotonic() - peer.behind_since > limit:
            raise self._state_error(f"this peer is at epoch {self.epoch}, others at {peer.tracker.global_epoch}", peer)

    # -- joining and leaving ---------------------------------------------------------------------------------

    def _join(self) -> None:
        peer, network, schedule = self._collaboration, self._network, self._schedule
        assert peer is not None and network is not None and schedule is not None
        if self._from_elsewhere and self.settings.averaging == "gradients":
            self.epoch = 0 if self.trainer is None else self.trainer.global_step
            schedule.restored(self.epoch)
        self._from_elsewhere = False
        make_state(self.optimizers[0])
        peer.begin_at(self.epoch)
        replaced = bool(self.settings.initial_peers) and self._take_state(peer, network)
        schedule.follow(peer.local_epoch, replaced=replaced)
        peer.begin_at(peer.local_epoch)
        peer.share_state()
        if replaced:
            _say(f"joined run {self.settings.run_id!r} at step {peer.local_epoch}")
        if not self.settings.initial_peers:
            network.invite()

    def _take_state(self, peer: Collaboration, network: Network) -> bool:
        """Take over the state of a peer that is as far as this one or further; return False if there is none."""
        deadline = time.monotonic() + self.settings.join_timeout
        while not (donors := network.donors()):
            if self.watch.stop_requested or time.monotonic() > deadline:
                _say(f"no peer of run {self.settings.run_id!r} shares its state, so this one begins with its own")
                return False
            time.sleep(0.5)
        while max(donors.values()) >= self.epoch:
            if peer.take_state():
                return True
            if self.watch.stop_requested:
                return False
            if time.monotonic() > deadline:
                raise self._state_error(
                    f"{len(donors)} peer(s) of run {self.settings.run_id!r} share their state", peer
                )
            time.sleep(0.5)
            donors = network.donors() or donors
        return False

    def _state_error(self, situation: str, peer: Collaboration) -> DistributedError:
        cause = peer.download_error
        error = DistributedError(
            f"{situation}, but it could not be taken over in time"
            + (f" ({type(cause).__name__}: {cause})" if cause is not None else "")
            + ": model and optimizer must be the same on all peers"
        )
        error.__cause__ = cause
        return error

    def _process_lost(self, peer: Collaboration, process: Any) -> None:
        """End this process in a thread: one of hivemind's is gone, or, for None, its network daemon."""
        if peer is not self._collaboration:
            return  # it was stopped on request
        if process is None:  # without it a peer trains alone, and its weights diverge from the others'
            self._lost = f"hivemind's network daemon, p2pd, has ended; {_WHAT_TO_DO}"
            return
        process.join()
        self._lost = f"hivemind's process {process.name!r} {describe_exit(process.exitcode)}; {_WHAT_TO_DO}"
        time.sleep(self.settings.averaging_timeout)  # calls that wait for its answer have no timeout
        if peer is self._collaboration:  # not closed meanwhile
            write_stderr(f"torchhal: {self._lost}\n")
            leave(1)

    def _leave(self) -> None:
        atexit.unregister(self._leave)
        peer, self._collaboration = self._collaboration, None
        network, self._network = self._network, None
        sharing, self._sharing = self._sharing, None
        self._schedule, self.addresses, self._lost = None, (), ""
        try:
            if peer is not None:
                assert network is not None
                network.hush()
                peer.close(_GOODBYE)
        finally:
            if network is not None:
                network.close(_LEAVING)
            if sharing is not None:
                sdk.share_by(sharing)

    def teardown(self) -> None:
        try:
            self._leave()
        finally:
            super().teardown()

    # -- checkpoints -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the collaboration's epoch, and the samples behind gradients that it has not been given yet."""
        return {**super().state_dict(), EPOCH: self.epoch, SAMPLES: self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._restore_epoch(state)
        self._restored_samples = _count_in(state, SAMPLES) or 0

    def load_accumulated_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Continue an accumulation, with the samples behind it that load_state_dict has read."""
        super().load_accumulated_gradients(gradients)
        self._samples = self._restored_samples

    def check_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        super().check_optimizer_state(optimizer, {name: value for name, value in state.items() if name != EPOCH})

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        super().load_optimizer_state(optimizer, {name: value for name, value in state.items() if name != EPOCH})
        if EPOCH in state or not self._has_restored:
            self._restore_epoch(state)

    def _restore_epoch(self, state: Mapping[str, Any]) -> None:
        """Continue at the epoch in ``state``; without one, at the Trainer's steps when the peers meet."""
        epoch = _count_in(state, EPOCH)
        self._has_restored = epoch is not None
        self._from_elsewhere = epoch is None
        self.epoch = epoch or 0
        if self._schedule is not None:
            self._schedule.restored(self.epoch)


def _count_in(state: Mapping[str, Any], name: str) -> int | None:
    """Return the entry ``name`` of a strategy's state; None where it has none.

    Raises:
        CheckpointMismatchError: it is no int of at least 0.
    """
    count = state.get(name)
    if count is not None and (type(count) is not int or count < 0):
        raise CheckpointMismatchError(f"{name!r} must be an int of at least 0 (got {count!r})")
    return count


def _say(text: str) -> None:
    print(f"torchhal: {text}", file=sys.stderr, flush=True)
