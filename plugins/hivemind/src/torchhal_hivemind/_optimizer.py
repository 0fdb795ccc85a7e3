"""Override ``hivemind.Optimizer`` where its own behaviour would train something else than requested.

Each override documents its reason. The names that they override are those of hivemind 1.1; ``_sdk.HIVEMIND`` pins it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import hivemind
import torch
from hivemind import compression
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.progress_tracker import ProgressTracker
from torch.optim import Optimizer

from torchhal_hivemind._config import COMPRESSIONS, Settings
from torchhal_hivemind._dht import Network
from torchhal_hivemind._process_cleanup import end, guarded

_log = logging.getLogger("torchhal")


class Progress(ProgressTracker):  # type: ignore[misc]
    """The tracker of what all peers have done.

    hivemind ends an epoch at the time at which it expects the samples to be there, so that peers meet. For one peer
    alone, epochs end with exactly the requested samples, at any speed.
    """

    @property
    def ready_to_update_epoch(self) -> bool:
        if self.global_progress.num_peers > 1:
            return bool(super().ready_to_update_epoch)
        mine = self.local_progress
        return bool(self.global_epoch > mine.epoch or mine.samples_accumulated >= self.target_batch_size)

    def run(self) -> None:
        """Close the reports that were not answered, of which the garbage collector would warn."""
        super().run()
        loop = asyncio.get_event_loop_policy().get_event_loop()  # this thread's, which super().run() has made
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


class Gradients(GradientAverager):  # type: ignore[misc]
    """The average of gradients, weighted by the number of samples behind them."""

    def load_accumulators_into_averager_(self) -> None:
        """Divide by the number of samples.

        By itself hivemind divides by the number of batches, each as large as the first: a smaller one would scale the
        rest.
        """
        super().load_accumulators_into_averager_()
        samples, first = self.local_samples_accumulated, self._anchor_batch_size
        if samples and samples != first * self.local_times_accumulated:
            scale = first * self.local_times_accumulated / samples
            with torch.no_grad(), self.get_tensors() as averaged:
                for gradient in averaged:
                    gradient.mul_(scale)

    def step(self, *args: Any, reset_accumulators: bool = True, **options: Any) -> Any:
        """Average without clearing the accumulators first: where a round fails, the peer would step with zeros.

        They are cleared when the epoch has ended, in any case.
        """
        return super().step(*args, reset_accumulators=False, **options)

    def load_state_from_peers(self, wait: bool = True, timeout: float | None = None) -> None:
        """Do nothing: gradients of others are not state, and hivemind would download them for nothing."""


class StrategyOptimizer:
    """An optimizer with hivemind's interface, whose step calls the strategy's."""

    def __init__(self, optimizer: Optimizer, step: Callable[[], Any]) -> None:
        self.optimizer = optimizer
        self.error: Exception | None = None
        """What the step raised. hivemind logs it and continues as if it had stepped."""
        self._step = step

    def step(self) -> None:
        try:
            self._step()
        except Exception as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class Collaboration(hivemind.Optimizer):  # type: ignore[misc]
    """One peer's part in a run, around the optimizer that the model returned.

    Args:
        network: this peer's node.
        optimizer: over the model's own parameters.
        step: steps ``optimizer`` with the averaged gradients, which are in place. Called in a thread of hivemind's.
        extra_tensors: averaged with the parameters at the end of an epoch, such as running statistics.
    """

    def __init__(
        self,
        settings: Settings,
        network: Network,
        optimizer: Optimizer,
        step: Callable[[], Any],
        extra_tensors: Sequence[torch.Tensor],
    ) -> None:
        self.settings = settings
        self.network = network
        self.taken = 0
        """How often the state of another peer has been taken over."""
        self.behind_since: float | None = None
        """When, by the monotonic clock, a download of the state first failed."""
        self.download_error: Exception | None = None
        averager_options = {"request_timeout": settings.request_timeout}
        with guarded(network.sockets):
            super().__init__(
                dht=network.dht,
                run_id=settings.run_id,
                target_batch_size=settings.target_batch_size,
                optimizer=optimizer,
                matchmaking_time=settings.matchmaking_time,
                averaging_timeout=settings.averaging_timeout,
                # hivemind takes matchmaking_time for this, too: a short one loses parts of a round on a busy host
                next_chunk_timeout=max(settings.matchmaking_time, settings.averaging_timeout / 4),
                delay_state_averaging=False,
                average_state_every=settings.average_state_every,
                use_local_updates=settings.averaging == "state",
                grad_compression=_compression(settings.compression),
                state_averaging_compression=_compression(settings.state_compression),
                extra_tensors=extra_tensors,
                # the averager of gradients gets no averager_opts
                grad_averager_factory=(
                    partial(Gradients, allow_state_sharing=False, **averager_options)
                    if settings.averaging == "gradients"
                    else None
                ),
                averager_opts={
                    **averager_options,
                    "allow_state_sharing": False,  # until this peer has the run's state itself
                    "initialize_optimizer": False,  # hivemind would do it by a step that decays the weights
                    "declare_state_period": settings.peer_expiration / 2,
                },
                tracker_opts={
                    "min_refresh_period": settings.refresh_period,
                    "default_refresh_period": 6 * settings.refresh_period,
                    "max_refresh_period": 20 * settings.refresh_period,
                    "metadata_expiration": settings.peer_expiration,
                },
                verbose=settings.verbose,
            )
        self.state_averager.optimizer = self._stepped = StrategyOptimizer(optimizer, step)
        self._download = self.state_averager.load_state_from_peers
        # for all callers: hivemind retries without limit when it raises, also where it always will
        self.state_averager.load_state_from_peers = self.take_state

    @property
    def step_error(self) -> Exception | None:
        """The error that the latest step of the optimizer raised, or None."""
        return self._stepped.error

    def _make_progress_tracker(self, target_batch_size: int, **options: Any) -> Progress:
        return Progress(
            dht=self.dht,
            prefix=self.run_id,
            target_batch_size=target_batch_size,
            client_mode=self.client_mode,
            status_loglevel=self.status_loglevel,
            start=True,
            **options,
        )

    def _begin_averaging_gradients(self, grad_scaler: Any) -> bool:
        """Step with the accumulated gradients where no round begins.

        By itself hivemind may step with the last batch's.
        """
        began = bool(super()._begin_averaging_gradients(grad_scaler))
        if not began:
            self._load_local_gradients_into_optimizer()
        return began

    # -- state -----------------------------------------------------------------------------------------------

    def begin_at(self, epoch: int) -> None:
        """Set the collaboration's epoch that this peer's parameters belong to."""
        self.state_averager.local_epoch = epoch
        # What the tracker has requested before is relative to its own first epoch, 0: it would take this peer for one
        # that is out of step, and drop its first batch.
        with self.tracker.pause_updates():
            self.tracker.update_epoch(epoch)

    def share_state(self) -> None:
        """Let others take over this peer's state from now on."""
        if not self.client_mode and not self.settings.client_mode:
            self.state_averager.state_sharing_priority = self.local_epoch
            self.state_averager.allow_state_sharing = True

    def take_state(self, **_: Any) -> bool:
        """Take over parameters, optimizer state and epoch of the peer that is furthest; return False if none has any.

        A state older than this peer's is left alone.
        """
        averager = self.state_averager
        epoch = averager.local_epoch
        averager.local_epoch = epoch - 0.5  # an int again only when a state of this epoch or later has come
        try:
            self._download(timeout=self.load_state_timeout)
            self.download_error = None
        except Exception as error:
            self.download_error = error
        if taken := isinstance(averager.local_epoch, int):
            self.taken += 1
            self.behind_since = None
        else:
            averager.local_epoch = epoch
            if self.behind_since is None:
                self.behind_since = time.monotonic()
        return taken

    @property
    def processes(self) -> list[Any]:
        """The processes of hivemind on this host, except for its daemon."""
        return [each for each in (self.dht, self.state_averager, self.grad_averager) if each is not None]

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self, timeout: float) -> None:
        """Announce the end and stop the averagers' processes, within about ``timeout`` seconds."""
        goodbye = threading.Thread(target=self._goodbye, name="torchhal-goodbye", daemon=True)
        goodbye.start()
        goodbye.join(timeout)  # a round that is under way may last longer, and so may a dead process's answer
        end([each for each in (self.state_averager, self.grad_averager) if each is not None], 0.5)

    def _goodbye(self) -> None:
        try:
            self.shutdown()
        except Exception:
            _log.debug("hivemind's shutdown failed", exc_info=True)


def _compression(name: str) -> Any:
    return getattr(compression, COMPRESSIONS[name])()
