"""The settings that a user may give: what each takes, what it is for, as which flag.

The one list that flags, `/set`, `/show` and an API's fields are made of. Needs no torch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from clover_local.files import LARGEST, STRONGEST

SINGLE_MODES = ("denoise", "ar", "draft")
MODES = (*SINGLE_MODES, "auto")
ACCEPT = ("typical", "exact")
DRAFT_WIDTHS = (1, 2, 4, 8, 16, 32)
SAMPLERS = (
    "threshold",
    "factor",
    "entropy_bound",
    "margin",
    "fixed_steps",
    "sequential",
    "klass",
    "credit",
    "hierarchy",
)
LOOP_GUARDS = ("off", "raise", "retry", "stop")
SWITCH = {"on": True, "off": False, "true": True, "false": False, "1": True, "0": False}

Kind = type[int] | type[float] | type[str] | type[bool]


@dataclass(frozen=True)
class Key:
    """One setting: `convert` takes a typed value or its text.

    `kind` is what a flag's text is read as, `metavar` and `help` are what `--help` says of it,
    `values` are all that it takes where these are few. `limits` are bounds beyond any use, which
    only a refusal names.
    """

    expects: str
    convert: Callable[[object], object]
    generation_key: str | None = None
    kind: Kind = str
    metavar: str = ""
    help: str = ""
    values: tuple[str, ...] = ()
    limits: str = ""

    @property
    def expected(self) -> str:
        """What a refusal says: `expects` with all bounds."""
        return f"{self.expects}, {self.limits}" if self.limits else self.expects

    def named(self, metavar: str, help: str) -> "Key":
        """The same key with its line of `--help`."""
        return replace(self, metavar=metavar, help=help)


def choice(names: tuple[str, ...], help: str) -> Key:
    """A setting that is one of `names`."""

    def convert(value: object) -> str:
        if value not in names:
            raise ValueError
        return str(value)

    takes = "one of " + ", ".join(names)
    return Key(takes, convert, metavar="|".join(names), help=help, values=names)


def switch(help: str) -> Key:
    """A setting that is on or off."""

    def convert(value: object) -> bool:
        if isinstance(value, bool):
            return value
        if not isinstance(value, str):
            raise TypeError
        if value.lower() not in SWITCH:
            raise ValueError
        return SWITCH[value.lower()]

    return Key("on or off", convert, kind=bool, help=help, values=("on", "off"))


def whole(
    least: int | None = None, most: int | None = None, *, generation_key: str | None = None
) -> Key:
    """A whole number between two bounds, both allowed; a very high one goes without saying."""

    def convert(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise TypeError
        number = int(value)
        if (least is not None and number < least) or (most is not None and number > most):
            raise ValueError
        return number

    low = "" if least is None else f" of {least} or more"
    expects, high = f"a whole number{low}", "" if most is None else f"at most {most}"
    if most is None or most >= LARGEST:
        return Key(expects, convert, generation_key, int, limits=high)
    return Key(f"{expects}, {high}", convert, generation_key, int)


def _width() -> Key:
    def convert(value: object) -> int:
        number = int(str(whole(1).convert(value)))
        if number not in DRAFT_WIDTHS:
            raise ValueError
        return number

    widths = tuple(map(str, DRAFT_WIDTHS))
    return Key("one of " + ", ".join(widths), convert, kind=int, values=widths)


def _number(
    holds: Callable[[float], bool],
    expects: str,
    *,
    limits: str = "",
    generation_key: str | None = None,
) -> Key:
    def convert(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise TypeError
        number = float(value)
        if not math.isfinite(number) or not holds(number):
            raise ValueError
        return number

    return Key(expects, convert, generation_key, float, limits=limits)


def _between(low: float, high: float) -> Key:
    return _number(lambda x: low <= x <= high, f"a number from {low:g} to {high:.0f}")


def _of_zero_or_more(expects: str = "a number of 0 or more") -> Key:
    return _number(lambda x: 0 <= x <= STRONGEST, expects, limits=f"at most {STRONGEST:.0f}")


def _ids() -> Key:
    def convert(value: object) -> tuple[int, ...]:
        if isinstance(value, str):
            items: list[object] = [] if value == "none" else [*value.replace(",", " ").split()]
        elif isinstance(value, list | tuple):
            items = [*value]
        else:
            raise TypeError
        one = whole(0).convert
        return tuple(int(str(one(item))) for item in items)

    return Key("token ids such as 7,42, or none", convert)


def _several_modes() -> Key:
    def convert(value: object) -> tuple[str, ...]:
        if not isinstance(value, str | list | tuple):
            raise TypeError
        items = value.replace(",", " ").split() if isinstance(value, str) else value
        modes = tuple(dict.fromkeys(map(str, items)))
        if not modes or not set(modes) <= set(SINGLE_MODES):
            raise ValueError
        return modes

    return Key("modes such as denoise,draft,ar", convert)


def _strength(generation_key: str) -> Key:
    return _number(
        lambda x: abs(x) <= STRONGEST,
        "a number",
        limits=f"from {-STRONGEST:.0f} to {STRONGEST:.0f}",
        generation_key=generation_key,
    )


def _length(generation_key: str) -> Key:
    key = whole(-LARGEST, LARGEST, generation_key=generation_key)
    return replace(key, expects="a whole number", limits=f"from {-LARGEST} to {LARGEST}")


_SHARE = _between(0, 1)
_ANY = _of_zero_or_more()
_MODES = (
    "Block diffusion, one token a forward, drafts that a forward verifies, or the fastest of these."
)
_START = "Answer length where that begins."
_WINDOW = "Tokens from there to full strength."

KEYS: dict[str, Key] = {
    "mode": choice(MODES, _MODES),
    "max_new_tokens": whole(1).named("N", "Most tokens of an answer."),
    "min_new_tokens": whole(0).named("N", "No stop token at answer positions below N."),
    "threshold": _SHARE.named("P", "denoise: a mask is fixed above this confidence."),
    "sampler": choice(SAMPLERS, "denoise: the unmasking rule."),
    "sampler_factor": _ANY.named("F", "factor: (n + 1)(1 - confidence) stays below F."),
    "sampler_gamma": _ANY.named("X", "entropy_bound: nats, 0.1; credit: power of p1, 0.2."),
    "sampler_margin": _SHARE.named("P", "margin: p1 - p2 has to be above it."),
    "sampler_steps": whole(1).named("N", "fixed_steps: passes a block."),
    "sampler_k": whole(1).named("N", "sequential: rows a pass, from the left."),
    "sampler_kl": _ANY.named("X", "klass: divergence from the last pass, below it."),
    "sampler_history": whole(1, 64).named("N", "klass: so many passes in a row."),
    "sampler_threshold": _SHARE.named("P", "klass: and a confidence above this."),
    "sampler_alpha": _ANY.named("X", "credit: strength."),
    "sampler_beta": _SHARE.named("X", "credit: what is left of it after a pass."),
    "sampler_low": _SHARE.named("P", "hierarchy: the best row of a gap, above this."),
    "sampler_threshold_decay": _SHARE.named("X", "The threshold falls by X a pass; 0 = off."),
    "sampler_min_per_pass": whole(0).named("N", "Fix at least N rows a pass; 0 = off."),
    "sampler_max_per_pass": whole(0).named("N", "Fix at most N rows a pass; 0 = off."),
    "sampler_finish_gap": switch("Fix the rest of a block once the likeliest tokens lead far."),
    "draft_width": _width().named("W", "draft: rows of a round, 1 to 32."),
    "accept": choice(ACCEPT, "draft: which drafts stay; exact writes as ar."),
    "accept_ratio": _SHARE.named("P", "draft, typical: a probability that is enough."),
    "accept_delta": _ANY.named("X", "draft, typical: so much of exp(-entropy) is enough too."),
    "auto": _several_modes().named(
        "MODES", "auto: what it chooses from; default denoise,draft,ar."
    ),
    "temperature": _of_zero_or_more("a number of 0 (greedy) or more").named(
        "T", "0 picks the likeliest token."
    ),
    "top_k": whole(0).named("K", "Draw among the K likeliest; 0 = all."),
    "top_p": _number(lambda x: 0 < x <= 1, "a number above 0, at most 1").named(
        "P", "Draw among the likeliest of mass P."
    ),
    "seed": whole(0, 2**64 - 1).named("N", "Seed of every draw."),
    "suppress": _ids().named("IDS", "Token ids never to write: 5,17,42."),
    "presence_penalty": _strength("presence_penalty").named(
        "X", "Subtracted from tokens that the answer has."
    ),
    "frequency_penalty": _strength("frequency_penalty").named(
        "X", "Subtracted once per occurrence in the answer."
    ),
    "repetition_penalty": _number(
        lambda x: 1 / STRONGEST <= x <= STRONGEST,
        "a number above 0",
        limits=f"from {1 / STRONGEST:g} to {STRONGEST:.0f}",
        generation_key="repetition_penalty",
    ).named("R", "Divides the logits of tokens that the answer has; 1 = off."),
    "length_penalty": _strength("dllm_length_penalty").named(
        "X", "Added to the stop tokens as the answer grows."
    ),
    "length_penalty_start": _length("dllm_length_penalty_start").named("N", _START),
    "length_penalty_window": whole(1, generation_key="dllm_length_penalty_window").named(
        "N", _WINDOW
    ),
    "think_end_bias": _strength("dllm_think_end_bias").named(
        "X", "Added to the end-of-thinking token as the answer grows."
    ),
    "think_end_start": _length("dllm_think_end_start").named("N", _START),
    "think_end_window": whole(1, generation_key="dllm_think_end_window").named("N", _WINDOW),
    "in_block_repetition": switch("denoise: no token beside itself, even where it belongs."),
    "no_repeat_ngram": whole(0, 64).named(
        "N", "denoise: no N tokens twice in an answer, if there is another way; 0 = off."
    ),
    "dry_multiplier": _ANY.named("X", "Strength against continuing a repetition; 0 = off."),
    "dry_base": _between(1, 100).named("X", "That grows so with each repeated token."),
    "dry_allowed": whole(1, LARGEST).named("N", "Repeated tokens that begin to cost."),
    "dry_breakers": _ids().named("IDS", "Token ids that end a repetition."),
    "eos_order": switch("denoise: a stop token waits for all that stands before it."),
    "loop_guard": choice(
        LOOP_GUARDS, "What an answer that loops gets: penalties, another try, an end."
    ),
}
