"""Progress in a notebook: a widget that ends at all batches, lines without ipywidgets, and what is printed beside."""

from __future__ import annotations

import json
import re
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


LOOP = """
import torch
import torchhal
from torch import nn

def train(run, model, optimizer, batches):
    for epoch in range(run.current_epoch, 2):
        for batch in run.batches(batches):
            optimizer.zero_grad()
            loss = model(batch).pow(2).mean()
            run.backward(loss)
            optimizer.step()
    run.print("trained", run.world_size, run.global_step, model.weight.sum().item())

def objects():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.ones(3, 2)] * 4

def launched(run):
    train(run, *run.setup(*objects()))
    return run.world_size

"""

SETUP = """
run = torchhal.Run(accelerator="cpu", devices={devices}, strategy={strategy!r})
given = run.setup(*objects())
"""


def test_a_run_by_cells(run):
    """Between the set-up and the end of a run there may be cells; the next run of a kernel follows."""
    again = [SETUP.format(devices=1, strategy="auto"), "train(run, *given)", "run.end()"]
    notebook = run(LOOP, *again, *again)
    first, second = [line for line in printed(notebook).splitlines() if line.startswith("trained")]
    assert first == second and first.startswith("trained 1 8 ")


def test_a_run_after_one_that_was_left(run):
    """A cell that failed or was run again leaves a run open: the next set-up ends it."""
    failed = "for batch in run.batches(given[2]):\n    1 / 0"
    cell = SETUP.format(devices=1, strategy="auto") + "train(run, *given)"
    caught = "try:\n    " + failed.replace("\n", "\n    ") + "\nexcept ZeroDivisionError:\n    pass"
    notebook = run(LOOP, SETUP.format(devices=1, strategy="auto"), caught, cell, cell)
    first, second = [line for line in printed(notebook).splitlines() if line.startswith("trained")]
    assert first == second and first.startswith("trained 1 8 ")


def test_the_same_objects_in_a_run_after_one_that_was_left(run):
    """The routes of the first run are taken off them, so that nothing is done twice."""
    cell = "again = torchhal.Run(accelerator='cpu', devices=1); train(again, *again.setup(*given))"
    ended = "try:\n    run.barrier()\nexcept Exception as error:\n    print('trained', error)"
    notebook = run(LOOP, SETUP.format(devices=1, strategy="auto"), cell, ended, cell)
    first, told, second = [line for line in printed(notebook).splitlines() if line.startswith("trained")]
    assert first.startswith("trained 1 8 ") and second.startswith("trained 1 8 ") and first != second
    assert told == "trained this Run has ended"


@pytest.mark.slow
def test_several_processes_of_a_run(run):
    """A script would go on in them, and there is none; a function is launched."""
    refused = """
try:
    torchhal.Run(accelerator="cpu", devices=2{}).setup(*objects())
except Exception as error:
    print(type(error).__name__, error)
"""
    notebook = run(
        LOOP,
        *(refused.format(strategy) for strategy in ("", ", strategy='ddp'")),
        "run = torchhal.Run(accelerator='cpu', devices=2, strategy='ddp_notebook')",
        "print('told', run.launch(launched))",
    )
    text = printed(notebook)
    assert re.search(r"LaunchError launcher 'fork' .* call run.launch\(function\)", text), text
    assert re.search(r"UnsupportedCombinationError strategy 'ddp' runs the script once per process", text), text
    assert "trained 2 8 " in text and "told 2" in text, text
