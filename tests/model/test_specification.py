"""Models of odd shapes against a second statement of the model: plain loops in float64.

The golden checkpoint has one config. These have others, written to disk and read back by the
loader: head ratios, spellings of the config, tensor layouts, block sizes, coresets.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from clover_local.cache import SequenceState
from clover_local.checkpoint.load import load_parameters
from clover_local.checkpoint.placements import open_checkpoint
from clover_local.config import read_model_config
from clover_local.experts.resident import ResidentExperts
from clover_local.model.clover import Clover

Array = NDArray[np.float64]
Values = dict[str, Any]

FULL, LINEAR = "full_attention", "linear_attention"
MASK = 90
COMMON = {
    "model_type": "clover_moe",
    "architectures": ["CloverMoeModelLM"],
    "vocab_size": 97,
    "hidden_size": 40,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "mask_token_id": MASK,
    "eos_token_id": [3, 5],
    "pad_token_id": 3,
}
SIZES = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim"),
    *("num_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "block_size"),
)
SHAPES: dict[str, Values] = {
    "one-kv-head": {
        **dict(zip(SIZES, (5, 6, 1, 24, 3, 6, 12, 20, 7, 3, 28, 36, 16), strict=True)),
        "layer_types": [LINEAR, FULL, LINEAR, LINEAR, FULL],
        "rope_parameters": {"rope_theta": 5000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
        "moe_block_coreset_enabled": True,
        "moe_block_coreset_top_p": 0.6,
    },
    "as-many-kv-heads": {
        **dict(zip(SIZES, (3, 3, 3, 10, 2, 2, 9, 7, 5, 5, 12, 8, 8), strict=True)),
        "full_attention_interval": 2,
        "rope_theta": 100,
        "partial_rotary_factor": 1.0,
    },
    "coreset-smaller-than-top-k": {
        **dict(zip(SIZES, (4, 8, 2, 16, 1, 4, 16, 8, 11, 4, 20, 24, 32), strict=True)),
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5},
        "moe_block_coreset_enabled": True,
        "moe_block_coreset_top_p": 0.25,
    },
}


def layer_types(config: Values) -> list[str]:
    interval = config.get("full_attention_interval", 4)
    spread = [
        LINEAR if (layer + 1) % interval else FULL for layer in range(config["num_hidden_layers"])
    ]
    return list(config.get("layer_types", spread))


def random_weights(config: Values, *, seed: int) -> dict[str, Array]:
    """Every tensor by its name in the specification, rounded to float32."""
    c, random = config, np.random.default_rng(seed)
    weights: dict[str, Array] = {}

    def add(name: str, *shape: int, scale: float | None = None, mean: float = 0.0) -> None:
        scale = shape[-1] ** -0.5 if scale is None else scale
        value = mean + scale * random.standard_normal(shape)
        weights[name] = value.astype(np.float32).astype(np.float64)

    hidden, vocabulary, experts = c["hidden_size"], c["vocab_size"], c["num_experts"]
    add("model.embed_tokens.weight", vocabulary, hidden, scale=0.7)
    add("model.norm.weight", hidden, scale=0.2)
    if not c.get("tie_word_embeddings"):
        add("lm_head.weight", vocabulary, hidden, scale=0.6)
    for layer, kind in enumerate(layer_types(c)):
        p = f"model.layers.{layer}."
        add(p + "input_layernorm.weight", hidden, scale=0.2)
        add(p + "post_attention_layernorm.weight", hidden, scale=0.2)
        if kind == FULL:
            heads, kv_heads, dh = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
            add(p + "self_attn.q_proj.weight", 2 * heads * dh, hidden)
            add(p + "self_attn.k_proj.weight", kv_heads * dh, hidden)
            add(p + "self_attn.v_proj.weight", kv_heads * dh, hidden)
            add(p + "self_attn.o_proj.weight", hidden, heads * dh)
            add(p + "self_attn.q_norm.weight", dh, scale=0.3)
            add(p + "self_attn.k_norm.weight", dh, scale=0.3)
        else:
            heads, dv = c["linear_num_value_heads"], c["linear_value_head_dim"]
            channels = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + heads * dv
            p += "linear_attn."
            add(p + "in_proj_qkv.weight", channels, hidden)
            add(p + "in_proj_z.weight", heads * dv, hidden)
            add(p + "in_proj_a.weight", heads, hidden)
            add(p + "in_proj_b.weight", heads, hidden)
            add(p + "conv1d.weight", channels, 1, 4, scale=0.5)
            add(p + "A_log", heads, scale=1.5)  # from gates that keep all to gates that forget
            add(p + "dt_bias", heads, scale=1.0)
            add(p + "norm.weight", dv, scale=0.3, mean=1.0)
            add(p + "out_proj.weight", hidden, heads * dv)
            add(p + "conv_right_weight", channels, 3, scale=0.5)
            add(p + "bd_softmax_logit_scale", heads, scale=2.0)
            add(p + "bd_softmax_history_bias", heads, scale=1.0)
            add(p + "bd_softmax_history_c", heads, scale=1.0)
        p = f"model.layers.{layer}.mlp."
        wide, shared = c["moe_intermediate_size"], c["shared_expert_intermediate_size"]
        add(p + "gate.weight", experts, hidden, scale=0.3)
        add(p + "experts.gate_up_proj", experts, 2 * wide, hidden)
        add(p + "experts.down_proj", experts, hidden, wide)
        add(p + "shared_expert.gate_proj.weight", shared, hidden)
        add(p + "shared_expert.up_proj.weight", shared, hidden)
        add(p + "shared_expert.down_proj.weight", hidden, shared)
        add(p + "shared_expert_gate.weight", 1, hidden)
    return weights


def softmax(x: Array) -> Array:
    y = np.exp(x - x.max())
    return np.asarray(y / y.sum())


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def falling(values: Array) -> list[int]:
    """Indices by falling value, the lower one first among equals."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


@dataclass
class Memory:
    """The state after the committed tokens."""

    length: int = 0
    keys: dict[int, list[Array]] = field(default_factory=dict)
    values: dict[int, list[Array]] = field(default_factory=dict)
    recurrent: dict[int, Array] = field(default_factory=dict)
    conv: dict[int, Array] = field(default_factory=dict)


class Reference:
    """model.md, row by row and head by head."""

    def __init__(self, config: Values, weights: dict[str, Array]) -> None:
        self.c, self.weights, self.kinds = config, weights, layer_types(config)
        self.coresets: list[list[int]] = []
        """Of the last preview."""

    def commit(self, tokens: Sequence[int], memory: Memory) -> Array:
        logits = self.run(tokens, memory, preview=False)
        memory.length += len(tokens)
        return logits

    def preview(self, block: Sequence[int], memory: Memory) -> Array:
        self.coresets = []
        return self.run(block, memory, preview=True)

    def run(self, tokens: Sequence[int], memory: Memory, *, preview: bool) -> Array:
        w, h = self.weights, self.weights["model.embed_tokens.weight"][list(tokens)]
        for layer, kind in enumerate(self.kinds):
            p = f"model.layers.{layer}."
            x = self.norm(h, p + "input_layernorm.weight")
            mixer = self.attention if kind == FULL else self.delta_net
            h = h + mixer(x, layer, memory, preview=preview)
            x = self.norm(h, p + "post_attention_layernorm.weight")
            h = h + self.moe(x, p + "mlp.", preview=preview)
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return self.norm(h, "model.norm.weight") @ head.T

    def norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.c["rms_norm_eps"])
        return np.asarray(x / scale * (1 + self.weights[name]))

    def rotated(self, x: Array, position: int) -> Array:
        rope = self.c.get("rope_parameters", self.c)
        size = int(self.c["head_dim"] * rope["partial_rotary_factor"])
        half, y = size // 2, x.copy()
        for i in range(half):
            angle = position * rope["rope_theta"] ** (-2 * i / size)
            y[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            y[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return y

    def attention(self, x: Array, layer: int, memory: Memory, *, preview: bool) -> Array:
        c, p = self.c, f"model.layers.{layer}.self_attn."
        heads, kv_heads, dh = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        projected = (x @ self.weights[p + "q_proj.weight"].T).reshape(-1, heads, 2 * dh)
        queries, gate = projected[..., :dh], projected[..., dh:]
        new_keys = (x @ self.weights[p + "k_proj.weight"].T).reshape(-1, kv_heads, dh)
        new_values = (x @ self.weights[p + "v_proj.weight"].T).reshape(-1, kv_heads, dh)
        queries = self.norm(queries, p + "q_norm.weight")
        new_keys = self.norm(new_keys, p + "k_norm.weight")
        keys, values = [*memory.keys.get(layer, [])], [*memory.values.get(layer, [])]
        for t in range(len(x)):
            at = memory.length + t
            keys.append(np.stack([self.rotated(k, at) for k in new_keys[t]]))
            values.append(new_values[t])
        out = np.zeros((len(x), heads, dh))
        for t in range(len(x)):
            seen = len(keys) if preview else memory.length + t + 1
            for h in range(heads):
                kv = h // (heads // kv_heads)
                q = self.rotated(queries[t, h], memory.length + t)
                scores = np.array([keys[s][kv] @ q for s in range(seen)]) / math.sqrt(dh)
                out[t, h] = softmax(scores) @ np.stack([values[s][kv] for s in range(seen)])
        if not preview:
            memory.keys[layer], memory.values[layer] = keys, values
        return np.asarray(
            (out * sigmoid(gate)).reshape(len(x), -1) @ self.weights[p + "o_proj.weight"].T
        )

    def delta_net(self, x: Array, layer: int, memory: Memory, *, preview: bool) -> Array:
        c, p = self.c, f"model.layers.{layer}.linear_attn."
        w = {name.removeprefix(p): v for name, v in self.weights.items() if name.startswith(p)}
        key_heads, dk = c["linear_num_key_heads"], c["linear_key_head_dim"]
        heads, dv = c["linear_num_value_heads"], c["linear_value_head_dim"]
        qkv = x @ w["in_proj_qkv.weight"].T
        z = (x @ w["in_proj_z.weight"].T).reshape(-1, heads, dv)
        g = -np.exp(w["A_log"]) * np.log1p(np.exp(x @ w["in_proj_a.weight"].T + w["dt_bias"]))
        beta = sigmoid(x @ w["in_proj_b.weight"].T)
        rows = np.concatenate([memory.conv.get(layer, np.zeros((3, qkv.shape[1]))), qkv])
        y = np.zeros_like(qkv)
        for t in range(len(x)):
            for j in range(4):
                y[t] += rows[t + j] * w["conv1d.weight"][:, 0, j]
            for d in (1, 2, 3) if preview else ():
                if t + d < len(x):
                    y[t] += qkv[t + d] * w["conv_right_weight"][:, d - 1]
        y = silu(y)
        q, k, v = np.split(y, [key_heads * dk, 2 * key_heads * dk], axis=1)
        q, k, v = q.reshape(-1, key_heads, dk), k.reshape(-1, key_heads, dk), v.reshape(z.shape)
        q, k = (u / np.sqrt((u**2).sum(-1, keepdims=True) + 1e-6) for u in (q, k))
        state, out = memory.recurrent.get(layer, np.zeros((heads, dk, dv))).copy(), np.zeros_like(z)
        history_c, size = w["bd_softmax_history_c"], len(x) / c["block_size"]
        for h in range(heads):
            kh = h // (heads // key_heads)
            slot = w["bd_softmax_history_bias"][h] + history_c[h] * math.log(size)
            for t in range(len(x)):
                if preview:
                    scores = k[:, kh] @ q[t, kh] * w["bd_softmax_logit_scale"][h]
                    share = softmax(np.append(scores, slot))
                    remembered = math.exp(g[t, h]) * (state[h].T @ (q[t, kh] / math.sqrt(dk)))
                    out[t, h] = share[:-1] @ v[:, h] + share[-1] * remembered
                else:
                    state[h] *= math.exp(g[t, h])
                    change = beta[t, h] * (v[t, h] - state[h].T @ k[t, kh])
                    state[h] += np.outer(k[t, kh], change)
                    out[t, h] = state[h].T @ (q[t, kh] / math.sqrt(dk))
        if not preview:
            memory.recurrent[layer], memory.conv[layer] = state, rows[-3:]
        normed = out / np.sqrt((out**2).mean(-1, keepdims=True) + c["rms_norm_eps"])
        normed = normed * w["norm.weight"] * silu(z)
        return np.asarray(normed.reshape(len(x), -1) @ w["out_proj.weight"].T)

    def moe(self, x: Array, p: str, *, preview: bool) -> Array:
        w, top_k = self.weights, self.c["num_experts_per_tok"]
        probs = [softmax(row) for row in x @ w[p + "gate.weight"].T]
        allowed = set(range(self.c["num_experts"]))
        if preview and self.c.get("moe_block_coreset_enabled"):
            allowed = self.coreset(probs)
            self.coresets.append(sorted(allowed))
        out = np.zeros_like(x)
        for t, row in enumerate(x):
            chosen = [e for e in falling(probs[t]) if e in allowed][:top_k]
            total = sum(probs[t][e] for e in chosen)
            for e in chosen:
                gate, up = np.split(w[p + "experts.gate_up_proj"][e] @ row, 2)
                expert = w[p + "experts.down_proj"][e] @ (silu(gate) * up)
                out[t] += probs[t][e] / total * expert
            gate = w[p + "shared_expert.gate_proj.weight"] @ row
            up = w[p + "shared_expert.up_proj.weight"] @ row
            shared = w[p + "shared_expert.down_proj.weight"] @ (silu(gate) * up)
            out[t] += sigmoid(w[p + "shared_expert_gate.weight"] @ row) * shared
        return out

    def coreset(self, probs: Sequence[Array]) -> set[int]:
        totals = np.zeros(self.c["num_experts"])
        for row in probs:
            for e in falling(row)[: self.c["num_experts_per_tok"]]:
                totals[e] += row[e]
        totals /= totals.sum()
        kept: set[int] = set()
        before = 0.0
        for e in falling(totals):
            if (not kept or before < self.c["moe_block_coreset_top_p"]) and totals[e] > 0:
                kept.add(e)
            before += totals[e]
        return kept


def spelled(config: Values, weights: dict[str, Array]) -> tuple[Values, dict[str, Array]]:
    """Another way to write the same: `text_config`, the longer prefix, an expert a tensor."""
    nested = {"model_type": config["model_type"], "text_config": {**config, "model_type": "text"}}
    apart: dict[str, Array] = {}
    for key, value in weights.items():
        name = key.replace("model.", "model.language_model.", 1)
        if name.endswith("experts.gate_up_proj"):
            for e, rows in enumerate(value):
                stem = name.replace("gate_up_proj", str(e))
                apart[f"{stem}.gate_proj.weight"], apart[f"{stem}.up_proj.weight"] = np.split(
                    rows, 2
                )
        elif name.endswith("experts.down_proj"):
            for e, rows in enumerate(value):
                apart[name.replace("down_proj", f"{e}.down_proj.weight")] = rows
        else:
            apart[name] = value[:, None] if name.endswith("conv_right_weight") else value
    return nested, apart


def loaded(folder: Path, config: Values, weights: dict[str, Array]) -> Clover:
    """The model as the loader reads it from disk."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    arrays = {name: np.ascontiguousarray(value, np.float32) for name, value in weights.items()}
    save_file(arrays, folder / "model.safetensors")
    read = read_model_config(folder)
    parameters = load_parameters(open_checkpoint(folder, read), read)
    experts = ResidentExperts(parameters.experts)
    return Clover(read, parameters.parameters, experts=experts, device="cpu", dtype=torch.float32)


def assert_same(got: torch.Tensor, expected: Array) -> None:
    # Logits of these weights spread by 4 to 5; float32 is off by 4e-6 in the mean, by 1e-4 at most,
    # as much by rows as by chunks.
    torch.testing.assert_close(got.double(), torch.from_numpy(expected), rtol=0, atol=2e-4)


@pytest.mark.parametrize("otherwise_spelled", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("shape", SHAPES)
def test_model_of_another_shape_is_the_specification(
    shape: str, otherwise_spelled: bool, tmp_path: Path
) -> None:
    """A prompt in two commits, previews of several sizes over it and over nothing, the state."""
    config = {**COMMON, **SHAPES[shape]}
    weights = random_weights(config, seed=len(shape))
    written = spelled(config, weights) if otherwise_spelled else (config, weights)
    model = loaded(tmp_path, *written)
    reference, memory = Reference(config, weights), Memory()
    state = SequenceState(model.config, context=200, device="cpu", dtype=torch.float32)
    rows = config["block_size"]
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, 97, 76)]
    tokens[40] = MASK  # the literal mask token is a token like any other in a prompt

    def check_preview(block: list[int]) -> None:
        out = model.preview(block, state)
        assert_same(out.logits, reference.preview(block, memory))
        assert [coreset.tolist() for coreset in out.coresets] == reference.coresets

    check_preview([MASK] * rows)
    for piece in (tokens[:3], tokens[3:]):  # one by the recurrent form, one by chunks
        got = model.commit(piece, state, logits="all").logits
        assert_same(got, reference.commit(piece, memory))
    check_preview([MASK] * rows)
    check_preview([*tokens[5 : 5 + rows // 2], *[MASK] * (rows - rows // 2)])
    check_preview([MASK] * (rows // 2 - 1))
    check_preview([MASK])
    for n, layer in enumerate(i for i, kind in enumerate(reference.kinds) if kind == LINEAR):
        assert_same(state.committed.recurrent[n], memory.recurrent[layer])
        assert_same(state.committed.conv[n], memory.conv[layer])
    for layer in state.attention_layers:
        keys, values = state.keys_values(layer)
        assert_same(keys, np.stack(memory.keys[layer]))
        assert_same(values, np.stack(memory.values[layer]))


def test_coreset_of_these_shapes_is_really_smaller_than_the_choice_of_a_row() -> None:
    """Or the shape named so would test nothing."""
    config = {**COMMON, **SHAPES["coreset-smaller-than-top-k"]}
    reference = Reference(config, random_weights(config, seed=26))
    reference.preview([MASK] * 32, Memory())
    assert min(map(len, reference.coresets)) < config["num_experts_per_tok"]
