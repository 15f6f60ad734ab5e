"""Errors that a user can act on: one sentence each, with the remedy in it.

A wrong call by a programmer is a `ValueError`; a `CloverError` is what the command line prints as
one line.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class CloverError(Exception):
    """Something the user can mend; the message is one sentence that says how.

    Where the cause may be the value of a flag or a setting, `keys` names it.
    """

    def __init__(self, message: str = "", *, keys: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.keys = frozenset(keys)


@contextmanager
def concerning(key: str) -> Iterator[None]:
    """Within it, the cause of every CloverError may be the value of `key`."""
    try:
        yield
    except CloverError as error:
        error.keys |= {key}
        raise


class ConfigError(CloverError):
    """A config.json or generation_config.json that this runtime cannot use."""


class CheckpointError(CloverError):
    """Weights that are missing, damaged, or do not fit the config."""


class TokenizerError(CloverError):
    """A tokenizer or chat template that cannot be read or used."""


class SettingsError(CloverError):
    """A setting, flag or prompt that is unknown, out of range, or impossible with this model."""


class ContextError(CloverError):
    """A prompt that does not fit the context."""

    def __init__(self, message: str = "", *, keys: Iterable[str] = ("context",)) -> None:
        super().__init__(message, keys=keys)


class HubError(CloverError):
    """A model that could not be had from the hub."""


class ResourceError(CloverError):
    """Memory of the device that ran out while an answer was made."""


class TraceError(CloverError):
    """A trace that cannot be read, or lacks what was asked of it."""


class SessionError(CloverError):
    """A saved conversation that cannot be read or written."""
