"""A trace as a page: block by block, pass by pass, one HTML file without scripts or network.

A row of cells is the block after one pass: rows that the pass fixed are coloured by confidence and
say on hovering what else was likely. Steps of `ar` are one row of cells each run of them.
"""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from clover_local.errors import TraceError
from clover_local.traces.read import PickedRow, RecordedRun, Step

Decode = Callable[[Sequence[int]], str]

START = "<!doctype html><!-- clover-local report -->"
MASK = "░"
# CSS class of a fixed cell, from the first bound that its confidence reaches.
HEAT = ((0.99, "sure"), (0.95, "good"), (0.8, "fair"), (0.0, "weak"))
STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }
body { max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } dl { display: grid; grid-template-columns: max-content 1fr; }
dt { opacity: .65; padding-right: 1rem; } dd { margin: 0; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 20rem; overflow: auto; }
details { margin: .6rem 0; } summary { cursor: pointer; }
table { border-collapse: collapse; } th { font-weight: normal; opacity: .65; text-align: right;
  vertical-align: top; padding: .15rem .8rem .15rem 0; white-space: nowrap; }
code { display: inline-block; margin: 1px; padding: 0 .2rem; border-radius: .2rem;
  white-space: pre-wrap; background: #8882; }
.mask { opacity: .35; } .sure { background: #2a92; box-shadow: 0 0 0 1px #2a9; }
.good { background: #29c3; box-shadow: 0 0 0 1px #29c; }
.fair { background: #db23; box-shadow: 0 0 0 1px #db2; }
.weak { background: #d443; box-shadow: 0 0 0 1px #d44; }
""".strip()


def page(runs: Sequence[RecordedRun], decode: Decode | None) -> Iterator[str]:
    """The page, piece by piece; `decode` gives tokens their text, None shows their ids."""
    decode = decode or (lambda ids: " ".join(map(str, ids)))
    yield (
        f'{START}\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>clover-local trace</title><style>{STYLE}</style></head><body>\n"
        "<h1>Trace</h1>\n<p>Confidence: "
        + " ".join(f'<code class="{name}">from {bound:g}</code>' for bound, name in HEAT)
        + f' <code class="mask">{MASK}</code> not fixed yet</p>\n'
    )
    for number, run in enumerate(runs):
        yield from _run(number, run, decode)
    yield "</body></html>\n"


def write_page(path: Path, pieces: Iterator[str]) -> None:
    """Writes a page to `path`, which may hold an earlier one.

    Raises:
        TraceError: the path holds something else, or cannot be written.
    """
    try:
        if path.exists() and not path.read_bytes().startswith(START.encode()):
            raise TraceError(f"{path} exists and is no report: remove it, or pass another name")
        with path.open("w", encoding="utf-8", errors="replace") as file:
            file.writelines(pieces)
    except OSError as error:
        raise TraceError(
            f"{path} cannot be written ({error.strerror}): pass another name"
        ) from None


def _run(number: int, run: RecordedRun, decode: Decode) -> Iterator[str]:
    header = run.header
    tokens = sum(len(step.picked) for step in run.steps)
    facts = {
        "model": header.model or "not recorded",
        "hash": header.model_hash,
        "device": f"{header.device} {header.dtype or ''}",
        "prompt": f"{len(header.prompt_ids)} tokens",
        "answer": f"{len(run.token_ids)} tokens, finish reason {run.finish_reason or 'cut off'}",
        "forwards": f"{len(run.steps)} that picked tokens, {tokens} tokens picked, "
        f"{sum(step.milliseconds for step in run.steps):.0f} ms",
    }
    yield f'<section class="run"><h2>Run {number}</h2>\n<dl>'
    yield "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    yield "</dl>\n<details><summary>settings</summary><dl>"
    yield "".join(
        f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in header.settings.items()
    )
    yield "</dl></details>\n<details><summary>prompt</summary><pre>"
    yield _text(decode(header.prompt_ids))
    yield "</pre></details>\n<h3>Answer</h3><pre>"
    yield _text(decode(run.token_ids))
    yield "</pre>\n"
    mask = header.settings.get("mask_token_id")
    for _, group in groupby(
        run.steps, key=lambda step: (step.mode, step.mode == "ar" or step.block)
    ):
        yield from _block([*group], decode, mask)
    yield "</section>\n"


def _block(steps: list[Step], decode: Decode, mask: object) -> Iterator[str]:
    """One block or round; or all steps of `ar` in a row, as one line of cells."""
    first = steps[0]
    if first.mode == "ar":
        cells = "".join(_cell(row.token, row, decode, mask) for s in steps for row in s.picked)
        lines, name = [("tokens", cells)], f"{len(steps)} tokens, one a forward"
    else:
        lines = [(_name(step), _cells(step, decode, mask)) for step in steps]
        word = "round" if first.mode == "draft" else "block"
        name = f"{word} {first.block}, from token {first.start}: {len(steps)} forwards"
    yield f'<details class="block" open><summary>{escape(first.mode)}: {name}</summary><table>\n'
    for label, cells in lines:
        yield f'<tr class="pass"><th scope="row">{escape(label)}</th><td>{cells}</td></tr>\n'
    yield "</table></details>\n"


def _name(step: Step) -> str:
    what = f"pass {step.number}" if step.kind == "pass" else "verify"
    return f"{what}, {step.milliseconds:.1f} ms"


def _cells(step: Step, decode: Decode, mask: object) -> str:
    """The block after a pass; what a verify read, and behind an arrow what it predicts."""
    picked = {row.row: row for row in step.picked}
    if step.kind == "verify":
        read = "".join(_cell(token, None, decode, mask) for token in step.before)
        return f"{read} → " + "".join(_cell(r.token, r, decode, mask) for r in step.picked)
    rows = range(max(len(step.before), 1 + max(picked, default=-1)))
    return "".join(
        _cell(
            picked[row].token if row in picked else step.before[row], picked.get(row), decode, mask
        )
        for row in rows
        if row in picked or row < len(step.before)
    )


def _cell(token: int, picked: PickedRow | None, decode: Decode, mask: object) -> str:
    if picked is None:
        if token == mask:
            return f'<code class="mask">{MASK}</code>'
        return f"<code>{_text(decode([token]))}</code>"
    heat = next((name for bound, name in HEAT if picked.confidence >= bound), HEAT[-1][1])
    others = "\n".join(f"{share:.4f} {decode([other])!r}" for other, share in picked.top)
    title = f"row {picked.row}: {picked.confidence:.4f}, {picked.reason}\n{others}"
    shown = _text(decode([token]))
    return f'<code class="{heat}" title="{_text(title)}">{shown}</code>'


def _text(text: str) -> str:
    """Text for a page: no markup, and control characters as their pictures."""
    pictured = "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text)
    return escape(pictured).replace("\x7f", "␡")
