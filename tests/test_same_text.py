"""The same seed gives the same text: wherever experts lie, whatever picks, whoever watches.

Greedy and drawn, in every mode; `test_offloaded_runs.py` has more sizes and policies, greedy.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clover_local.chat import Piece
from clover_local.cli.live import AnswerView
from clover_local.cli.writer import Throttle, Writer
from clover_local.decoding.device_pick import DevicePicker
from clover_local.decoding.events import BlockCommitted, PassDone, PromptProgress
from clover_local.decoding.settings import resolve
from clover_local.decoding.trace import Trace
from clover_local.placement import MemoryOptions
from clover_local.session import Session, load, open_model

PROMPT = [(13 * i + i * i) % 500 for i in range(70)]
QUESTION = [(7 * i * i + 3) % 500 for i in range(21)]
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 2**33 + 5}
WAYS: dict[str, dict[str, Any]] = {
    f"{mode}-{name}": {"mode": mode, "threshold": 0.05, "draft_width": 8, **drawn}
    for mode in ("denoise", "ar", "draft")
    for name, drawn in (("greedy", {}), ("drawn", DRAWN))
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def session_of(
    folder: Path, *, memory: MemoryOptions | None = None, context: int = 400, **given: Any
) -> Session:
    opened = open_model(str(folder))
    settings = resolve(opened.config, opened.generation, {"max_new_tokens": 40, **given}).settings
    return load(opened, settings, device="cpu", context=context, memory=memory or MemoryOptions())


def text(session: Session, prompt: list[int] = PROMPT) -> tuple[int, ...]:
    for _ in session.generator.run(prompt):
        pass
    result = session.generator.result
    assert result is not None
    return result.token_ids


@pytest.fixture(scope="module")
def expected(golden_folder: Path) -> Mapping[str, tuple[int, ...]]:
    """All experts resident, plain PyTorch, the prompt at once, nobody watching."""
    return {way: text(session_of(golden_folder, **given)) for way, given in WAYS.items()}


def test_a_seed_changes_the_text_in_every_mode(
    golden_folder: Path, expected: Mapping[str, tuple[int, ...]]
) -> None:
    """So what the other tests compare is no greedy text by accident."""
    for mode in ("denoise", "ar", "draft"):
        drawn = expected[f"{mode}-drawn"]
        assert drawn != expected[f"{mode}-greedy"]
        other = {**WAYS[f"{mode}-drawn"], "seed": 7}
        assert text(session_of(golden_folder, **other)) != drawn


@pytest.mark.parametrize(
    ("slots", "policy"), [(5, "lfru"), (13, "lru"), (31, "lfru")], ids=lambda value: str(value)
)
@EVERY_WAY
def test_with_experts_off_the_device(
    way: str,
    slots: int,
    policy: str,
    golden_folder: Path,
    expected: Mapping[str, tuple[int, ...]],
) -> None:
    memory = MemoryOptions(expert_slots=slots, policy=policy)
    session = session_of(golden_folder, memory=memory, **WAYS[way])
    assert text(session) == expected[way]
    assert session.generator.result is not None and session.generator.result.cache is not None


@EVERY_WAY
def test_with_the_prompt_in_pieces(
    way: str, golden_folder: Path, expected: Mapping[str, tuple[int, ...]]
) -> None:
    session = session_of(golden_folder, **WAYS[way])
    session.generator.prefill_rows = 17
    assert text(session) == expected[way]


@EVERY_WAY
def test_of_a_next_turn_by_state_reuse_and_from_scratch(
    way: str, golden_folder: Path, expected: Mapping[str, tuple[int, ...]]
) -> None:
    session = session_of(golden_folder, **WAYS[way])
    first = text(session)
    assert first == expected[way]
    longer = [*PROMPT, *first, *QUESTION]
    second = text(session, longer)
    assert session.generator.result is not None
    assert session.generator.result.reused_tokens >= len(PROMPT) + len(first) - 1
    assert second == text(session_of(golden_folder, **WAYS[way]), longer)


@EVERY_WAY
def test_with_a_trace_and_a_live_view(
    way: str,
    golden_folder: Path,
    expected: Mapping[str, tuple[int, ...]],
    tmp_path: Path,
) -> None:
    painted = list[str]()
    session = session_of(golden_folder, **WAYS[way])
    with Writer(painted.append) as writer:
        view = AnswerView(
            lambda ids: " ".join(map(str, ids)),
            writer,
            mask_token_id=session.model.config.mask_token_id,
            watch="heat",
            throttle=Throttle(interval=0, clock=lambda: 0),
        )
        with Trace(tmp_path / "trace.jsonl", model_hash="abc") as trace:
            session.generator.trace = trace
            for event in session.generator.run(PROMPT):
                if isinstance(event, PassDone):
                    view.show_block(event)
                elif isinstance(event, PromptProgress):
                    view.show_prompt(event)
                elif isinstance(event, BlockCommitted):
                    view.add(Piece(" ".join(map(str, event.tokens)), thinking=False))
        view.close()
    assert session.generator.result is not None
    assert session.generator.result.token_ids == expected[way]
    assert painted and (tmp_path / "trace.jsonl").read_bytes().count(b"\n") > 3


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "denoise", "in_block_repetition": True, "presence_penalty": 0.5},
        {"mode": "draft", "draft_width": 2},  # begins as `ar` does
    ],
    ids=lambda given: str(given["mode"]),
)
def test_by_the_kernels_of_a_card(
    given: dict[str, Any], golden_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens, for which the context has room: the interpreter takes seconds a forward."""
    prompt, given = PROMPT[:5], {"context": 7, **DRAWN, **given}
    plain = text(session_of(golden_folder, **given), prompt)
    monkeypatch.setenv("CLOVER_KERNELS", "triton")
    kernels = session_of(golden_folder, **given)
    assert isinstance(kernels.generator._picker, DevicePicker)
    assert text(kernels, prompt) == plain and len(plain) == 2
