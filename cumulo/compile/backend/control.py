"""Functions, branches and loops, and what a loop carries: a scalar, a pointer that moves, or two arrays in turn.

Called by the lowering. A block tensor of pointers that only moves by the same number every time is carried as that
one number. Other block tensors have two arrays: an iteration reads one, writes the other, and they change places.
"""

from dataclasses import dataclass, replace

from cumulo.compile.backend.blocks import BlockRules
from cumulo.compile.backend.forms import Form
from cumulo.compile.backend.lanes import Buffer
from cumulo.compile.backend.operations import lane_type
from cumulo.compile.backend.ttir import TtirBlock, TtirFunction, TtirOperation, Value


@dataclass(slots=True)
class _Slot:
    """One value that a loop carries."""

    argument: Value
    scalar: str = ""  # a scalar's variable, or the start of a moving form
    form: Form | None = None
    now: Buffer | None = None
    next: Buffer | None = None
    in_place: bool = False


class Control(BlockRules):
    def rule(self, op: TtirOperation) -> None:
        raise NotImplementedError

    def __init__(self, found: dict[str, TtirFunction]) -> None:
        super().__init__(found)
        self.returns: list[tuple[str, list[Value]]] = []  # of the functions being written: where, and to what

    # -- functions ------------------------------------------------------------------------------------------------
    def function(self, function: TtirFunction, results: list[Value] | None = None) -> None:
        self.choose(function)
        end = self.fresh("end")
        self.returns.append((end, results or []))
        prefix = self.fresh("L")
        for block in function.blocks:
            for argument in block.args if block is not function.blocks[0] else []:
                if argument.shape:
                    self.buffers[argument] = self.allocate(argument.type)
                else:
                    self.declare(lane_type(argument.type), f"v{argument.id}")
        for block in function.blocks:
            self.out(f"{prefix}{block.label[1:]}: {{")
            for op in block.ops:
                if op.name in ("cf.br", "cf.cond_br"):
                    self._branch(op, prefix, function)
                else:
                    self.rule(op)
            self.out("}")
        self.returns.pop()
        self.out(f"{end}:;")

    def _branch(self, op: TtirOperation, prefix: str, function: TtirFunction) -> None:
        tests = [f"if ({self.scalar(op.operands[0])})", "else"] if op.name == "cf.cond_br" else [""]
        for test, (label, given) in zip(tests, op.targets, strict=True):
            block = next(block for block in function.blocks if block.label == label)
            self.out(f"{test} {{")
            self._assign(block.args, given)
            self.out(f"goto {prefix}{label[1:]};\n}}")

    def _assign(self, targets: list[Value], given: list[Value]) -> None:
        """All at once: a value may read what another one replaces."""
        texts = []
        for value in given:
            if value.shape:
                texts.append(self.make_array(value).name)
            else:
                texts.append(self.variable(lane_type(value.type), self.scalar(value)))
        for target, value, text in zip(targets, given, texts, strict=True):
            if target.shape:
                self.fill(value, self.buffers[target])
            else:
                self.set_scalar(target, text)

    def do_tt_call(self, op: TtirOperation) -> None:
        """A function of its own is written where it is called: its arguments are scalars."""
        name = op.text.split("@")[1].split("(")[0]
        callee = self.found[name.strip('"')]
        self._assign(callee.blocks[0].args, op.operands)
        for result in op.results:
            self.declare(lane_type(result.type), f"v{result.id}")
        self.function(callee, op.results)

    def do_tt_return(self, op: TtirOperation) -> None:
        end, results = self.returns[-1]
        if op.operands:
            self._assign(results, op.operands)
        self.out(f"goto {end};")

    # -- branches -------------------------------------------------------------------------------------------------
    def do_scf_if(self, op: TtirOperation) -> None:
        for result in op.results:
            if result.shape:
                self.result(result)
            else:
                self.declare(lane_type(result.type), f"v{result.id}")
        self.out(f"if ({self.scalar(op.operands[0])}) {{")
        for number, region in enumerate(op.regions):
            if number:
                self.out("} else {")
            for inner in region[0].ops:
                if inner.name == "scf.yield":
                    for result, value in zip(op.results, inner.operands, strict=True):
                        if result.shape:
                            self.fill(value, self.buffers[result])
                        else:
                            self.set_scalar(result, self.scalar(value))
                else:
                    self.rule(inner)
        self.out("}")

    # -- loops ----------------------------------------------------------------------------------------------------
    def do_scf_for(self, op: TtirOperation) -> None:
        block = op.regions[0][0]
        low, high, step = (self.scalar(value) for value in op.operands[:3])
        yields = block.ops[-1].operands
        slots = self._slots(op.operands[3:], block.args[1:], yields, block)
        kind = lane_type(block.args[0].type)
        counter = self.declare(kind, f"v{block.args[0].id}")
        if op.text.lstrip().startswith("unsigned"):
            raise op.refused("an unsigned counter")
        self.out(f"for ({counter} = {low}; {counter} < {high}; {counter} += {step}) {{")
        for inner in block.ops[:-1]:
            self.rule(inner)
        self._carry(slots, yields)
        self.out("}")
        self._after(op.results, slots)

    def do_scf_while(self, op: TtirOperation) -> None:
        before, after = (region[0] for region in op.regions)
        yields = after.ops[-1].operands
        slots = self._slots(op.operands, before.args, None, before)
        self.out("for (;;) {")
        for inner in before.ops[:-1]:
            self.rule(inner)
        condition, *passed = before.ops[-1].operands
        # What the test passes on is what the body reads, and what the loop gives in the end.
        for result, argument, value in zip(op.results, after.args, passed, strict=True):
            if value.shape:
                self.buffers[result] = self.buffers[argument] = self.allocate(value.type)
                self.fill(value, self.buffers[result])
            else:
                self.set_scalar(argument, self.scalar(value))
                self.set_scalar(result, self.scalar(value))
        self.out(f"if (!{self.scalar(condition)}) break;")
        for inner in after.ops[:-1]:
            self.rule(inner)
        self._carry(slots, yields)
        self.out("}")

    def _slots(
        self, starts: list[Value], arguments: list[Value], yields: list[Value] | None, block: TtirBlock
    ) -> list[_Slot]:
        slots = [_Slot(argument) for argument in arguments]
        if yields is not None:
            self._moving(slots, starts, yields)
        for number, (slot, start) in enumerate(zip(slots, starts, strict=True)):
            argument = slot.argument
            if slot.form is not None:
                self.out(f"{slot.scalar} = {self.form(start).start};")
            elif not argument.shape:
                slot.scalar = f"v{argument.id}"
                self.set_scalar(argument, self.scalar(start))
            else:
                slot.now = self.allocate(argument.type)
                self.buffers[argument] = slot.now
                self.fill(start, slot.now)
                value = yields[number] if yields is not None else None
                if value is not None and self._added_in_place(value, argument, block):
                    slot.in_place = True
                    self.in_place[value] = slot.now
                    continue
                slot.next = self.allocate(argument.type)
                if value is not None and value.op in block.ops and value not in self.slots:
                    self.slots[value] = slot.next
        return slots

    def _added_in_place(self, value: Value, argument: Value, block: TtirBlock) -> bool:
        """A sum of products that nobody else reads before it is there."""
        op = value.op
        return (op is not None and op.name == "tt.dot" and op in block.ops
                and op.operands[2] is argument and self.uses.get(argument) == 1)  # fmt: skip

    def _moving(self, slots: list[_Slot], starts: list[Value], yields: list[Value]) -> None:
        """Assume that every index and pointer keeps its strides; drop those that do not, and ask again."""
        trial = {}
        for slot, start in zip(slots, starts, strict=True):
            if slot.argument.shape and (start.type.is_pointer or start.type.element in ("i32", "i64")):
                trial[slot.argument] = self.form(start)
        for argument in trial:
            self.declare("int64_t", f"m{argument.id}")
        before = dict(self.forms.known)
        while trial:
            self.forms.known = dict(before)
            for argument, form in trial.items():
                self.forms.known[argument] = replace(form, start=f"m{argument.id}")
            wrong = []
            for slot, value in zip(slots, yields, strict=True):
                if slot.argument in trial:
                    assumed, found = trial[slot.argument], self.form(value)
                    if (assumed.strides, assumed.rest, assumed.root) != (
                        found.strides,
                        found.rest,
                        found.root,
                    ):
                        wrong.append(slot.argument)
            if not wrong:
                break
            for argument in wrong:
                del trial[argument]
        else:
            self.forms.known = before
        for slot in slots:
            if slot.argument in trial:
                slot.scalar, slot.form = f"m{slot.argument.id}", self.forms.known[slot.argument]

    def _carry(self, slots: list[_Slot], yields: list[Value]) -> None:
        scalars = []
        for slot, value in zip(slots, yields, strict=True):
            if slot.form is not None:
                scalars.append((slot.scalar, self.variable("int64_t", str(self.form(value).start))))
            elif slot.scalar:
                if self.scalar(value) != slot.scalar:
                    kind = lane_type(slot.argument.type)
                    scalars.append((slot.scalar, self.variable(kind, self.scalar(value))))
            elif not slot.in_place and slot.next is not None and self.buffers.get(value) is not slot.next:
                self.fill(value, slot.next)
        for slot in slots:
            if slot.now is not None and slot.next is not None:
                now, other, spare = slot.now.name, slot.next.name, self.fresh("p")
                self.out(f"{{ {slot.now.lane}* {spare} = {now}; {now} = {other}; {other} = {spare}; }}")
        for name, text in scalars:
            self.out(f"{name} = {text};")

    def _after(self, results: list[Value], slots: list[_Slot]) -> None:
        for result, slot in zip(results, slots, strict=True):
            if slot.form is not None:
                self.forms.known[result] = slot.form
            elif slot.now is not None:
                self.buffers[result] = slot.now
            else:
                self.set_scalar(result, slot.scalar)
