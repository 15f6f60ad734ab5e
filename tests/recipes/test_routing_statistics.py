"""The recipe of docs/routing.md: what it records is what `clover-local simulate` reads."""

from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from clover_local.residency.names import DEFAULT_POLICY
from clover_local.residency.simulate import simulate
from clover_local.residency.trace import read_trace
from tests.recipes.conftest import load_recipe


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe("routing_statistics")


@pytest.fixture(scope="module")
def recorded(recipe: ModuleType) -> Any:
    return recipe.record("demo", questions=60, seed=7)


def test_every_forward_is_recorded_in_its_place(recorded: Any) -> None:
    forwards = recorded.trace.forwards
    assert [each.kind for each in forwards].count("prompt") == 60
    for before, forward in pairwise(forwards):
        if forward.kind == "commit":
            assert (before.kind, before.block) == ("preview", forward.block)
            assert before.number == forward.number - 1
        elif forward.number == 0:
            assert forward.kind == "prompt" or before.kind in ("prompt", "commit")
    first = next(each for each in forwards if each.kind == "preview")
    assert np.array_equal(first.rows, first.masked)  # a block begins with masks only


def test_families_partition_the_forwards(recorded: Any) -> None:
    parts = [len(recorded.of_family(name).forwards) for name in set(recorded.families)]
    assert sum(parts) == len(recorded.trace.forwards)


def test_what_is_saved_reads_back(recipe: ModuleType, recorded: Any, tmp_path: Path) -> None:
    recipe.save(recorded.trace, tmp_path / "trace.jsonl")
    back = read_trace(tmp_path / "trace.jsonl")
    assert len(back.forwards) == len(recorded.trace.forwards)
    for own, other in zip(recorded.trace.forwards, back.forwards, strict=True):
        assert (own.kind, own.number) == (other.kind, other.number)
        assert np.array_equal(own.rows, other.rows)


def test_tables_have_no_empty_cells(recipe: ModuleType, recorded: Any) -> None:
    lines = [*recipe.table(recipe.statistics(recorded.trace))[2:], *recipe.family_table(recorded)]
    assert not [line for line in lines if "|  |" in line]
    assert len(recipe.family_table(recorded)) == 2 + len(set(recorded.families))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_the_default_policy_is_near_belady_on_the_demo_model(share: float, recorded: Any) -> None:
    trace = recorded.trace
    slots = [int(share * trace.layers * trace.experts)]
    replays = {each.policy: each for each in simulate(trace, slots=slots)}
    best = replays[DEFAULT_POLICY]
    assert best.ratio <= 1.5
    others = [each for name, each in replays.items() if name != "static"]  # it knows the trace
    assert best.misses == min(each.misses for each in others)
