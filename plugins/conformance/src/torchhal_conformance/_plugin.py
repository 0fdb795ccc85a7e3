"""Contribute the commands ``torchhal conformance`` and ``torchhal new``."""

from torchhal.plugin import Component, hookimpl


@hookimpl
def torchhal_commands() -> list[Component]:
    return [
        Component(
            "conformance",
            "torchhal_conformance._conformance_command:configure",
            "check components against their contracts",
        ),
        Component("new", "torchhal_conformance._new_command:configure", "make a plugin from the template"),
    ]
