"""The Clover network as the demo trainer sees it: batched, differentiable, two streams at once.

The clean stream [B, T] is the causal pass over whole examples (next-token loss); the noisy stream
[N, 32] is the preview pass over masked copies of answer blocks (masked-token loss). A noisy block
reads the clean stream's keys, values, recurrent and conv state at its start, exactly as a preview
reads what is committed. Rows are left-padded so that every block starts at a multiple of
`block_size`: then the chunkwise delta rule yields the state at every block's start for free.
Padding rows have beta = 0, g = 0, conv input 0 and masked keys. Everything that works row by row
runs once over both streams together.

Parameters live in one dict under their checkpoint names, so export is a cast and a test can load
the golden checkpoint. The runtime's own model is `clover_local.model`; a test holds the two
together.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clover_local.config import ModelConfig


@dataclass(frozen=True)
class Batch:
    """One training batch: B examples of T tokens, N noisy blocks of `block_size` tokens."""

    tokens: Tensor  # [B, T] clean tokens, left-padded
    start: Tensor  # [B] first column that is not padding
    noisy: Tensor  # [N, block_size] answer blocks, some tokens replaced by MASK
    example: Tensor  # [N] which example a noisy block belongs to
    block: (
        Tensor  # [N] index of its chunk in the clean stream: it starts at column block * block_size
    )


class InverseUnitLower(torch.autograd.Function):
    """(I + A)^-1 for strictly lower triangular (so nilpotent) A [..., C, C], by squaring."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        identity = torch.eye(a.shape[-1])
        inverse, power = identity - a, a @ a
        for _ in range(int(math.log2(a.shape[-1])) - 1):
            inverse = inverse + inverse @ power
            power = power @ power
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        grad: Tensor = -(transposed @ grads[0] @ transposed).tril(-1)
        return grad


class GatherRows(torch.autograd.Function):
    """x[index], where `inverse` says which output rows each input row went to: a gather in both
    directions.

    x [R, D]; index [P], R = no row (zeros); inverse [R, A], the A output rows of each input row, P
    = none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return torch.cat([x, x.new_zeros(1, x.shape[1])])[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        grad = torch.cat([grads[0], grads[0].new_zeros(1, grads[0].shape[1])])
        return grad[inverse].sum(1), None, None


def pick(x: Tensor, index: Tensor) -> Tensor:
    """x[index] for few rows of [R, ...], as a product: so its backward is no scatter."""
    selector = F.one_hot(index.flatten(), x.shape[0]).to(x.dtype)
    return (selector @ x.flatten(1)).view(*index.shape, *x.shape[1:])


class DemoNetwork:
    """Parameters by checkpoint name, and the two-stream forward pass over them."""

    def __init__(self, config: ModelConfig, params: dict[str, Tensor]) -> None:
        self.config = config
        self.params = params

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns hidden states (clean [B, T, D], noisy [N, L, D]) and the router balance loss."""
        config = self.config
        clean = F.embedding(batch.tokens, self.params["model.embed_tokens.weight"])
        noisy = F.embedding(batch.noisy, self.params["model.embed_tokens.weight"])
        b, t, d = clean.shape
        rows = torch.cat([clean.reshape(b * t, d), noisy.reshape(-1, d)])  # [R, D]
        columns = torch.arange(t)
        self.valid = columns >= batch.start[:, None]  # [B, T]
        self.positions = torch.cat(
            [
                (columns - batch.start[:, None]).clamp(min=0).reshape(-1),
                (
                    (batch.block * config.block_size - batch.start[batch.example])[:, None]
                    + torch.arange(config.block_size)
                ).reshape(-1),
            ]
        )
        valid_rows = torch.cat(
            [self.valid.reshape(-1), torch.ones(noisy.shape[0] * noisy.shape[1], dtype=torch.bool)]
        )
        balance = torch.zeros(())
        for layer, kind in enumerate(config.layer_types):
            prefix = f"model.layers.{layer}."
            x = self.norm(rows, prefix + "input_layernorm.weight")
            mixer = self.attention if kind == "full_attention" else self.gated_delta_net
            rows = rows + mixer(prefix, x, batch)
            x = self.norm(rows, prefix + "post_attention_layernorm.weight")
            out, layer_balance = self.moe(prefix + "mlp.", x, b * t, valid_rows)
            rows = rows + out
            balance = balance + layer_balance
        rows = self.norm(rows, "model.norm.weight")
        return rows[: b * t].view(b, t, d), rows[b * t :].view(*noisy.shape), balance

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        return hidden @ self.params["lm_head.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Zero-centred RMSNorm."""
        weight = self.params[name]
        return F.rms_norm(x, (x.shape[-1],), 1 + weight, self.config.rms_norm_eps)

    def attention(self, prefix: str, x: Tensor, batch: Batch) -> Tensor:
        """Causal attention of the clean stream, block attention of the noisy one."""
        c, p = self.config, prefix + "self_attn."
        h, h_kv, dh = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        weight = torch.cat([self.params[f"{p}{n}_proj.weight"] for n in "qkv"])
        q_gate, k, v = (x @ weight.T).split([2 * h * dh, h_kv * dh, h_kv * dh], dim=-1)
        q, gate = q_gate.view(-1, h, 2 * dh).chunk(2, dim=-1)
        q = self.rotate(self.norm(q, p + "q_norm.weight"))
        k = self.rotate(self.norm(k.view(-1, h_kv, dh), p + "k_norm.weight"))
        k, v = (
            y.view(-1, h_kv, dh).repeat_interleave(h // h_kv, dim=1) for y in (k, v)
        )  # [R, H, Dh]
        b, t = batch.tokens.shape
        n, length = batch.noisy.shape
        split = [b * t, n * length]
        (qc, qn), (kc, kn), (vc, vn) = (y.split(split) for y in (q, k, v))
        qc, kc, vc = (y.view(b, t, h, dh).transpose(1, 2) for y in (qc, kc, vc))
        mask = self.valid[:, None, :].expand(b, t, t).tril() | torch.eye(t, dtype=torch.bool)
        clean = F.scaled_dot_product_attention(qc, kc, vc, attn_mask=mask[:, None])
        qn, kn, vn = (y.view(n, length, h, dh).transpose(1, 2) for y in (qn, kn, vn))
        kn = torch.cat([pick(kc, batch.example), kn], dim=2)  # [N, H, T + L, Dh]
        vn = torch.cat([pick(vc, batch.example), vn], dim=2)
        seen = self.valid[batch.example] & (torch.arange(t) < (batch.block * length)[:, None])
        mask = torch.cat([seen, torch.ones(n, length, dtype=torch.bool)], dim=1)[:, None, None, :]
        noisy = F.scaled_dot_product_attention(qn, kn, vn, attn_mask=mask.expand(n, 1, length, -1))
        out = torch.cat([y.transpose(1, 2).reshape(-1, h, dh) for y in (clean, noisy)])
        gated: Tensor = out * gate.sigmoid()
        return gated.flatten(1) @ self.params[p + "o_proj.weight"].T

    def rotate(self, x: Tensor) -> Tensor:
        """Partial rotary embedding of [R, heads, Dh] at each row's position (half-split)."""
        size = int(x.shape[-1] * self.config.partial_rotary_factor)
        inverse = self.config.rope_theta ** (-torch.arange(0, size, 2) / size)
        angle = self.positions[:, None, None] * inverse
        cos, sin = angle.cos(), angle.sin()
        first, second, rest = x.split([size // 2, size // 2, x.shape[-1] - size], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def gated_delta_net(self, prefix: str, x: Tensor, batch: Batch) -> Tensor:
        """Chunkwise delta rule of the clean stream, block softmax with a history slot else."""
        c, p = self.config, prefix + "linear_attn."
        h_k, h_v = c.linear_num_key_heads, c.linear_num_value_heads
        dk, dv = c.linear_key_head_dim, c.linear_value_head_dim
        weight = torch.cat([self.params[f"{p}in_proj_{n}.weight"] for n in ("qkv", "z", "a", "b")])
        widths = [2 * h_k * dk + h_v * dv, h_v * dv, h_v, h_v]
        qkv, z, a, b_gate = (x @ weight.T).split(widths, dim=-1)
        g = -self.params[p + "A_log"].exp() * F.softplus(a + self.params[p + "dt_bias"])  # [R, H_v]
        beta = b_gate.sigmoid()
        b, t = batch.tokens.shape
        n, length = batch.noisy.shape
        y = self.convolve(p, qkv, batch)
        q, k, v = y.split([h_k * dk, h_k * dk, h_v * dv], dim=-1)
        q, k = (
            self.l2norm(s.view(-1, h_k, dk)).repeat_interleave(h_v // h_k, dim=1) for s in (q, k)
        )
        v = v.view(-1, h_v, dv)
        rows = b * t
        q_clean, k_clean, v_clean = (s[:rows].view(b, t, *s.shape[1:]) for s in (q, k, v))
        clean, states = self.delta_rule(
            q_clean,
            k_clean,
            v_clean,
            g[:rows].view(b, t, h_v) * self.valid[..., None],
            beta[:rows].view(b, t, h_v) * self.valid[..., None],
        )
        q, k, v, g = (
            s[rows:].view(n, length, *s.shape[1:]).transpose(1, 2) for s in (q, k, v, g[..., None])
        )
        scores = (q @ k.transpose(-1, -2)) * self.params[p + "bd_softmax_logit_scale"][
            :, None, None
        ]
        bias = self.params[p + "bd_softmax_history_bias"] + self.params[
            p + "bd_softmax_history_c"
        ] * math.log(length / c.block_size)
        slots = torch.cat([scores, bias[:, None, None].expand(n, h_v, length, 1)], dim=-1).softmax(
            -1
        )
        history = (q * dk**-0.5) @ pick(
            states.flatten(0, 1), batch.example * (t // length) + batch.block
        )  # [N, H_v, L, Dv]
        noisy = slots[..., :length] @ v + slots[..., length:] * g.exp() * history
        out = torch.cat([clean.reshape(rows, h_v, dv), noisy.transpose(1, 2).reshape(-1, h_v, dv)])
        out = F.rms_norm(out, (dv,), self.params[p + "norm.weight"], c.rms_norm_eps)
        return (out * F.silu(z.view(-1, h_v, dv))).flatten(1) @ self.params[p + "out_proj.weight"].T

    def convolve(self, prefix: str, qkv: Tensor, batch: Batch) -> Tensor:
        """silu of the short convolution [R, C]: causal in the clean stream, both ways else."""
        b, t = batch.tokens.shape
        n, length = batch.noisy.shape
        conv = self.params[prefix + "conv1d.weight"][:, 0]
        right = self.params[prefix + "conv_right_weight"].reshape(-1, 3)
        clean = qkv[: b * t].view(b, t, -1) * self.valid[..., None]
        padded = F.pad(clean, (0, 0, 3, 0))
        y_clean: Any = sum(padded[:, j : j + t] * conv[:, j] for j in range(4))
        noisy = qkv[b * t :].view(n, length, -1)
        # In `padded`, the three rows before a block.
        columns = (batch.block * length)[:, None] + torch.arange(3)
        before = pick(padded.flatten(0, 1), batch.example[:, None] * (t + 3) + columns)
        stream = torch.cat([before, noisy, torch.zeros(n, 3, noisy.shape[-1])], 1)
        taps = torch.cat([conv, right], dim=1)
        y_noisy: Any = sum(stream[:, j : j + length] * taps[:, j] for j in range(7))
        return F.silu(torch.cat([y.reshape(-1, y.shape[-1]) for y in (y_clean, y_noisy)]))

    @staticmethod
    def l2norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Chunkwise gated delta rule (WY form) over [B, T, H, ...] from a zero state.

        Returns outputs [B, T, H, Dv] and the state at the start of every chunk [B, T / C, H, Dk,
        Dv].
        """
        size = self.config.block_size
        b, t, h, dk = q.shape
        q, k, v = (
            s.view(b, -1, size, h, s.shape[-1]).transpose(2, 3) for s in (q, k, v)
        )  # [B, n, H, C, Dk]
        g, beta = (s.view(b, -1, size, h).transpose(2, 3) for s in (g, beta))
        decay = g.cumsum(-1)
        relative = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
        k_beta = k * beta[..., None]
        inverse = InverseUnitLower.apply((k_beta @ k.transpose(-1, -2) * relative).tril(-1))
        solved = inverse @ torch.cat([v * beta[..., None], k_beta * decay.exp()[..., None]], dim=-1)
        u, w = solved.split([v.shape[-1], dk], dim=-1)
        within = q @ k.transpose(-1, -2) * relative * dk**-0.5
        q_decay = q * (decay.exp() * dk**-0.5)[..., None]
        k_end = (k * (decay[..., -1:] - decay).exp()[..., None]).transpose(-1, -2)
        end = decay[..., -1].exp()[..., None, None]
        state = torch.zeros(b, h, dk, v.shape[-1])
        outputs, states = [], []
        for chunk in range(q.shape[1]):
            states.append(state)
            new = u[:, chunk] - w[:, chunk] @ state
            outputs.append(q_decay[:, chunk] @ state + within[:, chunk] @ new)
            state = state * end[:, chunk] + k_end[:, chunk] @ new
        out = torch.stack(outputs, 1).transpose(2, 3).reshape(b, t, h, -1)
        return out, torch.stack(states, 1)

    def moe(self, prefix: str, x: Tensor, clean_rows: int, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Routed and shared experts of all rows [R, D]; previews keep to their block's coreset."""
        c = self.config
        probs = (x @ self.params[prefix + "gate.weight"].T).softmax(-1)  # [R, E]
        allowed = probs.detach()
        if c.coreset_enabled:
            allowed = torch.cat([allowed[:clean_rows], self.coreset_probs(allowed[clean_rows:])])
        chosen = allowed.topk(c.num_experts_per_tok, dim=-1).indices  # [R, A]
        weights = probs.gather(1, chosen) * (allowed.gather(1, chosen) > 0)
        weights = weights / weights.sum(-1, keepdim=True)
        share = torch.zeros(c.num_experts).index_add_(
            0, chosen[valid].view(-1), torch.ones(int(valid.sum()) * chosen.shape[1])
        )
        balance = c.num_experts * (share / share.sum() * probs[valid].mean(0)).sum()
        out = self.experts(prefix, x, chosen, weights)
        gate, up = (
            x
            @ torch.cat(
                [self.params[f"{prefix}shared_expert.{n}_proj.weight"] for n in ("gate", "up")]
            ).T
        ).chunk(2, -1)
        shared = (F.silu(gate) * up) @ self.params[prefix + "shared_expert.down_proj.weight"].T
        return out + shared * (
            x @ self.params[prefix + "shared_expert_gate.weight"].T
        ).sigmoid(), balance

    def coreset_probs(self, probs: Tensor) -> Tensor:
        """Router probabilities [N * L, E] with those outside their block's coreset set to 0."""
        c = self.config
        top = probs.topk(c.num_experts_per_tok, dim=-1)
        totals = torch.zeros_like(probs).scatter(1, top.indices, top.values)
        totals = totals.view(-1, c.block_size, c.num_experts).sum(1)
        order = (totals / totals.sum(-1, keepdim=True)).sort(dim=-1, descending=True, stable=True)
        kept = (order.values.cumsum(-1) - order.values < c.coreset_top_p) & (order.values > 0)
        keep = torch.zeros_like(kept).scatter(1, order.indices, kept)
        return probs * keep.repeat_interleave(c.block_size, dim=0)

    def experts(self, prefix: str, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Rows sorted by expert, padded to the fullest expert, two batched products."""
        flat = chosen.view(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.config.num_experts)
        first = counts.cumsum(0) - counts
        sorted_expert = flat[order]
        capacity = int(counts.max())
        place = (
            sorted_expert * capacity + torch.arange(len(flat)) - first[sorted_expert]
        )  # in [E * capacity]
        slot = torch.empty_like(place).scatter_(0, order, place)  # of (row, choice)
        total, choices = self.config.num_experts * capacity, chosen.shape[1]
        pair = torch.full((total,), len(flat)).scatter_(0, place, order)  # (row, choice) of a place
        padded = GatherRows.apply(x, pair // choices, slot.view(-1, choices))
        padded = padded.view(self.config.num_experts, capacity, -1)
        gate, up = torch.bmm(
            padded, self.params[prefix + "experts.gate_up_proj"].transpose(1, 2)
        ).chunk(2, -1)
        down = torch.bmm(
            F.silu(gate) * up, self.params[prefix + "experts.down_proj"].transpose(1, 2)
        )
        picked: Tensor = GatherRows.apply(down.view(total, -1), slot, pair[:, None])
        return (picked.view(*chosen.shape, -1) * weights[..., None]).sum(1)
