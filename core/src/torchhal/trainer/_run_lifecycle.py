"""Execute one call of fit, validate, test or predict in each process that takes part."""

from __future__ import annotations

import itertools
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torchhal import rng
from torchhal._overrides import implements
from torchhal.distributed import rendezvous
from torchhal.distributed.failures import exit_for_signal, mark_printed
from torchhal.distributed.signals import DEFAULT_SIGNALS, StopRequested, StopSignals, at_once
from torchhal.errors import ConfigurationError, RankFailedError
from torchhal.strategies._fused_optimizers import fuse
from torchhal.trainer import _checkpointing as checkpointing
from torchhal.trainer import _rank_consistency as rank_consistency
from torchhal.trainer import _resume as resume
from torchhal.trainer import _status_lines as status_lines
from torchhal.trainer._callback_states import begin_anew, restore_optimizers
from torchhal.trainer._connectors import make_callbacks
from torchhal.trainer._hook_names import check_hook_names
from torchhal.trainer._profiling import profiled
from torchhal.trainer._run_data import load_evaluation_data, load_training_data, load_validation_data
from torchhal.trainer._run_record import RunRecord, gather_peak_memory
from torchhal.trainer._state import TrainerState
from torchhal.trainer._stop_handling import (
    job_of,
    log_stop,
    requeue,
    save_interrupted,
    set_hang_folder,
    stopping_notice,
)
from torchhal.trainer._torch_flags import save_torch_flags, set_torch_flags
from torchhal.trainer._trial import release_frames
from torchhal.trainer.callbacks import Callback, ModelCheckpoint
from torchhal.trainer.data._loaders import is_one_shot
from torchhal.trainer.loggers.base import FolderLogger
from torchhal.trainer.loops._control_flow import StopOnSignal
from torchhal.trainer.loops._evaluation_loop import EvaluationLoop
from torchhal.trainer.loops._fit_loop import FitLoop
from torchhal.trainer.planning import _planning as planning
from torchhal.trainer.run_state import RunState

_log = logging.getLogger("torchhal")


class Execution:
    """One call of the Trainer, or a loop of the user's own, while it runs.

    Attributes:
        result: of the call; what its body sets.
    """

    result: Any = None


def execute(
    run: RunState, loop: FitLoop, fn: str, ckpt_path: Any, *, to_message: Callable[[Any], dict[str, Any]] | None = None
) -> Any:
    """Run the loops of one call of the Trainer inside of :func:`executing`, and return the call's result."""
    with executing(run, loop, fn, ckpt_path, to_message=to_message) as execution:
        execution.result = run_stage(run, loop, fn)
    return execution.result


@contextmanager
def executing(
    run: RunState, loop: FitLoop, fn: str, ckpt_path: Any, *, to_message: Callable[[Any], dict[str, Any]] | None = None
) -> Iterator[Execution]:
    """Return the context of one call, in which its loops run: set up before, torn down after, whatever ends it.

    Args:
        run: the state that the call works on.
        loop: the fit loop, which has the evaluation loop.
        fn: fit, validate, test or predict.
        ckpt_path: a path, "last", "best" or None.
        to_message: turns the result into a worker's message to the calling process, before the ranks part.

    Raises:
        SystemExit, KeyboardInterrupt: a signal has stopped the body, by :class:`.StopOnSignal`, or the set-up.
    """
    execution = Execution()
    run.state = TrainerState(fn, "train" if fn == "fit" else fn, "running")
    restore_flags = save_torch_flags()
    asked_accumulation = run.accumulate_grad_batches

    def ask(signum: int) -> None:
        run.strategy.watch.request_stop(signum)

    job = job_of(run)
    signals = StopSignals(
        ask,
        signals=(*DEFAULT_SIGNALS, *job.stop_signals),
        notice=(lambda: stopping_notice(run)) if run.is_global_zero else None,
    )
    if plans := fn == "fit" and run.auto is not None and not run.is_trial:
        planning.keep_base(run)
    failed = hooks_left = True
    record: RunRecord | None = None
    on_refusal = ExitStack()
    try:
        with signals:  # from here on they request an orderly stop
            for signum in signals.kept:
                name = signal.Signals(signum).name
                run.warn_once(
                    f"{name}, by which the scheduler announces the end of the job, has a handler of the program's own, "
                    f"which stays: {fn} does not stop on it, and the job is not requeued. To have that, install none "
                    f"for {name}, or have another signal sent, see SlurmEnvironment(requeue_signal=...)"
                )
            set_torch_flags(run)
            try:
                with at_once():
                    signals.raise_received()
                    run.strategy.setup_environment()
                    set_hang_folder(run, run.default_root_dir)
                    begin_call(run, loop, fn)
                    record = RunRecord(run, fn)
                    record.begin()
                    if not plans:
                        status_lines.announce_start(run, fn)
                    set_up(run, loop, fn, ckpt_path, on_refusal, record if plans else None)
                    record.ready()
                    on_refusal.pop_all()
                if signals.received is not None:
                    ask(signals.received)  # a scheduler's warning, perhaps before the rendezvous
                yield execution
            except StopRequested as stop:
                # the other ranks may be elsewhere, and there is nothing to save
                rendezvous.announce_stop(stop.signum)
                run.strategy.watch.report_stop(stop.signum)
                log_stop(run, fn, stop.signum, begun=False)
                raise exit_for_signal(stop.signum, agreed=False) from None
            except StopOnSignal as interruption:
                # every rank is here, after the same step: what follows may communicate
                if fn == "fit" and run.state.stage != "sanity_check" and not run.fast_dev_run:
                    save_interrupted(run, interruption.signum)
                log_stop(run, fn, interruption.signum)
                run.phases.end_all()
                if fn == "fit":
                    requeue(run, ckpt_path, interruption.signum)
                raise exit_for_signal(interruption.signum, agreed=True) from None
            hooks_left = False
            tear_down_hooks(run, fn)
            run.state.status = "finished"
            run.finalize_loggers("success")
            if fn == "fit":
                run.end_reason = "its loop has ended" if run.by_hand else loop.stop.reason()
                status_lines.announce_end(run, run.end_reason)
            record.end()
            if to_message is not None:
                execution.result = to_message(execution.result)
            else:
                run.strategy.restore_module()
        failed = False
    except BaseException as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            error.__traceback__ = error.__traceback__.tb_next  # without this frame, which yielded
        run.state.status = "interrupted"
        raised: BaseException | None = report_failure(run, error)
        if record is not None:
            record.end(raised)
        if hooks_left:
            tear_down_hooks(run, fn, failed=True)
        on_refusal.close()
        if isinstance(raised, RankFailedError) and raised.stop_signal:
            log_stop(run, fn, raised.stop_signal, begun=has_begun(run, loop), left=raised.rank)
            raise exit_for_signal(raised.stop_signal, agreed=False) from None
        if raised is error:
            raise
        assert raised is not None
        raise raised from error
    finally:
        raised = None  # the cycle of traceback and frame would keep the model until a garbage collection
        restore_flags()
        run.accumulate_grad_batches = asked_accumulation
        run.state.stage = None
        run.hooks.refresh()
        run.current_hook = None
        run.adapters.end_run()
        run.results.start_batch(None)  # or the trainer would keep a failed run's last batch on the device
        close_loaders(run)
        try:
            run.strategy.teardown()
        except Exception:
            if not failed:
                raise
            _log.exception("the tear-down failed too")  # the first error is raised
    if signals.received is not None:  # too late to stop the run: the signal is meant for the whole program
        raise exit_for_signal(signals.received, agreed=True)


def choose_log_folders(run: RunState, fn: str) -> None:
    """Take the next free folder before another job does; an evaluation may have nothing to write.

    Loggers of several classes in one experiment have one folder.
    """
    chosen: dict[str, list[FolderLogger]] = {}
    for logger in run.loggers:
        if fn == "fit" and isinstance(logger, FolderLogger) and not run.fast_dev_run:
            others = chosen.setdefault(logger.root_dir, [])
            if others and not any(type(logger) is type(other) for other in others):
                logger.join(others[0])
            else:
                logger.reserve()
            if any(type(other) is type(logger) and other.log_dir == logger.log_dir for other in others):
                raise ConfigurationError(
                    f"'logger' must not hold two {type(logger).__name__}s that write to {logger.log_dir!r}: leave one "
                    "out, or give them names or versions of their own"
                )
            others.append(logger)
        else:
            _ = logger.version


def close_loaders(run: RunState) -> None:
    """End what the loaders keep at the end of the run: worker processes, and what the accelerator added."""
    for data in (run.sources.validation_data, run.sources.evaluation_data, run.progress.data):
        if data is not None:
            data.close()


def has_begun(run: RunState, loop: FitLoop) -> bool:
    """Return whether this call reached its steps; a sanity check precedes those of fit."""
    if run.state.fn == "fit":
        return loop.optimization is not None
    return bool(run.results.stage == run.state.fn)


def run_stage(run: RunState, loop: FitLoop, fn: str) -> Any:
    """Run the loops of a call, between its set-up and its tear-down."""
    if fn != "fit":
        return evaluate(run, loop.evaluation, fn)
    fit(run, loop)
    return None


def begin_call(run: RunState, loop: FitLoop, fn: str) -> None:
    module, datamodule = run.module, run.datamodule
    if hasattr(type(module), "trainer"):
        module.trainer = run.adapters.trainer_for(module)
    if datamodule is not None:
        datamodule.trainer = run.adapters.trainer_for(datamodule)
    run.results.module = module
    run.results.clear()
    loop.optimization = None
    run.progress.has_gradients = False
    if fn == "fit":
        run.progress.begin()
        run.trained_by = None
        run.peak_memory = []
        run.frozen_parameters.forget()
    if run.strategy.module is not module:  # an earlier model's optimizers are not this one's
        run.strategy.optimizers, run.strategy.lr_scheduler_configs = [], []
    # the folder of a new run is the next free one: decided once, by rank 0
    if run.is_global_zero:
        choose_log_folders(run, fn)
    run.log_dir = run.strategy.broadcast(run.loggers[0].log_dir if run.loggers else None)
    if run.log_dir:
        set_hang_folder(run, run.log_dir)
    run.hooks.refresh()


def set_up(
    run: RunState, loop: FitLoop, fn: str, ckpt_path: Any, on_refusal: ExitStack, unplanned: RunRecord | None = None
) -> None:
    """Set up hooks, model, weights, optimizers and state, in the order that every strategy can carry.

    ``unplanned`` is the record of a fit whose strategy is chosen here, when model and data are ready.
    """
    strategy, module, datamodule = run.strategy, run.module, run.datamodule
    for owner in (datamodule, module):
        if strategy.local_rank == 0 and implements(owner, "prepare_data"):
            owner.prepare_data()
    strategy.barrier("prepare_data")
    add_model_callbacks(run)
    run.adapters.begin_run()
    if fn == "fit":
        on_refusal.callback(begin_anew(run.callbacks, run.trainer_id))
    for callback in run.callbacks:
        if implements(callback, "setup"):
            run.adapters.bind_callback(callback, "setup")(run.trainer, module, fn)
    for owner in (datamodule, module):
        if implements(owner, "setup"):
            owner.setup(fn)
    if unplanned is not None:
        planning.plan_strategy(run, ckpt_path)
        strategy = run.strategy
        set_hang_folder(run, run.log_dir or run.default_root_dir)
        unplanned.planned()
        status_lines.announce_start(run, fn)
    run.hooks.refresh()
    if implements(module, "configure_model"):
        with strategy.init_context():
            module.configure_model()
    run.ckpt_path = checkpointing.resolve_path(run, ckpt_path)
    checkpoint = None
    if run.ckpt_path is not None:
        # before optimizers and wrappers take hold of the parameters: the hooks may replace some
        checkpoint = checkpointing.read_checkpoint(run, run.ckpt_path)
        checkpointing.restore_datamodule(run, checkpoint, run.ckpt_path)
    if fn == "fit":
        resume.record_batch_setup(run, checkpoint)
    strategy.accumulate_grad_batches = run.accumulate_grad_batches
    strategy.gradient_clip_val = run.gradient_clip_val
    strategy.gradient_clip_algorithm = run.gradient_clip_algorithm
    strategy.sync_batchnorm = run.sync_batchnorm
    if fn == "fit" and run.ckpt_path is None:
        run.progress.begin_at_epoch()  # a fit with a checkpoint starts from the checkpoint's counters
    if fn == "fit":
        for callback in run.callbacks:
            if isinstance(callback, Callback):
                callback._look_at_model(run.trainer, module)
    strategy.connect(module)
    run.sources.ready = True
    strategy.prepare(run.trainer)
    run.results.find_leader()
    run.follow_module()
    if fn == "fit":
        saved = {} if checkpoint is None else checkpoint["callbacks"]
        restore_optimizers(run.callbacks, saved, run.trainer, run.module, run.ckpt_path)
    states: Mapping[str, Mapping[str, Any]] = {}
    if checkpoint is not None:
        if fn == "fit":
            states = checkpointing.check_fits(run, checkpoint, run.ckpt_path or "")
        checkpointing.restore_weights(run, checkpoint, run.ckpt_path or "")
    log_hyperparams(run)
    if fn == "fit":
        load_fit_data(run, loop)
        if checkpoint is not None:
            checkpointing.restore_training(run, checkpoint, run.ckpt_path or "", states)
            if run.fuses_optimizers:
                fuse(strategy.optimizers)  # the states that were loaded say how they stepped then
        rank_consistency.check_settings(run)
    if checkpoint is not None:
        status_lines.announce_checkpoint(run, fn, checkpoint)


def add_model_callbacks(run: RunState) -> None:
    if run.by_hand or not implements(run.module, "configure_callbacks"):
        return
    if run.sources.callbacks_asked_of is run.module:
        return  # those of its last call, which hold the best checkpoint
    own = run.module.configure_callbacks() or []
    own = list(own) if isinstance(own, Sequence) else [own]
    for sentence in check_hook_names(None, None, own, is_adapted=run.adapters.adapts):
        run.warn_once(sentence)
    if not run.enable_checkpointing and any(isinstance(callback, ModelCheckpoint) for callback in own):
        run.warn_once(
            f"'enable_checkpointing' is False, but {type(run.module).__name__}.configure_callbacks returned a "
            "ModelCheckpoint, which saves all the same"
        )
    replaced = {type(callback) for callback in own}
    kept = [callback for callback in run.callbacks if type(callback) not in replaced]
    run.callbacks = make_callbacks([*kept, *own], run.adapters, notes=[])
    run.sources.callbacks_asked_of = run.module


def log_hyperparams(run: RunState) -> None:
    for owner in (run.module, run.datamodule):
        hparams = getattr(owner, "hparams_initial", None) or getattr(owner, "hparams", None)
        if hparams and getattr(owner, "_log_hyperparams", True) and run.is_global_zero:
            for logger in run.loggers:
                run.call_logger(logger, "log_hyperparams", dict(hparams))  # its own: foreign ones flatten it


def load_fit_data(run: RunState, loop: FitLoop) -> None:
    if run.by_hand:
        if run.sources.train is not None:
            load_training_data(run)
        return
    data = load_training_data(run)  # estimated_stepping_batches may have needed it already
    run.sources.validation_data = load_validation_data(run)
    loop.validations.interval(data.length)  # raises now, not in the first epoch that validates


def fit(run: RunState, loop: FitLoop) -> None:
    with at_once():
        run.hooks.call("on_fit_start")
    sanity_check(run, loop.evaluation)
    run.state.stage = "train"
    run.adapters.set_training_mode(run.module)
    with profiled(run, loop):
        loop.fit()
    run.strategy.check_replicas()
    gather_peak_memory(run)
    run.hooks.call("on_fit_end")


def sanity_check(run: RunState, loop: EvaluationLoop) -> None:
    data = run.sources.validation_data
    if not data or run.num_sanity_val_steps == 0 or run.progress.total_batches:
        return
    data = data.first(run.num_sanity_val_steps)
    for index, loader in enumerate(data.loaders):
        if is_one_shot(loader):  # batches of the sanity check would be missing in the validation
            data.skip(index)
    if all(map(is_one_shot, data.loaders)):
        return
    strategy = run.strategy
    before, began = rng.collect(strategy.accelerator, strategy.root_device), time.perf_counter()
    run.state.stage = "sanity_check"
    run.hooks.call("on_sanity_check_start")
    cut = loop.stops_here() or loop.evaluate("sanity_check", data)[1]
    if not cut:
        run.hooks.call("on_sanity_check_end")
        cut = loop.stops_here()
    if cut:
        raise StopOnSignal(strategy.watch.stop_signal or signal.SIGTERM)
    run.seconds["sanity check"] = time.perf_counter() - began
    run.state.stage = run.results.stage = "train"
    rng.restore(before, strategy.accelerator, strategy.root_device)


def evaluate(run: RunState, loop: EvaluationLoop, fn: str) -> Any:
    with at_once():
        data = load_evaluation_data(run, with_indices=fn == "predict" and loop.records_batch_indices)
        run.sources.evaluation_data = data
    outputs, cut = loop.evaluate(fn, data)
    if cut:
        raise StopOnSignal(run.strategy.watch.stop_signal or signal.SIGTERM)
    if fn != "predict":
        return run.results.evaluation_results(max(1, len(data.loaders)))
    if not run.sources.keep_predictions:
        return None
    if run.world_size > 1:
        mine = outputs if run.strategy.is_data_leader else [[] for _ in outputs]
        everybody = run.strategy.all_gather_object(mine)
        outputs = [
            list(itertools.chain.from_iterable(part[index] for part in everybody)) for index in range(len(outputs))
        ]
    return outputs[0] if len(outputs) == 1 else outputs


def report_failure(run: RunState, error: BaseException) -> BaseException:
    """Post a failure to the other ranks, call ``on_exception`` of callbacks and strategy, return the error to raise.

    Calls the end hooks of the strategy that are left and closes the loggers as failed; an error in one is logged.

    Args:
        run: the run that failed.
        error: what it raised.

    Returns:
        ``error``, or the root cause if another rank failed first.
    """
    strategy = run.strategy
    raised = strategy.explain(error)
    if run.is_trial:
        release_frames(raised)
        if strategy.accelerator.is_out_of_memory(raised):
            mark_printed(raised)
    strategy.watch.report_failure(raised)
    for callback in run.callbacks:
        if not implements(callback, "on_exception"):
            continue
        try:
            run.adapters.bind_callback(callback, "on_exception")(run.trainer, run.module, raised)
        except Exception:  # the first error is raised
            _log.exception("%s.on_exception failed", type(callback).__name__)
    run.phases.fail(raised)
    try:
        run.finalize_loggers("interrupted" if is_interruption(raised) else "failed")
    except Exception:
        _log.exception("a logger could not be closed")
    return raised


def is_interruption(error: BaseException) -> bool:
    """Return whether somebody asked for this end: by a signal, to this rank or another, or by ``sys.exit``."""
    return isinstance(error, KeyboardInterrupt | SystemExit) or bool(getattr(error, "stop_signal", None))


def tear_down_hooks(run: RunState, fn: str, *, failed: bool = False) -> None:
    """Call every ``teardown``; the first error is raised at the end, unless the run has ``failed`` with another."""
    module = run.module
    calls: list[tuple[Any, Callable[[Any, str], Any], tuple[Any, ...]]] = [
        *((callback, run.adapters.bind_callback, (run.trainer, module, fn)) for callback in run.callbacks),
        (run.datamodule, getattr, (fn,)),
        (module, getattr, (fn,)),
    ]
    first: Exception | None = None
    for owner, hook_of, given in calls:
        try:
            if implements(owner, "teardown"):
                hook_of(owner, "teardown")(*given)
        except Exception as error:
            if failed or first is not None:
                _log.exception("%s.teardown failed too", type(owner).__name__)
            first = first or error
    if first is not None and not failed:
        raise first
