"""The Clover model: one stack of layers, run in two ways.

A commit is causal, predicts the next token, and advances the state. A preview is bidirectional
within one block, predicts in place, and reads the state only. A verify is a commit that waits: its
rows count only once they are accepted, as many of them as are.
"""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from clover_local.cache import SequenceState, StateView, VerifyRecord
from clover_local.config import ModelConfig
from clover_local.experts.protocol import Experts
from clover_local.experts.traffic import OffloadStats
from clover_local.kernels import dispatch
from clover_local.kernels.dispatch import DeltaRecord, DeltaState, MixedExperts
from clover_local.kernels.packed import Weight
from clover_local.model.attention import Angles, Attention
from clover_local.model.gated_delta_net import GatedDeltaNet, take_diffusion
from clover_local.model.linear import Linear
from clover_local.model.moe import MoE, MoEOutput
from clover_local.model.output import PassOutput, VerifyOutput
from clover_local.model.take import Take, take_float32
from clover_local.residency.demand import CommitKind

Logits = Literal["all", "last", "none"]
"""Of which rows of a commit."""


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
        embedding_on_host: bool = False,
    ) -> None:
        """Takes every parameter out of `parameters`, so that no weight stays in memory twice.

        Args:
            parameters: by checkpoint name without prefix, without the routed experts.
                `lm_head.weight` is among them also when the embeddings are tied.
            experts: runs the routed experts.
            dtype: of weights and hidden states. Norms, router and the small GDN tensors may come in
                float32 as well; they, GDN state, softmax and logits are float32 in any case.
            embedding_on_host: leaves it in host memory, pinned, from where a GPU reads the rows of
                a pass; not for a CPU, and not where the head is the same tensor.

        Raises:
            ValueError: a parameter is missing or left over, the embedding is not `dtype`, or
                `CLOVER_KERNELS` asks for what does not exist.
        """
        self.config = config
        self.experts = experts
        self.device = torch.device(device)
        self.dtype = dtype
        dispatch.check_choice(self.device, dtype)
        self.can_preview = any(name.endswith("conv_right_weight") for name in parameters)
        self._angles = Angles.at(0, rows=1, config=config, device=self.device)

        def take(name: str) -> Weight:
            if name not in parameters:
                raise ValueError(f"parameter {name} is missing")
            return parameters.pop(name).to(self.device)

        if embedding_on_host:
            embedding = parameters.pop("embed_tokens.weight").to("cpu")
        else:
            embedding = take("embed_tokens.weight")
        if not isinstance(embedding, Tensor) or embedding.dtype != dtype:
            kind = embedding.dtype if isinstance(embedding, Tensor) else "packed"
            raise ValueError(f"the embedding is {kind}, the model {dtype}")
        self.embedding = embedding.pin_memory() if embedding_on_host else embedding
        self.head = Head(config, take)
        self.layers = [
            build_layer(config, take, layer=layer, experts=experts, diffusion=self.can_preview)
            for layer in range(config.num_hidden_layers)
        ]
        if parameters:
            raise ValueError(f"parameters left over: {', '.join(sorted(parameters))}")

    @property
    def rotary_bytes(self) -> int:
        """Bytes of the tables of rotary angles."""
        return self._angles.cos.nbytes + self._angles.sin.nbytes

    def prepare(self, state: SequenceState) -> None:
        """Makes what passes over this sequence need at fixed places, before the first one."""
        if state.context > len(self._angles.cos):
            self._angles = Angles.at(0, rows=state.context, config=self.config, device=self.device)

    def offload_stats(self) -> OffloadStats | None:
        """What the cache of experts did since the start; None where every expert is resident."""
        return self.experts.stats()

    def give_up_memory(self) -> str | None:
        """Frees some of the device's memory, and says how; None where there is none to free."""
        return self.experts.shrink()

    def commit(
        self,
        tokens: Tensor | Sequence[int],
        state: SequenceState,
        *,
        logits: Logits = "last",
        kind: CommitKind = "commit",
    ) -> PassOutput:
        """Runs `tokens` causally behind what `state` holds, and commits them.

        Row r of the logits predicts token r + 1. `kind` says whether they are of a prompt.

        An exception, KeyboardInterrupt included, leaves `state` as it was.

        Raises:
            ValueError: no tokens, more than fit, or an id outside the vocabulary.
        """
        ids = self.checked(tokens, state)
        with torch.inference_mode():
            state.reserve(len(ids))
            rows = torch.tensor(ids, device=self.device)
            self.experts.begin(kind, block=state.length)
            output, delta = self.commit_rows(rows, state.view(), logits=logits)
        state.advance(ids, recurrent=[x.recurrent for x in delta], conv=[x.conv for x in delta])
        return output

    def preview(self, block: Tensor | Sequence[int], state: SequenceState) -> PassOutput:
        """Runs a block, MASK in its unresolved rows, behind what `state` holds.

        Row r of the logits predicts the token at row r. `state` stays as it is, bit for bit.

        Raises:
            ValueError: no tokens, more than fit, an id outside the vocabulary, or a model that has
                no diffusion tensors.
        """
        ids = self.checked(block, state)
        with torch.inference_mode():
            self.experts.begin("preview", block=state.length)
            rows = torch.tensor(ids, device=self.device)
            return self.preview_rows(rows, state.view(scratch=True))

    def verify(self, tokens: Tensor | Sequence[int], state: SequenceState) -> VerifyOutput:
        """Runs `tokens` as a commit does, but leaves the state where it is.

        Keys and values are written behind the committed rows, where they count for nothing until
        `accept`; any other pass over `state` that writes rows makes the record worthless.

        Raises:
            ValueError: as `commit`.
        """
        ids = self.checked(tokens, state)
        with torch.inference_mode():
            state.reserve(len(ids))
            rows = torch.tensor(ids, device=self.device)
            self.experts.begin("commit", block=state.length)
            output, delta = self.verify_rows(rows, state.view())
        record = VerifyRecord(state.committed, tuple(ids), tuple(delta))
        return VerifyOutput(output.logits, output.expert_ids, record=record)

    def accept(self, record: VerifyRecord, rows: int, state: SequenceState) -> None:
        """Commits the first `rows` rows of the last verify over `state`.

        The GDN states are replayed from the record; no layer runs again.

        Raises:
            ValueError: more rows than were verified, or none; a state that has gone on since.
        """
        tokens = record.first(rows, state)
        with torch.inference_mode():
            delta = [
                dispatch.replay(each, rows=rows, before=before)
                for each, before in zip(record.delta, state.view().delta, strict=True)
            ]
        state.advance(
            tokens,
            recurrent=[x.recurrent for x in delta],
            conv=[x.conv for x in delta],
        )

    def commit_rows(
        self,
        ids: Tensor,
        before: StateView,
        *,
        logits: Logits,
        into: Sequence[DeltaState] | None = None,
    ) -> tuple[PassOutput, list[DeltaState]]:
        """`commit` without the bookkeeping: nothing here depends on a value or waits for one.

        Args:
            ids: [T] int64 on the device, checked.
            before: writes keys and values behind its committed rows; the rest is only read.
            logits: of which rows.
            into: where the new GDN states go, layer by layer; new tensors without it.

        Returns:
            The output, and the GDN states after the rows.
        """
        delta: list[DeltaState] = []

        def mix(mixer: GatedDeltaNet, x: Tensor) -> Tensor:
            number = len(delta)
            own = None if into is None else into[number]
            mixed, after = mixer.commit(x, before.delta[number], into=own)
            delta.append(after)
            return mixed

        x, outputs = self._causal(ids, before, mix)
        unwanted = {"all": 0, "last": len(ids) - 1, "none": len(ids)}[logits]
        return self._output(x[unwanted:], outputs), delta

    def verify_rows(
        self, ids: Tensor, before: StateView, *, into: Sequence[DeltaRecord] | None = None
    ) -> tuple[PassOutput, list[DeltaRecord]]:
        """`verify` without the bookkeeping; arguments as in `commit_rows`, `into` for records."""
        delta: list[DeltaRecord] = []

        def mix(mixer: GatedDeltaNet, x: Tensor) -> Tensor:
            number = len(delta)
            own = None if into is None else into[number]
            mixed, record = mixer.verify(x, before.delta[number], into=own)
            delta.append(record)
            return mixed

        x, outputs = self._causal(ids, before, mix)
        return self._output(x, outputs), delta

    def preview_rows(self, ids: Tensor, before: StateView) -> PassOutput:
        """`preview` without the bookkeeping; arguments as in `commit_rows`."""
        outputs: list[MoEOutput] = []
        gdn = 0
        hidden_states, x, angles = self._start(ids, before)
        for number, layer in enumerate(self.layers):
            if isinstance(layer.mixer, Attention):
                mixed = layer.mixer.preview(x, before.keys_values[number], angles=angles)
            else:
                mixed = layer.mixer.preview(x, before.delta[gdn])
                gdn += 1
            hidden_states, x = self._add(hidden_states, mixed, layer.post_attention_layernorm)
            outputs.append(layer.moe.preview(x))
            hidden_states, x = self._add(
                hidden_states, outputs[-1].mixed, self._norm_of(number + 1)
            )
        output = self._output(x, outputs)
        if not dispatch.on_gpu(x):
            return output
        distinct = dispatch.distinct_experts(output.expert_ids, self.config.num_experts)
        return replace(output, distinct_experts=distinct)

    def checked(self, tokens: Tensor | Sequence[int], state: SequenceState) -> list[int]:
        """The tokens of a pass.

        Raises:
            ValueError: none, more than fit, or one outside the vocabulary.
        """
        ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        if not 1 <= len(ids) <= state.room:
            raise ValueError(f"{len(ids)} tokens for a pass, room for 1 to {state.room}")
        for token in ids:
            if not 0 <= token < self.config.vocab_size:
                raise ValueError(f"token id {token}, vocab_size is {self.config.vocab_size}")
        self.prepare(state)
        return ids

    def _causal(
        self, ids: Tensor, before: StateView, mix: Callable[[GatedDeltaNet, Tensor], Tensor]
    ) -> tuple[Tensor, list[MoEOutput]]:
        """All layers over causal rows, the GDN layers by `mix`: rows [T, D] for the head."""
        outputs: list[MoEOutput] = []
        hidden_states, x, angles = self._start(ids, before)
        for number, layer in enumerate(self.layers):
            if isinstance(layer.mixer, Attention):
                mixed = layer.mixer.commit(x, before.keys_values[number], angles=angles)
            else:
                mixed = mix(layer.mixer, x)
            hidden_states, x = self._add(hidden_states, mixed, layer.post_attention_layernorm)
            outputs.append(layer.moe.commit(x))
            hidden_states, x = self._add(
                hidden_states, outputs[-1].mixed, self._norm_of(number + 1)
            )
        return x, outputs

    def _start(self, ids: Tensor, before: StateView) -> tuple[Tensor, Tensor, Angles]:
        """The embedded rows, their norm for the first layer (both [T, D]), and their angles."""
        started = dispatch.start_pass(
            ids,
            embedding=self.embedding,
            norm=self._norm_of(0),
            eps=self.config.rms_norm_eps,
            length=before.length,
            cos=self._angles.cos,
            sin=self._angles.sin,
        )
        return started.hidden_states, started.normed, Angles(started.cos, started.sin)

    def _add(
        self, hidden_states: Tensor, update: Tensor | MixedExperts, norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        """hidden_states + update, and the norm of that; both [T, D]."""
        return dispatch.add_rms_norm(
            hidden_states, update, weight=norm, eps=self.config.rms_norm_eps
        )

    def _norm_of(self, layer: int) -> Tensor:
        """The norm before a layer; behind the last one, the head's."""
        return self.layers[layer].input_layernorm if layer < len(self.layers) else self.head.norm

    def _output(self, normed: Tensor, outputs: Sequence[MoEOutput]) -> PassOutput:
        logits = self.head.lm_head(normed)
        on_gpu = dispatch.on_gpu(logits)  # where the sampler's kernels read any float
        return PassOutput(
            logits if on_gpu else logits.float(),
            tuple(out.expert_ids for out in outputs),
            tuple(out.coreset for out in outputs if out.coreset is not None),
        )
