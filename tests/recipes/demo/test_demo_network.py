"""The trainer's network computes what the golden checkpoint's numbers say."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from clover_local.config import read_model_config


@pytest.mark.parametrize("padding", [19, 51])
def test_both_streams_give_the_golden_logits(
    demo_network: ModuleType, golden_folder: Path, padding: int
) -> None:
    config = read_model_config(golden_folder)
    params = {
        name: value.float()
        for name, value in load_file(golden_folder / "model.safetensors").items()
    }
    cases = json.loads((golden_folder / "cases.json").read_text())
    expected = np.load(golden_folder / "expected.npz")
    tokens = torch.tensor([[0] * padding + cases["prompt"] + cases["commit_block"]])
    chunk = (padding + 45) // 32
    masks = [config.mask_token_id] * 32
    batch = demo_network.Batch(
        tokens=tokens,
        start=torch.tensor([padding]),
        noisy=torch.tensor([masks, cases["partial_block"]]),
        example=torch.tensor([0, 0]),
        block=torch.tensor([chunk, chunk]),
    )
    network = demo_network.DemoNetwork(config, params)
    with torch.no_grad():
        clean, noisy, _ = network.forward(batch)
    prompt_end = padding + 45
    for hidden, name in (
        (clean[0, padding:prompt_end], "prompt_logits"),
        (clean[0, prompt_end:], "commit_logits"),
        (noisy[0], "preview_all_masked"),
        (noisy[1], "preview_partial"),
    ):
        np.testing.assert_allclose(network.logits(hidden).numpy(), expected[name], atol=2e-5)


def test_the_gathered_rows_have_the_gradient_of_plain_indexing(demo_network: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([2, 0, 3, 1, 2, 0])  # 3: no row
    inverse = torch.tensor([[1, 5], [3, 6], [0, 4]])  # 6: no place
    assert torch.autograd.gradcheck(lambda t: demo_network.GatherRows.apply(t, index, inverse), x)


def test_the_triangular_inverse_and_its_gradient(demo_network: ModuleType) -> None:
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(2, 8, 8, generator=generator).tril(-1)
    inverse = demo_network.InverseUnitLower.apply(a)
    torch.testing.assert_close(
        inverse @ (torch.eye(8) + a), torch.eye(8).expand(2, 8, 8), atol=1e-4, rtol=0
    )
    reference = a.clone().requires_grad_()
    torch.linalg.inv(torch.eye(8) + reference).square().sum().backward()
    own = a.clone().requires_grad_()
    demo_network.InverseUnitLower.apply(own).square().sum().backward()
    assert own.grad is not None and reference.grad is not None
    torch.testing.assert_close(own.grad, reference.grad.tril(-1), atol=1e-2, rtol=1e-4)
