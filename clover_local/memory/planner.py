"""What of a model goes to the device and what stays with the host: plain arithmetic.

Everything but the routed experts has a fixed size; the rest of the device becomes expert slots. A
part of the slots is permanent: its experts need no copy in pinned host memory. The others are for
whatever the text needs. Nothing here asks the machine: the same budget gives the same plan.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from clover_local.memory.advice import advice
from clover_local.memory.model_bytes import ModelBytes
from clover_local.memory.parts import (
    CHECKPOINT_PART,
    CONTEXT,
    DEVICE,
    EMBEDDING,
    GRAPHS,
    HEAD,
    HOST,
    KEYS_VALUES,
    LEAST_CONTEXT,
    MAPS,
    OFF_DEVICE,
    PROGRAM,
    RING,
    ROTARY,
    SLOTS,
    SMALL,
    STATE,
    STREAM,
    TRUNK,
    WORKSPACE,
    Budget,
    Part,
    Plan,
    held_bytes,
)
from clover_local.memory.sizes import MIB, shown, shown_mib
from clover_local.memory.working_set import preview_experts
from clover_local.memory.workspace import (
    PREFILL_CHOICES,
    graph_pool,
    pick_workspace,
    prompt_workspace,
)

CUDA_RESERVE = 448 * MIB
"""The CUDA context with its kernels, and what the allocator cannot use; assumed, not measured."""
STATE_SETS = 2
"""A commit reads one set of recurrent and conv states and writes the other."""
STREAM_SHARE = 8
"""Each of the two buffers through which a prompt's missing experts come holds an eighth of a layer:
32 records of the real model."""
RING_BYTES = 64 * MIB
"""Pinned memory for records that are not pinned themselves."""
PERMANENT_SHARE = 0.55
"""Of each layer's experts, as far as slots allow: so pinned memory is at most 45 % of all."""
PIN_SHARE = 0.75
"""Of host memory that may be pinned where no limit is given: other programs need some too."""
MAP_BYTES = 4  # of an entry: the slot of an expert, the expert of a slot
_CONTEXTS = tuple(1 << power for power in range(20, 9, -1))


def plan(model: ModelBytes, budget: Budget) -> Plan:
    """Where everything goes. A model that does not fit gives a plan that says why, and no error.

    Raises:
        ValueError: a context, a limit or a number of rows that is not positive.
    """
    _check(model, budget)
    made = _place(model, budget)
    if not made.fits:
        return replace(made, advice=_remedies(model, budget))
    return replace(made, advice=advice(made))


def least_device_bytes(model: ModelBytes, budget: Budget) -> int:
    """The smallest device on which the model runs in this context."""
    rows = _rows(budget)
    streamed = sum(part.bytes for part in _fixed(model, budget, rows[-1], streams=True))
    whole = sum(part.bytes for part in _fixed(model, budget, rows[0], streams=False))
    return min(
        streamed + sum(model.slot_bytes) * _least_slots(model),
        whole + _slots_bytes(model, _most_slots(model)),
    )


def least_host_bytes(model: ModelBytes, budget: Budget) -> int:
    """The least host memory with which the model runs: nothing pinned but embedding and ring."""
    return _host_bytes(_host(model, budget, ring=min(RING_BYTES, model.experts)))


def _check(model: ModelBytes, budget: Budget) -> None:
    most = model.config.max_position_embeddings
    if not 1 <= budget.context <= most:
        raise ValueError(f"context {budget.context}, the model has 1 to {most}")
    if budget.prefill_rows is not None and budget.prefill_rows < 1:
        raise ValueError(f"prefill_rows {budget.prefill_rows}, at least 1 is needed")
    for name in ("device", "host", "pin_limit", "checkpoints", "program", "slots", "pick_rows"):
        if (getattr(budget, name) or 0) < 0:
            raise ValueError(f"{name} {getattr(budget, name)}, at least 0 is needed")


def _place(model: ModelBytes, budget: Budget) -> Plan:
    """The plan without advice."""
    rows, fixed = _fitting(model, budget)
    room = budget.device - sum(part.bytes for part in fixed)
    slots = _spread(model, room)
    if budget.slots is not None:
        if budget.slots > sum(slots):
            problem = (
                f"{budget.slots} expert slots do not fit into {shown(budget.device)} on the device "
                f"with a context of {budget.context}, which has room for {sum(slots)}"
            )
            return Plan(model, budget, fixed, rows, problem=problem)
        slots = _evenly(model, budget.slots)
    elif min(slots) < _least_slots(model):
        have, need = shown(budget.device), shown(least_device_bytes(model, budget))
        problem = (
            f"the model does not fit into {have} on the device with a context of {budget.context}: "
            f"it needs {need} for {_least_slots(model)} experts a layer"
        )
        return Plan(model, budget, fixed, rows, problem=problem)
    device = (
        Part(SLOTS, DEVICE, _slots_bytes(model, slots)),
        *(part if part.name != MAPS else _maps(model, sum(slots)) for part in fixed),
    )
    return _with_host(Plan(model, budget, device, rows, slots, floor=_floor(model, slots)))


def _fitting(model: ModelBytes, budget: Budget) -> tuple[int, tuple[Part, ...]]:
    """The prompt's rows, and the parts of fixed size with them."""
    rows = _rows(budget)
    whole = _fixed(model, budget, rows[0], streams=False)
    room = budget.device - sum(part.bytes for part in whole)
    if room >= _slots_bytes(model, _most_slots(model)):
        return rows[0], whole
    for choice in rows:
        fixed = _fixed(model, budget, choice, streams=True)
        room = budget.device - sum(part.bytes for part in fixed)
        if room >= sum(model.slot_bytes) * _least_slots(model):
            break
    return choice, fixed


def _rows(budget: Budget) -> list[int]:
    """Chunks to try, no longer than the context."""
    choices: Sequence[int] = PREFILL_CHOICES
    if budget.prefill_rows is not None:
        choices = (budget.prefill_rows,)
    return sorted({min(choice, budget.context) for choice in choices}, reverse=True)


def _fixed(model: ModelBytes, budget: Budget, rows: int, *, streams: bool) -> tuple[Part, ...]:
    """All on the device but the slots; the maps as large as they can become."""
    config, number = model.config, model.number_bytes
    stream = 2 * max(1, config.num_experts // STREAM_SHARE) * max(model.slot_bytes)
    workspace = max(  # a prompt has no picks
        prompt_workspace(config, rows=rows, number_bytes=number),
        pick_workspace(config, rows=budget.pick_rows),
    )
    sizes = [
        (MAPS, _maps(model, sum(_most_slots(model))).bytes),
        (TRUNK, model.trunk),
        (HEAD, model.head),
        (EMBEDDING, 0 if budget.embedding_on_host else model.embedding),
        (SMALL, model.small),
        (KEYS_VALUES, budget.context * model.token),
        (STATE, STATE_SETS * model.state),
        (ROTARY, budget.context * config.rotary_dim * 4),
        (WORKSPACE, workspace),
        (GRAPHS, graph_pool(config, number_bytes=number) if budget.cuda else 0),
        (STREAM, stream if streams else 0),
        (CONTEXT, CUDA_RESERVE if budget.cuda else 0),
    ]
    return tuple(Part(name, DEVICE, nbytes) for name, nbytes in sizes if nbytes)


def _maps(model: ModelBytes, slots: int) -> Part:
    layers, experts = model.config.num_hidden_layers, model.config.num_experts
    return Part(MAPS, DEVICE, MAP_BYTES * (layers * experts + slots))


def _spread(model: ModelBytes, room: int) -> tuple[int, ...]:
    """Slots of each layer: the same number, and one more as long as there is room."""
    most, sizes = model.config.num_experts, model.slot_bytes
    each = max(0, min(most, room // sum(sizes)))
    left = room - each * sum(sizes)
    slots = []
    for size in sizes:
        more = each < most and left >= size
        left -= size if more else 0
        slots.append(each + more)
    return tuple(slots)


def _evenly(model: ModelBytes, count: int) -> tuple[int, ...]:
    """`count` slots over the layers, the first ones with one more where it does not divide."""
    layers = model.config.num_hidden_layers
    return tuple(count // layers + (layer < count % layers) for layer in range(layers))


def _most_slots(model: ModelBytes) -> tuple[int, ...]:
    return (model.config.num_experts,) * model.config.num_hidden_layers


def _least_slots(model: ModelBytes) -> int:
    """What the one row of an AR token needs at once."""
    return model.config.num_experts_per_tok


def _floor(model: ModelBytes, slots: Sequence[int]) -> int:
    """What other layers leave a layer: a pass's experts, or all it has where that is less."""
    return min(ceil(preview_experts(model.config)), *slots)


def _slots_bytes(model: ModelBytes, slots: Sequence[int]) -> int:
    return sum(size * count for size, count in zip(model.slot_bytes, slots, strict=True))


def _with_host(made: Plan) -> Plan:
    """The plan with its host memory: what is pinned, and what travels through the ring."""
    model, budget = made.model, made.budget
    permanent = tuple(_permanent(model, count) for count in made.slots_per_layer)
    off_device = model.experts - round(held_bytes(model, permanent))
    ring = min(RING_BYTES, off_device)
    room = budget.host - _host_bytes(_host(model, budget))
    if room < ring:
        problem = (
            f"the model does not fit into {shown(budget.host)} of host memory: "
            f"it needs {shown(least_host_bytes(model, budget))} besides the memory map"
        )
        return replace(made, parts=(*made.parts, *_host(model, budget)), problem=problem)
    most = min(room, _pinnable(model, budget))
    ring = ring if most < off_device else 0
    pinned = max(0, min(off_device, most - ring))
    staged = off_device - pinned
    host = _host(model, budget, ring=ring, pinned=pinned)
    return replace(
        made,
        parts=(*made.parts, *host),
        permanent_per_layer=permanent,
        staged_bytes=staged,
        disk_bytes=max(0, staged - (budget.host - _host_bytes(host))),
    )


def _pinnable(model: ModelBytes, budget: Budget) -> int:
    """What the limit leaves for experts once the embedding is pinned."""
    embedding = model.embedding if budget.embedding_on_host else 0
    return max(0, _pin_limit(budget) - embedding)


def _pin_limit(budget: Budget) -> int:
    return int(PIN_SHARE * budget.host) if budget.pin_limit is None else budget.pin_limit


def _permanent(model: ModelBytes, slots: int) -> int:
    """Slots of a layer that keep their expert: the target, as long as half a pass's experts have
    others; all where no expert is missing."""
    count = model.config.num_experts
    if slots == count:
        return count
    changing = ceil(preview_experts(model.config) / 2)
    return max(0, min(ceil(PERMANENT_SHARE * count), slots - changing))


def _host(model: ModelBytes, budget: Budget, *, ring: int = 0, pinned: int = 0) -> tuple[Part, ...]:
    embedding = model.embedding if budget.embedding_on_host else 0
    limit = _pin_limit(budget)
    parts = (
        Part(EMBEDDING, HOST, embedding, pinned=embedding + ring <= limit),
        Part(OFF_DEVICE, HOST, pinned, pinned=True),
        Part(RING, HOST, ring, pinned=ring <= limit),
        Part(CHECKPOINT_PART, HOST, budget.checkpoints * model.state),
        Part(PROGRAM, HOST, budget.program),
    )
    return tuple(part for part in parts if part.bytes)


def _host_bytes(parts: tuple[Part, ...]) -> int:
    return sum(part.bytes for part in parts)


def _remedies(model: ModelBytes, budget: Budget) -> tuple[str, ...]:
    """What would make a model fit that does not."""
    shorter = (
        replace(budget, context=context)
        for context in _CONTEXTS
        if LEAST_CONTEXT <= context < budget.context
    )
    found = next((each.context for each in shorter if _place(model, each).fits), None)
    remedies = [] if found is None else [f"pass --context {found}"]
    if budget.slots is not None:
        remedies.append("pass fewer --expert-slots")
    least = least_device_bytes(model, budget), least_host_bytes(model, budget)
    missing = []
    if budget.device < least[0]:
        missing.append(f"{shown_mib(least[0])} on the device (--gpu-memory)")
    if budget.host < least[1]:
        missing.append(f"{shown_mib(least[1])} of free host memory (--ram)")
    if missing:
        remedies.append(f"give it at least {' and '.join(missing)}")
    return tuple(remedies)
