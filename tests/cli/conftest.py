"""The command line, run inside the test process, and a loaded golden model."""

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from clover_local.chat import Conversation
from clover_local.cli import console
from clover_local.cli.app import main
from clover_local.cli.talk import ChatState
from clover_local.decoding.settings import resolve
from clover_local.placement import MemoryOptions
from clover_local.session import OpenModel, load, open_model


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `clover-local ARGUMENTS`, with `stdin` as a pipe (None: as a terminal)."""

    def run(*arguments: str, stdin: bytes | None = None) -> Outcome:
        stream = io.TextIOWrapper(io.BytesIO(stdin or b""), encoding="utf-8")
        if stdin is None:
            monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys, "stdin", stream)
        monkeypatch.setattr(sys, "argv", ["clover-local", *arguments])
        try:
            code = main()
        finally:
            console.set_quiet(False)
        out, err = capsys.readouterr()
        return Outcome(code, out, err)

    return run


@pytest.fixture(scope="session")
def opened(golden_folder: Path) -> OpenModel:
    return open_model(str(golden_folder))


@pytest.fixture
def chat(opened: OpenModel) -> ChatState:
    """A chat with the golden model, in answers of at most 40 tokens."""
    return _chat(opened, MemoryOptions())


@pytest.fixture
def small_cache_chat(opened: OpenModel) -> ChatState:
    """The same with 9 of the 32 experts on the device."""
    return _chat(opened, MemoryOptions(expert_slots=9))


def _chat(opened: OpenModel, memory: MemoryOptions) -> ChatState:
    resolved = resolve(opened.config, opened.generation, {"max_new_tokens": 40})
    session = load(opened, resolved.settings, device="cpu", memory=memory)
    return ChatState(session, Conversation(opened.tokenizer, session.generator), resolved)
