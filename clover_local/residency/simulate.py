"""Replays a trace through the slot table of the runtime, and through Belady's rule."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from clover_local.residency.belady import belady
from clover_local.residency.demand import Demand
from clover_local.residency.names import POLICY_NAMES
from clover_local.residency.policies import make_policy
from clover_local.residency.profile import Profile, profile_of
from clover_local.residency.table import Counts, SlotTable
from clover_local.residency.trace import RoutingTrace

Phase: TypeAlias = Literal["first", "later", "commit", "prompt"]
PHASES: tuple[Phase, ...] = ("first", "later", "commit", "prompt")


@dataclass(frozen=True)
class Replay:
    """What one policy did on a trace with one number of slots, from an empty cache."""

    policy: str
    slots: int
    share: float
    """Slots by experts of the model."""
    counts: dict[Phase, Counts]
    blocks: int
    previews: int
    belady: int
    """Misses of Belady's rule within the table's bounds, previews and commits."""
    optimum: int
    """Fewest misses that any order of these slots could have."""

    @property
    def misses(self) -> int:
        """Of previews and commits."""
        return sum(counts.misses for phase, counts in self.counts.items() if phase != "prompt")

    @property
    def misses_per_block(self) -> float:
        """Of previews and commits: records copied from the host for each block."""
        return self.misses / max(self.blocks, 1)

    @property
    def ratio(self) -> float:
        """Misses by Belady's; 1 where there are none at all."""
        return self.misses / self.belady if self.belady else 1.0

    def preview_seconds(self, record_bytes: int, *, link: float, bandwidth: float) -> float | None:
        """Seconds that a preview's experts take: all read on the device, the missing copied first.

        Nothing is hidden: copies and reads are added. None without previews.
        """
        if not self.previews:
            return None
        counts = [self.counts[phase] for phase in ("first", "later") if phase in self.counts]
        misses = sum(each.misses for each in counts)
        used = misses + sum(each.hits for each in counts)
        return record_bytes * (misses / link + used / bandwidth) / self.previews


def simulate(
    trace: RoutingTrace,
    *,
    slots: Sequence[int],
    policies: Iterable[str] = POLICY_NAMES,
    profile: Profile | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Replay]:
    """A replay for every number of slots and policy.

    Args:
        profile: of another run, for every policy to start from; without it, `static` knows the
            trace's own profile, which no run could.

    Raises:
        ValueError: an unknown policy, or no slots.
    """
    names = list(policies)
    demands = list(trace.demands())
    own = profile_of(trace)
    replays: list[Replay] = []
    for count in slots:
        optimum = belady(trace, kept=min(count, trace.layers * trace.experts)).decode
        bounded: int | None = None
        for name in names:
            known = own if profile is None and name == "static" else profile
            table = SlotTable(
                range(trace.layers),
                trace.experts,
                slots=count,
                policy=make_policy(
                    name,
                    layers=trace.layers,
                    num_experts=trace.experts,
                    prior=None if known is None else known.shares,
                ),
            )
            if bounded is None:
                bounded = belady(trace, kept=table.kept, floor=table.floor, protect=True).decode
            replays.append(
                Replay(
                    policy=name,
                    slots=count,
                    share=count / (trace.layers * trace.experts),
                    counts=replay(demands, table),
                    blocks=len({f.block for f in trace.forwards if f.kind != "prompt"}),
                    previews=sum(forward.kind == "preview" for forward in trace.forwards),
                    belady=bounded,
                    optimum=optimum,
                )
            )
            on_progress(len(replays), len(slots) * len(names))
    return replays


def replay(demands: Iterable[Demand], table: SlotTable) -> dict[Phase, Counts]:
    """Runs demands through a table; its counts by phase, those that occur."""
    counts: dict[Phase, Counts] = {phase: Counts() for phase in PHASES}
    for demand in demands:
        admission = table.admit(demand)
        counts[phase_of(demand)].add(
            Counts(admission.hits, admission.misses, admission.refused, len(admission.evicted))
        )
    return {phase: each for phase, each in counts.items() if each.hits + each.misses}


def phase_of(demand: Demand) -> Phase:
    """Where in its block a demand is made."""
    if demand.kind == "preview":
        return "later" if demand.number else "first"
    return demand.kind
