"""The stub has poptorch's names and signatures, and the plugin uses no others."""

from pathlib import Path

import pytest
from vendor_facts import arguments, check, table, uses

HERE = Path(__file__).parent
SOURCES = sorted((HERE.parent / "src" / "torchhal_ipu").glob("*.py"))
KNOWN = table(HERE.parent / "facts")
OPTIONS = {
    "options": ("poptorch", "Options"),
    "given": ("poptorch", "Options"),
    "Training": ("poptorch.options", "_TrainingOptions"),
    "Distributed": ("poptorch.options", "_DistributedOptions"),
}
OBJECTS = {  # in which file what stands for an object of poptorch's
    "_config.py": OPTIONS,
    "_dataloader.py": {"options": ("poptorch", "Options")},
    "_optimizer.py": {"made": ("poptorch.optim", "SGD")},
    "_compiled_step.py": {"executor": ("poptorch", "PoplarExecutor")},
    "strategy.py": {"executor": ("poptorch", "PoplarExecutor")},
}
TORCHS = {"param_groups"}


def of(path):
    return uses(path.read_text(), "poptorch", KNOWN, objects=OBJECTS.get(path.name), others=TORCHS)


def test_the_stub_has_the_vendors_signatures(python):
    compared = set(python("offered.py").split())
    assert len(compared) > 60
    assert {
        "poptorch.trainingModel", "poptorch.inferenceModel", "poptorch.DataLoader", "poptorch.identity_loss",
        "poptorch.PoplarExecutor.setOptimizer", "poptorch.PoplarExecutor.detachFromDevice", "poptorch.optim.SGD",
        "poptorch.optim.AdamW", "poptorch.Options.replicationFactor", "poptorch.ipuHardwareIsAvailable",
    } <= compared  # fmt: skip


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_plugin_uses_nothing_else(path):
    check(of(path), KNOWN)


def test_what_the_plugin_uses_is_found():
    found = {(module, name) for path in SOURCES for module, name, _ in of(path)}
    for use in (
        ("poptorch", "trainingModel"), ("poptorch", "inferenceModel"), ("poptorch", "identity_loss"),
        ("poptorch", "DataLoader"), ("poptorch", "ipuHardwareIsAvailable"), ("poptorch.optim", "Optimizer"),
        ("poptorch", "Options.replicationFactor"), ("poptorch", "Options.input_group_size"),
        ("poptorch.options", "_TrainingOptions.gradientAccumulation"), ("poptorch", "OutputMode.Sum"),
        ("poptorch.options", "_DistributedOptions.numProcesses"), ("poptorch.optim", "SGD.max_grad_norm"),
        ("poptorch", "PoplarExecutor.setOptimizer"), ("poptorch", "PoplarExecutor.detachFromDevice"),
        ("poptorch", "PoplarExecutor.copyWeightsToHostIfNeeded"), ("poptorch", "PoplarExecutor.rng_state"),
    ):  # fmt: skip
        assert use in found, use


def test_optimizers_are_made_by_the_vendors_names():
    from torchhal_ipu._optimizer import _ARGUMENTS

    for kind, names in _ARGUMENTS.values():
        taken, _ = arguments(KNOWN["poptorch.optim"][kind])
        assert {"lr", "loss_scaling", *names} <= {argument.arg for argument in taken.args}


@pytest.mark.parametrize(
    "wrong",
    [
        "import poptorch.poptorch_core",
        "from poptorch import autocast",
        "import poptorch\npoptorch.trainModel(m)",
        "import poptorch\npoptorch.trainingModel(m, opts=o)",
        "import poptorch\npoptorch.optim.Adagrad(p)",
        "import poptorch\npoptorch.OutputMode.Every",
        "def f(self):\n    self.running.executor.detach()",
        "def f(self):\n    self.executor.setOptimizer(o, 1)",
        "options.Training.accumulate(3)",
        "options.deviceIterations(3, 4)",
        "options.device_iterations(3)",
    ],
)
def test_another_use_is_found(wrong):
    objects = {**OPTIONS, "executor": ("poptorch", "PoplarExecutor")}
    with pytest.raises(AssertionError):
        check(uses(wrong, "poptorch", KNOWN, objects=objects), KNOWN)
