"""The rows of a layer's input with the experts of each, and Hessians over them.

Sums run over chunks of a fixed number of rows, so that no memory limit changes a bit of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clover_local.errors import CloverError
from clover_local.quant.hessian import add_products, outer
from clover_local.quant.memory import CHUNK_ROWS
from clover_local.quant.pipeline.rows import RowFile
from clover_local.quant.pipeline.source import is_finite

SAMPLE_ROWS = 4096


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some rows of a layer's input, sorted by their experts."""

    x: Tensor  # [C, D] float32
    weights: Tensor  # [C] float32
    rows: Tensor  # [C * A]: rows in the order of their experts
    bounds: Tensor  # [E + 1]: where each expert's rows begin in `rows`

    def rows_of(self, expert: int) -> Tensor:
        """Which rows reach an expert, [r]."""
        return self.rows[self.bounds[expert] : self.bounds[expert + 1]].to(self.x.device)

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        """The rows of one expert [r, D] and their weights [r]."""
        rows = self.rows_of(expert)
        return self.x[rows], self.weights[rows]


@dataclass(frozen=True, eq=False)
class SourceRows:
    """What the unquantized model makes of the same rows."""

    x: RowFile  # [R, D]: inputs of its experts
    mixed: RowFile  # [R, D]: hidden states that its experts add to
    quantized_mixed: RowFile  # [R, D]: those of the quantized model

    def drift(self, start: int, end: int) -> Tensor:
        """What the hidden states before the experts lack of the source's, [rows, D]."""
        return self.mixed.read(start, end).sub_(self.quantized_mixed.read(start, end))


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over the rows of a batch of experts: x^ what a matrix gets, x what the source's gets."""

    outer: Tensor  # [b, K, K]: x^ x^^T
    cross: Tensor | None = None  # [b, K, K]: (x - x^) x^^T; None without source rows
    drift: Tensor | None = None  # [b, D, K]: drift x^^T; None where not asked for

    def add(
        self,
        place: int,
        x: Tensor,
        *,
        weights: Tensor,
        source: Tensor | None = None,
        drift: Tensor | None = None,
    ) -> None:
        """Adds rows of the expert at `place`: x^ [r, K], x [r, K], drift [r, D]; see `outer`."""
        add_products(self.outer[place], x, x, weights=weights)
        if self.cross is not None and source is not None:
            add_products(self.cross[place], source - x, x, weights=weights)
        if self.drift is not None and drift is not None:
            add_products(self.drift[place], drift, x, weights=weights)


Inputs = Callable[[int, Tensor], Tensor]
"""What an expert's matrix gets, [r, K], of the expert's rows [r, D]."""


@dataclass(frozen=True, eq=False)
class RoutedRows:
    """All calibration rows of one layer as its experts get them."""

    x: RowFile  # [R, D]
    expert_ids: Tensor  # [R, A], -1 where a row uses fewer
    weights: Tensor  # [R] float32: what a row counts for in a Hessian
    num_experts: int
    device: str
    source: SourceRows | None = None

    def counts(self) -> Tensor:
        """Rows of each expert, [E] int64."""
        used = self.expert_ids[self.expert_ids >= 0]
        return torch.bincount(used, minlength=self.num_experts)

    def weighted_counts(self) -> Tensor:
        """The sum of the weights of each expert's rows, [E] float32."""
        used = self.expert_ids >= 0
        weights = self.weights[:, None].expand_as(self.expert_ids)[used].double()
        counts = torch.bincount(self.expert_ids[used], weights, minlength=self.num_experts)
        return counts.float().to(self.device)

    def chunks(self) -> Iterator[Chunk]:
        """The rows in order."""
        for start in self._starts:
            end = min(start + CHUNK_ROWS, len(self.expert_ids))
            yield self._chunk(self.x.read(start, end), torch.arange(start, end))

    def sample(self) -> Chunk:
        """At most `SAMPLE_ROWS` rows, evenly spread."""
        total = len(self.expert_ids)
        chosen = torch.linspace(0, total - 1, min(SAMPLE_ROWS, total)).long()
        x = torch.cat([self.x.read(row, row + 1) for row in chosen.tolist()])
        return self._chunk(x, chosen)

    def pooled(self) -> Tensor:
        """The mean outer product [D, D] over what all experts see.

        Raises:
            CloverError: rows that are not finite, or that reach no expert.
        """
        total = torch.zeros(self.x.width, self.x.width, device=self.device)
        seen = 0.0
        uses = (self.expert_ids >= 0).sum(-1)  # experts of each row
        for start, chunk in zip(self._starts, self.chunks(), strict=True):
            if not is_finite(chunk.x):
                raise CloverError(
                    "the calibration text gives hidden states that are no numbers: "
                    "check the checkpoint with `clover-local verify`"
                )
            weights = chunk.weights * uses[start : start + len(chunk.x)].to(chunk.x)
            total += outer(chunk.x, weights=weights)
            seen += float(weights.double().sum())
        if not seen > 0:
            raise CloverError("no row of the calibration text reached an expert: pass a longer one")
        return total / seen

    def sums(
        self,
        batches: Sequence[range],
        inputs: Inputs,
        *,
        width: int,
        source_inputs: Inputs | None = None,
        with_drift: bool = False,
    ) -> list[Sums]:
        """Sums for batches of experts; those of the source's rows, if there are any.

        Args:
            inputs: of the matrix that is quantized.
            width: K.
            source_inputs: of the source's; the same as `inputs` where not given.
            with_drift: whether the matrix adds to the hidden states.
        """
        ideal = source_inputs or inputs
        sums = [self._zeros(len(batch), width, with_drift=with_drift) for batch in batches]
        for start, chunk in zip(self._starts, self.chunks(), strict=True):
            end = start + len(chunk.x)
            source = drift = None
            if self.source is not None:
                source = self.source.x.read(start, end).to(self.device)
                drift = self.source.drift(start, end).to(self.device) if with_drift else None
            for batch, total in zip(batches, sums, strict=True):
                for place, expert in enumerate(batch):
                    rows = chunk.rows_of(expert)
                    if len(rows):
                        total.add(
                            place,
                            inputs(expert, chunk.x[rows]),
                            weights=chunk.weights[rows],
                            source=None if source is None else ideal(expert, source[rows]),
                            drift=None if drift is None else drift[rows],
                        )
        return sums

    @property
    def _starts(self) -> range:
        return range(0, len(self.expert_ids), CHUNK_ROWS)

    def _zeros(self, experts: int, width: int, *, with_drift: bool) -> Sums:
        square = torch.zeros(experts, width, width, device=self.device)
        if self.source is None:
            return Sums(square)
        if not with_drift:
            return Sums(square, square.clone())
        drift = torch.zeros(experts, self.x.width, width, device=self.device)
        return Sums(square, square.clone(), drift)

    def _chunk(self, x: Tensor, chosen: Tensor) -> Chunk:
        ids = self.expert_ids[chosen]
        sorted_ids, order = ids.flatten().sort(stable=True)
        bounds = torch.searchsorted(
            sorted_ids, torch.arange(self.num_experts + 1, dtype=sorted_ids.dtype)
        )
        weights = self.weights[chosen].to(self.device)
        return Chunk(x.to(self.device), weights, order // ids.shape[1], bounds)
