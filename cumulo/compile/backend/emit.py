"""What every rule of the lowering writes with: lines of C++, variables, arrays in scratch memory."""

from cumulo.compile.backend.forms import Form
from cumulo.compile.backend.fusion import INLINE, choose_arrays, walk
from cumulo.compile.backend.lanes import Buffer, Nest, Tensors
from cumulo.compile.backend.operations import ELEMENTWISE, LANE_BYTES, expression, lane_type
from cumulo.compile.backend.ttir import TtirFunction, TtirOperation, Type, Value


class Emitter(Tensors):
    ELEMENTWISE, INLINE = ELEMENTWISE, INLINE

    def __init__(self, found: dict[str, TtirFunction]) -> None:
        super().__init__()
        self.found = found
        self.arrays: set[Value] = set()
        self.uses: dict[Value, int] = {}
        self.slots: dict[Value, Buffer] = {}  # results of a loop's body: where its next iteration reads them
        self.fused: dict[
            TtirOperation, list[TtirOperation]
        ] = {}  # loads that are done in the loop of a store
        self.delayed: set[Value] = set()
        self.in_place: dict[Value, Buffer] = {}  # products that add to what the loop carries
        self.declarations: list[str] = []
        self.declared: set[str] = set()
        self.lines: list[str] = []
        self.scratch_bytes = 0
        self.lanes_of_program = 0

    def text(self) -> str:
        return "".join(f"    {line}\n" for line in "\n".join(self.lines).split("\n"))

    def out(self, line: str) -> None:
        self.lines.append(line)

    def choose(self, function: TtirFunction) -> None:
        arrays, fused = choose_arrays(function.blocks)
        self.arrays |= arrays
        known = dict(self.forms.known)  # what a loop carries has no form yet: nothing of this is kept
        for store, loads in fused.items():
            sure = len(store.operands) < 3 or not self.forms.mask(store.operands[2])[1]
            self.fused[store] = [
                load
                for load in loads
                if self.is_row(load.operands[0]) and self.is_row(store.operands[0])
                if sure or len(load.operands) == 1  # a lane that is masked must not be loaded
            ]
            self.delayed |= {load.results[0] for load in self.fused[store]}
        self.forms.known = known
        for op in walk(function.blocks):
            for operand in [*op.operands, *(value for _, given in op.targets for value in given)]:
                self.uses[operand] = self.uses.get(operand, 0) + 1

    def is_row(self, pointer: Value) -> bool:
        """Neighbours in memory from a pointer that is known."""
        form = self.form(pointer)
        moving = [
            (stride, extent) for stride, extent in zip(form.strides, pointer.shape, strict=True) if extent > 1
        ]
        return isinstance(form.root, str) and not form.rest and len(moving) == 1 and moving[0][0] == 1

    # -- scalars --------------------------------------------------------------------------------------------------
    def declare(self, lane: str, name: str) -> str:
        """All variables are declared at the top: a jump may not cross a declaration."""
        if name not in self.declared:
            self.declared.add(name)
            self.declarations.append(f"{lane} {name};")
        return name

    def set_scalar(self, value: Value, text: str) -> None:
        self.out(f"{self.declare(lane_type(value.type), f'v{value.id}')} = {text};")

    def scalar_expression(self, op: TtirOperation) -> str:
        return expression(op, [self.scalar(operand) for operand in op.operands])

    def variable(self, lane: str, text: str, prefix: str = "s") -> str:
        name = self.declare(lane, self.fresh(prefix))
        self.out(f"{name} = {text};")
        return name

    # -- arrays ---------------------------------------------------------------------------------------------------
    def allocate(self, type_: Type, order: tuple[int, ...] | None = None, lane: str | None = None) -> Buffer:
        """Scratch memory for a block tensor; `order`: its dimensions from the slowest to the fastest."""
        lane = lane or lane_type(type_)
        name = self.fresh("b")
        size = (type_.size * LANE_BYTES.get(lane, 8) + 63) // 64 * 64
        # Arrays of a power of two of bytes would all map to the same sets of the cache.
        self.declarations.append(f"{lane}* {name} = ({lane}*)(scratch + {self.scratch_bytes});")
        self.scratch_bytes += size + 64
        strides, step = [0] * len(type_.shape), 1
        for d in reversed(order or range(len(type_.shape))):
            strides[d] = step if type_.shape[d] > 1 else 0
            step *= type_.shape[d]
        return Buffer(name, lane, tuple(strides))

    def order_of(self, value: Value) -> tuple[int, ...] | None:
        """The order of dimensions in the arrays that a value is computed from; None: any."""
        if value in self.buffers:
            strides = self.buffers[value].strides
            if sum(extent > 1 for extent in value.shape) < 2:
                return None
            return tuple(sorted(range(len(strides)), key=lambda d: (-strides[d], d)))
        op = value.op
        if op is None or op.name not in INLINE or not value.shape:
            return None
        if op.name == "tt.trans":
            inner, turned = self.order_of(op.operands[0]), op.integers("order")
            return tuple(turned.index(d) for d in inner) if inner else None
        if op.name not in ELEMENTWISE:
            return None
        return next((order for operand in op.operands if (order := self.order_of(operand))), None)

    def nest(self, shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> Nest:
        size = 1
        for extent in shape:
            size *= extent
        self.lanes_of_program += size
        return Nest(self, shape, order)

    def fill(self, value: Value, buffer: Buffer) -> None:
        """Compute all lanes of a value into an array."""
        order = tuple(sorted(range(len(value.shape)), key=lambda d: (-buffer.strides[d], d)))
        nest = self.nest(value.shape, order)
        text, _ = nest.lane(value)
        nest.put(f"{buffer.lane_at(nest.index)} = {text};")
        self.out(nest.render())

    def result(self, value: Value, order: tuple[int, ...] | None = None) -> Buffer:
        """The array of an operation's result: its loop's slot, or a new one."""
        self.buffers[value] = self.slots.get(value) or self.allocate(value.type, order)
        return self.buffers[value]

    def make_array(self, value: Value) -> Buffer:
        if value not in self.buffers:
            buffer = self.slots.get(value) or self.allocate(value.type, self.order_of(value))
            self.fill(value, buffer)
            self.buffers[value] = buffer
        return self.buffers[value]

    def view(self, value: Value) -> Buffer:
        """An array that holds the value, perhaps with its dimensions in another order."""
        if value not in self.buffers and value.op is not None and value.op.name == "tt.trans":
            inner, order = self.view(value.op.operands[0]), value.op.integers("order")
            return Buffer(inner.name, inner.lane, tuple(inner.strides[d] for d in order))
        return self.make_array(value)

    def form(self, value: Value) -> Form:
        return self.forms.form_of(value)
