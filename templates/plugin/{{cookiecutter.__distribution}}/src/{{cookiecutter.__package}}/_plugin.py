"""The manifest: what this distribution provides. It imports neither torch nor the vendor's packages."""

from __future__ import annotations

from torchhal.plugin import Component, hookimpl
{%- set kinds = cookiecutter.__kinds.split(',') %}
{%- set parts = [
  ('accelerator', 'accelerators', 'accelerator', 'Accelerator'),
  ('precision', 'precisions', 'precision', 'Precision'),
  ('checkpoint_io', 'checkpoint_ios', 'checkpoint', 'CheckpointIO'),
  ('cluster_environment', 'cluster_environments', 'environment', 'Environment'),
  ('strategy', 'strategies', 'strategy', 'Strategy'),
] %}
{%- for kind, hook, module, cls in parts if kind in kinds %}


@hookimpl
def torchhal_{{ hook }}() -> list[Component]:
    return [
        Component(
            "{{ cookiecutter.__alias }}{{ cookiecutter._suffix.get(kind, '') }}",
            "{{ cookiecutter.__package }}.{{ module }}:{{ cookiecutter.__class }}{{ cls }}",
            summary="{{ cookiecutter.project_name }}: {{ cookiecutter._words[kind] }}",
            # requires=("the_vendors_module",),  # missing, the part is unavailable, and its name is the reason
        )
    ]
{%- endfor %}
