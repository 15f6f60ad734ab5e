"""What the live view of an answer costs: the same answers with it and in silence, in turns.

    python recipes/view_cost.py [MODEL] [--rounds 9] [--tokens 1000] [--mode ar] [--watch heat]

The view writes to a pseudo-terminal which a process of its own reads: as fast as it can, and again
at 960 bytes a second, as a serial line does. Both answers of a round are the same tokens, and count
from the first event to the last. Prints the median of the rounds' ratios, with the view to without,
and the CPU time spent on the view (in the loop of the answer, and in the writer's thread) as a
share of the answer's: other programs on the machine blur the first and hardly the second.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import torch

from clover_local.chat import AnswerStream, Conversation
from clover_local.cli import repl
from clover_local.cli.preferences import WATCH, Watch
from clover_local.cli.talk import ChatState
from clover_local.decoding.settings import resolve
from clover_local.session import load, open_model

QUESTION = "Count from 1 to 30."
SLOW = "import os, time\nwhile os.read(0, 96): time.sleep(0.1)"
READERS = {"fast terminal": ["cat"], "960 bytes/s": [sys.executable, "-c", SLOW]}


@contextmanager
def terminal(reader: list[str]) -> Iterator[None]:
    """Makes stdin and stdout a terminal that `reader` empties."""
    master, slave = os.openpty()
    before = sys.stdin, sys.stdout
    with (
        os.fdopen(master, "rb") as other_end,
        os.fdopen(os.dup(slave)) as given,
        os.fdopen(slave, "w") as shown,
        subprocess.Popen(reader, stdin=other_end, stdout=subprocess.DEVNULL) as process,
    ):
        sys.stdin, sys.stdout = given, shown
        try:
            yield
        finally:
            sys.stdin, sys.stdout = before
            shown.flush()  # while somebody reads
            process.kill()


@dataclass(frozen=True)
class Answer:
    """What one answer took, in seconds."""

    clock: float
    cpu: float
    view: float  # of `cpu`: outside of the generation


def timed(events: AnswerStream, answers: list[Answer]) -> AnswerStream:
    """The same events; adds what they took."""
    clock, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
    outside = 0.0
    with closing(events):
        for event in events:
            given = time.thread_time()
            yield event
            outside += time.thread_time() - given
    cpu, own = time.process_time() - cpu, time.thread_time() - own
    answers.append(Answer(time.perf_counter() - clock, cpu, outside + cpu - own))


def chat_of(model: str, *, tokens: int, mode: str, watch: Watch) -> ChatState:
    """A chat whose answers do not end before they have so many tokens."""
    opened = open_model(model)
    given = {"max_new_tokens": tokens, "mode": mode}
    resolved = resolve(opened.config, opened.generation, given)
    settings = replace(resolved.settings, suppress=resolved.settings.stop_ids)
    torch.set_num_threads(1)  # further ones would count as the writer's
    session = load(opened, settings, device=None)
    talk = Conversation(opened.tokenizer, session.generator)
    return ChatState(session, talk, replace(resolved, settings=settings), watch=watch)


def measure(chat: ChatState, reader: list[str], rounds: int) -> list[tuple[Answer, Answer]]:
    """Each round with the view and without, after one that is not counted."""
    shown: list[Answer] = []
    silent: list[Answer] = []
    for _ in range(rounds + 1):
        chat.conversation.new()
        with terminal(reader):
            chat.show = repl.show_live
            chat.answer(timed(chat.conversation.ask(QUESTION), shown))
        chat.conversation.new()
        for _event in timed(chat.conversation.ask(QUESTION), silent):
            pass
    return [*zip(shown, silent, strict=True)][1:]


def main() -> None:
    """Measures, and prints a line a terminal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--mode", default="denoise")
    parser.add_argument("--watch", choices=WATCH, default="block")
    given = parser.parse_args()
    chat = chat_of(given.model, tokens=given.tokens, mode=given.mode, watch=given.watch)
    for name, reader in READERS.items():
        pairs = measure(chat, reader, given.rounds)
        ratio = statistics.median(shown.clock / silent.clock for shown, silent in pairs)
        share = statistics.median(shown.view / shown.cpu for shown, _ in pairs)
        print(f"{name}: {ratio:.3f} by the clock, {100 * share:.2f} % of the CPU time", flush=True)


if __name__ == "__main__":
    main()
