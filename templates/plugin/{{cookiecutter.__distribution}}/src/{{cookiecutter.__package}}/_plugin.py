"""Declare the components of this distribution. The manifest imports neither torch nor the vendor's packages."""

from __future__ import annotations

from torchhal.plugin import Component, hookimpl
{%- set kinds = cookiecutter.__kinds.split(',') %}
{%- set components = [
  ('accelerator', 'accelerators', 'accelerator', 'Accelerator'),
  ('precision', 'precisions', 'precision', 'Precision'),
  ('checkpoint_io', 'checkpoint_ios', 'checkpoint', 'CheckpointIO'),
  ('cluster_environment', 'cluster_environments', 'environment', 'Environment'),
  ('strategy', 'strategies', 'strategy', 'Strategy'),
  ('logger', 'loggers', 'logger', 'Logger'),
  ('callback', 'callbacks', 'callback', 'Callback'),
] %}
{%- for kind, hook, module, cls in components if kind in kinds %}


@hookimpl
def torchhal_{{ hook }}() -> list[Component]:
    return [
        Component(
            "{{ cookiecutter.__alias }}{{ cookiecutter._suffix.get(kind, '') }}",
            "{{ cookiecutter.__package }}.{{ module }}:{{ cookiecutter.__class }}{{ cls }}",
            summary="{{ cookiecutter.project_name }}: {{ cookiecutter._words[kind] }}",
            # requires=("the_vendors_module",),  # without it the component is unavailable, and the reason names it
        )
    ]
{%- endfor %}
