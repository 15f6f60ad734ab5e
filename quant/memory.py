"""How much memory and disk quantizing takes, as arithmetic: what `--memory` buys, and the least.

Numbers are bytes. Stages follow each other, so the largest counts:

    outer       embedding, head, packed head, a piece of it in float32
    source      for gptq: the source's trunk, a group of its experts and many rows in float32
    trunk       a layer's trunk as read and as packed, a piece of it in float32
    rows        trunk, packed experts, what the layer makes of the rows of one sequence
    experts     trunk, packed experts, a chunk of rows, a batch of experts in GPTQ, and a wave:
                wave x Hessian of gate and up (then gate and up in float32, Hessian of down);
                for gptq the products with the source's rows too, as large as a Hessian
    evaluation  heads, the rows of both models, a trunk and a group of experts in float32, logits

and the baseline: Python, torch, its threads. The limit decides how many experts a wave has and
nothing else. Nothing here asks how much memory is free: the same limit gives the same plan on every
machine. (The result does not depend on the plan at all: see `quant/pipeline/experts.py`.)
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clover_local.config import ModelConfig
from clover_local.errors import SettingsError
from clover_local.memory.sizes import MIB
from clover_local.quant.evaluation.metrics import CHUNK_BYTES
from clover_local.quant.grouped import GROUP_BYTES, ROWS_AT_ONCE, ROWS_TOGETHER
from clover_local.quant.profiles import AS_SOURCE, Recipe

DEFAULT_LIMIT = 12 << 30

BASELINE = 512 * MIB
"""Seen: 232 MiB once all is imported, 330 once every kind of product has run once, up to 480 with
what the allocator and oneDNN's cache of primitives keep between stages."""
HEAP_SHARE = 0.4
"""Of what is in use: freed memory that the C library may keep (0.3 seen at a limit of 1 GiB)."""
CHUNK_ROWS = 2048
"""Rows of a layer's input that are worked on together. Part of the result: sums run by chunks."""
BATCH_BYTES = {"cpu": 16 * MIB, "cuda": 1 << 30}
"""Hessians that GPTQ takes as one batch. Part of the result, so it depends on the device only."""
PIECE_NUMBERS = 4 * MIB
"""Numbers of a matrix that are rounded together."""
# How many copies are alive at once, counted in the code and checked with the peak that Linux
# reports, stage by stage, on layers of the real shapes.
PIECE_COPIES = 5  # of a piece of a matrix: in float32, scaled, rounded, as integers, difference
GPTQ_HESSIANS = 5  # of a batch: mixed, with the source, read backwards, factor, transposition
GPTQ_WEIGHTS = 8  # of a batch: source, rounded, target, updated, carried, integers, dequantized
CHUNK_COPIES = 3  # of a chunk of rows: itself, one expert's, the same weighted
SOURCE_COPIES = 5  # and for gptq: the source's, drift, one expert's, what the two differ by
PASSED_ROWS = 6  # rows on their way through a layer together: mixed, inputs, shared, routed, sums
MIXER_ROWS = 6  # rows [R, D] around a mixer
MIXER_PRODUCTS = 2  # rows as wide as the widest projection, of half the rows
EVALUATION_ROWS = 6  # a token's rows: two on their way and two compared, of two models
LOGITS = 6  # of a chunk of logits: of two models, as probabilities, in sums
ROW_FILES = 3  # rows of all sequences on disk: before a layer, behind its mixer, and one more
SOURCE_FILES = 4  # and of the source: before and behind the layer, behind its mixer, of experts


@dataclass(frozen=True)
class MemoryPlan:
    """How many experts a wave has, and the peak of each stage."""

    batch: int  # experts that are quantized together: part of the result
    wave: int  # experts whose Hessians are there together: batches, or all
    waves: int
    stages: Mapping[str, int]
    is_tight: bool
    """Whether the limit leaves no room for freed memory that the C library keeps."""

    @property
    def peak(self) -> int:
        """The most that is expected at any time."""
        return max(self.stages.values())


def plan_waves(config: ModelConfig, recipe: Recipe, *, limit: int, rows: int) -> MemoryPlan:
    """How a model of these sizes is quantized within `limit` bytes.

    Args:
        rows: of the longest calibration sequence, with its previews.

    Raises:
        SettingsError: the limit is too small; says the least.
    """
    hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
    batch = min(max(1, BATCH_BYTES[recipe.device] // (4 * hidden * hidden)), count)
    layer = _trunk(config, recipe) + count * _packed_expert(3 * hidden * inner, recipe)
    gptq = batch * 4 * (GPTQ_HESSIANS * hidden * hidden + GPTQ_WEIGHTS * 2 * inner * hidden)
    pooled = 4 * (hidden * hidden + inner * inner)
    copies = CHUNK_COPIES + (SOURCE_COPIES if recipe.needs_source_rows else 0)
    chunk = copies * 4 * CHUNK_ROWS * hidden
    per_expert = _sums(config, recipe)
    piece = PIECE_COPIES * 4 * PIECE_NUMBERS
    stages = {
        "outer": _outer(config, recipe) + piece,
        "source": _source(config, rows) if recipe.needs_source_rows else 0,
        "trunk": 2 * _trunk_numbers(config) + _trunk(config, recipe) + piece,
        "rows": layer + max(_mixer(config, rows), _expert_products(config, rows)),
        "evaluation": _evaluation(config, recipe) if recipe.evaluation_tokens else 0,
        "experts": layer + pooled + chunk + gptq + batch * per_expert,
    }
    stages = {stage: BASELINE + nbytes for stage, nbytes in stages.items()}
    _require(limit, max(stages.values()))
    batches = 1 + (limit - stages["experts"]) // (batch * per_expert)
    wave = min(batches * batch, count)
    stages["experts"] += (wave - batch) * per_expert
    peak = max(stages.values())
    is_tight = peak + int(HEAP_SHARE * (peak - BASELINE)) > limit
    return MemoryPlan(batch, wave, -(-count // wave), stages, is_tight)


def check_import(config: ModelConfig, nbytes: int, *, limit: int) -> None:
    """Checks that the parts of a quantized checkpoint of `nbytes` can be taken over one by one.

    A layer is there as it was read and as it is written.

    Raises:
        SettingsError: the limit is too small; says the least.
    """
    table = 2 * config.vocab_size * config.hidden_size
    layer = max(nbytes - table, 0) // config.num_hidden_layers
    _require(limit, BASELINE + max(2 * layer, 3 * table))


def _require(limit: int, least: int) -> None:
    if limit < least:
        raise SettingsError(
            f"--memory {shown(limit)} is too little for parts of this size: "
            f"pass at least {shown(least)}"
        )


def disk_needed(config: ModelConfig, recipe: Recipe, *, rows: int) -> int:
    """Bytes of the result, and of the rows that lie beside it while it is made.

    Args:
        rows: of all calibration sequences, with their previews.
    """
    numbers = 3 * config.hidden_size * config.moe_intermediate_size
    experts = config.num_experts * _packed_expert(numbers, recipe, in_files=True)
    trunk = _trunk_numbers(config) * (2 if recipe.trunk_bits == AS_SOURCE else 1)
    result = config.num_hidden_layers * (experts + trunk) + _outer(config, recipe)
    files = ROW_FILES + (SOURCE_FILES if recipe.needs_source_rows else 0)
    return result + files * rows * 4 * config.hidden_size


def shown(nbytes: int) -> str:
    """A number of bytes as `--memory` takes it, rounded up to whole MiB."""
    mib = -(-nbytes // MIB)
    return f"{mib // 1024}GiB" if mib % 1024 == 0 else f"{mib}MiB"


def peak_resident() -> int | None:
    """The most memory that this process ever had resident; None where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _sums(config: ModelConfig, recipe: Recipe) -> int:
    """What an expert of a wave has while sums run: those of gate and up, or those of down."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    gate_up = 2 * inner * hidden
    if not recipe.needs_source_rows:
        return 4 * max(hidden * hidden, gate_up + inner * inner)
    kept = 2 * gate_up  # of the source, in its dtype
    down = 4 * (2 * inner * inner + hidden * inner)
    return max(4 * 2 * hidden * hidden, 4 * gate_up + kept + down)


def _source(config: ModelConfig, rows: int) -> int:
    """The source's pass through a layer; `rows` of the longest sequence."""
    trunk = _trunk_numbers(config)
    together = PASSED_ROWS * (ROWS_TOGETHER + rows) * 4 * config.hidden_size
    products = max(_mixer(config, rows), _group(config) + _expert_products(config, ROWS_AT_ONCE))
    return 4 * trunk + max(2 * trunk, together + products)


def _group(config: ModelConfig) -> int:
    """Experts that are in memory together, in float32, and one more as it is read."""
    expert = 4 * 3 * config.hidden_size * config.moe_intermediate_size
    return min(GROUP_BYTES + expert, config.num_experts * expert)


def _evaluation(config: ModelConfig, recipe: Recipe) -> int:
    """The comparison with the source; `quant/evaluation` has its parts."""
    hidden = config.hidden_size
    table = 2 * config.vocab_size * hidden
    rows = (EVALUATION_ROWS * recipe.evaluation_tokens + PASSED_ROWS * ROWS_TOGETHER) * 4 * hidden
    trunk = 4 * _trunk_numbers(config)
    experts = _group(config) + _expert_products(config, ROWS_AT_ONCE)
    logits = LOGITS * min(CHUNK_BYTES, recipe.evaluation_tokens * 4 * config.vocab_size)
    return 5 * table + rows + max(2 * trunk, trunk + experts, logits)


def _mixer(config: ModelConfig, rows: int) -> int:
    """What a mixer makes of the rows of one sequence."""
    widest = MIXER_PRODUCTS * _widest(config) // 2
    return 4 * rows * (MIXER_ROWS * config.hidden_size + widest)


def _expert_products(config: ModelConfig, rows: int) -> int:
    """What experts make of rows: for each of a row's experts, before and behind the sum."""
    each = 3 * config.moe_intermediate_size + 2 * config.hidden_size
    return 4 * rows * config.num_experts_per_tok * each


def _trunk(config: ModelConfig, recipe: Recipe) -> int:
    """A layer's trunk as it runs."""
    # As it is stored, and once more as it runs: neighbours stacked, or in float32.
    each = 2 + 4 if recipe.trunk_bits == AS_SOURCE else 2
    return each * _trunk_numbers(config) + 4 * 2 * config.num_experts * config.hidden_size


def _packed_expert(numbers: int, recipe: Recipe, *, in_files: bool = False) -> int:
    """Bytes of one expert after it is quantized, at most: in memory, or in the files."""
    if recipe.method == "nf4":
        return 2 * numbers if in_files else 6 * numbers  # to run them, in float32 too
    both = 0 if recipe.down_error_limit is None else numbers // 3  # down projections in INT8 too
    return numbers // 2 + both + 2 * (numbers + both) // recipe.group_size


def _widest(config: ModelConfig) -> int:
    """Numbers that a mixer and the shared expert hold for one row."""
    attention = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    linear = config.qkv_dim + config.linear_num_value_heads * config.linear_value_head_dim
    return max(attention, linear) + config.hidden_size + config.shared_expert_intermediate_size


def _trunk_numbers(config: ModelConfig) -> int:
    """Numbers in the largest layer, its experts aside."""
    heads = config.num_attention_heads * config.head_dim
    attention = 3 * heads + 2 * config.num_key_value_heads * config.head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    linear = config.qkv_dim + 2 * values + 2 * config.linear_num_value_heads
    router = 2 * config.num_experts  # float32
    shared = 3 * config.shared_expert_intermediate_size
    return (max(attention, linear) + router + shared) * config.hidden_size


def _outer(config: ModelConfig, recipe: Recipe) -> int:
    """Bytes of embedding and head, as they are read and as they are written."""
    table = 2 * config.vocab_size * config.hidden_size
    if config.tie_word_embeddings:
        return table
    return 2 * table + (table // 2 if recipe.head_bits < AS_SOURCE else 0)
