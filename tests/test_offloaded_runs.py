"""Whole answers with some experts off the device: the text is that of resident experts."""

import os
import random
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from clover_local.chat import Conversation, Piece
from clover_local.decoding.events import BlockCommitted, PassDone
from clover_local.decoding.settings import resolve
from clover_local.errors import CheckpointError, ResourceError
from clover_local.experts.offloaded import OffloadedExperts
from clover_local.placement import MemoryOptions
from clover_local.residency.names import POLICY_NAMES
from clover_local.session import Session, load, open_model
from tests.conftest import answer_of
from tests.experts.conftest import Disk

PROMPT = [(13 * i + i * i) % 500 for i in range(90)]


def session_of(folder: Path, *, memory: MemoryOptions, mode: str = "denoise") -> Session:
    opened = open_model(str(folder))
    given = {"threshold": 0.12, "max_new_tokens": 40, "mode": mode}
    settings = resolve(opened.config, opened.generation, given).settings
    session = load(opened, settings, device="cpu", context=600, memory=memory)
    session.generator.prefill_rows = 37
    return session


def offloaded_of(session: Session) -> OffloadedExperts:
    experts = session.model.experts
    assert isinstance(experts, OffloadedExperts)
    return experts


def answer(session: Session) -> tuple[int, ...]:
    return answer_of(session, PROMPT)


@pytest.fixture(scope="module")
def expected(golden_folder: Path, quantized_folder: Path) -> Mapping[tuple[str, str], Any]:
    folders = {"golden": golden_folder, "quantized": quantized_folder}
    return {
        (name, mode): answer(session_of(folder, memory=MemoryOptions(), mode=mode))
        for name, folder in folders.items()
        for mode in ("denoise", "ar")
    }


@pytest.mark.parametrize("mode", ["denoise", "ar"])
@pytest.mark.parametrize("slots", [4, 11, 31])
@pytest.mark.parametrize("name", ["golden", "quantized"])
def test_text_is_that_of_resident_experts(
    name: str,
    slots: int,
    mode: str,
    golden_folder: Path,
    quantized_folder: Path,
    expected: Mapping[tuple[str, str], Any],
) -> None:
    folder = golden_folder if name == "golden" else quantized_folder
    session = session_of(folder, memory=MemoryOptions(expert_slots=slots), mode=mode)
    assert answer(session) == expected[name, mode]
    result = session.generator.result
    assert result is not None
    assert result.cache is not None
    stats = offloaded_of(session).stats()
    assert result.cache.bytes == stats.copied.bytes == result.stats.bytes_from_host
    assert result.cache.misses == stats.total.misses == stats.copied.records


@pytest.mark.parametrize(
    "memory", [MemoryOptions(expert_slots=9), MemoryOptions(device_bytes=30_000_000)]
)
def test_a_long_prompt_is_cut_as_with_resident_experts(
    memory: MemoryOptions, golden_folder: Path
) -> None:
    opened = open_model(str(golden_folder))
    settings = resolve(opened.config, opened.generation, {}).settings
    resident, planned = (
        load(opened, settings, device="cpu", context=8192, memory=given)
        for given in (MemoryOptions(), memory)
    )
    assert planned.placement.plan is not None
    assert planned.generator.prefill_rows == resident.generator.prefill_rows


@pytest.mark.parametrize("policy", [name for name in POLICY_NAMES if name != "static"])
def test_text_is_the_same_for_every_policy(
    policy: str, golden_folder: Path, expected: Mapping[tuple[str, str], Any]
) -> None:
    memory = MemoryOptions(expert_slots=13, policy=policy)
    assert answer(session_of(golden_folder, memory=memory)) == expected["golden", "denoise"]


@pytest.mark.parametrize(
    ("slots", "policy"),
    [(8, "lfru"), *((45, name) for name in POLICY_NAMES if name != "static"), (127, "lru")],
)
def test_the_demo_model_answers_as_with_resident_experts(
    slots: int, policy: str, demo_answer: tuple[int, ...]
) -> None:
    session = session_of(Path("demo"), memory=MemoryOptions(expert_slots=slots, policy=policy))
    assert answer(session) == demo_answer


@pytest.fixture(scope="module")
def demo_answer() -> tuple[int, ...]:
    return answer(session_of(Path("demo"), memory=MemoryOptions()))


def test_a_disk_error_ends_an_answer_and_keeps_what_was_written(golden_folder: Path) -> None:
    session = session_of(golden_folder, memory=MemoryOptions(expert_slots=9))
    disk = Disk(session.opened.checkpoint)
    disk.error = CheckpointError("model.safetensors cannot be read (Input/output error): check it")
    offloaded_of(session)._store._reader = disk
    chat = Conversation(session.opened.tokenizer, session.generator)
    written = ""
    with pytest.raises(CheckpointError, match="Input/output error"):
        for event in chat.ask("hello"):
            if isinstance(event, Piece):
                written += event.text
            elif isinstance(event, BlockCommitted):
                disk.fails_at = len(disk.reads)
    assert written
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert chat.messages[1]["content"] == written
    list(chat.ask("again"))  # the disk reads again
    assert session.generator.result is not None
    assert len(session.generator.result.token_ids) == 40


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_that_is_cut_while_in_use_ends_an_answer_not_the_process(
    quantized_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(quantized_folder, tmp_path / "model"))
    session = session_of(folder, memory=MemoryOptions(expert_slots=9))
    assert str(folder) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    before = answer(session)
    for path in folder.glob("*.safetensors"):
        os.truncate(path, 100)
    session.generator.state.reset()
    with pytest.raises(CheckpointError, match="ends too early, it was changed while in use"):
        answer(session)
    assert before


def events(session: Session) -> Iterator[object]:
    yield from session.generator.run(PROMPT)


@pytest.mark.parametrize("seed", range(3))
def test_resizing_between_passes_changes_nothing(
    seed: int, golden_folder: Path, expected: Mapping[tuple[str, str], Any]
) -> None:
    chance = random.Random(seed)
    session = session_of(golden_folder, memory=MemoryOptions(expert_slots=20))
    experts = offloaded_of(session)
    for event in events(session):
        if isinstance(event, PassDone) and chance.random() < 0.4:
            experts.resize(chance.randint(experts.least_slots, experts.most_slots))
    result = session.generator.result
    assert result is not None
    assert result.token_ids == expected["golden", "denoise"]


def test_out_of_memory_in_a_block_shrinks_the_cache_and_the_answer_goes_on(
    golden_folder: Path,
    expected: Mapping[tuple[str, str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    session = session_of(golden_folder, memory=MemoryOptions(expert_slots=20))
    session.generator._on_note = said.append
    experts = offloaded_of(session)
    forward, calls = experts.forward, iter(range(10**6))

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(calls) in (3, 12, 20, 21):
            raise torch.OutOfMemoryError("no room")
        return forward(*arguments, **options)

    monkeypatch.setattr(experts, "forward", failing)
    assert answer(session) == expected["golden", "denoise"]
    assert len(said) == 4
    assert said[0].startswith("out of memory: 18 expert slots instead of 20")
    assert experts.slots < 18


def test_out_of_memory_with_nothing_left_to_give_up_is_one_sentence(
    golden_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(golden_folder, memory=MemoryOptions(expert_slots=4))

    def failing(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(offloaded_of(session), "forward", failing)
    with pytest.raises(ResourceError, match=r"nothing left to give up.*--context"):
        answer(session)
    monkeypatch.undo()
    assert len(answer(session)) == 40


def test_an_interrupted_answer_leaves_experts_to_go_on_with(
    golden_folder: Path, expected: Mapping[tuple[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(golden_folder, memory=MemoryOptions(expert_slots=9))
    experts = offloaded_of(session)
    forward, left = experts.forward, [17]

    def interrupted(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return forward(*arguments, **options)

    monkeypatch.setattr(experts, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer(session)
    assert answer(session) == expected["golden", "denoise"]
