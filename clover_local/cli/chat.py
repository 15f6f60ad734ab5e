"""`clover-local chat`: questions and answers in the terminal, or one answer with `-p`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from clover_local.cli import console, start
from clover_local.cli import options as o
from clover_local.cli.budget import thinks
from clover_local.cli.interrupt import orderly_end
from clover_local.cli.prompts import messages, read_prompt
from clover_local.hub import DEMO

if TYPE_CHECKING:
    from clover_local.cli.talk import ChatState
    from clover_local.decoding.settings import ResolvedSettings
    from clover_local.session import OpenModel, Session

REAL_MODEL = "Diffuspace/Clover-35B-A3B-Preview"
INTRODUCTION = (
    f"Model: {DEMO}, a small model made for this package; it knows a few kinds of short tasks. "
    f"The real one: `clover-local pull {REAL_MODEL}` fetches 69 GB of BF16 weights, `clover-local "
    f"quantize {REAL_MODEL} DEST` makes about 20 GB of them; `clover-local plan {REAL_MODEL}` says "
    "what fits your card."
)
"""Which model answers when none was named, and how to have another."""


@o.configured()
@o.takes_settings
@o.takes_memory
def chat(
    call: typer.Context,
    model: o.OptionalModelArg = None,
    prompt: o.PromptOpt = None,
    system: o.SystemOpt = None,
    think: o.ThinkOpt = None,
    think_budget: o.ThinkBudgetOpt = None,
    context: o.ContextOpt = None,
    device: o.DeviceOpt = None,
    dtype: o.DtypeOpt = None,
    watch: o.WatchOpt = None,
    strict: o.StrictOpt = False,
    quiet: o.QuietOpt = False,
) -> None:
    """Chat with a model; without MODEL, with the small demo model that comes with the package."""
    given, memory, origins = o.given_settings(call), o.memory_options(call), o.origins(call)
    thinking = thinks(think, think_budget, origins)
    question = None if prompt is None else read_prompt(prompt, file=None, keep_newline=True)
    opened, resolved = start.open_model(
        model or DEMO,
        given,
        origins=origins,
        template_flags=o.flags_of(call, "system", "think"),
        think_budget=thinking.budget,
        strict=strict,
    )
    # A template that refuses is better known before the weights are loaded.
    asked = messages(question or "Hello", system=system)
    opened.tokenizer.render(asked, enable_thinking=thinking.on)
    if model is None:
        console.note(INTRODUCTION)

    def load(opened: OpenModel, resolved: ResolvedSettings) -> Session:
        return start.load(
            opened,
            resolved.settings,
            context=context,
            device=device,
            dtype=dtype,
            memory=memory,
            origins=origins,
            strict=strict,
        )

    sources = origins | ({} if thinking.place is None else {"think": thinking.place})
    talk = _talk(
        load(opened, resolved), resolved, system=system, thinking=thinking.on, sources=sources
    )
    talk.load, talk.watch = load, watch or talk.watch
    if not _answer(talk, question):
        raise typer.Exit(1)


def _talk(
    session: Session,
    resolved: ResolvedSettings,
    *,
    system: str | None,
    thinking: bool | None,
    sources: Mapping[str, str],
) -> ChatState:
    from clover_local.chat import Conversation
    from clover_local.cli.talk import ChatState

    conversation = Conversation(
        session.opened.tokenizer, session.generator, system=system, thinking=thinking
    )
    return ChatState(session, conversation, resolved, sources={**sources})


def _answer(talk: ChatState, question: str | None) -> bool:
    """Answers one question, or what comes from stdin; returns False when a piped one failed."""
    from clover_local.cli import repl

    if question is not None:
        repl.answer_plainly(talk, question)
    elif console.is_terminal(sys.stdin) and console.is_terminal(sys.stdout):
        console.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
        with orderly_end():
            repl.converse(talk)
    else:
        return repl.converse_plainly(talk)
    return True
