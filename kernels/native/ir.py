"""LLVM IR as text: a function's lines, names for its values, loops with carried values.

Only what the kernels here need. LLVM picks the instructions: the same text serves any vector width.
"""

from collections.abc import Callable, Sequence


class Function:
    """One function under construction; values are strings such as `%v7`, or constants."""

    def __init__(self, name: str, arguments: Sequence[str], *, internal: bool = False) -> None:
        """`arguments` are typed names: `ptr %call`."""
        linkage = "internal " if internal else ""
        self._head = f"define {linkage}void @{name}({', '.join(arguments)}) #0 {{"
        self._lines = ["entry:"]
        self._block = "entry"
        self._names = 0

    def text(self) -> str:
        """The whole definition."""
        return "\n".join([self._head, *self._lines, "  ret void", "}", ""])

    def value(self, instruction: str) -> str:
        """Adds an instruction; returns the name of its result."""
        name = self._fresh("%v")
        self._lines.append(f"  {name} = {instruction}")
        return name

    def do(self, instruction: str) -> None:
        """Adds an instruction without a result."""
        self._lines.append(f"  {instruction}")

    def field(self, pointer: str, index: int | str, *, kind: str = "i64") -> str:
        """Loads element `index` of an array of `kind`."""
        return self.value(f"load {kind}, ptr {self.at(pointer, index, kind=kind)}")

    def at(self, pointer: str, index: int | str, *, kind: str = "i8") -> str:
        """The address of element `index` of an array of `kind`."""
        return self.value(f"getelementptr {kind}, ptr {pointer}, i64 {index}")

    def splat(self, scalar: str, lanes: int, *, kind: str = "float") -> str:
        """A vector with `scalar` in every lane."""
        vector = f"<{lanes} x {kind}>"
        one = self.value(f"insertelement {vector} poison, {kind} {scalar}, i64 0")
        return self.value(
            f"shufflevector {vector} {one}, {vector} poison, <{lanes} x i32> zeroinitializer"
        )

    def shuffle(self, a: str, b: str, *, lanes: int, mask: Sequence[int]) -> str:
        """Lanes of two float vectors of `lanes` lanes, those of `b` counted behind those of `a`."""
        chosen = ", ".join(f"i32 {lane}" for lane in mask)
        kind = f"<{lanes} x float>"
        return self.value(f"shufflevector {kind} {a}, {kind} {b}, <{len(mask)} x i32> <{chosen}>")

    def fma(self, a: str, b: str, c: str, *, lanes: int) -> str:
        """a * b + c of float vectors, rounded once."""
        kind = f"<{lanes} x float>"
        return self.value(f"call {kind} @llvm.fma.v{lanes}f32({kind} {a}, {kind} {b}, {kind} {c})")

    def smaller(self, a: str, b: str | int) -> str:
        """The smaller of two unsigned i64."""
        less = self.value(f"icmp ult i64 {a}, {b}")
        return self.value(f"select i1 {less}, i64 {a}, i64 {b}")

    def loop(
        self,
        start: str | int,
        end: str,
        *,
        step: str | int,
        carried: Sequence[str] = (),
        kind: str = "i64",
        body: Callable[[str, list[str]], Sequence[str]],
    ) -> list[str]:
        """for index in start, start + step, ... < end; runs at least once.

        Args:
            carried: values of type `kind` that the first round starts with.
            body: gets the index and the carried values, returns those of the next round.

        Returns:
            The carried values after the last round.
        """
        head, latch, after = (self._fresh(name) for name in ("loop", "next", "done"))
        index, following = self._fresh("%i"), self._fresh("%i")
        before = self._block
        self._jump(head)
        inside = [self._fresh("%c") for _ in carried]
        self._lines.append(f"  {index} = phi i64 [{start}, %{before}], [{following}, %{latch}]")
        place = len(self._lines)
        results = body(index, list(inside))
        self._jump(latch)
        self._lines.append(f"  {following} = add i64 {index}, {step}")
        more = self.value(f"icmp ult i64 {following}, {end}")
        self._lines.append(f"  br i1 {more}, label %{head}, label %{after}")
        self._open(after)
        self._lines[place:place] = [
            f"  {name} = phi {kind} [{first}, %{before}], [{result}, %{latch}]"
            for name, first, result in zip(inside, carried, results, strict=True)
        ]
        return list(results)

    def repeat(self, body: Callable[[], str]) -> None:
        """Runs `body` until the i1 that it returns is false."""
        head, after = self._fresh("again"), self._fresh("done")
        self._jump(head)
        more = body()
        self._lines.append(f"  br i1 {more}, label %{head}, label %{after}")
        self._open(after)

    def when(self, condition: str, body: Callable[[], object]) -> None:
        """Runs `body` if the i1 `condition` is true."""
        inside, after = self._fresh("then"), self._fresh("after")
        self._lines.append(f"  br i1 {condition}, label %{inside}, label %{after}")
        self._open(inside)
        body()
        self._jump(after)

    def _fresh(self, stem: str) -> str:
        self._names += 1
        return f"{stem}{self._names}"

    def _jump(self, label: str) -> None:
        self._lines.append(f"  br label %{label}")
        self._open(label)

    def _open(self, label: str) -> None:
        self._lines.append(f"{label}:")
        self._block = label
