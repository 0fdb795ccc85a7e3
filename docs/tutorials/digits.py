"""Train a small conv net on 1,797 real handwritten digits, data parallel over two processes.

    python docs/tutorials/digits.py [--accelerator cpu] [--strategy ddp] [--devices 2] [--epochs 12]

The digits ship inside scikit-learn: nothing is downloaded.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import torchhal
from torchhal import ModelCheckpoint, Trainer, seed_everything


class DigitsModel(torchhal.Module):
    def __init__(self, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_accuracy", self.accuracy(batch), prog_bar=True)

    def test_step(self, batch, batch_idx):
        self.log("test_accuracy", self.accuracy(batch))

    def accuracy(self, batch) -> torch.Tensor:
        images, labels = batch
        return (self(images).argmax(-1) == labels).float().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


def digits() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """1,197 digits to train on, 300 to validate, 300 to test; images of shape (1, 8, 8) from 0 to 1."""
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    everything = TensorDataset(images, torch.tensor(raw.target))
    return tuple(random_split(everything, [1197, 300, 300], torch.Generator().manual_seed(0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--devices", default="2")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--root", default="torchhal_runs", help="where checkpoints and logs go")
    arguments = parser.parse_args()

    seed_everything(1)
    train, validation, test = digits()
    trainer = Trainer(
        accelerator=arguments.accelerator,
        strategy=arguments.strategy,
        devices=arguments.devices,
        max_epochs=arguments.epochs,
        callbacks=ModelCheckpoint(monitor="val_accuracy", mode="max"),
        default_root_dir=arguments.root,
        log_every_n_steps=10,
    )
    trainer.fit(DigitsModel(), DataLoader(train, 32, shuffle=True), DataLoader(validation, 100))

    model = DigitsModel.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    accuracy = trainer.test(model, DataLoader(test, 100))[0]["test_accuracy"]
    trainer.print(f"test accuracy of {trainer.checkpoint_callback.best_model_path}: {accuracy:.3f}")
    if accuracy < 0.95:
        raise SystemExit(f"expected a test accuracy above 0.95 (got {accuracy:.3f})")


if __name__ == "__main__":
    main()
