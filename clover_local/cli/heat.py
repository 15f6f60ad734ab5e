"""A token's colour by its confidence."""

# SGR colour and what it means, from the first bound that the confidence reaches.
HEAT = (
    (0.99, "32", "from 99 %"),
    (0.95, "36", "from 95 %"),
    (0.8, "33", "from 80 %"),
    (0.0, "31", "below"),
)

NAMES = {"31": "red", "32": "green", "33": "yellow", "36": "cyan"}
"""What a person calls these colours."""


def colour(confidence: float) -> str:
    """SGR style of a token with this confidence."""
    return next((code for bound, code, _ in HEAT if confidence >= bound), HEAT[-1][1])


def legend() -> list[tuple[str, str]]:
    """What the colours say, as pieces of a line with their SGR styles."""
    return [("confidence: ", "2"), *((f" {name} ", code) for _, code, name in HEAT)]
