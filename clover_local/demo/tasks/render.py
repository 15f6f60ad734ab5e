"""From an example to the text that the model reads and the text that it has to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn, Protocol

from clover_local.demo.tasks.example import Example

TEMPLATE = Path(__file__).parent.parent / "chat_template.jinja"


class ChatTemplate(Protocol):
    """What a compiled jinja2 template can do."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        """The conversation as text."""
        ...


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def load_template() -> ChatTemplate:
    """The demo model's chat template, compiled."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def render(example: Example, template: ChatTemplate) -> tuple[str, str]:
    """(prompt up to the generation prompt, response up to and with `<|im_end|>`)."""
    prompt = template.render(
        messages=list(example.messages),
        tools=list(example.tools) or None,
        add_generation_prompt=True,
        enable_thinking=example.think,
    )
    thinking = f"{example.reasoning}\n</think>\n\n" if example.think else ""
    return prompt, f"{thinking}{example.answer}<|im_end|>"
