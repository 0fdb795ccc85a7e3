"""The names of Lightning's command line, which the stand-in hasn't."""

from torchhal_lightning.stand_in._missing import missing

_INSTEAD = "It stands on jsonargparse and on Lightning's own classes: pip install lightning."

LightningCLI = missing("LightningCLI", _INSTEAD)
LightningArgumentParser = missing("LightningArgumentParser", _INSTEAD)
SaveConfigCallback = missing("SaveConfigCallback", _INSTEAD)
