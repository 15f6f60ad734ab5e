"""A model whose passes are CUDA graphs: one launch from the host instead of five hundred.

Where some experts are not on the device, a pass is cut at each layer's experts: what comes before
and behind are graphs, and between them the host copies what is missing and launches the experts.

A graph reads and writes fixed addresses. So the tokens of a pass, and two sets of GDN states, lie
in tensors that are made once: a commit reads one set and writes the other, which keeps the
committed one whole until the commit is published. Keys and values stay in the buffers of the
sequence, whose length is on the device; when those grow, everything is captured anew.

A verify reads one set and writes a record of its rows into tensors that only it uses, so that any
preview may come before they are accepted. Accepting is no graph: it replays the record into the
other set, two launches for all layers together.

A pass is captured at its second run, for every number of rows up to `GRAPH_ROWS`; longer commits
are prompts, which are bound by arithmetic and run launch by launch. On a CPU the same code runs
without graphs, for tests; on a card no graph has been captured yet, be it of a preview, a commit or
a verify.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from clover_local.cache import Committed, SequenceState, StateView, VerifyRecord
from clover_local.config import ModelConfig
from clover_local.decoding.pick import DeviceBlock
from clover_local.experts.traffic import OffloadStats
from clover_local.kernels import dispatch
from clover_local.kernels.dispatch import DeltaRecord, DeltaState, LayeredRecord, LayeredStates
from clover_local.kernels.gpu.replay import Replay
from clover_local.model.clover import Clover, Logits
from clover_local.model.gated_delta_net import heads_of
from clover_local.model.output import PassOutput, VerifyOutput
from clover_local.residency.demand import CommitKind

GRAPH_ROWS = 64

Kind = TypeVar("Kind")
Output = TypeVar("Output")
_Verified = tuple[PassOutput, list[DeltaRecord]]


@dataclass(frozen=True)
class _Kind:
    """What one graph holds."""

    forward: Literal["preview", "commit"]
    rows: int
    logits: Logits  # of which rows
    source: int  # the set of states that it reads


@dataclass(frozen=True)
class _VerifyKind:
    """What the graph of a verify holds."""

    rows: int
    source: int


@dataclass(frozen=True, eq=False)
class _Set:
    """The GDN states of a sequence at fixed places."""

    together: LayeredStates
    layers: tuple[DeltaState, ...]  # views of them


@dataclass(frozen=True, eq=False)
class _Record:
    """Where verifies of some number of rows write theirs."""

    together: LayeredRecord
    layers: tuple[DeltaRecord, ...]  # views of it


@dataclass(frozen=True, eq=False)
class _Latest:
    """The last verify, while nothing else has written rows."""

    record: VerifyRecord
    together: LayeredRecord | None  # None: it was no graph
    source: int = 0


class GraphedClover:
    """Runs the passes of one sequence at a time as graphs."""

    def __init__(self, model: Clover, *, on_fallback: Callable[[str], None]) -> None:
        """`on_fallback` hears, once and maybe at once, that passes run without graphs, and why."""
        self.model = model
        self._on_fallback = on_fallback
        self._eager: str | None = None
        self._state: SequenceState | None = None
        self._buffers: tuple[int, ...] = ()
        self._sets: tuple[_Set, ...] = ()
        self._record: LayeredRecord | None = None
        self._records: dict[int, _Record] = {}
        self._latest: _Latest | None = None
        self._ids: dict[tuple[int, bool], Tensor] = {}
        self._blocks: dict[int, DeviceBlock] = {}
        self._graphs: dict[_Kind, Replay[PassOutput]] = {}
        self._verifies: dict[_VerifyKind, Replay[_Verified]] = {}
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
        self._latest = None
        if not self._has_graph(len(ids)):
            return self.model.commit(ids, state, logits=logits, kind=kind)
        with torch.inference_mode():
            state.reserve(len(ids))
            source, view = self._enter(state)
            rows = self._upload(ids, preview=False)
            target = self._sets[1 - source].layers
            self.model.experts.begin(kind, block=state.length)

            def run() -> PassOutput:
                output, _ = self.model.commit_rows(rows, view, logits=logits, into=target)
                return output

            output = self._run(self._graphs, _Kind("commit", len(ids), logits, source), run)
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

            output = self._run(self._graphs, _Kind("preview", len(ids), "all", source), run)
        if output is None:
            return self.model.preview(ids, state)
        return output.of_block(self._blocks[len(ids)])

    def verify(self, tokens: Tensor | Sequence[int], state: SequenceState) -> VerifyOutput:
        """As `Clover.verify`; the record is valid until the next verify or commit.

        The rest of the output is valid until the next pass.
        """
        ids = self.model.checked(tokens, state)
        self._latest = None
        if not self._has_graph(len(ids)):
            return self._eager_verify(ids, state)
        with torch.inference_mode():
            state.reserve(len(ids))
            source, view = self._enter(state)
            record = self._record_for(len(ids))
            rows = self._upload(ids, preview=False)
            self.model.experts.begin("commit", block=state.length)

            def run() -> _Verified:
                return self.model.verify_rows(rows, view, into=record.layers)

            verified = self._run(self._verifies, _VerifyKind(len(ids), source), run)
        if verified is None:
            return self._eager_verify(ids, state)
        output, _ = verified
        own = VerifyRecord(state.committed, tuple(ids), record.layers)
        self._latest = _Latest(own, record.together, source)
        return VerifyOutput(output.logits, output.expert_ids, record=own)

    def _eager_verify(self, ids: list[int], state: SequenceState) -> VerifyOutput:
        output = self.model.verify(ids, state)
        self._latest = _Latest(output.record, None)
        return output

    def accept(self, record: VerifyRecord, rows: int, state: SequenceState) -> None:
        """As `Clover.accept`; the states stay at their fixed places where they have been there.

        Raises:
            ValueError: as there; a record of an earlier verify than the last, or behind which rows
                were written.
        """
        tokens, latest = record.first(rows, state), self._latest
        if latest is None or latest.record is not record:
            raise ValueError("another verify or commit has run since this record was made")
        if latest.together is None:
            self.model.accept(record, rows, state)
            return
        target = self._sets[1 - latest.source]
        with torch.inference_mode():
            dispatch.replay_layers(
                latest.together,
                rows=rows,
                before=self._sets[latest.source].together,
                into=target.together,
            )
        state.advance(
            tokens,
            recurrent=[x.recurrent for x in target.layers],
            conv=[x.conv for x in target.layers],
        )

    def _fall_back(self, reason: str) -> None:
        self._eager = reason
        self._forget_graphs()
        self._on_fallback(f"passes run without CUDA graphs: {reason}")

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._verifies.clear()

    def _has_graph(self, rows: int) -> bool:
        return self._eager is None and rows <= GRAPH_ROWS

    def _enter(self, state: SequenceState) -> tuple[int, StateView]:
        """Brings the committed state into one of the sets; returns which one, and what is there.

        Graphs of another sequence, or of buffers that have grown since, are let go.
        """
        view = state.view()
        buffers = tuple(cache.keys.data_ptr() for cache in view.keys_values.values())
        if state is not self._state or buffers != self._buffers:
            self._forget_graphs()
            self._latest = None
            self._state, self._buffers = state, buffers
        now = state.committed
        if not self._sets:
            self._sets = tuple(self._new_set(now) for _ in range(2))
        for number, own in enumerate(self._sets):
            if not own.layers or now.recurrent[0] is own.layers[0].recurrent:
                return number, view
        layers = self._sets[0].layers
        for delta, recurrent, conv in zip(layers, now.recurrent, now.conv, strict=True):
            delta.recurrent.copy_(recurrent)
            delta.conv.copy_(conv)
        state.place(
            Committed(
                now.tokens,
                tuple(x.recurrent for x in layers),
                tuple(x.conv for x in layers),
            )
        )
        return 0, state.view()

    def _new_set(self, like: Committed) -> _Set:
        together = LayeredStates.empty(
            len(like.recurrent),
            heads_of(self.config),
            kept=self.config.linear_conv_kernel_dim - 1,
            device=self.device,
        )
        return _Set(together, together.layers)

    def _record_for(self, rows: int) -> _Record:
        """Where a verify of so many rows writes its record: always the same place.

        All widths share it. It grows to the widest; then their graphs are captured anew.
        """
        if self._record is None or self._record.inputs.shape[1] < rows:
            self._verifies.clear()
            self._records.clear()
            self._record = None  # its memory may serve the larger one
            self._record = LayeredRecord.empty(
                len(self._sets[0].layers),
                rows,
                heads=heads_of(self.config),
                dtype=self.model.dtype,
                device=self.device,
            )
        if rows not in self._records:
            together = self._record.first(rows)
            self._records[rows] = _Record(together, together.layers)
        return self._records[rows]

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

    def _run(
        self, graphs: dict[Kind, Replay[Output]], kind: Kind, run: Callable[[], Output]
    ) -> Output | None:
        """The forward, from its graph; None where it cannot be captured."""
        if kind not in graphs:
            graphs[kind] = Replay(run, device=self.device, pool=self._pool)
        replay = graphs[kind]
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
