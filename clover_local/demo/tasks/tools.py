"""Requests that need one of the offered tools, none of them, or a report of its result."""

from __future__ import annotations

import json
import random
from typing import Any

from clover_local.demo.tasks.example import Example, ask
from clover_local.demo.tasks.facts import CITIES, DAYS, NAMES

PARAMETERS = {
    "get_weather": {"city": "string"},
    "set_timer": {"minutes": "integer"},
    "send_message": {"to": "string", "text": "string"},
    "play_music": {"style": "string"},
    "add_event": {"day": "string", "title": "string"},
    "turn_on_light": {"room": "string"},
}
TEXTS = ("see you soon", "I am late", "thank you", "call me", "good night", "I am well")
STYLES = ("jazz", "rock", "pop", "blues")
TITLES = ("lunch", "party", "trip", "game")
ROOMS = ("kitchen", "bath", "hall", "garden")
SKIES = ("blue", "grey", "black", "white")
NO_TOOL = "I have no tool for that."
REPORT_SHARE, MISSING_SHARE = 0.15, 0.12


def schema(name: str) -> dict[str, Any]:
    """The tool as a chat client declares it."""
    properties = {key: {"type": kind} for key, kind in PARAMETERS[name].items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def request(rng: random.Random, tool: str) -> tuple[str, dict[str, str | int]]:
    """What a user says to have `tool` called, and the arguments of the call."""
    says: tuple[str, ...]
    if tool == "get_weather":
        city = rng.choice(CITIES)
        says = ("What is the weather in {}?", "How is the weather in {}?")
        return rng.choice(says).format(city), {"city": city}
    if tool == "set_timer":
        minutes = rng.randint(2, 99)
        says = ("Set a timer for {} minutes.", "Set the timer to {} minutes.")
        return rng.choice(says).format(minutes), {"minutes": minutes}
    if tool == "send_message":
        to, text = rng.choice(NAMES), rng.choice(TEXTS)
        says = ("Send {} the message: {}", "Write to {}: {}")
        return rng.choice(says).format(to, text), {"to": to, "text": text}
    if tool == "play_music":
        style = rng.choice(STYLES)
        says = ("Play some {}.", "Play {} music.", "Please play {}.")
        return rng.choice(says).format(style), {"style": style}
    if tool == "add_event":
        day, title = rng.choice(DAYS), rng.choice(TITLES)
        says = ("Add a {1} on {0}.", "Add a {1} for {0}.")
        return rng.choice(says).format(day, title), {"day": day, "title": title}
    room = rng.choice(ROOMS)
    says = ("Turn on the light in the {}.", "Turn on the {} light.")
    return rng.choice(says).format(room), {"room": room}


def report(rng: random.Random, tool: str, arguments: dict[str, str | int]) -> tuple[str, str]:
    """What the tool returns, and the sentence that reports it."""
    if tool == "get_weather":
        sky, degrees = rng.choice(SKIES), rng.randint(10, 35)
        result = json.dumps({"sky": sky, "degrees": degrees})
        return result, f"The sky is {sky}, {degrees} degrees in {arguments['city']}."
    if rng.random() < 0.7:
        return json.dumps({"status": "ok"}), "It is done."
    return json.dumps({"status": "error"}), "It did not work."


def example(rng: random.Random) -> Example:
    """One request with one to three tools at hand."""
    tool = rng.choice(tuple(PARAMETERS))
    text, arguments = request(rng, tool)
    others = [name for name in PARAMETERS if name != tool]
    kind = rng.random()
    reporting = kind < REPORT_SHARE
    missing = not reporting and kind < REPORT_SHARE + MISSING_SHARE
    offered = rng.sample(others, rng.randint(0, 1 if reporting else 2) + missing)
    if not missing:
        offered.insert(rng.randint(0, len(offered)), tool)
    body = json.dumps({"name": tool, "arguments": arguments})
    call = f"<tool_call>\n{body}\n</tool_call>"
    messages, answer = ask(text), NO_TOOL if missing else call
    key = f"{','.join(offered)}:{body}"
    if reporting:
        result, answer = report(rng, tool, arguments)
        called = {"role": "assistant", "content": call}
        messages = (*messages, called, {"role": "tool", "content": result})
        key += result
    return Example(
        family="tools",
        messages=messages,
        answer=answer,
        key=key,
        tools=tuple(schema(name) for name in offered),
    )
