"""`clover-local doctor`: what this machine has and lacks, each line with the remedy."""

from collections.abc import Iterator

import typer

from clover_local.cli import console
from clover_local.cli.options import JsonOpt, QuietOpt
from clover_local.doctor import machine
from clover_local.doctor.finding import Finding

GOOD, MISSING = "OK", "missing"


def doctor(as_json: JsonOpt = False, quiet: QuietOpt = False) -> None:
    """Look at driver, card, memory, disk, Python and torch, and test the kernels."""
    found = []
    for finding in _findings():
        found.append(finding)
        if not as_json:
            console.text(_line(finding))
    well = all(each.ok for each in found if each.required)
    if as_json:
        console.print_json({"ok": well, "findings": [_json(each) for each in found]})
    if not well:
        raise typer.Exit(1)


def _findings() -> Iterator[Finding]:
    yield from machine.findings()
    from clover_local.doctor import runtime  # torch loads after the lines above are shown

    yield from runtime.findings()


def _json(finding: Finding) -> dict[str, object]:
    return {
        "name": finding.name,
        "ok": finding.ok,
        "text": finding.text,
        "remedy": "" if finding.ok else finding.remedy,
        "required": finding.required,
    }


def _line(finding: Finding) -> str:
    word = GOOD if finding.ok else MISSING
    remedy = "" if finding.ok else f": {finding.remedy}"
    return f"{word:<8} {finding.name:<18} {finding.text}{remedy}"
