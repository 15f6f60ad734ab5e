"""What `CLOVER_KERNELS` may say."""

import pytest
import torch

from clover_local.kernels.choice import (
    INTERPRETER,
    VARIABLE,
    check_choice,
    on_gpu,
    reference_only,
)

CPU = torch.device("cpu")


def test_kernels_that_do_not_exist_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(ValueError, match=r"CLOVER_KERNELS=fast.*reference and triton"):
        check_choice(CPU, torch.float32)


def test_reference_kernels_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "reference")
    check_choice(CPU, torch.float32)
    check_choice(torch.device("cuda"), torch.bfloat16)
    assert reference_only()
    assert not on_gpu(torch.zeros(1))


def test_without_a_word_the_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    check_choice(CPU, torch.float32)
    assert not reference_only()
    assert not on_gpu(torch.zeros(1))


def test_triton_on_a_cpu_needs_the_interpreter_and_numbers_that_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setenv(INTERPRETER, "1")
    check_choice(CPU, torch.float32)
    check_choice(torch.device("cuda"), torch.bfloat16)
    assert on_gpu(torch.zeros(1))
    with pytest.raises(ValueError, match="wrong about bfloat16"):
        check_choice(CPU, torch.bfloat16)
    monkeypatch.delenv(INTERPRETER)
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1 as well"):
        check_choice(CPU, torch.float32)
