"""The Clover model: one stack of layers, run in two ways.

A commit is causal, predicts the next token, and advances the state. A preview is bidirectional
within one block, predicts in place, and reads the state only.
"""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clover_local.cache import SequenceState
from clover_local.config import ModelConfig
from clover_local.experts import Experts
from clover_local.kernels import dispatch
from clover_local.kernels.packed import Weight
from clover_local.model.attention import Angles, Attention
from clover_local.model.gated_delta_net import GatedDeltaNet, take_diffusion
from clover_local.model.linear import Linear
from clover_local.model.moe import MoE, MoEOutput
from clover_local.model.take import Take, take_float32


@dataclass(frozen=True, eq=False)
class PassOutput:
    """What a pass over T rows returns; `rows` are T, or fewer where fewer logits were asked for."""

    logits: Tensor  # [rows, V] float32
    expert_ids: tuple[Tensor, ...]  # per layer [T, A]: -1 where a row used fewer than A experts
    coreset_masks: tuple[Tensor, ...] = ()  # previews with coresets: per layer [E] bool

    @property
    def coresets(self) -> tuple[Tensor, ...]:
        """Per layer the experts that the block could use, ascending ids. Waits for the device."""
        return tuple(mask.nonzero()[:, 0] for mask in self.coreset_masks)


@dataclass(frozen=True, eq=False)
class Layer:
    """h = h + mixer(norm(h)); h = h + moe(norm(h)), where h are the hidden states."""

    input_layernorm: Tensor  # [D] float32
    mixer: Attention | GatedDeltaNet
    post_attention_layernorm: Tensor  # [D] float32
    moe: MoE


def build_layer(
    config: ModelConfig, take: Take, *, layer: int, experts: Experts, diffusion: bool
) -> Layer:
    """Layer `layer` from the parameters that `take` gives by their names without prefix.

    `diffusion` says whether the model has the tensors that previews need.
    """

    def within(part: str) -> Take:
        return lambda name: take(f"layers.{layer}.{part}{name}")

    mixer: Attention | GatedDeltaNet
    if config.is_attention(layer):
        mixer = Attention(config, within("self_attn."), layer=layer)
    else:
        gdn = within("linear_attn.")
        mixer = GatedDeltaNet(config, gdn, diffusion=take_diffusion(gdn) if diffusion else None)
    return Layer(
        input_layernorm=take_float32(within("input_layernorm."), "weight"),
        mixer=mixer,
        post_attention_layernorm=take_float32(within("post_attention_layernorm."), "weight"),
        moe=MoE(config, within("mlp."), layer=layer, experts=experts),
    )


class Head:
    """logits = lm_head(norm(h)), float32."""

    def __init__(self, config: ModelConfig, take: Take) -> None:
        self.eps = config.rms_norm_eps
        self.vocab_size = config.vocab_size
        self.norm = take_float32(take, "norm.weight")
        self.lm_head = Linear(take("lm_head.weight"))

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[T, D] to [T, V]."""
        normed = dispatch.rms_norm(hidden_states, self.norm, eps=self.eps)
        return self.lm_head(normed).float()


class Clover:
    """A Clover model on one device."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: MutableMapping[str, Weight],
        *,
        experts: Experts,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        """Takes every parameter out of `parameters`, so that no weight stays in memory twice.

        Args:
            parameters: by checkpoint name without prefix, without the routed experts.
                `lm_head.weight` is among them also when the embeddings are tied.
            experts: runs the routed experts.
            dtype: of weights and hidden states. Norms, router and the small GDN tensors may come in
                float32 as well; they, GDN state, softmax and logits are float32 in any case.

        Raises:
            ValueError: a parameter is missing or left over, or the embedding is not `dtype`.
        """
        dispatch.check_choice()
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self.can_preview = any(name.endswith("conv_right_weight") for name in parameters)

        def take(name: str) -> Weight:
            if name not in parameters:
                raise ValueError(f"parameter {name} is missing")
            return parameters.pop(name).to(self.device)

        embedding = take("embed_tokens.weight")
        if not isinstance(embedding, Tensor) or embedding.dtype != dtype:
            kind = embedding.dtype if isinstance(embedding, Tensor) else "packed"
            raise ValueError(f"the embedding is {kind}, the model {dtype}")
        self.embedding = embedding
        self.head = Head(config, take)
        self.layers = [
            build_layer(config, take, layer=layer, experts=experts, diffusion=self.can_preview)
            for layer in range(config.num_hidden_layers)
        ]
        if parameters:
            raise ValueError(f"parameters left over: {', '.join(sorted(parameters))}")

    def commit(
        self,
        tokens: Tensor | Sequence[int],
        state: SequenceState,
        *,
        logits: Literal["all", "last", "none"] = "last",
    ) -> PassOutput:
        """Runs `tokens` causally behind what `state` holds, and commits them.

        Row r of the logits predicts token r + 1.

        An exception, KeyboardInterrupt included, leaves `state` as it was.

        Raises:
            ValueError: no tokens, more than fit, or an id outside the vocabulary.
        """
        ids = self._checked(tokens, state)
        recurrent: list[Tensor] = []
        conv: list[Tensor] = []
        expert_ids: list[Tensor] = []
        with torch.inference_mode():
            hidden_states, angles = self._start(ids, state)
            for layer in self.layers:
                x = self._normed(hidden_states, layer.input_layernorm)
                if isinstance(layer.mixer, Attention):
                    mixed = layer.mixer.commit(x, state, angles=angles)
                else:
                    gdn = len(recurrent)
                    mixed, recurrent_state, conv_state = layer.mixer.commit(
                        x, state.committed.recurrent[gdn], conv_state=state.committed.conv[gdn]
                    )
                    recurrent.append(recurrent_state)
                    conv.append(conv_state)
                hidden_states = hidden_states + mixed
                out = layer.moe.commit(self._normed(hidden_states, layer.post_attention_layernorm))
                hidden_states = hidden_states + out.hidden_states
                expert_ids.append(out.expert_ids)
            unwanted = {"all": 0, "last": len(ids) - 1, "none": len(ids)}[logits]
            output = PassOutput(self.head(hidden_states[unwanted:]), tuple(expert_ids))
        state.advance(ids, recurrent=recurrent, conv=conv)
        return output

    def preview(self, block: Tensor | Sequence[int], state: SequenceState) -> PassOutput:
        """Runs a block, MASK in its unresolved rows, behind what `state` holds.

        Row r of the logits predicts the token at row r. `state` stays as it is, bit for bit.

        Raises:
            ValueError: no tokens, more than fit, an id outside the vocabulary, or a model that has
                no diffusion tensors.
        """
        ids = self._checked(block, state)
        outputs: list[MoEOutput] = []
        gdn = 0
        with torch.inference_mode():
            hidden_states, angles = self._start(ids, state)
            for layer in self.layers:
                x = self._normed(hidden_states, layer.input_layernorm)
                if isinstance(layer.mixer, Attention):
                    hidden_states = hidden_states + layer.mixer.preview(x, state, angles=angles)
                else:
                    hidden_states = hidden_states + layer.mixer.preview(
                        x, state.committed.recurrent[gdn], conv_state=state.committed.conv[gdn]
                    )
                    gdn += 1
                out = layer.moe.preview(self._normed(hidden_states, layer.post_attention_layernorm))
                hidden_states = hidden_states + out.hidden_states
                outputs.append(out)
            return PassOutput(
                self.head(hidden_states),
                tuple(out.expert_ids for out in outputs),
                tuple(out.coreset for out in outputs if out.coreset is not None),
            )

    def _checked(self, tokens: Tensor | Sequence[int], state: SequenceState) -> list[int]:
        ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        if not 1 <= len(ids) <= state.room:
            raise ValueError(f"{len(ids)} tokens for a pass, room for 1 to {state.room}")
        for token in ids:
            if not 0 <= token < self.config.vocab_size:
                raise ValueError(f"token id {token}, vocab_size is {self.config.vocab_size}")
        return ids

    def _start(self, ids: list[int], state: SequenceState) -> tuple[Tensor, Angles]:
        """The embedded rows [T, D] and their rotary angles."""
        hidden_states = F.embedding(torch.tensor(ids, device=self.device), self.embedding)
        return hidden_states, Angles.at(
            state.length, rows=len(ids), config=self.config, device=self.device
        )

    def _normed(self, hidden_states: Tensor, weight: Tensor) -> Tensor:
        return dispatch.rms_norm(hidden_states, weight, eps=self.config.rms_norm_eps)
