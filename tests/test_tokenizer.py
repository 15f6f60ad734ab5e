"""Text to ids and back, streaming, and chat templates, whole and broken."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from clover_local import demo
from clover_local.errors import TokenizerError
from clover_local.tokenizer import Message, TextStream, Tokenizer

TEXTS = [
    "",
    "plain",
    "Grüße, 世界! — naïve\r\n\t 17+26\n\n  x",
    "👩‍👩‍👧 🇩🇪 \U0001d518 \u00a0\ufeff",
    "<|im_start|>user\nhi<|im_end|><think></think>",
    "literal \ufffd and \x00\x1b[31m",
]
HELLO: list[Message] = [{"role": "user", "content": "hello"}]


@pytest.fixture(params=["golden", "demo"])
def tokenizer(request: pytest.FixtureRequest, golden_folder: Path) -> Tokenizer:
    folder = golden_folder if request.param == "golden" else Path(str(demo.__file__)).parent
    return Tokenizer.load(folder)


@pytest.fixture
def templated(model_folder: Path) -> "Templated":
    return Templated(model_folder)


class Templated:
    """The golden tokenizer with a template of the test's choice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, template: str | bytes) -> Tokenizer:
        content = template.encode() if isinstance(template, str) else template
        (self.folder / "chat_template.jinja").write_bytes(content)
        return Tokenizer.load(self.folder)

    def render(self, template: str, messages: Sequence[Message] = HELLO) -> str:
        return self(template).render(messages)

    def with_config(self, config: object) -> Tokenizer:
        path = self.folder / "tokenizer_config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        return Tokenizer.load(self.folder)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_special_tokens_in_text_are_parsed_and_none_is_added(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>a")
    (letter,) = tokenizer.encode("a")
    assert ids == [letter, tokenizer.id_of("<|im_end|>"), letter]
    assert tokenizer.decode(ids) == "aa"


def test_ids_outside_the_tokenizer_decode_to_nothing(tokenizer: Tokenizer) -> None:
    (letter,) = tokenizer.encode("a")
    outside = [tokenizer.size, tokenizer.size + 7, 2**31, 2**40, -1]
    assert tokenizer.decode([letter, *outside, letter]) == "aa"
    assert tokenizer.id_of("<|no such token|>") is None


def test_a_long_text_encodes_in_full(tokenizer: Tokenizer) -> None:
    text = "The 42 quick brown foxes: ähnlich.\n" * 3000
    assert len(text) > 100_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_truncation_and_padding_in_the_file_are_ignored(model_folder: Path) -> None:
    path = model_folder / "tokenizer.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(values), encoding="utf-8")
    assert len(Tokenizer.load(model_folder).encode("abcdefgh")) == 8


def test_text_without_a_utf8_form_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="not valid Unicode at character 2: pass UTF-8"):
        tokenizer.encode("ab\udcff")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(golden_folder: Path) -> None:
    tokenizer = Tokenizer.load(golden_folder)
    tokenizer.require_fit(508)
    with pytest.raises(TokenizerError, match="ids up to 507, vocab_size is 507"):
        tokenizer.require_fit(507)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_a_stream_gives_the_text_of_all_ids_together(
    tokenizer: Tokenizer, text: str, width: int
) -> None:
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, skip_special=False)
    pieces = [stream.push(ids[start : start + width]) for start in range(0, len(ids), width)]
    assert "".join(pieces) + stream.flush() == text


def test_a_character_is_held_back_until_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("世")
    assert len(ids) == 3
    stream = TextStream(tokenizer)
    assert [stream.push([token]) for token in ids] == ["", "", "世"]
    assert stream.push(ids[:2]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_a_special_token_within_a_character_does_not_break_it(tokenizer: Tokenizer) -> None:
    first, *rest = tokenizer.encode("é")
    end = tokenizer.id_of("<|im_end|>")
    assert end is not None
    assert TextStream(tokenizer).push([first, end, tokenizer.size, *rest]) == "é"


def test_bytes_that_are_no_text_are_not_held_back_for_ever(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode("世")[0]
    text = TextStream(tokenizer).push([first] * 100)
    assert len(text) >= 92
    assert set(text) == {"\ufffd"}


def test_a_stream_decodes_few_ids_at_a_time_however_long_the_text(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, decoded = tokenizer.decode, list[int]()

    def counting(ids: Sequence[int], *, skip_special: bool = True) -> str:
        decoded.append(len(ids))
        return decode(ids, skip_special=skip_special)

    monkeypatch.setattr(tokenizer, "decode", counting)
    stream, ids = TextStream(tokenizer), tokenizer.encode("世é! " * 500)
    for token in ids:
        stream.push([token])
    assert len(decoded) == len(ids) and max(decoded) == 3


def test_the_golden_template_renders(golden_folder: Path) -> None:
    tokenizer = Tokenizer.load(golden_folder)
    assert tokenizer.has_template
    assert not tokenizer.can_think
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.render(messages) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>assistant"
    )


def test_the_demo_template_switches_thinking() -> None:
    tokenizer = Tokenizer.load(Path(str(demo.__file__)).parent)
    assert tokenizer.can_think
    thinking = tokenizer.render(HELLO, enable_thinking=True)
    assert thinking.endswith("<|im_start|>assistant\n<think>\n")
    assert tokenizer.render(HELLO, enable_thinking=False).endswith("</think>\n\n")
    assert tokenizer.render(HELLO) == tokenizer.render(HELLO, enable_thinking=False)
    history = tokenizer.render(HELLO, add_generation_prompt=False)
    assert history.endswith("hello<|im_end|>\n")


def test_tools_reach_the_template() -> None:
    tokenizer = Tokenizer.load(Path(str(demo.__file__)).parent)
    tool = {"function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}
    assert '{"name": "weather", "parameters": {"city": "any"}}' in tokenizer.render(
        HELLO, tools=[tool]
    )


def test_the_template_file_wins_over_the_config(templated: Templated) -> None:
    assert templated.render("from the file") == "from the file"


def test_templates_in_a_list_are_picked_by_name(templated: Templated) -> None:
    entries = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "no tools"},
    ]
    tokenizer = templated.with_config({"chat_template": entries})
    assert tokenizer.render(HELLO) == "no tools"
    assert tokenizer.render(HELLO, tools=[{"name": "x"}]) == "tools"


def test_special_tokens_are_names_in_the_template(templated: Templated) -> None:
    templated.with_config({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None})
    assert templated.render("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}") == "<s>|</s>|"


def test_the_functions_that_templates_rely_on_exist(templated: Templated) -> None:
    assert templated.render("{{ {'b': 'ä<', 'a': [1]} | tojson }}") == '{"b": "ä<", "a": [1]}'
    assert templated.render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert len(templated.render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert templated.render(loop) == "01"


def test_blocks_leave_no_blank_lines(templated: Templated) -> None:
    template = "a\n  {% if true %}\n  b\n  {% endif %}\nc"
    assert templated.render(template) == "a\n  b\nc"


def test_a_template_cannot_reach_python_or_change_the_messages(templated: Templated) -> None:
    with pytest.raises(TokenizerError, match="unsafe"):
        templated.render("{{ ''.__class__.__mro__ }}")
    messages = [dict(HELLO[0])]
    with pytest.raises(TokenizerError, match="unsafe"):
        templated.render("{{ messages.append(1) }}", messages)
    assert messages == HELLO


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "(roles must alternate)"),
        ("{{ messages[0].tool.name }}", "has no attribute 'tool'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
    ids=["raises", "undefined", "arithmetic", "type", "recursion"],
)
def test_a_template_that_raises_is_one_line_with_its_message(
    templated: Templated, template: str, complaint: str
) -> None:
    tokenizer = templated(template)
    tokenizer.check_templates()
    with pytest.raises(TokenizerError) as caught:
        tokenizer.render(HELLO)
    message = str(caught.value)
    assert message.startswith(f"{templated.folder}: the chat template refuses this chat (")
    assert complaint in message
    assert "\n" not in message
    assert "--raw" in message


def test_a_template_with_a_syntax_error_says_where(templated: Templated) -> None:
    tokenizer = templated("line one\n{% if %}\n")
    assert tokenizer.encode("a")  # all but the template works
    for use in (tokenizer.check_templates, lambda: tokenizer.render(HELLO)):
        with pytest.raises(TokenizerError, match=r"template is broken \(.*, line 2\): download"):
            use()


def test_without_a_template_rendering_says_raw(templated: Templated) -> None:
    tokenizer = templated.with_config({})
    assert not tokenizer.has_template
    assert not tokenizer.can_think
    with pytest.raises(TokenizerError, match="has no chat template: use --raw"):
        tokenizer.render(HELLO)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json: download it"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("tokenizer.json", b'{"version": "\xff"}', "is not UTF-8: download it again"),
        ("tokenizer.json", b'{"version": ', "is no tokenizer ("),
        ("tokenizer.json", b'{"version": "1.0"}', "is no tokenizer ("),
        ("tokenizer_config.json", b"\xfe\xff", "is not UTF-8"),
        ("tokenizer_config.json", b"{", "is not valid JSON"),
        ("tokenizer_config.json", b"[]", "holds no JSON object"),
        ("tokenizer_config.json", b'{"chat_template": 3}', ": chat_template is no text"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "a"}]}', ": chat_template is no"),
        ("chat_template.jinja", b"\x80", "is not UTF-8"),
    ],
)
def test_a_damaged_file_is_named(
    model_folder: Path, name: str, content: bytes, complaint: str
) -> None:
    (model_folder / name).write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(model_folder)
    message = str(caught.value)
    assert message.startswith(
        f"{model_folder / name}{'' if complaint[0] == ':' else ' '}{complaint}"
    )
    assert "\n" not in message
    assert message.endswith(": download it again")


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
        "{% if 1 %}" * 200 + "{% endif %}" * 200,
        "{% break %}",
        "{{ " + "9" * 5000 + " }}",
    ],
    ids=["loops", "depth", "break", "number"],
)
def test_a_template_that_python_cannot_compile_is_broken(
    templated: Templated, template: str
) -> None:
    with pytest.raises(TokenizerError, match="broken"):
        templated(template).check_templates()


def test_a_template_without_end_is_stopped(
    templated: Templated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clover_local.tokenizer.TEMPLATE_SECONDS", 0.1)
    endless = "{% for a in range(9999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    before = sys.gettrace()
    with pytest.raises(TokenizerError, match="did not end"):
        templated.render(endless)
    assert sys.gettrace() is before


def test_a_template_that_asks_for_endless_memory_is_refused(
    templated: Templated,
) -> None:
    with pytest.raises(TokenizerError, match="MemoryError"):
        templated.render("{{ 'a' * 2 ** 62 }}")


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(model_folder: Path) -> None:
    os.mkfifo(model_folder / "chat_template.jinja")
    with pytest.raises(TokenizerError, match="no regular file"):
        Tokenizer.load(model_folder)
