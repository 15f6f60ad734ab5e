"""The table of codes, on a hand-made list of controls."""

import torch

from clover_local.kernels.gpu.sampling.controls import ControlTensors, control_codes, gate_cases


def test_lists_become_codes_and_their_blocks_are_marked(device: str) -> None:
    def ids(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    controls = ControlTensors(
        banned=ids(2, 70, -1, 100),
        seen=ids(70, 5, 6),
        counts=torch.tensor([3.0, 1.0, 9.0], device=device),
        seen_count=torch.tensor([2], dtype=torch.int32, device=device),
        penalties=torch.tensor([0.0, 0.0, 1.0], device=device),
        stop_ids=ids(5, 2),
        stop_bias=torch.zeros(1, device=device),
        think_end_ids=ids(5),
        think_end_bias=torch.zeros(1, device=device),
    )
    codes = control_codes(controls, vocabulary=100, block_v=32, device=torch.device(device))
    expected = torch.zeros(104, dtype=torch.int32)
    expected[2] = 1 + 2
    expected[5] = 2 + 4 + 8
    expected[70] = 1 + 3 * 8
    expected[[100, 102]] = 1  # columns 0 .. 31 and 64 .. 95
    assert torch.equal(codes.cpu(), expected)


def test_the_gate_has_the_table() -> None:
    assert [case.name for case in gate_cases()] == ["controls"]
