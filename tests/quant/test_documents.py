"""Files of chats: the format, plain text, what is refused, what the package brings."""

import os
from importlib import resources
from pathlib import Path

import pytest

from clover_local.errors import CloverError
from clover_local.hub import locate
from clover_local.quant.documents import (
    PLAIN_CHARACTERS,
    PLAIN_PROMPT,
    Document,
    held_out_documents,
    knows_demo_tasks,
    parse_documents,
    read_documents,
)
from clover_local.tokenizer import Tokenizer

CHATS = """
=== Two turns
>>> system
Be brief.
>>> user
Hello
there

>>> assistant
<think>
a greeting
</think>

Hi!
=== With tools
>>> tools
[{"name": "clock", "parameters": {}}]
>>> user
Time?
>>> tool
12:00
"""


@pytest.fixture(scope="module")
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.load(locate("demo"))


@pytest.fixture(scope="module")
def golden_tokenizer(golden_folder: Path) -> Tokenizer:
    return Tokenizer.load(golden_folder)


def parsed(text: str) -> tuple[Document, ...]:
    return parse_documents(text.encode(), source="texts/some.txt", kind="some")


def test_chats_are_read_message_by_message() -> None:
    first, second = parsed(CHATS)
    assert (first.title, first.kind, first.tools) == ("Two turns", "some", ())
    assert first.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello\nthere"},
        {"role": "assistant", "content": "<think>\na greeting\n</think>\n\nHi!"},
    )
    assert second.tools == ({"name": "clock", "parameters": {}},)
    assert [message["role"] for message in second.messages] == ["user", "tool"]


@pytest.mark.parametrize("change", [lambda t: t.replace("\n", "\r\n"), lambda t: "\ufeff" + t])
def test_windows_line_ends_and_a_byte_order_mark_change_nothing(change: object) -> None:
    assert callable(change)
    assert parsed(change(CHATS)) == parsed(CHATS)


def test_chat_without_a_title_is_a_document_too() -> None:
    (document,) = parsed(">>> user\nHello\n>>> assistant\nHi\n")
    assert document.title == "untitled"
    assert len(document.messages) == 2


def test_marks_inside_a_line_are_text() -> None:
    (document,) = parsed(">>> user\na >>> user and a == = b\n ==== no title either\n")
    assert document.messages[0]["content"] == "a >>> user and a == = b\n ==== no title either"


def test_plain_text_becomes_answers_cut_at_paragraph_ends() -> None:
    paragraphs = [f"{number} " + "word " * 150 for number in range(20)]
    text = "\n\n".join(paragraphs)
    documents = parsed(text)
    answers = [str(document.messages[1]["content"]) for document in documents]
    assert "".join(answers).replace("\n", "") == text.replace("\n", "")
    assert all(answer[0].isdigit() for answer in answers)
    assert all(len(answer) <= PLAIN_CHARACTERS for answer in answers)
    assert min(map(len, answers[:-1])) > PLAIN_CHARACTERS / 2
    assert documents[0].messages[0] == {"role": "user", "content": PLAIN_PROMPT}


def test_long_paragraph_of_plain_text_stays_whole() -> None:
    long = "x" * (2 * PLAIN_CHARACTERS)
    documents = parsed(f"short\n\n{long}\n\nend\n")
    assert [document.messages[1]["content"] for document in documents] == ["short", long, "end"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty: pass a file with text"),
        (b" \n\t\n", "is empty"),
        (b"ab\xff", "is not UTF-8 at byte 2"),
        (b"=== A\ntext\n>>> user\nx", "document 'A' has text before its first message"),
        (b"=== A\ntext without a role", "document 'A' has text before its first message"),
        (b"=== A\n", "document 'A' has no message: write one under `>>> user`"),
        (b"=== A\n>>> robot\nx", "has the role 'robot': use system, user, assistant, tool, tools"),
        (b'=== A\n>>> tools\n{"a": 1}\n>>> user\nx', "no JSON list of tool schemas"),
        (b"=== A\n>>> tools\n[oops\n>>> user\nx", "no JSON list of tool schemas"),
        (b"=== A\n>>> tools\n[]", "document 'A' has no message"),
        (b"=== A\n>>> tools\n[]\n>>> tools\n[]\n>>> user\nx", "has `>>> tools` twice"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_broken_file_is_refused_by_name_with_the_remedy(data: bytes, message: str) -> None:
    with pytest.raises(CloverError, match=r"^some\.txt") as error:
        parse_documents(data, source="some.txt", kind="some")
    assert message in str(error.value)


def test_file_of_the_user_is_read_for_any_model(tmp_path: Path, demo_tokenizer: Tokenizer) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(CHATS, encoding="utf-8")
    assert [document.kind for document in read_documents(path, demo_tokenizer)] == ["mine"] * 2


def test_missing_file_is_refused(tmp_path: Path, demo_tokenizer: Tokenizer) -> None:
    with pytest.raises(CloverError, match=r"none\.txt cannot be read \(No such file"):
        read_documents(tmp_path / "none.txt", demo_tokenizer)


def test_pipes_and_devices_that_might_never_end_are_refused(
    tmp_path: Path, demo_tokenizer: Tokenizer
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(CloverError, match=r"cannot be read \(no regular file\)"):
            read_documents(path, demo_tokenizer)


def test_demo_gets_its_tasks_and_other_models_everything_else(
    demo_tokenizer: Tokenizer, golden_tokenizer: Tokenizer
) -> None:
    assert knows_demo_tasks(demo_tokenizer)
    assert not knows_demo_tasks(golden_tokenizer)
    for bundled in (lambda tokenizer: read_documents(None, tokenizer), held_out_documents):
        assert {document.kind for document in bundled(demo_tokenizer)} == {"demo_tasks"}
        others = {document.kind for document in bundled(golden_tokenizer)}
        assert others
        assert "demo_tasks" not in others


def test_no_bundled_document_is_both_for_calibration_and_held_out(
    demo_tokenizer: Tokenizer, golden_tokenizer: Tokenizer
) -> None:
    for tokenizer in (demo_tokenizer, golden_tokenizer):
        calibration = {str(document.messages) for document in read_documents(None, tokenizer)}
        assert not calibration & {str(d.messages) for d in held_out_documents(tokenizer)}


def test_every_bundled_text_is_a_file_of_chats() -> None:
    root = resources.files("clover_local.calibration_data")
    for folder in (root, root / "held_out"):
        for file in folder.iterdir():
            if file.name.endswith(".txt"):
                documents = parse_documents(file.read_bytes(), source=file.name, kind="x")
                assert all(not d.title.startswith("piece ") for d in documents), file.name
                assert all(m["content"] for d in documents for m in d.messages), file.name
