"""The mixture of experts of a layer: router, routed experts (wherever they are), shared expert."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clover_local.config import ModelConfig
from clover_local.experts import Experts
from clover_local.kernels import dispatch
from clover_local.kernels.dispatch import Routing
from clover_local.model.linear import Linear
from clover_local.model.take import Take, take_float32


@dataclass(frozen=True, eq=False)
class MoEOutput:
    """What a pass gets from one layer's experts."""

    hidden_states: Tensor  # [T, D]
    expert_ids: Tensor  # [T, A], -1 where a row used fewer
    coreset: Tensor | None = None  # [E] bool, of a preview with coresets enabled


class MoE:
    """Routed experts + sigmoid(shared_expert_gate(x)) * shared_expert(x)."""

    def __init__(self, config: ModelConfig, take: Take, *, layer: int, experts: Experts) -> None:
        self.config = config
        self.layer = layer
        self.experts = experts
        # The shared expert's gate is one more row of the router: both are float32 over the same x.
        self.router = Linear(
            take_float32(take, "gate.weight"), take_float32(take, "shared_expert_gate.weight")
        )
        self.shared_gate_up = Linear(
            take("shared_expert.gate_proj.weight"), take("shared_expert.up_proj.weight")
        )
        self.shared_down = Linear(take("shared_expert.down_proj.weight"))

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
        """Router logits [T, E] and the shared expert's gate [T, 1], float32."""
        router_logits, gate = torch.split(
            self.router(x.float()), [self.config.num_experts, 1], dim=-1
        )
        return router_logits, gate.sigmoid()

    def route(self, router_logits: Tensor) -> Routing:
        """The experts of rows that may use every expert. [T, E]."""
        return dispatch.route(router_logits, top_k=self.config.num_experts_per_tok)

    def route_block(self, router_logits: Tensor) -> tuple[Routing, Tensor | None]:
        """The experts of one preview's rows [B, E], and its coreset where that is enabled."""
        if not self.config.coreset_enabled:
            return self.route(router_logits), None
        return dispatch.route_coreset(
            router_logits, top_k=self.config.num_experts_per_tok, top_p=self.config.coreset_top_p
        )

    def shared(self, x: Tensor, gate: Tensor) -> Tensor:
        """The shared expert's part [T, D], float32; `gate` from `scores`."""
        gate_rows, up = self.shared_gate_up(x).chunk(2, dim=-1)
        return self.shared_down(F.silu(gate_rows) * up).float() * gate

    def _mix(self, x: Tensor, routing: Routing, *, shared_gate: Tensor) -> Tensor:
        routed = self.experts.forward(self.layer, x, routing=routing)  # float32
        return (routed + self.shared(x, shared_gate)).to(x.dtype)
