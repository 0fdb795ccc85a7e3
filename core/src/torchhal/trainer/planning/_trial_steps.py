"""Take two steps with a copy of the model, to see whether a strategy can train it in the memory of every rank."""

from __future__ import annotations

import gc

from torchhal.errors import ConfigurationError, ModelError
from torchhal.rng import host_generators_restored
from torchhal.trainer._auto_strategy import AutoStrategy
from torchhal.trainer._trial import fit_trial, make_trial
from torchhal.trainer._trial_state import RestoreState, copy_data, copy_model
from torchhal.trainer.data._loaders import is_one_shot
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
    if run.sources.train is not None and is_one_shot(run.sources.train):
        return ""  # its batches would be missing in the fit
    trial = make_trial(run.trainer, [RestoreState()], max_steps=_STEPS, limit_train_batches=1.0, overfit_batches=0.0)
    trial._run.auto = AutoStrategy(run.auto.request, decision=run.auto.decision)
    try:
        model, datamodule = copy_model(run.module, "strategy='auto'"), copy_data(run.datamodule)
    except ConfigurationError:  # untried
        return ""
    try:
        with host_generators_restored():
            fit_trial(trial, model, run.sources.train, datamodule)
    except (ConfigurationError, ModelError) as error:
        return " ".join(str(error).split())
    except Exception as error:
        return OUT_OF_MEMORY if trial.accelerator.is_out_of_memory(error) else ""
    return ""
