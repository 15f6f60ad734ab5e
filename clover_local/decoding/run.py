"""One run in progress: the forwards of a decoding mode, and the book-keeping that all modes share.

Between two forwards every emitted token is committed, except at most one `pending` token. A mode
(`denoise.py`, `autoregressive.py`) decides which forwards to make; only this file touches model,
state, response history, clock and trace, so modes can follow each other at any boundary; one that
`starts_from_logits` only behind a commit that was asked for them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from clover_local.cache import SequenceState, VerifyRecord
from clover_local.decoding.auto.chooser import AutoUse
from clover_local.decoding.controls import ResponseControls
from clover_local.decoding.events import EventStream
from clover_local.decoding.forwards import ForwardOutput, Model, VerifiedOutput
from clover_local.decoding.host_pick import HostPicker
from clover_local.decoding.pick import Accept, Picker, RowStatistics
from clover_local.decoding.repetition.guard import LoopGuard
from clover_local.decoding.result import (
    Block,
    CacheUse,
    Clock,
    EmittedToken,
    GenerationResult,
    Round,
    Stats,
)
from clover_local.decoding.settings import Settings
from clover_local.decoding.speculation.acceptance import Judged
from clover_local.decoding.trace import (
    TraceSink,
    choice_record,
    commit_record,
    end_record,
    pass_record,
    verify_record,
)
from clover_local.errors import ResourceError
from clover_local.kernels import dispatch
from clover_local.residency.demand import CommitKind, Kind
from clover_local.residency.trace import forward_of, routing_record

Output = TypeVar("Output")


class Mode(Protocol):
    """A way to produce tokens. All modes share the committed state."""

    @property
    def starts_from_logits(self) -> bool:
        """Whether it needs the logits of the last committed token to begin."""

    def block(self, run: "Run") -> EventStream:
        """Produces the next tokens: emits them, or sets `run.finish_reason`."""


class Run:
    """The state of one answer while it is made."""

    def __init__(
        self,
        model: Model,
        state: SequenceState,
        settings: Settings,
        *,
        prompt_tokens: int,
        picker: Picker | None = None,
        on_note: Callable[[str], None] = lambda line: None,
        trace: TraceSink | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """`picker` is a `HostPicker` unless given."""
        self.model = model
        self.state = state
        self.settings = settings
        self.controls = ResponseControls(settings)
        self.pending: int | None = None
        """An emitted token that is not committed yet."""
        self.next_logits: Tensor | None = None
        """[1, V]: logits after the last committed token, where a commit was asked for them."""
        self.keeps_logits = False
        """Whether every commit leaves `next_logits`, so that any mode may come next."""
        self.mode = settings.mode
        """The mode at work, also where `auto` has chosen it."""
        self.auto: AutoUse | None = None
        """What `auto` found, where it runs."""
        self.finish_reason: str | None = None
        self.result: GenerationResult | None = None
        self.tokens: list[EmittedToken] = []
        self.blocks: list[Block] = []
        self.rounds: list[Round] = []
        self.clock = Clock()
        self.reused_tokens = 0
        self.guard = LoopGuard(settings)
        self._picker: Picker = picker or HostPicker()
        self._on_note = on_note
        self._prompt_tokens = prompt_tokens
        self._trace = trace
        self._should_stop = should_stop
        self._experts_used = torch.zeros((), dtype=torch.float64, device=model.device)
        self._cache_before = model.offload_stats()

    @property
    def room(self) -> int:
        """Tokens that still fit the context."""
        return self.state.room - (self.pending is not None)

    def stop_requested(self) -> bool:
        """Whether the user wants to stop, asked between forwards: then the run is `cancelled`."""
        if self._should_stop is not None and self._should_stop():
            self.finish_reason = "cancelled"
            return True
        return False

    def commit_prompt(self, tokens: Sequence[int], *, logits: bool) -> None:
        """Commits a piece of the prompt."""
        self.clock.prompt_seconds += self._commit(tokens, logits=logits, kind="prompt")
        self.clock.prompt_tokens += len(tokens)

    def commit(self, tokens: Sequence[int], *, logits: bool) -> None:
        """Commits emitted tokens; `logits` asks for `next_logits`."""
        self.clock.commit_seconds += self._commit(tokens, logits=logits, kind="commit")
        self.clock.commits += 1

    def commit_pending(self, *, logits: bool) -> None:
        """Commits the pending token, if there is one."""
        if self.pending is not None:
            self.commit([self.pending], logits=logits)
            self.pending = None

    def preview(self, block: Sequence[int]) -> ForwardOutput:
        """One preview over the active block; the state stays as it is."""
        output = self._within_memory(lambda: self.model.preview(block, self.state))
        self.clock.previews += 1
        used = output.distinct_experts
        if used is None:
            used = dispatch.distinct_experts(output.expert_ids, self.model.config.num_experts)
        self._experts_used += used
        return output

    def verify(self, tokens: Sequence[int]) -> VerifiedOutput:
        """One causal forward over rows that may not count; the state stays as it is."""
        output = self._within_memory(lambda: self.model.verify(tokens, self.state))
        self.clock.verifies += 1
        return output

    def accept(self, record: VerifyRecord, rows: int) -> None:
        """Commits the first rows of a verify, the pending token before all."""
        self._within_memory(lambda: self.model.accept(record, rows, self.state))
        self.pending, self.next_logits = None, None

    def propose(self, output: ForwardOutput, *, block: Sequence[int]) -> RowStatistics:
        """The likeliest token of each row of a previewed block but the first, the pending one."""
        return self._within_memory(
            lambda: self._picker.propose(output.logits, self.controls, block=block)
        )

    def judge(self, output: ForwardOutput, *, drafts: Sequence[int]) -> Judged:
        """Which drafts are accepted, by the logits of a verify of the pending token and them."""
        return self._within_memory(
            lambda: self._picker.judge(output.logits, self.controls, drafts=drafts)
        )

    def pick_next(self, logits: Tensor) -> RowStatistics:
        """The next token, from the logits [1, V] of the last committed one."""
        return self._within_memory(lambda: self._picker.pick(logits, self.controls, rows=[0]))

    def pick_block(
        self, output: ForwardOutput, *, block: Sequence[int], rows: Sequence[int], pass_number: int
    ) -> tuple[RowStatistics, Accept]:
        """Tokens and statistics for the masked `rows` of a previewed block; which are accepted."""

        def picked() -> tuple[RowStatistics, Accept]:
            return self._picker.pick_block(
                output.logits,
                self.controls,
                block=block,
                rows=rows,
                on_device=output.block,
                pass_number=pass_number,
            )

        # What accepts on the device cannot do so twice, and needs no memory of its own.
        return picked() if self.settings.plain_threshold else self._within_memory(picked)

    def emit(self, tokens: Sequence[EmittedToken]) -> None:
        """Adds tokens to the answer and finds out whether it is complete."""
        self.tokens += tokens
        self.controls.add(token.token for token in tokens)
        if tokens and tokens[-1].token in self.settings.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.settings.max_new_tokens:
            self.finish_reason = "length"

    def use(self, settings: Settings) -> None:
        """Other settings for the forwards that follow."""
        if settings != self.settings:
            self.settings = settings
            self.controls.use(settings)

    def close_at_context_end(self) -> None:
        """Ends the run where no further token fits."""
        if self.finish_reason is None and self.room == 0:
            self.finish_reason = "context"

    def trace_pass(
        self,
        statistics: RowStatistics,
        *,
        block_before: Sequence[int],
        rows: Sequence[int],
        reasons: Sequence[str],
        pass_number: int,
        output: ForwardOutput | None,
        milliseconds: float,
    ) -> None:
        """Writes the record of a forward that picked tokens; call it before they are emitted."""
        if self._trace is not None:
            positions = [self.controls.length + row + 1 for row in rows]
            ahead = int(self.pending is not None)  # the forward's first row
            self._trace.write(
                pass_record(
                    statistics,
                    self.controls.at(positions, visible=block_before),
                    mode=self.mode,
                    block=self._turn,
                    start=self.state.length + ahead,
                    pass_number=pass_number,
                    block_before=block_before,
                    rows=rows,
                    reasons=reasons,
                    coresets=[len(coreset) for coreset in output.coresets] if output else [],
                    milliseconds=milliseconds,
                    routing=(
                        self._routing(output, "preview", masked=[row + ahead for row in rows])
                        if output
                        else None
                    ),
                )
            )

    def trace_verify(
        self,
        judged: Judged,
        *,
        start: int,
        tokens: Sequence[int],
        reasons: Sequence[str],
        output: ForwardOutput,
        milliseconds: float,
    ) -> None:
        """Writes the record of a verify of `tokens`; call it before anything is emitted."""
        if self._trace is not None:
            self._trace.write(
                verify_record(
                    judged.statistics,
                    self.controls.along(tokens[1:]),
                    block=self._turn,
                    start=start,
                    tokens=tokens,
                    reasons=reasons,
                    accepted=judged.accepted,
                    milliseconds=milliseconds,
                    routing=self._routing(output, "commit"),
                )
            )

    @property
    def _turn(self) -> int:
        """The number of the block or round in progress, in the trace."""
        return len(self.blocks) + len(self.rounds)

    def trace_choice(self, *, mode: str, is_probe: bool, why: str) -> None:
        """Writes that `auto` goes on with another mode: these records are its schedule."""
        if self._trace is not None:
            self._trace.write(
                choice_record(mode=mode, is_probe=is_probe, at=len(self.tokens), why=why)
            )

    def _routing(
        self, output: ForwardOutput, kind: Kind, *, masked: Sequence[int] | None = None
    ) -> dict[str, object] | None:
        """A forward's experts for the trace; None from a model that does not say which."""
        if not output.expert_ids:
            return None
        ids = torch.stack(output.expert_ids).cpu().numpy()  # [L, T, A]
        holds_mask = None
        if masked is not None:
            holds_mask = np.isin(np.arange(ids.shape[1]), masked)
        return routing_record(
            forward_of(
                list(ids),
                num_experts=self.model.config.num_experts,
                kind=kind,
                block=len(self.blocks),
                number=0,  # the reader numbers them
                masked=holds_mask,
            )
        )

    def finish(self, finish_reason: str) -> GenerationResult:
        """The result so far, kept in `result`; writes the trace's last record."""
        cache = CacheUse.between(self._cache_before, self.model.offload_stats())
        result = GenerationResult(
            tokens=tuple(self.tokens),
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self.reused_tokens,
            finish_reason=finish_reason,
            mode=self.settings.mode,
            blocks=tuple(self.blocks),
            rounds=tuple(self.rounds),
            of_rounds=self.clock.of_rounds(self.rounds),
            auto=self.auto,
            stats=self._stats(cache),
            cache=cache,
        )
        if self._trace is not None:
            self._trace.write(end_record(finish_reason, result.token_ids, asdict(result.stats)))
        self.result = result
        return result

    def _within_memory(self, forward: Callable[[], Output]) -> Output:
        """A forward or a pick; where the device has no room for it, again with fewer experts there.

        One that fails leaves the state as it was, so the answer goes on as if nothing was.

        Raises:
            ResourceError: no room, and nothing left to give up.
        """
        while True:
            try:
                return forward()
            except torch.OutOfMemoryError as error:
                given_up = self.model.give_up_memory()
                if given_up is None:
                    raise ResourceError(
                        "out of memory on the device with nothing left to give up: close what else "
                        "uses it, or pass a smaller --context",
                        keys={"context"},
                    ) from error
            self._on_note(given_up)

    def _commit(self, tokens: Sequence[int], *, logits: bool, kind: CommitKind) -> float:
        """Commits, and returns the seconds it took."""
        logits = logits or (self.keeps_logits and kind == "commit")
        start, began = self.state.length, time.perf_counter()
        output = self._within_memory(
            lambda: self.model.commit(
                tokens, self.state, logits="last" if logits else "none", kind=kind
            )
        )
        self.next_logits = output.logits[-1:] if logits else None
        if self.next_logits is not None and self.keeps_logits:
            self.next_logits = self.next_logits.clone()  # a model may use its place again
        # Where a pick follows, it waits; else the next forward would pay for this one.
        waits = kind == "prompt" or not logits or self._trace is not None
        if waits and self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        seconds = time.perf_counter() - began
        if self._trace is not None:
            self._trace.write(
                commit_record(
                    tokens,
                    start=start,
                    prompt=kind == "prompt",
                    milliseconds=1000 * seconds,
                    routing=self._routing(output, kind),
                )
            )
        return seconds

    def _stats(self, cache: CacheUse | None) -> Stats:
        device = self.model.device
        on_cuda = device.type == "cuda"
        return self.clock.stats(
            tokens=len(self.tokens),
            expert_layers=float(self._experts_used) / self.model.config.num_hidden_layers,
            cache=cache,
            device_peak_bytes=torch.cuda.max_memory_allocated(device) if on_cuda else None,
        )
