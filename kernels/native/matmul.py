"""y[r, n] = sum_k x[r, k] * (stored[n, k] * scale[n, g] + minimum[n, g]) in LLVM IR.

Threads take tiles (some rows of one weight, all rows of x that go with it) from a shared counter
until there are none. Inside a tile a few rows of x meet a few rows of the weight at a time, each
pair with a vector of running sums in a register, whose lanes are columns. Few rows of x: weights
are unpacked in registers and used at once, for then reading them is what takes time. Many: a chunk
of columns is unpacked into the thread's own scratch and used by all rows. Either way a pair adds
the same products in the same order, so the bits of a row of y do not depend on the rows beside it.

4 bits: a byte holds columns 2j (low half) and 2j + 1, so x is read with the even columns of each
unit first, and no weight is shuffled. 8 bits: columns lie as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from clover_local.kernels.native.fields import Call, Job, Spread
from clover_local.kernels.native.ir import Function
from clover_local.kernels.native.tile import add, direct, finish, unpack
from clover_local.kernels.native.unpack import Shape, Variant

JOB_ROWS = 64
"""Rows of x in a job at most: they stay in a core's own cache while a weight goes by."""
Body = Callable[[str, list[str]], Sequence[str]]  # of a loop
TRIPLE = "x86_64-unknown-linux-gnu"


def module(variant: Variant, shape: Shape) -> str:
    """The text of a module with the functions `worker(ptr call)` and `spread(ptr call)`."""
    return "\n".join(
        [
            f'target triple = "{TRIPLE}"',
            *_declarations(shape),
            *(direct(variant, shape, count=i + 1) for i in range(shape.unpacked_rows)),
            unpack(variant, shape),
            *(add(shape, count=i + 1) for i in range(shape.multiplied_rows)),
            finish(shape),
            _worker(shape),
            _spread(shape),
            'attributes #0 = { noinline nounwind "prefer-vector-width"="512" }',
        ]
    )


def _declarations(shape: Shape) -> Iterator[str]:
    vector = f"<{shape.lanes} x float>"
    yield f"declare {vector} @llvm.fma.v{shape.lanes}f32({vector}, {vector}, {vector})"
    yield "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"
    if shape.permutes:
        yield f"declare {vector} @llvm.x86.avx512.permvar.sf.512({vector}, <16 x i32>)"


def _worker(shape: Shape) -> str:
    """Takes tiles until there are none."""
    f = Function("worker", ["ptr %call"])
    tiles, blocks = f.field("%call", Call.TILES), f.field("%call", Call.BLOCKS)
    jobs, block = f.field("%call", Call.JOBS, kind="ptr"), f.field("%call", Call.BLOCK)
    all_n = f.field("%call", Call.N)
    scratch = _Scratch(f, shape)

    def take() -> str:
        tile = f.value("atomicrmw add ptr %call, i64 1 monotonic")
        more = f.value(f"icmp ult i64 {tile}, {tiles}")
        f.when(more, lambda: run(tile))
        return more

    def run(tile: str) -> None:
        number = f.value(f"udiv i64 {tile}, {blocks}")
        job = f.at(jobs, f.value(f"mul i64 {number}, {len(Job)}"), kind="i64")
        start = f.value(f"mul i64 {f.value(f'urem i64 {tile}, {blocks}')}, {block}")
        end = f.smaller(f.value(f"add i64 {start}, {block}"), all_n)
        rows = f.field(job, Job.ROWS)
        few = f.value(f"icmp ule i64 {rows}, {f.field('%call', Call.DIRECT_ROWS)}")
        many = f.value(f"xor i1 {few}, true")
        f.when(few, lambda: direct_tiles(job, rows, start=start, end=end))
        f.when(
            many, lambda: f.loop(start, end, step=shape.weight_rows, body=scratch.rows(job, rows))
        )

    def direct_tiles(job: str, rows: str, *, start: str, end: str) -> None:
        where = f"ptr %call, ptr {job}, i64 {start}, i64 {end}"
        _by_count(
            f,
            rows,
            most=shape.unpacked_rows,
            call=lambda count, m: f"@direct{count}({where}, i64 {m})",
        )

    f.repeat(take)
    return f.text()


class _Scratch:
    """Emits products of many rows: chunk by chunk, each unpacked once."""

    def __init__(self, f: Function, shape: Shape) -> None:
        """Emits the scratch of a thread."""
        self._f, self._shape = f, shape
        vector = f"<{shape.lanes} x float>"
        self._groups = f.field("%call", Call.GROUPS)
        self._chunk = f.field("%call", Call.CHUNK_GROUPS)
        self._group_columns = f.value(f"udiv i64 {f.field('%call', Call.K)}, {self._groups}")
        columns = f.value(f"mul i64 {self._chunk}, {self._group_columns}")
        elements = f.value(f"mul i64 {columns}, {shape.weight_rows}")
        self._unpacked = f.value(f"alloca float, i64 {elements}, align 64")
        self._sums = f.value(f"alloca {vector}, i64 {JOB_ROWS * shape.weight_rows}, align 64")

    def rows(self, job: str, rows: str) -> Body:
        """The body of the loop over the weight's rows."""
        f, shape = self._f, self._shape
        vector = f"<{shape.lanes} x float>"
        args = f"ptr %call, ptr {job}"

        def clear(at: str, _: list[str]) -> list[str]:
            f.do(f"store {vector} zeroinitializer, ptr {f.at(self._sums, at, kind=vector)}")
            return []

        def columns(n: str, _: list[str]) -> list[str]:
            f.loop(0, f.value(f"mul i64 {rows}, {shape.weight_rows}"), step=1, body=clear)
            f.loop(0, self._groups, step=self._chunk, body=lambda start, _: chunk(n, start))
            f.do(f"call void @finish({args}, i64 {n}, ptr {self._sums})")
            return []

        def chunk(n: str, start: str) -> list[str]:
            end = f.smaller(f.value(f"add i64 {start}, {self._chunk}"), self._groups)
            f.do(
                f"call void @unpack({args}, i64 {n}, i64 {start}, i64 {end}, ptr {self._unpacked})"
            )
            column = f.value(f"mul i64 {start}, {self._group_columns}")
            behind = f.value(f"mul i64 {end}, {self._group_columns}")
            count = f.value(f"sub i64 {behind}, {column}")
            rest = f"i64 {column}, i64 {count}, ptr {self._unpacked}, ptr {self._sums}"
            _by_count(
                f,
                rows,
                most=shape.multiplied_rows,
                call=lambda count, m: f"@add{count}({args}, i64 {m}, {rest})",
            )
            return []

        return columns


def _by_count(f: Function, rows: str, *, most: int, call: Callable[[int, str], str]) -> None:
    """Calls functions for up to `most` rows of x until all have had theirs, in equal shares."""
    calls = f.value(f"udiv i64 {f.value(f'add i64 {rows}, {most - 1}')}, {most}")
    rounded = f.value(f"add i64 {rows}, {f.value(f'add i64 {calls}, -1')}")
    share = f.value(f"udiv i64 {rounded}, {calls}")

    def step(m: str, _: list[str]) -> list[str]:
        left = f.smaller(f.value(f"sub i64 {rows}, {m}"), share)
        for count in range(1, most + 1):
            this = f.value(f"icmp eq i64 {left}, {count}")
            f.when(this, partial(f.do, f"call void {call(count, m)}"))
        return []

    f.loop(0, rows, step=share, body=step)


def _spread(shape: Shape) -> str:
    """Copies rows of x; in each unit of 2 * lanes columns the even ones come first."""
    f = Function("spread", ["ptr %call"])
    rows, columns = f.field("%call", Spread.ROWS), f.field("%call", Spread.K)
    x, stride = f.field("%call", Spread.X, kind="ptr"), f.field("%call", Spread.X_STRIDE)
    out = f.field("%call", Spread.OUT, kind="ptr")
    vector = f"<{shape.lanes} x float>"

    def take() -> str:
        row = f.value("atomicrmw add ptr %call, i64 1 monotonic")
        more = f.value(f"icmp ult i64 {row}, {rows}")
        f.when(more, lambda: copy(row))
        return more

    def copy(row: str) -> None:
        source = f.at(x, f.value(f"mul i64 {row}, {stride}"))
        target = f.at(out, f.value(f"mul i64 {row}, {columns}"), kind="float")

        def unit(column: str, _: list[str]) -> list[str]:
            at = f.at(source, column, kind="float")
            a, b = (
                f.value(f"load {vector}, ptr {f.at(at, i * shape.lanes, kind='float')}, align 4")
                for i in range(2)
            )
            to = f.at(target, column, kind="float")
            for odd in range(2):
                mask = range(odd, 2 * shape.lanes, 2)
                half = f.shuffle(a, b, lanes=shape.lanes, mask=mask)
                place = f.at(to, odd * shape.lanes, kind="float")
                f.do(f"store {vector} {half}, ptr {place}, align 4")
            return []

        f.loop(0, columns, step=2 * shape.lanes, body=unit)

    f.repeat(take)
    return f.text()
