"""Replays: their counts, and how far the policies are from Belady's rule."""

import numpy as np
import pytest

from clover_local.residency.names import DEFAULT_POLICY, POLICY_NAMES
from clover_local.residency.profile import profile_of
from clover_local.residency.simulate import Replay, simulate
from clover_local.residency.trace import RoutingTrace

SHARES = (0.25, 0.5, 0.75)


@pytest.fixture(scope="module")
def replays(trace: RoutingTrace) -> list[Replay]:
    slots = [int(share * trace.layers * trace.experts) for share in SHARES]
    return simulate(trace, slots=slots)


def by_size(replays: list[Replay], policy: str) -> list[Replay]:
    return [each for each in replays if each.policy == policy]


def test_the_default_is_within_half_more_misses_than_belady(replays: list[Replay]) -> None:
    assert [each.ratio <= 1.5 for each in by_size(replays, DEFAULT_POLICY)] == [True] * 3


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_no_policy_beats_the_default(policy: str, replays: list[Replay]) -> None:
    pairs = zip(by_size(replays, DEFAULT_POLICY), by_size(replays, policy), strict=True)
    assert all(best.misses <= other.misses for best, other in pairs)


def test_nothing_beats_the_optimum(replays: list[Replay]) -> None:
    assert all(each.optimum <= min(each.misses, each.belady) for each in replays)


def test_more_slots_miss_less(replays: list[Replay]) -> None:
    for policy in POLICY_NAMES:
        misses = [each.misses for each in by_size(replays, policy)]
        assert misses == sorted(misses, reverse=True)


def test_with_slots_for_all_only_first_uses_are_copied(trace: RoutingTrace) -> None:
    (replay,) = simulate(trace, slots=[trace.layers * trace.experts], policies=["lru"])
    assert replay.misses == (profile_of(trace).uses > 0).sum() == replay.belady == replay.optimum
    assert replay.ratio == 1


def test_phases_are_told_apart(replays: list[Replay], trace: RoutingTrace) -> None:
    asked = {phase: counts.hits + counts.misses for phase, counts in replays[0].counts.items()}
    uses = {"first": 0, "later": 0, "commit": 0}
    for forward in trace.forwards:
        commit = forward.kind == "commit"
        phase = "commit" if commit else "later" if forward.number else "first"
        uses[phase] += int((forward.rows > 0).sum())
    assert asked == uses


def test_a_preview_takes_its_reads_and_its_copies(trace: RoutingTrace) -> None:
    every = trace.layers * trace.experts
    (replay,) = simulate(trace, slots=[every], policies=["lru"])
    previews = [forward for forward in trace.forwards if forward.kind == "preview"]
    used = np.mean([(forward.rows > 0).sum() for forward in previews])
    seconds = replay.preview_seconds(1000, link=np.inf, bandwidth=1e6)
    assert seconds == pytest.approx(used * 1e-3)


def test_a_profile_saves_the_misses_of_learning(trace: RoutingTrace) -> None:
    half = len(trace.forwards) // 2
    first = RoutingTrace(trace.layers, trace.experts, trace.forwards[:half])
    second = RoutingTrace(trace.layers, trace.experts, trace.forwards[half:])
    slots = [trace.layers * trace.experts // 2]
    (without,) = simulate(second, slots=slots, policies=[DEFAULT_POLICY])
    (seeded,) = simulate(second, slots=slots, policies=[DEFAULT_POLICY], profile=profile_of(first))
    assert seeded.misses < without.misses
