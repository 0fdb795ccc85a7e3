"""Map the words of vendors and of other trainers to the distributions and names of this project.

The tables are the only place in core with names of vendors and of other trainers' arguments. They are data for
messages only and change no behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_ALIASES: Final[Mapping[str, str]] = {
    "torchhal-gpu": "gpu cuda mps xpu",
    "torchhal-xla": "tpu xla single_xla single_tpu tpu_spawn xla_spmd xla_fsdp",
    "torchhal-hpu": "hpu hpu_single hpu_parallel",
    "torchhal-ipu": "ipu ipu_strategy",
    "torchhal-deepspeed": (
        "deepspeed deepspeed_stage_1 deepspeed_stage_2 deepspeed_stage_2_offload deepspeed_stage_3 "
        "deepspeed_stage_3_offload deepspeed_stage_3_offload_nvme"
    ),
    "torchhal-bagua": "bagua",
    "torchhal-colossalai": "colossalai colossalai_zero1 colossalai_zero2 colossalai_gemini",
    "torchhal-fairscale": "fairscale_oss fairscale_sdp fairscale_pipe",
    "torchhal-hivemind": "hivemind collaborative",
    "torchhal-horovod": "horovod",
    "torchhal-torchft": "torchft",
    "torchhal-ray": "ray",
    "torchhal-loggers": "mlflow wandb comet swanlab trackio",
    "torchhal-simulator": "sim",
    "torchhal-parallel": (
        "dp ddp2 zero1 zero2 zero3 fsdp ddp_sharded ddp_sharded_spawn ddp_fully_sharded tensor_parallel pipeline "
        "hybrid dcp async dcp_async"
    ),
}

DISTRIBUTIONS: Final[Mapping[str, str]] = {
    alias: distribution for distribution, aliases in _ALIASES.items() for alias in aliases.split()
}
"""Alias -> the distribution to ``pip install``."""

COMMANDS: Final[Mapping[str, str]] = {"conformance": "torchhal-conformance", "new": "torchhal-conformance"}
"""Sub-command of ``torchhal`` -> the distribution that has it."""

CHECKPOINT_FILES: Final[Mapping[str, str]] = {
    ".metadata": "torchhal-parallel",
    "*.distcp": "torchhal-parallel",
    "zero_to_fp32.py": "torchhal-deepspeed",
}
"""A file in the folder that is a checkpoint, as a pattern -> the distribution that reads it."""


_WORDS: Final[Mapping[str, Mapping[str, str]]] = {
    "accelerator": {
        "cpu": "host",
        "gpu": "nvidia amd rocm hip",
        "mps": "apple metal",
        "xpu": "intel",
        "hpu": "gaudi habana",
        "ipu": "graphcore",
    },
    "precision": {
        "16-mixed 16-true": "fp16 float16 f16 half 16bit amp mixed",
        "16-mixed": "fp16-mixed fp16_mixed float16-mixed mixed_float16 mixed_fp16 amp_fp16 apex native",
        "16-true": "fp16-true fp16_true float16-true",
        "bf16-mixed bf16-true": "bfloat16 bfp16",
        "bf16-mixed": "bfloat16-mixed mixed_bfloat16 mixed_bf16 amp_bf16",
        "bf16-true": "bfloat16-true",
        "32-true": "fp32 float32 f32 float single full 32bit no none",
        "64-true": "fp64 float64 f64 double 64bit",
    },
    "strategy": {
        "single_device": "single one_device onedevice onedevicestrategy",
        "ddp": (
            "distributed distributed_data_parallel distributeddataparallel ddp_cpu ddp2d multi_gpu multi_cpu mirrored "
            "mirroredstrategy multiworkermirroredstrategy"
        ),
        "ddp dp": "data_parallel dataparallel",
        "zero1 zero2 zero3": "zero zero_redundancy_optimizer zeroredundancyoptimizer",
        "zero1": "zero_1 zero-1 zero_stage_1",
        "zero2": "zero_2 zero-2 zero_stage_2",
        "zero3": "zero_3 zero-3 zero_stage_3",
        "fsdp": (
            "fsdp2 fsdp_native fully_shard fully_sharded fully_sharded_data_parallel fullyshardeddataparallel "
            "full_shard fairscale_fsdp"
        ),
        "tensor_parallel": "tp tensor modelparallel modelparallelstrategy",
        "pipeline": "pp pipe pipeline_parallel gpipe",
        "hybrid": "2d 3d",
        "deepspeed": "ds deepspeed_zero",
        "fairscale_oss fairscale_sdp": "fairscale fairscale_zero oss",
        "fairscale_sdp": "shardeddataparallel sharded_data_parallel sharded_ddp",
    },
}

_MEANT: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    kind: {word: tuple(aliases.split()) for aliases, words in table.items() for word in words.split()}
    for kind, table in _WORDS.items()
}

_ARGUMENTS: Final[Mapping[str, str]] = {
    # hardware and processes
    "write Trainer(accelerator='gpu', devices={value}), or accelerator='cpu' for none": (
        "gpus num_gpus n_gpus n_gpu ngpus num_gpu"
    ),
    "write Trainer(accelerator='gpu', devices='auto'), or a number of them": "auto_select_gpus",
    "write Trainer(accelerator='tpu', devices={value})": "tpu_cores num_tpus tpu_num_cores",
    "write Trainer(accelerator='ipu', devices={value})": "ipus",
    "write Trainer(accelerator='hpu', devices={value})": "hpus",
    "write Trainer(devices={value})": (
        "num_processes nproc nproc_per_node num_devices n_devices device_ids device_count world_size"
    ),
    "write Trainer(num_nodes={value})": "num_machines nnodes n_nodes nb_gpu_nodes nodes",
    "write Trainer(accelerator='cpu')": "cpu use_cpu no_cuda",
    "write Trainer(accelerator='gpu')": "gpu cuda use_gpu use_cuda",
    "write Trainer(accelerator='mps')": "use_mps_device",
    "write Trainer(accelerator={value})": "device platform hardware",
    "write Trainer(strategy={value})": "distributed_backend distributed_strategy distribution parallel_strategy",
    "write Trainer(strategy='ddp_find_unused_parameters_true')": "find_unused_parameters ddp_find_unused_parameters",
    "write Trainer(strategy='fsdp')": "fsdp fsdp_config fsdp_plugin",
    "write Trainer(strategy='deepspeed')": "deepspeed deepspeed_config deepspeed_plugin",
    "write Trainer(precision='bf16-mixed') or '16-mixed', or 'bf16-true' for weights of 16 bits too": (
        "mixed_precision dtype torch_dtype amp_dtype mixed_precision_type"
    ),
    "write Trainer(precision='16-mixed'), or '16-true' for weights of 16 bits too": (
        "fp16 amp use_amp half amp_backend amp_level half_precision_backend fp16_full_eval"
    ),
    "write Trainer(precision='bf16-mixed'), or 'bf16-true' for weights of 16 bits too": "bf16 use_bf16 bf16_full_eval",
    # how long, how much
    "write Trainer(max_epochs={value})": (
        "epochs num_epochs n_epochs num_train_epochs nb_epoch nb_epochs max_nb_epochs train_epochs total_epochs"
    ),
    "write Trainer(min_epochs={value})": "min_nb_epochs",
    "write Trainer(max_steps={value})": (
        "steps num_steps n_steps train_steps num_train_steps num_training_steps max_train_steps total_steps max_iters "
        "max_iterations num_iterations iterations"
    ),
    "write Trainer(max_time={value})": "time_limit max_duration max_train_time",
    "write Trainer(limit_train_batches={value})": "steps_per_epoch train_percent_check max_train_samples",
    "write Trainer(limit_val_batches={value})": (
        "validation_steps val_percent_check eval_iters limit_eval_batches max_eval_samples"
    ),
    "write Trainer(limit_test_batches={value})": "test_percent_check",
    "write Trainer(overfit_batches={value})": "overfit_pct overfit",
    "write Trainer(check_val_every_n_epoch={value})": "validation_freq val_every eval_every_n_epochs eval_interval",
    "write Trainer(val_check_interval={value})": "eval_steps eval_every",
    "write Trainer(check_val_every_n_epoch=...), or val_check_interval": "eval_strategy evaluation_strategy do_eval",
    "write Trainer(num_sanity_val_steps={value})": "nb_sanity_val_steps",
    "write Trainer(accumulate_grad_batches={value})": (
        "gradient_accumulation_steps grad_accumulation_steps grad_accum_steps accumulation_steps gradient_accumulation "
        "accumulate_gradients accumulate_grad accum_iter"
    ),
    "write Trainer(gradient_clip_val={value})": (
        "max_grad_norm max_norm grad_clip grad_norm gradient_clip gradient_clip_norm gradient_clipping clip_grad "
        "clip_grad_norm clip_gradients clipnorm global_clipnorm"
    ),
    "write Trainer(gradient_clip_val={value}, gradient_clip_algorithm='value')": "clipvalue clip_value clip_grad_value",
    "write trainer.fit(..., ckpt_path={value})": (
        "resume resume_from resume_from_checkpoint checkpoint checkpoint_path ckpt load_checkpoint restore_from "
        "load_path initial_epoch"
    ),
    # what is kept and shown
    "write Trainer(log_every_n_steps={value})": (
        "logging_steps log_interval log_every log_frequency row_log_interval log_save_interval flush_logs_every_n_steps"
    ),
    "write Trainer(default_root_dir={value})": (
        "output_dir project_dir logging_dir log_dir save_dir save_folder work_dir run_dir root_dir model_dir "
        "default_save_path weights_save_path"
    ),
    "write Trainer(logger=...) with a logger object, as torchhal.trainer.loggers.TensorBoardLogger": (
        "loggers log_with report_to experiment tensorboard wandb"
    ),
    "write Trainer(enable_checkpointing={value})": "checkpoint_callback checkpointing enable_checkpoint",
    "write Trainer(callbacks=[ModelCheckpoint(...)])": (
        "save_strategy save_steps save_total_limit save_interval save_every checkpoint_interval checkpoint_every "
        "checkpoint_dir load_best_model_at_end metric_for_best_model greater_is_better"
    ),
    "write ModelCheckpoint(monitor=..., save_top_k=1), in Trainer(callbacks=[...])": "save_best_only",
    "write ModelCheckpoint(dirpath=..., filename=...), in Trainer(callbacks=[...])": "ckpt_dir filepath",
    "write Trainer(callbacks=[EarlyStopping(...)])": "early_stop_callback early_stopping early_stop patience",
    "write Trainer(callbacks=[...])": "callback callback_list",
    "write Trainer(enable_progress_bar=False) for none, or callbacks=[ProgressBar(refresh_rate=...)]": (
        "progress_bar_refresh_rate progress_bar show_progress_bar progress disable_tqdm verbose process_position"
    ),
    "write Trainer(enable_model_summary={value})": "weights_summary model_summary summary",
    "write Trainer(detect_anomaly={value})": "terminate_on_nan detect_nan",
    "write Trainer(benchmark={value})": "cudnn_benchmark",
    "write Trainer(use_distributed_sampler={value})": "replace_sampler_ddp",
    "write Trainer(reload_dataloaders_every_n_epochs=1)": "reload_dataloaders_every_epoch",
    "write Trainer(sync_batchnorm={value})": "sync_bn sync_batch_norm convert_sync_batchnorm",
    "write Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)": (
        "barebones"
    ),
    "call torchhal.seed_everything(...) before the model is made": "seed random_seed data_seed",
    # data
    "write trainer.fit(model, train_dataloaders=...), with a DataLoader": (
        "train_dataloader train_loader train_dl trainloader train_data train_dataset train_set training_data x y "
        "train_dataset_loader"
    ),
    "write trainer.fit(model, ..., val_dataloaders=...), with a DataLoader": (
        "val_dataloader val_loader val_dl val_data val_dataset validation_data validation_loader validation_split "
        "valid_loader valid_dataloader valid_data eval_dataset eval_dataloader eval_loader"
    ),
    "write trainer.test(model, dataloaders=...), with a DataLoader": (
        "test_dataloader test_dataloaders test_loader test_data test_dataset"
    ),
    "write trainer.predict(model, dataloaders=...), with a DataLoader": (
        "predict_dataloaders predict_dataloader predict_loader"
    ),
    "write dataloaders=..., with a DataLoader": "dataloader loader data dataset",
    "write trainer.fit(model, datamodule=...)": "data_module dm",
    "give it to the DataLoader: DataLoader(dataset, batch_size=...)": (
        "batch_size train_batch_size eval_batch_size per_device_train_batch_size per_device_eval_batch_size "
        "device_train_microbatch_size split_batches"
    ),
    "give it to the DataLoader: DataLoader(dataset, num_workers=...)": "num_workers workers dataloader_num_workers",
    "give it to the DataLoader: DataLoader(dataset, shuffle=...)": "shuffle",
    "give it to the DataLoader: DataLoader(dataset, drop_last=...)": "drop_last dataloader_drop_last",
    "give it to the DataLoader: DataLoader(dataset, pin_memory=...)": "pin_memory dataloader_pin_memory",
    "give it to the DataLoader: DataLoader(dataset, collate_fn=...)": "collate_fn data_collator",
    "give the DataLoader a sampler with weights: torch.utils.data.WeightedRandomSampler": "class_weight sample_weight",
    # the model
    "write trainer.fit(model, ...): a Trainer is made without a model": "model module net network model_init",
    "return the optimizer, and its schedulers, from the model's configure_optimizers": (
        "optimizer optimizers optim learning_rate lr weight_decay momentum adam_beta1 adam_beta2 adam_epsilon "
        "lr_scheduler lr_schedulers lr_scheduler_type scheduler warmup_steps warmup_ratio num_warmup_steps"
    ),
    "torchhal.tuning.find_batch_size(trainer, model, ...) finds it before the fit": (
        "auto_scale_batch_size auto_find_batch_size"
    ),
    "torchhal.tuning.find_learning_rate(trainer, model, ...) finds it before the fit": "auto_lr_find",
    "set self.automatic_optimization = False, and call backward for each piece of a batch in training_step": (
        "truncated_bptt_steps"
    ),
    "write ModelCheckpoint(every_n_epochs={value})": "period",
    "compute it in the model's training_step and return it": "loss loss_fn criterion compute_loss_func",
    "call self.log(name, value) in the model's validation_step": "metrics compute_metrics",
    "call model.compile() before fit": "compile compile_model torch_compile jit_compile",
    "call torch.utils.checkpoint in the model's forward": "gradient_checkpointing activation_checkpointing",
    "log it in the model's on_before_optimizer_step": "track_grad_norm",
    "write Trainer(profiler=...)": "profile",
    "write Trainer(callbacks=[EMAWeightAveraging(...)])": "ema ema_decay",
    "write Trainer(callbacks=[StochasticWeightAveraging(swa_lrs=...)])": "stochastic_weight_avg swa",
    "leave it out: prepare_data runs once on every node": "prepare_data_per_node",
    "give each argument by its name: torchhal has no object of training arguments": "args training_args config",
}

_ADVICE: Final[Mapping[str, str]] = {word: advice for advice, words in _ARGUMENTS.items() for word in words.split()}

ATTRIBUTES: Final[Mapping[str, str]] = {
    "train": "call trainer.fit(model, train_dataloaders)",
    "evaluate": "call trainer.validate(model, dataloaders) or trainer.test(...)",
    "eval": "call trainer.validate(model, dataloaders) or trainer.test(...)",
    "run": "call trainer.fit(model, train_dataloaders)",
    "compile": "call model.compile(), and return the optimizer from configure_optimizers",
    "prepare": "a Trainer prepares model, optimizers and data itself: call trainer.fit(model, train_dataloaders)",
    "backward": "call self.manual_backward(loss) in the model, with automatic_optimization = False",
    "save_model": "call trainer.save_checkpoint(path)",
    "save": "call trainer.save_checkpoint(path)",
    "save_state": "call trainer.save_checkpoint(path)",
    "load_state": "call trainer.fit(..., ckpt_path=path)",
    "load_checkpoint": "call trainer.fit(..., ckpt_path=path)",
    "resume_from_checkpoint": "call trainer.fit(..., ckpt_path=path)",
    "tune": "torchhal.tuning has find_learning_rate(trainer, model, ...) and find_batch_size(trainer, model, ...)",
    "device": "read trainer.strategy.root_device",
    "epoch": "read trainer.current_epoch",
    "step": "read trainer.global_step",
    "rank": "read trainer.global_rank",
    "is_main_process": "read trainer.is_global_zero",
    "num_processes": "read trainer.world_size",
    "history": "read trainer.callback_metrics",
    "metrics": "read trainer.callback_metrics",
    "add_argparse_args": "add the arguments that a script takes to its parser by their names",
    "from_argparse_args": "write Trainer(max_epochs=args.max_epochs, ...), each argument by its name",
    "parse_argparser": "write Trainer(max_epochs=args.max_epochs, ...), each argument by its name",
    "num_gpus": "read trainer.num_devices",
    "gpus": "read trainer.num_devices",
}
"""Attribute of other trainers -> its equivalent of this one."""

NAMES: Final[Mapping[str, str]] = {
    "LightningModule": "torchhal.Module",
    "LightningDataModule": "torchhal.DataModule",
    "LightningCLI": "torchhal.TrainerCLI",
    "TQDMProgressBar": "torchhal.ProgressBar",
    "RichProgressBar": "torchhal.RichProgress",
    "RichModelSummary": "torchhal.RichSummary",
    "TrainingArguments": "torchhal.Trainer, which takes each argument by its name",
    "Accelerator": "torchhal.Trainer, or torchhal.accelerators.Accelerator to write one",
    "Fabric": "torchhal.strategies, whose strategies a loop of your own can drive",
    "set_seed": "torchhal.seed_everything",
    "callbacks": "torchhal.trainer.callbacks",
    "loggers": "torchhal.trainer.loggers",
    "CSVLogger": "torchhal.trainer.loggers.CSVLogger",
    "TensorBoardLogger": "torchhal.trainer.loggers.TensorBoardLogger",
    "ModelSummary": "torchhal.trainer.callbacks.ModelSummary",
    "BasePredictionWriter": "torchhal.PredictionWriter",
    "DeviceStatsMonitor": "torchhal.DeviceStats",
    "EMA": "torchhal.EMAWeightAveraging",
    "SWA": "torchhal.StochasticWeightAveraging",
    "DDPStrategy": "torchhal.strategies.DDPStrategy",
}
"""Top-level name of other libraries -> its equivalent here."""


def meant_by(kind: str, name: str) -> tuple[str, ...]:
    """Return the aliases of ``kind`` that another library calls ``name``; empty for an unknown word."""
    return _MEANT.get(kind, {}).get(name.lower(), ())


def argument_advice(name: str, value: object) -> str:
    """Return what to write for another trainer's argument ``name``; empty for an unknown word."""
    plain = isinstance(value, bool | int | float | str) and bool(value)
    return _ADVICE.get(name, "").format(value=repr(value) if plain else "...")
