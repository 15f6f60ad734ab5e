"""How often a finished run used each expert: a profile, which seeds the cache of the next run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clover_local.errors import CloverError
from clover_local.files import replacing, require_file
from clover_local.residency.demand import FloatArray
from clover_local.residency.trace import RoutingTrace

_KIND = "expert profile"


class ProfileError(CloverError):
    """A profile that cannot be read, or is one of another model."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Forwards of previews and commits, and how many of them used each expert."""

    forwards: int
    uses: NDArray[np.int64]  # [L, E]

    @property
    def shares(self) -> FloatArray:
        """[L, E]: share of the forwards that used each expert: the `prior` of a policy."""
        return self.uses / max(self.forwards, 1)

    def require_fit(self, layers: int, num_experts: int) -> None:
        """Raises ProfileError where it is one of another model."""
        if self.uses.shape != (layers, num_experts):
            theirs = "{} layers of {} experts".format(*self.uses.shape)
            raise ProfileError(
                f"the profile is of {theirs}, the model has {layers} of {num_experts}: "
                "pass the profile of a run of this model"
            )


def profile_of(trace: RoutingTrace) -> Profile:
    """The profile of a trace's previews and commits."""
    decoding = [forward for forward in trace.forwards if forward.kind != "prompt"]
    uses = np.zeros((trace.layers, trace.experts), np.int64)
    for forward in decoding:
        uses += forward.rows > 0
    return Profile(len(decoding), uses)


def save_profile(profile: Profile, path: Path) -> None:
    """Writes it as JSON, whole or not at all.

    Raises:
        ProfileError: the path cannot be written, or holds something else.
    """
    _refuse_other_file(path)
    text = json.dumps({"kind": _KIND, "forwards": profile.forwards, "uses": profile.uses.tolist()})
    try:
        with replacing(path) as file:  # its name is not empty, or it is a folder
            file.write((text + "\n").encode())
    except OSError as error:
        raise _unwritable(path, error) from None


def _refuse_other_file(path: Path) -> None:
    """A mistyped name must not cost a model, and a device is not to become a file."""
    try:
        require_file(path)
        load_profile(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unwritable(path, error) from None
    except ProfileError:
        raise ProfileError(
            f"{path} exists and is no expert profile: remove it, or pass another path"
        ) from None


def _unwritable(path: Path, error: OSError) -> ProfileError:
    return ProfileError(
        f"the profile {path} cannot be written ({error.strerror}): pass another path"
    )


def load_profile(path: Path) -> Profile:
    """Reads what `save_profile` wrote.

    Raises:
        ProfileError: no such file, or no profile.
    """
    try:
        require_file(path)
        given: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(given, dict) or given.get("kind") != _KIND:
            raise ValueError("it is none")
        uses = np.array(given["uses"])
        forwards = given["forwards"]
        if uses.ndim != 2 or uses.dtype.kind != "i" or not isinstance(forwards, int):
            raise ValueError("its counts are damaged")
        if uses.min() < 0 or uses.max() > forwards:
            raise ValueError(f"{uses.min()} to {uses.max()} uses in {forwards} forwards")
    except OSError as error:
        raise ProfileError(
            f"the profile {path} cannot be read ({error.strerror}): pass one that a run saved"
        ) from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ProfileError(
            f"{path} is no expert profile ({error}): pass one that a run saved"
        ) from None
    return Profile(forwards, uses.astype(np.int64))
