"""All layers of a model: a slot table for each size of expert record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clover_local.residency.demand import FloatArray, Kind
from clover_local.residency.policies import make_policy
from clover_local.residency.profile import Profile
from clover_local.residency.table import Counts, SlotTable


@dataclass(frozen=True)
class Pool:
    """The layers whose experts have one size."""

    record_bytes: int
    layers: tuple[int, ...]


class SlotPools:
    """A table for each pool."""

    def __init__(
        self,
        pools: Sequence[Pool],
        num_experts: int,
        *,
        slots: Sequence[int],
        policy: str,
        profile: Profile | None = None,
        passing: int | None = None,
        floor: int | None = None,
        permanent: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`slots` as in `split_slots`; the rest as in `SlotTable`, the same for every pool.

        Raises:
            ValueError: see `make_policy` and `SlotTable`.
        """
        self.pools = tuple(pools)
        self.tables = tuple(
            SlotTable(
                pool.layers,
                num_experts,
                slots=count,
                policy=make_policy(
                    policy,
                    layers=len(pool.layers),
                    num_experts=num_experts,
                    prior=_prior(profile, pool),
                ),
                passing=passing,
                floor=floor,
                permanent=[pair for pair in permanent if pair[0] in pool.layers],
            )
            for pool, count in zip(pools, slots, strict=True)
        )

    @property
    def counts(self) -> Mapping[Kind, Counts]:
        """Of all pools together."""
        total: dict[Kind, Counts] = {}
        for table in self.tables:
            for kind, counts in table.counts.items():
                total.setdefault(kind, Counts()).add(counts)
        return total


def pools_of(record_bytes: Sequence[int]) -> tuple[Pool, ...]:
    """The pools of a model, from the record size of each layer; the smallest records first."""
    return tuple(
        Pool(size, tuple(layer for layer, own in enumerate(record_bytes) if own == size))
        for size in sorted(set(record_bytes))
    )


def split_slots(pools: Sequence[Pool], num_experts: int, *, memory: int) -> list[int]:
    """Slots of each pool for `memory` bytes in all: the same share of the experts everywhere.

    Raises:
        ValueError: less memory than one slot of each pool.
    """
    wanted = [pool.record_bytes * len(pool.layers) * num_experts for pool in pools]
    share = min(1.0, memory / sum(wanted))
    slots = [max(1, int(share * len(pool.layers) * num_experts)) for pool in pools]
    least = sum(pool.record_bytes for pool in pools)
    if sum(n * pool.record_bytes for n, pool in zip(slots, pools, strict=True)) > memory:
        if memory < least:
            raise ValueError(f"{memory} bytes of slots, one of each size takes {least}")
        slots = [1] * len(pools)
    return slots


def _prior(profile: Profile | None, pool: Pool) -> FloatArray | None:
    return None if profile is None else profile.shares[list(pool.layers)]
