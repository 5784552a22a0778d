"""Loads, stores and atomics: regular pointers become vector loads, prefix masks bounds of loops."""

import re
from collections.abc import Callable

from cumulo.compile.backend.emit import Emitter
from cumulo.compile.backend.forms import Bound, Form, Lookup
from cumulo.compile.backend.lanes import Nest
from cumulo.compile.backend.operations import lane_type, memory_type
from cumulo.compile.backend.ttir import TtirOperation, Value

_UNSIGNED_ATOMICS = ("umax", "umin")


class Memory(Emitter):
    def do_tt_load(self, op: TtirOperation) -> None:
        value, pointer = op.results[0], op.operands[0]
        mask = op.operands[1] if len(op.operands) > 1 else None
        other = op.operands[2] if len(op.operands) > 2 else None
        if not value.shape:
            text = f"get(*{self.scalar(pointer)})"
            if mask is not None:
                text = f"{self.scalar(mask)} ? {text} : {self.scalar(other) if other else '0'}"
            self.set_scalar(value, text)
            return
        if value in self.delayed:
            return
        form = self.form(pointer)
        order = _contiguous_last(form, value.shape)
        buffer = self.result(value, order)
        order = tuple(sorted(range(len(value.shape)), key=lambda d: (-buffer.strides[d], d)))

        def write(nest: Nest, rest: list[Lookup]) -> None:
            text = f"get({nest.address(form, pointer)})"
            if rest:
                fallback = nest.lane(other)[0] if other is not None else f"({buffer.lane})0"
                text = f"{nest.condition(rest)} ? {text} : {fallback}"
            nest.put(f"{buffer.lane_at(nest.index)} = {text};")

        def outside() -> None:
            nest = self.nest(value.shape, order)
            nest.put(f"{buffer.lane_at(nest.index)} = {nest.lane(other)[0] if other is not None else '0'};")
            self.out(nest.render())

        self._masked(value.shape, order, mask, write, outside)

    def do_tt_store(self, op: TtirOperation) -> None:
        pointer, value = op.operands[0], op.operands[1]
        mask = op.operands[2] if len(op.operands) > 2 else None
        kind = memory_type(pointer.type.element[1:])
        if not pointer.shape:
            guard = f"if ({self.scalar(mask)}) " if mask is not None else ""
            self.out(f"{guard}*{self.scalar(pointer)} = stored<{kind}>({self.scalar(value)});")
            return
        loads = self.fused.pop(op, [])
        if not loads:
            self._store(pointer, value, mask, kind)
            return
        # Loading in the store's own loop saves a pass, if no lane overwrites what a later one has yet to load.
        tests = [f"may_share_a_loop({self._row(pointer)}, {self._row(load.operands[0])}, {pointer.type.size})"
                 for load in loads]  # fmt: skip
        self.out(f"if ({' && '.join(tests)}) {{")
        names = {load.results[0] for load in loads}
        self.inlined |= names
        self._store(pointer, value, mask, kind)
        self.inlined -= names
        self.out("} else {")
        self.delayed -= names
        for load in loads:
            self.do_tt_load(load)
        self._store(pointer, value, mask, kind)
        self.out("}")

    def _row(self, pointer: Value) -> str:
        form = self.form(pointer)
        return f"{form.root} + {form.start}"

    def _store(self, pointer: Value, value: Value, mask: Value | None, kind: str) -> None:
        form = self.form(pointer)
        order = _contiguous_last(form, pointer.shape)

        def write(nest: Nest, rest: list[Lookup]) -> None:
            guard = f"if ({nest.condition(rest)}) " if rest else ""
            nest.put(f"{guard}{nest.address(form, pointer)} = stored<{kind}>({nest.lane(value)[0]});")

        self._masked(pointer.shape, order, mask, write, None)

    def _masked(
        self,
        shape: tuple[int, ...],
        order: tuple[int, ...],
        mask: Value | None,
        write: Callable[[Nest, list[Lookup]], None],
        outside: Callable[[], None] | None,
    ) -> None:
        """All lanes if the mask lets them pass, which is asked once; otherwise a loop with bounds."""
        bounds, rest = self.forms.mask(mask) if mask is not None else ([], [])
        if not bounds:
            nest = self.nest(shape, order)
            write(nest, rest)
            self.out(nest.render())
            return
        tests, limits = [], []
        for bound in bounds:
            if bound.dim is None:
                test = self.variable("bool", f"{bound.low} < {bound.high}", "full")
                tests.append(test)
                limits.append(Bound(None, 0, f"(int){test}"))
                continue
            extent = shape[bound.dim]
            # several bounds of one dimension: the tighter ones
            earlier = next((limit for limit in limits if limit.dim == bound.dim), None)
            low, high = (earlier.low, earlier.high) if earlier else (0, extent)
            if earlier:
                limits.remove(earlier)
            names = [str(low), str(high)]
            if bound.low != 0:
                names[0] = self.variable("int", f"(int)clamped<int64_t>({bound.low}, {low}, {extent})", "low")
            if bound.high != 1 << 40:
                names[1] = self.variable("int", f"(int)clamped<int64_t>({bound.high}, 0, {high})", "high")
            tests += [
                f"{name} == {whole}"
                for name, whole in zip(names, ("0", str(extent)), strict=True)
                if name != whole
            ]
            limits.append(Bound(bound.dim, *names))
        self.out(f"if ({' && '.join(tests)})")
        nest = self.nest(shape, order)
        write(nest, rest)
        self.out(nest.render())
        self.out("else {")
        if outside is not None:
            outside()
        partial = Nest(self, shape, order, limits)
        write(partial, rest)
        self.out(partial.render())
        self.out("}")

    # -- atomics --------------------------------------------------------------------------------------------------
    def do_tt_atomic_rmw(self, op: TtirOperation) -> None:
        kind = op.text.split(",")[0].split()[-1]
        lane = lane_type(op.results[0].type)
        unsigned = f"(unsigned_of<{lane}>)" if kind in _UNSIGNED_ATOMICS else ""
        changes = {
            "add": "old + {0}", "fadd": "old + {0}", "and": "old & {0}", "or": "old | {0}", "xor": "old ^ {0}",
            "max": "larger<{T}>(old, {0})", "min": "smaller<{T}>(old, {0})", "exch": "{0}",
            "umax": "({T})larger({U}old, {U}{0})", "umin": "({T})smaller({U}old, {U}{0})",
        }  # fmt: skip
        if kind not in changes:
            raise op.refused(f"an atomic {kind}")

        def change(place: str, given: list[str]) -> str:
            text = changes[kind].format(given[0], T=lane, U=unsigned)
            return (
                f"atomically(&{place}, [&]({lane} old) -> {lane} {{ (void)old; return ({lane})({text}); }})"
            )

        self._atomic(op, 1, change)

    def do_tt_atomic_cas(self, op: TtirOperation) -> None:
        lane = lane_type(op.results[0].type)
        self._atomic(
            op, 2, lambda place, given: f"compare_and_swap(&{place}, ({lane}){given[0]}, ({lane}){given[1]})"
        )

    def _atomic(self, op: TtirOperation, values: int, change: Callable[[str, list[str]], str]) -> None:
        pointer, given = op.operands[0], op.operands[1 : 1 + values]
        mask = op.operands[1 + values] if len(op.operands) > 1 + values else None
        result = op.results[0]
        if re.fullmatch(r"\*(i1|f8\w+)", pointer.type.element):
            raise op.refused(f"an atomic on {pointer.type.element[1:]}")
        if not result.shape:
            text = change(f"*{self.scalar(pointer)}", [self.scalar(value) for value in given])
            if mask is not None:
                text = f"{self.scalar(mask)} ? {text} : 0"
            self.set_scalar(result, text)
            return
        nest = self.nest(result.shape)
        place = nest.address(self.form(pointer), pointer)
        text = change(place, [nest.lane(value)[0] for value in given])
        if mask is not None:
            text = f"{nest.lane(mask)[0]} ? {text} : 0"
        if self.uses.get(result):
            text = f"{self.result(result).lane_at(nest.index)} = {text}"
        nest.put(f"{text};")
        self.out(nest.render(vectors=False))


def _contiguous_last(form: Form, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The order of loops in which the innermost walks along memory, if a dimension does."""
    looked_up = {d for lookup in form.rest for d in lookup.dims}
    if isinstance(form.root, Lookup):
        looked_up |= set(form.root.dims)
    dims = list(range(len(shape)))
    near = [d for d in dims if form.strides[d] == 1 and d not in looked_up and shape[d] > 1]
    if near:
        dims.remove(near[-1])
        dims.append(near[-1])
    return tuple(dims)
