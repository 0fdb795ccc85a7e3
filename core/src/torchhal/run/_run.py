"""Give a training loop of the user's own the strategies, launchers, checkpoints and failure handling of the Trainer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from torchhal import _arguments as arguments
from torchhal.distributed import process, rendezvous
from torchhal.distributed.signals import at_once
from torchhal.errors import ConfigurationError
from torchhal.run._batches import TrainingBatches
from torchhal.run._calls import Calls
from torchhal.run._evaluation import Evaluation
from torchhal.run._loaders import SetupLoader, given_loader
from torchhal.run._metric_log import log_metrics
from torchhal.run._program_end import end_open_runs, end_with_program, has_ended
from torchhal.run._ranks import RunRanks
from torchhal.run._run_trainer import RunTrainer
from torchhal.run._setup_objects import sort_objects
from torchhal.trainer._run_data import load_training_data
from torchhal.trainer._run_lifecycle import executing
from torchhal.trainer._run_record import gather_peak_memory
from torchhal.trainer.data._sharing import prepare_loader
from torchhal.trainer.logging._standard_streams import lossy_streams
from torchhal.trainer.loops import StopOnSignal

_EXIT_WAIT = timedelta(seconds=60)
"""How long a rank whose program ends in the midst of an epoch waits for the others, as by sys.exit on one rank."""


class Run(RunRanks):
    """The hardware layer for a training loop of the user's own.

    The processes, the numbers, the stops on a signal, the failures and the checkpoints are those of the Trainer, which
    can continue a run's checkpoint, and the reverse. ``setup`` changes what ``forward`` of a model, ``step`` and
    ``zero_grad`` of an optimizer and ``step`` of a scheduler do, on the objects that it gets, until the run ends.

    A script runs as it stands: with several devices it is run again for each. A run ends with :meth:`end`, with a
    ``with`` block around it, or with the program. Where workers are started, as by ``ddp_spawn`` or in a notebook, the
    loop is a function that :meth:`launch` is given.

    With five lines changed, a loop becomes::

        run = torchhal.Run(strategy="ddp", devices=2)
        model, optimizer, loader = run.setup(model, optimizer, loader)
        for epoch in range(run.current_epoch, 10):
            for inputs, targets in run.batches(loader):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                run.backward(loss)
                optimizer.step()
            run.save_checkpoint()

    Args:
        accelerator: as for :class:`torchhal.Trainer`, like all others.
        strategy: alias, class or object of a strategy, or "auto".
        devices: a count, -1 for all, indices, or "auto".
        num_nodes: machines that take part; "auto": as many as the launcher has started processes on.
        precision: alias ("32-true", "bf16-mixed", ...) or object.
        plugins: precision, checkpoint IO and cluster environment, as objects or aliases.
        accumulate_grad_batches: batches per optimizer step: until then ``step`` and ``zero_grad`` do nothing, and each
            loss is divided by it in :meth:`backward`.
        gradient_clip_val: for strategies that clip by themselves alone; else call :meth:`clip_gradients`.
        default_root_dir: where runs are kept; the working directory when None.
        logger: False; or True for CSV files, a logger, an alias, or several of these.
        log_every_n_steps: of how many batches one goes to the loggers.
        use_distributed_sampler: share the loaders out over the ranks.
        sync_batchnorm: let batch norms compute over the batches of all ranks.
        deterministic: True: only deterministic algorithms; "warn": warn where there is none.
        benchmark: torch's search for the fastest kernels, where the device has one.

    Raises:
        ConfigurationError: an argument outside its domain, or parts that don't fit, before any process starts.
    """

    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: int | str | Sequence[int] = "auto",
        num_nodes: int | str = 1,
        precision: Any = None,
        plugins: Any = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        default_root_dir: str | os.PathLike[str] | None = None,
        logger: Any = False,
        log_every_n_steps: int = 50,
        use_distributed_sampler: bool = True,
        sync_batchnorm: bool = False,
        deterministic: bool | str = False,
        benchmark: bool | None = None,
    ) -> None:
        self._trainer = RunTrainer(
            accelerator=accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            plugins=plugins,
            accumulate_grad_batches=accumulate_grad_batches,
            gradient_clip_val=gradient_clip_val,
            default_root_dir=default_root_dir,
            logger=logger,
            log_every_n_steps=log_every_n_steps,
            use_distributed_sampler=use_distributed_sampler,
            sync_batchnorm=sync_batchnorm,
            deterministic=deterministic,
            benchmark=benchmark,
        )
        self._state = self._trainer._run
        self._context: ExitStack | None = None
        """What ends the run; None before the set-up and after the end."""
        self._is_launched = False
        """Whether a function of :meth:`launch` runs in this process."""
        self._was_set_up = False
        self._calls: Calls | None = None
        self._batches: TrainingBatches | None = None

    # -- life cycle ------------------------------------------------------------------------------------------------

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(run, *args)`` on every rank, in processes that this starts where needed.

        Args:
            function: sets up and trains; the run ends with it. Workers get it by pickle: it is one of a module, unless
                they are forked.
            *args: its other arguments.

        Returns:
            What it returned: where workers were started that of rank 0, by pickle, else that of this rank.

        Raises:
            RankFailedError: a process failed; the message starts with its traceback.
        """
        if not callable(function):
            raise TypeError(f"'function' must be callable (got {function!r})")
        self._check_not_set_up()
        end_open_runs()
        process.open_standard_descriptors()
        rendezvous.begin_call()
        launcher = self._strategy.make_launcher()
        self._state.num_nodes = self._strategy.num_nodes
        return launcher.launch(_call, self, function, args)

    def setup(self, *objects: Any, ckpt_path: str | os.PathLike[str] | None = None, **named: Any) -> Any:
        """Start the ranks, and set up everything that the loop uses. Every rank calls it, once.

        A process has one run at a time: one that was set up before and has not ended ends here.

        Args:
            *objects: models, their optimizers and schedulers, training loaders, and objects with ``state_dict`` and
                ``load_state_dict``, which checkpoints keep; in any order. Without an optimizer the run is for
                inference. Optimizers are those that were made of the models' parameters as they are now.
            ckpt_path: continue from a checkpoint: a path, or "last" for the newest complete one of this folder; None
                for a run that begins.
            **named: the same with names, which checkpoints prefix a model's parameters with.

        Returns:
            The objects as they were given, in that order: one by itself, several as a tuple. They are the same objects,
            unless the precision has replaced a model, and but for loaders: iterating the first one is :meth:`batches`,
            any other, and without an optimizer each, :meth:`evaluation_batches` while no model with trainable
            parameters is in training mode or gradients are off, else :meth:`batches`.

        Raises:
            ConfigurationError: an object of no kind, or a strategy that only the Trainer can drive.
            ModelError: an optimizer of other models.
            CheckpointError: the checkpoint is damaged, or of other models, optimizers or objects.
            LaunchError: the strategy starts workers: call :meth:`launch`.
        """
        self._check_not_set_up()
        path = arguments.check_ckpt_path(ckpt_path)
        end_open_runs()
        objects = tuple(map(given_loader, objects))
        named = {name: given_loader(value) for name, value in named.items()}
        found = sort_objects(objects, named)
        trainer, state = self._trainer, self._state
        trainer.take(found)
        fn = "fit" if found.optimizers else "predict"
        self._was_set_up = True
        with ExitStack() as stack:
            if not self._is_launched:
                process.open_standard_descriptors()
                rendezvous.begin_call()
                launcher = self._strategy.make_launcher()
                state.num_nodes = self._strategy.num_nodes
                stack.enter_context(launcher.entered())
            stack.enter_context(lossy_streams())
            stack.enter_context(executing(state, trainer.fit_loop, fn, path))
            with at_once():
                stack.push(self._release)
                self._batches = TrainingBatches(trainer, self._stop)
                self._calls = Calls(trainer, found, self._batches)
                if fn == "fit":
                    self._begin_training()
            self._context = stack.pop_all()
        if not self._is_launched:
            end_with_program(self)
        given = [*objects, *named.values()]
        replaced = {id(model): state.module if not name else state.module.get_submodule(name)
                    for name, model in found.models.items()}  # fmt: skip
        for index, loader in enumerate(found.loaders):
            trains = index == 0 and fn == "fit"
            replaced[id(loader)] = SetupLoader(loader, self._pass, self._length, trains=trains)
        given = [replaced.get(id(each), each) for each in given]
        return given[0] if len(given) == 1 else tuple(given)

    def _begin_training(self) -> None:
        state, trainer = self._state, self._trainer
        state.progress.started = time.monotonic()
        trainer.saver.on_train_start(trainer, state.module)
        state.frozen_parameters.begin(state.module, state.ckpt_path, state.warn_once)
        state.phases.start_train()
        if not state.progress.batches_done:
            trainer.fit_loop.restore_generators()

    def _release(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give the user's objects their own methods back, whatever has ended the run."""
        if self._calls is not None:
            self._calls.remove()

    def end(self) -> None:
        """End the run: wait for the other ranks, make the models whole and ordinary again, and free the devices.

        Every rank calls it, or leaves it to the end of the program. Nothing happens for a run that has ended.

        Raises:
            DistributedError: the replicas of a model have parted.
            SystemExit, KeyboardInterrupt: a signal asked to stop.
        """
        self._end(self._strategy.timeout)

    def _end_at_exit(self) -> None:
        """End the run with the program; one that has left its loop may have left the other ranks in theirs."""
        timeout = self._strategy.timeout
        if self._batches is not None and self._batches.is_amid_epoch:
            timeout = min(timeout, _EXIT_WAIT)
        self._end(timeout)

    def _end(self, timeout: timedelta) -> None:
        context = self._context
        if context is None:
            return
        try:
            state, strategy = self._state, self._strategy
            assert self._batches is not None
            if state.state.fn == "fit":
                self._batches.end_evaluation()
                if self._batches.current_epoch != state.progress.epoch:
                    self._batches.end_left_epoch()
                self._trainer.saver.on_train_end(self._trainer, state.module)  # waits for a save under way
                state.phases.end_all()
                state.progress.stop_clock()
            signum = strategy.watch.agree_on_stop_at_end(timeout)
            if signum is not None and signum > 0:
                raise StopOnSignal(signum)
            if state.state.fn == "fit":
                strategy.check_replicas()
                gather_peak_memory(state)
        except BaseException as error:
            self._close(error)
            raise
        self._context = None
        try:
            context.close()
        finally:
            self._after_end()

    def _close(self, error: BaseException) -> None:
        """End the run with an error; raises what it becomes, unless that is ``error`` itself."""
        context, self._context = self._context, None
        if context is None:
            return
        try:
            context.__exit__(type(error), error, error.__traceback__)
        finally:
            self._after_end()

    def _after_end(self) -> None:
        goes_on = has_ended(self)
        self._trainer.give_back(goes_on)
        if self._batches is not None:
            self._batches.run_has_ended = True
        self._calls = self._batches = None  # or a loader, a model or an optimizer would keep the others

    def _stop(self, signum: int) -> None:
        """Save and end the run where all ranks stop on a signal; raises the exit."""
        stop = StopOnSignal(signum)
        self._close(stop)
        raise stop

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.end()
        else:
            self._close(error)

    def _check_not_set_up(self) -> None:
        if self._was_set_up:
            raise ConfigurationError(
                "this Run was set up already, be it by a setup that failed: give one setup all models, optimizers and "
                "loaders, or make another Run"
            )

    def _ready(self) -> tuple[Calls, TrainingBatches]:
        if self._context is None or self._calls is None or self._batches is None:
            when = "has ended" if self._was_set_up else "is not set up: call run.setup(model, optimizer, loader) first"
            raise ConfigurationError(f"this Run {when}")
        return self._calls, self._batches

    # -- data ------------------------------------------------------------------------------------------------------

    def batches(self, loader: Any) -> Iterator[Any]:
        """Return an iterator over an epoch of ``loader``: this rank's share of its batches, on its device.

        Between two batches all ranks stop on a signal, save, and leave. A run that continues a checkpoint begins with
        the batch after the one in whose body it was saved. ``break`` ends the epoch. Every rank calls it.

        Args:
            loader: an iterable of batches. The first one, or the first that :meth:`setup` got, is the one whose
                position checkpoints keep.
        """
        _, batches = self._ready()
        return batches.epoch(given_loader(loader))

    def evaluation_batches(self, loader: Any) -> Iterator[Any]:
        """Return an iterator over this rank's share of ``loader``'s batches, each sample once; models only evaluate.

        A rank may have a batch less than another, and takes part in what those gather in their last round. ``eval()``
        and ``torch.no_grad()`` are the loop's own. Every rank calls it.

        Args:
            loader: an iterable of batches; several are gone through one by one.

        Raises:
            ModelError: it is no iterable of batches, or gives none.
        """
        _, batches = self._ready()
        return self._evaluate(batches, Evaluation(self._state, given_loader(loader), batches.boundary))

    def _pass(self, loader: Any, trains: bool) -> Iterator[Any]:
        """Return the iterator of a loader that setup returned: of an evaluation, unless it or a model now trains."""
        if self._context is None:
            return iter(loader)
        return self.batches(loader) if trains or self._ready()[0].may_train() else self.evaluation_batches(loader)

    def _length(self, loader: Any, trains: bool) -> int:
        """Return how many batches of a loader that setup returned this rank gets."""
        if self._context is None:
            return len(loader)
        if trains and (length := load_training_data(self._state).whole_length) is not None:
            return length
        return len(prepare_loader(loader, self._state, training=trains))

    def _evaluate(self, batches: TrainingBatches, evaluation: Evaluation) -> Iterator[Any]:
        batches.begin_evaluation(evaluation)
        try:
            yield from evaluation.batches()
        except BaseException:  # a break, or an error on its way: nothing may communicate here
            batches.in_evaluation = False
            raise
        batches.end_evaluation()

    def accumulate(self) -> AbstractContextManager[None]:
        """Return the context of one batch that comes from elsewhere than :meth:`batches`, in which it changes nothing.

        It counts ``accumulate_grad_batches``, and stops on signals. Every rank enters it as often.
        """
        return self._ready()[1].from_elsewhere()

    @property
    def is_optimizer_step(self) -> bool:
        """Whether the batch in hand ends an accumulation, so that ``optimizer.step()`` steps."""
        return self._batches is None or self._batches.ends_accumulation

    # -- steps -----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of ``loss``, averaged over the ranks, in place of ``loss.backward()``.

        Args:
            loss: of one element.
            *args: passed on to ``loss.backward``.
            **kwargs: passed on to ``loss.backward``.
        """
        self._ready()[0].backward(loss, *args, **kwargs)

    def forward_backward(self, function: Callable[[Any], Any], batch: Any) -> Any:
        """Run ``function(batch)`` and its backward, as the Trainer runs a ``training_step``: under any strategy.

        Args:
            function: calls the model and returns the loss, or a dict with ``"loss"``. Under a pipeline it runs for the
                parts of a batch, so it does nothing else.
            batch: of :meth:`batches`.

        Returns:
            What the function returned, without its graph; None on ranks of a pipeline but the last.
        """
        return self._ready()[0].function(function, batch, backward=True)

    def forward(self, function: Callable[[Any], Any], batch: Any) -> Any:
        """Return ``function(batch)``, all of it in the precision of the run, with whatever models it calls.

        Args:
            function: calls models.
            batch: its argument.
        """
        return self._ready()[0].function(function, batch, backward=False)

    def clip_gradients(self, optimizer: Any, max_norm: float, algorithm: str = "norm") -> torch.Tensor | None:
        """Clip the gradients over all shards, where the batch ends an accumulation.

        Args:
            optimizer: whose parameters' gradients.
            max_norm: the greatest 2-norm of all together, or with ``"value"`` the greatest absolute value of each.
            algorithm: ``"norm"`` or ``"value"``.

        Returns:
            The norm before, 0-d; None for ``"value"``, before the end of an accumulation, and where the strategy clips
            in its step, by the ``gradient_clip_val`` of the run.

        Raises:
            ConfigurationError: ``max_norm`` is not above 0, or the strategy clips by itself, and the run has another
                ``gradient_clip_val``.
            ModelError: ``optimizer`` is none.
        """
        return self._ready()[0].clip_gradients(optimizer, max_norm, algorithm)

    # -- checkpoints and logs --------------------------------------------------------------------------------------

    def save_checkpoint(self, filepath: str | os.PathLike[str] | None = None, *, weights_only: bool = False) -> str:
        """Save the run as it is, to be continued by ``setup(..., ckpt_path=...)`` or by the Trainer.

        Every rank calls it, at the end of a batch's body or between epochs.

        Args:
            filepath: where to; None: under the epoch and step in the run's folder, in the place of the one before.
            weights_only: leave out what resuming needs.

        Returns:
            The path.

        Raises:
            CheckpointError: on every rank, when it could not be written; the one before is intact.
        """
        batches = self._all_ranks("save_checkpoint")
        if not batches.in_batch and batches.current_epoch != self._state.progress.epoch:
            batches.end_left_epoch()
        if self._state.state.fn != "fit" or filepath is not None or weights_only:
            if filepath is None:
                raise ConfigurationError(
                    "save_checkpoint needs a 'filepath' for weights alone, and without an optimizer"
                )
            self._trainer.save_checkpoint(filepath, weights_only or self._state.state.fn != "fit")
            return os.fspath(filepath)
        return self._trainer.saver.save(self._trainer)

    def log(self, metrics: Mapping[str, Any], *, step: int | None = None) -> None:
        """Send numbers to the loggers, as means over the ranks. Every rank calls it.

        In the body of :meth:`batches` every ``log_every_n_steps``-th batch counts, elsewhere each call.

        Args:
            metrics: numbers and tensors of one element, by name.
            step: None for the number of optimizer steps.
        """
        _, batches = self._ready()
        if not batches.in_evaluation:
            batches.end_evaluation()
        gather = None if (evaluation := self._partial_round()) is None else evaluation.gather
        always = not batches.in_batch or batches.in_evaluation
        log_metrics(self._state, metrics, step=step, always=always, gather=gather)

    def print(self, *values: Any, **kwargs: Any) -> None:
        """``print`` on rank 0."""
        self._state.print(*values, **kwargs)


def _call(run: Run, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call the function of :meth:`Run.launch` on a rank."""
    run._is_launched = True
    try:
        with run:
            return function(run, *args)
    finally:
        run._is_launched = False
