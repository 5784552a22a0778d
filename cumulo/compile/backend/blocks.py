"""Reductions, scans, matrix products and other operations that turn arrays into arrays. Called by the lowering."""

import re

from cumulo.compile.backend.lanes import Buffer, Index, Nest, region_result
from cumulo.compile.backend.memory import Memory
from cumulo.compile.backend.operations import lane_type, memory_type
from cumulo.compile.backend.ttir import TtirOperation, Value

_ACCUMULATORS = 64  # lanes of a reduction that run side by side


class BlockRules(Memory):
    # -- reductions -----------------------------------------------------------------------------------------------
    def do_tt_reduce(self, op: TtirOperation) -> None:
        axis, shape = op.integer("axis"), op.operands[0].shape
        extent = shape[axis]
        order = next(
            (found for value in op.operands if (found := self.order_of(value))), tuple(range(len(shape)))
        )
        outer = [d for d in order if d != axis and shape[d] > 1]
        out_order = tuple(d - (d > axis) for d in order if d != axis)
        results = [self.result(value, out_order) if value.shape else None for value in op.results]
        if not outer or order[-1] == axis or shape[outer[-1]] < 4:
            self._reduce_rows(op, axis, extent, outer, results)
        else:
            self._reduce_columns(op, axis, extent, outer, results)

    def _combine(self, op: TtirOperation, nest: Nest, given: list[str]) -> list[str]:
        return region_result(self, nest, op.regions[0][0], given, len(nest.loops), self.scalar)

    def _reduce_rows(
        self, op: TtirOperation, axis: int, extent: int, outer: list[int], results: list[Buffer | None]
    ) -> None:
        """Along the innermost dimension: accumulators side by side, then halves onto halves."""
        shape, width = op.operands[0].shape, min(extent, _ACCUMULATORS)
        lanes = [lane_type(operand.type) for operand in op.operands]
        sums = [self.fresh("a") for _ in lanes]
        row = self.nest(shape, (*outer, axis, *(d for d in range(len(shape)) if shape[d] == 1 and d != axis)))
        opening = [f"alignas(64) {lane} {name}[{width}];" for lane, name in zip(lanes, sums, strict=True)]

        def part(start: str) -> str:
            """One chunk of a row, inside the loops over the other dimensions."""
            nest = Nest(self, tuple(width if d == axis else 1 for d in range(len(shape))), (axis,))
            index = [(text, 0) for text, _ in row.index]
            if width > 1:
                index[axis] = (f"({start} + i{axis})" if start != "0" else f"i{axis}", 1)
            place: tuple[Index, ...] = tuple(index)
            values = [nest.lane(operand, place)[0] for operand in op.operands]
            at = f"i{axis}" if width > 1 else "0"
            if start != "0":
                values = self._combine(op, nest, [f"{name}[{at}]" for name in sums] + values)
            for name, text in zip(sums, values, strict=True):
                nest.put(f"{name}[{at}] = {text};")
            return nest.render()

        body = [*opening, part("0")]
        if extent > width:
            body += [f"for (int c = {width}; c < {extent}; c += {width})", part("c")]
        half = width // 2
        while half:
            nest = Nest(self, (half,))
            at = nest.index[0][0]
            first = [f"{name}[{at}]" for name in sums]
            second = [f"{name}[{at} + {half}]" for name in sums]
            for name, text in zip(first, self._combine(op, nest, first + second), strict=True):
                nest.put(f"{name} = {text};")
            body.append(nest.render())
            half //= 2
        out_index = tuple(row.index[d] for d in range(len(shape)) if d != axis)
        for value, buffer, name in zip(op.results, results, sums, strict=True):
            place = (
                buffer.lane_at(out_index) if buffer else self.declare(lane_type(value.type), f"v{value.id}")
            )
            body.append(f"{place} = {name}[0];")
        loops = "".join(f"for (int i{d} = 0; i{d} < {shape[d]}; ++i{d})\n" for d in outer)
        self.out(loops + "{\n" + "\n".join(body) + "\n}")

    def _reduce_columns(
        self, op: TtirOperation, axis: int, extent: int, outer: list[int], results: list[Buffer | None]
    ) -> None:
        """Along another dimension: its lanes are added one after another to a row of results."""
        shape = op.operands[0].shape
        for start, end in ((0, 1), (1, extent)):
            if start == end:
                continue
            once = tuple(1 if d == axis else e for d, e in enumerate(shape)) if start == 0 else shape
            nest = self.nest(once, (*outer[:-1], axis, outer[-1]))
            if start:
                nest.ranges[axis] = (str(start), str(end))
            out_index = tuple(nest.index[d] for d in range(len(shape)) if d != axis)
            values = [nest.lane(operand)[0] for operand in op.operands]
            places = [buffer.lane_at(out_index) for buffer in results if buffer]
            if start:
                values = self._combine(op, nest, places + values)
            for place, text in zip(places, values, strict=True):
                nest.put(f"{place} = {text};")
            self.out(nest.render())

    def do_tt_scan(self, op: TtirOperation) -> None:
        axis, shape = op.integer("axis"), op.operands[0].shape
        extent = shape[axis]
        results = [self.result(value) for value in op.results]
        others = tuple(d for d in range(len(shape)) if d != axis)
        inner = bool(others) and axis != len(shape) - 1
        order = (*others[:-1], axis, others[-1]) if inner else (*others, axis)
        backwards = "reverse = true" in op.text
        nest = self.nest(shape, order)
        at = f"({extent - 1} - i{axis})" if backwards else f"i{axis}"
        index = tuple((at, level) if d == axis and extent > 1 else (text, level)
                      for d, (text, level) in enumerate(nest.index))  # fmt: skip
        before = tuple((f"({at} {'+' if backwards else '-'} 1)", level) if d == axis else (text, level)
                       for d, (text, level) in enumerate(index))  # fmt: skip
        values = [nest.lane(operand, index)[0] for operand in op.operands]
        kinds = [lane_type(operand.type) for operand in op.operands]
        if extent == 1:
            combined = values
        else:
            earlier = []
            for buffer, kind, text in zip(results, kinds, values, strict=True):
                earlier.append(self.fresh("t"))
                # the first lane combines with itself, and that is thrown away
                nest.put(f"const {kind} {earlier[-1]} = i{axis} ? {buffer.lane_at(before)} : {text};")
            combined = [f"i{axis} ? {new} : {text}"
                        for new, text in
                        zip(self._combine(op, nest, earlier + values), values, strict=True)]  # fmt: skip
        for buffer, text in zip(results, combined, strict=True):
            nest.put(f"{buffer.lane_at(index)} = {text};")
        self.out(nest.render(vectors=inner and nest.loops[-1:] != [axis]))

    # -- matrix products ------------------------------------------------------------------------------------------
    def do_tt_dot(self, op: TtirOperation) -> None:
        a_value, b_value, c_value = op.operands
        result = op.results[0]
        a, b = self.view(a_value), self.view(b_value)
        rows, inner = a_value.shape[-2:]
        columns = b_value.shape[-1]
        slot = self.in_place.get(result)
        # Columns of b as neighbours, or (the product transposed) rows of a; else the smaller one is copied.
        turned = b.strides[-1] != 1 and columns > 1 and slot is None and result not in self.slots
        if turned:
            if a.strides[-2] != 1 and rows > 1:
                turned = rows <= columns
                a, b = (self._copied(a_value, a, True), b) if turned else (a, self._copied(b_value, b, False))
        elif b.strides[-1] != 1 and columns > 1:
            b = self._copied(b_value, b, False)
        rank = len(result.shape)
        order = (*range(rank - 2), rank - 1, rank - 2) if turned else tuple(range(rank))
        if slot is not None:
            self.buffers[result] = c = slot
        else:
            self.buffers[result] = c = self.slots.get(result) or self.allocate(result.type, order)
            self.fill(c_value, c)
        if turned:
            call = (columns, rows, inner, b, b.strides[-1], b.strides[-2], a, a.strides[-1], c, c.strides[-1])
        else:
            call = (rows, columns, inner, a, a.strides[-2], a.strides[-1], b, b.strides[-2], c, c.strides[-2])
        m, n, k, left, left_row, left_column, right, right_row, out, out_row = call
        self.lanes_of_program += rows * columns * inner // 8
        texts = [buffer.name for buffer in (left, right, out)]
        batch = result.shape[0] if rank == 3 else 1
        if batch > 1:
            texts = [f"{buffer.name} + z * {buffer.strides[0]}" for buffer in (left, right, out)]
            self.out(f"for (int z = 0; z < {batch}; ++z)")
        x, y, z = texts
        self.out(f"dot<{m}, {n}, {k}>({x}, {left_row}, {left_column}, {y}, {right_row}, {z}, {out_row});")
        if result.type.element in ("f16", "bf16"):
            self.out(f"for (int i = 0; i < {result.type.size}; ++i) {out.name}[i] = "
                     f"rounded<{memory_type(result.type.element)}>({out.name}[i]);")  # fmt: skip

    def _copied(self, value: Value, buffer: Buffer, turned: bool) -> Buffer:
        """Row by row, or column by column."""
        shape = value.shape
        if len(shape) == 3:
            copy = self.allocate(value.type, (0, 2, 1) if turned else (0, 1, 2))
            self.fill(value, copy)
            return copy
        copy = self.allocate(value.type, (1, 0) if turned else (0, 1))
        d = (1, 0) if turned else (0, 1)
        self.out(f"copy_matrix({copy.name}, {buffer.name}, {shape[d[0]]}, {shape[d[1]]}, "
                 f"{buffer.strides[d[0]]}, {buffer.strides[d[1]]});")  # fmt: skip
        return copy

    # -- others ---------------------------------------------------------------------------------------------------
    def do_tt_histogram(self, op: TtirOperation) -> None:
        value, result = op.operands[0], op.results[0]
        buffer = self.result(result)
        self.out(f"memset({buffer.name}, 0, sizeof({buffer.lane}) * {result.type.size});")
        nest = self.nest(value.shape)
        text, _ = nest.lane(value)
        guard = f" && {nest.lane(op.operands[1])[0]}" if len(op.operands) > 1 else ""
        nest.put(f"if ((uint64_t)(int64_t){text} < {result.type.size}{guard}) ++{buffer.name}[{text}];")
        self.out(nest.render(vectors=False))

    def do_tt_unsplat(self, op: TtirOperation) -> None:
        value = op.operands[0]
        nest = Nest(self, value.shape)
        nest.put(
            f"{self.declare(lane_type(op.results[0].type), f'v{op.results[0].id}')} = {nest.lane(value)[0]};"
        )
        self.out(nest.render())

    def do_tt_get_program_id(self, op: TtirOperation) -> None:
        self._of_grid(op, "program_id")

    def do_tt_get_num_programs(self, op: TtirOperation) -> None:
        self._of_grid(op, "programs")

    def _of_grid(self, op: TtirOperation, name: str) -> None:
        self.set_scalar(op.results[0], f"{name}[{'xyz'.index(op.text.split()[0])}]")

    def do_arith_constant(self, op: TtirOperation) -> None:
        pass  # written where it is read

    def do_tt_print(self, op: TtirOperation) -> None:
        found = re.search(r'"((?:[^"\\]|\\.)*)"', op.text)
        prefix = (found[1] if found else "").replace("%", "%%")
        where = "pid (%d, %d, %d)"
        ids = "program_id[0], program_id[1], program_id[2]"
        if not op.operands:
            self.out(f'printf("{where}{prefix}\\n", {ids});')
            return
        for value in op.operands:
            nest = self.nest(value.shape)
            form, cast = ("%g", "double") if value.type.is_float else ("%lld", "long long")
            at = "".join(f", {text}" for text, _ in nest.index)
            idx = " idx (" + ", ".join("%d" for _ in nest.index) + ")" if value.shape else ""
            nest.put(f'printf("{where}{idx}{prefix}{form}\\n", {ids}{at}, ({cast}){nest.lane(value)[0]});')
            self.out(nest.render(vectors=False))

    def do_tt_assert(self, op: TtirOperation) -> None:
        nest = self.nest(op.operands[0].shape)
        found = re.search(r'"((?:[^"\\]|\\.)*)"', op.text)
        nest.put(
            f'if (!{nest.lane(op.operands[0])[0]}) problem = "{found[1] if found else ""} ({op.location})";'
        )
        self.out(nest.render(vectors=False))

    def _nothing(self, op: TtirOperation) -> None:
        """The threads of a GPU's program must wait for each other here; ours is one thread."""

    do_gpu_barrier = do_ttg_barrier = do_ttg_local_barrier = _nothing

    def do_llvm_intr_assume(self, op: TtirOperation) -> None:
        pass

    def do_ub_poison(self, op: TtirOperation) -> None:
        value = op.results[0]
        if value.shape:
            buffer = self.result(value)
            self.out(f"memset({buffer.name}, 0, sizeof({buffer.lane}) * {value.type.size});")
            return
        self.set_scalar(value, "0")
