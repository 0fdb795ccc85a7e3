"""Take two steps with a copy of the model, to see whether they fit into the memory of every rank."""

from __future__ import annotations

import gc

from torchhal.errors import ConfigurationError
from torchhal.rng import host_generators_restored
from torchhal.trainer._auto_strategy import AutoStrategy
from torchhal.trainer._trial import fit_trial, make_trial
from torchhal.trainer._trial_state import RestoreState, copy_data, copy_model
from torchhal.trainer.data._loaders import is_one_shot
from torchhal.trainer.run_state import RunState

_STEPS = 2
"""The optimizer's state exists from the second on."""


def runs_out_of_memory(run: RunState) -> bool:
    """Return whether two steps of the run's strategy run out of memory on any rank.

    Called on every rank, with the strategy's environment set up, as it is afterwards. Model, data and random numbers
    stay as they are. An error of another kind is left to the fit, which meets it too.
    """
    run.strategy.teardown()
    mine = _tries(run)
    gc.collect()  # an error's frames were in cycles with what they held
    run.strategy.accelerator.empty_cache()
    run.strategy.setup_environment()
    return True in (run.strategy.all_gather_object(mine) if run.strategy.world_size > 1 else [mine])


def _tries(run: RunState) -> bool:
    assert run.auto is not None
    if run.sources.train is not None and is_one_shot(run.sources.train):
        return False  # its batches would be missing in the fit
    trial = make_trial(run.trainer, [RestoreState()], max_steps=_STEPS, limit_train_batches=1.0, overfit_batches=0.0)
    trial._run.auto = AutoStrategy(run.auto.request, decision=run.auto.decision)
    try:
        model, datamodule = copy_model(run.module, "strategy='auto'"), copy_data(run.datamodule)
    except ConfigurationError:  # untried
        return False
    try:
        with host_generators_restored():
            fit_trial(trial, model, run.sources.train, datamodule)
    except Exception as error:
        return bool(trial.accelerator.is_out_of_memory(error))
    return False
