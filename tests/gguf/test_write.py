"""Layouts: wrong calls (what good ones give is in `test_container.py`)."""

import numpy as np
import pytest

from clover_local.gguf.types import TYPES
from clover_local.gguf.write import PlannedTensor, lay_out


def test_wrong_calls_say_what_is_wrong() -> None:
    f32 = TYPES["F32"]
    with pytest.raises(ValueError, match="one name"):
        lay_out({}, [PlannedTensor("a", f32, (4,)), PlannedTensor("a", f32, (4,))])
    with pytest.raises(ValueError, match="5 dimensions"):
        lay_out({}, [PlannedTensor("a", f32, (1, 1, 1, 1, 4))])
    with pytest.raises(ValueError, match="33 columns, Q8_0 has blocks of 32"):
        lay_out({}, [PlannedTensor("a", TYPES["Q8_0"], (33,))])
    with pytest.raises(ValueError, match="complex64"):
        lay_out({"k": np.zeros(3, np.complex64)}, [])
