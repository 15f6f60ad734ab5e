"""Credit of tokens that lead pass after pass."""

import math

import pytest
import torch

from clover_local.decoding.rules.credit import Credit


def test_credit_grows_with_each_pass_and_decays() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), -torch.inf]])  # 1/4, 3/4, banned
    credit = Credit(alpha=0.7, beta=0.8, gamma=0.2)
    gain = 0.75**0.2
    first = credit.bonus(logits, logits.softmax(-1), [5])
    second = credit.bonus(logits, logits.softmax(-1), [5])
    assert first[0, 1].item() == pytest.approx(0.7 * math.log(1 + gain), abs=1e-6)
    assert second[0, 1].item() == pytest.approx(0.7 * math.log(1 + 1.8 * gain), abs=1e-6)
    assert second[0].tolist()[::2] == [0.0, 0.0]


def test_credit_belongs_to_a_row_of_the_block() -> None:
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    credit = Credit(alpha=1, beta=1, gamma=0)
    credit.bonus(logits, logits.softmax(-1), [3, 8])
    again = credit.bonus(logits[1:], logits[1:].softmax(-1), [8])
    assert again.tolist() == [[0.0, pytest.approx(math.log(3))]]
