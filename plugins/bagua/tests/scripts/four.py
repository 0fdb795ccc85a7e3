"""Four ranks: the algorithms in which each has weights of its own, against plain loops of four replicas."""

import torch
from modelling import BATCH, QUIET, dataset, difference, every, made, plain, shift_one, to_all
from torch import nn
from torch.utils.data import DataLoader

from torchhal import Callback, Trainer
from torchhal_bagua import BaguaStrategy


class Apart(Callback):
    """How far the replicas are from their mean while they train, and what each rank believes of its neighbours."""

    def on_train_end(self, trainer, module):
        strategy = trainer.strategy
        flat = nn.utils.parameters_to_vector(module.parameters()).detach()
        flats = strategy.all_gather(flat)
        self.apart = (flats - flats.mean(0)).abs().max().item()
        operation = strategy.model.bagua_buckets[0].operations[0]
        if hasattr(operation, "known"):
            everybody = strategy.all_gather(operation.known)
            rank, size = strategy.global_rank, strategy.world_size
            assert torch.equal(operation.left, everybody[rank - 1])
            assert torch.equal(operation.right, everybody[(rank + 1) % size])


def trained(**options):
    model, seen = made(), Apart()
    loader = DataLoader(dataset(), batch_size=BATCH // 4)
    strategy = BaguaStrategy(**options)
    trainer = Trainer(accelerator="cpu", devices=4, strategy=strategy, max_epochs=2, callbacks=seen, **QUIET)
    trainer.fit(model, loader)
    return model.state_dict(), seen.apart


def low_precision(ranges):
    """A ring whose ranks know their neighbours' weights, without quantization; the range of what they send is noted."""
    start = nn.utils.parameters_to_vector(made().parameters()).detach()
    known = start.expand(4, -1)

    def mix(step, flats):
        nonlocal known
        changes = flats + known.roll(1, 0) / 3 + known.roll(-1, 0) / 3 - known * 5 / 3
        ranges.append((changes.amax() - changes.amin()).item())
        known = known + changes
        return known

    return mix


def main():
    for options, mix in (
        ({}, to_all),  # hierarchical: the mean of a node
        ({"hierarchical": False}, to_all),
        ({"hierarchical": False, "peer_selection_mode": "shift_one"}, shift_one),
        ({"hierarchical": False, "communication_interval": 3}, every(3, to_all)),
    ):
        state, apart = trained(algorithm="decentralized", **options)
        off = difference(state, plain(mix, 4))
        assert off < 1e-6, (options, off)
        assert apart > 1e-4, "each steps with its own gradients"

    state, apart = trained(algorithm="low_precision_decentralized", hierarchical=False)
    assert apart > 1e-4
    ranges = []
    off = difference(state, plain(low_precision(ranges), 4, after=True))
    # in each round what a rank sends of its change is at most a step off
    bound = sum(ranges) / 255
    assert 0 < off < bound, (off, bound)
    print("low_precision_decentralized", flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main()
