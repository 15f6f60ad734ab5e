"""Says in a mode that was set when another one would be faster here.

The answer itself tells what its own mode costs, and by foresight what others would have needed.
What their forwards cost is rehearsed once, when an answer is over and its reader reads: a preview
and a verify leave the state as it was. An answer of `ar` shows nothing of previews; before a few of
them one preview is made, and what it proposed is compared with what `ar` wrote. Where experts lie
off the device neither is done, as it would move them: there `auto` has to have run before.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from clover_local.cache import SequenceState
from clover_local.decoding.auto.auto import MODES, Auto
from clover_local.decoding.auto.chooser import Choice, Chooser, Rate
from clover_local.decoding.auto.foresight import Forwards, unsure
from clover_local.decoding.events import EventStream
from clover_local.decoding.forwards import Model
from clover_local.decoding.result import Fixed
from clover_local.decoding.run import Run
from clover_local.decoding.settings import Settings

SLOWEST_MS = 250.0
"""Of a forward: nothing is rehearsed where one takes longer, since nobody would like to wait."""


@dataclass(frozen=True)
class _Drafted:
    run: Run
    start: int  # tokens of the answer before it
    picked: tuple[Fixed, ...]  # row r is the token r + 1 behind the pending one


class Spectator:
    """Watches the answers of a conversation whose mode is set."""

    def __init__(self, auto: Auto, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """`auto` shares what is found here, and what it has found itself; `clock`: in seconds."""
        self._auto = auto
        self._clock = clock
        self._answers_of_ar = 0
        self._proposal: _Drafted | None = None

    def block(self, run: Run) -> EventStream:
        """A step of the mode that is set: nothing about the answer is another than without."""
        watch, mode = self._auto.watch, run.settings.mode
        chooser = watch.chooser(run.settings)
        if mode not in chooser.modes:
            yield from MODES[mode].block(run)
            return
        if watch.stretch(run) is None:
            watch.begin(run, Choice(mode, is_probe=False, why="set"))
        yield from watch.step(MODES[mode], run)
        if mode == "ar":
            self._compare(run)

    def advice(self, model: Model, state: SequenceState, settings: Settings) -> Rate | None:
        """The mode of `auto` that would have been faster, as far as it is known.

        Raises:
            CloverError: as a forward.
        """
        if settings.mode == "auto" or settings.mode not in settings.auto:
            return None
        chooser = self._auto.watch.chooser(settings)
        own = [rate for rate in chooser.use().rates if rate.mode == settings.mode]
        if not own or own[0].ms_per_forward > SLOWEST_MS:
            return None
        if state.room > model.config.block_size and _is_free(model):
            try:
                for mode in chooser.unpriced():
                    self._rehearse(mode, chooser, model, state, settings)
            except torch.OutOfMemoryError:  # the answers themselves need no more than they did
                return None
        return chooser.faster_than(settings.mode)

    def _rehearse(
        self, mode: str, chooser: Chooser, model: Model, state: SequenceState, settings: Settings
    ) -> None:
        """Measures forwards of a mode over tokens of no meaning; the state stays as it is."""
        rows = {"denoise": model.config.block_size, "draft": settings.draft_width, "ar": 1}[mode]
        masks = [settings.mask_token_id] * rows
        tokens = [_other_than(settings.mask_token_id)] * rows
        preview_ms = None
        if rows > 1:
            preview_ms = self._timed(lambda: model.preview(masks, state), model)
        commit_ms = self._timed(lambda: model.verify(tokens, state), model)
        chooser.price(mode, preview_ms=preview_ms, commit_ms=commit_ms)

    def _timed(self, forward: Callable[[], object], model: Model) -> float:
        """Milliseconds of a forward; of its second run: the first pays for what is made once."""
        milliseconds = 0.0
        for _ in range(2):
            began = self._clock()
            forward()
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            milliseconds = 1000 * (self._clock() - began)
        return milliseconds

    def _compare(self, run: Run) -> None:
        """Makes a proposal behind the first token of an answer, or compares the one that was."""
        made, config = self._proposal, run.model.config
        if made is None or made.run is not run:
            self._proposal = None
            if len(run.tokens) == 1 and run.finish_reason is None:
                self._answers_of_ar += 1
                is_due = self._answers_of_ar & (self._answers_of_ar - 1) == 0  # 1, 2, 4, 8, ...
                if is_due and run.room > config.block_size and _is_free(run.model):
                    self._proposal = _propose(run)
            return
        behind = [token.token for token in run.tokens[made.start :]]
        if len(behind) < len(made.picked) and run.finish_reason is None:
            return
        self._proposal = None
        if behind:
            self._auto.watch.chooser(run.settings).see(self._needed(run, made.picked, behind))

    def _needed(
        self, run: Run, picked: Sequence[Fixed], behind: Sequence[int]
    ) -> dict[str, Forwards]:
        """What the other modes need for a text, by one proposal of its beginning."""
        settings, rows = run.settings, min(len(picked), len(behind))
        within = min(rows, settings.draft_width - 1)
        accepted = next((n for n in range(within) if picked[n].token != behind[n]), within)
        made = min(accepted + 1, len(behind))
        passes = self._auto.watch.passes.forwards(
            tokens=rows,
            unsure_rows=unsure(picked, rows=rows, threshold=settings.threshold),
            block_size=run.model.config.block_size,
            is_end=run.finish_reason is not None,
        )
        return {"draft": Forwards(made, 1 if settings.draft_width > 1 else 0, 1), "denoise": passes}


def _is_free(model: Model) -> bool:
    """Whether a preview changes nothing but the time."""
    return model.can_preview and model.offload_stats() is None


def _propose(run: Run) -> _Drafted:
    """What a preview behind the pending token says of the rows that follow; costs a preview."""
    block = [run.tokens[-1].token]
    block += [run.settings.mask_token_id] * (run.model.config.block_size - 1)
    statistics = run.propose(run.model.preview(block, run.state), block=block)
    picked = map(
        Fixed,
        range(len(block) - 1),
        statistics.token.tolist(),
        statistics.confidence.tolist(),
    )
    return _Drafted(run, len(run.tokens), tuple(picked))


def _other_than(token: int) -> int:
    return token - 1 if token else 1
