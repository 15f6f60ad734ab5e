"""What a loaded model really takes of the device, by the names of the memory plan."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor

from clover_local.cache import SequenceState
from clover_local.experts.offloaded import OffloadedExperts
from clover_local.experts.resident import ResidentExperts
from clover_local.kernels.packed import PackedWeight
from clover_local.memory.parts import (
    EMBEDDING,
    HEAD,
    KEYS_VALUES,
    MAPS,
    ROTARY,
    SLOTS,
    SMALL,
    STATE,
    STREAM,
    TRUNK,
    Plan,
)
from clover_local.memory.planner import STATE_SETS
from clover_local.memory.sizes import shown
from clover_local.model.clover import Clover
from clover_local.model.linear import Linear
from clover_local.model.moe import SharedExpert

COUNTED = (SLOTS, MAPS, STREAM, TRUNK, HEAD, EMBEDDING, SMALL, KEYS_VALUES, STATE, ROTARY)
"""The parts that are tensors which stay. The others are reserves for what comes and goes."""
GAP = 0.01
"""Of what was planned: more is worth a line."""


def counted_bytes(model: Clover, state: SequenceState) -> dict[str, int]:
    """Bytes of the model's and the state's tensors; slots, maps and passing slots are one part."""
    layers = [tensors for layer in model.layers for tensors in _tensors(layer)]
    parts = {
        SLOTS: _expert_bytes(model),
        TRUNK: sum(nbytes for kind, nbytes in layers if kind == TRUNK),
        HEAD: sum(_nbytes(weight) for weight in model.head.lm_head.weights),
        EMBEDDING: model.embedding.nbytes if model.embedding.device == model.device else 0,
        SMALL: model.head.norm.nbytes + sum(nbytes for kind, nbytes in layers if kind == SMALL),
        KEYS_VALUES: state.nbytes.keys_values,
        STATE: STATE_SETS * (state.nbytes.recurrent + state.nbytes.conv),
        ROTARY: model.rotary_bytes,
    }
    if any(weight is model.embedding for weight in model.head.lm_head.weights):
        parts[EMBEDDING] = 0  # one tensor
    return parts


def gap(plan: Plan, counted: Mapping[str, int]) -> float:
    """How far the tensors are from the plan, as a share of it: 0.01 = 1 % more."""
    planned = sum(plan.device_parts.get(name, 0) for name in COUNTED)
    return sum(counted.values()) / planned - 1 if planned else 0.0


def gap_line(plan: Plan, counted: Mapping[str, int]) -> str | None:
    """A line for a gap that is worth one."""
    share = gap(plan, counted)
    if abs(share) <= GAP:
        return None
    taken = shown(sum(counted.values()))
    return f"the model takes {taken} of the device, {100 * share:+.1f} % against the plan"


def _expert_bytes(model: Clover) -> int:
    experts = model.experts
    if isinstance(experts, OffloadedExperts):
        return experts.device_bytes
    if isinstance(experts, ResidentExperts):
        slots = sum(slots.records.nbytes + slots.slot_of_expert.nbytes for slots in experts.slots)
        return slots + sum(_nbytes(weight) for weight in experts.weights)
    return 0


def _tensors(part: object) -> Iterator[tuple[str, int]]:
    """(TRUNK or SMALL, bytes) of the tensors that a part of a layer holds, the experts' aside."""
    if isinstance(part, Linear):
        yield from ((TRUNK, _nbytes(weight)) for weight in part.weights)
    elif isinstance(part, SharedExpert) and part.slots is not None:
        yield TRUNK, part.slots.records.nbytes
    elif isinstance(part, Tensor):
        yield SMALL, _nbytes(part)
    elif isinstance(part, list | tuple):
        for each in part:
            yield from _tensors(each)
    elif is_dataclass(part) or type(part).__module__.startswith("clover_local.model."):
        names = [f.name for f in fields(part)] if is_dataclass(part) else list(vars(part))
        for name in names:
            if name not in ("config", "experts"):
                yield from _tensors(getattr(part, name))


def _nbytes(weight: object) -> int:
    if isinstance(weight, PackedWeight):
        return weight.nbytes
    assert isinstance(weight, Tensor)
    return weight.numel() * weight.element_size()
