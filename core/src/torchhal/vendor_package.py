"""Check the version of a vendor's package, import it once, and report exactly why it can't be used.

A plugin describes the package in one place and checks it before the package is needed::

    from torchhal.vendor_package import VendorPackage

    ACME = VendorPackage(
        "acme_sdk", versions=">=2.1,<3", plugin="torchhal-acme", install="pip install 'torchhal-acme[vendor]'"
    )

    ACME.check()         # of metadata only: nothing of the package is imported
    sdk = ACME.load()    # the module

``import acme_sdk`` works as usual once :meth:`VendorPackage.load` has returned. Importing this module imports neither
torch nor a vendor's package.

.. versionadded:: 0.2
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import metadata
from types import ModuleType

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from torchhal.errors import ConfigurationError, message_of
from torchhal.plugin import Availability

__all__ = ["VendorPackage", "availability_from", "restored_environ"]


def availability_from(check: Callable[[], object]) -> Availability:
    """Return the answer of a component's ``availability`` by a check that raises what is wrong.

    Args:
        check: returns where the component can be used, and raises ConfigurationError with the reason where it can't.
    """
    try:
        check()
    except ConfigurationError as error:
        return Availability(False, str(error))
    return Availability(True)


class VendorPackage:
    """A package of a vendor's that a plugin is written to, with the versions that fit and how to install it.

    Every reason against it is an error of the class ``error``, whose message ends in what to do:

    - it is not installed;
    - its version is outside ``versions``;
    - it was built for another torch than this one: by its version (``follows_torch``), or by an error of its import;
    - its import fails: the message contains that error, which is also the cause.

    Subclasses override :meth:`explain` for a package whose import reports such reasons in a way of its own.

    Args:
        module: the module to import, such as ``"acme_sdk"`` or ``"acme.torch"``.
        plugin: the distribution of the plugin, for messages.
        install: what to do for a package that fits, such as ``"pip install 'torchhal-acme[vendor]'"``.
        versions: the releases that the plugin works with, as in a requirement; pre-releases of them count. Empty: any.
        distributions: the names under which it may be installed, the first that is found counts; ``module`` if empty.
        submodules: modules inside ``module`` that are imported with it.
        needed_by: what needs the package, for messages, such as ``"strategy 'acme'"``; ``plugin`` if empty.
        follows_torch: its version's first two numbers are those of the only torch that it works with.
        error: the class of the errors: ConfigurationError for a strategy, ImportError in an accelerator's ``load``.
        not_installed: the message for a package that is missing, as a format string. Like the next, it may use the
            arguments above by name, and ``torch``, the version of torch.
        wrong_version: the message for a version outside ``versions``, which may use ``distribution`` and ``version``,
            of what was found, too.

    .. versionadded:: 0.2
    """

    def __init__(
        self,
        module: str,
        *,
        plugin: str,
        install: str,
        versions: str = "",
        distributions: Sequence[str] = (),
        submodules: Sequence[str] = (),
        needed_by: str = "",
        follows_torch: bool = False,
        error: type[Exception] = ConfigurationError,
        not_installed: str = "{needed_by} needs the package {module}, which is not installed: {install}",
        wrong_version: str = "this {plugin} works with {module} {versions} (found {distribution} {version}): {install}",
    ) -> None:
        self.module = module
        self.plugin = plugin
        self.install = install
        self.versions = SpecifierSet(versions, prereleases=True)
        self.distributions = tuple(distributions) or (module,)
        self.submodules = tuple(submodules)
        self.needed_by = needed_by or plugin
        self.follows_torch = follows_torch
        self.error = error
        self.not_installed = not_installed
        self.wrong_version = wrong_version
        self._lock = threading.RLock()
        self._import_failure = ""

    def installed(self) -> tuple[str, str] | None:
        """Return name and version of the distribution that is installed, from its metadata; None if there is none."""
        for name in self.distributions:
            try:
                return name, metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return None

    def problem(self) -> str:
        """Return why the package can't be used, by its metadata alone; an empty string if it can be used.

        A version that is none by PEP 440 is not compared.
        """
        found = self.installed()
        return self._message(self.not_installed) if found is None else self._version_problem(*found)

    def check(self) -> None:
        """Raise an error with what :meth:`problem` returns, unless that is empty."""
        if problem := self.problem():
            raise self.error(problem)

    def availability(self) -> Availability:
        """Return what :meth:`problem` says, as the answer of a component's ``availability``."""
        problem = self.problem()
        return Availability(False, problem) if problem else Availability(True)

    def load(self) -> ModuleType:
        """Import the package with its submodules, after a look at the version where it has metadata; return the module.

        An import that fails midway is not tried again: the next one would end in another error. The message is the same
        each time. A package that is missing may be installed meanwhile. SystemExit and KeyboardInterrupt pass through.
        What an import in the main thread draws from the random numbers of a program is put back.
        """
        with self._lock:
            if self._import_failure:
                raise self.error(self._import_failure)
            found = self.installed()
            if found is not None and (problem := self._version_problem(*found)):
                raise self.error(problem)
            try:
                with self.import_errors(), self._random_numbers_kept():
                    module = importlib.import_module(self.module)
                    for name in self.submodules:
                        importlib.import_module(f"{self.module}.{name}")
            except Exception as error:
                if not self._is_missing(error.__cause__):
                    self._import_failure = str(error)
                raise
            return module

    def _random_numbers_kept(self) -> AbstractContextManager[None]:
        """Return a context after which a run has the random numbers that it would have without this package."""
        is_main = threading.current_thread() is threading.main_thread()  # which may draw while another one imports
        if self.module in sys.modules or "torch" not in sys.modules or not is_main:
            return nullcontext()
        from torchhal.rng import host_generators_restored

        return host_generators_restored()

    @contextmanager
    def import_errors(self) -> Iterator[None]:
        """Turn what an import of the package raises within into an error with :meth:`explain`'s message."""
        try:
            yield
        except Exception as error:
            raise self.error(self.explain(error)) from error

    def explain(self, error: Exception) -> str:
        """Return the message for an ``error`` that the package's import raised."""
        if self._is_missing(error):
            return self._message(self.not_installed)
        if type(error) is ImportError and error.name is None:  # raised by the package's own code, in words of its own
            return message_of(error)
        return (
            f"{self.module} can't be imported with torch {_torch_version()} "
            f"({type(error).__name__}: {message_of(error)}): {self.install}"
        )

    def _is_missing(self, error: BaseException | None) -> bool:
        """Return whether ``error`` says that the package itself isn't there, rather than something that it imports."""
        named = error.name if isinstance(error, ModuleNotFoundError) else None
        return bool(named) and f"{self.module}.".startswith(f"{named}.")

    def _version_problem(self, distribution: str, text: str) -> str:
        try:
            version = Version(text)
        except InvalidVersion:
            return ""
        if self.follows_torch:
            torch = Version(_torch_version())
            if version.release[:2] != torch.release[:2]:
                return (
                    f"{distribution} {version} loads beside torch {_minor(version)} only, and this is torch {torch}: "
                    f"install 'torch=={_minor(version)}.*', or the {distribution} of {_minor(torch)}"
                )
        if version not in self.versions:
            return self._message(self.wrong_version, distribution=distribution, version=version)
        return ""

    def _message(self, template: str, **found: object) -> str:
        return template.format(
            module=self.module,
            plugin=self.plugin,
            install=self.install,
            versions=self.versions,
            needed_by=self.needed_by,
            torch=_torch_version(),
            **found,
        )


@contextmanager
def restored_environ(*names: str) -> Iterator[None]:
    """Set these environment variables back at the end: to the values from before, or to none.

    For a vendor's import that reads variables which later code must not take for the user's, or that sets some itself.

    .. versionadded:: 0.2
    """
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _torch_version() -> str:
    """Return torch's version without importing it."""
    torch = sys.modules.get("torch")
    return str(torch.__version__) if torch is not None else metadata.version("torch")


def _minor(version: Version) -> str:
    return ".".join(map(str, version.release[:2]))
