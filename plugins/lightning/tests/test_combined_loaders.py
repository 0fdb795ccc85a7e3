"""Several loaders at once: training, evaluation, ranks and a resume are those of Lightning's Trainer."""

from importlib import import_module

import pytest
import torch
from lightning_models import QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchhal
from torchhal.errors import ConfigurationError
from torchhal_lightning import Trainer
from torchhal_lightning._combined_loaders import combined


def loader(samples, batch, offset=0, **options):
    return DataLoader(TensorDataset(torch.arange(offset, offset + samples).float().unsqueeze(1)), batch, **options)


def noting(pl):
    """Return a model that notes which samples it is given."""

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.seen = []

        def note(self, batch):
            shown = torch.utils._pytree.tree_map(lambda each: None if each is None else each.tolist(), batch)
            self.seen.append((self.current_epoch, shown))

        def training_step(self, batch, batch_idx):
            self.note(batch)
            leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if leaf is not None]
            return self.layer(torch.cat(leaves)).square().mean()

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.seen.append(("val", dataloader_idx, batch_idx, len(torch.utils._pytree.tree_leaves(batch))))

        test_step = validation_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    torch.manual_seed(0)
    return Net()


def structures(pl):
    combined = pl.utilities.CombinedLoader
    return {
        "dict": lambda: {"a": loader(8, 2), "b": loader(5, 2, 100)},
        "list": lambda: [loader(8, 2, shuffle=True), loader(6, 3, 100)],
        "one in a list": lambda: [loader(8, 2)],
        "nested": lambda: {"a": [loader(4, 2), loader(8, 2)], "b": {"c": loader(6, 2, 100)}},
        "min_size": lambda: combined({"a": loader(8, 2), "b": loader(5, 2, 100)}, "min_size"),
        "max_size": lambda: combined({"a": loader(8, 2), "b": loader(5, 2, 100)}, "max_size"),
    }


@pytest.mark.parametrize("name", ["dict", "list", "one in a list", "nested", "min_size", "max_size"])
@pytest.mark.parametrize("by", ["argument", "hook"])
def test_training_on_several(pl, name, by):
    found = []
    for trainer_of in (pl.Trainer, torchhal.Trainer, Trainer):
        module, make = noting(pl), structures(pl)[name]
        if by == "hook":
            type(module).train_dataloader = lambda self, make=make: make()
        torch.manual_seed(1)
        trainer = trainer_of(**{**QUIET, "max_epochs": 2})
        trainer.fit(module, *([] if by == "hook" else [make()]))
        found.append((module.seen, module.layer.weight.item(), trainer.num_training_batches, trainer.global_step))
    assert found[0] == found[1] == found[2]


def test_a_list_of_batches_is_one_loader(pl):
    """Of tensors, and of graphs, which can be iterated too, and move to a device."""

    class Graph:
        def __iter__(self):
            return iter(())

        def to(self, device):
            return self

    module, tensors = noting(pl), [torch.zeros(2, 1), torch.ones(2, 1)]
    torchhal.Trainer(**{**QUIET, "max_epochs": 1}).fit(module, tensors)
    assert len(module.seen) == 2
    graphs = [Graph(), Graph()]
    assert combined("train", graphs) is graphs


def test_the_trainer_shows_the_loaders(pl):
    loaders = {"a": loader(8, 2), "b": loader(6, 2)}
    trainer = Trainer(**QUIET)
    trainer.fit(noting(pl), loaders)
    assert trainer.train_dataloader["a"].dataset is loaders["a"].dataset


@pytest.mark.parametrize("mode", ["sequential", "min_size", "max_size", "max_size_cycle", "dict"])
def test_an_evaluation_of_several(pl, mode):
    found = []
    for trainer_of in (pl.Trainer, torchhal.Trainer):
        loaders = {"a": loader(8, 2), "b": loader(5, 2, 100)}
        module = noting(pl)
        options = {**QUIET, "enable_progress_bar": False}
        given = loaders if mode == "dict" else pl.utilities.CombinedLoader(loaders, mode)
        trainer_of(**options).test(module, given, verbose=False)
        found.append(module.seen)
    assert found[0] == found[1] and len(found[1]) > 1


def test_a_mode_that_is_not_for_training(pl):
    loaders = pl.utilities.CombinedLoader({"a": loader(8, 2)}, "sequential")
    with pytest.raises(ConfigurationError, match=r"mode 'sequential': a fit takes max_size_cycle, max_size, min_size"):
        torchhal.Trainer(**QUIET).fit(noting(pl), loaders)


def train(tree, shuffle):
    """Train on two ranks; return the samples of this one, by loader."""
    module = noting(import_module(tree))
    loaders = {"a": loader(8, 2, shuffle=shuffle), "b": loader(6, 1, 100, shuffle=shuffle)}
    torchhal.Trainer(**{**QUIET, "devices": 2}, strategy="ddp").fit(module, loaders)
    return [[(epoch, value) for epoch, batch in module.seen for (value,) in batch[name][0]] for name in "ab"]


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_loader_is_shared_out(pl, world2, shuffle):
    """Each sample of the longer one once in an epoch, in another order in the next; the shorter one begins again."""
    mine, theirs = world2.run(train, pl.__name__, shuffle)
    orders = []
    for epoch in range(2):
        short, long = ([[v for e, v in rank[name] if e == epoch] for rank in (mine, theirs)] for name in range(2))
        assert sorted(long[0] + long[1]) == list(range(100, 106))
        assert set(short[0]) | set(short[1]) == set(range(8)) and not set(short[0]) & set(short[1])
        orders.append(long[0])
    assert (orders[0] != orders[1]) is shuffle  # each epoch is announced to the samplers


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resume_goes_on_where_it_was(pl, tmp_path, workers):
    def loaders():
        generator = torch.Generator().manual_seed(3)
        options = {"shuffle": True, "num_workers": workers, "persistent_workers": workers > 0}
        return {"a": loader(8, 2, generator=generator, **options), "b": loader(6, 2, 100, **options)}

    whole = noting(pl)
    torch.manual_seed(1)
    saver = torchhal.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    options = {**QUIET, "enable_checkpointing": True, "max_epochs": 2}
    torchhal.Trainer(**options, callbacks=[saver]).fit(whole, loaders())
    rest = noting(pl)
    torch.manual_seed(9)
    torchhal.Trainer(**{**options, "enable_checkpointing": False}).fit(
        rest, loaders(), ckpt_path=tmp_path / "step=3.ckpt"
    )
    assert rest.seen == whole.seen[3:]
    assert rest.layer.weight.item() == whole.layer.weight.item()
