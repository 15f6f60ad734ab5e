"""Which implementation runs."""

import pytest
import torch

from clover_local.kernels import dispatch
from clover_local.kernels.gated_delta_commit import gated_delta_recurrent


@pytest.mark.parametrize(
    ("choice", "says"), [("triton", "no Triton kernels yet"), ("fast", "reference and triton")]
)
def test_kernels_that_do_not_exist_are_refused(
    choice: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOVER_KERNELS", choice)
    with pytest.raises(ValueError, match=says):
        dispatch.check_choice()


def test_reference_kernels_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLOVER_KERNELS", raising=False)
    dispatch.check_choice()
    monkeypatch.setenv("CLOVER_KERNELS", "reference")
    dispatch.check_choice()


@pytest.mark.parametrize("rows", [1, 4, 5, 32, 33, 70])
def test_delta_rule_is_the_same_for_any_number_of_rows(rows: int) -> None:
    torch.manual_seed(rows)
    q, k = torch.nn.functional.normalize(torch.randn(2, rows, 2, 12), dim=-1)
    v, state = torch.randn(rows, 4, 20), torch.randn(4, 12, 20)
    g, beta = -torch.rand(rows, 4), torch.rand(rows, 4)
    out = dispatch.gated_delta_commit(q, k, v=v, g=g, beta=beta, state=state)
    expected = gated_delta_recurrent(q, k, v=v, g=g, beta=beta, state=state)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
