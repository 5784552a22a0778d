"""Addresses that the lanes of a thread block use, read from PTX: every instruction is played once, in order, with
one number per thread, so that layouts, swizzles and vector widths need no theory of their own. Called by `verdict`.

Numbers come from the launch's arguments; what is loaded from memory at one address for all threads counts as 0, and
an address that depends on data that differ between threads is not judged. Loops are seen in their first turn.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Lanes = NDArray[np.uint64]
SECTOR, BANKS = 32, 32
_SPECIAL = ("%tid.x", "%laneid", "%warpid")


@dataclass(frozen=True, slots=True)
class MemoryAccess:
    """One instruction of all threads of a block. Ways: how often the worst warp repeats it for shared memory."""

    source_line: int
    at: int  # line of the PTX
    instruction: str
    space: str  # global or shared
    is_store: bool
    bytes_per_thread: int
    sectors: NDArray[np.uint64] | None = None  # touched by each warp, in all warps together; None: not judged
    used_bytes: NDArray[np.uint64] | None = None  # their addresses
    ways: int = 1


def accesses(
    ptx: Sequence[str], lines: Sequence[int], warps: int, numbers: Sequence[int], lanes_of_warp: int = 32
) -> list[MemoryAccess]:
    """`numbers`: what each parameter of the kernel is taken to be; pointers far from one another."""
    return _Player(warps * lanes_of_warp, numbers).play(ptx, lines)


class _Player:
    def __init__(self, threads: int, numbers: Sequence[int]) -> None:
        thread = np.arange(threads, dtype=np.uint64)
        self.known: dict[str, Lanes | None] = {
            "%tid.x": thread,
            "%laneid": thread % np.uint64(32),
            "%warpid": thread // np.uint64(32),
        }
        self.threads, self.numbers = threads, list(numbers)
        self.parameters: dict[str, int] = {}
        self.found: list[MemoryAccess] = []
        self.at = 0

    def play(self, ptx: Sequence[str], lines: Sequence[int]) -> list[MemoryAccess]:
        for self.at, (text, line) in enumerate(zip(ptx, lines, strict=True)):
            if found := re.match(r"\s*\.param (?:\.\w+ )*?\.?[\w. ]*?(\w+_param_\d+)", text):
                self.parameters[found[1]] = len(self.parameters)
                continue
            for statement in re.sub(r"//.*", "", text).split(";"):
                if found := re.match(r"\s*[{]?\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)\s+(.+)$", statement):
                    self._take(found[1], _operands(found[2]), line)
        return self.found

    def _take(self, name: str, operands: list[str], line: int) -> None:
        head, *kinds = name.split(".")
        if head in ("ld", "st", "ldmatrix", "stmatrix", "cp", "red", "atom"):
            self._reach(name, head, kinds, operands, line)
        elif operands and operands[0].startswith(("%", "{")):
            self._compute(head, kinds, operands)

    # -- memory ---------------------------------------------------------------------------------------------------
    def _reach(self, name: str, head: str, kinds: list[str], operands: list[str], line: int) -> None:
        if "param" in kinds:
            index = self.parameters.get(operands[1].strip("[] ").split("+")[0])
            value = self.numbers[index] if index is not None and index < len(self.numbers) else 0
            self.known[operands[0]] = np.full(self.threads, value, np.uint64)
            return
        is_store = head in ("st", "stmatrix", "red")
        if head == "cp":
            if kinds[:1] != ["async"] or "shared" not in kinds or "bulk" in kinds or len(operands) < 3:
                return
            self._note(name, "global", False, operands[1], int(operands[2], 0), line)
            return
        space = next((one for one in ("shared", "global") if any(kind.startswith(one) for kind in kinds)), "")
        where = next((one for one in operands if one.startswith("[")), "")
        if space and where:
            matrices = next((int(kind[1:]) for kind in kinds if re.fullmatch(r"x[124]", kind)), 1)
            size = 16 if head.endswith("matrix") else _bytes(kinds)
            self._note(
                name, space, is_store, where, size, line, 8 * matrices if head.endswith("matrix") else 0
            )
        if not is_store and operands[0].startswith(("%", "{")):
            address = self._address(where)
            alike = address is not None and bool((address == address[0]).all())
            for register in _registers(operands[0]):
                self.known[register] = np.zeros(self.threads, np.uint64) if alike else None

    def _address(self, where: str) -> Lanes | None:
        base, _, offset = where.strip("[] ").replace(" ", "").partition("+")
        value = self._value(base)
        return None if value is None else value + np.uint64(int(offset or "0", 0) % (1 << 64))

    def _note(
        self, name: str, space: str, is_store: bool, where: str, size: int, line: int, rows: int = 0
    ) -> None:
        """`rows`: of a matrix load, how many lanes of each warp give an address."""
        address = self._address(where)
        access = MemoryAccess(line, self.at, name, space, is_store, size)
        if address is not None and space == "global":
            reached = address[:, None] + np.arange(size, dtype=np.uint64)[None, :]
            each = [np.unique(one // np.uint64(SECTOR)) for one in reached.reshape(-1, 32 * size)]
            access = replace(access, sectors=np.concatenate(each), used_bytes=np.unique(reached))
        elif address is not None:
            by_warp = address.reshape(-1, 32)[:, : rows or 32]
            access = replace(access, ways=max(_ways(one, size) for one in by_warp))
        self.found.append(access)

    # -- arithmetic -----------------------------------------------------------------------------------------------
    def _value(self, operand: str) -> Lanes | None:
        if operand in self.known:
            return self.known[operand]
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            return np.full(self.threads, int(operand.rstrip("U"), 0) % (1 << 64), np.uint64)
        if operand.startswith("%") and operand not in _SPECIAL:
            # A block's number, a clock, a register that no instruction seen so far has written.
            return np.zeros(self.threads, np.uint64) if "id." in operand or "ctaid" in operand else None
        return np.zeros(self.threads, np.uint64) if re.fullmatch(r"[A-Za-z_$][\w$]*", operand) else None

    def _compute(self, head: str, kinds: list[str], operands: list[str]) -> None:
        targets, sources = _registers(operands[0]), operands[1:]
        if len(targets) > 1 or (sources and sources[0].startswith("{")):
            self._packed(targets, sources)
            return
        values = [self._value(one) for one in sources]
        target, rule = targets[0], _RULES.get(head)
        is_float = any(re.fullmatch(r"b?f\d\w*|e\dm\d\w*", kind) for kind in kinds)
        if rule is None or is_float or any(value is None for value in values):
            if head == "selp" and values[:2] and all(one is not None for one in values[:2]):
                self.known[target] = values[0]  # which one it is depends on data: the first is as good
            else:
                self.known[target] = None
            return
        bits, signed = _width(kinds)
        with np.errstate(all="ignore"):
            seen = [value for value in values if value is not None]
            result = rule(kinds, *(_signed(one, bits) if signed else one & _mask(bits) for one in seen))
        out_bits = 64 if "wide" in kinds and bits == 32 else 32 if "wide" in kinds else bits
        if head == "cvt":
            out_bits = _width(kinds[:-1] or kinds)[0]
        self.known[target] = np.asarray(result).astype(np.int64).astype(np.uint64) & _mask(
            1 if head == "setp" else out_bits
        )

    def _packed(self, targets: list[str], sources: list[str]) -> None:
        """mov between one wide register and several narrow ones."""
        parts = [self._value(one) for one in _registers(sources[0])]
        if len(targets) > 1:
            bits, whole = 64 // len(targets), parts[0]
            for index, target in enumerate(targets):
                self.known[target] = (
                    None if whole is None else (whole >> np.uint64(bits * index)) & _mask(bits)
                )
        else:
            bits = 64 // len(parts)
            total: Lanes | None = np.zeros(self.threads, np.uint64)
            for index, part in enumerate(parts):
                total = None if part is None or total is None else total | part << np.uint64(bits * index)
            self.known[targets[0]] = total


def _ways(addresses: Lanes, size: int) -> int:
    """How often one warp repeats an access: 8 and 16 bytes go by halves and quarters, equal words are read once."""
    part = 32 if size <= 4 else 128 // size
    worst = 1
    for begin in range(0, len(addresses), part):
        within = np.arange(max(1, size // 4), dtype=np.uint64)
        words = addresses[begin : begin + part, None] // np.uint64(4) + within
        banks = np.unique(words) % np.uint64(BANKS)
        worst = max(worst, int(np.bincount(banks.astype(np.int64)).max()))
    return worst


def _operands(text: str) -> list[str]:
    """Separated by commas outside of brackets."""
    return [one.strip() for one in re.split(r",\s*(?![^{\[]*[}\]])", text.strip().rstrip("}").strip() if
            text.count("{") < text.count("}") else text.strip())]  # fmt: skip


def _registers(operand: str) -> list[str]:
    return [one.strip().split("|")[0] for one in operand.strip("{} ").split(",")]


def _bytes(kinds: Iterable[str]) -> int:
    count = next((int(kind[1:]) for kind in kinds if re.fullmatch(r"v[248]", kind)), 1)
    bits = next((int(found[1]) for kind in kinds if (found := re.fullmatch(r"[busf]f?(\d+)", kind))), 32)
    return count * bits // 8


def _width(kinds: Sequence[str]) -> tuple[int, bool]:
    """Bits and sign of what an instruction reads: its last type."""
    for kind in reversed(kinds):
        if kind == "pred":
            return 1, False
        if found := re.fullmatch(r"([bus])(\d+)", kind):
            return int(found[2]), found[1] == "s"
    return 64, False


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _signed(value: Lanes, bits: int) -> NDArray[np.int64]:
    shift = np.uint64(64 - bits)
    return (value << shift).view(np.int64) >> np.int64(64 - bits)


def _compared(kinds: Sequence[str], left: Lanes, right: Lanes) -> NDArray[np.bool_]:
    tests = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal}
    return np.asarray(
        tests.get(kinds[0].rstrip("u") if kinds[0] != "eq" else "eq", np.not_equal)(left, right)
    )


def _shift(left: bool) -> "_Rule":
    def shifted(_: Sequence[str], value: Lanes, by: Lanes) -> Lanes:
        by = by.astype(value.dtype)
        return np.asarray(value << by if left else value >> by)

    return shifted


def _divided(kinds: Sequence[str], left: Lanes, right: Lanes) -> Lanes:
    return np.asarray(left // np.where(right == 0, 1, right).astype(left.dtype))


def _field(_: Sequence[str], value: Lanes, at: Lanes, length: Lanes) -> Lanes:
    unsigned = value.astype(np.uint64) >> at.astype(np.uint64)
    return unsigned & ((np.uint64(1) << length.astype(np.uint64)) - np.uint64(1))


_Rule = Callable[..., NDArray[np.generic]]
_RULES: dict[str, _Rule] = {
    "mov": lambda _, value: value,
    "cvta": lambda _, value: value,
    "cvt": lambda _, value: value,
    "not": lambda _, value: ~value,
    "neg": lambda _, value: np.negative(value),
    "abs": lambda _, value: np.abs(value),
    "add": lambda _, left, right: left + right,
    "sub": lambda _, left, right: left - right,
    "mul": lambda kinds, left, right: left * right if "hi" not in kinds else (left * right) >> 32,
    "mad": lambda _, left, right, more: left * right + more,
    "and": lambda _, left, right: left & right,
    "or": lambda _, left, right: left | right,
    "xor": lambda _, left, right: left ^ right,
    "shl": _shift(True),
    "shr": _shift(False),
    "min": lambda _, left, right: np.minimum(left, right),
    "max": lambda _, left, right: np.maximum(left, right),
    "div": _divided,
    "rem": lambda kinds, left, right: left - _divided(kinds, left, right) * right,
    "setp": _compared,
    "selp": lambda _, left, right, which: np.choose(
        (which & np.asarray(1, which.dtype)).astype(np.int64), (right, left)
    ),
    "bfe": _field,
}
