"""`clover-local doctor`."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from clover_local.doctor import machine, runtime
from clover_local.doctor.finding import Finding

Call = Callable[..., Any]


def test_every_line_is_ok_or_missing_with_a_remedy(run: Call) -> None:
    outcome = run("doctor")
    assert outcome.code == 0
    rows = [line.split(maxsplit=1) for line in outcome.out.splitlines()]
    assert {row[0] for row in rows} <= {"OK", "missing"}
    names = (
        "Python",
        "driver",
        "memory",
        "disk",
        "PyTorch",
        "CUDA",
        "CPU kernels",
        "Triton",
        "GPU",
    )
    for name in names[:7]:
        assert any(row[1].startswith(name) for row in rows), name
    assert any(row[1].startswith(names[7:]) for row in rows)
    assert all(": " in row[1] for row in rows if row[0] == "missing")


def test_torch_is_not_loaded_before_the_first_lines() -> None:
    code = (
        "import sys; from clover_local.cli.doctor import _findings\n"
        "for finding in _findings():\n"
        "    print(finding.name, 'torch' in sys.modules)\n"
        "    if finding.name == 'disk': break\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "disk False" in done.stdout and "True" not in done.stdout


@pytest.mark.parametrize(("required", "code"), [(True, 1), (False, 0)])
def test_only_what_is_required_fails_the_command(
    run: Call, monkeypatch: pytest.MonkeyPatch, required: bool, code: int
) -> None:
    found = Finding("kernels", False, "wrong", "mend them", required=required)
    monkeypatch.setattr(machine, "findings", lambda: iter(()))
    monkeypatch.setattr(runtime, "findings", lambda: iter((found,)))
    outcome = run("doctor", "--json")
    assert outcome.code == code
    assert json.loads(outcome.out)["findings"][0]["remedy"] == "mend them"


def test_a_self_test_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    found = runtime.self_test("cpu")
    assert (found.ok, found.required, found.text) == (False, True, "code 1: no output")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert "did not end" in runtime.self_test("cpu").text
