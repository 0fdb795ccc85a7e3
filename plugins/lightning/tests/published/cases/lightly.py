"""SimCLR of lightly with its online classifier, on images of coloured noise."""

import noted
import pytorch_lightning as pl
import torch
import torchvision
from lightly.data import LightlyDataset
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms import SimCLRTransform
from lightly.utils.benchmarking import OnlineLinearClassifier
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData

PACKAGES = ["lightly", "pytorch-lightning"]


class SimCLR(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Sequential(*list(torchvision.models.resnet18().children())[:-1])
        self.projection_head = SimCLRProjectionHead(512, 64, 32)
        self.online_classifier = OnlineLinearClassifier(feature_dim=512, num_classes=4, topk=(1, 2))
        self.criterion = NTXentLoss()

    def forward(self, x):
        return self.backbone(x).flatten(start_dim=1)

    def training_step(self, batch, batch_idx):
        (x0, x1), targets, _ = batch
        features = self(torch.cat([x0, x1]))
        z0, z1 = self.projection_head(features).chunk(2)
        loss = self.criterion(z0, z1)
        self.log("train_loss_ssl", loss, prog_bar=True, sync_dist=True, batch_size=len(targets))
        classified, log = self.online_classifier.training_step((features.detach(), targets.repeat(2)), batch_idx)
        self.log_dict(log, sync_dist=True, batch_size=len(targets))
        return loss + classified

    def validation_step(self, batch, batch_idx):
        images, targets, _ = batch
        loss, log = self.online_classifier.validation_step((self(images[0]).detach(), targets), batch_idx)
        self.log_dict(log, prog_bar=True, sync_dist=True, batch_size=len(targets))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06, momentum=0.9)


noted.seed()
images = FakeData(size=32, image_size=(3, 32, 32), num_classes=4)
dataset = LightlyDataset.from_torch_dataset(images, transform=SimCLRTransform(input_size=32))
trainer = noted.trainer(pl, max_epochs=2)
trainer.fit(SimCLR(), DataLoader(dataset, 8, shuffle=True, drop_last=True), DataLoader(dataset, 8))
