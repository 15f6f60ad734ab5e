"""The delta rule: its definition against the formula, the chunkwise form against the definition."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clover_local.kernels.gated_delta_commit import (
    DeltaState,
    HeadShape,
    MixerWeights,
    ProjectedRows,
    causal_conv,
    gated_delta_chunked,
    gated_delta_recurrent,
    gated_delta_rule,
    mix_commit,
    mix_verify,
    replay,
)
from clover_local.kernels.norms import l2_norm

Rule = Callable[..., tuple[Tensor, Tensor]]

H_K, H_V, DK, DV = 2, 6, 12, 20


def inputs(rows: int, *, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "q": l2_norm(normal(rows, H_K, DK)),
        "k": l2_norm(normal(rows, H_K, DK)),
        "v": normal(rows, H_V, DV),
        "g": -(normal(rows, H_V) * 2).exp(),
        "beta": normal(rows, H_V).sigmoid(),
        "state": normal(H_V, DK, DV),
    }


def formula(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The rule as written down, in float64, head by head and row by row."""
    q, k, v, g, beta, state = (x[n].double() for n in ("q", "k", "v", "g", "beta", "state"))
    state, out = state.clone(), torch.zeros_like(v)
    for h in range(H_V):
        key_head = h // (H_V // H_K)
        for t in range(len(q)):
            state[h] *= g[t, h].exp()
            seen = state[h].T @ k[t, key_head]
            state[h] += torch.outer(k[t, key_head], beta[t, h] * (v[t, h] - seen))
            out[t, h] = state[h].T @ (q[t, key_head] / DK**0.5)
    return out.float(), state.float()


def chunked(
    q: Tensor, k: Tensor, *, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    return gated_delta_chunked(q, k, v=v, g=g, beta=beta, state=state, chunk_size=64)


def test_recurrent_form_is_the_formula() -> None:
    x = inputs(9)
    torch.testing.assert_close(gated_delta_recurrent(**x), formula(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [5, 32, 64])
@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 64, 150])
def test_chunked_form_equals_the_recurrent_one(rows: int, chunk_size: int) -> None:
    x = inputs(rows, seed=rows)
    out = gated_delta_chunked(
        x["q"],
        x["k"],
        v=x["v"],
        g=x["g"],
        beta=x["beta"],
        state=x["state"],
        chunk_size=chunk_size,
    )
    torch.testing.assert_close(out, gated_delta_recurrent(**x), rtol=1e-5, atol=1e-5)


def test_chunked_form_is_stable_when_one_key_repeats() -> None:
    x = inputs(64)
    x["k"] = x["k"][:1].expand(64, -1, -1)
    x["g"] = torch.full_like(x["g"], -1e-4)
    x["beta"] = torch.full_like(x["beta"], 0.999)
    torch.testing.assert_close(chunked(**x), formula(x), rtol=1e-4, atol=1e-4)


def test_chunked_form_keeps_its_digits_behind_a_row_that_forgets_everything() -> None:
    x = inputs(64)
    x["g"] = torch.full_like(x["g"], -1e-3)
    x["g"][7] = -5000.0
    torch.testing.assert_close(chunked(**x), formula(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [5, 31, 64, 65, 130])
def test_every_form_is_the_formula_at_the_ends_of_gate_beta_and_key(rows: int) -> None:
    """Rows that keep or forget everything, write nothing or overwrite, with few distinct keys."""
    x = inputs(rows, seed=rows)
    choose = torch.Generator().manual_seed(rows)

    def pick(values: list[float]) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows, H_V), generator=choose)]

    x["g"] = pick([0.0, -1e-7, -1.0, -80.0, -1e4, -torch.inf])
    x["beta"] = pick([0.0, 1.0, 1.0, 0.5])
    x["k"] = x["k"][torch.randint(3, (rows,), generator=choose)] * pick([1.0, -1.0])[:, :1, None]
    expected = formula(x)
    for form in (gated_delta_recurrent, chunked, gated_delta_rule):
        torch.testing.assert_close(form(**x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [gated_delta_recurrent, chunked])
def test_given_state_stays_as_it_was(rule: Rule) -> None:
    x = inputs(3)
    before = x["state"].clone()
    _, after = rule(**x)
    assert torch.equal(x["state"], before)
    assert not torch.equal(after, before)


def test_causal_conv_is_the_formula() -> None:
    torch.manual_seed(6)
    qkv, before, taps = torch.randn(5, 7), torch.randn(3, 7), torch.randn(4, 7)
    rows = torch.cat([before, qkv]).double()
    y, after = causal_conv(qkv, before, taps=taps)
    for t in range(5):
        z = (rows[t : t + 4] * taps.double()).sum(0)
        torch.testing.assert_close(y[t], (z * torch.sigmoid(z)).float())
    assert torch.equal(after, qkv[-3:])


def test_causal_conv_in_pieces_equals_one_piece() -> None:
    torch.manual_seed(7)
    qkv, state, taps = torch.randn(9, 7), torch.randn(3, 7), torch.randn(4, 7)
    whole, end = causal_conv(qkv, state, taps=taps)
    pieces = []
    for piece in torch.split(qkv, [1, 2, 6]):
        y, state = causal_conv(piece, state, taps=taps)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces), whole)
    assert torch.equal(state, end)


@pytest.mark.parametrize("rows", [1, 4, 5, 32, 33, 70])
def test_delta_rule_is_the_same_for_any_number_of_rows(rows: int) -> None:
    torch.manual_seed(rows)
    q, k = torch.nn.functional.normalize(torch.randn(2, rows, 2, 12), dim=-1)
    v, state = torch.randn(rows, 4, 20), torch.randn(4, 12, 20)
    g, beta = -torch.rand(rows, 4), torch.rand(rows, 4)
    out = gated_delta_rule(q, k, v=v, g=g, beta=beta, state=state)
    expected = gated_delta_recurrent(q, k, v=v, g=g, beta=beta, state=state)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def mixer(rows: int) -> tuple[ProjectedRows, MixerWeights, DeltaState]:
    """A GDN layer of random weights, rows for it, and a state to start from."""
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    heads = HeadShape(key_heads=H_K, value_heads=H_V, key_dim=DK, value_dim=DV)
    weights = MixerWeights(
        heads=heads,
        taps=normal(4, heads.channels),
        rate=-normal(H_V).exp(),
        dt_bias=normal(H_V),
        norm=normal(DV),
        eps=1e-6,
    )
    projected = ProjectedRows(
        normal(rows, heads.channels), normal(rows, H_V, DV), normal(rows, H_V), normal(rows, H_V)
    )
    return projected, weights, DeltaState(normal(H_V, DK, DV), normal(3, heads.channels))


def first(rows: ProjectedRows, count: int) -> ProjectedRows:
    return ProjectedRows(rows.qkv[:count], rows.z[:count], rows.a[:count], rows.b[:count])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9, 16])
def test_replayed_rows_leave_the_state_that_their_commit_leaves(count: int) -> None:
    rows, weights, before = mixer(16)
    kept = before.recurrent.clone(), before.conv.clone()
    out, record = mix_verify(rows, weights, before=before)
    assert torch.equal(out, mix_commit(rows, weights, before=before)[0])
    after = replay(record, rows=count, before=before)
    _, expected = mix_commit(first(rows, count), weights, before=before)
    assert torch.equal(after.conv, expected.conv)
    torch.testing.assert_close(after.recurrent, expected.recurrent, rtol=1e-6, atol=1e-6)
    assert torch.equal(before.recurrent, kept[0]) and torch.equal(before.conv, kept[1])
    place = DeltaState(torch.empty_like(kept[0]), torch.empty_like(kept[1]))
    assert replay(record, rows=count, before=before, into=place) is place
    assert torch.equal(place.recurrent, after.recurrent) and torch.equal(place.conv, after.conv)
