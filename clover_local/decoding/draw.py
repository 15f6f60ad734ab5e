"""A draw from softmax(logits / temperature), cut by top-k, then by top-p.

The vocabulary is never sorted, only the head of each row's distribution: with top-k its k tokens
(and ties at the cut), otherwise a prefix that is widened until it holds the nucleus, or the place
where the draw lands.
"""

import torch
from torch import Tensor

_FIRST_WIDTH = 64
_WIDEN = 8
# Below this a temperature is greedy anyway; it keeps (logit - max) / temperature out of 0 / 0.
_LEAST_TEMPERATURE = 1e-30


def draw(
    logits: Tensor, uniforms: Tensor, *, temperature: float, top_k: int, top_p: float
) -> Tensor:
    """One token a row: walks the kept tokens by falling probability (lower id first among equals).

    Args:
        logits: [rows, V] float32, at least one finite entry a row, none +inf or NaN.
        uniforms: [rows] in [0, 1).
        temperature: above 0.
        top_k: keep the k largest and all that equal the k-th; 0 keeps every token.
        top_p: then keep a token while the mass before it is below this; the first always stays.

    Returns:
        Token ids [rows] int64.
    """
    scaled = (logits - logits.amax(-1, keepdim=True)) / max(temperature, _LEAST_TEMPERATURE)
    uniforms = uniforms.to(logits.device, torch.float64)[:, None]
    if 0 < top_k < logits.shape[1]:
        ids, probabilities = _largest(scaled, top_k)
        return _walk(ids, probabilities, uniforms, top_p=top_p)
    return _draw_from_head(scaled, uniforms, top_p=top_p)


def kept_tokens(
    logits: Tensor, *, temperature: float, top_k: int, top_p: float
) -> tuple[Tensor, Tensor]:
    """What `draw` draws one row's token from.

    Args:
        logits: [V]; the rest as in `draw`.

    Returns:
        Ids [n], and their probabilities [n], float64, falling, of sum 1.
    """
    scaled = ((logits - logits.max()) / max(temperature, _LEAST_TEMPERATURE))[None]
    if 0 < top_k < len(logits):
        ids, probabilities = _largest(scaled, top_k)
    else:
        values, ids = _falling(scaled, len(logits))
        probabilities = values.double().softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    kept = (probabilities > 0) & (before < top_p if top_p < 1 else True)
    ids, probabilities = ids[kept], probabilities[kept]
    return ids, probabilities / probabilities.sum()


def draw_kept(ids: Tensor, probabilities: Tensor, uniform: float) -> int:
    """One of the tokens that `kept_tokens` gave; the probabilities may have lost some of theirs."""
    target = (uniform * probabilities.sum())[None, None]
    return int(_walk(ids[None], probabilities[None], target, top_p=1))


def largest(values: Tensor, count: int) -> Tensor:
    """Columns [rows, count] of each row's largest values, falling; lower column first among equals.

    Args:
        values: [rows, V], none NaN.
        count: at most V.
    """
    cut = values.topk(count, dim=-1).values[:, -1:]
    width = int((values >= cut).sum(-1).max())  # more than `count` where several equal the last
    return _falling(values, width)[1][:, :count]


def _walk(ids: Tensor, probabilities: Tensor, uniforms: Tensor, *, top_p: float) -> Tensor:
    """The token [rows] at which the falling `probabilities` [rows, n] pass `uniforms` [rows, 1]."""
    total = torch.ones_like(uniforms)
    if top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities * (before < top_p)
        total = probabilities.sum(-1, keepdim=True)
    passed = probabilities.cumsum(-1) > uniforms * total  # [rows, n]
    # Rounding can leave the whole sum below the target: then the last token that has a share.
    last = (probabilities > 0).sum(-1) - 1
    column = torch.where(passed.any(-1), passed.int().argmax(-1), last)
    return ids.gather(1, column[:, None])[:, 0]


def _draw_from_head(scaled: Tensor, uniforms: Tensor, *, top_p: float) -> Tensor:
    """Walks a prefix of each row's tokens, wider ones only for the rows that need them."""
    vocabulary = scaled.shape[1]
    tokens = torch.zeros(len(scaled), dtype=torch.int64, device=scaled.device)
    rows = torch.arange(len(scaled), device=scaled.device)  # those without a token yet
    log_total = scaled.logsumexp(-1, keepdim=True).double()
    width = min(_FIRST_WIDTH, vocabulary)
    while len(rows):
        values, ids = _falling(scaled, width)
        probabilities = (values.double() - log_total).exp()  # shares of the whole row
        # topk may take any of several equal values at its edge, so those do not count as found.
        found = (probabilities * (values > values[:, -1:])).sum(-1, keepdim=True)
        need = uniforms if top_p == 1 else torch.full_like(uniforms, top_p)
        done = (found > need)[:, 0] | (width == vocabulary)
        tokens[rows[done]] = _walk(ids[done], probabilities[done], uniforms[done], top_p=top_p)
        rows, scaled, uniforms, log_total = (x[~done] for x in (rows, scaled, uniforms, log_total))
        width = min(width * _WIDEN, vocabulary)
    return tokens


def _largest(scaled: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and ties at the cut: ids and probabilities [rows, n], falling."""
    cut = scaled.topk(top_k, dim=-1).values[:, -1:].clamp_min(torch.finfo(scaled.dtype).min)
    width = int((scaled >= cut).sum(-1).max())
    values, ids = _falling(scaled, width)
    return ids, values.masked_fill(values < cut, -torch.inf).double().softmax(-1)


def _falling(scaled: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Each row's `width` largest values and their ids, falling; lower id first among equals."""
    ids = scaled.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = scaled.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
