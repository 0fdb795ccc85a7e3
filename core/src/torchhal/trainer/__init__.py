"""Train, validate, test and predict: the Trainer and all that works on its runs.

Where to look:

- the state of a run: ``run``, ``_settings``, ``_progress``, ``_hooks``; the Trainer's views of it: ``_properties``
- one call from start to end: ``_launch``, ``_run_lifecycle``, ``_stop_handling``
- what is computed: ``loops``; what it reads: ``data``, ``_run_data``; what it logs: ``logging``, ``loggers``
- what is saved and restored: ``_checkpointing``, ``_checkpoint_fields``, ``_resume``
- what runs beside it: ``callbacks``
"""

from torchhal.trainer.trainer import Trainer

__all__ = ["Trainer"]
