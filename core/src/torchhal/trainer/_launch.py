"""Start the processes of a call of the Trainer, and transfer what workers trained to the calling process."""

from __future__ import annotations

import functools
from typing import Any

import torch

from torchhal.distributed import rendezvous
from torchhal.distributed.process import open_standard_descriptors
from torchhal.distributed.signals import is_orderly, signal_of
from torchhal.errors import ModelError
from torchhal.precision._casting import cast_by_name
from torchhal.pytree import move_to_device
from torchhal.trainer._callback_states import begin_anew, callback_states, load_callback_states
from torchhal.trainer._hooks import module_hook
from torchhal.trainer._run_lifecycle import add_model_callbacks, choose_log_folders, execute
from torchhal.trainer._state import TrainerState
from torchhal.trainer._stop_handling import log_stop
from torchhal.trainer.logging._standard_streams import lossy_streams
from torchhal.trainer.loops._fit_loop import FitLoop
from torchhal.trainer.planning import _planning as planning
from torchhal.trainer.run_state import RunState


def launch(run: RunState, loop: FitLoop, fn: str, ckpt_path: Any) -> Any:
    """Start the strategy's processes and :func:`.execute` the call in each.

    Returns:
        The result of rank 0 where workers were started, else that of this rank.
    """
    if run.is_trial:
        return execute(run, loop, fn, ckpt_path)
    open_standard_descriptors()
    with lossy_streams():
        return _launch(run, loop, fn, ckpt_path)


def _execute(trainer: Any, run: RunState, loop: FitLoop, fn: str, ckpt_path: Any) -> Any:
    return execute(run, loop, fn, ckpt_path)


def _launch(run: RunState, loop: FitLoop, fn: str, ckpt_path: Any) -> Any:
    rendezvous.begin_call()
    launcher = run.strategy.make_launcher()
    run.num_nodes = run.strategy.num_nodes  # "auto" is resolved by now
    if launcher.returns_to_caller:
        return launcher.launch(_execute, run.trainer, run, loop, fn, ckpt_path)
    choose_log_folders(run, fn)  # the choice is shared by the workers and this process
    run.state = TrainerState(fn, None, "running")
    try:
        message = launcher.launch(run_in_worker, run.trainer, run, loop, fn, ckpt_path)
    except BaseException as error:
        run.state.status = "interrupted"
        if is_orderly(error) and not launcher.has_begun:
            log_stop(run, fn, signal_of(error), begun=False)
        raise
    return apply_worker_result(run, message)


def run_in_worker(trainer: Any, run: RunState, loop: FitLoop, fn: str, ckpt_path: Any) -> dict[str, Any]:
    """Execute the call in a process that was started for it; return the state for the calling process.

    ``trainer`` keeps the Trainer alive, to which run and loop refer weakly.
    """
    with lossy_streams():
        pack = functools.partial(pack_worker_result, run)
        message: dict[str, Any] = execute(run, loop, fn, ckpt_path, to_message=pack)
    return message


def pack_worker_result(run: RunState, result: Any) -> dict[str, Any]:
    """Return the message of a worker to the process that called fit, which uses rank 0's."""
    state = run.strategy.module_state_dict()  # a collective on every rank
    return {
        "result": result,
        "state_dict": to_cpu(state) if run.is_global_zero else {},
        "buffer_dtypes": {name: buffer.dtype for name, buffer in run.module.named_buffers()},
        "log_dir": run.log_dir,
        "run_id": run.run_id,
        "loop": run.progress.state_dict(),
        "callbacks": callback_states(run.callbacks),
        "callback_metrics": {name: value.cpu() for name, value in run.results.callback_metrics.items()},
        "status": run.state.status,
        "decision": None if run.auto is None else run.auto.decision,
    }


def apply_worker_result(run: RunState, answer: dict[str, Any]) -> Any:
    if hasattr(type(run.module), "trainer"):
        run.module.trainer = run.adapters.trainer_for(run.module)
    if answer["decision"] is not None:
        planning.keep_base(run)
        planning.follow(run, answer["decision"], launched=False)
    run.strategy.connect(run.module)
    run.progress.load_state_dict(answer["loop"])
    run.log_dir, run.run_id = answer["log_dir"], answer["run_id"]
    run.trained_elsewhere = run.state.fn == "fit" or run.trained_elsewhere
    add_model_callbacks(run)  # the worker had them
    if run.state.fn == "fit":
        begin_anew(run.callbacks, run.trainer_id)
    for callback in run.checkpoint_callbacks:
        callback.setup(run.trainer, run.module, run.state.fn or "fit")  # sets its folder, as in the worker
    load_callback_states(run.callbacks, answer["callbacks"])
    # after the callbacks have set the folders of the checkpoints
    take_weights(run, answer["state_dict"], answer["buffer_dtypes"])
    run.results.callback_metrics.update(answer["callback_metrics"])
    run.state.status = answer["status"]
    return answer["result"]


def take_weights(run: RunState, state: dict[str, Any], buffer_dtypes: dict[str, torch.dtype]) -> None:
    """Load what the workers trained into the model of this process, which ran none of its hooks.

    It gets the dtypes of theirs, which their precision has cast; ``buffer_dtypes`` are those of buffers, of which a
    state has only the persistent ones.
    """
    module = run.module
    configure = module_hook(module, "configure_model")
    if configure is not None:
        with run.strategy.init_context():
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
        saved = [callback.best_model_path for callback in run.checkpoint_callbacks if callback.best_model_path]
        raise ModelError(
            f"the workers have finished, but the {type(module).__name__} of this process can't take over their weights "
            f"({problem}): build layers in __init__ or configure_model, or use strategy='ddp'. "
            + (f"The trained weights are in {saved[0]!r}" if saved else "No checkpoint was saved")
        )


def to_cpu(value: Any) -> Any:
    return move_to_device(value, torch.device("cpu"))
