"""An AttentionModel of rl4co, with a rollout baseline and by rl4co's Trainer, for tours of eight places."""

import lightning.pytorch as pl
import noted
from rl4co.envs import TSPEnv
from rl4co.models import AttentionModel, AttentionModelPolicy
from rl4co.utils import RL4COTrainer

PACKAGES = ["rl4co"]

noted.seed()
env = TSPEnv(generator_params={"num_loc": 8})
policy = AttentionModelPolicy(env_name=env.name, embed_dim=16, num_encoder_layers=1, num_heads=2, feedforward_hidden=16)
model = AttentionModel(
    env, policy=policy, baseline="rollout", batch_size=16, train_data_size=64, val_data_size=16, test_data_size=16,
    optimizer_kwargs={"lr": 1e-3}, dataloader_num_workers=0,
)  # fmt: skip
trainer = RL4COTrainer(
    max_epochs=2, accelerator="cpu", devices=1, precision="32-true", logger=None, enable_progress_bar=False,
    callbacks=[noted.callback(pl)],
)  # fmt: skip
trainer.fit(model)
