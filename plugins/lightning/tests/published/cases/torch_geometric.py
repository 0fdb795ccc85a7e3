"""A graph network of torch_geometric on its LightningDataset, whose loaders it makes for the Trainer."""

import lightning.pytorch as pl
import noted
import torch
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.nn import GIN, global_add_pool

PACKAGES = ["torch_geometric", "lightning"]


class Graphs(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.gnn = GIN(3, 8, 2, dropout=0.1)
        self.head = torch.nn.Linear(8, 2)

    def loss(self, batch):
        out = self.head(global_add_pool(self.gnn(batch.x, batch.edge_index), batch.batch))
        return torch.nn.functional.cross_entropy(out, batch.y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=batch.num_graphs)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), batch_size=batch.num_graphs)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def rings(number):
    for _ in range(number):
        size = int(torch.randint(3, 8, (1,)))
        nodes = torch.arange(size)
        yield Data(x=torch.randn(size, 3), edge_index=torch.stack([nodes, nodes.roll(1)]), y=torch.tensor([size % 2]))


noted.seed()
data = LightningDataset(list(rings(32)), list(rings(16)), batch_size=8, num_workers=0)
trainer = noted.trainer(pl, max_epochs=3)
trainer.fit(Graphs(), data)
