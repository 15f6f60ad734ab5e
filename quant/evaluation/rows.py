"""Which rows of the evaluation sequences are compared, and their hidden states after a model.

One decoder layer is in memory at a time, so that a model of any size can be evaluated; between two
layers the hidden states of all rows lie in one buffer, in a file once they are large. Everything is
float32: what is measured is the checkpoint, not the arithmetic of a device.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from clover_local.checkpoint.parameters import EMBEDDING
from clover_local.checkpoint.read import read_experts, read_layer, read_outer
from clover_local.errors import CloverError
from clover_local.kernels.packed import Weight
from clover_local.model.clover import Head
from clover_local.quant import stream
from clover_local.quant.allocator import give_back
from clover_local.quant.calibration import CalibrationSequence
from clover_local.quant.grouped import GroupedExperts, places, through_layer
from clover_local.session import OpenModel

IN_MEMORY_BYTES = 1 << 30  # of hidden states; more go to a temporary file
LENS_ROWS = 64  # rows whose way through the layers is kept


@dataclass(frozen=True, eq=False)
class EvaluationRows:
    """Rows of a list of sequences, by their place among all rows of all of them.

    A sequence's commit rows come first, then its preview rows; then the next sequence.
    """

    sequences: tuple[CalibrationSequence, ...]
    causal: Tensor  # [N] places of the commit rows that have a next token
    next_tokens: Tensor  # [N] those tokens
    masked: Tensor  # [M] places of the masked preview rows that hold text
    hidden_tokens: Tensor  # [M] that text
    ratios: Tensor  # [M] float64: mask ratio of their blocks
    blocks: Tensor  # [M] numbers of their blocks, from 0 over all sequences
    lens: Tensor  # [S] places of the rows whose way through the layers is kept

    @property
    def count(self) -> int:
        """All rows."""
        return sum(sequence.rows for sequence in self.sequences)


def rows_of(sequences: Sequence[CalibrationSequence]) -> EvaluationRows:
    """The rows to compare.

    Raises:
        CloverError: there is no row that predicts a next token.
    """
    causal: list[int] = []
    next_tokens: list[int] = []
    masked: list[tuple[int, int, float, int]] = []
    place = block_number = 0
    for sequence in sequences:
        causal += range(place, place + len(sequence.tokens) - 1)
        next_tokens += sequence.tokens[1:]
        place += len(sequence.tokens)
        for block in sequence.previews:
            rows = [row for row in block.masked if row < block.text_rows]
            masked += [
                (place + row, sequence.tokens[block.start + row], block.ratio, block_number)
                for row in rows
            ]
            place += len(block.tokens)
            block_number += 1
    if not causal:
        raise CloverError("the text gives no row to evaluate: pass a longer one")
    places, hidden, ratios, blocks = zip(*masked, strict=True) if masked else ((), (), (), ())
    compared = torch.tensor(sorted({*causal, *places}))
    sample = torch.linspace(0, len(compared) - 1, min(LENS_ROWS, len(compared))).long()
    return EvaluationRows(
        sequences=tuple(sequences),
        causal=torch.tensor(causal),
        next_tokens=torch.tensor(next_tokens),
        masked=torch.tensor(places, dtype=torch.long),
        hidden_tokens=torch.tensor(hidden, dtype=torch.long),
        ratios=torch.tensor(ratios, dtype=torch.float64),
        blocks=torch.tensor(blocks, dtype=torch.long),
        lens=compared[sample],
    )


@dataclass(frozen=True, eq=False)
class ModelStates:
    """What streaming one model leaves: hidden states before the final norm, and the head."""

    head: Head
    causal: Tensor  # [N, D] of `EvaluationRows.causal`
    masked: Tensor  # [M, D]
    lens: Tensor  # [L, S, D]: after every layer
    tokens_per_expert: tuple[tuple[int, ...], ...]  # [L][E], over all rows


def states_of(
    model: OpenModel,
    rows: EvaluationRows,
    *,
    device: torch.device | str = "cpu",
    on_layer: Callable[[], None] = lambda: None,
) -> ModelStates:
    """Streams the sequences through all layers of a model.

    Raises:
        CheckpointError: weights that cannot be read.
        CloverError: a layer whose router chose no expert for any row.
    """
    config = model.config
    outer = read_outer(model.checkpoint, config)
    head = stream.build_head(config, outer, device=device)
    lens, counts = [], []
    with _buffer(rows.count, config.hidden_size) as buffer:
        for sequence, place in places(rows.sequences):
            buffer[place] = stream.embed(sequence, outer[EMBEDDING]).joined
        del outer
        for layer in range(config.num_hidden_layers):
            counts.append(_through_layer(model, layer, rows, buffer, device=device))
            lens.append(buffer[rows.lens])
            on_layer()
        return ModelStates(
            head, buffer[rows.causal], buffer[rows.masked], torch.stack(lens), tuple(counts)
        )


@torch.inference_mode()
def _through_layer(
    model: OpenModel,
    layer: int,
    rows: EvaluationRows,
    buffer: Tensor,
    *,
    device: torch.device | str,
) -> tuple[int, ...]:
    """Takes all rows through one layer, in place; returns how many rows each expert saw."""
    config = model.config

    def read(expert: int) -> tuple[Weight, Weight]:
        one = read_experts(model.checkpoint, config, layer, [expert])
        return one.gate_up[0], one.down[0]

    built = stream.build_layer(
        config,
        read_layer(model.checkpoint, config, layer),
        layer=layer,
        experts=GroupedExperts(config, read, device=device),
        device=device,
    )
    counts = torch.zeros(config.num_experts + 1, dtype=torch.long)
    for passed in through_layer(built, rows.sequences, lambda place: buffer[place].to(device)):
        buffer[passed.place] = passed.behind.joined.cpu()
        used = passed.inputs.routing.expert_ids.flatten() + 1  # -1 stands for none
        counts += used.bincount(minlength=len(counts)).cpu()
    give_back()
    if not int(counts[1:].sum()):
        raise CloverError(f"layer {layer} of {model.name} saw no row: report this as a fault")
    return tuple(counts[1:].tolist())


@contextmanager
def _buffer(rows: int, columns: int) -> Iterator[Tensor]:
    """A float32 tensor [rows, columns], in a temporary file where it is large."""
    if rows * columns * 4 <= IN_MEMORY_BYTES:
        yield torch.empty(rows, columns)
        return
    with tempfile.NamedTemporaryFile(prefix="clover-local-") as file:
        yield torch.from_file(
            file.name, shared=True, size=rows * columns, dtype=torch.float32
        ).view(rows, columns)
