"""From a memory plan to offloaded experts: tables, and who is placed and pinned first."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from clover_local.experts.offloaded import OffloadedExperts
from clover_local.experts.pinned import Allocate, HostRecords, pinned
from clover_local.experts.store import ExpertStore, Key
from clover_local.memory.parts import OFF_DEVICE, RING, STREAM, Plan
from clover_local.residency.names import DEFAULT_POLICY
from clover_local.residency.pools import SlotPools, pools_of
from clover_local.residency.profile import Profile


def offload(
    store: ExpertStore,
    plan: Plan,
    *,
    device: torch.device | str,
    policy: str = DEFAULT_POLICY,
    profile: Profile | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_note: Callable[[str], None] = lambda line: None,
    allocate: Allocate = pinned,
) -> OffloadedExperts:
    """Makes the slots of a plan and fills them.

    Args:
        store: of the checkpoint, made for `device`.
        plan: one that fits, of this model.
        device: where the slots are.
        policy: who may stay.
        profile: of an earlier run: its most used experts are placed first, and for good as far as
            the plan has permanent ones; without it those of the lowest numbers.
        on_progress: as in `OffloadedExperts.fill`.
        on_note: hears what a user should know of pinned memory, once.
        allocate: takes pinned memory.

    Raises:
        CheckpointError: a file cannot be read.
        ValueError: an unknown policy, or a plan of another model.
        torch.OutOfMemoryError: the slots do not fit.
    """
    order = by_use(store, profile)
    permanent = permanent_of(plan, order)
    tables = _tables(store, plan, policy=policy, profile=profile, permanent=permanent)
    first = list(dict.fromkeys([*permanent, *order]))
    host = None
    if torch.device(device).type == "cuda":
        host = HostRecords(
            store,
            off_device(
                first, permanent=len(permanent), slots=sum(table.slots for table in tables.tables)
            ),
            pin_bytes=plan.host_parts.get(OFF_DEVICE, 0),
            ring_bytes=plan.host_parts.get(RING, 0),
            allocate=allocate,
        )
        if host.note is not None:
            on_note(host.note)
    experts = OffloadedExperts(store, tables, device=device, host=host)
    experts.fill(first, on_progress=on_progress)
    return experts


def _tables(
    store: ExpertStore,
    plan: Plan,
    *,
    policy: str,
    profile: Profile | None,
    permanent: Sequence[Key],
) -> SlotPools:
    """The tables of the planned slots; what the plan gives to streaming become passing ones."""
    pools = pools_of(store.record_bytes)
    passing = plan.device_parts.get(STREAM, 0) // sum(pool.record_bytes for pool in pools)
    if all(count == store.num_experts for count in plan.slots_per_layer):
        passing = 0  # nothing streams
    slots = []
    for pool in pools:
        planned = sum(plan.slots_per_layer[layer] for layer in pool.layers)
        slots.append(min(planned + passing, len(pool.layers) * store.num_experts))
    return SlotPools(
        pools,
        store.num_experts,
        slots=slots,
        policy=policy,
        profile=profile,
        passing=passing if 0 < passing < min(slots) else None,
        floor=plan.floor,
        permanent=permanent,
    )


def by_use(store: ExpertStore, profile: Profile | None) -> list[Key]:
    """Every (layer, expert), the most used first, then the lowest numbers of all layers."""
    keys = store.keys
    if profile is None:
        return keys
    uses = np.array([profile.uses[key] for key in keys])
    return [keys[place] for place in np.argsort(-uses, kind="stable").tolist()]


def permanent_of(plan: Plan, order: Sequence[Key]) -> list[Key]:
    """The first of `order` in each layer, as many as the plan makes permanent there."""
    left = list(plan.permanent_per_layer)
    chosen = []
    for layer, expert in order:
        if left[layer] > 0:
            left[layer] -= 1
            chosen.append((layer, expert))
    return chosen


def off_device(first: Sequence[Key], *, permanent: int, slots: int) -> list[Key]:
    """Who should be pinned, most urgent first: what starts without a slot, then what may lose it.

    `first` begins with the permanent ones, which never need a copy.
    """
    return [*first[slots:], *reversed(first[permanent:slots])]
