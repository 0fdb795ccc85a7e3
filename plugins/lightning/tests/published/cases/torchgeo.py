"""torchgeo's SemanticSegmentationTask and its plateau scheduler, on scenes of two kinds of ground."""

import lightning.pytorch as pl
import noted
import torch
from torch.utils.data import DataLoader
from torchgeo.trainers import SemanticSegmentationTask

PACKAGES = ["torchgeo"]


def scenes(number):
    masks = (torch.arange(64).expand(number, 64, 64) > torch.randint(8, 56, (number, 1, 1))).long()
    images = torch.randn(number, 4, 64, 64) + masks[:, None]
    return [{"image": image, "mask": mask} for image, mask in zip(images, masks, strict=True)]


class Scenes(pl.LightningDataModule):
    def setup(self, stage):
        self.training, self.validation = scenes(16), scenes(8)

    def train_dataloader(self):
        return DataLoader(self.training, 4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.validation, 4)


noted.seed()
task = SemanticSegmentationTask(
    model="unet", backbone="resnet18", weights=None, in_channels=4, num_classes=2, loss="ce", lr=1e-3, patience=1
)
trainer = noted.trainer(pl, max_epochs=2)
trainer.fit(model=task, datamodule=Scenes())
