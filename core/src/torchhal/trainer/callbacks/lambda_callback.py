"""Make a callback of functions, without a class, with LambdaCallback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks.base import Callback

Hook = Callable[..., Any]


class LambdaCallback(Callback):
    """Callback made of functions, one keyword for each hook: ``LambdaCallback(on_train_start=lambda *args: ...)``.

    A function is called with what the hook of :class:`Callback` is called with: the Trainer, the model, and the rest.
    Where processes are started by spawn, it must pickle.

    Raises:
        UnknownArgumentError: a keyword that is no hook; the message gives the nearest one.
        TypeError: what is no function.

    .. versionadded:: 0.2
    """

    @explain_unknown_arguments
    def __init__(
        self,
        setup: Hook | None = None,
        teardown: Hook | None = None,
        on_fit_start: Hook | None = None,
        on_fit_end: Hook | None = None,
        on_sanity_check_start: Hook | None = None,
        on_sanity_check_end: Hook | None = None,
        on_exception: Hook | None = None,
        on_train_start: Hook | None = None,
        on_train_end: Hook | None = None,
        on_train_epoch_start: Hook | None = None,
        on_train_epoch_end: Hook | None = None,
        on_train_batch_start: Hook | None = None,
        on_train_batch_end: Hook | None = None,
        on_validation_start: Hook | None = None,
        on_validation_end: Hook | None = None,
        on_validation_epoch_start: Hook | None = None,
        on_validation_epoch_end: Hook | None = None,
        on_validation_batch_start: Hook | None = None,
        on_validation_batch_end: Hook | None = None,
        on_test_start: Hook | None = None,
        on_test_end: Hook | None = None,
        on_test_epoch_start: Hook | None = None,
        on_test_epoch_end: Hook | None = None,
        on_test_batch_start: Hook | None = None,
        on_test_batch_end: Hook | None = None,
        on_predict_start: Hook | None = None,
        on_predict_end: Hook | None = None,
        on_predict_epoch_start: Hook | None = None,
        on_predict_epoch_end: Hook | None = None,
        on_predict_batch_start: Hook | None = None,
        on_predict_batch_end: Hook | None = None,
        on_before_backward: Hook | None = None,
        on_after_backward: Hook | None = None,
        on_before_optimizer_step: Hook | None = None,
        on_before_zero_grad: Hook | None = None,
        on_save_checkpoint: Hook | None = None,
        on_load_checkpoint: Hook | None = None,
    ) -> None:
        hooks = {name: hook for name, hook in locals().items() if name != "self" and hook is not None}
        for name, hook in hooks.items():
            if not callable(hook):
                raise TypeError(f"{name!r} must be a function, which is called as this hook (got {hook!r})")
            setattr(self, name, hook)
