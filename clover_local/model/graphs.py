"""A model whose passes are CUDA graphs: one launch from the host instead of five hundred.

Where some experts are not on the device, a pass is cut at each layer's experts: what comes before
and behind are graphs, and between them the host copies what is missing and launches the experts.

A graph reads and writes fixed addresses. So the tokens of a pass, and two sets of GDN states, lie
in tensors that are made once: a commit reads one set and writes the other, which keeps the
committed one whole until the commit is published. Keys and values stay in the buffers of the
sequence, whose length is on the device; when those grow, everything is captured anew.

A pass is captured at its second run, for every number of rows up to `GRAPH_ROWS`; longer commits
are prompts, which are bound by arithmetic and run launch by launch. On a CPU the same code runs
without graphs, for tests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clover_local.cache import Committed, SequenceState, StateView, VerifyRecord
from clover_local.config import ModelConfig
from clover_local.decoding.pick import DeviceBlock
from clover_local.experts.traffic import OffloadStats
from clover_local.kernels.dispatch import DeltaState
from clover_local.kernels.gpu.replay import Replay
from clover_local.model.clover import Clover, Logits
from clover_local.model.output import PassOutput, VerifyOutput
from clover_local.residency.demand import CommitKind

GRAPH_ROWS = 64


@dataclass(frozen=True)
class _Kind:
    """What one graph holds: a preview, or a commit with or without logits."""

    rows: int
    logits: Logits | None  # None: a preview
    source: int  # the set of states that it reads


class GraphedClover:
    """Runs the passes of one sequence at a time as graphs."""

    def __init__(self, model: Clover, *, on_fallback: Callable[[str], None]) -> None:
        """`on_fallback` hears, once and maybe at once, that passes run without graphs, and why."""
        self.model = model
        self._on_fallback = on_fallback
        self._eager: str | None = None
        self._state: SequenceState | None = None
        self._buffers: tuple[int, ...] = ()
        self._sets: tuple[tuple[DeltaState, ...], ...] = ()
        self._ids: dict[tuple[int, bool], Tensor] = {}
        self._blocks: dict[int, DeviceBlock] = {}
        self._graphs: dict[_Kind, Replay[PassOutput]] = {}
        on_cuda = model.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_cuda else None
        obstacle = model.experts.waits_because
        if obstacle is not None:
            self._fall_back(obstacle)

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """The model's."""
        return self.model.device

    @property
    def can_preview(self) -> bool:
        """Whether it has the diffusion tensors."""
        return self.model.can_preview

    @property
    def runs_without_graphs_because(self) -> str | None:
        """Why passes are launched one kernel after the other; None where they are graphs."""
        return self._eager

    def offload_stats(self) -> OffloadStats | None:
        """The model's."""
        return self.model.offload_stats()

    def give_up_memory(self) -> str | None:
        """The model's."""
        return self.model.give_up_memory()

    def commit(
        self,
        tokens: Tensor | Sequence[int],
        state: SequenceState,
        *,
        logits: Logits = "last",
        kind: CommitKind = "commit",
    ) -> PassOutput:
        """As `Clover.commit`. The output is valid until the next pass."""
        ids = self.model.checked(tokens, state)
        if not self._has_graph(len(ids)):
            return self.model.commit(ids, state, logits=logits, kind=kind)
        with torch.inference_mode():
            state.reserve(len(ids))
            source, view = self._enter(state)
            rows = self._upload(ids, preview=False)
            target = self._sets[1 - source]
            self.model.experts.begin(kind, block=state.length)

            def run() -> PassOutput:
                output, _ = self.model.commit_rows(rows, view, logits=logits, into=target)
                return output

            output = self._run(_Kind(len(ids), logits, source), run)
            if output is None:
                return self.model.commit(ids, state, logits=logits, kind=kind)
        state.advance(ids, recurrent=[x.recurrent for x in target], conv=[x.conv for x in target])
        return output

    def preview(self, block: Tensor | Sequence[int], state: SequenceState) -> PassOutput:
        """As `Clover.preview`. The output is valid until the next pass."""
        ids = self.model.checked(block, state)
        if not (self._has_graph(len(ids)) and self.can_preview):
            return self.model.preview(ids, state)
        with torch.inference_mode():
            source, view = self._enter(state)
            rows = self._upload(ids, preview=True)
            self.model.experts.begin("preview", block=state.length)

            def run() -> PassOutput:
                return self.model.preview_rows(rows, view)

            output = self._run(_Kind(len(ids), None, source), run)
        if output is None:
            return self.model.preview(ids, state)
        return output.of_block(self._blocks[len(ids)])

    def verify(self, tokens: Tensor | Sequence[int], state: SequenceState) -> VerifyOutput:
        """As `Clover.verify`: launch by launch, since no graph holds its record yet."""
        return self.model.verify(tokens, state)

    def accept(self, record: VerifyRecord, rows: int, state: SequenceState) -> None:
        """As `Clover.accept`; the states stay in the fixed sets where they have been there."""
        into = None
        for number, delta in enumerate(self._sets):
            if delta and delta[0].recurrent is record.before.recurrent[0]:
                into = self._sets[1 - number]
        self.model.accept(record, rows, state, into=into)

    def _fall_back(self, reason: str) -> None:
        self._eager = reason
        self._graphs.clear()
        self._on_fallback(f"passes run without CUDA graphs: {reason}")

    def _has_graph(self, rows: int) -> bool:
        return self._eager is None and rows <= GRAPH_ROWS

    def _enter(self, state: SequenceState) -> tuple[int, StateView]:
        """Brings the committed state into one of the sets; returns which one, and what is there.

        Graphs of another sequence, or of buffers that have grown since, are let go.
        """
        view = state.view()
        buffers = tuple(cache.keys.data_ptr() for cache in view.keys_values.values())
        if state is not self._state or buffers != self._buffers:
            self._graphs.clear()
            self._state, self._buffers = state, buffers
        now = state.committed
        if not self._sets:
            self._sets = tuple(
                tuple(
                    DeltaState(torch.empty_like(recurrent), torch.empty_like(conv))
                    for recurrent, conv in zip(now.recurrent, now.conv, strict=True)
                )
                for _ in range(2)
            )
        for number, delta in enumerate(self._sets):
            if not delta or now.recurrent[0] is delta[0].recurrent:
                return number, view
        for own, recurrent, conv in zip(self._sets[0], now.recurrent, now.conv, strict=True):
            own.recurrent.copy_(recurrent)
            own.conv.copy_(conv)
        state.place(
            Committed(
                now.tokens,
                tuple(x.recurrent for x in self._sets[0]),
                tuple(x.conv for x in self._sets[0]),
            )
        )
        return 0, state.view()

    def _upload(self, ids: list[int], *, preview: bool) -> Tensor:
        """The tokens of a pass at their fixed place; what is there already is not sent again."""
        block = self._blocks.get(len(ids)) if preview else None
        if block is not None and block.host == ids:
            return block.ids
        place = (len(ids), preview)
        if place not in self._ids:
            self._ids[place] = torch.empty(len(ids), dtype=torch.int64, device=self.device)
        pinned = torch.tensor(ids, pin_memory=self.device.type == "cuda")
        if preview:  # an interrupt between the two leaves it unknown what lies there
            block = self._blocks.setdefault(len(ids), DeviceBlock(self._ids[place], []))
            block.host = []
            block.ids.copy_(pinned, non_blocking=True)
            block.host = list(ids)
        else:
            self._ids[place].copy_(pinned, non_blocking=True)
        return self._ids[place]

    def _run(self, kind: _Kind, run: Callable[[], PassOutput]) -> PassOutput | None:
        """The pass, from its graph; None where it cannot be captured."""
        if kind not in self._graphs:
            self._graphs[kind] = Replay(run, device=self.device, pool=self._pool)
        replay = self._graphs[kind]
        self.model.experts.cut_with(replay.cut)
        try:
            return replay()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.device.type != "cuda" or replay.is_captured:
                raise
            self._fall_back(str(error).splitlines()[0])
            return None
        finally:
            self.model.experts.cut_with(None)
