"""Save and load an engine's state as any strategy does: weights and optimizer state by the user's names."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from torchhal.errors import CheckpointMismatchError
from torchhal_deepspeed._engine_files import EngineFiles
from torchhal_deepspeed._partition_map import PartitionMap
from torchhal_deepspeed._partitioned_tensors import EngineTensorRef

EXTRA: Final = "deepspeed"
"""Key of an optimizer's state under which the engine's own counters, loss scale and scheduler are."""

_COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_SCALE: Final = (
    "cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "has_moe_layers",
)  # fmt: skip


class Loaded(NamedTuple):
    """The result of ``nn.Module.load_state_dict``."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class EngineState:
    """The state of one engine, for reading and writing.

    What it gives is what ``ddp`` would: fp32 weights under the user's names, and the optimizer's state as
    ``Optimizer.state_dict`` has it. Every method is called on every rank.

    Args:
        ledger: of the engine.
        module: the user's.
        keep: whether this rank keeps what it helps to gather. Others get the weights that they have, and in place of
            what is divided tensors without values.
    """

    def __init__(self, ledger: PartitionMap, module: nn.Module, *, keep: bool) -> None:
        self.ledger = ledger
        self.module = module
        self.keep = keep
        self.files = EngineFiles(ledger)

    # -- weights ---------------------------------------------------------------------------------------------

    def weights(
        self, *, stand_ins: bool, broadcast: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    ) -> dict[str, Any]:
        """Return the module's state_dict.

        Args:
            stand_ins: give an ``EngineTensorRef`` for each tensor, for an IO that lets the
                engine write it.
            broadcast: gives every rank the tensors of rank 0, as copies.
        """
        ledger = self.ledger
        state: dict[str, Any] = dict(self.module.state_dict())
        buffers = {name: tensor for name, tensor in state.items() if name in ledger.buffers}
        if not stand_ins:
            state.update(broadcast(buffers))
        gathered: dict[str, torch.Tensor] = {}  # of tied ones, once
        for name in state:
            parameter = ledger.parameters.get(name)
            if parameter is None:
                if stand_ins and name in buffers:
                    tensor = buffers[name]
                    state[name] = EngineTensorRef(name, None, tensor.shape, tensor.dtype, self.files)
                continue
            first = ledger.name_of[parameter]
            if stand_ins:
                state[name] = EngineTensorRef(first, None, ledger.shape(parameter), ledger.dtype(parameter), self.files)
                continue
            if first not in gathered:
                whole = self._kept(ledger.whole(parameter))
                gathered[first] = parameter.detach() if whole.is_meta and ledger.stage < 3 else whole
            state[name] = gathered[first]
        return state

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """Return every parameter, whole, on the CPU of every rank."""
        ledger = self.ledger
        return {
            name: ledger.whole(parameter).detach().to("cpu", copy=True) for parameter, name in ledger.name_of.items()
        }

    def load_weights(self, state: Mapping[str, Any], *, strict: bool) -> Loaded:
        """Write what fits.

        Raises:
            CheckpointMismatchError: other shapes or, if ``strict``, other names.
        """
        ledger, own = self.ledger, self.module.state_dict()
        missing, unexpected = [n for n in own if n not in state], [n for n in state if n not in own]
        wrong = [
            f"{name!r} has the shape {tuple(value.shape)} in the checkpoint and {tuple(self._shape(name, own))} here"
            for name, value in state.items()
            if name in own and hasattr(value, "shape") and tuple(value.shape) != tuple(self._shape(name, own))
        ]
        if strict:
            for what, names in (("lacks", missing), ("has, and the model hasn't,", unexpected)):
                if names:
                    shown = ", ".join(map(repr, names[:4])) + (" and others" if len(names) > 4 else "")
                    wrong.insert(0, f"the checkpoint {what} {shown}")
        if wrong:
            raise CheckpointMismatchError(
                f"the weights don't belong to {type(self.module).__name__}: {'; '.join(wrong[:4])}"
            )
        written: set[str] = set()
        with torch.no_grad():
            for name, value in state.items():
                if name not in own:
                    continue
                parameter = ledger.parameters.get(name)
                if parameter is None:
                    self._load_other(name, _read(value))
                elif ledger.name_of[parameter] not in written:
                    written.add(ledger.name_of[parameter])
                    ledger.write(parameter, _read(value))
            ledger.refresh()
        return Loaded(missing, unexpected)

    def _shape(self, name: str, own: Mapping[str, Any]) -> torch.Size:
        parameter = self.ledger.parameters.get(name)
        if parameter is not None:
            return self.ledger.shape(parameter)
        return getattr(own[name], "shape", torch.Size())

    def _load_other(self, name: str, value: Any) -> None:
        if name in self.ledger.buffers:
            self.ledger.buffers[name].copy_(value)
        elif name.rpartition(".")[2] == "_extra_state":
            self.module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)

    # -- the optimizer ---------------------------------------------------------------------------------------

    def optimizer(self, *, stand_ins: bool) -> dict[str, Any]:
        """Return the ``state_dict()`` of the user's optimizer, with the engine's own state under :data:`EXTRA`."""
        ledger = self.ledger
        state: dict[int, dict[str, Any]] = {}
        for index, parameter in self._numbered():
            divided, common = ledger.state_keys(parameter)
            # a copy for each: one tensor that all share would be counted up once for every parameter elsewhere
            entry = {
                key: value.cpu().clone() if isinstance(value, torch.Tensor) else value for key, value in common.items()
            }
            for key in divided:
                if stand_ins:
                    dtype = ledger.dtype(parameter, key)
                    name = ledger.name_of[parameter]
                    entry[key] = EngineTensorRef(name, key, ledger.shape(parameter), dtype, self.files)
                else:
                    entry[key] = self._kept(ledger.whole(parameter, key))
            if entry:
                state[index] = entry
        groups, first = [], 0
        settings = iter(ledger.base.param_groups)
        for members in ledger.groups:
            group = next(settings) if members else {}  # the engine drops empty groups
            own = {key: value for key, value in group.items() if key != "params"}
            groups.append({**own, "params": list(range(first, first + len(members)))})
            first += len(members)
        return {"state": state, "param_groups": groups, EXTRA: self.extra()}

    def users_optimizer(self) -> Optimizer:
        """Return the optimizer that steps as the user made it: parameters of whole shape, without values, for checks.

        The engine's own has flat tensors in their place, and no empty groups.
        """
        ledger = self.ledger
        shown = copy.copy(ledger.base)
        settings = iter(ledger.base.param_groups)
        shown.param_groups = [
            {**(next(settings) if members else {}), "params": [self._outline(parameter) for parameter in members]}
            for members in ledger.groups
        ]
        shown.state = defaultdict(dict)
        return shown

    def _outline(self, parameter: nn.Parameter) -> nn.Parameter:
        shape, dtype = self.ledger.shape(parameter), self.ledger.dtype(parameter)
        return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=parameter.requires_grad)

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`optimizer`, or from the checked state of the same optimizer under another strategy."""
        ledger, saved = self.ledger, self._by_parameter(state)
        ledger.make_state(saved)
        with torch.no_grad():
            for parameter, entry in saved.items():
                if not (ledger.stage == 0 or ledger.is_divided(parameter)):
                    continue
                for key, value in entry.items():
                    if _is_divided(value):
                        ledger.write(parameter, _read(value), key)
        present = [group for group in state["param_groups"] if group["params"]]  # the engine drops empty groups
        for group, other in zip(ledger.base.param_groups, present, strict=False):
            group.update({key: value for key, value in other.items() if key != "params"})
        assert sum(map(bool, ledger.groups)) == len(present)
        self._load_extra(state.get(EXTRA) or {})

    def give_back(self) -> Callable[[], None]:
        """Gather the optimizer's state; return a function that gives it to the user's optimizer after the run."""
        ledger, whole = self.ledger, self.optimizer(stand_ins=False)
        base = ledger.base

        def restore() -> None:
            present = [group for group in ledger.groups if group]  # the engine drops empty groups
            for group, members in zip(base.param_groups, present, strict=True):
                group["params"] = members
            base.state.clear()
            if self.keep:
                settings = [group for group in whole["param_groups"] if group["params"]]
                base.load_state_dict({"state": whole["state"], "param_groups": settings})

        return restore

    def _by_parameter(self, state: Mapping[str, Any]) -> dict[nn.Parameter, Any]:
        numbered = dict(self._numbered())
        return {numbered[index]: entry for index, entry in state["state"].items() if index in numbered}

    def _numbered(self) -> list[tuple[int, nn.Parameter]]:
        return list(enumerate(parameter for group in self.ledger.groups for parameter in group))

    def extra(self) -> dict[str, Any]:
        """Return the engine's counters, its loss scale, and the state of the scheduler that its configuration names."""
        engine = self.ledger.engine
        extra: dict[str, Any] = {name: getattr(engine, name) for name in _COUNTERS}
        scaler = getattr(engine.optimizer, "loss_scaler", None)
        if scaler is not None:
            extra["loss_scaler"] = {name: vars(scaler)[name] for name in _SCALE if name in vars(scaler)}
        if engine.lr_scheduler is not None:
            extra["lr_scheduler"] = engine.lr_scheduler.state_dict()
        return extra

    def _load_extra(self, extra: Mapping[str, Any]) -> None:
        engine = self.ledger.engine
        for name in _COUNTERS:
            if name in extra:
                setattr(engine, name, extra[name])
        scaler = getattr(engine.optimizer, "loss_scaler", None)
        if scaler is not None:
            vars(scaler).update(extra.get("loss_scaler") or {})
        if engine.lr_scheduler is not None and "lr_scheduler" in extra:
            engine.lr_scheduler.load_state_dict(extra["lr_scheduler"])

    # ----------------------------------------------------------------------------------------------------------

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.keep:
            return tensor.detach().to("cpu", copy=True)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _is_divided(value: Any) -> bool:
    """Return True for a value of an optimizer's state that has the parameter's elements; a step count has not."""
    return hasattr(value, "shape") and len(value.shape) > 0


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _read(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value.read() if hasattr(value, "read") else value
    return tensor
