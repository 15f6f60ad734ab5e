"""Flags that several commands share."""

import inspect
from collections.abc import Callable

import pytest

from clover_local.cli.chat import chat
from clover_local.cli.generate import generate
from clover_local.decoding.settings import KEYS

COMMANDS = pytest.mark.parametrize("command", [chat, generate], ids=lambda c: c.__name__)


@COMMANDS
def test_every_setting_has_a_flag_of_its_name(command: Callable[..., None]) -> None:
    assert set(inspect.signature(command).parameters) >= set(KEYS)


@COMMANDS
def test_a_flag_that_is_not_given_is_none(command: Callable[..., None]) -> None:
    parameters = inspect.signature(command).parameters
    assert {parameters[key].default for key in KEYS} == {None}
