"""Conversations, with a generator that writes what the test says."""

import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import pytest

from clover_local import demo
from clover_local.chat import AnswerReader, Conversation, Piece
from clover_local.config import ModelConfig, read_generation_config
from clover_local.decoding.events import (
    BlockCommitted,
    Event,
    EventStream,
    Finished,
    PromptCommitted,
)
from clover_local.decoding.result import GenerationResult
from clover_local.decoding.settings import Settings, resolve
from clover_local.errors import ContextError, SettingsError
from clover_local.generate import Generator
from clover_local.tokenizer import Tokenizer


@dataclass
class WritingGenerator:
    """Answers with the given blocks of ids; `at_block` may raise before a block, as Ctrl-C does."""

    settings: Settings
    answers: list[list[list[int]]]
    interrupt_at: int | None = None
    too_long: bool = False
    prompts: list[list[int]] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    closed: int = 0

    def run(self, prompt_ids: Sequence[int], *, checkpoints: Sequence[int]) -> EventStream:
        if self.too_long:
            raise ContextError("the prompt has 9 tokens and the context holds 8")
        self.checkpoints += checkpoints
        self.prompts.append(list(prompt_ids))
        return self._events(self.answers[len(self.prompts) - 1])

    def _events(self, blocks: list[list[int]]) -> EventStream:
        try:
            yield PromptCommitted(len(self.prompts[-1]), 0)
            for index, block in enumerate(blocks):
                if index == self.interrupt_at:
                    raise KeyboardInterrupt
                yield BlockCommitted(index, 0, tuple(block))
            yield Finished(cast(GenerationResult, None))
        finally:
            self.closed += 1


@pytest.fixture(scope="session")
def demo_tokenizer() -> Tokenizer:
    """The demo's: its template opens `<think>`, and strips the thinking of earlier turns."""
    return Tokenizer.load(Path(str(demo.__file__)).parent)


@pytest.fixture(scope="session")
def tokenizer(golden_folder: Path) -> Tokenizer:
    """The golden one: 256 bytes and specials; its template keeps content as it is."""
    return Tokenizer.load(golden_folder)


@pytest.fixture
def settings(golden_folder: Path, golden_config: ModelConfig) -> Settings:
    generation = read_generation_config(golden_folder, golden_config)
    return resolve(golden_config, generation, {}).settings


def conversation(
    tokenizer: Tokenizer, settings: Settings, *texts: str, **options: Any
) -> tuple[Conversation, WritingGenerator]:
    """A conversation whose answers are `texts`, in blocks of 5 ids."""
    stop = tokenizer.id_of("<|im_end|>")
    assert stop is not None
    answers = []
    for text in texts:
        ids = tokenizer.encode(text)
        answers.append([ids[start : start + 5] for start in range(0, len(ids), 5)])
    generator = WritingGenerator(replace(settings, stop_ids=(stop,)), answers)
    return Conversation(tokenizer, cast(Generator, generator), **options), generator


def pieces_of(events: Iterator[Event | Piece]) -> tuple[str, str]:
    """(thinking, visible text) of an answer."""
    pieces = [event for event in events if isinstance(event, Piece)]
    return (
        "".join(piece.text for piece in pieces if piece.thinking),
        "".join(piece.text for piece in pieces if not piece.thinking),
    )


def test_thinking_that_the_prompt_opened_is_told_from_the_visible_answer(
    demo_tokenizer: Tokenizer, settings: Settings
) -> None:
    text = "5 + 3 = 8\n</think>\n\nEight.<|im_end|>"
    talk, _ = conversation(demo_tokenizer, settings, text, thinking=True)
    assert pieces_of(talk.ask("5 + 3?")) == ("5 + 3 = 8\n", "Eight.")


def test_a_token_costs_no_copy_of_the_answer_before_it(demo_tokenizer: Tokenizer) -> None:
    reader = AnswerReader(demo_tokenizer, thinking=False, stop_ids=())
    ids = demo_tokenizer.encode("The fox and the hen. ")
    assert len(demo_tokenizer.decode(ids) * 700) > 14_000
    peaks = []
    tracemalloc.start()
    for token in ids * 700:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        reader.push([token])
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    assert median(peaks[-100:]) <= median(peaks[:100]) + 1000
    assert reader.visible == "The fox and the hen. " * 700


def test_thinking_that_ends_at_once_leaves_no_line_breaks(
    demo_tokenizer: Tokenizer, settings: Settings
) -> None:
    talk, _ = conversation(demo_tokenizer, settings, "\n</think>\n\nEight.", thinking=True)
    assert pieces_of(talk.ask("5 + 3?")) == ("", "Eight.")
    assert talk.messages[-1]["content"] == "Eight."


def test_an_answer_without_thinking_is_visible_from_its_first_token(
    demo_tokenizer: Tokenizer, settings: Settings
) -> None:
    talk, _ = conversation(demo_tokenizer, settings, "\nEight.<|im_end|>", thinking=False)
    assert pieces_of(talk.ask("5 + 3?")) == ("", "\nEight.")


def test_thinking_that_the_model_opens_itself_is_recognised(
    tokenizer: Tokenizer, settings: Settings
) -> None:
    talk, _ = conversation(tokenizer, settings, "<think>\nhm\n</think>\n\nyes<|im_end|>")
    assert pieces_of(talk.ask("well?")) == ("hm\n", "yes")


def test_a_second_end_of_the_thinking_is_no_text(
    demo_tokenizer: Tokenizer, settings: Settings
) -> None:
    text = "hm\n</think>\n\nEight</think>\n\n.<|im_end|>"
    talk, _ = conversation(demo_tokenizer, settings, text, thinking=True)
    assert pieces_of(talk.ask("5 + 3?")) == ("hm\n", "Eight.")
    assert (talk.last_thinking, talk.last_answer) == ("hm", "Eight.")


def test_pieces_say_of_how_many_tokens_they_are_and_whether_thinking_goes_on(
    demo_tokenizer: Tokenizer, settings: Settings
) -> None:
    text = "5 + 3 = 8\n</think>\n\nEight.<|im_end|>"
    talk, _ = conversation(demo_tokenizer, settings, text, thinking=True)
    counts = {True: 0, False: 0}
    for event in talk.ask("5 + 3?"):
        if isinstance(event, PromptCommitted):
            assert talk.is_thinking
        if isinstance(event, Piece):
            counts[event.thinking] += event.tokens
    assert not talk.is_thinking
    assert counts[True] == len(demo_tokenizer.encode("5 + 3 = 8\n"))
    assert counts[False] >= len(demo_tokenizer.encode("Eight."))


def test_a_think_tag_in_the_question_opens_nothing(
    tokenizer: Tokenizer, settings: Settings
) -> None:
    talk, _ = conversation(tokenizer, settings, "a tag<|im_end|>")
    assert pieces_of(talk.ask("what is <think>?")) == ("", "a tag")


def test_tool_calls_are_shown_as_they_are(demo_tokenizer: Tokenizer, settings: Settings) -> None:
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    talk, _ = conversation(demo_tokenizer, settings, call + "<|im_end|>", thinking=False)
    assert pieces_of(talk.ask("time?")) == ("", call)


def test_a_character_that_two_blocks_share_appears_whole(tokenizer: Tokenizer) -> None:
    reader = AnswerReader(tokenizer, thinking=False, stop_ids=())
    first, second = tokenizer.encode("é")
    assert reader.push([first]) == []
    assert reader.push([second, *tokenizer.encode("!")]) == [Piece("é!", thinking=False)]


def test_a_character_that_is_cut_off_appears_at_the_end(tokenizer: Tokenizer) -> None:
    reader = AnswerReader(tokenizer, thinking=False, stop_ids=())
    reader.push(tokenizer.encode("é")[:1])
    assert [piece.text for piece in reader.flush()] == ["\ufffd"]


def test_the_next_prompt_holds_earlier_answers_without_their_thinking(
    demo_tokenizer: Tokenizer, settings: Settings
) -> None:
    answers = ("hm\n</think>\n\nEight.<|im_end|>", "</think>\n\nNine.<|im_end|>")
    talk, generator = conversation(demo_tokenizer, settings, *answers, thinking=True)
    list(talk.ask("5 + 3?"))
    list(talk.ask("plus 1?"))
    prompt = demo_tokenizer.decode(generator.prompts[1], skip_special=False)
    assert "Eight." in prompt
    assert "hm" not in prompt
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 2


def test_the_state_is_kept_where_the_next_prompt_parts_from_this_one(
    demo_tokenizer: Tokenizer, settings: Settings
) -> None:
    talk, generator = conversation(demo_tokenizer, settings, "8<|im_end|>", "9<|im_end|>")
    list(talk.ask("How much is 5 + 3? Answer with a number."))
    kept = generator.checkpoints[0]
    list(talk.ask("plus 1?"))
    first, second = generator.prompts
    assert first[:kept] == second[:kept]
    parting = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert parting - kept <= 3  # what starts an assistant's turn


def test_the_state_is_kept_where_the_last_question_begins(
    demo_tokenizer: Tokenizer, settings: Settings
) -> None:
    talk, generator = conversation(demo_tokenizer, settings, *["8<|im_end|>"] * 3, system="Be " * 9)
    list(talk.ask("5 + 3?"))
    first = generator.checkpoints[0]
    assert demo_tokenizer.decode(generator.prompts[0][:first], skip_special=False).endswith(
        "user\n"
    )
    generator.checkpoints.clear()
    list(talk.ask("plus 1?"))
    second = generator.checkpoints[0]
    list(talk.ask_again("minus 1?"))
    assert generator.prompts[1][:second] == generator.prompts[2][:second]
    assert demo_tokenizer.decode(generator.prompts[1][second:]).startswith("plus 1?")


def test_the_last_turn_is_undone_asked_again_and_changed(
    tokenizer: Tokenizer, settings: Settings
) -> None:
    answers = [f"{text}<|im_end|>" for text in ("one", "two", "three", "four")]
    talk, _ = conversation(tokenizer, settings, *answers)
    list(talk.ask("a"))
    list(talk.ask("b"))
    assert (talk.last_question, talk.last_answer) == ("b", "two")
    list(talk.ask_again())
    assert (talk.last_question, talk.last_answer) == ("b", "three")
    list(talk.ask_again("c"))
    assert [message["content"] for message in talk.messages] == ["a", "one", "c", "four"]
    assert talk.undo() == "c"
    assert talk.undo() == "a"
    assert talk.messages == []
    for act in (talk.undo, lambda: list(talk.ask_again())):
        with pytest.raises(SettingsError, match="nothing was asked yet"):
            act()
    with pytest.raises(SettingsError, match="no answer yet"):
        assert talk.last_answer


def test_the_old_answer_stays_where_no_new_one_comes(
    tokenizer: Tokenizer, settings: Settings
) -> None:
    talk, generator = conversation(tokenizer, settings, "one<|im_end|>", "two<|im_end|>")
    list(talk.ask("a"))
    generator.too_long = True
    with pytest.raises(ContextError):
        list(talk.ask_again("far too long"))
    assert [message["content"] for message in talk.messages] == ["a", "one"]


def test_the_visible_answer_has_no_thinking(demo_tokenizer: Tokenizer, settings: Settings) -> None:
    talk, _ = conversation(
        demo_tokenizer, settings, "hm\n</think>\n\nEight.<|im_end|>", thinking=True
    )
    list(talk.ask("5 + 3?"))
    assert talk.last_answer == "Eight."


def test_a_cancelled_answer_stays_as_far_as_it_was_committed(
    demo_tokenizer: Tokenizer, settings: Settings
) -> None:
    talk, generator = conversation(
        demo_tokenizer, settings, "One two three four five six seven", thinking=False
    )
    events = talk.ask("count")
    first = next(event for event in events if isinstance(event, Piece))
    events.close()
    assert talk.messages[-1] == {"role": "assistant", "content": first.text}
    assert generator.closed == 1


def test_ctrl_c_inside_the_generator_keeps_what_was_committed(
    demo_tokenizer: Tokenizer, settings: Settings
) -> None:
    talk, generator = conversation(
        demo_tokenizer, settings, "One two three four five six seven", thinking=False
    )
    generator.interrupt_at = 1
    seen = []
    with pytest.raises(KeyboardInterrupt):
        seen += [event.text for event in talk.ask("count") if isinstance(event, Piece)]
    assert talk.messages[-1]["role"] == "assistant"
    assert talk.messages[-1]["content"]


def test_thinking_that_is_cut_short_is_closed_in_the_history(
    demo_tokenizer: Tokenizer, settings: Settings
) -> None:
    talk, generator = conversation(
        demo_tokenizer, settings, "a long thought without any end", "b<|im_end|>", thinking=True
    )
    events = talk.ask("why?")
    next(event for event in events if isinstance(event, Piece))
    events.close()
    assert str(talk.messages[-1]["content"]).endswith("</think>\n\n")
    list(talk.ask("and?"))
    assert "long" not in demo_tokenizer.decode(generator.prompts[1])


def test_a_question_that_got_no_token_is_taken_back(
    tokenizer: Tokenizer, settings: Settings
) -> None:
    talk, generator = conversation(tokenizer, settings, "never shown")
    generator.interrupt_at = 0
    with pytest.raises(KeyboardInterrupt):
        list(talk.ask("well?"))
    assert talk.messages == []


def test_a_question_over_the_context_is_taken_back_and_the_talk_goes_on(
    tokenizer: Tokenizer, settings: Settings
) -> None:
    talk, generator = conversation(tokenizer, settings, "fine<|im_end|>")
    generator.too_long = True
    with pytest.raises(ContextError):
        list(talk.ask("far too long"))
    assert talk.messages == []
    generator.too_long = False
    assert pieces_of(talk.ask("short")) == ("", "fine")


def test_an_empty_question_is_refused(tokenizer: Tokenizer, settings: Settings) -> None:
    talk, _ = conversation(tokenizer, settings)
    with pytest.raises(SettingsError, match="empty"):
        list(talk.ask(" \n"))
    assert talk.messages == []


def test_a_complete_empty_answer_is_an_answer(tokenizer: Tokenizer, settings: Settings) -> None:
    talk, _ = conversation(tokenizer, settings, "<|im_end|>")
    list(talk.ask("well?"))
    assert talk.messages[-1] == {"role": "assistant", "content": ""}


def test_the_system_prompt_comes_first_and_survives_a_new_conversation(
    tokenizer: Tokenizer, settings: Settings
) -> None:
    talk, generator = conversation(
        tokenizer, settings, "a<|im_end|>", "b<|im_end|>", system="Be brief."
    )
    list(talk.ask("one"))
    talk.new()
    list(talk.ask("two"))
    prompt = tokenizer.decode(generator.prompts[1], skip_special=False)
    assert prompt.startswith("<|im_start|>system\nBe brief.")
    assert "two" in prompt
    assert "one" not in prompt
