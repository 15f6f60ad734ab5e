"""What a run cost, in words: the line after an answer, and the rows of `--stats` and `/stats`."""

from dataclasses import fields
from typing import TYPE_CHECKING

from clover_local.decoding.result import CacheUse, GenerationResult, RoundStats, Stats

if TYPE_CHECKING:
    from clover_local.decoding.auto.chooser import AutoUse, Rate
    from clover_local.experts.traffic import OffloadStats

UNITS = {
    "ms_per_preview": "ms",
    "ms_per_commit": "ms",
    "ms_per_verify": "ms",
    "prompt_tokens_per_second": "/s",
    "tokens_per_second": "/s",
}


def status_line(result: GenerationResult) -> str:
    """Speed and memory of one answer, and why it ended where that is worth knowing."""
    stats = result.stats
    parts = [f"{len(result.tokens)} tokens"]
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.0f} tok/s")
    if stats.tokens_per_forward is not None:
        parts.append(f"{stats.tokens_per_forward:.1f} a forward")
    if result.auto is not None:
        parts.append(f"auto: {result.auto.line}")
    if result.blocks:
        passes = sum(len(block.passes) for block in result.blocks) / len(result.blocks)
        parts.append(f"{passes:.1f} passes a block")
    if result.of_rounds is not None:
        parts.append(f"{result.of_rounds.tokens_per_round:.1f} a round")
    if stats.ms_per_preview is not None:
        parts.append(f"{stats.ms_per_preview:.1f} ms a pass")
    if result.cache is not None:
        parts.append(f"{100 * stats.hit_rate:.1f} % hits")
    memory = stats.device_peak_bytes or stats.host_peak_bytes
    if memory is not None:
        parts.append(f"{size(memory)} at most")
    return " · ".join(parts) + ending(result.finish_reason)


def advice_line(faster: "Rate") -> str:
    """That another mode than the one that is set would have been faster."""
    speed = f"{faster.tokens_per_second:.0f} tok/s"
    return f"{faster.mode} would make about {speed} here: /mode auto finds the fastest"


def ending(finish_reason: str) -> str:
    """What to add when an answer did not end by itself."""
    return {
        "length": " · cut at max_new_tokens",
        "context": " · the context is full: /new starts afresh",
        "cancelled": " · stopped",
        "repetition": " · stopped: it repeated itself",
    }.get(finish_reason, "")


def stats_rows(result: GenerationResult) -> list[tuple[str, str]]:
    """(name, value) of everything that was measured, and of what the cache of experts did."""
    parts: list[Stats | RoundStats] = [result.stats]
    if result.of_rounds is not None:
        parts.append(result.of_rounds)
    rows = [
        (field.name, _shown(field.name, getattr(part, field.name)))
        for part in parts
        for field in fields(part)
    ]
    return rows + _auto_rows(result.auto) + cache_rows(result.cache)


def _auto_rows(auto: "AutoUse | None") -> list[tuple[str, str]]:
    """(name, value) of what `auto` measured, and what it makes of it."""
    if auto is None:
        return []
    rows = [
        (
            f"auto: {rate.mode}",
            f"{rate.tokens_per_second:.0f} tok/s: {rate.tokens_per_forward:.2f} tokens a forward, "
            f"{rate.ms_per_forward:.2f} ms each",
        )
        for rate in auto.rates
    ]
    chosen = f"{auto.mode}, after {auto.probes} probes and {auto.changes} changes"
    return [("auto runs", chosen), *rows]


def cache_rows(cache: CacheUse | None) -> list[tuple[str, str]]:
    """(name, value) of what the cache of experts did; nothing where every expert is resident."""
    if cache is None:
        return []
    return [
        ("expert hits", f"{cache.hits:,}"),
        ("expert misses", f"{cache.misses:,}"),
        ("of these not kept", f"{cache.refused:,}"),
        ("experts evicted", f"{cache.evicted:,}"),
        ("copied from the host", size(cache.bytes)),
        ("waited for copies", f"{cache.exposed_ms:.1f} ms"),
        ("copied meanwhile", f"{cache.hidden_ms:.1f} ms"),
    ]


def offload_rows(stats: "OffloadStats") -> list[tuple[str, str]]:
    """(name, value) of the cache of experts since the start, by kind of forward."""
    rows = [
        ("slots", f"{stats.slots:,}, of these {stats.passing} for experts that are not kept"),
        ("experts there", f"{stats.resident:,} of {stats.experts:,}"),
        ("memory", f"{size(stats.device_bytes)}, pinned on the host {size(stats.pinned_bytes)}"),
        ("filled at the start", size(stats.filled.bytes)),
    ]
    for kind, counts in stats.counts.items():
        traffic = stats.traffic.get(kind)
        copied = 0 if traffic is None else traffic.bytes
        rate = "-" if counts.hit_rate is None else f"{100 * counts.hit_rate:.1f} %"
        rows.append(
            (
                f"{kind}s",
                f"{rate} hits: {counts.hits:,} hits, {counts.misses:,} misses "
                f"({counts.refused:,} not kept), {counts.evicted:,} evicted, {size(copied)} copied",
            )
        )
    return rows


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if "bytes" in name:
        return size(int(value))
    number = f"{value:.2f}" if isinstance(value, float) else str(value)
    return " ".join([number, *filter(None, [UNITS.get(name)])])


def size(nbytes: int) -> str:
    """A number of bytes for a reader, in decimal units."""
    amount = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"
