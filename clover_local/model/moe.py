"""The mixture of experts of a layer: router, routed experts (wherever they are), shared expert."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clover_local.config import ModelConfig
from clover_local.experts.protocol import Experts
from clover_local.kernels import dispatch
from clover_local.kernels.dispatch import AnyRouting, MixedExperts
from clover_local.model.linear import Linear
from clover_local.model.take import Take, take_float32


@dataclass(frozen=True, eq=False)
class MoEOutput:
    """What a pass gets from one layer's experts."""

    mixed: MixedExperts  # of T rows, not added up yet
    expert_ids: Tensor  # [T, A], -1 where a row used fewer
    coreset: Tensor | None = None  # [E] bool, of a preview with coresets enabled


class SharedExpert:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, take: Take) -> None:
        gate, up, down = (take(f"{name}_proj.weight") for name in ("gate", "up", "down"))
        self.slots = dispatch.shared_slots(gate, up, down=down)
        self.linears = [] if self.slots else [Linear(gate, up), Linear(down)]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, D] to [T, D], some float dtype."""
        if self.slots is not None:
            return dispatch.shared_result(x, slots=self.slots)
        gate_up, down = self.linears
        gate, up = gate_up(x).chunk(2, dim=-1)
        return down(F.silu(gate) * up)


class MoE:
    """Routed experts + sigmoid(shared_expert_gate(x)) * shared_expert(x)."""

    def __init__(self, config: ModelConfig, take: Take, *, layer: int, experts: Experts) -> None:
        self.config = config
        self.layer = layer
        self.experts = experts
        # The shared expert's gate is one more row of the router: both are float32 over the same x.
        router = [take_float32(take, f"{name}.weight") for name in ("gate", "shared_expert_gate")]
        self.router = dispatch.blocked_tensor(torch.cat(router))
        self.shared = SharedExpert(lambda name: take(f"shared_expert.{name}"))

    def commit(self, x: Tensor) -> MoEOutput:
        """Every row may use every expert. `x` [T, D]."""
        router_logits, shared_gate = self.scores(x)
        routing = self.route(router_logits)
        return MoEOutput(self._mix(x, routing, shared_gate=shared_gate), routing.expert_ids)

    def preview(self, x: Tensor) -> MoEOutput:
        """The rows of a block route inside its coreset, where that is enabled. `x` [B, D]."""
        router_logits, shared_gate = self.scores(x)
        routing, coreset = self.route_block(router_logits)
        mixed = self._mix(x, routing, shared_gate=shared_gate)
        return MoEOutput(mixed, routing.expert_ids, coreset)

    def scores(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Router logits [T, E] and the shared expert's gate [T, 1], before its sigmoid; float32."""
        router_logits, gate = torch.split(
            dispatch.router_linear(x, self.router), [self.config.num_experts, 1], dim=-1
        )
        return router_logits, gate

    def route(self, router_logits: Tensor) -> AnyRouting:
        """The experts of rows that may use every expert. [T, E]."""
        return dispatch.route(router_logits, top_k=self.config.num_experts_per_tok)

    def route_block(self, router_logits: Tensor) -> tuple[AnyRouting, Tensor | None]:
        """The experts of one preview's rows [B, E], and its coreset where that is enabled."""
        if not self.config.coreset_enabled:
            return self.route(router_logits), None
        return dispatch.route_coreset(
            router_logits, top_k=self.config.num_experts_per_tok, top_p=self.config.coreset_top_p
        )

    def _mix(self, x: Tensor, routing: AnyRouting, *, shared_gate: Tensor) -> MixedExperts:
        routed = self.experts.forward(self.layer, x, routing=routing)
        return MixedExperts(
            results=routed.results,
            expert_ids=routed.expert_ids,
            shared=self.shared(x),
            shared_gate=shared_gate,
        )
