"""Core's own manifest: the built-in parts use the same hooks as those of plugins."""

from __future__ import annotations

from torchhal.plugin import Candidate, Component, hookimpl

_DDP = "torchhal.strategies.ddp:DDPStrategy"


@hookimpl
def torchhal_accelerators() -> list[Component]:
    return [Component("cpu", "torchhal.accelerators.cpu:CPUAccelerator", summary="The host's processors")]


@hookimpl
def torchhal_precisions() -> list[Component]:
    full, mixed = "torchhal.precision.true_precision:TruePrecision", "torchhal.precision.mixed:MixedPrecision"
    single = "torchhal.precision.true_precision:SinglePrecision"
    return [
        Component("32-true", single, "torch's default: nothing is converted", aliases=("32",)),
        Component("64-true", full, "float64 throughout", {"dtype": "float64"}, aliases=("64",)),
        Component("bf16-true", full, "bfloat16 throughout", {"dtype": "bfloat16"}),
        Component("16-true", full, "float16 throughout", {"dtype": "float16"}),
        Component("bf16-mixed", mixed, "float32 weights, bfloat16 autocast", {"dtype": "bfloat16"}, aliases=("bf16",)),
        Component(
            "16-mixed", mixed, "float32 weights, float16 autocast, scaled loss", {"dtype": "float16"}, aliases=("16",)
        ),
    ]


@hookimpl
def torchhal_checkpoint_ios() -> list[Component]:
    return [
        Component("torch", "torchhal.checkpoint.torch_file:TorchCheckpointIO", summary="One file, written atomically")
    ]


@hookimpl
def torchhal_cluster_environments() -> list[Component]:
    return [
        Component("local", "torchhal.cluster.local:LocalEnvironment", summary="This machine, or hosts started by hand"),
        Component(
            "torchelastic", "torchhal.cluster.torchelastic:TorchElasticEnvironment", summary="Started by torchrun"
        ),
        Component("slurm", "torchhal.cluster.slurm:SlurmEnvironment", summary="A task of a step, started by srun"),
        Component("openmpi", "torchhal.cluster.mpi:OpenMPIEnvironment", summary="Started by mpirun", aliases=("mpi",)),
        Component("mpich", "torchhal.cluster.mpi:MPICHEnvironment", summary="Started by mpiexec (Hydra)"),
        Component("lsf", "torchhal.cluster.lsf:LSFEnvironment", summary="Started by jsrun on LSF"),
        Component("flux", "torchhal.cluster.flux:FluxEnvironment", summary="A task of a Flux job"),
        Component("kubeflow", "torchhal.cluster.kubeflow:KubeflowEnvironment", summary="A pod of a PyTorchJob"),
        Component(
            "sagemaker", "torchhal.cluster.sagemaker:SageMakerEnvironment", summary="A host of a SageMaker training job"
        ),
        Component("env", "torchhal.cluster.env_init:EnvVarEnvironment", summary="torch's env:// variables"),
    ]


@hookimpl
def torchhal_strategies() -> list[Component]:
    components = [
        Component(
            "single_device",
            "torchhal.strategies.single_device:SingleDeviceStrategy",
            summary="One process, one device",
            aliases=("none",),
            candidates=(Candidate(0),),
        )
    ]
    for alias, summary, start in (
        ("ddp", "One process per device, gradients averaged", {}),
        ("ddp_spawn", "ddp in processes started by spawn", {"start_method": "spawn"}),
        ("ddp_fork", "ddp in processes started by fork", {"start_method": "fork"}),
        ("ddp_forkserver", "ddp in processes started by forkserver", {"start_method": "forkserver"}),
        ("ddp_notebook", "ddp from a notebook: processes started by fork", {"start_method": "fork"}),
    ):
        views = Candidate(12, {"gradient_as_bucket_view": True})  # the gradients are in memory once, not twice
        components += [
            Component(
                alias,
                _DDP,
                summary=summary,
                defaults=start,
                candidates=(Candidate(10), views) if alias == "ddp" else (),
            ),
            Component(
                f"{alias}_find_unused_parameters_true",
                _DDP,
                summary=f"{summary}; unused parameters allowed",
                defaults={**start, "find_unused_parameters": True},
            ),
            Component(
                f"{alias}_find_unused_parameters_false",
                _DDP,
                summary=f"{summary}; unused parameters are an error",
                defaults={**start, "find_unused_parameters": False},
            ),
        ]
    return components


@hookimpl
def torchhal_loggers() -> list[Component]:
    return [
        Component("csv", "torchhal.trainer.loggers.csv:CSVLogger", summary="A table in a file, metrics.csv"),
        Component(
            "tensorboard",
            "torchhal.trainer.loggers.tensorboard:TensorBoardLogger",
            summary="Event files for TensorBoard",
            requires=("tensorboard",),
        ),
    ]


@hookimpl
def torchhal_callbacks() -> list[Component]:
    where = "torchhal.trainer.callbacks"
    return [
        Component("model_checkpoint", f"{where}.checkpoint:ModelCheckpoint", summary="Saves the best or newest states"),
        Component("early_stopping", f"{where}.early_stopping:EarlyStopping", summary="Ends training by a metric"),
        Component("lr_monitor", f"{where}.lr_monitor:LearningRateMonitor", summary="Logs learning rates"),
        Component("progress_bar", f"{where}.progress:ProgressBar", summary="A bar on the terminal"),
        Component("model_summary", f"{where}.summary:ModelSummary", summary="A table of the model's layers"),
        Component(
            "rich_progress",
            f"{where}.rich_progress:RichProgress",
            summary="Bars on the terminal, by rich",
            requires=("rich",),
        ),
        Component(
            "rich_summary",
            f"{where}.rich_summary:RichSummary",
            summary="A table of the model's layers, by rich",
            requires=("rich",),
        ),
        Component("timer", f"{where}.timer:Timer", summary="Measures stages, and ends training by time"),
        Component("device_stats", f"{where}.device_stats:DeviceStats", summary="Logs what devices report"),
        Component(
            "gradient_accumulation_scheduler",
            f"{where}.accumulation_scheduler:GradientAccumulationScheduler",
            summary="Sets the batches of an optimizer step by epoch",
        ),
        Component(
            "on_exception_checkpoint",
            f"{where}.exception_checkpoint:OnExceptionCheckpoint",
            summary="Saves when a run ends by an error",
        ),
        Component("backbone_finetuning", f"{where}.finetuning:BackboneFinetuning", summary="Trains the backbone later"),
        Component("ema", f"{where}.weight_averaging:EMAWeightAveraging", summary="Exponential average of the weights"),
        Component("weight_averaging", f"{where}.weight_averaging:WeightAveraging", summary="Average of the weights"),
        Component(
            "swa",
            f"{where}.stochastic_weight_averaging:StochasticWeightAveraging",
            summary="Average of the weights of the last epochs, at a learning rate of its own",
        ),
    ]


@hookimpl
def torchhal_commands() -> list[Component]:
    return [
        Component("plugins", "torchhal.cli._plugins:configure", "list installed plugins and what they provide"),
        Component(
            "doctor",
            "torchhal.cli._doctor:configure",
            "show versions, plugins, what hardware can be used and why not; or why a run hung",
        ),
        Component(
            "explain",
            "torchhal.cli._explain:configure",
            "show which parts a Trainer with these arguments would use, and why",
        ),
        Component(
            "checkpoint",
            "torchhal.cli._checkpoint:configure",
            "look into a checkpoint, or make one portable file of it",
        ),
        Component(
            "export",
            "torchhal.cli._export:configure",
            "write a trained model as safetensors, by torch.export or as ONNX, with a model card",
        ),
        Component("report", "torchhal.cli._report:configure", "show what a run has left, or compare several"),
    ]
