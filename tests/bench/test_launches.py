"""A pass has at most 500 launches, counted on the real model's shapes without a GPU."""

import pytest
import torch
from torch import Tensor

from clover_local.bench.launches import LIMIT, META, Launches, count, main, recorded
from clover_local.bench.models import real_layers
from clover_local.kernels.choice import VARIABLE
from clover_local.kernels.gpu.norms import rms_norm


@pytest.fixture(scope="module")
def counted() -> dict[str, Launches]:
    """Of the real model, but with 16 experts: their number changes no launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "triton")
        return count(real_layers(layers=40, experts=16, vocabulary=248320))


def test_a_pass_and_its_pick_have_at_most_500_launches(counted: dict[str, Launches]) -> None:
    launches = counted["pass of 32 rows"]
    assert launches.total == 500
    assert launches.total <= LIMIT
    of_a_pass = {"start_pass_kernel": 1, "distinct_kernel": 1}
    gdn = {"packed_linear_kernel": 2, "gated_delta_conv_kernel": 1, "block_softmax_kernel": 1}
    attention = {"packed_linear_kernel": 2, "norm_rotary_kernel": 1}
    attention |= {"range_kernel": 1, "combine_kernel": 1}
    every = {"rms_norm_kernel": 1, "float32_linear_kernel": 1, "route_block_kernel": 1}
    every |= {"gate_up_kernel": 2, "down_kernel": 2, "add_experts_norm_kernel": 1}
    head_and_pick = dict.fromkeys(("split_kernel", "join_kernel", "mark_kernel"), 1)
    head_and_pick |= {"packed_linear_kernel": 1, "report_kernel": 1}
    expected = Launches().kernels
    for part, times in (
        (of_a_pass, 1),
        (gdn, 30),
        (attention, 10),
        (every, 40),
        (head_and_pick, 1),
    ):
        for name, launched in part.items():
            expected[name] += launched * times
    assert launches.kernels == expected
    # The ids of all layers side by side; the report; the sum over passes.
    assert launches.operators == {"stack": 1, "copy to the host": 1, "add_.Tensor": 1}


def test_commits_and_ar_tokens_have_a_few_more(counted: dict[str, Launches]) -> None:
    assert counted["commit of 32 rows"].total == 532
    assert counted["AR token"].total == 538


def test_no_forward_copies_more_than_its_tokens_and_controls(
    counted: dict[str, Launches],
) -> None:
    assert [x.uploads.total() for x in counted.values()] == [1, 1, 2, 1, 2, 0]


def test_a_round_of_draft_is_a_pass_an_ar_token_of_more_rows_and_two_launches(
    counted: dict[str, Launches],
) -> None:
    """All of the first two in graphs, and none of them for every layer in the last."""
    assert counted["draft of 16 rows"].total == 500
    verify = counted["verify of 16 rows"]
    assert verify.total == 538
    assert verify.operators == {"copy to the host": 1}
    accept = counted["accept"]
    assert accept.kernels == {"recurrent_kernel": 1, "keep_last_kernel": 1}
    assert accept.operators == {}


def test_views_are_no_launches_and_new_tensors_are() -> None:
    launches = Launches()
    x = torch.empty(4, 6, device=META)
    with recorded(launches):
        views = x.view(6, 4).T[1:].chunk(3, dim=1)
        torch.empty_like(views[0])
    assert launches.total == 0
    with recorded(launches):
        x.add_(1)
        torch.cat([x, x])
        x.to(torch.int32)
        x.copy_(torch.zeros(4, 6))
    assert launches.operators.total() == 3
    assert launches.uploads == {"copy from the host": 1}


def test_kernels_are_counted_and_not_run() -> None:
    launches, made = Launches(), list[Tensor]()
    x = torch.ones(3, 8)
    with recorded(launches):
        made.append(rms_norm(x, torch.zeros(8), eps=0.0))
    assert launches.kernels == {"rms_norm_kernel": 1}
    torch.testing.assert_close(rms_norm(x, torch.zeros(8), eps=0.0), x)


def test_other_kernels_than_tritons_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ValueError, match="CLOVER_KERNELS is None, not triton"):
        count(real_layers())


def test_the_table_ends_with_sums(
    counted: dict[str, Launches],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr("clover_local.bench.launches.count", lambda config: counted)
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split() == ["all", "500", "532", "538", "500", "538", "2"]
