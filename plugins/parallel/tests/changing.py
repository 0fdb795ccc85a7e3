"""In a rank of a test's world: models whose forwards read what changes while they are trained, beside plain loops."""

import staged
import torch
from together import Seen
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

EPOCHS = 3


class Warming(staged.Stack):
    """Its forward reads a number, an entry of a dict, a flag and a buffer, which are others in each epoch."""

    def __init__(self):
        super().__init__()
        self.beta, self.options = 0.0, {"skip": False}
        self.register_buffer("shift", torch.zeros(4))

    def begin(self, epoch):
        self.beta = 0.5 * epoch
        self.options["skip"] = epoch == 2
        self.shift = torch.full((4,), 0.1 * epoch)

    def on_train_epoch_start(self):
        self.begin(self.current_epoch)

    def forward(self, x):
        x = x + self.shift
        for index, layer in enumerate(self.layers):
            if index != 1 or not self.options["skip"]:
                x = torch.tanh(layer(x))
        if self.training:
            x = x * (1 + self.beta)
        return self.head(x)


def warmed(model="Warming"):
    """(weights and buffers on rank 0, val_loss after the last epoch) of a fit in stages."""
    seen = Seen()
    run = staged.trainer("pipeline", max_epochs=EPOCHS, callbacks=seen)
    run.fit(
        globals()[model](), DataLoader(staged.samples(), staged.BATCH), DataLoader(staged.samples(16), staged.BATCH)
    )
    return seen.state, float(run.callback_metrics["val_loss"])


def warmed_in_a_plain_loop(model="Warming"):
    module = globals()[model]()
    optimizer = module.configure_optimizers()
    for epoch in range(EPOCHS):
        module.begin(epoch)
        for x, y in DataLoader(staged.samples(), staged.BATCH):
            optimizer.zero_grad()
            F.mse_loss(module(x), y).backward()
            optimizer.step()
    module.eval()
    with torch.no_grad():
        x, y = staged.samples(16).tensors
        return module.state_dict(), F.mse_loss(module(x), y).item()


class Replaced(staged.Stack):
    """Lets two layers change places, and puts modules without parameters in the place of another and beside it."""

    def __init__(self):
        super().__init__()
        self.ends = nn.ModuleList([nn.Identity()])

    def begin(self, epoch):
        if epoch == 1:
            self.layers[0], self.layers[1] = self.layers[1], self.layers[0]
            self.layers[3] = nn.Hardtanh(-0.5, 0.5)
            self.ends.append(nn.Softsign())
        if epoch == 2:
            self.layers[3].max_val = 0.3

    def on_train_epoch_start(self):
        self.begin(self.current_epoch)

    def forward(self, x):
        x = super().forward(x)
        for end in self.ends:
            x = end(x)
        return x


class WithNewWeights(staged.Stack):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.head = nn.Linear(4, 1)


class CutElsewhere(staged.Stack):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.layers[2] = nn.Identity()


class WarmsInTheStep(Warming):
    """The step changes what the next forward reads, where a step runs as a whole: on one rank."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.beta += 0.1
        return loss


class ReadsTheStep(staged.Stack):
    def forward(self, x):
        return super().forward(x) * (1 + 0.1 * self.global_step)


def noted(model):
    """The warnings of this rank in a fit of twelve steps, or the error, and the number of steps."""
    import warnings

    run = staged.trainer("pipeline", max_epochs=3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            run.fit(globals()[model](), DataLoader(staged.samples(), staged.BATCH))
        except Exception as error:
            return type(error).__name__, str(error), run.global_step
    return [str(each.message) for each in found if "pipeline" in str(each.message)]


class Dropping(staged.Stack):
    """Dropout inside of the layers and between them; a batch norm, which in training takes more than one sample."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.5, self.training)
        return self.head(x)


def validated():
    """val_loss over eight samples, one at a time, of a model that is in training mode when it is cut into stages."""
    run = staged.trainer("pipeline")
    run.validate(Dropping(), DataLoader(staged.samples(8), 1), verbose=False)
    return float(run.callback_metrics["val_loss"])


def validated_in_a_plain_loop():
    module = Dropping().eval()
    with torch.no_grad():
        x, y = staged.samples(8).tensors
        return F.mse_loss(module(x), y).item()
