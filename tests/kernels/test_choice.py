"""What `CLOVER_KERNELS` may say."""

import pytest

from clover_local.kernels.choice import VARIABLE, check_choice, reference_only


@pytest.mark.parametrize(
    ("choice", "says"),
    [("triton", "no operator is called in Triton yet"), ("fast", "reference and triton")],
)
def test_kernels_that_do_not_exist_are_refused(
    choice: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, choice)
    with pytest.raises(ValueError, match=says):
        check_choice()


def test_reference_kernels_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "reference")
    check_choice()
    assert reference_only()


def test_without_a_word_every_kernel_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    check_choice()
    assert not reference_only()
