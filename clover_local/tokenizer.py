"""Text to token ids and back, and chat messages to a prompt, from the files of a checkpoint.

`tokenizer.json` is run by the tokenizers package, the chat template by jinja2's sandbox with the
functions that templates on the hub rely on. Nothing of a checkpoint is ever executed as Python.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import tokenizers
from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from clover_local.errors import TokenizerError
from clover_local.files import require_file

Message = Mapping[str, object]
"""`role`, `content`, and what else the template knows (`reasoning_content`, `tool_calls`)."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_UNDECIDED = "\ufffd"  # how incomplete UTF-8 decodes
_MOST_UNDECIDED = 8  # tokens; a character has four bytes at most

# What a template can raise: its own errors, and those of the expressions in it.
_TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TimeoutError,
    TypeError,
    ValueError,
)
TEMPLATE_SECONDS = 10.0  # of computing; a real template takes milliseconds


class Tokenizer:
    """A checkpoint's tokenizer and chat template."""

    def __init__(
        self,
        encoder: tokenizers.Tokenizer,
        *,
        source: Path,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
    ) -> None:
        """`templates` by name: `default`, and for tools `tool_use` where it exists."""
        self._encoder = encoder
        self._source = source
        self._sources = templates
        self._special_tokens = special_tokens
        self._compiled: dict[str, Template] = {}
        self.size = max(self.vocabulary.values(), default=-1) + 1
        """One more than the largest token id."""

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Reads `tokenizer.json`, and if they exist `tokenizer_config.json`, `chat_template.jinja`.

        Raises:
            TokenizerError: a file is missing, not UTF-8, or not what its name says.
        """
        path = folder / "tokenizer.json"
        text = _read_text(path)
        if text is None:
            raise TokenizerError(f"{folder} has no tokenizer.json: download it into this folder")
        try:
            encoder = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises nothing more specific
            raise TokenizerError(
                f"{path} is no tokenizer ({_one_line(error)}): download it again"
            ) from None
        encoder.no_truncation()
        encoder.no_padding()
        config = _read_config(folder / "tokenizer_config.json")
        return cls(
            encoder,
            source=folder,
            templates=_read_templates(folder, config),
            special_tokens=_special_tokens(config),
        )

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token's spelling in the file, and its id."""
        vocabulary: dict[str, int] = self._encoder.get_vocab(with_added_tokens=True)
        return vocabulary

    @property
    def templates(self) -> Mapping[str, str]:
        """The chat templates' sources by name; the main one is `default`."""
        return self._sources

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The spellings that templates may name, such as that of `eos_token`."""
        return self._special_tokens

    def to_json(self) -> str:
        """The tokenizer as the text of a `tokenizer.json`."""
        text: str = self._encoder.to_str()
        return text

    @property
    def has_template(self) -> bool:
        """Whether `render` can work."""
        return bool(self._sources)

    @property
    def can_think(self) -> bool:
        """Whether the chat template has a switch for thinking."""
        return any("enable_thinking" in source for source in self._sources.values())

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`: none are added, and special tokens written in it count as such.

        Raises:
            TokenizerError: `text` holds surrogates, so that it has no UTF-8 form.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text is not valid Unicode at character {error.start}: pass UTF-8 text"
            ) from None
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`: nothing for ids it does not know (MASK), U+FFFD for broken UTF-8."""
        known = [token for token in ids if 0 <= token < self.size]
        text: str = self._encoder.decode(known, skip_special_tokens=skip_special)
        return text

    def id_of(self, token: str) -> int | None:
        """Id of a token by its spelling, special or not."""
        identity: int | None = self._encoder.token_to_id(token)
        return identity

    def check_templates(self) -> None:
        """Raises TokenizerError when a chat template is broken; loading leaves that open."""
        for name in self._sources:
            self._template(name)

    def require_fit(self, vocab_size: int) -> None:
        """Raises TokenizerError when an id would lie outside the model's vocabulary."""
        if self.size > vocab_size:
            raise TokenizerError(
                f"{self._source}: tokenizer.json has ids up to {self.size - 1}, "
                f"vocab_size is {vocab_size}: use the tokenizer of this checkpoint"
            )

    def render(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt for `messages` by the chat template.

        Args:
            enable_thinking: None leaves the choice to the template.

        Raises:
            TokenizerError: no template, or one that cannot be compiled or refuses these messages.
        """
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            with _time_limit(TEMPLATE_SECONDS):
                return self._template(name).render(
                    messages=list(messages),
                    tools=None if tools is None else list(tools),
                    add_generation_prompt=add_generation_prompt,
                    **thinking,
                    **self._special_tokens,
                )
        except _TEMPLATE_ERRORS as error:
            raise TokenizerError(
                f"{self._source}: the chat template refuses this chat ({_one_line(error)}): "
                "change the messages, or use --raw"
            ) from None

    def _template(self, name: str) -> Template:
        if name not in self._sources:
            raise TokenizerError(
                f"{self._source} has no chat template: use --raw to pass the prompt as it is"
            )
        if name not in self._compiled:
            try:
                self._compiled[name] = _environment().from_string(self._sources[name])
            except (*_TEMPLATE_ERRORS, SyntaxError) as error:  # jinja2 compiles to Python
                line = getattr(error, "lineno", None)
                place = f", line {line}" if line else ""
                raise TokenizerError(
                    f"{self._source}: the chat template is broken ({_one_line(error)}{place}): "
                    "download it again, or use --raw"
                ) from None
        return self._compiled[name]


class TextStream:
    """Decodes ids as they come; holds back a character until all its bytes are there."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._pending: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` completes."""
        done = []
        for token in ids:
            self._pending.append(token)
            text = self._tokenizer.decode(self._pending, skip_special=self._skip_special)
            if not text.endswith(_UNDECIDED) or len(self._pending) >= _MOST_UNDECIDED:
                done.append(text)
                self._pending = []
        return "".join(done)

    def flush(self) -> str:
        """What was held back, at the end of the text; U+FFFD where bytes are missing."""
        pending, self._pending = self._pending, []
        return self._tokenizer.decode(pending, skip_special=self._skip_special)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the Python code within it, in this thread, after so much computing."""
    end = time.thread_time() + seconds

    def check(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        if time.thread_time() > end:
            raise TimeoutError(f"it did not end in {seconds:g} s")
        return check

    before = sys.gettrace()
    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(before)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that templates on the hub are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in templates elsewhere: no HTML escapes (jinja2's own filter has them) and no `\\u`."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _read_text(path: Path) -> str | None:
    """The text of a file; None where there is none."""
    try:
        require_file(path)
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TokenizerError(
            f"{path} cannot be read ({error.strerror}): check the file and its permissions"
        ) from None
    except UnicodeDecodeError:
        raise TokenizerError(f"{path} is not UTF-8: download it again") from None


def _read_config(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    try:
        config = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError) as error:
        raise TokenizerError(
            f"{path} is not valid JSON ({_one_line(error)}): download it again"
        ) from None
    if not isinstance(config, dict):
        raise TokenizerError(f"{path} holds no JSON object: download it again")
    return config


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: from `chat_template.jinja`, else from `tokenizer_config.json`."""
    text = _read_text(folder / "chat_template.jinja")
    value = config.get("chat_template") if text is None else text
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else [value]
    templates = {}
    for entry in entries:
        fields = entry if isinstance(entry, dict) else {}
        name, source = fields.get("name"), fields.get("template")
        if not isinstance(name, str) or not isinstance(source, str):
            raise TokenizerError(
                f"{folder / 'tokenizer_config.json'}: chat_template is no text and no list of "
                "{name, template}: download it again"
            )
        templates[name] = source
    return templates


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens that templates may name; each is a text or an object with `content`."""
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
