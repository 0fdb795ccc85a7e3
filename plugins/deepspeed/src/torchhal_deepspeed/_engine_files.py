"""Save the files of DeepSpeed's engine, and locate each tensor in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import torch

from torchhal_deepspeed._partition_map import PartitionMap
from torchhal_deepspeed._partitioned_tensors import StoredPart

TAG: Final = "engine"
"""The folder of the engine's files in that of a checkpoint."""


class Written:
    """The files that this rank wrote, and the first error it met."""

    def __init__(self) -> None:
        self.files: list[Path] = []
        self.failure: Exception | None = None


class EngineFiles:
    """The saved files of one engine, with the address of each tensor in them."""

    def __init__(self, ledger: PartitionMap) -> None:
        self.ledger = ledger
        self.engine = ledger.engine

    def save(self, folder: Path) -> Written:
        """Let the engine save into ``folder``; every rank must call, and every rank returns.

        An error in one rank's file must not keep it from the barriers that the others have entered: it is stored in the
        result instead.
        """
        engine, written = self.engine, Written()
        before = engine.checkpoint_engine
        engine.checkpoint_engine = _writer(written)
        vars(engine)["_copy_recovery_script"] = lambda path: None  # an error there would leave the others waiting
        try:
            engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)
        finally:
            engine.checkpoint_engine = before
            del vars(engine)["_copy_recovery_script"]
        if self._rank == 0 and written.failure is None:
            try:
                (folder / "latest").write_text(TAG)  # what DeepSpeed's own tools look for
                engine._copy_recovery_script(str(folder))
            except Exception as error:
                written.failure = error
        return written

    def stored_part(self, name: str, key: str | None) -> StoredPart | None:
        """Return the place of this rank's part of a tensor in what :meth:`save` writes; None if it has none."""
        ledger = self.ledger
        parameter = ledger.parameters.get(name)
        if parameter is None or not ledger.is_divided(parameter):
            return self._whole(name, key)
        place = ledger.place(parameter)
        if place is None:
            return None
        if ledger.stage == 3:
            steps: tuple[Any, ...] = ("fp32_flat_groups", place.group)
            if key is not None:
                steps = ("optimizer_state_dict", "state", place.group, key)
        else:
            steps = ("single_partition_of_fp32_groups", place.group)
            if key is not None:
                steps = ("base_optimizer_state", "state", place.group, key)
        file: str = self.engine._get_zero_ckpt_name("", TAG)
        return StoredPart(file, ("optimizer_state_dict", *steps), place.start, place.length, place.offset)

    def _whole(self, name: str, key: str | None) -> StoredPart | None:
        """Return the place of what the optimizer doesn't divide: buffers, frozen parameters, all at stage 0."""
        ledger, parameter = self.ledger, self.ledger.parameters.get(name)
        file: str = self.engine._get_ckpt_name("", TAG)
        if parameter is not None and hasattr(parameter, "ds_tensor"):
            offset, length = ledger.partition(parameter)
            return StoredPart(file, ("frozen_param_fragments", name), 0, length, offset) if length else None
        if self._rank != 0:
            return None
        if key is not None:
            assert parameter is not None
            order = [p for group in ledger.base.param_groups for p in group["params"]]
            index = next(index for index, other in enumerate(order) if other is parameter)
            return StoredPart(file, ("optimizer", "state", index, key), 0, parameter.numel(), 0)
        tensor = parameter if parameter is not None else ledger.buffers[name]
        return StoredPart(file, ("module", name), 0, tensor.numel(), 0)

    @property
    def _rank(self) -> int:
        return int(self.engine.global_rank)


def _writer(written: Written) -> Any:
    """Return a checkpoint engine for DeepSpeed that makes each file durable and keeps errors in ``written``."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class Writer(TorchCheckpointEngine):  # type: ignore[misc]
        def save(self, state_dict: Any, path: str) -> None:
            if written.failure is not None:
                return
            try:
                with open(path, "wb") as file:
                    torch.save(state_dict, file)
                    file.flush()
                    os.fsync(file.fileno())
                written.files.append(Path(path))
            except Exception as error:
                written.failure = error

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            try:
                os.makedirs(path, exist_ok=True)
            except Exception as error:
                written.failure = written.failure or error

    return Writer()
