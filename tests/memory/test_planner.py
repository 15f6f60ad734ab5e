"""Where a plan puts everything, and what it says when it does not fit."""

from dataclasses import replace

import pytest
import torch

from clover_local.cache import SequenceState
from clover_local.checkpoint.summary import RecordSize
from clover_local.config import ModelConfig
from clover_local.errors import SettingsError
from clover_local.memory import parts
from clover_local.memory.model_bytes import Formats, ModelBytes, from_config
from clover_local.memory.parts import Budget, Plan
from clover_local.memory.planner import (
    CUDA_RESERVE,
    RING_BYTES,
    least_device_bytes,
    least_host_bytes,
    plan,
)
from clover_local.memory.sizes import GIB, MIB

TARGET = Budget(device=15360 * MIB, host=30 * GIB, context=8192)
DEMO = Budget(device=GIB, host=8 * GIB, context=4096)


def small_cap(model: ModelBytes, slots: int, *, context: int = 4096) -> Budget:
    """A budget that leaves `slots` experts a layer."""
    budget = replace(DEMO, context=context)
    least = least_device_bytes(model, replace(budget, prefill_rows=256))
    more = slots - model.config.num_experts_per_tok
    return replace(budget, device=least + more * sum(model.slot_bytes), prefill_rows=256)


@pytest.fixture(scope="module")
def golden_model(golden_config: ModelConfig, plain: Formats) -> ModelBytes:
    return from_config(golden_config, plain)


@pytest.mark.parametrize(("context", "percent"), [(8192, 78), (32768, 75)])
def test_the_real_model_has_the_residency_of_the_specification(
    real_model: ModelBytes, context: int, percent: float
) -> None:
    made = plan(real_model, replace(TARGET, context=context))
    assert made.fits
    assert 100 * made.resident_share == pytest.approx(percent, abs=1)
    found = made.device_parts
    other = (parts.WORKSPACE, parts.GRAPHS, parts.STREAM, parts.CONTEXT)
    assert sum(found[name] for name in other) == pytest.approx(0.9e9, rel=0.05)
    assert found[parts.KEYS_VALUES] == 20_480 * context
    assert found[parts.STATE] == 2 * 65_863_680
    assert found[parts.SLOTS] == made.slots * 1_622_016
    assert made.advice == ()


def test_pinned_experts_are_at_most_45_percent_of_all_on_the_target(
    real_model: ModelBytes,
) -> None:
    made = plan(real_model, TARGET)
    assert made.host_parts[parts.OFF_DEVICE] <= 0.45 * real_model.experts
    assert made.pinned_bytes == made.host_parts[parts.OFF_DEVICE] + real_model.embedding
    assert set(made.permanent_per_layer) == {141}


def test_a_plan_uses_the_device_to_the_last_slot(real_model: ModelBytes) -> None:
    made = plan(real_model, TARGET)
    assert 0 <= TARGET.device - made.device_bytes < max(real_model.slot_bytes) + MIB
    assert max(made.slots_per_layer) - min(made.slots_per_layer) <= 1
    assert made.floor == 70


def test_a_model_that_fits_whole_streams_nothing_and_pins_no_expert(
    golden_model: ModelBytes,
) -> None:
    made = plan(golden_model, DEMO)
    assert made.slots_per_layer == made.permanent_per_layer == (8,) * 4
    assert made.resident_share == 1
    assert parts.STREAM not in made.device_parts
    assert parts.OFF_DEVICE not in made.host_parts
    assert made.pinned_bytes == golden_model.embedding


@pytest.mark.parametrize("slots", range(2, 9))
def test_every_number_of_slots_can_be_planned_for(golden_model: ModelBytes, slots: int) -> None:
    budget = small_cap(golden_model, slots)
    made = plan(golden_model, budget)
    assert made.device_bytes <= budget.device
    if slots < 8:  # without streaming buffers, all fit a little earlier
        assert set(made.slots_per_layer) <= {slots, 8}
    assert made.floor == min(made.slots_per_layer)


def test_more_memory_never_means_fewer_slots_and_more_context_never_more(
    real_model: ModelBytes,
) -> None:
    caps = [plan(real_model, replace(TARGET, device=gib * GIB)).slots for gib in range(4, 33, 2)]
    assert caps == sorted(caps)
    contexts = [1, 1000, 4096, 8192, 32768, 131072]
    slots = [plan(real_model, replace(TARGET, context=n)).slots for n in contexts]
    assert slots == sorted(slots, reverse=True)


def test_layers_with_larger_experts_have_the_same_share_of_slots(
    golden_model: ModelBytes,
) -> None:
    (size,) = golden_model.records[0]
    wide = RecordSize(2 * size.bytes, 8)
    uneven = replace(golden_model, records=((wide,), *golden_model.records[1:]))
    made = plan(uneven, small_cap(uneven, 5))
    assert set(made.slots_per_layer) == {5}
    assert made.device_parts[parts.SLOTS] == 5 * (2 + 3) * size.bytes
    assert made.resident_share == pytest.approx(5 / 8)


def test_slots_for_mixed_experts_are_counted_at_their_average(golden_model: ModelBytes) -> None:
    (size,) = golden_model.records[0]
    mixed = (RecordSize(2 * size.bytes, 4), RecordSize(size.bytes, 4))
    uneven = replace(golden_model, records=(mixed,) * 4)
    made = plan(uneven, small_cap(uneven, 4))
    assert made.device_parts[parts.SLOTS] == 4 * 4 * 2 * size.bytes
    assert made.resident_share == pytest.approx(0.5)


def test_one_byte_less_than_the_least_is_refused_with_the_least(golden_model: ModelBytes) -> None:
    least = least_device_bytes(golden_model, DEMO)
    assert plan(golden_model, replace(DEMO, device=least)).fits
    made = plan(golden_model, replace(DEMO, device=least - 1))
    assert not made.fits
    assert made.slots_per_layer == ()
    assert (made.resident_share, made.slots) == (0, 0)
    with pytest.raises(SettingsError, match=r"does not fit .* pass --context 2048 or give it"):
        made.require_fit()


def test_a_model_whose_rows_use_all_experts_fits_whole_or_not_at_all(
    golden_model: ModelBytes,
) -> None:
    dense = replace(golden_model, config=replace(golden_model.config, num_experts_per_tok=8))
    least = least_device_bytes(dense, replace(DEMO, prefill_rows=256))
    made = plan(dense, replace(DEMO, device=least, prefill_rows=256))
    assert made.resident_share == 1
    assert made.device_bytes == least
    assert not plan(dense, replace(DEMO, device=least - 1, prefill_rows=256)).fits


@pytest.mark.parametrize("device", [0, 1, CUDA_RESERVE, CUDA_RESERVE + MIB])
def test_a_device_that_is_far_too_small_is_refused_without_a_context(
    real_model: ModelBytes, device: int
) -> None:
    made = plan(real_model, replace(TARGET, device=device))
    assert made.problem is not None
    (remedy,) = made.advice
    assert "on the device (--gpu-memory)" in remedy


def test_a_smaller_context_that_fits_is_named_and_does_fit(real_model: ModelBytes) -> None:
    budget = replace(TARGET, device=4 * GIB, context=131072)
    made = plan(real_model, budget)
    assert not made.fits
    context = int(made.advice[0].removeprefix("pass --context "))
    assert plan(real_model, replace(budget, context=context)).fits
    assert not plan(real_model, replace(budget, context=2 * context)).fits


def test_the_memory_that_a_refusal_names_is_enough(real_model: ModelBytes) -> None:
    budget = replace(TARGET, device=0, host=0)
    (remedy,) = plan(real_model, budget).advice
    device, host = (int(word.removesuffix("MiB")) for word in remedy.split() if "MiB" in word)
    assert plan(real_model, replace(budget, device=device * MIB, host=host * MIB)).fits
    assert not plan(real_model, replace(budget, device=(device - 1) * MIB, host=host * MIB)).fits


def test_no_host_memory_is_refused_with_what_is_needed(real_model: ModelBytes) -> None:
    made = plan(real_model, replace(TARGET, host=0))
    assert made.problem is not None
    assert "0 B of host memory" in made.problem
    assert made.advice == ("give it at least 3073MiB of free host memory (--ram)",)


def test_the_least_host_memory_stages_every_expert_through_the_ring(
    real_model: ModelBytes,
) -> None:
    host = least_host_bytes(real_model, TARGET)
    made = plan(real_model, replace(TARGET, host=host))
    assert made.fits
    assert made.host_bytes == host
    assert made.host_parts[parts.RING] == RING_BYTES
    assert made.disk_bytes == made.staged_bytes > 0
    assert any("come from the disk" in line for line in made.advice)


def test_what_a_pin_limit_keeps_from_being_pinned_is_staged(real_model: ModelBytes) -> None:
    made = plan(real_model, replace(TARGET, pin_limit=4 * GIB))
    assert made.pinned_bytes <= 4 * GIB
    assert made.staged_bytes > 0
    assert made.disk_bytes == 0
    assert "for lack of --pin-limit" in made.advice[0]


def test_with_nothing_pinned_everything_still_has_its_place(real_model: ModelBytes) -> None:
    made = plan(real_model, replace(TARGET, pin_limit=0))
    assert made.fits
    assert made.pinned_bytes == 0
    assert made.host_parts[parts.EMBEDDING] == real_model.embedding


def test_a_quarter_of_host_memory_is_never_pinned_by_default(
    real_config: ModelConfig, plain: Formats
) -> None:
    made = plan(from_config(real_config, plain), TARGET)
    assert made.pinned_bytes <= 0.75 * TARGET.host


def test_an_embedding_on_the_device_takes_the_room_of_experts(real_model: ModelBytes) -> None:
    made = plan(real_model, replace(TARGET, embedding_on_host=False))
    assert made.device_parts[parts.EMBEDDING] == real_model.embedding
    assert parts.EMBEDDING not in made.host_parts
    assert made.slots < plan(real_model, TARGET).slots


def test_without_cuda_there_are_neither_graphs_nor_a_context(golden_model: ModelBytes) -> None:
    made = plan(golden_model, replace(DEMO, cuda=False))
    assert not {parts.GRAPHS, parts.CONTEXT} & made.device_parts.keys()


def test_a_card_that_is_nearly_full_takes_prompts_in_smaller_chunks(
    real_model: ModelBytes,
) -> None:
    least = least_device_bytes(real_model, TARGET)
    assert plan(real_model, replace(TARGET, device=least)).prefill_rows == 256
    assert plan(real_model, TARGET).prefill_rows == 2048
    assert plan(real_model, replace(TARGET, prefill_rows=512)).prefill_rows == 512
    assert plan(real_model, replace(TARGET, context=100)).prefill_rows == 100


def test_few_slots_are_said_to_cost_copies_in_every_pass(real_model: ModelBytes) -> None:
    made = plan(real_model, replace(TARGET, device=6 * GIB))
    assert min(made.slots_per_layer) < 70
    assert made.floor == min(made.slots_per_layer)
    assert "uses about 70 experts" in made.advice[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 0}, "context 0, the model has 1 to 131072"),
        ({"context": 131073}, "context 131073"),
        ({"prefill_rows": 0}, "prefill_rows 0"),
        ({"device": -1}, "device -1"),
        ({"pin_limit": -1}, "pin_limit -1"),
    ],
    ids=str,
)
def test_a_budget_that_makes_no_sense_is_a_wrong_call(
    real_model: ModelBytes, change: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan(real_model, replace(TARGET, **change))  # type: ignore[arg-type]


def test_keys_values_and_state_are_those_of_the_cache(
    odd_config: ModelConfig, plain: Formats
) -> None:
    model = from_config(odd_config, plain, number_bytes=4)
    made = plan(model, replace(DEMO, context=300))
    state = SequenceState(odd_config, context=300, device="cpu", dtype=torch.float32)
    state.reserve(300)
    counted = state.nbytes
    assert made.device_parts[parts.KEYS_VALUES] == counted.keys_values
    assert made.device_parts[parts.STATE] == 2 * (counted.recurrent + counted.conv)
    assert made.host_parts[parts.CHECKPOINT_PART] == parts.CHECKPOINTS * model.state


def test_the_parts_are_the_sums(real_model: ModelBytes) -> None:
    made: Plan = plan(real_model, TARGET)
    values = made.to_json()
    listed = values["parts"]
    assert isinstance(listed, list)
    assert sum(part["bytes"] for part in listed) == made.device_bytes + made.host_bytes
    assert values["slots"] == sum(made.slots_per_layer)
    assert made.host_bytes <= TARGET.host
