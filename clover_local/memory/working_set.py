"""How many distinct experts of a layer a forward uses.

Measured on a sister model (256 experts, 8 a token; spec of the hardware's limits): 8 for an AR
token, 49 for 16 rows of a draft, 70 for the 32 rows of a preview, 100 for a commit of 32 rows that
no coreset holds together; uniform routing would give 163. Other models get the same multiples of
their experts a token, and other blocks the power of the rows that leads from 8 to 70.
"""

from math import log

from clover_local.config import ModelConfig

_DRAFT, _PREVIEW, _COMMIT = 49 / 8, 70 / 8, 100 / 8  # times experts a token
_BLOCK = 32
_GROWTH = log(_PREVIEW) / log(_BLOCK)


def ar_experts(config: ModelConfig) -> float:
    """Those of one token."""
    return config.num_experts_per_tok


def draft_experts(config: ModelConfig) -> float:
    """Those of a draft's preview, or of its verification."""
    return _capped(config, _DRAFT)


def preview_experts(config: ModelConfig) -> float:
    """Those of a pass over a block."""
    return _capped(config, config.block_size**_GROWTH)


def commit_experts(config: ModelConfig) -> float:
    """Those of the commit of a block."""
    return _capped(config, _COMMIT / _PREVIEW * config.block_size**_GROWTH)


def _capped(config: ModelConfig, multiple: float) -> float:
    most = round(config.num_experts_per_tok * max(multiple, 1), 6)
    return min(float(config.num_experts), most)
