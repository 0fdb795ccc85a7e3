"""Show the components that a Trainer would use, and the memory of a model: ``torchhal explain``."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchhal import registry
from torchhal._terminal import echo
from torchhal.cli import _memory as memory
from torchhal.cli._output import output_to_stderr, print_json
from torchhal.registry._registry import DEFAULTS

if TYPE_CHECKING:
    from torchhal.resolve import Plan


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``torchhal explain`` to its parser."""
    options = ', or with options as JSON: \'{"ALIAS": {"OPTION": VALUE}}\''
    parser.add_argument("--accelerator", type=_alias, default="auto", metavar="ALIAS", help=f"an alias{options}")
    parser.add_argument("--strategy", type=_alias, default="auto", metavar="ALIAS", help="the same")
    parser.add_argument("--devices", default="auto", metavar="N", help="a count, indices such as 0,2, or auto")
    parser.add_argument("--num-nodes", type=_nodes, default=1, metavar="N", help="a count, or auto")
    parser.add_argument("--precision", type=_alias, default=None, metavar="ALIAS", help="the same")
    parser.add_argument(
        "--plugin",
        type=_alias,
        action="append",
        default=[],
        metavar="ALIAS",
        help="the same; several times",
    )
    memory.add_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1)")
    parser.set_defaults(run=_explain)


def _alias(text: str) -> Any:
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be an alias, or JSON (got {text!r}: {error})") from None


def _nodes(text: str) -> int | str:
    if text != "auto" and not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a whole number or 'auto' (got {text!r})")
    return text if text == "auto" else int(text)


def _with_broken_plugins(plan: Plan) -> Plan:
    """Return ``plan`` with a note on each plugin that can't be loaded: resolution reads only those it may need."""
    lines = [str(record) for record in registry.plugins() if record.status in ("broken", "incompatible")]
    if not lines:
        return plan
    unnamed = [line for line in lines if not any(line in note for note in plan.notes)]
    return replace(plan, notes=(*plan.notes, *unnamed))


def _defaults() -> tuple[list[dict[str, str]], list[str]]:
    """Return what plugins add to every run, as plain data, and notes on plugins that can't be used."""
    entries, notes = registry.defaults()
    reason = f"a default of its plugin; {DEFAULTS}=0 leaves it out"
    return [
        {"kind": entry.kind.removeprefix("default_"), "name": entry.qualified_name, "reason": reason}
        for entry in entries
    ], notes


def _explain(arguments: argparse.Namespace) -> int:
    memory.check_options(arguments)
    with output_to_stderr():
        from torchhal.resolve import Request, resolve

        request = Request(
            accelerator=arguments.accelerator,
            strategy=arguments.strategy,
            devices=arguments.devices,
            num_nodes=arguments.num_nodes,
            precision=arguments.precision,
            plugins=tuple(arguments.plugin),
        )
        plan = _with_broken_plugins(resolve(request)) if request.accelerator == "auto" else resolve(request)
        found = None if arguments.model is None else memory.estimate(arguments, request, plan)
        defaults, notes = _defaults()
        if notes:
            plan = replace(plan, notes=(*plan.notes, *(note for note in notes if note not in plan.notes)))
    if arguments.json:
        print_json(plan.to_dict() | {"defaults": defaults} | ({} if found is None else {"memory": found}))
    else:
        echo(plan.describe())
        for default in defaults:
            echo(f"every run has the {default['kind']} {default['name']} ({default['reason']})")
        if found is not None:
            echo("\n".join(memory.lines(found)))
    return 0
