"""LambdaCallback: a callback of functions."""

import inspect

import pytest
from minimal_net import BATCHES, Net
from quiet_trainer import make

from torchhal import Callback
from torchhal.errors import ModelError, UnknownArgumentError
from torchhal.trainer._hook_names import _CALLBACK
from torchhal.trainer.callbacks import LambdaCallback


def test_takes_each_hook():
    """One keyword for each hook of Callback."""
    hooks = _CALLBACK - {"state_key", "state_dict", "load_state_dict", "replaces", "runs_after_module"}
    assert set(inspect.signature(LambdaCallback).parameters) == hooks


def test_calls_functions_with_the_hooks_arguments():
    calls = []
    callback = LambdaCallback(
        setup=lambda trainer, module, stage: calls.append(stage),
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: calls.append(batch_idx),
        on_validation_batch_start=lambda trainer, module, batch, batch_idx: calls.append("validation"),
        on_train_end=lambda *args: calls.append(len(args)),
    )
    make(callback).fit(Net(), BATCHES, BATCHES[:1])
    assert calls == ["fit", 0, 1, "validation", 2]


def test_refuses_unknown_names():
    with pytest.raises(UnknownArgumentError, match="did you mean 'on_train_epoch_end'"):
        LambdaCallback(on_train_epoch_ends=print)


def test_refuses_what_is_no_function():
    with pytest.raises(TypeError, match="'on_train_start' must be a function"):
        LambdaCallback(on_train_start=3)


def test_refuses_functions_of_other_arguments():
    with pytest.raises(ModelError, match=r"LambdaCallback.on_train_start must take \(self, trainer, module\)"):
        make(LambdaCallback(on_train_start=lambda: None)).fit(Net(), BATCHES)


def test_has_no_hook_that_was_not_given():
    assert vars(LambdaCallback(on_fit_end=print)).keys() == {"_made_with", "on_fit_end"}
    assert isinstance(LambdaCallback(), Callback)
