"""What two models say about the same rows, and what one says about the text.

All distributions are at temperature 1 with MASK banned, as in generation. Logits are made from
hidden states in chunks of rows, since all of them at once would be large; sums are float64.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from clover_local.errors import CloverError
from clover_local.model.clover import Head

CHUNK_BYTES = 64 << 20  # of one model's logits


@dataclass(frozen=True, eq=False)
class Opinions:
    """What one model says about rows."""

    token: Tensor  # [R] int64: argmax, the lower id wins a tie
    confidence: Tensor  # [R] float64: its probability
    surprise: Tensor  # [R] float64: -ln p(the text's own token), nats


@dataclass(frozen=True, eq=False)
class Divergence:
    """How two models differ on the same rows."""

    kl: Tensor  # [R] float64, nats
    model: Opinions
    reference: Opinions

    @property
    def agrees(self) -> Tensor:
        """Whether both have the same likeliest token: [R] bool."""
        return self.model.token == self.reference.token


def log_probabilities(head: Head, states: Tensor, *, mask_token_id: int) -> Tensor:
    """log softmax(logits) with MASK banned: [R, D] to [R, V] float64, -inf at MASK.

    Raises:
        CloverError: logits that are no numbers.
    """
    device = head.norm.device
    with torch.inference_mode():
        logits = head(states.to(device)).double()
        logits[:, mask_token_id] = -torch.inf
        out = logits.log_softmax(-1)
    if bool(out[:, 0 if mask_token_id else -1].isnan().any()):
        raise CloverError(
            "the logits are no numbers (NaN or infinite): run `clover-local verify` on the model"
        )
    return out


def opinions(head: Head, states: Tensor, *, targets: Tensor, mask_token_id: int) -> Opinions:
    """What a model says about rows: hidden `states` [R, D], the text's own tokens `targets` [R]."""
    return _joined(
        [
            _opinions(
                log_probabilities(head, states[chunk], mask_token_id=mask_token_id), targets[chunk]
            )
            for chunk in _chunks(head, len(states))
        ]
    )


def diverge(
    head: Head,
    states: Tensor,
    *,
    reference_head: Head,
    reference_states: Tensor,
    targets: Tensor,
    mask_token_id: int,
) -> Divergence:
    """KL(reference || model) = sum_v p_ref(v) (ln p_ref(v) - ln p_model(v)) of each row, in nats.

    The direction asks what is lost by using the model where the reference was meant. A token to
    which the reference gives probability 0 adds nothing.
    """
    kls = [torch.empty(0, dtype=torch.float64)]
    models, references = [], []
    for chunk in _chunks(head, len(states)):
        log_q = log_probabilities(head, states[chunk], mask_token_id=mask_token_id)
        log_p = log_probabilities(
            reference_head, reference_states[chunk], mask_token_id=mask_token_id
        )
        kls.append(_kl(log_p, log_q).cpu())
        models.append(_opinions(log_q, targets[chunk]))
        references.append(_opinions(log_p, targets[chunk]))
    return Divergence(torch.cat(kls), _joined(models), _joined(references))


def perplexity(opinions: Opinions) -> float:
    """exp(mean of -ln p(the text's own token)) over the rows."""
    return float(opinions.surprise.mean().exp())


def accepted_flips(divergence: Divergence, *, threshold: float) -> tuple[int, int]:
    """(flips, accepted): rows with reference confidence > threshold, and how many of them differ.

    These are the tokens that the reference writes in one pass; a flip is a token that the model,
    shown the same block, would not have written.
    """
    accepted = divergence.reference.confidence > threshold
    flips = accepted & ~divergence.agrees
    return int(flips.sum()), int(accepted.sum())


def tokens_per_preview(confidence: Tensor, blocks: Tensor, *, threshold: float) -> float | None:
    """The mean over previews of max(1, masked rows with confidence > threshold); None without any.

    Teacher-forced: the blocks are the text's own, masked at random. `blocks` [M] says to which
    preview each of the masked rows belongs.
    """
    if not len(blocks):
        return None
    accepted = torch.zeros(int(blocks.max()) + 1, dtype=torch.float64)
    accepted.index_add_(0, blocks, (confidence > threshold).double())
    return float(accepted[torch.unique(blocks)].clamp(min=1).mean())


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum_v p (ln p - ln q), [R, V] twice to [R]."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)


def _opinions(log_p: Tensor, targets: Tensor) -> Opinions:
    token = log_p.argmax(-1)
    picked = log_p.gather(1, torch.stack([token, targets.to(token.device)], dim=1)).cpu()
    return Opinions(token.cpu(), picked[:, 0].exp(), -picked[:, 1])


def _joined(parts: list[Opinions]) -> Opinions:
    none = torch.empty(0, dtype=torch.float64)
    parts = [Opinions(none.long(), none, none), *parts]
    return Opinions(
        torch.cat([part.token for part in parts]),
        torch.cat([part.confidence for part in parts]),
        torch.cat([part.surprise for part in parts]),
    )


def _chunks(head: Head, rows: int) -> Iterator[slice]:
    """Rows whose logits take about `CHUNK_BYTES` in float32."""
    size = max(CHUNK_BYTES // (4 * head.vocab_size), 1)
    for start in range(0, rows, size):
        yield slice(start, start + size)
