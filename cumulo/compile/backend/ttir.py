"""Triton's intermediate representation (TTIR), read from its text into plain data. The lowering calls it.

The text is the one form that all versions of Triton share; MLIR's own walker gives no attribute but integers. Only
what the printer writes is understood, so a line that is not is an error of ours, and names itself.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cumulo.errors import CumuloError


class KernelRefused(CumuloError):
    """A kernel cannot run on this back end; the message names the operation and its line."""


@dataclass(frozen=True, slots=True)
class Type:
    element: str  # "f32", "bf16", "i1", "f8E4M3FN", "*f32"
    shape: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        product = 1
        for extent in self.shape:
            product *= extent
        return product

    @property
    def is_pointer(self) -> bool:
        return self.element.startswith("*")

    @property
    def is_float(self) -> bool:
        return self.element[0] in "fb"


@dataclass(eq=False, slots=True)
class Value:
    id: int
    type: Type
    op: "TtirOperation | None" = None  # None: an argument of a block

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape


@dataclass(eq=False, slots=True)
class TtirBlock:
    label: str
    args: list[Value] = field(default_factory=list)
    ops: "list[TtirOperation]" = field(default_factory=list)


@dataclass(eq=False, slots=True)
class TtirOperation:
    name: str
    operands: list[Value]
    results: list[Value]
    text: str  # the line without its location: attributes are read from it
    location: str  # "file.py:12"
    regions: list[list[TtirBlock]] = field(default_factory=list)
    targets: list[tuple[str, list[Value]]] = field(default_factory=list)  # blocks a branch goes to
    loops: "tuple[TtirOperation, ...]" = ()  # the loops around it, outermost first

    def integer(self, name: str) -> int:
        found = re.search(rf"\b{name} = (-?\d+)", self.text)
        if found is None:
            raise self.refused(f"its attribute {name} is missing")
        return int(found[1])

    def integers(self, name: str) -> list[int]:
        found = re.search(rf"\b{name} = array<i\d+: ([^>]*)>", self.text)
        return [int(number) for number in found[1].split(",")] if found else []

    def refused(self, why: str = "no rule for it") -> KernelRefused:
        return KernelRefused(f"{self.name} at {self.location}: the CPU back end cannot lower it: {why}")


@dataclass(eq=False, slots=True)
class TtirFunction:
    name: str
    blocks: list[TtirBlock]
    public: bool


_TYPE = re.compile(
    r"tensor<[^<>]*(?:<[^<>]*>)?>|!tt\.\w+<[^<>]*(?:<[^<>]*>)?[^<>]*>|\b(?:i\d+|bf16|f\d+\w*|index)\b"
)
_NAME = re.compile(r"%[\w.$-]+(?:#\d+)?")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def parse_type(text: str) -> Type:
    if text.startswith("tensor<"):
        *extents, element = re.split(r"(?<=\d)x", text[7:-1])
        return Type(parse_type(element).element, tuple(int(extent) for extent in extents))
    if text.startswith("!tt.ptr<"):
        return Type("*" + text[8:-1].split(",")[0])
    if text.startswith("!"):
        raise KernelRefused(
            f"values of the type {text}: pass a tensor, and make the descriptor in the kernel"
        )
    return Type("i64" if text == "index" else text)


def types_in(text: str) -> list[Type]:
    return [parse_type(found) for found in _TYPE.findall(text)]


def functions(text: str) -> dict[str, TtirFunction]:
    """All functions of a module, by name."""
    return _Parser(text).run()


class _Parser:
    def __init__(self, text: str) -> None:
        self.lines = [line for line in text.splitlines() if line.strip()]
        self.position = 0
        self.values = 0
        self.scopes: list[dict[str, Value]] = []
        self.loops: tuple[TtirOperation, ...] = ()
        self.places = dict(re.findall(r"^(#loc\d*) = (loc\(.*\))$", text, re.M))

    def run(self) -> dict[str, TtirFunction]:
        found = {}
        while self.position < len(self.lines):
            line = self.lines[self.position].strip()
            if line.startswith("tt.func"):
                function = self._function(line)
                found[function.name] = function
            self.position += 1
        return found

    # -- names and places -----------------------------------------------------------------------------------------
    def _new(self, name: str, type_: Type, op: TtirOperation | None = None) -> Value:
        self.values += 1
        value = Value(self.values, type_, op)
        self.scopes[-1][name] = value
        return value

    def _value(self, name: str) -> Value:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        raise ValueError(f"TTIR uses {name} before it is defined: {self.lines[self.position].strip()}")

    def _named(self, text: str) -> list[Value]:
        return [self._value(name) for name in _NAME.findall(text)]

    def _place(self, text: str) -> str:
        """The user's own line: of a call into Triton's library, the caller's."""
        lines = list(self._files(text))
        own = [line for line in lines if "/triton/language/" not in line]
        return (own or lines or ["an unknown line"])[0]

    def _files(self, text: str, depth: int = 0) -> Iterator[str]:
        for name, line, reference in re.findall(r'"([^"]+)":(\d+):\d+|(#loc\d*)', text):
            if reference and depth < 20:
                yield from self._files(self.places.get(reference, ""), depth + 1)
            elif name:
                yield f"{name if '/triton/language/' in name else Path(name).name}:{line}"

    # -- structure ------------------------------------------------------------------------------------------------
    def _function(self, line: str) -> TtirFunction:
        name = re.search(r'@("[^"]+"|[\w.$-]+)\(', line)
        assert name is not None
        self.scopes.append({})
        entry = TtirBlock("^bb0")
        for argument, type_ in re.findall(rf"(%[\w.$-]+): ({_TYPE.pattern})", line):
            entry.args.append(self._new(argument, parse_type(type_)))
        self.position += 1
        blocks = self._blocks(entry)
        self.scopes.pop()
        return TtirFunction(name[1].strip('"'), blocks, " public " in line)

    def _blocks(self, first: TtirBlock) -> list[TtirBlock]:
        """Up to and without the line that closes the region."""
        blocks = [first]
        while not (line := self.lines[self.position].strip()).startswith("}"):
            if line.startswith("^"):
                block = TtirBlock(line.split("(")[0].split(":")[0])
                for name, type_ in re.findall(rf"(%[\w.$-]+): ({_TYPE.pattern})", line.split(" // ")[0]):
                    block.args.append(self._new(name, parse_type(type_)))
                if blocks == [first] and not first.ops and not first.args:
                    blocks = []
                blocks.append(block)
            else:
                blocks[-1].ops.append(self._operation(line))
            self.position += 1
        return blocks

    def _region(self, op: TtirOperation, args: list[tuple[str, Type]]) -> str:
        """The region that opens at the end of this line; the line that closes it."""
        around = self.loops
        if op.name in ("scf.for", "scf.while"):
            self.loops = (*around, op)
        self.scopes.append({})
        block = TtirBlock("^bb0")
        block.args = [self._new(name, type_) for name, type_ in args]
        self.position += 1
        op.regions.append(self._blocks(block))
        if op.name == "scf.for" and (not block.ops or block.ops[-1].name != "scf.yield"):
            block.ops.append(
                TtirOperation("scf.yield", [], [], "", op.location)
            )  # the printer leaves an empty one out
        self.scopes.pop()
        self.loops = around
        return self.lines[self.position].strip()

    def _operation(self, line: str) -> TtirOperation:
        place = re.search(r" loc\(.*\)$", line)
        text = line[: place.start()] if place else line
        left, equals, right = text.partition(" = ")
        if not (equals and left.startswith("%")):
            left, right = "", text
        name, _, rest = right.partition(" ")
        named = re.match(r'"?([\w.]+)"?(.*)', name)
        assert named is not None, line
        name, rest = named[1], f"{named[2]} {rest}"
        op = TtirOperation(name, [], [], rest, self._place(place[0]) if place else "", loops=self.loops)
        plain = _STRING.sub('""', rest)
        arguments = re.findall(r"(%[\w.$-]+) = (%[\w.$-]+(?:#\d+)?)", plain)
        if name == "scf.for":
            bounds = re.match(r"\s*(?:unsigned )?%[\w.$-]+ = (%\S+) to (%\S+) step (%\S+)", plain)
            assert bounds is not None, line
            arguments = arguments[1:]  # the first is the counter
            op.operands = [self._value(bound) for bound in bounds.groups()]
            op.operands += [self._value(start) for _, start in arguments]
        elif name == "scf.while":
            op.operands = [self._value(start) for _, start in arguments]
        elif name in ("cf.br", "cf.cond_br"):
            op.targets = [
                (label, self._named(given)) for label, given in re.findall(r"(\^bb\d+)(\([^)]*\))?", plain)
            ]
            op.operands = self._named(plain.split("^")[0])
        else:
            op.operands = self._named(plain)
        results = _result_types(op, plain)
        if plain.rstrip().endswith("{"):
            inner: list[tuple[str, Type]] = []
            if name == "scf.for":
                counter = re.match(r"\s*(?:unsigned )?(%[\w.$-]+)", plain)
                assert counter is not None
                inner = [(counter[1], op.operands[0].type)]
            if name in ("scf.for", "scf.while"):
                first = 3 if name == "scf.for" else 0
                inner += [(argument, value.type) for (argument, _), value in
                          zip(arguments, op.operands[first:], strict=True)]  # fmt: skip
            closing = self._region(op, inner)
            while closing.endswith("{"):  # "} else {", "} do {"
                closing = self._region(op, [])
            if closing.startswith("})"):  # the generic form has its types behind its regions
                results = types_in(closing.split(" -> ")[1].split(" loc(")[0])
            if not op.location:
                op.location = self._place(closing)
        op.text = rest
        self._bind(op, left, results)
        return op

    def _bind(self, op: TtirOperation, left: str, types: list[Type]) -> None:
        names: list[str] = []
        for part in filter(None, left.split(", ")):
            name, _, count = part.partition(":")
            names += [f"{name}#{index}" for index in range(int(count))] if count else [name]
        if len(names) != len(types) and names:
            raise ValueError(
                f"{len(names)} results but {len(types)} types: {self.lines[self.position].strip()}"
            )
        op.results = [self._new(name, type_, op) for name, type_ in zip(names, types, strict=False)]


def _result_types(op: TtirOperation, text: str) -> list[Type]:
    """What the printer leaves out is inferred: a load's type from its pointer's, a comparison's."""
    shown = text.rpartition(" : ")[2] if op.name not in ("scf.for", "scf.if") else text
    if op.name in ("tt.store", "scf.yield", "scf.condition", "tt.return", "tt.print", "tt.assert", "cf.br"):
        return []
    if " -> " in text:
        after = text.rsplit(" -> ", 1)[1]
        return types_in(after.partition(" : ")[0])
    if op.name in ("scf.for", "scf.if", "cf.cond_br"):
        return []
    types = types_in(shown.rsplit(" to ", 1)[-1])
    if not types:
        return [Type("i1")] if op.name == "arith.constant" else []
    first = types[0]
    if op.name == "tt.load":
        return [Type(first.element[1:], first.shape)]
    if op.name in ("arith.cmpi", "arith.cmpf"):
        return [Type("i1", first.shape)]
    if op.name == "tt.addptr":
        return [first]
    if op.name == "tt.unsplat":
        return [Type(first.element)]
    return [types[-1]]
