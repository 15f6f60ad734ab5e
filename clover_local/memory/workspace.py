"""Device memory that a forward needs besides weights and state, from the shapes of its tensors.

A prompt's chunk of R rows, N bytes a number, has the residual stream all the time and the largest
of three stages with it:

    stream     3 R D N                          hidden states, what a layer adds, their norm
    GDN        R (C + H_v Dv + 2 H_v) N         projections in (C = channels of the convolution)
               + R (C + 2 H_v) 4                convolved, decay and rate, float32
               + R H_v Dv (4 + N)               what the delta rule gives in float32, normed
               + S H_v (Dv + Dk + 2) 4          changes and decays of the S rows of a span
               + S / 32 H_v Dk Dv 4             the state before each chunk of 32 rows
    attention  R (2 H + 2 H_kv) Dh N            projections in
               + R (3 H + H_kv) Dh N            normed and rotated, attended, gated
    MoE        R E 8                            router logits and probabilities, float32
               + R A (F N + 4 D)                activated products; each expert's result, float32
               + R (4 D + 3 F_shared N)         their sum, the shared expert

and the logits of its last row. A captured pass has the same for the rows of a block, with logits
of each of them in N bytes, twice, since there is a graph for either set of states that it may read;
the graphs keep that memory for themselves. A draft has such logits of its preview and of its verify
for half as many rows, and for each GDN layer a record of R (C (N + 4) + 2 H_v 4). Where plain
PyTorch picks the rows of a block, it has up to nine tensors like their logits in float32, among
them what the rules `klass` and `credit` keep from pass to pass.
"""

from clover_local.config import ModelConfig
from clover_local.memory.sizes import MIB

SPAN_ROWS, CHUNK_ROWS = 512, 32
"""Of the delta rule by chunks (`kernels/gpu/delta/gated_delta_chunked.py`)."""
PREFILL_CHOICES = (2048, 1024, 512, 256)
"""Rows of a prompt that run together: the first that leaves room for the experts."""
PREFILL_ROWS = 512
"""On a CPU, with a plan and without: a prompt cut elsewhere is summed in another order."""
PICK_TENSORS = 9
"""Of [rows, V] float32: torch's profiler counts eight for `klass` and `credit` with controls, and
one for a draw from the head of a vocabulary."""
DRAFT_ROWS = 16
"""Of a draft, unless asked for more; what wider ones take, experts give up."""
GRAPH_BYTES = 32 * MIB
"""For the graphs themselves, some 600 launches each for a few widths, and partial sums of split-K.
Assumed: not measured on the card."""


def chunk_bytes(config: ModelConfig, *, rows: int, number_bytes: int) -> int:
    """The activations of `rows` rows in one layer, without logits."""
    c, n = config, number_bytes
    value_heads, values = (
        c.linear_num_value_heads,
        c.linear_num_value_heads * c.linear_value_head_dim,
    )
    gdn = (c.qkv_dim + values + 2 * value_heads) * n
    gdn += (c.qkv_dim + 2 * value_heads) * 4 + values * (4 + n)
    span = min(rows, SPAN_ROWS)
    keys = value_heads * c.linear_key_head_dim
    held = span * (values + keys + 2 * value_heads) * 4
    held += -(-span // CHUNK_ROWS) * keys * c.linear_value_head_dim * 4
    heads = 5 * c.num_attention_heads + 3 * c.num_key_value_heads
    experts = c.num_experts_per_tok * (c.moe_intermediate_size * n + 4 * c.hidden_size)
    shared = 4 * c.hidden_size + 3 * c.shared_expert_intermediate_size * n
    stages = (
        rows * gdn + held,
        rows * heads * c.head_dim * n,
        rows * (8 * c.num_experts + experts + shared),
    )
    return rows * 3 * c.hidden_size * n + max(stages)


def logits_bytes(config: ModelConfig, *, rows: int, number_bytes: int) -> int:
    """Logits of `rows` rows as the head makes them and in float32."""
    return rows * config.vocab_size * (number_bytes + 4)


def pick_workspace(config: ModelConfig, *, rows: int) -> int:
    """What plain PyTorch needs to pick `rows` rows at once, by the rule that needs the most."""
    return PICK_TENSORS * rows * config.vocab_size * 4


def prompt_workspace(config: ModelConfig, *, rows: int, number_bytes: int) -> int:
    """What a prompt's chunk needs."""
    chunk = chunk_bytes(config, rows=rows, number_bytes=number_bytes)
    return chunk + logits_bytes(config, rows=1, number_bytes=number_bytes)


def graph_pool(config: ModelConfig, *, number_bytes: int) -> int:
    """What captured passes over a block need; they share it, since they never run together."""
    rows = config.block_size
    chunk = chunk_bytes(config, rows=rows, number_bytes=number_bytes)
    logits = 2 * rows * config.vocab_size * number_bytes
    record = record_bytes(config, rows=DRAFT_ROWS, number_bytes=number_bytes)
    return chunk + logits + record + GRAPH_BYTES


def record_bytes(config: ModelConfig, *, rows: int, number_bytes: int) -> int:
    """What a verify of so many rows keeps of them until it is known which are accepted."""
    layers = sum(not config.is_attention(layer) for layer in range(config.num_hidden_layers))
    row = config.qkv_dim * (number_bytes + 4) + 2 * config.linear_num_value_heads * 4
    return rows * layers * row
