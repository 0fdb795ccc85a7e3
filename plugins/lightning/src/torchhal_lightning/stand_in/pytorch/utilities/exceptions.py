"""Lightning's exceptions."""


class MisconfigurationException(Exception):
    """Wrong use; torchhal's errors of this package's Trainer are instances of it."""


class SIGTERMException(SystemExit):
    """Named by scripts; a signal ends a run by its own rules here."""
