"""One of two nodes with two ranks each, as its environment says: averages within a node first, then between nodes."""

import torch
from modelling import BATCH, QUIET, dataset, difference, made, plain, to_all
from torch.utils.data import DataLoader

from torchhal import Trainer
from torchhal_bagua import BaguaStrategy


def trained(**options):
    model = made()
    loader = DataLoader(dataset(), batch_size=BATCH // 4)
    trainer = Trainer(
        accelerator="cpu", devices=2, num_nodes=2, strategy=BaguaStrategy(**options), max_epochs=2, **QUIET
    )
    trainer.fit(model, loader)
    return trainer, model.state_dict()


if __name__ == "__main__":
    trainer, state = trained(algorithm="decentralized", peer_selection_mode="shift_one")
    assert difference(state, plain(to_all, 4)) < 1e-6  # each node has one other to meet
    _, mean = trained()
    _, state = trained(algorithm="bytegrad")
    assert 0 < difference(state, mean) < 0.05, difference(state, mean)
    _, state = trained(hierarchical=True)
    assert difference(state, mean) < 1e-6
    assert torch.is_tensor(state["weight"]) and trainer.world_size == 4
    print("nodes", flush=True)
