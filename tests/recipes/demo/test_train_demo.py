"""The trainer: a run goes on where it stopped, and what it exports loads."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

import clover_local.demo
from clover_local.checkpoint.placements import open_checkpoint
from clover_local.config import read_model_config

FOLDER = Path(clover_local.demo.__file__).parent


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_rate_rises_then_falls_to_zero(train_demo: ModuleType) -> None:
    rates = [train_demo.learning_rate(step, 1000) for step in range(1001)]
    peak = rates.index(max(rates))
    assert peak == train_demo.WARMUP - 1
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == 0


def test_harder_families_come_more_often(train_demo: ModuleType) -> None:
    shares = train_demo.shares({"easy": 0.95, "hard": 0.1})
    assert shares["hard"] > 8 * shares["easy"] > 0


@pytest.mark.usefixtures("process_group")
def test_a_run_goes_on_from_its_checkpoint_and_exports(
    train_demo: ModuleType, tmp_path: Path
) -> None:
    config = read_model_config(FOLDER)
    first = train_demo.Trainer(0, config, tmp_path, seed=1)
    fresh = first.params["lm_head.weight"].detach().clone()
    first.train(steps=2, rows=150)
    again = train_demo.Trainer(0, config, tmp_path, seed=1)
    assert again.progress.step == 2
    assert not torch.equal(again.params["lm_head.weight"], fresh)
    assert all(torch.equal(first.params[name], again.params[name]) for name in first.params)
    again.train(steps=3, rows=150)
    assert again.progress.step == 3
    assert again.progress.rows > first.progress.rows
    train_demo.export(again.params, tmp_path)
    open_checkpoint(tmp_path, config).require_fit()
    further = train_demo.Trainer(0, config, tmp_path / "other", seed=1, weights=tmp_path)
    for name, value in further.params.items():
        assert torch.equal(value, again.params[name].to(torch.bfloat16).float())
