"""Flags that several commands share."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clover_local.cli.chat import chat
from clover_local.cli.effects import OF_BLOCKS
from clover_local.cli.generate import generate
from clover_local.cli.options import require_plot
from clover_local.decoding.keys import KEYS, SAMPLERS
from clover_local.errors import CloverError

COMMANDS = pytest.mark.parametrize("command", [chat, generate], ids=lambda c: c.__name__)


@COMMANDS
def test_every_setting_has_a_flag_of_its_name(command: Callable[..., None]) -> None:
    assert set(inspect.signature(command).parameters) >= set(KEYS)


@COMMANDS
def test_a_flag_that_is_not_given_is_none(command: Callable[..., None]) -> None:
    parameters = inspect.signature(command).parameters
    assert {parameters[key].default for key in KEYS} == {None}


@pytest.mark.parametrize("name", ["chart.pdf", "chart", "chart.png.txt"])
def test_a_chart_of_another_kind_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CloverError, match=r"a chart is \.png or \.svg"):
        require_plot(tmp_path / name)


def test_a_chart_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CloverError, match="there is no folder"):
        require_plot(tmp_path / "none" / "chart.svg")


def test_a_chart_without_matplotlib_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CloverError, match=r"pip install 'clover-local\[plot\]'"):
        require_plot(tmp_path / "chart.svg")


def test_the_sampler_document_names_every_rule_and_its_flags() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sampler.md").read_text(encoding="utf-8")
    own = [*OF_BLOCKS.split(), "min_new_tokens", "loop_guard"]
    own += [key for key in KEYS if key.startswith(("sampler_", "dry_"))]
    flags = [f"--{key.replace('_', '-')}" for key in own]
    assert [name for name in [*SAMPLERS, *flags] if name not in text] == []
