"""Exports the demo model, killed on the way: argv are the file, and how many tensors before."""

import os
import signal
import sys
from pathlib import Path

from clover_local.gguf.export import partial
from clover_local.gguf.export.mixtures import mixture
from clover_local.gguf.export.run import export_gguf, make_plan
from clover_local.gguf.export.source import Source
from clover_local.session import open_model

partial.SYNC_BYTES = 100_000
opened = open_model("demo")
source = Source("a model", opened.checkpoint, opened.config, opened.generation, opened.tokenizer)
plan = make_plan(
    source,
    mixture("Q8_0", None, has_imatrix=False),
    architecture="qwen35moe",
    diffusion="embed",
)
calls = 0


def count(done: int, total: int) -> None:
    global calls
    if calls == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    calls += 1


export_gguf(source, Path(sys.argv[1]), plan, diffusion="embed", jobs=2, on_progress=count)
print(calls)
