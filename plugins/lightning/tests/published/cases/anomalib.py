"""GANomaly of anomalib, which optimizes two parts by hand, by anomalib's Engine, on images of stripes."""

import os

import lightning.pytorch as pl
import noted
import numpy as np
from anomalib.data import Folder
from anomalib.engine import Engine
from anomalib.models import Ganomaly
from PIL import Image
from torchvision.transforms.v2 import Resize

PACKAGES = ["anomalib"]

noted.seed()
for kind, number in (("good", 24), ("broken", 8)):
    os.makedirs(f"images/{kind}")
    for index in range(number):
        stripes = np.tile(np.arange(64) // 8 % 2 * 200, (64, 1)) + np.random.randint(0, 50, (64, 64))
        if kind == "broken":
            stripes[20:40, 20:40] = 0
        image = Image.fromarray(stripes.astype(np.uint8)).convert("RGB")
        image.save(f"images/{kind}/{index:02}.png")

data = Folder(
    name="stripes", root="images", normal_dir="good", abnormal_dir="broken", train_batch_size=4, eval_batch_size=4,
    num_workers=0, seed=1, augmentations=Resize((64, 64)),
)  # fmt: skip
model = Ganomaly(
    batch_size=4,
    n_features=8,
    latent_vec_size=8,
    pre_processor=Ganomaly.configure_pre_processor((64, 64)),
    visualizer=False,
)
engine = Engine(
    max_epochs=2, accelerator="cpu", devices=1, callbacks=[noted.callback(pl)], enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
engine.fit(model=model, datamodule=data)
