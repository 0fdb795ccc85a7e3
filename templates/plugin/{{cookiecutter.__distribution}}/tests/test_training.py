"""Train a model with the components, by their aliases."""

from pathlib import Path

{% set kinds = cookiecutter.__kinds.split(',') -%}
{% if 'accelerator' in kinds -%}
import pytest
{% endif -%}
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchhal import Trainer, seed_everything
{%- if 'accelerator' in kinds %}
from torchhal.errors import AcceleratorUnavailableError
{%- endif %}

ALIAS = "{{ cookiecutter.__alias }}"


class Line(nn.Linear):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

{%- if 'accelerator' in kinds %}


@pytest.fixture(autouse=True)
def hardware() -> None:
    """Hardware for the tests; where it is missing, as in most CI, they are skipped with the reason."""
    try:
        Trainer(accelerator=ALIAS)
    except AcceleratorUnavailableError as error:
        pytest.skip(str(error))
{%- endif %}


def test_training_fits_line(tmp_path: Path) -> None:
    seed_everything(0)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    model = Line(1, 1)
    trainer = Trainer(
        accelerator={{ 'ALIAS' if 'accelerator' in kinds else '"cpu"' }},
        devices=1,
{%- if 'strategy' in kinds %}
        strategy=ALIAS,
{%- endif %}
{%- if 'precision' in kinds %}
        precision=f"{ALIAS}_bf16",
{%- endif %}
{%- if 'checkpoint_io' in kinds %}
        plugins=[f"{ALIAS}_file"],
{%- endif %}
{%- if 'logger' in kinds %}
        logger=ALIAS,
{%- endif %}
{%- if 'callback' in kinds %}
        callbacks=ALIAS,
{%- endif %}
        max_epochs=20,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(x, 3 * x + 1), batch_size=8))
    assert abs(model.weight.item() - 3) < 0.2 and abs(model.bias.item() - 1) < 0.1
{%- if 'checkpoint_io' in kinds %}
    path = trainer.checkpoint_callback.best_model_path
    assert path
    resumed = Trainer(
        accelerator="cpu",
        plugins=[f"{ALIAS}_file"],
        max_epochs=21,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
    )
    resumed.fit(Line(1, 1), DataLoader(TensorDataset(x, 3 * x + 1), batch_size=8), ckpt_path=path)
    assert resumed.global_step == trainer.global_step + 8
{%- endif %}
