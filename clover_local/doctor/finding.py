"""One line of the doctor."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something looked at: what it is, and what to do where it is missing.

    Without something `required` nothing runs; without the rest less, or slower.
    """

    name: str
    ok: bool
    text: str
    remedy: str = ""
    required: bool = False
