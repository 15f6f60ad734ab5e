"""Packed weights to float32 vectors, in LLVM IR: stored * scale + minimum, rounded once.

A unit is what `lanes` bytes of a row hold: 2 * lanes columns of 4 bits, the even ones in one vector
and the odd ones in another, or lanes columns of 8 bits. Groups are whole units.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from clover_local.kernels.native.fields import Call, Job
from clover_local.kernels.native.ir import Function

ScaleKind = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class Shape:
    """What the emitted code is made for."""

    lanes: int  # of a vector of float32
    weight_rows: int  # in a tile: a power of 2
    unpacked_rows: int  # of x in a tile at most that unpacks its weights in registers
    direct_rows: int  # of x in a job at most that is made of such tiles
    multiplied_rows: int  # of x in a tile at most that finds them unpacked
    permutes: bool  # AVX-512: 16 weights of 4 bits by one look-up in a vector


@dataclass(frozen=True)
class Variant:
    """How the weights are stored."""

    bits: int
    scale: ScaleKind
    symmetric: bool


class PackedRows:
    """Emits the weights of `weight_rows` rows of a job's weight at a time."""

    def __init__(self, f: Function, variant: Variant, shape: Shape) -> None:
        """Emits what all rows share, from the arguments %call and %job of the function."""
        self._f, self._variant, self._shape = f, variant, shape
        self.vectors = 8 // variant.bits  # of a unit
        self._groups = f.field("%call", Call.GROUPS)
        self._group_bytes = f.field("%call", Call.GROUP_BYTES)
        self._row_bytes = f.field("%call", Call.ROW_BYTES)
        self._words = f.field("%job", Job.DATA, kind="ptr")
        self._scale = f.field("%job", Job.SCALE, kind="ptr")
        self._minimum = f.field("%job", Job.MINIMUM, kind="ptr")
        self._ahead = f.field("%call", Call.AHEAD)
        self._data: list[str] = []
        self._first_groups: list[str] = []

    def start(self, rows: Sequence[str]) -> None:
        """Emits the addresses of these rows of the weight, whose units come next."""
        f = self._f
        self._data = [
            f.at(self._words, f.value(f"mul i64 {row}, {self._row_bytes}")) for row in rows
        ]
        self._first_groups = [f.value(f"mul i64 {row}, {self._groups}") for row in rows]

    def each_unit(
        self,
        start: str | int,
        end: str,
        *,
        carried: Sequence[str] = (),
        body: Callable[[str, list[list[str]], list[str]], Sequence[str]],
    ) -> list[str]:
        """Loops over the units of the groups from `start` up to `end`.

        `body` gets a unit's first byte in the row, its weights (per vector, per row), and the
        carried vectors; it returns those of the next round.
        """
        f, shape = self._f, self._shape
        vector = f"<{shape.lanes} x float>"

        def group(g: str, values: list[str]) -> list[str]:
            decode = self._decoder(g)
            first = f.value(f"mul i64 {g}, {self._group_bytes}")

            def unit(byte: str, values: list[str]) -> Sequence[str]:
                return body(byte, decode(byte), values)

            behind = f.value(f"add i64 {first}, {self._group_bytes}")
            return f.loop(first, behind, step=shape.lanes, carried=values, kind=vector, body=unit)

        return f.loop(start, end, step=1, carried=carried, kind=vector, body=group)

    def _decoder(self, g: str) -> Callable[[str], list[list[str]]]:
        """Emits what the units of group `g` share; returns the emitter of a unit's weights."""
        f, lanes, variant = self._f, self._shape.lanes, self._variant
        integers, vector = f"<{lanes} x i32>", f"<{lanes} x float>"
        looks_up = variant.bits == 4 and self._shape.permutes
        lines = [self._line(f.value(f"add i64 {start}, {g}")) for start in self._first_groups]
        if looks_up:
            counts = "<" + ", ".join(f"float {i:e}" for i in range(16)) + ">"
            tables = [f.fma(counts, *line, lanes=lanes) for line in lines]

        def weight(stored: str, row: int) -> str:
            if looks_up:  # the permutation uses the lowest 4 bits of a lane
                return f.value(
                    f"call {vector} @llvm.x86.avx512.permvar.sf.512("
                    f"{vector} {tables[row]}, {integers} {stored})"
                )
            number = f.value(f"sitofp {integers} {stored} to {vector}")
            return f.fma(number, *lines[row], lanes=lanes)

        def unit(byte: str) -> list[list[str]]:
            halves: list[list[str]] = [[] for _ in range(self.vectors)]
            for row, data in enumerate(self._data):
                place = f.at(data, byte)
                # Rows are too short for the CPU to see where reading goes on.
                ahead = f.at(place, self._ahead)
                f.do(f"call void @llvm.prefetch.p0(ptr {ahead}, i32 0, i32 3, i32 1)")
                loaded = f.value(f"load <{lanes} x i8>, ptr {place}, align 1")
                stored = f.value(f"zext <{lanes} x i8> {loaded} to {integers}")
                if variant.bits == 8:
                    halves[0].append(weight(stored, row))
                    continue
                low = stored
                if not looks_up:
                    low = f.value(f"and {integers} {stored}, {_every(15, lanes)}")
                high = f.value(f"lshr {integers} {stored}, {_every(4, lanes)}")
                halves[0].append(weight(low, row))
                halves[1].append(weight(high, row))
            return halves

        return unit

    def _line(self, place: str) -> tuple[str, str]:
        """Scale and minimum of one row's group, in every lane."""
        f, lanes = self._f, self._shape.lanes
        scale = self._load_scale(place)
        if self._variant.symmetric:
            half = 1 << (self._variant.bits - 1)
            minimum = f.value(f"fmul float {scale}, {-float(half):e}")  # exact
        else:
            minimum = f.field(self._minimum, place, kind="float")
        return f.splat(scale, lanes), f.splat(minimum, lanes)

    def _load_scale(self, place: str) -> str:
        f, kind = self._f, self._variant.scale
        if kind == "float32":
            return f.field(self._scale, place, kind="float")
        if kind == "float16":
            return f.value(f"fpext half {f.field(self._scale, place, kind='half')} to float")
        wide = f.value(f"zext i16 {f.field(self._scale, place, kind='i16')} to i32")
        return f.value(f"bitcast i32 {f.value(f'shl i32 {wide}, 16')} to float")


def weight_rows(f: Function, shape: Shape, n: str) -> list[str]:
    """Rows n, n + 1, ... of a weight; behind its last row that one comes again."""
    last = f.value(f"add i64 {f.field('%call', Call.N)}, -1")
    return [f.smaller(f.value(f"add i64 {n}, {j}"), last) for j in range(shape.weight_rows)]


def _every(number: int, lanes: int) -> str:
    """A vector constant with `number` in every lane."""
    return "<" + ", ".join([f"i32 {number}"] * lanes) + ">"
