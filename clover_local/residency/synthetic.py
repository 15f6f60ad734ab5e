"""Routing traces of a model that nobody has recorded yet, with the statistics that are published.

Published of this class of models: adjacent passes of a block are 0.985 alike (cosine of the rows by
expert), a preview of 32 rows uses about 70 of 256 experts and a commit about 100, some experts are
used far more than others, and text drifts slowly. The router logit of an expert for a row is a sum:

    -skew * log(rank)           what all rows prefer: Zipf-like, another ranking in each layer
    topic                       what the text at hand prefers; it drifts from block to block
    mask, or that of the token  masks are all the same token; the tokens of a text follow Zipf's
                                law, and half of them repeat what stood in the last 16 blocks
    context                     of the row: weaker in masks, which therefore route alike
    jitter                      of the pass

with normally distributed parts; each row uses the `experts_per_token` largest. Nothing is published
on how much two blocks share. `drift` and `repeat` decide that; docs/routing.md says how much hangs
on them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clover_local.residency.demand import Kind
from clover_local.residency.trace import Forward, RoutingTrace, forward_of

RECENT_BLOCKS = 16


@dataclass(frozen=True)
class Synthetic:
    """The parameters of such a trace; the parts of a logit are standard deviations."""

    layers: int = 40
    experts: int = 256
    experts_per_token: int = 8
    rows: int = 32
    blocks: int = 40
    passes: tuple[int, int] = (5, 12)
    """Fewest and most previews of a block."""
    skew: float = 1.0
    topic: float = 0.75
    drift: float = 0.01
    """Share of a topic's variance that a block renews."""
    mask: float = 0.4
    token: float = 2.1
    vocabulary: int = 500
    repeat: float = 0.5
    context_masked: float = 0.75
    context: float = 0.85
    jitter: float = 0.075
    seed: int = 0


def synthetic_trace(parameters: Synthetic) -> RoutingTrace:
    """A trace of `blocks` blocks; the same parameters give the same trace."""
    return RoutingTrace(parameters.layers, parameters.experts, tuple(_forwards(parameters)))


def _forwards(p: Synthetic) -> Iterator[Forward]:
    random = np.random.default_rng(p.seed)

    def normal(*rows: int) -> NDArray[np.float32]:
        return random.standard_normal((*rows, p.layers, p.experts), dtype=np.float32)

    ranks = np.log(np.arange(1, p.experts + 1, dtype=np.float32))
    preferred = np.stack([-p.skew * random.permutation(ranks) for _ in range(p.layers)])
    mask, vocabulary = p.mask * normal(), p.token * normal(p.vocabulary)
    topic = normal()
    often = 1 / np.arange(1, p.vocabulary + 1)
    often /= often.sum()
    recent = random.choice(p.vocabulary, RECENT_BLOCKS * p.rows, p=often)
    for block in range(p.blocks):
        topic = np.float32((1 - p.drift) ** 0.5) * topic + np.float32(p.drift**0.5) * normal()
        repeats = random.random(p.rows) < p.repeat
        new = random.choice(p.vocabulary, p.rows, p=often)
        tokens = np.where(repeats, random.choice(recent, p.rows), new)
        recent = np.concatenate([recent[p.rows :], tokens])
        context, common = normal(p.rows), preferred + p.topic * topic
        as_text = common + vocabulary[tokens] + p.context * context  # [rows, L, E]
        as_mask = common + mask + p.context_masked * context
        passes = int(random.integers(p.passes[0], p.passes[1] + 1))
        text_from = random.integers(1, passes + 1, p.rows)  # the forward that sees a row as text
        for number in range(passes + 1):
            kind: Kind = "preview" if number < passes else "commit"
            masked = text_from > number
            logits = np.where(masked[:, None, None], as_mask, as_text)
            if kind == "preview":
                logits += p.jitter * normal(p.rows)
            ids = np.argpartition(logits, -p.experts_per_token, axis=2)[..., -p.experts_per_token :]
            yield forward_of(
                list(ids.transpose(1, 0, 2)),
                num_experts=p.experts,
                kind=kind,
                block=block,
                number=number,
                masked=masked if kind == "preview" else None,
            )
