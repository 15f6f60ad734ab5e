"""What a run returns, and its stable JSON."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clover_local.decoding.auto.chooser import AutoUse
    from clover_local.experts.traffic import OffloadStats


@dataclass(frozen=True, slots=True)
class Fixed:
    """A row that left the mask in one pass."""

    row: int  # in the block, from 0
    token: int
    confidence: float


@dataclass(frozen=True, slots=True)
class EmittedToken:
    """One token of the answer and how it came about."""

    token: int
    confidence: float
    pass_number: int  # in its block, from 0
    block: int  # from 0; its round in `draft`, its own place in `ar`
    mode: str


@dataclass(frozen=True, slots=True)
class Block:
    """One denoised block."""

    start: int  # committed length when it began: prompt and answer before it
    tokens: tuple[int, ...]  # what was emitted of it
    passes: tuple[tuple[Fixed, ...], ...]  # per pass the rows it fixed, ascending

    def to_json(self) -> dict[str, object]:
        """The entry of `blocks` in `generate --json`."""
        fixed = [[[f.row, f.token, f.confidence] for f in rows] for rows in self.passes]
        return {
            "start": self.start,
            "tokens": list(self.tokens),
            "passes": len(self.passes),
            "fixed": fixed,
        }


@dataclass(frozen=True, slots=True)
class Round:
    """One round of `draft`: what was proposed, and what became of it."""

    width: int  # rows of the verify
    draft: tuple[int, ...]
    accepted: int  # before a stop token among them cut the answer
    boundary: int

    def to_json(self) -> dict[str, object]:
        """The entry of `rounds` in `generate --json`."""
        return {
            "width": self.width,
            "draft": list(self.draft),
            "accepted": self.accepted,
            "bonus": self.boundary,
        }


@dataclass(frozen=True)
class Stats:
    """Speed and counts of one run; None where there was nothing to measure.

    Forwards and commits are those of the answer, without the prompt's. A verify of `draft` counts
    as a commit: it writes the state of the rows that it accepts.
    """

    forwards: int
    previews: int
    commits: int
    tokens_per_forward: float | None
    tokens_per_preview: float | None
    ms_per_preview: float | None
    ms_per_commit: float | None
    prompt_tokens_per_second: float | None
    tokens_per_second: float | None
    distinct_experts_per_layer: float | None  # mean over previews and layers
    hit_rate: float  # share of expert uses that found the expert on the device
    bytes_from_host: int
    device_peak_bytes: int | None
    host_peak_bytes: int | None


@dataclass(frozen=True)
class RoundStats:
    """What the rounds of `draft` came to."""

    rounds: int
    tokens_per_round: float
    drafts_per_round: float
    ms_per_verify: float


@dataclass
class Clock:
    """Counts and seconds of a run's forwards, the pick and its transfer included."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    previews: int = 0
    preview_seconds: float = 0.0
    commits: int = 0
    commit_seconds: float = 0.0
    verifies: int = 0
    verify_seconds: float = 0.0

    @property
    def forwards(self) -> int:
        """Of the answer."""
        return self.previews + self.commits + self.verifies

    def stats(
        self,
        *,
        tokens: int,
        expert_layers: float,
        cache: CacheUse | None,
        device_peak_bytes: int | None,
    ) -> Stats:
        """Speed and counts.

        Args:
            tokens: of the answer.
            expert_layers: distinct experts a layer, summed over previews.
            cache: None where every expert is on the device.
            device_peak_bytes: None on a CPU.
        """
        commits = self.commits + self.verifies
        commit_ms = 1000 * (self.commit_seconds + self.verify_seconds)
        return Stats(
            forwards=self.forwards,
            previews=self.previews,
            commits=commits,
            tokens_per_forward=_ratio(tokens, self.forwards),
            tokens_per_preview=_ratio(tokens, self.previews),
            ms_per_preview=_ratio(1000 * self.preview_seconds, self.previews),
            ms_per_commit=_ratio(commit_ms, commits),
            prompt_tokens_per_second=_ratio(self.prompt_tokens, self.prompt_seconds),
            tokens_per_second=_ratio(tokens, self.seconds),
            distinct_experts_per_layer=_ratio(expert_layers, self.previews),
            hit_rate=1.0 if cache is None else _ratio(cache.hits, cache.hits + cache.misses) or 0.0,
            bytes_from_host=0 if cache is None else cache.bytes,
            device_peak_bytes=device_peak_bytes,
            host_peak_bytes=host_peak_bytes(),
        )

    def of_rounds(self, rounds: Sequence[Round]) -> RoundStats | None:
        """What `rounds` came to; None where there are none."""
        if not rounds:
            return None
        return RoundStats(
            rounds=len(rounds),
            tokens_per_round=sum(each.accepted + 1 for each in rounds) / len(rounds),
            drafts_per_round=sum(len(each.draft) for each in rounds) / len(rounds),
            ms_per_verify=1000 * self.verify_seconds / max(self.verifies, 1),
        )

    @property
    def seconds(self) -> float:
        """Of the answer."""
        return self.preview_seconds + self.commit_seconds + self.verify_seconds


@dataclass(frozen=True)
class CacheUse:
    """What the expert cache did for one run, its prompt included."""

    hits: int  # each expert once a layer and forward
    misses: int
    evicted: int
    refused: int  # misses that were computed and not kept
    bytes: int  # copied from the host
    exposed_ms: float  # nothing was computed because a copy was not there yet
    hidden_ms: float  # of the copies' own time, what passed behind computation

    @classmethod
    def between(cls, before: OffloadStats | None, now: OffloadStats | None) -> CacheUse | None:
        """The difference of two readings; None where there is no cache."""
        if now is None or before is None:
            return None
        return cls(
            hits=now.total.hits - before.total.hits,
            misses=now.total.misses - before.total.misses,
            evicted=now.total.evicted - before.total.evicted,
            refused=now.total.refused - before.total.refused,
            bytes=now.copied.bytes - before.copied.bytes,
            exposed_ms=now.copied.exposed_ms - before.copied.exposed_ms,
            hidden_ms=now.copied.hidden_ms - before.copied.hidden_ms,
        )


@dataclass(frozen=True)
class GenerationResult:
    """One answer. `finish_reason`: stop, length, context, repetition or cancelled."""

    tokens: tuple[EmittedToken, ...]
    prompt_tokens: int
    reused_tokens: int  # of the prompt, already committed by an earlier turn
    finish_reason: str
    mode: str
    blocks: tuple[Block, ...]
    stats: Stats
    rounds: tuple[Round, ...] = ()
    of_rounds: RoundStats | None = None
    auto: AutoUse | None = None
    cache: CacheUse | None = None  # None: every expert is on the device

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The answer's ids, the stop token included."""
        return tuple(token.token for token in self.tokens)

    @property
    def text_ids(self) -> tuple[int, ...]:
        """The ids that make up the text: without the stop token."""
        return self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids

    def to_json(self, *, text: str) -> dict[str, object]:
        """The object that `generate --json` prints; `text` is `text_ids` decoded.

        The mode `auto` adds `auto`: what it runs by now, and what it knows of each mode.
        """
        found: dict[str, object] = {
            "text": text,
            "token_ids": list(self.token_ids),
            "prompt_tokens": self.prompt_tokens,
            "finish_reason": self.finish_reason,
            "mode": self.mode,
            "blocks": [block.to_json() for block in self.blocks],
            "rounds": [each.to_json() for each in self.rounds],
            "confidence": [token.confidence for token in self.tokens],
            "stats": asdict(self.stats),
        }
        return found if self.auto is None else {**found, "auto": self.auto.to_json()}


def emitted_length(tokens: Sequence[int], *, stop_ids: Collection[int], allowed: int) -> int:
    """How many of a resolved block's tokens are emitted: up to a stop token, at most `allowed`."""
    for length, token in enumerate(tokens[:allowed], start=1):
        if token in stop_ids:
            return length
    return min(len(tokens), allowed)


def host_peak_bytes() -> int | None:
    """The most memory this process has held, in bytes; None where the system does not say."""
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _ratio(amount: float, per: float) -> float | None:
    return amount / per if per else None
