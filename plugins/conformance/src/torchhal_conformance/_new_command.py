"""Make a plugin that already works from the template: ``torchhal new``."""

from __future__ import annotations

import argparse
import json
import logging
import re
import shlex
import tempfile
from importlib import resources
from pathlib import Path

import torchhal
from torchhal.errors import ConfigurationError
from torchhal.plugin import KINDS


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``torchhal new`` to its parser."""
    parser.add_argument(
        "name", metavar="NAME", help="what it is for; its alias follows from it (Acme Board: acme_board)"
    )
    parser.add_argument(
        "--kind", action="append", choices=KINDS, help="a component to begin with; may be given several times"
    )
    parser.add_argument("--vendor", help="who makes the hardware")
    parser.add_argument("--author", help="your name")
    parser.add_argument("--email", help="your address")
    parser.add_argument("--description", help="one line for the package index")
    parser.add_argument("--output", metavar="DIR", default=".", help="where its folder is made (default: here)")
    parser.add_argument("--no-input", action="store_true", help="ask nothing: what isn't given has its default")
    parser.set_defaults(run=_new)


def _new(arguments: argparse.Namespace) -> int:
    try:
        from cookiecutter.exceptions import CookiecutterException, FailedHookException, OutputDirExistsException
        from cookiecutter.main import cookiecutter
    except ImportError as error:
        raise ConfigurationError(
            "torchhal new needs the package cookiecutter, which isn't installed: pip install 'torchhal[new]'"
        ) from error
    answers = _given(arguments)
    log = logging.getLogger("cookiecutter")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)  # it shows a traceback for a refusal that the template has explained
    try:
        with (
            resources.as_file(resources.files("torchhal_conformance") / "template") as template,
            tempfile.TemporaryDirectory() as scratch,  # for what it would keep in the user's home
        ):
            if not arguments.no_input:
                _ask(template, answers)
            _check(answers)
            folder = cookiecutter(
                str(template),
                no_input=True,
                extra_context=answers,
                output_dir=arguments.output,
                default_config={"replay_dir": scratch, "cookiecutters_dir": scratch},
            )
    except FailedHookException:
        return 2
    except OutputDirExistsException as error:
        raise ConfigurationError(f"nothing is overwritten: {error}; choose another name or --output") from error
    except (CookiecutterException, OSError) as error:
        raise ConfigurationError(f"the template could not be baked: {error}") from error
    finally:
        log.setLevel(level)
    steps = (f"cd {shlex.quote(folder)}", "pip install --editable '.[test]'", "torchhal plugins", "pytest")
    print("\n  ".join((f"{folder}\n\nnext:", *steps)))
    return 0


def _given(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the command line's answers by the template's names."""
    from packaging.version import Version

    core = Version(torchhal.__version__)
    # A plugin made with a pre-release needs what that has, and >=1.2 would leave 1.2rc1 out.
    oldest = str(core) if core.is_prerelease else f"{core.major}.{core.minor}"
    answers = {"project_name": arguments.name, "_torchhal_version": oldest}
    answers.update(
        (name, value)
        for name in ("vendor", "author", "email", "description")
        if (value := getattr(arguments, name)) is not None
    )
    if arguments.kind:
        answers["kinds"] = ",".join(dict.fromkeys(arguments.kind))
    return answers


def _ask(template: Path, answers: dict[str, str]) -> None:
    """Ask for what the command line left open; an empty answer keeps the default."""
    questions = json.loads((template / "cookiecutter.json").read_text(encoding="utf-8"))
    for name, question in questions["__prompts__"].items():
        if name in answers:
            continue
        default = questions[name].replace("{{ cookiecutter.project_name }}", answers["project_name"])
        try:
            answer = input(f"{question} [{default}]: ").strip()
        except EOFError as error:
            raise ConfigurationError(
                f"there is no answer to the question for {name!r}: give it on the command line, or say --no-input for "
                "the defaults of what isn't given"
            ) from error
        if answer:
            answers[name] = answer


def _check(answers: dict[str, str]) -> None:
    """Refuse what the template can't, as it would be read as part of the template."""
    for name, answer in answers.items():
        if found := re.search(r"\{[{%#]", answer):
            raise ConfigurationError(f"{name!r} must not contain {found[0]!r} (got {answer!r})")
