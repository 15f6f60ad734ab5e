"""A model run one decoder layer at a time: the weights of one layer in memory, rows of all texts.

Every row of a sequence goes through a layer before any goes through the next: commit rows as in a
prefill, and the rows of each preview against the layer's state at the start of their block. The
mathematics is the runtime's own (`clover_local.model`). Mixers walk a sequence block by block; the
experts see all its rows at once, so that each is read once a sequence.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clover_local.cache import SequenceState
from clover_local.checkpoint.parameters import kind_of
from clover_local.config import ModelConfig
from clover_local.experts.protocol import ExpertResults, Experts, Uncached
from clover_local.kernels import dispatch
from clover_local.kernels.dispatch import AnyRouting, DeltaState
from clover_local.kernels.packed import Weight
from clover_local.kernels.route import Routing
from clover_local.model import clover
from clover_local.model.attention import Angles, Attention
from clover_local.model.clover import Head, Layer
from clover_local.model.gated_delta_net import GatedDeltaNet
from clover_local.quant.calibration import CalibrationSequence


@dataclass(frozen=True, eq=False)
class Rows:
    """The hidden states of one sequence between two layers."""

    commit: Tensor  # [T, D]
    preview: Tensor  # [P, D]: the rows of its preview blocks, one block after the other

    @property
    def joined(self) -> Tensor:
        """All rows [T + P, D], commit rows first."""
        return torch.cat([self.commit, self.preview])

    @classmethod
    def split(cls, joined: Tensor, sequence: CalibrationSequence) -> "Rows":
        """The opposite of `joined`; makes no copy."""
        return cls(*torch.split(joined, [len(sequence.tokens), sequence.preview_rows]))


@dataclass(frozen=True, eq=False)
class MoEInputs:
    """What a layer asks of its routed experts for one sequence, and adds to their answer."""

    x: Tensor  # [R, D], R = T + P rows, commit rows first
    routing: Routing  # of R rows; previews inside the coreset of their block
    shared: Tensor  # [R, D] float32: the shared expert's part


class LayerExperts(Uncached):
    """The routed experts of the one layer that is in memory."""

    def __init__(
        self,
        experts: Iterable[tuple[Weight, Weight]],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Takes gate_up [2F, D] and down [D, F] expert by expert; plain ones become `dtype`.

        An iterator that reads each expert when its turn comes keeps none in memory twice.
        """
        placed: tuple[list[Weight], list[Weight]] = ([], [])
        for expert in experts:
            for kind, weight in zip(placed, expert, strict=True):
                kind.append(
                    weight.to(device, dtype) if isinstance(weight, Tensor) else weight.to(device)
                )
        # Not as `ResidentExperts` keeps them: that layout is for few rows at a time.
        self._gate_up, self._down = (dispatch.ExpertMatrices(kind) for kind in placed)

    @property
    def waits_because(self) -> str:
        """See `Experts.waits_because`."""
        return "a layer alone runs no passes"

    def forward(self, layer: int, x: Tensor, *, routing: AnyRouting) -> ExpertResults:
        """See `Experts.forward`; `layer` does not matter."""
        return ExpertResults(self.sum(x, dispatch.plain_routing(routing))[:, None])

    def sum(self, x: Tensor, routing: Routing) -> Tensor:
        """The weighted sum of each row's experts: `x` [T, D] to [T, D] float32."""
        return dispatch.expert_mlp(x, routing, gate_up=self._gate_up, down=self._down)


def build_layer(
    config: ModelConfig,
    parameters: Mapping[str, Weight],
    *,
    layer: int,
    experts: Experts,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Layer:
    """Layer `layer` from its parameters by name without prefix; what is packed stays so.

    Args:
        parameters: among them all of `layers.{layer}.` but the routed experts, in any dtype.
        dtype: of plain weights and hidden states; small parameters are float32 in any case.

    Raises:
        ValueError: a parameter is missing.
    """

    def take(name: str) -> Weight:
        if name not in parameters:
            raise ValueError(f"parameter {name} is missing")
        weight = parameters[name].to(device)
        if not isinstance(weight, Tensor):
            return weight
        return weight.to(torch.float32 if kind_of(name).float32 else dtype)

    diffusion = any(name.endswith("conv_right_weight") for name in parameters)
    return clover.build_layer(config, take, layer=layer, experts=experts, diffusion=diffusion)


def build_head(
    config: ModelConfig,
    outer: Mapping[str, Weight],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Head:
    """The final norm and `lm_head` among `outer`: `head(hidden_states)` are float32 logits."""

    def take(name: str) -> Weight:
        weight = outer[name].to(device)
        if not isinstance(weight, Tensor) or kind_of(name).float32:
            return weight
        return weight.to(dtype)

    return Head(config, take)


def embed(sequence: CalibrationSequence, embedding: Weight) -> Rows:
    """The rows before the first layer; `embedding` [V, D] on the device and in the dtype to use.

    Raises:
        ValueError: it is packed.
    """
    if not isinstance(embedding, Tensor):
        raise ValueError(f"the embedding is packed to {embedding.bits} bits, it has to be plain")
    tokens = [*sequence.tokens, *(token for block in sequence.previews for token in block.tokens)]
    ids = torch.tensor(tokens, device=embedding.device)
    return Rows.split(F.embedding(ids, embedding), sequence)


@torch.inference_mode()
def run_layer(layer: Layer, rows: Rows, sequence: CalibrationSequence) -> Rows:
    """One sequence through the whole layer, with the layer's own routed experts."""
    mixed = mix(layer, rows, sequence)
    inputs = moe_inputs(layer, mixed, sequence)
    moe = layer.moe
    routed = moe.experts.forward(moe.layer, inputs.x, routing=inputs.routing)
    return finish(mixed, inputs, routed.sum())


@torch.inference_mode()
def mix(layer: Layer, rows: Rows, sequence: CalibrationSequence) -> Rows:
    """h + mixer(norm(h)) for all rows of a sequence."""
    mixed = mixer_output(layer, normed(layer, rows, sequence), sequence)
    return Rows.split(rows.joined + mixed, sequence)


def normed(layer: Layer, rows: Rows, sequence: CalibrationSequence) -> Rows:
    """norm(h): what the mixer gets."""
    eps = layer.moe.config.rms_norm_eps
    x = dispatch.rms_norm(rows.joined, layer.input_layernorm, eps=eps)
    return Rows.split(x, sequence)


@torch.inference_mode()
def mixer_output(layer: Layer, x: Rows, sequence: CalibrationSequence) -> Tensor:
    """mixer(x), joined: as wide as the rows of the mixer's last matrix."""
    if isinstance(layer.mixer, Attention):
        return _mix_attention(layer.mixer, x, sequence)
    return _mix_gdn(layer.mixer, x, sequence)


@torch.inference_mode()
def moe_inputs(layer: Layer, rows: Rows, sequence: CalibrationSequence) -> MoEInputs:
    """What the layer's experts get after `mix`."""
    moe = layer.moe
    x = dispatch.rms_norm(rows.joined, layer.post_attention_layernorm, eps=moe.config.rms_norm_eps)
    router_logits, gate = moe.scores(x)
    sizes = [len(sequence.tokens), *(len(block.tokens) for block in sequence.previews)]
    commit, *blocks = torch.split(router_logits, sizes)
    routings = [moe.route(commit), *(moe.route_block(block)[0] for block in blocks)]
    return MoEInputs(
        x,
        Routing(
            torch.cat([routing.expert_ids for routing in routings]),
            torch.cat([routing.weights for routing in routings]),
        ),
        moe.shared(x).float() * gate.sigmoid(),
    )


def finish(rows: Rows, inputs: MoEInputs, routed: Tensor) -> Rows:
    """h + moe(norm(h)): `rows` from `mix`, `routed` [R, D] float32 the routed experts' sum."""
    commit_rows = len(rows.commit)
    added = (routed + inputs.shared).to(inputs.x.dtype)
    return Rows(rows.commit + added[:commit_rows], rows.preview + added[commit_rows:])


@dataclass(frozen=True)
class _Span:
    """Rows that a mixer takes in one call, and the position of the first in the sequence."""

    position: int
    rows: slice
    is_preview: bool


def _walk(sequence: CalibrationSequence) -> Iterator[_Span]:
    """Commits up to the start of each block, then its preview; at last the rest."""
    position = row = 0
    for block in sequence.previews:
        if position < block.start:
            yield _Span(position, slice(position, block.start), False)
        position = block.start
        yield _Span(position, slice(row, row + len(block.tokens)), True)
        row += len(block.tokens)
    if position < len(sequence.tokens):
        yield _Span(position, slice(position, len(sequence.tokens)), False)


def _mix_attention(mixer: Attention, x: Rows, sequence: CalibrationSequence) -> Tensor:
    """Attention of all rows, joined [R, D]."""
    state = _empty_state(mixer.config, x, sequence)
    committed: list[Tensor] = []
    previewed: list[Tensor] = []
    for span in _walk(sequence):
        part = (x.preview if span.is_preview else x.commit)[span.rows]
        angles = Angles.at(span.position, rows=len(part), config=mixer.config, device=part.device)
        if span.is_preview:
            cache = state.view().keys_values[mixer.layer]
            previewed.append(mixer.preview(part, cache, angles=angles))
        else:
            state.reserve(len(part))
            cache = state.view().keys_values[mixer.layer]
            committed.append(mixer.commit(part, cache, angles=angles))
            state.advance(sequence.tokens[span.rows], recurrent=(), conv=())
    return torch.cat([*committed, *previewed])


def _mix_gdn(mixer: GatedDeltaNet, x: Rows, sequence: CalibrationSequence) -> Tensor:
    """Gated DeltaNet of all rows, joined [R, D]."""
    state: DeltaState = _empty_state(mixer.config, x, sequence).view().delta[0]
    committed: list[Tensor] = []
    previewed: list[Tensor] = []
    for span in _walk(sequence):
        if span.is_preview:
            previewed.append(mixer.preview(x.preview[span.rows], state))
        else:
            mixed, state = mixer.commit(x.commit[span.rows], state)
            committed.append(mixed)
    return torch.cat([*committed, *previewed])


def _empty_state(config: ModelConfig, x: Rows, sequence: CalibrationSequence) -> SequenceState:
    return SequenceState(
        config, context=len(sequence.tokens), device=x.commit.device, dtype=x.commit.dtype
    )
