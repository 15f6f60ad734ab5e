"""The parts of a tile in LLVM IR: a few rows of x times a few rows of a packed weight.

Each pair has a vector of running sums, whose lanes are columns, and every function here adds a
pair's products in the order of their columns: the bits of a sum do not depend on which ones ran.
"""

from collections.abc import Sequence

from clover_local.kernels.native.fields import Call, Job
from clover_local.kernels.native.ir import Function
from clover_local.kernels.native.unpack import PackedRows, Shape, Variant, weight_rows


def direct(variant: Variant, shape: Shape, *, count: int) -> str:
    """Rows m .. m + count - 1 of a job, all columns, times rows start .. end - 1 of the weight."""
    f = Function(
        f"direct{count}",
        ["ptr %call", "ptr %job", "i64 %start", "i64 %end", "i64 %m"],
        internal=True,
    )
    weights = PackedRows(f, variant, shape)
    y_rows = _y_rows(f, count)
    x = _x_rows(f, y_rows)
    groups = f.field("%call", Call.GROUPS)

    def unit(byte: str, unpacked: list[list[str]], sums: list[str]) -> list[str]:
        column = f.value(f"mul i64 {byte}, {weights.vectors}")
        for part, row_weights in enumerate(unpacked):
            at = f.value(f"add i64 {column}, {part * shape.lanes}")
            _multiply(f, shape, x, column=at, weights=row_weights, sums=sums)
        return sums

    def tile(n: str, _: list[str]) -> list[str]:
        rows = weight_rows(f, shape, n)
        weights.start(rows)
        zeros = ["zeroinitializer"] * (count * shape.weight_rows)
        sums = weights.each_unit(0, groups, carried=zeros, body=unit)
        for m, y_row in enumerate(y_rows):
            of_row = sums[m * shape.weight_rows : (m + 1) * shape.weight_rows]
            _store_totals(f, of_row, y_row, columns=rows, lanes=shape.lanes)
        return []

    f.loop("%start", "%end", step=shape.weight_rows, body=tile)
    return f.text()


def unpack(variant: Variant, shape: Shape) -> str:
    """Rows n, n + 1, ... of the weight, groups start .. end - 1, as float32 to `out`."""
    f = Function(
        "unpack",
        ["ptr %call", "ptr %job", "i64 %n", "i64 %start", "i64 %end", "ptr %out"],
        internal=True,
    )
    weights = PackedRows(f, variant, shape)
    weights.start(weight_rows(f, shape, "%n"))
    first = f.value(f"mul i64 %start, {f.field('%call', Call.GROUP_BYTES)}")

    def unit(byte: str, unpacked: list[list[str]], _: list[str]) -> list[str]:
        # [column / lanes, weight row, lane]: in the order of use
        done = f.value(f"sub i64 {byte}, {first}")
        to = f.at(
            "%out", f.value(f"mul i64 {done}, {weights.vectors * shape.weight_rows}"), kind="float"
        )
        for at, value in enumerate(w for part in unpacked for w in part):
            place = f.at(to, at * shape.lanes, kind="float")
            f.do(f"store <{shape.lanes} x float> {value}, ptr {place}, align 4")
        return []

    weights.each_unit("%start", "%end", body=unit)
    return f.text()


def add(shape: Shape, *, count: int) -> str:
    """To the sums of rows m .. m + count - 1 of a job: their products with unpacked columns."""
    f = Function(
        f"add{count}",
        [
            "ptr %call",
            "ptr %job",
            "i64 %m",
            "i64 %column",
            "i64 %columns",
            "ptr %unpacked",
            "ptr %sums",
        ],
        internal=True,
    )
    x = [f.at(row, "%column", kind="float") for row in _x_rows(f, _y_rows(f, count))]
    vector = f"<{shape.lanes} x float>"
    rows = shape.weight_rows
    first = f.at("%sums", f.value(f"mul i64 %m, {rows}"), kind=vector)
    places = [f.at(first, i, kind=vector) for i in range(count * rows)]
    sums = [f.value(f"load {vector}, ptr {place}, align 4") for place in places]

    def step(column: str, sums: list[str]) -> list[str]:
        at = f.at("%unpacked", f.value(f"mul i64 {column}, {rows}"), kind="float")
        weights = [
            f.value(f"load {vector}, ptr {f.at(at, j, kind=vector)}, align 4") for j in range(rows)
        ]
        _multiply(f, shape, x, column=column, weights=weights, sums=sums)
        return sums

    totals = f.loop(0, "%columns", step=shape.lanes, carried=sums, kind=vector, body=step)
    for place, total in zip(places, totals, strict=True):
        f.do(f"store {vector} {total}, ptr {place}, align 4")
    return f.text()


def finish(shape: Shape) -> str:
    """Rows n, n + 1, ... of the weight: the sums' lanes added up, into y."""
    f = Function("finish", ["ptr %call", "ptr %job", "i64 %n", "ptr %sums"], internal=True)
    vector = f"<{shape.lanes} x float>"
    columns = weight_rows(f, shape, "%n")
    first = f.field("%job", Job.FIRST)

    def row(m: str, _: list[str]) -> list[str]:
        start = f.at("%sums", f.value(f"mul i64 {m}, {shape.weight_rows}"), kind=vector)
        sums = [
            f.value(f"load {vector}, ptr {f.at(start, j, kind=vector)}, align 4")
            for j in range(shape.weight_rows)
        ]
        at = f.value(f"add i64 {first}, {m}")
        _store_totals(f, sums, at, columns=columns, lanes=shape.lanes)
        return []

    f.loop(0, f.field("%job", Job.ROWS), step=1, body=row)
    return f.text()


def _y_rows(f: Function, count: int) -> list[str]:
    """Rows of y that rows %m .. %m + count - 1 of %job are."""
    first = f.value(f"add i64 {f.field('%job', Job.FIRST)}, %m")
    return [f.value(f"add i64 {first}, {i}") for i in range(count)]


def _x_rows(f: Function, y_rows: Sequence[str]) -> list[str]:
    """Pointers to the rows of x that make these rows of y."""
    table = f.field("%call", Call.X_ROWS, kind="ptr")
    base, stride = f.field("%call", Call.X, kind="ptr"), f.field("%call", Call.X_STRIDE)
    return [f.at(base, f.value(f"mul i64 {f.field(table, row)}, {stride}")) for row in y_rows]


def _multiply(
    f: Function,
    shape: Shape,
    x: Sequence[str],
    *,
    column: str,
    weights: Sequence[str],
    sums: list[str],
) -> None:
    """Adds the products of `lanes` columns to `sums`: [row of x, row of the weight]."""
    vector = f"<{shape.lanes} x float>"
    for m, row in enumerate(x):
        values = f.value(f"load {vector}, ptr {f.at(row, column, kind='float')}, align 4")
        for j, weight in enumerate(weights, start=m * shape.weight_rows):
            sums[j] = f.fma(values, weight, sums[j], lanes=shape.lanes)


def _store_totals(
    f: Function, sums: list[str], row: str, *, columns: Sequence[str], lanes: int
) -> None:
    """Adds up the lanes of each of `sums` and stores them in a row of y."""
    base, stride = f.field("%call", Call.Y, kind="ptr"), f.field("%call", Call.Y_STRIDE)
    y = f.at(base, f.value(f"mul i64 {row}, {stride}"))
    totals = _totals(f, sums, lanes=lanes)
    for j, column in enumerate(columns):
        one = f.value(f"extractelement <{len(columns)} x float> {totals}, i64 {j}")
        f.do(f"store float {one}, ptr {f.at(y, column, kind='float')}, align 4")


def _totals(f: Function, sums: list[str], *, lanes: int) -> str:
    """Each vector's lanes added up, as one vector with a lane for each of them.

    Halves are added until one lane is left of each; vectors share a register as soon as they fit.
    """
    width = lanes  # of what is left of one of them
    while width > 1:
        half = width // 2
        held = 2 * lanes if len(sums) > 1 else lanes  # lanes in the one or two operands
        low = [start + i for start in range(0, held, width) for i in range(half)]
        high = [lane + half for lane in low]
        folded = []
        for at in range(0, len(sums), 2):
            a, b = sums[at], (sums[at + 1] if len(sums) > 1 else "poison")
            parts = [f.shuffle(a, b, lanes=lanes, mask=mask) for mask in (low, high)]
            folded.append(f.value(f"fadd <{held // 2} x float> {parts[0]}, {parts[1]}"))
        lanes = held // 2
        sums, width = folded, half
    return sums[0]
