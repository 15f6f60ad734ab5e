"""Every decoding setting of a run: its name, range and default, and where its value came from.

Names are those of the command line's flags, of `/set` and of the API's fields (`-` and `_` are the
same). The checkpoint's `generation_config.json` gives the defaults of the response controls,
because they are part of the model. Needs no torch: flags are checked before weights are loaded.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from clover_local.config import GenerationConfig, ModelConfig
from clover_local.errors import SettingsError
from clover_local.files import LARGEST, STRONGEST

MODES = ("denoise", "ar", "draft")
ACCEPT = ("typical", "exact")
DRAFT_WIDTHS = (1, 2, 4, 8, 16, 32)
SAMPLERS = ("threshold",)
DEFAULT = "default"
FROM_CONFIG = "config.json"
FROM_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Settings:
    """What a run obeys. The first five fields are the model's; the rest are the user's (`KEYS`)."""

    mask_token_id: int
    vocab_size: int
    stop_ids: tuple[int, ...] = ()
    think_end_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()

    mode: str = "denoise"
    max_new_tokens: int = 2048
    threshold: float = 0.95
    sampler: str = "threshold"
    draft_width: int = 16
    accept: str = "typical"
    accept_ratio: float = 0.9
    accept_delta: float = 0.6
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    suppress: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    length_penalty: float = 0.0
    length_penalty_start: int = 8192
    length_penalty_window: int = 8192
    think_end_bias: float = 0.0
    think_end_start: int = 4096
    think_end_window: int = 4096

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids never picked, in any mode: MASK, the checkpoint's suppressed ids, the user's."""
        return tuple(sorted({self.mask_token_id, *self.suppress_tokens, *self.suppress}))


@dataclass(frozen=True)
class Key:
    """One setting the user may give: `convert` takes a typed value or its text."""

    expects: str
    convert: Callable[[object], object]
    generation_key: str | None = None


def _choice(names: tuple[str, ...]) -> Key:
    def convert(value: object) -> str:
        if value not in names:
            raise ValueError
        return str(value)

    return Key("one of " + ", ".join(names), convert)


def _whole(
    least: int | None = None, most: int | None = None, *, generation_key: str | None = None
) -> Key:
    def convert(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise TypeError
        number = int(value)
        if (least is not None and number < least) or (most is not None and number > most):
            raise ValueError
        return number

    low = "" if least is None else f" of {least} or more"
    high = "" if most is None else f", at most {most}"
    return Key(f"a whole number{low}{high}", convert, generation_key)


def _width() -> Key:
    def convert(value: object) -> int:
        number = int(str(_whole(1).convert(value)))
        if number not in DRAFT_WIDTHS:
            raise ValueError
        return number

    return Key("one of " + ", ".join(map(str, DRAFT_WIDTHS)), convert)


def _number(
    holds: Callable[[float], bool], expects: str, *, generation_key: str | None = None
) -> Key:
    def convert(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise TypeError
        number = float(value)
        if not math.isfinite(number) or not holds(number):
            raise ValueError
        return number

    return Key(expects, convert, generation_key)


def _token_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, str):
        items: list[object] = [] if value == "none" else [*value.replace(",", " ").split()]
    elif isinstance(value, list | tuple):
        items = [*value]
    else:
        raise TypeError
    convert = _whole(0).convert
    return tuple(int(str(convert(item))) for item in items)


def _strength(generation_key: str) -> Key:
    return _number(
        lambda x: abs(x) <= STRONGEST,
        f"a number from {-STRONGEST:.0f} to {STRONGEST:.0f}",
        generation_key=generation_key,
    )


def _length(generation_key: str) -> Key:
    return _whole(-LARGEST, LARGEST, generation_key=generation_key)


KEYS: dict[str, Key] = {
    "mode": _choice(MODES),
    "max_new_tokens": _whole(1),
    "threshold": _number(lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "sampler": _choice(SAMPLERS),
    "draft_width": _width(),
    "accept": _choice(ACCEPT),
    "accept_ratio": _number(lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "accept_delta": _number(lambda x: 0 <= x <= STRONGEST, f"a number from 0 to {STRONGEST:.0f}"),
    "temperature": _number(
        lambda x: 0 <= x <= STRONGEST, f"a number from 0 (greedy) to {STRONGEST:.0f}"
    ),
    "top_k": _whole(0),
    "top_p": _number(lambda x: 0 < x <= 1, "a number above 0, at most 1"),
    "seed": _whole(0, 2**64 - 1),
    "suppress": Key("token ids such as 7,42, or none", _token_ids),
    "presence_penalty": _strength("presence_penalty"),
    "frequency_penalty": _strength("frequency_penalty"),
    "repetition_penalty": _number(
        lambda x: 1 / STRONGEST <= x <= STRONGEST,
        f"a number from {1 / STRONGEST:g} to {STRONGEST:.0f}",
        generation_key="repetition_penalty",
    ),
    "length_penalty": _strength("dllm_length_penalty"),
    "length_penalty_start": _length("dllm_length_penalty_start"),
    "length_penalty_window": _whole(1, generation_key="dllm_length_penalty_window"),
    "think_end_bias": _strength("dllm_think_end_bias"),
    "think_end_start": _length("dllm_think_end_start"),
    "think_end_window": _whole(1, generation_key="dllm_think_end_window"),
}


@dataclass(frozen=True)
class ResolvedSettings:
    """Settings, and for each field the name of the place its value came from."""

    settings: Settings
    sources: dict[str, str]

    def with_value(self, key: str, text: str, *, source: str = "/set") -> "ResolvedSettings":
        """The same settings with `key` read from `text`.

        Raises:
            SettingsError: an unknown key (names the nearest known one) or a value out of range.
        """
        return self.with_values({key: text.strip()}, source=source)

    def with_values(self, values: Mapping[str, object], *, source: str) -> "ResolvedSettings":
        """The same settings with every given value; None means "not given".

        Raises:
            SettingsError: as `with_value`.
        """
        changes: dict[str, Any] = {}
        for name, value in values.items():
            key = _known(name)
            if value is None:
                continue
            try:
                changes[key] = KEYS[key].convert(value)
            except (TypeError, ValueError):
                shown = f"--{key.replace('_', '-')}" if source == "flag" else key
                raise SettingsError(f"{shown} is {value!r}: expected {KEYS[key].expects}") from None
        settings = replace(self.settings, **changes)
        _refuse_without_effect(settings, changes)
        return ResolvedSettings(settings, {**self.sources, **dict.fromkeys(changes, source)})

    def rows(self) -> list[tuple[str, object, str]]:
        """(key, value, source) for each of `KEYS`, in their order: what `/show` prints."""
        return [(key, getattr(self.settings, key), self.sources[key]) for key in KEYS]


def resolve(
    config: ModelConfig,
    generation: GenerationConfig,
    overrides: Mapping[str, object],
    *,
    source: str = "flag",
) -> ResolvedSettings:
    """The model's settings with the user's `overrides` on top (None means "not given").

    Raises:
        SettingsError: an unknown key, a value out of range, or one without effect on this model.
    """
    values: dict[str, Any] = {"threshold": config.threshold}
    sources = {**dict.fromkeys(KEYS, DEFAULT), "threshold": FROM_CONFIG}
    for name, key in KEYS.items():
        if key.generation_key is not None:
            values[name] = getattr(generation, key.generation_key)
            if key.generation_key in generation.given:
                sources[name] = FROM_GENERATION
    stops_given = generation.given & {"eos_token_id", "stop_token_ids", "pad_token_id"}
    sources |= {
        "mask_token_id": FROM_CONFIG,
        "vocab_size": FROM_CONFIG,
        "stop_ids": FROM_GENERATION if stops_given else FROM_CONFIG,
        "think_end_token_id": FROM_GENERATION,
        "suppress_tokens": FROM_GENERATION,
    }
    settings = Settings(
        mask_token_id=config.mask_token_id,
        vocab_size=config.vocab_size,
        stop_ids=generation.stop_ids,
        think_end_token_id=generation.dllm_think_end_token_id,
        suppress_tokens=generation.suppress_tokens,
        **values,
    )
    return ResolvedSettings(settings, sources).with_values(overrides, source=source)


def _known(name: str) -> str:
    key = name.strip().removeprefix("--").replace("-", "_")
    if key in KEYS:
        return key
    near = difflib.get_close_matches(key, KEYS, n=1)
    remedy = f"did you mean {near[0]}?" if near else "known are " + ", ".join(KEYS)
    raise SettingsError(f"unknown setting {name!r}: {remedy}")


def _refuse_without_effect(settings: Settings, changes: Mapping[str, object]) -> None:
    """A value that the user gave and that this model cannot obey is refused, never ignored."""
    if changes.get("think_end_bias") and settings.think_end_token_id is None:
        raise SettingsError(
            "think_end_bias needs dllm_think_end_token_id in generation_config.json, "
            "which this model lacks: leave think_end_bias at 0"
        )
    if changes.get("length_penalty") and not settings.stop_ids:
        raise SettingsError(
            "length_penalty needs a stop id, which this model lacks: leave length_penalty at 0"
        )
    for token in settings.suppress:
        if token >= settings.vocab_size:
            raise SettingsError(
                f"suppress names the token id {token}: ids of this model end at "
                f"{settings.vocab_size - 1}"
            )
