"""Collects an importance matrix: the mean square of each input of each matrix, layer by layer.

llama.cpp's own tool sees causal rows only. Here previews count too, because a block is denoised by
them: masked rows have other inputs, and route to other experts. The texts and maskings are those of
`calibration.py`, the mathematics is that of `stream.py`.

What goes into a mixer's last matrix is seen by building the layer with the identity in its place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from clover_local.checkpoint.parameters import EMBEDDING, HEAD
from clover_local.checkpoint.read import read_experts, read_layer, read_outer
from clover_local.config import ModelConfig
from clover_local.gguf.imatrix import Sums
from clover_local.gguf.tensors import Heads, NamedEntry, named_entries
from clover_local.kernels import dispatch
from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.model.clover import Layer
from clover_local.quant import stream
from clover_local.quant.calibration import CalibrationSequence
from clover_local.quant.stream import MoEInputs, Rows
from clover_local.session import OpenModel

_MIXER_LAST = ("linear_attn.out_proj.weight", "self_attn.o_proj.weight")


@dataclass(eq=False)
class _Sum:
    """Sums of squares in float64, and the weight of the rows; one row a matrix."""

    squares: NDArray[np.float64]  # [matrices, columns]
    counts: NDArray[np.float64]  # [matrices]


@dataclass(eq=False)
class _Collector:
    """Sums by GGUF tensor name."""

    config: ModelConfig
    preview_weight: float
    sums: dict[str, _Sum] = field(default_factory=dict)

    def add(
        self, named: NamedEntry, x: Tensor, *, previews: Tensor, expert: int | None = None
    ) -> None:
        """Rows `x` [R, columns] that the tensor is multiplied with; `previews` [R] says which are
        a preview's."""
        matrices = named.shape[0] if named.entry.of_experts else 1
        if named.name not in self.sums:
            self.sums[named.name] = _Sum(np.zeros((matrices, x.shape[1])), np.zeros(matrices))
        weights = torch.where(previews, self.preview_weight, 1.0).double()
        squares = (weights @ x.double().square()).cpu().numpy()
        if named.entry.heads is Heads.COLUMNS:
            order = named.entry.order(self.config)
            squares = squares if order is None else squares[order]
        total = self.sums[named.name]
        total.squares[expert or 0] += squares
        total.counts[expert or 0] += float(weights.sum())


def collect(
    opened: OpenModel,
    sequences: Sequence[CalibrationSequence],
    *,
    preview_weight: float = 1.0,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Sums]:
    """The sums of every quantized tensor but the embedding, by its name in a GGUF file.

    Args:
        preview_weight: what a preview's row counts for; a commit's row is 1.
        on_progress: called with layers done and layers in all.

    Raises:
        CheckpointError: a file cannot be read.
    """
    config = opened.config
    collector = _Collector(config, preview_weight)
    outer = read_outer(opened.checkpoint, config)
    embedding = _plain(outer[EMBEDDING], device)
    rows = [stream.embed(sequence, embedding) for sequence in sequences]
    del embedding
    by_layer: dict[int | None, list[NamedEntry]] = {}
    for named in named_entries(config):
        if not named.entry.float32:
            by_layer.setdefault(named.layer, []).append(named)
    for layer in range(config.num_hidden_layers):
        on_progress(layer, config.num_hidden_layers)
        rows = _LayerPass(opened, layer, by_layer[layer], collector, device).run(sequences, rows)
    last = [_joined(sequence, each) for sequence, each in zip(sequences, rows, strict=True)]
    norm = _plain(outer["norm.weight"], device)
    for named in by_layer[None]:
        if named.parameter == HEAD:
            for x, previews in last:
                normed = dispatch.rms_norm(x, norm, eps=config.rms_norm_eps)
                collector.add(named, normed, previews=previews)
    on_progress(config.num_hidden_layers, config.num_hidden_layers)
    return {
        name: Sums(each.squares.astype(np.float32), each.counts.astype(np.float32))
        for name, each in collector.sums.items()
    }


class _LayerPass:
    """All rows through one layer, its inputs collected on the way."""

    def __init__(
        self,
        opened: OpenModel,
        layer: int,
        entries: Sequence[NamedEntry],
        collector: _Collector,
        device: torch.device | str,
    ) -> None:
        self.opened = opened
        self.layer = layer
        self.collector = collector
        self.device = device
        prefix = f"layers.{layer}."
        self.parameters = read_layer(opened.checkpoint, opened.config, layer)
        self.experts = {each.name: each for each in entries if each.entry.of_experts}
        self.others = {
            each.parameter.removeprefix(prefix): each
            for each in entries
            if not each.entry.of_experts
        }
        (self.last,) = [name for name in _MIXER_LAST if prefix + name in self.parameters]

    def run(self, sequences: Sequence[CalibrationSequence], rows: Sequence[Rows]) -> list[Rows]:
        """The rows behind the layer."""
        inputs: list[MoEInputs] = []
        mixed: list[Rows] = []
        layer = self._built()
        last = self._weight(self.last)
        for sequence, each in zip(sequences, rows, strict=True):
            x = stream.normed(layer, each, sequence)
            inner = stream.mixer_output(layer, x, sequence)
            self._collect_mixer(sequence, x, inner)
            mixed.append(Rows.split(each.joined + inner @ last.T, sequence))
            inputs.append(stream.moe_inputs(layer, mixed[-1], sequence))
            self._collect_shared(sequence, inputs[-1].x)
        routed = self._routed(sequences, inputs)
        return [
            stream.finish(each, given, out)
            for each, given, out in zip(mixed, inputs, routed, strict=True)
        ]

    def _built(self) -> Layer:
        """The layer with the identity as its mixer's last matrix."""
        config = self.opened.config
        name = f"layers.{self.layer}.{self.last}"
        width = self.parameters[name].shape[1]
        no_expert = (torch.zeros(2, config.hidden_size), torch.zeros(config.hidden_size, 1))
        return stream.build_layer(
            config,
            {**self.parameters, name: torch.eye(width)},
            layer=self.layer,
            experts=stream.LayerExperts([no_expert]),
            device=self.device,
        )

    def _collect_mixer(self, sequence: CalibrationSequence, x: Rows, inner: Tensor) -> None:
        joined, previews = _joined(sequence, x)
        for name, named in self.others.items():
            if name == self.last:
                self.collector.add(named, inner, previews=previews)
            elif not name.startswith("mlp."):
                self.collector.add(named, joined, previews=previews)

    def _collect_shared(self, sequence: CalibrationSequence, x: Tensor) -> None:
        previews = _previews(sequence, x)
        gate, up = (
            self._weight(f"mlp.shared_expert.{name}_proj.weight") for name in ("gate", "up")
        )
        hidden = F.silu(x @ gate.T) * (x @ up.T)
        for name, named in self.others.items():
            if name.startswith("mlp.shared_expert."):
                inner = hidden if name.endswith("down_proj.weight") else x
                self.collector.add(named, inner, previews=previews)

    def _routed(
        self, sequences: Sequence[CalibrationSequence], inputs: Sequence[MoEInputs]
    ) -> list[Tensor]:
        """The routed experts' sums [R, D] of each sequence; every expert is read once."""
        x = torch.cat([each.x for each in inputs])
        ids = torch.cat([each.routing.expert_ids for each in inputs])
        weights = torch.cat([each.routing.weights for each in inputs])
        previews = torch.cat(
            [_previews(*pair) for pair in zip(sequences, (each.x for each in inputs), strict=True)]
        )
        total = torch.zeros_like(x)
        for expert in range(self.opened.config.num_experts):
            used = ids == expert
            here = used.any(1)
            if not here.any():
                continue
            gate_up, down = (
                _plain(weight, self.device)
                for (weight,) in read_experts(
                    self.opened.checkpoint, self.opened.config, self.layer, [expert]
                )
            )
            gate, up = (x[here] @ gate_up.T).chunk(2, dim=-1)
            hidden = F.silu(gate) * up
            for name, named in self.experts.items():
                inner = hidden if "ffn_down" in name else x[here]
                self.collector.add(named, inner, previews=previews[here], expert=expert)
            total[here] += (hidden @ down.T) * (weights * used).sum(1)[here, None]
        return list(torch.split(total, [len(each.x) for each in inputs]))

    def _weight(self, name: str) -> Tensor:
        return _plain(self.parameters[f"layers.{self.layer}.{name}"], self.device)


def _plain(weight: Weight, device: torch.device | str) -> Tensor:
    plain = weight.dequantize() if isinstance(weight, PackedWeight) else weight
    return plain.to(device=device, dtype=torch.float32)


def _joined(sequence: CalibrationSequence, rows: Rows) -> tuple[Tensor, Tensor]:
    """All rows, and which of them are a preview's."""
    joined = rows.joined
    return joined, _previews(sequence, joined)


def _previews(sequence: CalibrationSequence, joined: Tensor) -> Tensor:
    return torch.arange(len(joined), device=joined.device) >= len(sequence.tokens)


def unseen_experts(sums: Mapping[str, Sums]) -> int:
    """How many experts of all layers no row has reached."""
    return sum(
        int((each.counts == 0).sum()) for name, each in sums.items() if "ffn_up_exps" in name
    )
