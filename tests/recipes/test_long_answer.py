"""The recipe of long answers: rows as the answer grows, of parts that make up a forward."""

from itertools import pairwise

import pytest

from clover_local.session import open_model
from tests.recipes.conftest import load_recipe


@pytest.mark.parametrize("mode", ["denoise", "ar", "draft"])
def test_a_row_follows_every_so_many_tokens(mode: str) -> None:
    recipe = load_recipe("long_answer")
    opened = open_model("demo")
    given = {
        "mode": mode,
        "max_new_tokens": 100,
        "suppress": opened.generation.stop_ids,
        **recipe.CONTROLS["on"],
    }
    rows = list(recipe.measured(opened, given, every=40))
    ends = [0, *(row.tokens for row in rows)]
    assert ends[-1] == 100 and len(rows) > 1
    assert all(end - start >= 40 for start, end in pairwise(ends[:-1]))
    for row in rows:
        assert row.per_forward == pytest.approx(row.attention + row.model + row.host)
        assert min(row.per_token, row.attention, row.model, row.host) > 0
        assert row.keys_values == 1024 * 256  # the first buffers
    assert len([*recipe.table(iter(rows))]) == 2 + len(rows)
