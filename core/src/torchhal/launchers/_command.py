"""The command that runs the user's script again."""

from __future__ import annotations

import builtins
import os
import sys
from types import FrameType

from torchhal.errors import LaunchError

_INSTEAD = "use strategy='ddp_spawn' (the model's class must be importable), 'ddp_fork' or 'ddp_notebook'"


def script_command() -> list[str]:
    """Return the interpreter, its flags, torchhal's child entry, and what this process runs.

    This is a script, a module or ``-c`` code.

    Raises:
        LaunchError: there is no script to run again (a notebook, a REPL, a script on stdin), or running it again
            would run something larger (a test session).
    """
    _refuse_test_runner()
    if why := why_no_script():
        raise LaunchError(why)
    child = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_subprocess_entry.py")
    flags, _ = interpreter_flags(sys.orig_argv)
    target = _target()
    assert target is not None, "asked above"
    return [sys.executable, *flags, child, *target, *_arguments(target)]


def why_no_script() -> str:
    """Return why the program of this process can't be run again, and what to use instead; empty where it can."""
    if hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__"):
        return f"there is no script to run again in a notebook or an interactive interpreter: {_INSTEAD}"
    if _target() is None:
        return f"there is no script to run again (is it read from stdin?): save it as a file, or {_INSTEAD}"
    return ""


def _target() -> list[str] | None:
    """Return what this process runs: ``["script", path]``, ``["module", name]``, ``["command", code]``, or None."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file == "<stdin>":
        file = None
    spec = getattr(main, "__spec__", None)
    if spec is not None and getattr(spec, "name", None):
        # python -m pkg.mod, or a folder or archive, which also has a spec named __main__.
        name = spec.name
        if name != "__main__":
            return ["module", name.removesuffix(".__main__")]
        return ["script", os.path.dirname(os.path.abspath(file or sys.argv[0]))]
    if file is not None:
        return ["script", os.path.abspath(file)]
    _, code = interpreter_flags(sys.orig_argv)
    return None if code is None else ["command", code]


def interpreter_flags(original: list[str]) -> tuple[list[str], str | None]:
    """Return the interpreter's own options in ``sys.orig_argv``, and the code of ``-c``.

    ``-i`` is left out: a child is never interactive.
    """
    flags: list[str] = []
    words = iter(original[1:])
    for word in words:
        if not word.startswith("-") or word in ("-", "--"):
            break
        if word.startswith("--"):
            flags.append(word)
            if word == "--check-hash-based-pycs":
                flags.append(next(words, "default"))
            continue
        kept = "-"
        for index, letter in enumerate(word[1:], start=1):
            rest = word[index + 1 :]
            if letter in "cm":
                if kept != "-":
                    flags.append(kept)
                value = rest or next(words, "")
                return flags, value if letter == "c" else None
            if letter in "WX":
                if kept != "-":
                    flags.append(kept)
                flags.append(f"-{letter}{rest or next(words, '')}")
                kept = "-"
                break
            if letter != "i":
                kept += letter
        if kept != "-":
            flags.append(kept)
    return flags, None


def _arguments(target: list[str]) -> list[str]:
    """Return the script's arguments as they were given: a script may have changed ``sys.argv`` since."""
    count = len(sys.argv) - 1
    original = sys.orig_argv[1:]
    kind, name = target
    for index, word in enumerate(original):
        same = os.path.abspath(word) == name if kind == "script" else word == name
        if same and (kind == "script" or word == name):
            return original[index + 1 :]
    return sys.argv[1:] if count > 0 else []


def _refuse_test_runner() -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module in ("_pytest.runner", "_pytest.python", "unittest.case"):
            raise LaunchError(
                "inside a test session the script to run again is the whole session, once per process: "
                "use strategy='ddp_spawn' or 'ddp_fork' in the test, or run a script as a process of its own"
            )
        frame = frame.f_back
