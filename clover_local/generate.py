"""The block loop of one conversation: commits a prompt, then lets a decoding mode answer.

`Generator` owns the sequence state across turns: the next prompt reuses what is committed of it
already, and an answer that was interrupted at any moment leaves a state to go on from.
"""

from collections.abc import Callable, Iterator, Sequence

from clover_local.cache import SequenceState
from clover_local.decoding.auto.auto import MODES, Auto
from clover_local.decoding.auto.chooser import Rate
from clover_local.decoding.auto.spectator import Spectator
from clover_local.decoding.events import (
    Event,
    EventStream,
    Finished,
    PromptCommitted,
    PromptProgress,
)
from clover_local.decoding.forwards import Model
from clover_local.decoding.host_pick import HostPicker
from clover_local.decoding.pick import Picker
from clover_local.decoding.result import EmittedToken, GenerationResult
from clover_local.decoding.run import Mode, Run
from clover_local.decoding.settings import Settings
from clover_local.decoding.trace import TraceSink, header_record
from clover_local.errors import ContextError, SettingsError
from clover_local.memory.workspace import PREFILL_ROWS


class Generator:
    """One conversation: a model, its sequence state, and settings that may change between turns."""

    def __init__(
        self,
        model: Model,
        state: SequenceState,
        settings: Settings,
        *,
        trace: TraceSink | None = None,
        should_stop: Callable[[], bool] | None = None,
        prefill_rows: int = PREFILL_ROWS,
        picker: Picker | None = None,
        on_note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`should_stop` is asked between forwards; a forward takes `prefill_rows` of a prompt.

        `picker` turns logits into tokens: on the host if not given. `on_note` hears what a user
        should know, such as that the cache of experts had to shrink.
        """
        self.model = model
        self.state = state
        self.settings = settings
        self.trace = trace
        self.should_stop = should_stop
        self.prefill_rows = prefill_rows
        self.result: GenerationResult | None = None
        """The last run's result, also of an interrupted one; None during a run, after an error."""
        self._run: Run | None = None
        self.auto = Auto()
        self.modes: dict[str, Mode] = {**MODES, "auto": self.auto}
        """By name; `auto` goes on with what it has measured in earlier turns."""
        self.spectator: Spectator | None = None
        """Who watches the answers of other modes, for `advice`."""
        self._picker: Picker = picker or HostPicker()
        self._on_note = on_note

    @property
    def emitted(self) -> Sequence[EmittedToken]:
        """The tokens of the run that was started last, so far."""
        return [] if self._run is None else self._run.tokens

    def advice(self) -> Rate | None:
        """The mode that `auto` would have run, where that would have been faster for certain.

        Known of answers that a spectator watched; what other modes' forwards cost is rehearsed
        once. None too where nobody watches.

        Raises:
            CloverError: as a forward.
        """
        if self.spectator is None:
            return None
        return self.spectator.advice(self.model, self.state, self.settings)

    def run(self, prompt_ids: Sequence[int], *, checkpoints: Sequence[int] = ()) -> EventStream:
        """The events of one answer; checks its arguments before it returns.

        Closing the iterator, or a KeyboardInterrupt in it, ends the run; `result` then says
        `cancelled`.

        Args:
            prompt_ids: the whole conversation as the model reads it; what the state already holds
                of it is not computed again.
            checkpoints: prompt lengths at which the next prompt may part from this one (a template
                may render the start of an answer differently once the answer is history): the state
                there is kept, next to that at the prompt's end.

        Raises:
            SettingsError: an empty prompt, an id outside the vocabulary, a mode that this
                checkpoint cannot run.
            ContextError: no room for an answer.
            CloverError: while it runs, logits that are no numbers.
            ValueError: a checkpoint outside the prompt.
        """
        self._check(prompt_ids)
        for point in checkpoints:
            if not 1 <= point <= len(prompt_ids):
                raise ValueError(f"checkpoint {point} of a prompt of {len(prompt_ids)} tokens")
        return self._events(
            list(prompt_ids),
            Run(
                self.model,
                self.state,
                self.settings,
                prompt_tokens=len(prompt_ids),
                trace=self.trace,
                should_stop=self.should_stop,
                picker=self._picker,
                on_note=self._on_note,
            ),
            checkpoints,
        )

    def _check(self, prompt_ids: Sequence[int]) -> None:
        config, context = self.model.config, self.state.context
        if not prompt_ids:
            raise SettingsError("the prompt is empty: give at least one token")
        for token in prompt_ids:
            if not 0 <= token < config.vocab_size:
                raise SettingsError(
                    f"the prompt has the token id {token}: ids of this model are 0 to "
                    f"{config.vocab_size - 1}"
                )
        if len(prompt_ids) >= context:
            raise ContextError(
                f"the prompt has {len(prompt_ids)} tokens and the context holds {context}, prompt "
                "and answer: raise --context or shorten the prompt"
            )
        previewing = [mode for mode in self.settings.running_modes if mode != "ar"]
        if previewing and not self.model.can_preview:
            raise SettingsError(
                f"this checkpoint has no diffusion tensors, so it cannot run the mode "
                f"{previewing[0]}: use --mode ar, or put NAME.diffusion.gguf beside NAME.gguf "
                "(`clover-local export diffusion CHECKPOINT NAME.diffusion.gguf` makes it)",
                keys={"mode"},
            )

    def _events(self, prompt_ids: list[int], run: Run, checkpoints: Sequence[int]) -> EventStream:
        mode = self.modes[run.settings.mode]
        try:
            self.result, self._run = None, run
            yield from self._commit_prompt(run, prompt_ids, mode, checkpoints)
            steps = mode if run.settings.mode == "auto" else self.spectator or mode
            while run.finish_reason is None:
                yield from steps.block(run)
            yield Finished(self._finish(run, run.finish_reason))
        except (KeyboardInterrupt, GeneratorExit):
            self._finish(run, "cancelled")
            raise
        except BaseException:
            run.finish("error")  # for the trace; there is no result
            raise

    def _commit_prompt(
        self, run: Run, prompt_ids: list[int], mode: Mode, checkpoints: Sequence[int]
    ) -> Iterator[Event]:
        run.reused_tokens = self.state.reuse(prompt_ids, left=1 if mode.starts_from_logits else 0)
        if self.trace is not None:
            self.trace.write(
                header_record(
                    self.trace,
                    run.settings,
                    prompt_ids=prompt_ids,
                    reused_tokens=run.reused_tokens,
                    context=self.state.context,
                    device=self.model.device,
                    dtype=self.state.dtype,
                )
            )
        for point in sorted({*checkpoints, len(prompt_ids)}):
            while self.state.length < point:
                if run.stop_requested():
                    return
                end = min(self.state.length + self.prefill_rows, point)
                last = end == len(prompt_ids)
                run.commit_prompt(
                    prompt_ids[self.state.length : end], logits=last and mode.starts_from_logits
                )
                yield PromptProgress(end, len(prompt_ids))
            if self.state.length == point:
                self.state.checkpoint()
        yield PromptCommitted(len(prompt_ids), run.reused_tokens)

    def _finish(self, run: Run, finish_reason: str) -> GenerationResult:
        result = run.result or run.finish(finish_reason)  # a finished run may be closed later
        if self._run is run:  # an abandoned iterator may be closed after the next run began
            self.result = result
        return result


def generate(
    model: Model,
    state: SequenceState,
    settings: Settings,
    prompt_ids: Sequence[int],
    *,
    trace: TraceSink | None = None,
    should_stop: Callable[[], bool] | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> GenerationResult:
    """One answer; `on_event` hears of its progress.

    Raises:
        CloverError: as `Generator.run`.
    """
    generator = Generator(model, state, settings, trace=trace, should_stop=should_stop)
    for event in generator.run(prompt_ids):
        if on_event is not None:
            on_event(event)
        if isinstance(event, Finished):
            return event.result
    raise RuntimeError("a run ended without its Finished event")
