"""Profiles: written and read back, and refused where they are something else."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from clover_local.residency.profile import (
    Profile,
    ProfileError,
    load_profile,
    profile_of,
    save_profile,
)
from clover_local.residency.trace import RoutingTrace


def test_a_saved_profile_reads_back(trace: RoutingTrace, tmp_path: Path) -> None:
    profile = profile_of(trace)
    save_profile(profile, tmp_path / "profile.json")
    back = load_profile(tmp_path / "profile.json")
    assert back.forwards == profile.forwards == len(trace.forwards)
    assert np.array_equal(back.uses, profile.uses)
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_shares_are_of_forwards() -> None:
    assert Profile(4, np.array([[1, 4]])).shares.tolist() == [[0.25, 1.0]]
    assert Profile(0, np.array([[0, 0]])).shares.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({"kind": "expert profile", "forwards": 2}),
        json.dumps({"kind": "expert profile", "forwards": 2, "uses": [1, 2]}),
        json.dumps({"kind": "expert profile", "forwards": 2, "uses": [[1], [2, 3]]}),
        json.dumps({"kind": "expert profile", "forwards": 2, "uses": [[1.5]]}),
        json.dumps({"kind": "expert profile", "forwards": 2, "uses": [[3]]}),
        json.dumps({"kind": "expert profile", "forwards": 2, "uses": [[-1]]}),
        json.dumps({"kind": "expert profile", "forwards": 2, "uses": [[]]}),
        json.dumps({"kind": "expert profile", "forwards": 2, "uses": [[10**30]]}),
        "[" * 100_000,
    ],
)
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "profile").write_text(text, encoding="utf-8")
    with pytest.raises(ProfileError, match="is no expert profile"):
        load_profile(tmp_path / "profile")


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="none cannot be read"):
        load_profile(tmp_path / "none")
    with pytest.raises(ProfileError, match="cannot be written"):
        save_profile(Profile(1, np.array([[1]])), tmp_path / "none" / "profile")


def test_only_a_profile_is_overwritten(tmp_path: Path) -> None:
    profile, other = Profile(1, np.array([[1]])), tmp_path / "config.json"
    save_profile(profile, tmp_path / "profile")
    save_profile(profile, tmp_path / "profile")
    other.write_text("{}", encoding="utf-8")
    with pytest.raises(ProfileError, match=r"config\.json exists and is no expert profile"):
        save_profile(profile, other)
    assert other.read_text(encoding="utf-8") == "{}"
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/"), Path(), tmp_path, tmp_path / "pipe"):
        with pytest.raises(ProfileError, match=r"cannot be written .*: pass another path"):
            save_profile(profile, path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"profile", "config.json", "pipe"} and (tmp_path / "pipe").is_fifo()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ProfileError, match=r"pipe cannot be read \(no regular file"):
        load_profile(tmp_path / "pipe")


def test_a_profile_of_another_model_is_refused() -> None:
    profile = Profile(1, np.ones((2, 4), np.int64))
    profile.require_fit(2, 4)
    with pytest.raises(ProfileError, match="is of 2 layers of 4 experts, the model has 3 of 4"):
        profile.require_fit(3, 4)
