"""`clover-local simulate`: a recorded run again, with other cache policies and sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clover_local.cli import console
from clover_local.cli.options import JsonOpt, QuietOpt, TraceArg, require_plot
from clover_local.errors import SettingsError
from clover_local.memory.sizes import parse_rate, parse_size, shown
from clover_local.residency.names import POLICY_NAMES

if TYPE_CHECKING:
    from clover_local.residency.simulate import Phase, Replay
    from clover_local.residency.trace import RoutingTrace

SizesOpt = Annotated[
    str, typer.Option(metavar="25%,50%,...", help="Cache sizes: % of all experts, or slots.")
]
PolicyOpt = Annotated[
    str | None,
    typer.Option(metavar="|".join(POLICY_NAMES), help="Some, by comma; default all."),
]
ProfileOpt = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A run's profile, with which every policy starts."),
]
SaveProfileOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write how often TRACE used each expert, for --expert-profile."
    ),
]
RecordBytesOpt = Annotated[
    str,
    typer.Option(metavar="SIZE", help="Of one expert; the default is INT4 with groups of 128."),
]
LinkOpt = Annotated[str, typer.Option(metavar="52GB/s", help="Rate from host memory to the card.")]
BandwidthOpt = Annotated[str, typer.Option(metavar="896GB/s", help="Rate of the card's memory.")]
PlotOpt = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw hits and misses by size: .png or .svg.")
]

_COLUMNS: tuple[tuple[str, Phase], ...] = (
    ("first", "first"),
    ("later", "later"),
    ("commits", "commit"),
    ("prompts", "prompt"),
)


def simulate(
    trace: TraceArg,
    sizes: SizesOpt = "25%,50%,75%",
    policy: PolicyOpt = None,
    profile: ProfileOpt = None,
    save_profile: SaveProfileOpt = None,
    record_bytes: RecordBytesOpt = "1.622MB",
    link: LinkOpt = "52GB/s",
    bandwidth: BandwidthOpt = "896GB/s",
    plot: PlotOpt = None,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Replay the routing of TRACE through expert caches of other policies and sizes."""
    from clover_local.residency import plot as chart  # numpy loads only when there is work
    from clover_local.residency import profile as profiles
    from clover_local.residency import simulate as library
    from clover_local.residency.trace import read_trace

    if plot is not None:
        require_plot(plot)
    names = _policies(policy)
    record = parse_size(record_bytes, "--record-bytes")
    rates = parse_rate(link, "--link"), parse_rate(bandwidth, "--bandwidth")
    if not (record and all(rates)):
        raise SettingsError("--record-bytes, --link and --bandwidth must be more than 0")
    known = None if profile is None else profiles.load_profile(profile)
    recorded = read_trace(trace)
    if known is not None:
        known.require_fit(recorded.layers, recorded.experts)
    slots = _slots(sizes, recorded)
    if save_profile is not None:
        profiles.save_profile(profiles.profile_of(recorded), save_profile)
    with console.progress(f"replaying {trace}") as on_progress:
        replays = library.simulate(
            recorded, slots=slots, policies=names, profile=known, on_progress=on_progress
        )
    if plot is not None:
        chart.draw(replays, plot, title=trace.name)
    seconds = [each.preview_seconds(record, link=rates[0], bandwidth=rates[1]) for each in replays]
    if as_json:
        found = zip(replays, seconds, strict=True)
        console.print_json(
            {
                "layers": recorded.layers,
                "experts": recorded.experts,
                "record_bytes": record,
                "replays": [_json(each, second, record) for each, second in found],
            }
        )
        return
    _show(recorded, replays, seconds, record)
    if "static" in names and known is None:
        console.note("static knows this trace's own profile, which no run could: pass --profile")


def _policies(given: str | None) -> list[str]:
    names = list(POLICY_NAMES) if given is None else [name.strip() for name in given.split(",")]
    for name in names:
        if name not in POLICY_NAMES:
            raise SettingsError(f"--policy {name} is unknown: use {', '.join(POLICY_NAMES)}")
    return list(dict.fromkeys(names))


def _slots(given: str, trace: RoutingTrace) -> list[int]:
    """Slots from `25%,50%,2000`."""
    every = trace.layers * trace.experts
    found = []
    for text in given.split(","):
        match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(%?)\s*", text)
        if match is None or (not match[2] and "." in match[1]):
            raise SettingsError(
                f"--sizes {text.strip()[:40]} is no size: use % of all experts, or slots: 25%,2000"
            )
        slots = float(match[1]) / 100 * every if match[2] else int(match[1])
        if not 1 <= slots <= every:
            raise SettingsError(f"--sizes {text.strip()} is {slots:.0f} slots: use 1 to {every}")
        found.append(int(slots))
    return list(dict.fromkeys(found))


def _show(
    trace: RoutingTrace,
    replays: Sequence[Replay],
    seconds: Sequence[float | None],
    record_bytes: int,
) -> None:
    columns = [
        (name, phase)
        for name, phase in _COLUMNS
        if any(phase in replay.counts for replay in replays)
    ]
    head = ("slots", "policy", *(f"hits, {name}" for name, _ in columns))
    rows = [(*head, "copied a block", "misses / Belady", "/ optimum", "ms a preview")]
    for replay, second in zip(replays, seconds, strict=True):
        rows.append(
            (
                f"{replay.slots} ({100 * replay.share:.0f} %)",
                replay.policy,
                *(_percent(replay, phase) for _, phase in columns),
                shown(record_bytes * replay.misses_per_block),
                f"{replay.ratio:.2f}",
                f"{replay.misses / replay.optimum:.2f}" if replay.optimum else "",
                "" if second is None else f"{1000 * second:.2f}",
            )
        )
    blocks = replays[0].blocks
    console.show_table(
        f"{blocks} blocks, {trace.layers} layers of {trace.experts} experts, "
        f"{shown(record_bytes)} each; ms of experts only, no copy hidden",
        rows,
    )


def _percent(replay: Replay, phase: Phase) -> str:
    rate = replay.counts[phase].hit_rate if phase in replay.counts else None
    return "" if rate is None else f"{100 * rate:.1f} %"


def _json(replay: Replay, seconds: float | None, record_bytes: int) -> dict[str, object]:
    return {
        "policy": replay.policy,
        "slots": replay.slots,
        "share": replay.share,
        "hit_rates": {phase: counts.hit_rate for phase, counts in replay.counts.items()},
        "refused": {phase: counts.refused for phase, counts in replay.counts.items()},
        "evicted": {phase: counts.evicted for phase, counts in replay.counts.items()},
        "misses": replay.misses,
        "belady_misses": replay.belady,
        "optimum_misses": replay.optimum,
        "blocks": replay.blocks,
        "bytes_per_block": record_bytes * replay.misses_per_block,
        "ms_per_preview": None if seconds is None else 1000 * seconds,
    }
