"""Noise2Void of careamics, whose CAREamist makes its Trainer and its data module itself, on a noisy image."""

import noted
import numpy as np
import pytorch_lightning as pl
from careamics import CAREamist
from careamics.config import create_n2v_configuration

PACKAGES = ["careamics"]

noted.seed()
image = (np.add.outer(np.arange(96), np.arange(96)) // 16 % 2 * 100 + np.random.normal(0, 20, (96, 96))).astype(
    np.float32
)
configuration = create_n2v_configuration(
    experiment_name="stripes", data_type="array", axes="YX", patch_size=[32, 32], batch_size=2, num_epochs=2,
    model_params={"depth": 2, "num_channels_init": 8}, dataloader_params={"num_workers": 0},
)  # fmt: skip
careamist = CAREamist(configuration, callbacks=[noted.callback(pl)])
careamist.train(train_source=image, val_source=image[:64, :64])
