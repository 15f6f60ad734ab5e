"""Fresh parameters of the demo model, made so that it can look things up from the start.

Mimetic initialisation (Trockman, Kolter, "Mimetic Initialization of Self-Attention Layers", 2023),
carried over to the delta rule: queries and keys begin as the same projection, so that like finds
like; half of the key heads see the token before, so that a match yields what came next; values are
written back by the transpose of what read them; the head begins as the embedding. From independent
random projections the model needs millions of tokens before it copies at all (docs/log.md).
"""

import torch
from torch import Tensor

from clover_local.config import ModelConfig

CONV_NOISE = 0.1
MEMORY = (1e-3, 1e-2)  # how fast a head forgets, per token: alternating


def initial_parameters(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Parameters under their checkpoint names, float32."""
    generator = torch.Generator().manual_seed(seed)
    d, depth = config.hidden_size, config.num_hidden_layers

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        value: Tensor = torch.randn(shape, generator=generator) * (scale * shape[-1] ** -0.5)
        return value

    embedding = torch.randn(config.vocab_size, d, generator=generator)
    params = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.zeros(d),
        "lm_head.weight": embedding * d**-0.5,
    }
    residual = (2 * depth) ** -0.5  # of what a branch adds
    e, f, shared = (
        config.num_experts,
        config.moe_intermediate_size,
        config.shared_expert_intermediate_size,
    )
    for layer in range(depth):
        p = f"model.layers.{layer}."
        params[p + "input_layernorm.weight"] = torch.zeros(d)
        params[p + "post_attention_layernorm.weight"] = torch.zeros(d)
        mixer = attention if config.is_attention(layer) else gated_delta_net
        prefix = p + ("self_attn." if config.is_attention(layer) else "linear_attn.")
        own = mixer(config, generator)
        params |= {prefix + name: value for name, value in own.items()}
        m = p + "mlp."
        params[m + "gate.weight"] = draw(e, d)
        params[m + "experts.gate_up_proj"] = draw(e, 2 * f, d)
        params[m + "experts.down_proj"] = draw(e, d, f, scale=residual)
        params[m + "shared_expert.gate_proj.weight"] = draw(shared, d)
        params[m + "shared_expert.up_proj.weight"] = draw(shared, d)
        params[m + "shared_expert.down_proj.weight"] = draw(d, shared, scale=residual)
        params[m + "shared_expert_gate.weight"] = draw(1, d)
    return params


def attention(config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """An attention layer whose query heads start as their key head, and whose output undoes v."""
    d, dh = config.hidden_size, config.head_dim
    h, h_kv = config.num_attention_heads, config.num_key_value_heads
    k, v, gate = (
        torch.randn(heads, dh, d, generator=generator) * d**-0.5 for heads in (h_kv, h_kv, h)
    )
    q = torch.stack([k.repeat_interleave(h // h_kv, dim=0), gate], dim=1)  # [H, 2, Dh, D]
    out = v.repeat_interleave(h // h_kv, dim=0).flatten(0, 1).T * 0.5
    return {
        "q_proj.weight": q.reshape(-1, d),
        "k_proj.weight": k.reshape(-1, d),
        "v_proj.weight": v.reshape(-1, d),
        "o_proj.weight": out.contiguous(),
        "q_norm.weight": torch.zeros(dh),
        "k_norm.weight": torch.zeros(dh),
    }


def gated_delta_net(config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """A delta-rule layer: equal q and k, half of the keys one token late, a long memory."""
    d, h_v = config.hidden_size, config.linear_num_value_heads
    key_dim = config.linear_num_key_heads * config.linear_key_head_dim
    value_dim = h_v * config.linear_value_head_dim
    qk, v, z = (
        torch.randn(rows, d, generator=generator) * d**-0.5
        for rows in (key_dim, value_dim, value_dim)
    )
    a, b = (torch.randn(h_v, d, generator=generator) * d**-0.5 for _ in range(2))
    taps = torch.randn(config.qkv_dim, 4, generator=generator) * CONV_NOISE
    late = slice(key_dim, key_dim + key_dim // 2)
    taps[:, 3] += 1.0
    taps[late, 3] -= 1.0
    taps[late, 2] += 1.0
    forgetting = torch.tensor(MEMORY).repeat(-(-h_v // len(MEMORY)))[:h_v]
    return {
        "in_proj_qkv.weight": torch.cat([qk, qk, v]),
        "in_proj_z.weight": z,
        "in_proj_a.weight": a,
        "in_proj_b.weight": b,
        "conv1d.weight": taps[:, None],
        "conv_right_weight": torch.randn(config.qkv_dim, 3, generator=generator) * CONV_NOISE,
        "A_log": torch.zeros(h_v),
        "dt_bias": forgetting + torch.log(-torch.expm1(-forgetting)),  # softplus gives `forgetting`
        "norm.weight": torch.ones(config.linear_value_head_dim),
        "out_proj.weight": v.T * 0.5,
        "bd_softmax_logit_scale": torch.full((h_v,), 5.0),
        "bd_softmax_history_bias": torch.full((h_v,), 2.0),
        "bd_softmax_history_c": torch.zeros(h_v),
    }
