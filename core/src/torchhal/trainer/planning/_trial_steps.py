"""Take two steps with a copy of the model, to see whether a strategy can train it in the memory of every rank."""

from __future__ import annotations

import gc
from typing import Any

import torch

from torchhal._overrides import implements
from torchhal.distributed.signals import within_a_run
from torchhal.errors import ConfigurationError, ModelError
from torchhal.pytree import move_module
from torchhal.rng import host_generators_restored
from torchhal.trainer._auto_strategy import AutoStrategy
from torchhal.trainer._trial import fit_trial, make_trial
from torchhal.trainer._trial_state import RestoreState, copy_data, copy_model
from torchhal.trainer.run_state import RunState

OUT_OF_MEMORY = "it ran out of memory in its first steps"

_STEPS = 2
"""The optimizer's state exists from the second on."""


def why_not(run: RunState) -> str:
    """Take two steps by the run's strategy; return why it can't train the model on some rank, or "".

    Called on every rank, with the strategy's environment set up, as it is afterwards. Model, data and random numbers
    stay as they are. A failure of another kind is left to the fit, which meets it too.

    Returns:
        On every rank the same: that the steps have run out of memory, or what the strategy has refused.
    """
    run.strategy.teardown()
    mine = _try_steps(run)
    gc.collect()  # an error's frames were in cycles with what they held
    run.strategy.accelerator.empty_cache()
    run.strategy.setup_environment()
    everybody = run.strategy.all_gather_object(mine) if run.strategy.world_size > 1 else [mine]
    return OUT_OF_MEMORY if OUT_OF_MEMORY in everybody else next(filter(None, everybody), "")


def _try_steps(run: RunState) -> str:
    assert run.auto is not None
    trial = make_trial(run.trainer, [RestoreState()], max_steps=_STEPS, limit_train_batches=1.0, overfit_batches=0.0)
    trial._run.auto = AutoStrategy(run.auto.request, decision=run.auto.decision)
    places = {parameter.device for parameter in run.module.parameters()} - {torch.device("cpu"), torch.device("meta")}
    if places:  # of an earlier fit: it would lie there beside its copy
        move_module(run.module, torch.device("cpu"))
    try:
        return _try_copies(run, trial)
    finally:
        for device in places:
            move_module(run.module, device)


def _try_copies(run: RunState, trial: Any) -> str:
    try:
        model, datamodule = copy_model(run.module, "strategy='auto'"), copy_data(run.datamodule)
    except ConfigurationError:  # untried
        return ""
    for owner in (model, datamodule):
        for hook in ("prepare_data", "setup", "teardown"):  # which the fit has called, or will
            if implements(owner, hook):
                vars(owner)[hook] = None
    try:
        with host_generators_restored(), within_a_run():
            fit_trial(trial, model, run.sources.train, datamodule)
    except (ConfigurationError, ModelError) as error:
        return " ".join(str(error).split())
    except Exception as error:
        return OUT_OF_MEMORY if trial.accelerator.is_out_of_memory(error) else ""
    return ""
