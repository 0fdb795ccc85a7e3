"""Write a model card: ``README.md`` with the head that Hugging Face reads, and the facts of the run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from torchhal import __version__
from torchhal.checkpoint._inspection import is_tensor
from torchhal.checkpoint._locate import location_of
from torchhal.checkpoint._trainer_format import RUN_KEY
from torchhal.errors import CheckpointError
from torchhal.export._result import Export

NAME: Final = "README.md"
LIBRARY: Final = "library_name: torchhal"
"""Line of the head by which a card of this module is known."""

_TAGS: Final = {"safetensors": "safetensors", "torch_export": "torch.export", "onnx": "onnx"}
_USES: Final = {
    "safetensors": "from safetensors.torch import load_model\n\nmodel = ...  # as it was trained{model}\n"
    "load_model(model, {path})\nmodel.eval()",
    "torch_export": "import torch\n\nmodel = torch.export.load({path}).module()\noutput = model(...)",
    "onnx": "import onnxruntime\n\nsession = onnxruntime.InferenceSession({path})\n"
    "names = [each.name for each in session.get_inputs()]\noutput = session.run(None, dict(zip(names, [...])))",
}


def refuse_foreign_card(path: str, *, force: bool) -> None:
    """Raise CheckpointError for a file at ``path`` that is no card of this module, and without ``force`` for any."""
    place = location_of(path, {})
    if not place.is_taken():
        return
    head = place.ends(1000, 0)[0].decode(errors="replace").splitlines()
    if LIBRARY not in head:
        raise CheckpointError(
            f"{path!r}, the place of the model card, is a file that no export has written, and is not replaced: choose "
            "another folder, or leave the card out by model_card=False, --no-model-card"
        )
    if not force:
        raise CheckpointError(
            f"{path!r} exists already: choose another folder, replace it with --force, or leave the card out by "
            "model_card=False, --no-model-card"
        )


def model_card(done: Export, checkpoint: Mapping[str, Any], model: str | None) -> str:
    """Return the text of the card.

    Args:
        done: what was exported.
        checkpoint: as read; what it lacks, or has in another type, is left out.
        model: the name of the model's class.
    """
    name = re.split(r"[/\\]", done.path)[-1]
    run = checkpoint.get(RUN_KEY)
    run = run if isinstance(run, Mapping) else {}
    counted = model is not None  # without the module, a buffer can't be told from a parameter
    model = model or str(run.get("model", "")).rpartition(":")[2] or None
    title = model or name.partition(".")[0]
    facts = [
        ("model", model),
        ("parameters", f"{done.parameters:,}{'' if counted else ' with buffers'}"),
        ("dtype", ", ".join(done.dtypes)),
        ("weights", _WEIGHTS[done.weights]),
        ("epochs", checkpoint.get("epoch")),
        ("steps", checkpoint.get("global_step")),
        ("strategy", run.get("strategy")),
        ("processes", run.get("world_size")),
        ("accelerator", run.get("accelerator")),
        ("precision", run.get("precision")),
        ("torchhal", checkpoint.get("torchhal_version")),
        ("torch", run.get("torch")),
        ("exported by", f"torchhal {__version__}, torch {torch.__version__}"),
    ]
    lines = [
        "---", LIBRARY, "tags:", *(f"- {json.dumps(tag)}" for tag in ("pytorch", "torchhal", _TAGS[done.format])),
        "---", "", f"# {_plain(title)}", "", f"`{_plain(name)}` was exported by `torchhal export`.", "",
        "## Training", "", *_table(("", ""), facts),
    ]  # fmt: skip
    if metrics := list(_metrics(checkpoint)):
        lines += ["", "## Metrics", "", "The last value that was logged of each.", ""]
        lines += _table(("metric", "value"), metrics)
    if hyperparameters := list(_hyperparameters(checkpoint)):
        lines += ["", "## Hyperparameters", "", *_table(("name", "value"), hyperparameters)]
    as_trained = f", a {model}" if model else ""
    use = _USES[done.format].format(path=json.dumps(name), model=as_trained)
    lines += ["", "## Use", "", "```python", *use.splitlines(), "```"]
    if done.max_difference is not None:
        sizes = f" on batches of {' and '.join(map(str, done.batch_sizes))}" if done.batch_sizes else ""
        lines += ["", f"Its outputs differ from the module's by at most {done.max_difference:.3g}{sizes}."]
    lines += [line for note in done.notes for line in ("", f"Note: {_plain(note)}.")]
    return "\n".join(lines) + "\n"


_WEIGHTS: Final = {
    "state_dict": "the checkpoint's state_dict",
    "average": "the average that the run kept",
    "running": "those that training continues from",
}


def _metrics(checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    found: Any = checkpoint
    for key in ("loops", "results", "callback_metrics"):
        found = found.get(key) if isinstance(found, Mapping) else None
    for name, value in found.items() if isinstance(found, Mapping) else ():
        if is_tensor(value):
            value = value if isinstance(value, torch.Tensor) else value.read()
            value = value.item() if value.numel() == 1 else None
        if isinstance(value, int | float):
            yield str(name), f"{value:.6g}"


def _hyperparameters(checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    found = checkpoint.get("hyper_parameters")
    for name, value in found.items() if isinstance(found, Mapping) else ():
        text = value if isinstance(value, str) else repr(value)
        yield str(name), text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


_LONGEST: Final = 200
"""Characters of a hyperparameter."""


def _table(head: tuple[str, str], rows: list[tuple[str, Any]]) -> Iterator[str]:
    yield f"| {head[0]} | {head[1]} |"
    yield "|---|---|"
    for name, value in rows:
        if isinstance(value, str | int | float) and str(value):
            yield f"| {_plain(name)} | {_plain(str(value))} |"


def _plain(text: str) -> str:
    """Return ``text`` as Markdown that shows it: one line, nothing in it a mark, a link or a tag."""
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", " ".join(text.split()))
