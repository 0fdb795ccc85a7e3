"""Combine a dict, a JSON file and keywords to the configuration that DeepSpeed's engine gets, or refuse them."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import optim

from torchhal.errors import ConfigurationError, UnsupportedCombinationError
from torchhal.precision import Precision
from torchhal.suggestions import did_you_mean, nearest

ZERO: Final = "zero_optimization"
DEFAULT_STAGE: Final = 2
OFFLOADS: Final = ("offload_optimizer", "offload_param")
"""Sections of the ZeRO section."""

KEYS: Final = frozenset(
    {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
        "optimizer", "scheduler", "fp16", "bf16", "torch_autocast", "amp", ZERO, "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state",
        "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op", "communication_data_type",
        "seq_parallel_communication_data_type", "sparse_gradients", "disable_allgather", "disable_python_gc", "aio",
        "activation_checkpointing", "checkpoint", "comms_logger", "compile", "compression_training",
        "curriculum_learning", "data_efficiency", "data_types", "dataloader_drop_last", "flops_profiler", "log_level",
        "monitor_config", "tensorboard", "wandb", "csv_monitor", "comet", "nebula", "timers", "vocabulary_size",
        "weight_quantization", "managed_gradient_accumulation",
    }
)  # fmt: skip
"""Sections of a configuration. Others are passed on, unless one of these is close: DeepSpeed ignores unknown
sections, so that a misspelt one would do nothing."""

NOT_HERE: Final[Mapping[str, str]] = {
    "amp": "use precision='bf16-mixed' or '16-mixed' of the Trainer",
    "torch_autocast": "use precision='bf16-mixed' or '16-mixed' of the Trainer",
    "autotuning": "it ends the process when it has measured; run DeepSpeed's autotuner by itself",
    "elasticity": "it chooses batch sizes, which are the data loader's here",
    "hybrid_engine": "it is made for reinforcement learning with generation in between",
    "pipeline": "use strategy='pipeline' of torchhal-parallel",
    "tensor_parallel": "its ranks would have to see the same batches; use strategy='tensor_parallel'",
    "sequence_parallel_size": "its ranks would have to see the same batches",
    "data_parallel_size": "every rank has data of its own here",
    "expert_parallel": "its ranks would have to see the same batches",
    "activation_checkpointing": "the engine doesn't read it; use DeepSpeedStrategy(activation_checkpointing=Block)",
    "curriculum_learning": "it needs DeepSpeed's own data loader",
    "data_efficiency": "it needs DeepSpeed's own data loader",
    "nebula": "checkpoints are written by torchhal's IOs",
    "managed_gradient_accumulation": "the Trainer says where an accumulation ends",
}
"""Sections that the strategy can't support, with what to do instead. One that has no effect, as it is
empty or not enabled, is left out."""

NUMBERS: Final = {
    "train_batch_size": 1,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0,
}
"""Entries that are numbers, and the least of each; all but the last one whole."""

MIXED: Final[Mapping[torch.dtype, str]] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""dtype of the arithmetic -> DeepSpeed's section: working weights in this dtype, fp32 ones in the optimizer."""


def mixed_section(precision: Precision) -> str | None:
    """Return the section of the configuration for the dtypes that ``precision`` declares, or None for one dtype."""
    return MIXED.get(precision.compute_dtype) if precision.param_dtype is torch.float32 else None


def read_config(config: Any) -> dict[str, Any]:
    """Return a copy of the dict, or what the JSON file holds, without the entries that are "auto".

    Raises:
        ConfigurationError: it is neither, or the file holds something else.
    """
    if config is None:
        return {}
    if isinstance(config, str | os.PathLike):
        path = Path(config)
        try:
            content = json.loads(path.read_text())
        except OSError as error:
            raise ConfigurationError(f"the DeepSpeed configuration {str(path)!r} can't be read: {error}") from error
        except ValueError as error:
            raise ConfigurationError(f"the DeepSpeed configuration {str(path)!r} is no JSON: {error}") from error
        if not isinstance(content, dict):
            raise ConfigurationError(f"the DeepSpeed configuration {str(path)!r} must be a JSON object")
        return _without_auto(content)
    if not isinstance(config, Mapping):
        raise ConfigurationError(f"'config' must be a dict or the path of a JSON file (got {config!r})")
    return _without_auto(copy.deepcopy(dict(config)))


def _without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without the entries that are "auto", which the Trainer fills in here."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value != "auto"
    }


def combine(
    config: Any,
    *,
    stage: int | None,
    offload_optimizer: Any,
    offload_parameters: Any,
    nvme_path: str | os.PathLike[str] | None,
    zero_options: Mapping[str, Any],
) -> dict[str, Any]:
    """Combine a dict or file with the strategy's keywords, and check what can be checked without DeepSpeed.

    Raises:
        ConfigurationError: one setting is given twice and differently, or a value is outside its domain.
    """
    combined = read_config(config)
    _check_sections(combined)
    given = combined.get(ZERO, {})
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{ZERO!r} must be a dict with a 'stage' (got {given!r})")
    zero = dict(given)
    said: dict[str, Any] = dict(zero_options)
    if stage is not None:
        said["stage"] = stage
    for name, key, value in (
        ("offload_optimizer", "offload_optimizer", offload_optimizer),
        ("offload_parameters", "offload_param", offload_parameters),
    ):
        if value is not None:
            said[key] = _offload(name, value, nvme_path)
    for key, value in said.items():
        if key in zero and zero[key] != value:
            raise ConfigurationError(
                f"{key!r} is given twice: {value!r} as a keyword (or by the alias), {zero[key]!r} in the "
                f"configuration's {ZERO!r}; give it in one place"
            )
        zero[key] = value
    if nvme_path is not None and not any(_device(zero.get(key)) == "nvme" for key in OFFLOADS):
        raise ConfigurationError(
            f"'nvme_path' is for what is offloaded to 'nvme', and nothing is (got {os.fspath(nvme_path)!r}): give "
            "offload_optimizer='nvme', offload_parameters='nvme' or both"
        )
    zero.setdefault("stage", DEFAULT_STAGE)
    combined[ZERO] = zero
    _check_zero(zero)
    for section in ("fp16", "bf16"):
        if not isinstance(combined.get(section, {}), Mapping):
            raise ConfigurationError(f"{section!r} must be a dict (got {combined[section]!r})")
    if _enabled(combined, "fp16") and _enabled(combined, "bf16"):
        raise ConfigurationError("'fp16' and 'bf16' can't both be enabled in one DeepSpeed configuration")
    return combined


def _offload(name: str, value: Any, nvme_path: str | os.PathLike[str] | None) -> dict[str, Any]:
    section = {"device": value} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else {}
    device = section.get("device")
    if device not in ("cpu", "nvme"):
        raise ConfigurationError(
            f"{name!r} must be 'cpu', 'nvme' or a dict with one of them as its 'device' (got {value!r})"
        )
    if device == "nvme" and nvme_path is not None:
        section.setdefault("nvme_path", os.fspath(nvme_path))
    return section


def _device(section: Any) -> Any:
    """Return the device that a section of the offload names, or None where it names none."""
    device = section.get("device") if isinstance(section, Mapping) else None
    return None if device == "none" else device


def _check_sections(config: dict[str, Any]) -> None:
    for key, value in list(config.items()):
        if not isinstance(key, str):
            raise ConfigurationError(f"the sections of a DeepSpeed configuration have names (got {key!r})")
        if key in NOT_HERE:
            if isinstance(value, Mapping) and not _asks(value):
                del config[key]
                continue
            raise ConfigurationError(f"{key!r} can't be in the configuration of this strategy: {NOT_HERE[key]}")
        if key not in KEYS and nearest(key, KEYS):
            raise ConfigurationError(f"{key!r} is no section of a DeepSpeed configuration{did_you_mean(key, KEYS)}")
        if key in NUMBERS:
            kinds: Any = int | float if key == "gradient_clipping" else int
            if isinstance(value, bool) or not isinstance(value, kinds) or not value >= NUMBERS[key]:
                raise ConfigurationError(f"{key!r} must be a number, at least {NUMBERS[key]} (got {value!r})")
        if key in ("optimizer", "scheduler"):
            kind = value.get("type") if isinstance(value, Mapping) else None
            if not isinstance(kind, str):
                raise ConfigurationError(
                    f"{key!r} must be a dict with the name of a class as its 'type' (got {value!r})"
                )


def _asks(section: Mapping[str, Any]) -> bool:
    """Return True if a section enables or sets anything."""
    if "enabled" in section:
        return bool(section["enabled"])
    return any(_asks(value) if isinstance(value, Mapping) else value for value in section.values())


def _check_zero(zero: Mapping[str, Any]) -> None:
    stage = zero["stage"]
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in (0, 1, 2, 3):
        raise ConfigurationError(f"'stage' must be 0, 1, 2 or 3 (got {stage!r})")
    for key, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        device = _device(zero.get(key))
        if device is None:
            continue
        if stage < lowest:
            raise ConfigurationError(
                f"{key!r} needs ZeRO stage {lowest}{' or higher' if lowest < 3 else ''} (got stage {stage}): DeepSpeed "
                f"{'ignores it' if lowest == 3 else 'has no optimizer state to divide'} below"
            )
        if device == "nvme":
            if stage < 3:
                raise ConfigurationError(f"{key!r} to 'nvme' needs ZeRO stage 3 (got stage {stage}): use 'cpu'")
            path = zero[key].get("nvme_path")
            if path is None:
                raise ConfigurationError(
                    f"{key!r} to 'nvme' needs a folder on the NVMe drive: "
                    "DeepSpeedStrategy(..., nvme_path='/local_nvme'), or 'nvme_path' in its section"
                )
            if not os.path.isdir(path):
                raise ConfigurationError(f"'nvme_path' must be a folder that exists (got {str(path)!r})")


def check_with_deepspeed(config: Mapping[str, Any]) -> None:
    """Check the options of the ZeRO section with DeepSpeed itself, and NVMe with this machine.

    Raises:
        ConfigurationError: an unknown option, with the near miss, or a value that it refuses.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    zero = config[ZERO]
    fields = DeepSpeedZeroConfig.model_fields
    known = {*fields, *(field.alias for field in fields.values() if field.alias)}
    for key in zero:
        if key not in known:
            raise ConfigurationError(f"{key!r} is no option of DeepSpeed's ZeRO{did_you_mean(key, known)}")
    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigurationError(f"DeepSpeed refuses {ZERO!r}: {reasons}") from error
    _check_kinds(config)
    if any(_device(zero.get(key)) == "nvme" for key in OFFLOADS):
        _check_nvme()


def _check_kinds(config: Mapping[str, Any]) -> None:
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    optimizer = (config.get("optimizer") or {}).get("type")
    if optimizer is not None and optimizer.lower() not in DEEPSPEED_OPTIMIZERS and not hasattr(optim, optimizer):
        known = {*DEEPSPEED_OPTIMIZERS, *(name for name in dir(optim) if name[0].isupper())}
        raise ConfigurationError(
            f"the 'optimizer' of the DeepSpeed configuration must be one of DeepSpeed's ("
            f"{', '.join(DEEPSPEED_OPTIMIZERS)}) or of torch.optim (got {optimizer!r}{did_you_mean(optimizer, known)})"
        )
    kind = (config.get("scheduler") or {}).get("type")
    if kind is not None and kind not in VALID_LR_SCHEDULES:
        raise ConfigurationError(
            f"the 'scheduler' of the DeepSpeed configuration must be one of {', '.join(VALID_LR_SCHEDULES)} (got "
            f"{kind!r}): torch's own want an optimizer that ZeRO has not wrapped; return them from configure_optimizers"
        )


def _check_nvme() -> None:
    import deepspeed

    if not deepspeed.ops.__compatible_ops__.get("async_io", False):
        raise ConfigurationError(
            "offload to 'nvme' needs DeepSpeed's operator async_io, which can't be built here: it wants the library "
            "libaio with its headers (libaio-dev, libaio-devel), ninja and a C++ compiler. Without them offload to "
            "'cpu'"
        )


def check_precision(config: Mapping[str, Any], precision: Precision) -> None:
    """Raise UnsupportedCombinationError when Trainer and configuration set different dtypes."""
    section = mixed_section(precision)
    for name, alias in (("bf16", "bf16-mixed"), ("fp16", "16-mixed")):
        if _enabled(config, name) and section != name:
            raise UnsupportedCombinationError(
                f"the DeepSpeed configuration enables {name!r}, but the Trainer's precision is {precision.alias!r}: "
                f"use precision={alias!r}"
            )
        if name in config and not _enabled(config, name) and section == name and "enabled" in config[name]:
            raise UnsupportedCombinationError(
                f"precision {precision.alias!r} needs {name!r}, which the DeepSpeed configuration disables: leave "
                "'enabled' out, or use precision='32-true'"
            )
    if section == "fp16":
        _check_fp16(precision.alias)
    zero = config[ZERO]
    if section is not None and zero["stage"] == 0:
        raise UnsupportedCombinationError(
            f"precision {precision.alias!r} with ZeRO stage 0 would keep whole fp32 weights beside the {section} ones "
            "on every rank: use stage 1, or strategy='ddp'"
        )
    accumulates = (config.get("data_types") or {}).get("grad_accum_dtype")
    if section == "bf16" and zero["stage"] == 1 and accumulates == "fp32":
        raise UnsupportedCombinationError(
            "'grad_accum_dtype' fp32 with bf16 and ZeRO stage 1 is another optimizer of DeepSpeed's, which this "
            "strategy doesn't know: use stage 2"
        )


def buffer_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that the engine converts buffers to, or None if it converts none.

    Raises:
        ConfigurationError: there is no such dtype.
    """
    from deepspeed.runtime.config import DtypeEnum

    name = (config.get("data_types") or {}).get("buffer_dtype")
    try:
        return None if name is None else cast("torch.dtype", DtypeEnum(name).value)
    except ValueError:
        raise ConfigurationError(f"'buffer_dtype' must be 'bf16', 'fp16' or 'fp32' (got {name!r})") from None


def _check_fp16(alias: str) -> None:
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_fp16_supported():
        raise UnsupportedCombinationError(
            f"precision {alias!r} can't be used here: DeepSpeed finds no float16 arithmetic on this "
            f"{get_accelerator()._name!r} device; use 'bf16-mixed'"
        )


def complete(
    config: Mapping[str, Any],
    *,
    precision: Precision,
    accumulate: int,
    clip_val: float | None,
    clip_algorithm: str,
    world_size: int,
    device_type: str,
) -> dict[str, Any]:
    """Return the configuration completed by what the Trainer decides.

    Args:
        config: of :func:`combine`.
        precision: the Trainer's.
        accumulate: batches per optimizer step.
        clip_val: greatest global norm of the gradients, or None.
        clip_algorithm: ``"norm"``, which is all that DeepSpeed supports.
        world_size: number of ranks.
        device_type: of this rank's device.

    Raises:
        ConfigurationError: the configuration contradicts it.
    """
    done = copy.deepcopy(dict(config))
    if clip_val is not None and clip_algorithm != "norm":
        raise ConfigurationError(
            f"'gradient_clip_algorithm' must be 'norm' under DeepSpeed, which clips by the global norm only "
            f"(got {clip_algorithm!r})"
        )
    _agree(done, "gradient_accumulation_steps", accumulate, f"Trainer(accumulate_grad_batches={accumulate})")
    if clip_val is not None:
        _agree(done, "gradient_clipping", float(clip_val), f"Trainer(gradient_clip_val={clip_val})")
    done.setdefault("gradient_clipping", 0.0)  # its default clips at 1.0
    # DeepSpeed requires the size of a batch, for its own count of samples alone
    micro, whole = done.get("train_micro_batch_size_per_gpu"), done.get("train_batch_size")
    if micro is None and whole is None:
        done["train_micro_batch_size_per_gpu"] = 1
    elif micro is not None and whole is not None and whole != micro * accumulate * world_size:
        raise ConfigurationError(
            f"'train_batch_size' must be {micro * accumulate * world_size}, which is train_micro_batch_size_per_gpu="
            f"{micro} times {accumulate} batch(es) per step times {world_size} rank(s) (got {whole}): leave it out"
        )
    elif micro is None and whole is not None and whole % (accumulate * world_size):
        raise ConfigurationError(
            f"'train_batch_size' must be divisible by {accumulate} batch(es) per step times {world_size} rank(s) "
            f"(got {whole})"
        )
    section = mixed_section(precision)
    if section is not None:
        done[section] = {**done.get(section, {}), "enabled": True}
    # any optimizer may be used, as with every other strategy
    done.setdefault("zero_allow_untested_optimizer", True)
    done.setdefault("zero_force_ds_cpu_optimizer", False)
    if device_type == "cpu":
        for key in ("offload_optimizer", "offload_param"):
            if done[ZERO].get(key):
                done[ZERO][key] = {"pin_memory": False, **done[ZERO][key]}  # there is no device to copy to
    return done


def _agree(config: dict[str, Any], key: str, value: Any, said: str) -> None:
    if key in config and config[key] != value:
        raise ConfigurationError(
            f"{key!r} is {config[key]!r} in the DeepSpeed configuration and {value!r} by {said}: give it to the "
            "Trainer alone"
        )
    config[key] = value


def _enabled(config: Mapping[str, Any], section: str) -> bool:
    return bool((config.get(section) or {}).get("enabled"))
