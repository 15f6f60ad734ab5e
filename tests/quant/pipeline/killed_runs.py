"""A program that runs `quantize` in child processes and kills each before a chosen step.

Reads one JSON object a line and answers each with a line: `killed`, `finished`, or what went wrong.
The first one is run to its end, in this process, so that all is loaded and every kernel compiled.
It forks, so that a run costs no start of Python; tests cannot do that themselves, because a fork
knows nothing of the threads that they have started before.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from clover_local.quant.pipeline.run import quantize
from clover_local.quant.pipeline.source import PlainSource, open_source
from clover_local.quant.profiles import Recipe

CHANGES: tuple[tuple[Any, str], ...] = (
    (Path, "replace"),
    (Path, "rename"),
    (Path, "unlink"),
    (os, "fsync"),
    (os, "rmdir"),
    (os, "unlink"),
)


def die_at(step: int) -> None:
    """Lets this process be killed before its `step`-th change to the files, from 0."""
    left = step

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **others: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*arguments, **others)

        return wrapper

    for owner, name in CHANGES:
        setattr(owner, name, counted(getattr(owner, name)))


def run(request: dict[str, Any]) -> None:
    source = open_source(request["source"])
    assert isinstance(source, PlainSource)
    if request["step"] is not None:
        die_at(request["step"])
    quantize(
        source,
        Path(request["destination"]),
        recipe=Recipe(**request["recipe"]),
        calibration=Path(request["calibration"]),
    )


def main() -> None:
    torch.set_num_threads(1)
    run(json.loads(sys.stdin.readline()))
    print("finished", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(json.loads(line))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            print("killed", flush=True)
        else:
            print("finished" if status == 0 else f"status {status}", flush=True)


if __name__ == "__main__":
    main()
