"""Refuse what can't become a plugin, before a file is written. Standard library only: torchhal need not be here."""

from __future__ import annotations

import keyword
import re
import sys

PROJECT_NAME = {{ cookiecutter.project_name | tojson }}
ALIAS = {{ cookiecutter.__alias | tojson }}
KINDS = {{ cookiecutter.__kinds | tojson }}
TEXTS = {
    "vendor": {{ cookiecutter.vendor | tojson }},
    "author": {{ cookiecutter.author | tojson }},
    "email": {{ cookiecutter.email | tojson }},
    "description": {{ cookiecutter.description | tojson }},
}
VENDOR_IN_URL = {{ cookiecutter.vendor | slugify | tojson }}
ALL_KINDS = ("accelerator", "precision", "checkpoint_io", "cluster_environment", "strategy", "logger", "callback")
# Names of the core and of the plugins beside it, and words with a meaning: a component of such a name would be shadowed
# by another one, or be an error.
TAKEN = {
    "async", "auto", "backbone_finetuning", "bagua", "bf16", "collaborative", "colossalai", "colossalai_gemini",
    "colossalai_zero1", "colossalai_zero2", "comet", "core", "cpu", "csv", "cuda", "dcp", "dcp_async", "ddp",
    "ddp2", "ddp_fork", "ddp_forkserver", "ddp_fully_sharded", "ddp_notebook", "ddp_sharded", "ddp_sharded_spawn",
    "ddp_spawn", "deepspeed", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_2_offload",
    "deepspeed_stage_3", "deepspeed_stage_3_offload", "deepspeed_stage_3_offload_nvme", "device_stats", "dp",
    "early_stopping", "ema", "env", "fairscale", "fairscale_oss", "fairscale_pipe", "fairscale_sdp", "flux", "fsdp",
    "gpu", "hivemind", "horovod", "hpu", "hpu_parallel", "hpu_single", "hybrid", "ipu", "ipu_strategy", "kubeflow",
    "local", "loggers", "lr_monitor", "lsf", "mlflow", "model_checkpoint", "model_summary", "mpi", "mpich", "mps",
    "none", "on_exception_checkpoint", "openmpi", "parallel", "pipeline", "progress_bar", "ray", "rich_progress",
    "rich_summary", "sagemaker", "sim",
    "simulator", "single_device", "single_tpu", "single_xla", "slurm", "swa", "swanlab", "tensor_parallel",
    "tensorboard", "timer", "torch", "torchelastic", "torchft", "torchhal", "tpu", "tpu_spawn", "trackio", "user",
    "wandb", "weight_averaging", "xla", "xla_fsdp", "xla_spmd", "xpu", "zero1", "zero2", "zero3",
}  # fmt: skip


def problem() -> str:
    """Return the reason why no plugin can be made of the answers; empty if it can."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*(?:[ _-][A-Za-z0-9]+)*", PROJECT_NAME):
        return (
            "the name must be letters and digits, a letter first, with single blanks, dashes or underscores inside "
            f"(got {PROJECT_NAME!r})"
        )
    if len(ALIAS) > 30:
        return f"the name must have at most 30 characters (got {len(ALIAS)})"
    if ALIAS.startswith("torchhal_"):
        return f"the name goes without 'torchhal', which the package's name begins with anyway (got {PROJECT_NAME!r})"
    if ALIAS in TAKEN or keyword.iskeyword(ALIAS):
        return f"the name must not be {ALIAS!r}, which means something else already: put the vendor's in front"
    kinds = KINDS.split(",")
    for kind in kinds:
        if kind not in ALL_KINDS:
            return f"'kinds' must be of {', '.join(ALL_KINDS)}, comma-separated (got {kind!r})"
    if len(set(kinds)) < len(kinds):
        return f"'kinds' must name each kind once (got {KINDS!r})"
    for name, text in TEXTS.items():
        if re.search(r'["\\\x00-\x1f\x7f]', text):
            return f"{name!r} must be one line without quotation marks and backslashes (got {text!r})"
    for name, longest in (("vendor", 40), ("description", 100)):
        if not 0 < len(TEXTS[name].strip()) <= longest:
            return f"{name!r} must have 1 to {longest} characters (got {TEXTS[name]!r})"
    if not VENDOR_IN_URL:
        return f"'vendor' must have a letter or a digit (got {TEXTS['vendor']!r})"
    return ""


if reason := problem():
    sys.exit(f"error: {reason}")
