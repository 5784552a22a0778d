"""Which block tensors become arrays, and which exist only lane by lane inside the loops of those who read them.

A value is an array where it must be one (it was loaded, reduced, multiplied), where several loops would compute
something expensive again, and where an inner loop would. Called by the lowering.
"""

from collections.abc import Iterator

from cumulo.compile.backend.operations import ELEMENTWISE, cost
from cumulo.compile.backend.ttir import TtirBlock, TtirOperation, Value

VIEWS = {"tt.broadcast", "tt.expand_dims", "tt.trans", "tt.reshape", "tt.splat", "tt.make_range", "arith.constant",
         "tt.join", "tt.split", "tt.cat", "tt.gather"}  # fmt: skip
INLINE = VIEWS | ELEMENTWISE
# Index arithmetic is cheap in every loop, and as an array it would hide that it is regular.
_INDICES = {"tt.addptr", "arith.extsi", "arith.addi", "arith.subi", "arith.muli", "arith.cmpi"}
_SHARED, _REPEATED, _LONGEST = 6, 2, 400  # instructions of a lane that are worth an array


def walk(blocks: list[TtirBlock]) -> Iterator[TtirOperation]:
    for block in blocks:
        for op in block.ops:
            yield op
            for region in op.regions:
                if op.name not in ("tt.reduce", "tt.scan"):
                    yield from walk(region)


def choose_arrays(blocks: list[TtirBlock]) -> tuple[set[Value], dict[TtirOperation, list[TtirOperation]]]:
    """Of the values that could be computed where they are read, those that had better be arrays; and by store, the
    loads that nobody else reads, so that they could be done in its loop."""
    ops = list(walk(blocks))
    users: dict[Value, list[TtirOperation]] = {}
    costs: dict[Value, int] = {}
    for op in ops:
        for operand in [*op.operands, *(value for _, given in op.targets for value in given)]:
            users.setdefault(operand, []).append(op)
        if op.name in INLINE and op.results:
            total = cost(op) + sum(max(0, costs.get(operand, 0)) for operand in set(op.operands))
            # Past the longest the value becomes an array, and its readers begin anew.
            costs.update((result, total if total <= _LONGEST else -1) for result in op.results)
    arrays: set[Value] = set()
    sinks: dict[Value, set[TtirOperation]] = {}
    straight: dict[Value, bool] = {}  # every reader reads the same lane
    fused: dict[TtirOperation, list[TtirOperation]] = {}
    for op in reversed(ops):
        for value in op.results:
            if not value.shape or not (op.name in INLINE or op.name == "tt.load"):
                continue
            reached: set[TtirOperation] = set()
            repeated, straight[value] = False, True
            for user in users.get(value, []):
                if user.name in INLINE and user.results[0].shape and user.results[0] not in arrays:
                    reached |= sinks.get(user.results[0], set())
                    straight[value] &= user.name in ELEMENTWISE and straight[user.results[0]]
                    grows = user.name == "tt.broadcast" and user.results[0].type.size >= 4 * value.type.size
                    repeated |= grows or user.name == "tt.gather"
                else:
                    reached.add(user)
                if user.name == "tt.cat":
                    arrays.add(value)
            sinks[value] = reached
            if op.name == "tt.load":
                sink = next(iter(reached), op)
                if (
                    len(reached) == 1
                    and sink.name == "tt.store"
                    and straight[value]
                    and _together(op, sink, blocks)
                ):
                    fused.setdefault(sink, []).insert(0, op)
            if op.name in VIEWS or op.name in _INDICES or op.name == "tt.load":
                continue
            inner = repeated or any(
                len(s.loops) > len(op.loops) or s.name in ("scf.for", "scf.while") for s in reached
            )
            dear = costs[value] >= _REPEATED if inner else len(reached) > 1 and costs[value] >= _SHARED
            if costs[value] < 0 or dear:
                arrays.add(value)
    return arrays, fused


def _together(load: TtirOperation, store: TtirOperation, blocks: list[TtirBlock]) -> bool:
    """In one block, with the same mask or the load without, and nothing writes memory between them."""
    if len(load.operands) > 1 and load.operands[1:2] != store.operands[2:3]:
        return False
    for block in blocks:
        if load in block.ops:
            between = block.ops[block.ops.index(load) :]
            if store not in between:
                return False
            between = between[: between.index(store)]
            writes = ("tt.store", "tt.atomic", "tt.call", "scf.")
            return not any(op.name.startswith(writes) for op in between)
        for op in block.ops:
            for region in op.regions:
                if _together(load, store, region):
                    return True
    return False
