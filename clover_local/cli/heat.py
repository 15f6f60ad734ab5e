"""A token's colour by its confidence."""

# SGR colour, from the first bound that the confidence reaches.
HEAT = ((0.99, "32"), (0.95, "36"), (0.8, "33"), (0.0, "31"))


def colour(confidence: float) -> str:
    """SGR style of a token with this confidence."""
    return next((code for bound, code in HEAT if confidence >= bound), HEAT[-1][1])
