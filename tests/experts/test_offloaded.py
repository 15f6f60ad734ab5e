"""Offloaded experts give resident experts' bits, and copy each missing record once."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from clover_local.cache import SequenceState
from clover_local.checkpoint.placements import open_checkpoint
from clover_local.config import ModelConfig, read_model_config
from clover_local.errors import CheckpointError, SettingsError
from clover_local.experts.copies import Copy, DirectCopies
from clover_local.experts.offloaded import OffloadedExperts
from clover_local.experts.slots import MatrixSlots
from clover_local.experts.traffic import Traffic
from clover_local.hub import locate
from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.memory.sizes import shown
from clover_local.model.clover import Clover
from clover_local.residency.demand import Kind
from clover_local.residency.names import POLICY_NAMES
from clover_local.residency.simulate import simulate
from clover_local.residency.trace import Forward, RoutingTrace, forward_of
from tests.experts.conftest import (
    Disk,
    OnDisk,
    WriteExperts,
    WriteRandom,
    model_over,
    offload,
    profile_for,
    run,
    same,
    steps,
)

RoundMatrix = Callable[..., PackedWeight]
LAYERS, EXPERTS = 4, 8  # of the golden model
BLOCK: tuple[Kind, ...] = ("preview",) * 4


@pytest.fixture(scope="module", params=["golden", "quantized"])
def on_disk(request: pytest.FixtureRequest) -> OnDisk:
    """Plain and packed experts."""
    found: OnDisk = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def demo() -> OnDisk:
    """The bundled model: 8 layers of 16 experts."""
    config = read_model_config(locate("demo"))
    return OnDisk(open_checkpoint(locate("demo"), config), config)


@cache
def expected(on_disk: OnDisk) -> list[Tensor]:
    """What resident experts give."""
    return run(model_over(on_disk, None))


def fresh_state(model: Clover) -> SequenceState:
    return SequenceState(model.config, context=100, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("slots", [LAYERS, 9, 20, 31, LAYERS * EXPERTS])
def test_every_policy_and_size_gives_the_bits_of_resident_experts(
    on_disk: OnDisk, policy: str, slots: int
) -> None:
    experts = offload(on_disk, slots, policy=policy)
    assert same(run(model_over(on_disk, experts)), expected(on_disk))
    stats = experts.stats()
    assert stats.copied.records == stats.total.misses
    size = stats.device_bytes // slots
    assert stats.copied.bytes == size * stats.total.misses
    if slots == LAYERS * EXPERTS:
        assert stats.total.misses == stats.resident


def test_stats_of_one_time_do_not_change_later(on_disk: OnDisk) -> None:
    experts = offload(on_disk, 9)
    run(model_over(on_disk, experts))
    first = experts.stats()
    records, misses = first.copied.records, first.total.misses
    run(model_over(on_disk, experts))
    assert (first.copied.records, first.total.misses) == (records, misses)
    assert experts.stats().copied.records == experts.stats().total.misses > records


def test_one_slot_serves_all_layers(on_disk: OnDisk) -> None:
    assert same(run(model_over(on_disk, offload(on_disk, 1))), expected(on_disk))


def test_sizes_that_are_no_powers_of_two(
    write_random: WriteRandom, odd_config: ModelConfig, tmp_path: Path
) -> None:
    odd = write_random(tmp_path, odd_config)
    for slots in (5, 17, 55):
        assert same(run(model_over(odd, offload(odd, slots))), expected(odd))


def test_large_plain_experts_are_blocked_as_resident_ones_are(
    write_random: WriteRandom, odd_config: ModelConfig, tmp_path: Path
) -> None:
    large = replace(
        odd_config,
        hidden_size=512,
        moe_intermediate_size=300,  # gate_up is blocked, down is too small
        num_experts=5,
        num_hidden_layers=2,
        layer_types=odd_config.layer_types[:2],
    )
    on_disk = write_random(tmp_path, large)
    experts = offload(on_disk, 4)
    assert isinstance(experts._pools[0].slots, MatrixSlots)
    model = model_over(on_disk, experts)
    assert same(run(model), expected(on_disk))
    experts.resize(7)
    experts.resize(3)
    assert same(run(model), expected(on_disk))


def test_formats_may_differ_by_layer_and_by_expert(
    write_experts: WriteExperts, round_matrix: RoundMatrix, tmp_path: Path
) -> None:
    def stored(layer: int, expert: int, name: str, matrix: Tensor) -> Weight:
        if layer == 3 and expert % 2:
            return matrix
        return round_matrix(
            matrix,
            bits=8 if layer == 1 or (layer == 2 and name == "down") else 4,
            group_size=16 if layer == 2 else 32,
            asymmetric=layer == 0 or (layer == 3 and expert == 4),
        )

    mixed = write_experts(tmp_path, stored)
    experts = offload(mixed, 12)
    assert len(experts._pools) == 4
    assert same(run(model_over(mixed, experts)), expected(mixed))


def test_resizes_at_any_moment_change_no_bit(on_disk: OnDisk) -> None:
    draw = random.Random(5)
    experts = offload(on_disk, 13)
    model = model_over(on_disk, experts)
    for _ in range(4):
        for logits, wanted in zip(steps(model, fresh_state(model)), expected(on_disk), strict=True):
            assert torch.equal(logits, wanted)
            experts.resize(draw.randint(experts.least_slots, experts.most_slots))


def test_slots_out_of_range_are_refused(golden: OnDisk) -> None:
    experts = offload(golden, 13)
    for slots in (LAYERS - 1, LAYERS * EXPERTS + 1):
        with pytest.raises(SettingsError, match=f"{slots} expert slots: this model can have 4 to"):
            experts.resize(slots)


def test_given_passing_slots_are_not_given_up(golden: OnDisk) -> None:
    experts = offload(golden, 20, passing=6)
    assert experts.least_slots == 7
    while experts.shrink() is not None:
        pass
    assert experts.slots == 7 and experts.stats().passing == 6
    assert same(run(model_over(golden, experts)), expected(golden))


@pytest.mark.parametrize("chunk", [1, 4, 20])
def test_prompts_of_any_chunks_equal_resident_ones(on_disk: OnDisk, chunk: int) -> None:
    models = [model_over(on_disk, experts) for experts in (None, offload(on_disk, 7))]
    logits = [[x.clone() for x in steps(m, fresh_state(m), chunk=chunk)] for m in models]
    assert same(*logits)


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), CheckpointError("the disk"), torch.OutOfMemoryError("full")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("slots", [5, 16])
def test_after_a_failure_at_any_copy_the_run_goes_on_with_the_same_bits(
    on_disk: OnDisk, slots: int, error: BaseException
) -> None:
    disk = Disk(on_disk.checkpoint)
    experts = offload(on_disk, slots, reader=disk)
    model = model_over(on_disk, experts)
    draw = random.Random(slots)
    failures = 0
    disk.error = error
    wanted = expected(on_disk)
    for _ in range(8):
        disk.fails_at = len(disk.reads) + draw.randint(0, 60)
        try:
            got = run(model)
        except type(error):
            failures += 1
        else:
            assert same(got, wanted)
    assert failures >= 3
    disk.fails_at = None
    assert same(run(model), wanted)


def test_an_interrupted_forward_is_repeated_from_the_same_state(quantized: OnDisk) -> None:
    disk = Disk(quantized.checkpoint)
    model = model_over(quantized, offload(quantized, 6, reader=disk))
    state, rows = fresh_state(model), list(range(7))
    resident = model_over(quantized, None)
    disk.fails_at = 11  # in a later wave of the second layer
    with pytest.raises(KeyboardInterrupt):
        model.commit(rows, state)
    assert state.length == 0
    logits = model.commit(rows, state).logits
    assert torch.equal(logits, resident.commit(rows, fresh_state(resident)).logits)


def test_after_its_first_pass_a_block_copies_only_experts_that_are_new_to_it(
    golden: OnDisk,
) -> None:
    experts = offload(golden, 31)
    model = model_over(golden, experts)
    state = fresh_state(model)
    model.commit(list(range(20)), state, kind="prompt")
    block = [model.config.mask_token_id] * 12
    used: set[tuple[int, int]] = set()
    for row in range(5):
        before = experts.stats().copied.records
        output = model.preview(block, state)
        now = {
            (layer, expert)
            for layer, ids in enumerate(output.expert_ids)
            for expert in ids.flatten().tolist()
            if expert >= 0
        }
        copied = experts.stats().copied.records - before
        assert copied <= len(now - used)
        used |= now
        block[row] = 40 + row
    assert used


@pytest.mark.parametrize("policy", [name for name in POLICY_NAMES if name != "static"])
def test_bytes_of_a_block_are_the_cold_misses_of_its_trace(policy: str, demo: OnDisk) -> None:
    slots = 96  # a block here uses at most 84 of the 128 experts
    experts, config = offload(demo, slots, policy=policy), demo.config
    model = model_over(demo, experts)
    state = fresh_state(model)
    forwards: list[Forward] = []
    for tokens in (list(range(20)), *[[config.mask_token_id] * 4] * 6):
        start, used, earlier = state.length, set[tuple[int, int]](), experts.stats().copied
        kinds: tuple[Kind, ...] = (*BLOCK, "commit") if start else ("prompt",)
        for number, kind in enumerate(kinds):
            before = experts.stats().copied.records
            if kind == "preview":
                output = model.preview(tokens, state)
                tokens = [*tokens[:number], start + number, *tokens[number + 1 :]]
            else:
                output = model.commit(tokens, state, kind=kind)
            forward = forward_of(
                output.expert_ids,
                num_experts=config.num_experts,
                kind=kind,
                block=start,
                number=number,
            )
            new = {(int(a), int(b)) for a, b in np.argwhere(forward.rows)} - used
            assert experts.stats().copied.records - before <= len(new)  # none for the second time
            used |= new
            forwards.append(forward)
        trace = RoutingTrace(config.num_hidden_layers, config.num_experts, tuple(forwards))
        replay = simulate(trace, slots=[slots], policies=[policy], profile=profile_for(config))
        misses = sum(count.misses for count in replay[0].counts.values()) - earlier.records
        done = experts.stats()
        assert done.copied.bytes - earlier.bytes == misses * (done.device_bytes // slots)


def test_counts_are_kept_by_kind_of_forward(golden: OnDisk) -> None:
    experts = offload(golden, 14)
    run(model_over(golden, experts))
    stats = experts.stats()
    assert set(stats.traffic) == {"prompt", "preview", "commit"} == set(stats.counts)
    for kind, traffic in stats.traffic.items():
        assert traffic.records == stats.counts[kind].misses
        assert traffic.exposed_ms > 0 == traffic.hidden_ms
    assert stats.total.hits and stats.total.evicted and stats.total.refused
    assert stats.slots == 14 and stats.experts == LAYERS * EXPERTS


def test_an_out_of_memory_step_gives_up_an_eighth_until_nothing_is_left(golden: OnDisk) -> None:
    experts = offload(golden, 32)
    model = model_over(golden, experts)
    wanted = expected(golden)
    lines = []
    for logits, right in zip(steps(model, fresh_state(model)), wanted, strict=True):
        assert torch.equal(logits, right)
        lines.append(experts.shrink())
    freed = shown(4 * 3 * 64 * 32 * 4)
    assert lines[0] == f"out of memory: 28 expert slots instead of 32, {freed} freed"
    while experts.shrink() is not None:
        pass
    assert experts.slots == experts.least_slots
    assert same(run(model), wanted)


def test_a_device_without_room_for_old_and_new_slots_loses_records_but_no_bits(
    quantized: OnDisk,
) -> None:
    experts = offload(quantized, 24)
    model = model_over(quantized, experts)
    model.commit(list(range(20)), fresh_state(model))
    _let_fail(experts, times=1)
    assert experts.shrink() is not None
    assert experts.slots == 21
    assert same(run(model), expected(quantized))
    misses, copied = experts.stats().total.misses, experts.stats().copied.records
    assert copied >= misses


def test_a_step_that_does_not_fit_either_becomes_a_larger_one(quantized: OnDisk) -> None:
    experts = offload(quantized, 24)
    model = model_over(quantized, experts)
    _let_fail(experts, times=4)
    assert experts.shrink() is not None
    assert experts.slots < 21
    assert same(run(model), expected(quantized))


def test_growing_beyond_the_room_keeps_the_size(quantized: OnDisk) -> None:
    experts = offload(quantized, 10)
    model = model_over(quantized, experts)
    model.commit(list(range(20)), fresh_state(model))
    _let_fail(experts, times=2)
    with pytest.raises(SettingsError, match=r"no room .* for 24 expert slots: .* 10 are kept"):
        experts.resize(24)
    assert experts.slots == 10
    assert same(run(model), expected(quantized))


def _let_fail(experts: OffloadedExperts, *, times: int) -> None:
    """The next allocations of slots find no memory."""
    slots = experts._pools[0].slots
    real = slots._empty  # type: ignore[attr-defined]
    left = times

    def empty(count: int) -> Tensor:
        nonlocal left
        left -= 1
        if left >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        found: Tensor = real(count)
        return found

    slots._empty = empty  # type: ignore[attr-defined]


class LateCopies(DirectCopies):
    """Makes copies only when somebody waits for them, as a GPU may."""

    overlaps = True

    def __init__(self, experts: OffloadedExperts) -> None:
        pool = experts._pools[0]
        super().__init__(experts._store, pool.slots)
        self.late: list[tuple[Copy, Traffic]] = []

    def begin(self) -> None:
        self.wait()

    def start(self, copies: Sequence[Copy], *, traffic: Traffic) -> None:
        self.late += [(copy, traffic) for copy in copies]

    def wait(self) -> None:
        while self.late:
            copy, traffic = self.late.pop(0)
            super().start([copy], traffic=traffic)


@pytest.mark.parametrize("slots", [4, 9, 20])
def test_what_is_there_is_computed_while_copies_travel(on_disk: OnDisk, slots: int) -> None:
    experts = offload(on_disk, slots)
    experts._pools[0].copies = LateCopies(experts)
    experts.fill()
    assert same(run(model_over(on_disk, experts)), expected(on_disk))
    assert experts.stats().copied.records == experts.stats().total.misses


def test_tables_of_another_model_are_refused(
    golden: OnDisk, write_random: WriteRandom, odd_config: ModelConfig, tmp_path: Path
) -> None:
    odd = write_random(tmp_path, odd_config)
    tables, store = offload(odd, 9)._tables, offload(golden, 9)._store
    with pytest.raises(ValueError, match="the model has 4"):
        OffloadedExperts(store, tables, device="cpu")
