"""The strategy for several devices of {{ cookiecutter.project_name }}."""

from __future__ import annotations

from typing import ClassVar

from torchhal.strategies import DDPStrategy


class {{ cookiecutter.__class }}Strategy(DDPStrategy):
    """Strategy with one process per device, whose gradients torch's DistributedDataParallel averages.

    Hardware that torch speaks to needs no strategy of its own: core's work on it. Override ``configure_ddp`` to wrap
    the model otherwise, ``setup_communication`` for another initialisation, ``optimizer_step`` for another step; where
    nothing of this one fits, derive from ``ParallelStrategy`` or ``SingleDeviceStrategy``.
    """

    # Any other accelerator is refused before a run starts; None takes all. "sim" is torchhal-simulator's, for tests.
    accelerators: ClassVar[frozenset[str] | None] = frozenset({"cpu", "sim"
{%- if 'accelerator' in cookiecutter.__kinds.split(',') %}, "{{ cookiecutter.__alias }}"{% endif %}})
