"""Convert the state of the bridge's optimizers to torch's form, so that a run of one is continued with the other."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

_COUNTS = {"FusedAdamW": "step", "FusedAdagrad": "step_t"}
"""Per class: the key under which a group, not each parameter, counts its steps. FusedSGD's state is torch's."""


def make_portable(optimizer: Optimizer, like: type[Optimizer]) -> None:
    """Let ``optimizer``, one of the bridge's, save and load what torch's optimizer ``like`` it would.

    It also sees to it that FusedAdagrad follows its groups' learning rates, and schedulers with them: by itself it
    keeps to the one that it was made with.
    """
    if type(optimizer).__name__ in _COUNTS:
        optimizer.register_state_dict_post_hook(_saved)
        optimizer.register_load_state_dict_pre_hook(_loaded)
    if any("lr_t" in group for group in optimizer.param_groups):
        optimizer.register_step_pre_hook(_follow_rates)
    optimizer.state_of = like  # type: ignore[attr-defined]  # a resumed run compares it


def _follow_rates(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        group["lr_t"].fill_(group["lr"])


def _saved(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    count = _COUNTS[type(optimizer).__name__]
    state, groups = dict(saved["state"]), []
    for group in saved["param_groups"]:
        steps = float(group.get(count, 0))
        state.update({key: {**state[key], "step": torch.tensor(steps)} for key in group["params"] if key in state})
        groups.append({name: value for name, value in group.items() if name not in (count, "lr_t")})
    return {**saved, "state": state, "param_groups": groups}


def _loaded(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    count = _COUNTS[type(optimizer).__name__]
    state, groups = dict(saved["state"]), []
    for own, group in zip(optimizer.param_groups, saved["param_groups"], strict=False):  # torch says what doesn't fit
        known = {name: state[name] for name in group["params"] if name in state}
        steps = int(max((float(each.get("step", 0)) for each in known.values()), default=0))
        # torch takes saved groups as they are: what this class has beyond torch's would be gone
        options = {name: group.get(name, value) for name, value in own.items() if name != count}
        if count == "step":
            state.update({name: {**each, "step": 0} for name, each in known.items()})
            options |= {"step": steps} if steps else {}
        else:
            state.update({name: {"sum": each["sum"]} for name, each in known.items() if "sum" in each})
            options["step_t"] = torch.full_like(own["step_t"], steps)
        if "initial_lr" in group:  # a scheduler's
            options["initial_lr"] = group["initial_lr"]
        groups.append({**options, "params": group["params"]})
    return {**saved, "state": state, "param_groups": [*groups, *saved["param_groups"][len(groups) :]]}
