"""Call the hooks at the end of an epoch, with its results finalized in between."""

from __future__ import annotations

from collections.abc import Callable

from torchhal.trainer.run_state import RunState


def call_epoch_end(run: RunState, name: str, before_monitors: Callable[[], None] | None = None) -> None:
    """Call epoch-end hooks: callbacks, the model, then, with all values final, the callbacks that monitor or save them.

    Args:
        run: whose hooks are called and whose results are finalized in between.
        name: the hook.
        before_monitors: called after the values are finalized, before the callbacks that monitor them.
    """
    trainer, module = run.trainer, run.module
    run.current_hook = name
    before, after = run.hooks.around_module(name)
    for function in before:
        function(trainer, module)
    own = run.hooks.of_module(name)
    if own is not None:
        own()
    run.results.finalize_epoch()
    if before_monitors is not None:
        before_monitors()
    for function in after:
        function(trainer, module)
    run.current_hook = None
