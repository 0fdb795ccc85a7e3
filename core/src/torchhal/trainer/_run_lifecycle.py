"""The life of one call of fit, validate, test or predict, in each process that takes part."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from torchhal import rng
from torchhal.checkpoint._location import is_url
from torchhal.cluster import ClusterEnvironment
from torchhal.cluster._job import Job, current_job
from torchhal.distributed import rendezvous
from torchhal.distributed.failures import exit_for_signal
from torchhal.distributed.process import open_standard_descriptors
from torchhal.distributed.signals import DEFAULT_SIGNALS, StopRequested, StopSignals, at_once, is_orderly, signal_of
from torchhal.errors import ModelError, RankFailedError, TorchhalError
from torchhal.precision._casting import cast_by_name
from torchhal.pytree import move_to_device
from torchhal.trainer import _checkpointing as checkpointing
from torchhal.trainer import _rank_consistency as rank_consistency
from torchhal.trainer._callback_states import begin_anew, callback_states, load_callback_states
from torchhal.trainer._connectors import make_callbacks
from torchhal.trainer._state import TrainerState
from torchhal.trainer.callbacks import ModelCheckpoint
from torchhal.trainer.data import _elastic_resume as elastic_resume
from torchhal.trainer.data._loaders import (
    EvaluationData,
    as_loaders,
    close_loader,
    find_loaders,
    is_one_shot,
    load_validation_data,
)
from torchhal.trainer.loggers.base import FolderLogger
from torchhal.trainer.logging import _status_lines as status_lines
from torchhal.trainer.logging._standard_streams import lossy_streams
from torchhal.trainer.loops._fit_loop import StopOnSignal
from torchhal.trainer.loops._hook_calls import module_hook

if TYPE_CHECKING:
    from torchhal.trainer.trainer import Trainer

_log = logging.getLogger("torchhal")

_RUN_AGAIN_TIMEOUT = timedelta(minutes=5)

_STOPPING = "torchhal: stopping after this step; press Ctrl-C again to stop at once"


def launch(trainer: Trainer, fn: str, ckpt_path: Any) -> Any:
    """Start the strategy's processes and :func:`run` in each; the result of rank 0, or of this rank."""
    open_standard_descriptors()
    with lossy_streams():
        return _launch(trainer, fn, ckpt_path)


def _launch(trainer: Trainer, fn: str, ckpt_path: Any) -> Any:
    rendezvous.begin_call()
    launcher = trainer.strategy.make_launcher()
    vars(trainer)["num_nodes"] = trainer.strategy.num_nodes  # "auto" is known by now
    if launcher.returns_to_caller:
        return launcher.launch(run, trainer, fn, ckpt_path)
    choose_log_folders(trainer, fn)  # workers inherit which folder is this run's, and this process knows it too
    trainer.state = TrainerState(fn, None, "running")
    try:
        message = launcher.launch(run_in_worker, trainer, fn, ckpt_path)
    except BaseException as error:
        trainer.state.status = "interrupted"
        if is_orderly(error) and not launcher.has_begun:
            log_stop(trainer, fn, signal_of(error), begun=False)
        raise
    return apply_worker_result(trainer, message)


def choose_log_folders(trainer: Trainer, fn: str) -> None:
    """Take the next free folder before another job does; what only evaluates may have nothing to write."""
    for logger in trainer.loggers:
        if fn == "fit" and isinstance(logger, FolderLogger) and not trainer.fast_dev_run:
            logger.reserve()
        else:
            _ = logger.version


def run(trainer: Trainer, fn: str, ckpt_path: Any, *, in_worker: bool = False) -> Any:
    """One call, in a process that trains: set up, work, tear down, whatever happens in between.

    In a worker the result is what the calling process must hear of it, gathered while the ranks are still together.
    """
    trainer.state = TrainerState(fn, "train" if fn == "fit" else fn, "running")
    restore_flags = save_torch_flags()
    asked_accumulation = trainer.accumulate_grad_batches

    def ask(signum: int) -> None:
        trainer.strategy.watch.request_stop(signum)

    job = job_of(trainer)
    signals = StopSignals(
        ask,
        signals=(*DEFAULT_SIGNALS, *job.stop_signals),
        notice=(lambda: stopping_notice(trainer)) if trainer.is_global_zero else None,
    )
    failed = hooks_left = True
    on_refusal = ExitStack()
    try:
        with signals:  # from here on they ask for an orderly stop
            for signum in signals.kept:
                name = signal.Signals(signum).name
                trainer.warn_once(
                    f"{name}, by which the scheduler announces the end of the job, has a handler of the program's own, "
                    f"which stays: {fn} does not stop on it, and the job is not requeued. To have that, install none "
                    f"for {name}, or have another signal sent, see SlurmEnvironment(requeue_signal=...)"
                )
            set_flags(trainer)
            try:
                with at_once():
                    trainer.strategy.setup_environment()
                    set_hang_folder(trainer, trainer.default_root_dir)
                    bind_trainer(trainer, fn)
                    status_lines.announce_start(trainer, fn)
                    set_up(trainer, fn, ckpt_path, on_refusal)
                    on_refusal.pop_all()
                if signals.received is not None:
                    ask(signals.received)  # a scheduler's warning, perhaps before the ranks knew each other
                result = run_stage(trainer, fn)
            except StopRequested as stop:
                # this rank alone may be here, and there is nothing to save
                rendezvous.announce_stop(stop.signum)
                trainer.strategy.watch.report_stop(stop.signum)
                log_stop(trainer, fn, stop.signum, begun=False)
                raise exit_for_signal(stop.signum, agreed=False) from None
            except StopOnSignal as interruption:
                # every rank is here, after the same step: what follows may communicate
                if fn == "fit" and trainer.state.stage != "sanity_check" and not trainer.fast_dev_run:
                    save_interrupted(trainer, interruption.signum)
                log_stop(trainer, fn, interruption.signum)
                if fn == "fit":
                    requeue(trainer, ckpt_path, interruption.signum)
                raise exit_for_signal(interruption.signum, agreed=True) from None
            hooks_left = False
            tear_down_hooks(trainer, fn)
            trainer.state.status = "finished"
            trainer.finalize_loggers("success")
            if fn == "fit":
                status_lines.announce_end(trainer)
            if in_worker:
                result = pack_worker_result(trainer, result)
            else:
                trainer.strategy.restore_module()
        failed = False
    except BaseException as error:
        trainer.state.status = "interrupted"
        raised = report_failure(trainer, error)
        if hooks_left:
            tear_down_hooks(trainer, fn, failed=True)
        on_refusal.close()
        if isinstance(raised, RankFailedError) and raised.stop_signal:
            log_stop(trainer, fn, raised.stop_signal, begun=has_begun(trainer), left=raised.rank)
            raise exit_for_signal(raised.stop_signal, agreed=False) from None
        if raised is error:
            raise
        raise raised from error
    finally:
        restore_flags()
        trainer.accumulate_grad_batches = asked_accumulation
        trainer.state.stage = None
        trainer.hooks.refresh()
        trainer.current_hook = None
        trainer.results.start_batch(None)  # or a failed run's last one would stay on the device with the trainer
        close_loaders(trainer)
        try:
            trainer.strategy.teardown()
        except Exception:
            if not failed:
                raise
            _log.exception("the tear-down failed too")  # the first error is the one to hear of
    if signals.received is not None:  # too late to stop anything here; whoever sent it wants more than this call ended
        raise exit_for_signal(signals.received, agreed=True)
    return result


def job_of(trainer: Trainer) -> ClusterEnvironment | Job:
    """Who knows what announces the end of this run, and may start it anew: a strategy of one process has no
    environment, and may be in a scheduler's job all the same."""
    environment = trainer.strategy.cluster_environment
    return current_job() if environment is None else environment


def stopping_notice(trainer: Trainer) -> str:
    """What the first Ctrl-C is answered with, on a line of its own: a bar has not ended its line, nor has the terminal
    that shows ``^C``."""
    bar = trainer.progress_bar_callback
    in_a_line = os.isatty(2) or (bar is not None and bar.is_drawn)
    return f"\n{_STOPPING}" if in_a_line else _STOPPING


def close_loaders(trainer: Trainer) -> None:
    """End the workers that outlive an epoch: they don't outlive the run."""
    attachments = trainer.attachments
    loaders = [*attachments.validation_data.loaders, *attachments.evaluation_data.loaders]
    if trainer.fit_loop.data is not None:
        loaders.append(trainer.fit_loop.data.loader)
    for loader in loaders:
        close_loader(loader)


def save_interrupted(trainer: Trainer, signum: int) -> None:
    try:
        for callback in trainer.checkpoint_callbacks:
            callback.save_interrupted(trainer)
    except Exception:
        if trainer.is_global_zero:
            name, last = signal.Signals(signum).name, checkpointing.last_checkpoint(trainer)
            trainer.print(
                f"torchhal: fit stopped on {name} at step {trainer.global_step}, which could not be saved, so no "
                f"scheduler is asked for another life. The newest checkpoint is {last or 'none'}",
                file=sys.stderr,
            )
        raise


def has_begun(trainer: Trainer) -> bool:
    """Whether this call came as far as its steps; a sanity check comes before those of fit."""
    if trainer.state.fn == "fit":
        return trainer.fit_loop.optimization is not None
    return bool(trainer.results.stage == trainer.state.fn)


def log_stop(trainer: Trainer, fn: str, signum: int, *, begun: bool = True, left: int | None = None) -> None:
    """One line for whoever reads the log of a job that was stopped, in its steps or before it had ``begun`` them.

    ``left``: the rank that went at once, with which nothing could be saved any more; None where all stopped together.
    """
    if not trainer.is_global_zero:
        return
    where = "" if left is None else f", as rank {left} left at once"
    saved = [callback.interrupted_path for callback in trainer.checkpoint_callbacks if callback.interrupted_path]
    if fn == "fit" and saved and left is None:
        where = f"; saved {saved[0]}, continue with ckpt_path='last'"
    name = signal.Signals(signum).name
    at = f"at step {trainer.global_step}{where}" if begun else "before it began"
    trainer.print(f"torchhal: {fn} stopped on {name} {at}", file=sys.stderr)


def set_hang_folder(trainer: Trainer, folder: str) -> None:
    """Where ranks that hang write down where they are; what is far away can't be waited for then."""
    if not is_url(folder):
        trainer.strategy.watch.hang.run_folder = folder


def requeue(trainer: Trainer, ckpt_path: Any, signum: int) -> None:
    """Let the scheduler start the job anew; it is told whether that would go on from here, or begin again for ever."""
    job = job_of(trainer)
    if trainer.is_global_zero:
        continues = ckpt_path == "last" and checkpointing.last_checkpoint(trainer) is not None
        if said := job.run_again(signum, continues=continues):
            trainer.print(f"torchhal: {said}", file=sys.stderr)
    # A rank that leaves may end the others, and with them what was asked for. The scheduler may take longer than a
    # collective may; and what this process ends with is the signal's code, whoever comes.
    with suppress(TorchhalError):
        trainer.strategy.watch.barrier("requeue", _RUN_AGAIN_TIMEOUT)


def run_stage(trainer: Trainer, fn: str) -> Any:
    """Everything between the set-up and the tear-down."""
    if fn != "fit":
        return evaluate(trainer, fn)
    fit(trainer)
    return None


def save_torch_flags() -> Callable[[], None]:
    """What puts torch's global switches back as they are now."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    anomaly, check_nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()

    def restore() -> None:
        now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if now != (deterministic, warn_only):  # the call imports torch's compiler, which a signal may have cut short
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.autograd.set_detect_anomaly(anomaly, check_nan)

    return restore


def set_flags(trainer: Trainer) -> None:
    """torch's global switches as asked for."""
    if trainer.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=trainer.deterministic == "warn")
    if trainer.benchmark is not None:
        trainer.strategy.accelerator.set_benchmark(trainer.benchmark)
    if trainer.detect_anomaly:
        torch.autograd.set_detect_anomaly(True)


def bind_trainer(trainer: Trainer, fn: str) -> None:
    module, datamodule = trainer.module, trainer.datamodule
    if hasattr(type(module), "trainer"):
        module.trainer = trainer
    if datamodule is not None:
        datamodule.trainer = trainer
    trainer.results.module = module
    trainer.results.clear()
    trainer.fit_loop.optimization = None
    if fn == "fit":
        trainer.fit_loop.begin()
        trainer.trained_by = None
        trainer.frozen_parameters.forget()
    if trainer.strategy.module is not module:  # what an earlier model was trained with is no state of this one
        trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs = [], []
    # the folder of a new run is the next free one: decided once, by rank 0
    if trainer.is_global_zero:
        choose_log_folders(trainer, fn)
    trainer.log_dir = trainer.strategy.broadcast(trainer.logger.log_dir if trainer.logger is not None else None)
    if trainer.log_dir:
        set_hang_folder(trainer, trainer.log_dir)
    trainer.hooks.refresh()


def set_up(trainer: Trainer, fn: str, ckpt_path: Any, on_refusal: ExitStack) -> None:
    """Hooks, model, weights, optimizers and state, in the order that every strategy can carry."""
    strategy, module, datamodule = trainer.strategy, trainer.module, trainer.datamodule
    for owner in (datamodule, module):
        prepare = getattr(owner, "prepare_data", None)
        if prepare is not None and strategy.local_rank == 0:
            prepare()
    strategy.barrier("prepare_data")
    add_model_callbacks(trainer)
    if fn == "fit":
        on_refusal.callback(begin_anew(trainer))
    for callback in trainer.callbacks:
        if hasattr(callback, "setup"):
            callback.setup(trainer, module, fn)
    for owner in (datamodule, module):
        if hasattr(owner, "setup"):
            owner.setup(fn)
    trainer.hooks.refresh()
    if hasattr(module, "configure_model"):
        with strategy.init_context():
            module.configure_model()
    trainer.ckpt_path = checkpointing.resolve_path(trainer, ckpt_path)
    checkpoint = None
    if trainer.ckpt_path is not None:
        # before optimizers and wrappers take hold of the parameters: the hooks may replace some
        checkpoint = checkpointing.read_checkpoint(trainer, trainer.ckpt_path)
        checkpointing.restore_datamodule(trainer, checkpoint, trainer.ckpt_path)
    if fn == "fit":
        elastic_resume.record_batch_setup(trainer, checkpoint)
    strategy.accumulate_grad_batches = trainer.accumulate_grad_batches
    strategy.gradient_clip_val = trainer.gradient_clip_val
    strategy.gradient_clip_algorithm = trainer.gradient_clip_algorithm
    strategy.sync_batchnorm = trainer.sync_batchnorm
    if fn == "fit":
        reset_counters(trainer)
    strategy.connect(module)
    trainer.attachments.ready = True
    strategy.prepare(trainer)
    trainer.results.find_leader()
    trainer.follow_module()
    if checkpoint is not None:
        if fn == "fit":
            checkpointing.check_fits(trainer, checkpoint, trainer.ckpt_path or "")
        checkpointing.restore_weights(trainer, checkpoint, trainer.ckpt_path or "")
    log_hyperparams(trainer)
    if fn == "fit":
        load_fit_data(trainer)
        if checkpoint is not None:
            checkpointing.restore_training(trainer, checkpoint, trainer.ckpt_path or "")
        rank_consistency.check_settings(trainer)
    if checkpoint is not None:
        status_lines.announce_checkpoint(trainer, fn, checkpoint)


def add_model_callbacks(trainer: Trainer) -> None:
    configure = getattr(trainer.module, "configure_callbacks", None)
    if configure is None:
        return
    if trainer.attachments.asked_for_callbacks is trainer.module:
        return  # those of its last call, which know the best checkpoint
    own = configure() or []
    own = list(own) if isinstance(own, Sequence) else [own]
    trainer.check_hook_names(None, None, own)
    if not trainer.enable_checkpointing and any(isinstance(callback, ModelCheckpoint) for callback in own):
        trainer.warn_once(
            f"'enable_checkpointing' is False, but {type(trainer.module).__name__}.configure_callbacks returned a "
            "ModelCheckpoint, which saves all the same"
        )
    replaced = {type(callback) for callback in own}
    kept = [callback for callback in trainer.callbacks if type(callback) not in replaced]
    trainer.callbacks = make_callbacks([*kept, *own])
    trainer.attachments.asked_for_callbacks = trainer.module


def reset_counters(trainer: Trainer) -> None:
    """A fit with a checkpoint starts from its counters, one without goes on from where this Trainer is."""
    fit = trainer.fit_loop
    if trainer.ckpt_path is None:
        fit.go_on()


def log_hyperparams(trainer: Trainer) -> None:
    for owner in (trainer.module, trainer.datamodule):
        hparams = getattr(owner, "hparams", None)
        if hparams and getattr(owner, "_log_hyperparams", True) and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_hyperparams(dict(hparams))


def load_fit_data(trainer: Trainer) -> None:
    data = trainer.reload_train_loader(first=True)  # estimated_stepping_batches may have needed it already
    trainer.attachments.validation_data = load_validation_data(trainer)
    trainer.validation_interval(data.length)  # raises now rather than in the first epoch that validates


def fit(trainer: Trainer) -> None:
    with at_once():
        trainer.hooks.call("on_fit_start")
    sanity_check(trainer)
    trainer.state.stage = "train"
    trainer.module.train()
    trainer.fit_loop.run()
    trainer.strategy.check_replicas()
    trainer.hooks.call("on_fit_end")


def sanity_check(trainer: Trainer) -> None:
    data = trainer.attachments.validation_data
    if not data or trainer.num_sanity_val_steps == 0 or trainer.fit_loop.total_batches:
        return
    data = data.first(trainer.num_sanity_val_steps)
    for index, loader in enumerate(data.loaders):
        if is_one_shot(loader):  # what it gives to the sanity check, no validation sees again
            data.skip(index)
    if all(map(is_one_shot, data.loaders)):
        return
    strategy = trainer.strategy
    before = rng.collect(strategy.accelerator, strategy.root_device)
    trainer.state.stage = "sanity_check"
    loop = trainer.evaluation_loop
    trainer.hooks.call("on_sanity_check_start")
    cut = loop.stops_here() or loop.run("sanity_check", data)[1]
    if not cut:
        trainer.hooks.call("on_sanity_check_end")
        cut = loop.stops_here()
    if cut:
        raise StopOnSignal(strategy.watch.stop_signal or signal.SIGTERM)
    trainer.state.stage = trainer.results.stage = "train"
    rng.restore(before, strategy.accelerator, strategy.root_device)


def evaluate(trainer: Trainer, fn: str) -> Any:
    with at_once():
        given = find_loaders(fn, getattr(trainer.attachments, fn), trainer.module, trainer.datamodule)
        if not as_loaders(given):
            raise ModelError(f"{fn} needs data: its loader is {given!r}")
        name = "limit_val_batches" if fn == "validate" else f"limit_{fn}_batches"
        data = EvaluationData.build(given, trainer, getattr(trainer, name), name, "dataloaders")
        trainer.attachments.evaluation_data = data
    outputs, cut = trainer.evaluation_loop.run(fn, data)
    if cut:
        raise StopOnSignal(trainer.strategy.watch.stop_signal or signal.SIGTERM)
    if fn != "predict":
        return trainer.results.evaluation_results(max(1, len(data.loaders)))
    if not trainer.attachments.keep_predictions:
        return None
    if trainer.world_size > 1:
        mine = outputs if trainer.strategy.is_data_leader else [[] for _ in outputs]
        everybody = trainer.strategy.all_gather_object(mine)
        outputs = [
            list(itertools.chain.from_iterable(part[index] for part in everybody)) for index in range(len(outputs))
        ]
    return outputs[0] if len(outputs) == 1 else outputs


def report_failure(trainer: Trainer, error: BaseException) -> BaseException:
    """Tell the other ranks, then the callbacks; the error to raise."""
    strategy = trainer.strategy
    raised = strategy.explain(error)
    strategy.watch.report_failure(raised)
    for callback in trainer.callbacks:
        on_exception = getattr(callback, "on_exception", None)
        if on_exception is None:
            continue
        try:
            on_exception(trainer, trainer.module, raised)
        except Exception:  # the first error is the one to hear of
            _log.exception("%s.on_exception failed", type(callback).__name__)
    try:
        trainer.finalize_loggers("failed")
    except Exception:
        _log.exception("a logger could not be closed")
    return raised


def tear_down_hooks(trainer: Trainer, fn: str, *, failed: bool = False) -> None:
    """Call every ``teardown``; the first error is raised at the end, unless the run has ``failed`` of another."""
    module = trainer.module
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        *((callback, (trainer, module, fn)) for callback in trainer.callbacks),
        (trainer.datamodule, (fn,)),
        (module, (fn,)),
    ]
    first: Exception | None = None
    for owner, given in calls:
        try:
            if hasattr(owner, "teardown"):
                owner.teardown(*given)
        except Exception as error:
            if failed or first is not None:
                _log.exception("%s.teardown failed too", type(owner).__name__)
            first = first or error
    if first is not None and not failed:
        raise first


def pack_worker_result(trainer: Trainer, result: Any) -> dict[str, Any]:
    """What a worker sends back to the process that called fit; rank 0's is heard."""
    state = trainer.strategy.module_state_dict()  # every rank helps to gather it
    return {
        "result": result,
        "state_dict": to_cpu(state) if trainer.is_global_zero else {},
        "buffer_dtypes": {name: buffer.dtype for name, buffer in trainer.module.named_buffers()},
        "log_dir": trainer.log_dir,
        "run_id": trainer.run_id,
        "loop": trainer.fit_loop.state_dict(),
        "callbacks": callback_states(trainer),
        "callback_metrics": {name: value.cpu() for name, value in trainer.results.callback_metrics.items()},
        "status": trainer.state.status,
    }


def apply_worker_result(trainer: Trainer, answer: dict[str, Any]) -> Any:
    if hasattr(type(trainer.module), "trainer"):
        trainer.module.trainer = trainer
    trainer.strategy.connect(trainer.module)
    trainer.fit_loop.load_state_dict(answer["loop"])
    trainer.log_dir, trainer.run_id = answer["log_dir"], answer["run_id"]
    trainer.trained_elsewhere = trainer.state.fn == "fit" or trainer.trained_elsewhere
    add_model_callbacks(trainer)  # the worker had them
    if trainer.state.fn == "fit":
        begin_anew(trainer)
    for callback in trainer.checkpoint_callbacks:
        callback.setup(trainer, trainer.module, trainer.state.fn or "fit")  # finds its folder, as in the worker
    load_callback_states(trainer, answer["callbacks"])
    # after the callbacks know where the checkpoints are
    take_weights(trainer, answer["state_dict"], answer["buffer_dtypes"])
    trainer.results.callback_metrics.update(answer["callback_metrics"])
    trainer.state.status = answer["status"]
    return answer["result"]


def take_weights(trainer: Trainer, state: dict[str, Any], buffer_dtypes: dict[str, torch.dtype]) -> None:
    """Load what the workers trained into the model of this process, which ran none of its hooks.

    It gets the dtypes of theirs, which their precision has cast; ``buffer_dtypes`` are those of buffers, of which a
    state has the persistent ones alone.
    """
    module = trainer.module
    configure = module_hook(module, "configure_model")
    if configure is not None:
        with trainer.strategy.init_context():
            configure()
    problem = ""
    if missing := sorted(set(state) ^ set(module.state_dict())):
        problem = f"{', '.join(map(repr, missing[:4]))} are in one of them only"
    else:
        dtypes = {name: value.dtype for name, value in state.items() if isinstance(value, torch.Tensor)}
        cast_by_name(module, {**buffer_dtypes, **dtypes})
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            problem = str(error)
    if problem:
        saved = [callback.best_model_path for callback in trainer.checkpoint_callbacks if callback.best_model_path]
        raise ModelError(
            f"the workers have finished, but the {type(module).__name__} of this process can't take over their weights "
            f"({problem}): build layers in __init__ or configure_model, or use strategy='ddp'. "
            + (f"The trained weights are in {saved[0]!r}" if saved else "No checkpoint was saved")
        )


def run_in_worker(trainer: Trainer, fn: str, ckpt_path: Any) -> dict[str, Any]:
    """:func:`run` in a process that was started for it; what the calling process must hear of it."""
    with lossy_streams():
        message: dict[str, Any] = run(trainer, fn, ckpt_path, in_worker=True)
    return message


def to_cpu(value: Any) -> Any:
    return move_to_device(value, torch.device("cpu"))
