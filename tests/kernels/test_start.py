"""The rows of a pass before its first layer."""

import torch

from clover_local.kernels.norms import rms_norm, rotary_angles
from clover_local.kernels.start import start_pass


def test_rows_are_embedded_and_have_the_angles_of_their_positions() -> None:
    torch.manual_seed(1)
    embedding = torch.randn(11, 6).bfloat16()
    cos, sin = rotary_angles(torch.arange(20), theta=1e4, rotary_dim=6)
    norm = torch.randn(6)
    ids, length = torch.tensor([10, 0, 0, 7]), torch.tensor([13], dtype=torch.int32)
    started = start_pass(
        ids, embedding=embedding, norm=norm, eps=1e-6, length=length, cos=cos, sin=sin
    )
    assert torch.equal(started.hidden_states, embedding[[10, 0, 0, 7]])
    assert torch.equal(started.normed, rms_norm(started.hidden_states, norm, eps=1e-6))
    expected = rotary_angles(torch.arange(13, 17), theta=1e4, rotary_dim=6)
    assert torch.equal(started.cos, expected[0])
    assert torch.equal(started.sin, expected[1])


def test_rows_behind_the_tables_have_their_last_row() -> None:
    table = torch.arange(5.0)[:, None]
    started = start_pass(
        torch.zeros(4, dtype=torch.int64),
        embedding=torch.ones(1, 3),
        norm=torch.zeros(3),
        eps=1e-6,
        length=torch.tensor([3], dtype=torch.int32),
        cos=table,
        sin=-table,
    )
    assert started.cos.flatten().tolist() == [3, 4, 4, 4]
    assert started.sin.flatten().tolist() == [-3, -4, -4, -4]
