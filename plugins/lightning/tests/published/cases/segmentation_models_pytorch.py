"""A Unet of segmentation_models_pytorch, in its documentation's LightningModule: Dice loss and IoU of rectangles."""

import noted
import pytorch_lightning as pl
import segmentation_models_pytorch as smp
import torch
from torch.utils.data import DataLoader, TensorDataset

PACKAGES = ["segmentation-models-pytorch", "pytorch-lightning"]


class PetModel(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = smp.create_model("unet", "resnet18", encoder_weights=None, in_channels=3, classes=1)
        self.loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
        self.validated = []

    def forward(self, image):
        return self.model(image)

    def shared_step(self, batch):
        image, mask = batch
        logits = self(image)
        predicted = (logits.sigmoid() > 0.5).long()
        stats = smp.metrics.get_stats(predicted, mask.long(), mode="binary")
        return self.loss_fn(logits, mask), stats

    def training_step(self, batch, batch_idx):
        loss, _ = self.shared_step(batch)
        self.log("train_loss", loss, prog_bar=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, stats = self.shared_step(batch)
        self.validated.append(stats)
        return loss

    def on_validation_epoch_end(self):
        stats = [torch.cat(each) for each in zip(*self.validated, strict=True)]
        self.log("valid_iou", smp.metrics.iou_score(*stats, reduction="micro"), prog_bar=True)
        self.validated.clear()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8, eta_min=1e-5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}


def rectangles(number):
    images, masks = torch.randn(number, 3, 64, 64) * 0.3, torch.zeros(number, 1, 64, 64)
    for image, mask in zip(images, masks, strict=True):
        top, left = torch.randint(0, 40, (2,)).tolist()
        mask[:, top : top + 20, left : left + 20] = 1
        image += mask
    return TensorDataset(images, masks)


noted.seed()
training, validation = rectangles(16), rectangles(8)
trainer = noted.trainer(pl, max_epochs=2)
trainer.fit(PetModel(), DataLoader(training, 4, shuffle=True), DataLoader(validation, 4))
