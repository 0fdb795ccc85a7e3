"""Validation, test and prediction: every batch of every loader once, without gradients."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchhal._overrides import implements
from torchhal.errors import ModelError
from torchhal.pytree import move_to_device
from torchhal.trainer._call_signatures import adapt_step
from torchhal.trainer._run_data import reach_end_of_sampler
from torchhal.trainer._run_part import RunPart
from torchhal.trainer.data._accelerator_loader import start_accelerator_iterator
from torchhal.trainer.data._batch_indices import recorder_of
from torchhal.trainer.data._batch_transfer import batch_transfer
from torchhal.trainer.data._evaluation_data import EvaluationData
from torchhal.trainer.data._iterators import close_iterator
from torchhal.trainer.data._loaders import last_batch, loader_length, no_batch
from torchhal.trainer.loops._batch_hooks import evaluation_batch_hooks
from torchhal.trainer.loops._epoch_end import call_epoch_end
from torchhal.trainer.loops._uneven_evaluation import UnevenEvaluation
from torchhal.trainer.run_state import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator

# stage -> (the model's step, the middle of its hooks' names)
_STAGES = {
    "sanity_check": ("validation_step", "validation"),
    "validate": ("validation_step", "validation"),
    "test": ("test_step", "test"),
    "predict": ("predict_step", "predict"),
}


@contextmanager
def evaluation_mode(run: RunState, word: str) -> Iterator[None]:
    """Put the model into evaluation mode without gradients; restore the mode of each submodule afterwards."""
    module: nn.Module = run.module
    modes = {name: child.training for name, child in module.named_modules()}
    set_eval = run.hooks.of_module(f"on_{word}_model_eval") or module.eval
    set_eval()
    # what a validation leaves behind in a fit may come into the training, for which inference tensors are no use
    infers = run.inference_mode and run.strategy.inference_mode and run.state.fn != "fit"
    no_grad = torch.inference_mode if infers else torch.no_grad
    try:
        with no_grad():
            yield
    finally:
        for name, child in module.named_modules():
            child.training = modes.get(name, child.training)
        set_train = run.hooks.of_module(f"on_{word}_model_train")
        if set_train is not None:
            set_train()


class EvaluationLoop(RunPart[RunState]):
    """Runs one evaluation and leaves its metrics in the run's results."""

    def __init__(self, run: RunState) -> None:
        super().__init__(run)
        self.batch_idx = 0
        self.dataloader_idx = 0
        self.records_batch_indices = False
        """Whether predictions record the samples of each batch; a callback that needs them sets it in ``setup``."""
        self.batch_indices: list[int] | None = None
        """The samples of the present batch, as indices of the dataset; None where they are not recorded."""

    def evaluate(self, stage: str, data: EvaluationData) -> tuple[list[list[Any]], bool]:
        """Evaluate on ``data``.

        Returns:
            The outputs of ``predict_step`` per loader, and whether a signal cut the evaluation short on any rank.
        """
        run = self.run
        step_name, word = _STAGES[stage]
        module = run.module
        if not implements(module, step_name):
            raise ModelError(f"{type(module).__name__} has no {step_name}: define it, or don't ask for it")
        results, hooks = run.results, run.hooks
        with evaluation_mode(run, word):
            results.stage = stage
            hooks.call(f"on_{word}_start")
            run.phases.start_evaluation(stage)
            hooks.call(f"on_{word}_epoch_start")
            outputs, cut = ([], True) if self.stops_here() else self._run_loaders(stage, data, step_name, word)
            results.start_batch(None)
            if run.world_size > 1:
                cut = run.strategy.reduce_boolean_decision(cut, all=False)
            if cut:  # a partial evaluation is discarded: not monitored, logged or kept
                run.phases.end()
                results.reset()
                return outputs, True
            results.finalize_epoch()
            call_epoch_end(run, f"on_{word}_epoch_end")
            if stage == "validate" and run.state.fn == "fit":
                # set before the next hook: a run resumed from a checkpoint it writes doesn't validate again
                run.progress.validated_at = run.progress.total_batches
            hooks.call(f"on_{word}_end")
            run.phases.end()
            if stage != "sanity_check":
                run.log_epoch()
            results.reset()
        return outputs, False

    def _run_loaders(self, stage: str, data: EvaluationData, step_name: str, word: str) -> tuple[list[list[Any]], bool]:
        run = self.run
        start_batch, watch = run.results.start_batch, run.strategy.watch
        several = len(data.loaders) > 1
        step = adapt_step(
            run.strategy.step_function(step_name), getattr(run.module, step_name), several_loaders=several
        )
        transfer = batch_transfer(run.strategy, run.datamodule, run.module)
        batch_start, batch_end = evaluation_batch_hooks(run, stage, word)
        keep = stage == "predict" and run.sources.keep_predictions
        off_device = run.strategy.root_device.type != "cpu"  # where predictions would fill the memory
        alone = run.world_size == 1  # a rank may be left without a batch
        together = run.strategy.evaluation_communicates and not alone
        outputs: list[list[Any]] = []
        for index, (loader, length) in enumerate(zip(data.loaders, data.lengths, strict=True)):
            self.dataloader_idx = index
            loader_idx = index if several else None
            kept: list[Any] = []
            outputs.append(kept)
            batches = data.batches[index]
            lockstep = UnevenEvaluation(run.strategy, batches) if together and batches != [] else None
            # unknown until the loader ends: each rank counts its batches, and all continue from the highest count
            ends_apart = batches is None and not (alone or together)
            if length == 0 and lockstep is None and not ends_apart:
                continue
            size = loader_length(loader)
            stop = last_batch(loader, length)
            common = data.common[index]
            recorder = recorder_of(loader)
            self.batch_indices = None
            iterator = start_accelerator_iterator(loader, data.iterated[index]) if length != 0 else iter(())
            batch_idx, cut = -1, False
            try:
                while batch_idx + 1 != stop and not cut:
                    try:  # a for loop would call iter() again
                        batch = next(iterator)
                    except StopIteration:
                        break
                    batch_idx += 1
                    self.batch_idx = batch_idx
                    if recorder is not None:
                        self.batch_indices = recorder.take()
                    if transfer is not None:
                        start_batch(None, loader_idx)  # which held the last batch: two would lie on the device
                        batch = transfer(batch, index)
                    start_batch(batch, loader_idx)
                    if batch_start is not None:
                        batch_start(batch, batch_idx, index)
                    run.current_hook = step_name
                    if lockstep is None:
                        output = step(batch, batch_idx, index)
                    else:
                        output = lockstep.step(step, batch, batch_idx, index)
                    if batch_end is not None:
                        batch_end(output, batch, batch_idx, index)
                    if keep:
                        kept.append(move_to_device(output, torch.device("cpu")) if off_device else output)
                    del output  # or this step's output would stay in memory during the next
                    if batch_idx < common or alone or together or ends_apart:  # not for batches that other ranks lack
                        cut = self.stops_here()
                if length == size and not cut:  # else a limit was reached, and the rest of the sampler stays undrawn
                    reach_end_of_sampler(run, iterator)
                if lockstep is not None and not cut:
                    for _ in lockstep.rest():
                        if self.stops_here():
                            return outputs, True
            finally:
                close_iterator(iterator)
            if ends_apart:
                watch.steps_done, any_cut = run.strategy.reduce([watch.steps_done, int(cut)], "max")
                cut = bool(any_cut)
            if cut:
                return outputs, True
            if batch_idx < 0 and size is None and alone:
                raise no_batch(f"loader {index} of {word}" if several else f"the {word} loader", loader)
        return outputs, False

    def stops_here(self) -> bool:
        """Return whether a signal ends the run at this batch, or between these hooks, on which all ranks agree."""
        watch = self.run.strategy.watch
        watch.steps_done += 1
        return watch.stop_requested and self._signalled()

    def _signalled(self) -> bool:
        """Return whether a signal ends the run; any other request to stop waits for the end of this evaluation."""
        signum = self.run.strategy.watch.agree_on_stop_step()
        return signum is not None and signum > 0
