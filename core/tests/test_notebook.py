"""Progress in a notebook: a widget that ends at all batches, lines without ipywidgets, and what is printed beside."""

from __future__ import annotations

import json
import sys

import pytest
from tiers import slow

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
for package in ("ipykernel", "ipywidgets"):
    pytest.importorskip(package)

MODEL = """
import sys
import torch
from torch import nn
from torchhal import Module, Trainer

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        self.log("loss", 0.25, prog_bar=True)
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.print("above, or beside")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""

FIT = """
batches = [torch.ones(3, 2)] * 4
trainer = Trainer(
    accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False, num_sanity_val_steps=0,
    callbacks={callbacks!r},
)
trainer.fit(Net(), batches, batches)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run cells in a kernel of this interpreter; return the notebook."""
    folder = tmp_path / "kernels" / "this"
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "this", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run_cells(*cells):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="this", store_widget_state=True)
        client.execute(cwd=str(tmp_path))
        return notebook

    return run_cells


def widgets(notebook, model):
    state = notebook.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state", {})
    return [each["state"] for each in state.values() if each["model_name"] == model]


def printed(notebook):
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.parametrize("callbacks", [[], slow(["rich_progress", "rich_summary"])], ids=["default", "rich"])
def test_the_widget_ends_at_all_batches(run, callbacks):
    notebook = run(MODEL, FIT.format(callbacks=callbacks))
    training, *evaluations = widgets(notebook, "FloatProgressModel")
    assert (training["value"], training["max"], training["bar_style"]) == (4.0, 4.0, "success")
    assert all(evaluation["value"] == 4.0 for evaluation in evaluations)
    texts = [state["value"].replace("\u2007", " ") for state in widgets(notebook, "HTMLModel")]
    assert any("Epoch 1" in text for text in texts) and any("loss=0.25" in text for text in texts)
    text = printed(notebook)
    assert text.count("above, or beside") == 2 and "trainable parameters" in text and "\x1b[1A" not in text


def test_lines_without_ipywidgets(run):
    notebook = run("import sys; sys.modules['ipywidgets'] = None", MODEL, FIT.format(callbacks=[]))
    assert widgets(notebook, "FloatProgressModel") == []
    assert [line.partition(",")[0] for line in printed(notebook).splitlines() if line.startswith("Epoch")] == [
        "Epoch 0: 100% 4/4", "Epoch 1: 100% 4/4",
    ]  # fmt: skip
