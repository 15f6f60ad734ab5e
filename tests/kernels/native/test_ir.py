"""The text that the emitter makes."""

from clover_local.kernels.native.ir import Function


def test_loop_carries_values_from_round_to_round() -> None:
    f = Function("sum", ["ptr %out", "i64 %n"])
    (total,) = f.loop(
        0, "%n", step=2, carried=["7"], body=lambda i, sums: [f.value(f"add i64 {sums[0]}, {i}")]
    )
    f.do(f"store i64 {total}, ptr %out")
    lines = f.text().splitlines()
    assert lines[0] == "define void @sum(ptr %out, i64 %n) #0 {"
    phis = [line for line in lines if "phi" in line]
    assert "[0, %entry]" in phis[0]
    assert f"[7, %entry], [{total}, %" in phis[1]
    assert f"store i64 {total}, ptr %out" in lines[-3]


def test_loops_may_be_nested_and_change_the_list_they_get() -> None:
    f = Function("twice", ["i64 %n"])

    def inner(_: str, values: list[str]) -> list[str]:
        values[0] = f.value(f"add i64 {values[0]}, 1")
        return values

    f.loop(
        0,
        "%n",
        step=1,
        carried=["0"],
        body=lambda i, values: f.loop(i, "%n", step=1, carried=values, body=inner),
    )
    defined = [line.split(" = ")[0].strip() for line in f.text().splitlines() if " = " in line]
    assert len(defined) == len(set(defined))


def test_condition_is_checked_before_its_body() -> None:
    f = Function("maybe", ["i1 %c", "ptr %p"], internal=True)
    f.when("%c", lambda: f.do("store i64 1, ptr %p"))
    text = f.text()
    assert text.startswith("define internal void @maybe")
    assert text.index("br i1 %c") < text.index("store i64 1")
