"""A GDN layer between its projections: rows that are verified, then accepted, in Triton."""

import pytest
import torch
from torch import Tensor

from clover_local.kernels import gated_delta_commit as plain
from clover_local.kernels.gated_delta_commit import (
    DeltaState,
    HeadShape,
    LayeredRecord,
    LayeredStates,
    MixerWeights,
    ProjectedRows,
)
from clover_local.kernels.gpu.delta.mix import mix_commit, mix_verify, replay, replay_layers

H_K, H_V, DK, DV = 2, 4, 20, 12
HEADS = HeadShape(key_heads=H_K, value_heads=H_V, key_dim=DK, value_dim=DV)


@pytest.fixture
def layer(device: str) -> tuple[ProjectedRows, MixerWeights, DeltaState]:
    """Seven rows of one projection, weights, and a state to start from."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    weights = MixerWeights(
        heads=HEADS,
        taps=normal(4, HEADS.channels),
        rate=-normal(H_V).exp(),
        dt_bias=normal(H_V),
        norm=normal(DV),
        eps=1e-6,
    )
    sizes = [HEADS.channels, H_V * DV, H_V, H_V]
    qkv, z, a, b = torch.split(normal(7, sum(sizes)), sizes, dim=-1)
    rows = ProjectedRows(qkv, z.view(-1, H_V, DV), a, b)
    return rows, weights, DeltaState(normal(H_V, DK, DV), normal(3, HEADS.channels))


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_accepted_rows_leave_their_commits_state_bit_for_bit(
    count: int, layer: tuple[ProjectedRows, MixerWeights, DeltaState]
) -> None:
    rows, weights, before = layer
    kept = before.recurrent.clone(), before.conv.clone()
    out, record = mix_verify(rows, weights, before=before)
    place = DeltaState(torch.empty_like(kept[0]), torch.empty_like(kept[1]))
    after = replay(record, rows=count, before=before, into=place)
    assert after is place
    assert torch.equal(before.recurrent, kept[0]) and torch.equal(before.conv, kept[1])
    some = ProjectedRows(rows.qkv[:count], rows.z[:count], rows.a[:count], rows.b[:count])
    normed, expected = mix_commit(some, weights, before=before)
    assert torch.equal(out[:count], normed)
    assert torch.equal(after.recurrent, expected.recurrent)
    assert torch.equal(after.conv, expected.conv)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_records_of_several_layers_are_replayed_together_bit_for_bit(
    count: int, layer: tuple[ProjectedRows, MixerWeights, DeltaState]
) -> None:
    """From their own places, which have room for more rows."""
    rows, weights, before = layer
    device = rows.qkv.device
    record = LayeredRecord.empty(2, 9, heads=HEADS, dtype=torch.float32, device=device).first(7)
    starts, ends = (LayeredStates.empty(2, HEADS, kept=3, device=device) for _ in range(2))
    other = ProjectedRows(rows.qkv.flip(0), rows.z, rows.a, rows.b)
    for number, own in enumerate((rows, other)):
        starts.layers[number].recurrent.copy_(before.recurrent)
        starts.layers[number].conv.copy_(before.conv + number)
        start = starts.layers[number]
        out, kept = mix_verify(own, weights, before=start, into=record.layers[number])
        assert kept.mixed.data_ptr() == record.mixed[number].data_ptr()
        assert torch.equal(out, mix_verify(own, weights, before=start)[0])
    kept_starts = starts.recurrent.clone(), starts.conv.clone()
    replay_layers(record, rows=count, before=starts, into=ends)
    for number, own in enumerate((rows, other)):
        some = ProjectedRows(own.qkv[:count], own.z[:count], own.a[:count], own.b[:count])
        _, expected = mix_commit(some, weights, before=starts.layers[number])
        assert torch.equal(ends.layers[number].recurrent, expected.recurrent)
        assert torch.equal(ends.layers[number].conv, expected.conv)
    assert torch.equal(starts.recurrent, kept_starts[0])
    assert torch.equal(starts.conv, kept_starts[1])


@pytest.mark.parametrize("count", [1, 3, 7])
def test_verify_and_replay_are_the_plain_operators(
    count: int, layer: tuple[ProjectedRows, MixerWeights, DeltaState]
) -> None:
    rows, weights, before = layer
    out, record = mix_verify(rows, weights, before=before)
    expected, told = plain.mix_verify(rows, weights, before=before)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for name in ("inputs", "k", "v", "g", "beta"):
        torch.testing.assert_close(getattr(record, name), getattr(told, name))
    ours = replay(record, rows=count, before=before)
    theirs = plain.replay(told, rows=count, before=before)
    assert torch.equal(ours.conv, theirs.conv)
    torch.testing.assert_close(ours.recurrent, theirs.recurrent, rtol=1e-5, atol=1e-5)
