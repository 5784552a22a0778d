"""A StepPlan as bytes, to be read by every rank. Columns are runs of 32-bit numbers; only what a beginning sequence
asks for is an object, and that is pickled once for all readers."""

import pickle
import struct
from itertools import chain
from typing import NamedTuple

from cumulo.engine.decide.plan import NewSlot, StepPlan

_SINGLES = ("end", "slots", "starts", "counts", "draw_rows", "draw_slots", "prompt_logprob_rows", "pool_rows",
            "pool_starts")  # fmt: skip
_TUPLES = {"extend": 2, "replace": 3, "copies": 2, "swap_out": 2, "swap_in": 2}


def pack_plan(plan: StepPlan) -> bytes:
    columns = [getattr(plan, name) for name in _SINGLES]
    if decodes := _all_decode(plan):  # three columns follow from the others
        columns[3:6] = [], [], []
    columns += [
        list(chain.from_iterable(rows)) if (rows := getattr(plan, name)) else rows for name in _TUPLES
    ]
    begins: list[int] = []
    for new in plan.begin:
        begins += (
            new.slot,
            len(new.tokens),
            new.prompt_length,
            len(new.blocks),
            new.sample_index,
            new.adapter,
        )
        begins += new.tokens
        begins += new.blocks
    asked = pickle.dumps([(new.params, new.seed) for new in plan.begin], -1) if plan.begin else b""
    lengths = [plan.index, decodes, len(plan.begin), len(begins), *map(len, columns)]
    # By struct: it takes a third of the time of an array or of numpy.
    numbers = [struct.pack(f"{len(column)}i", *column) for column in (lengths, *columns, begins) if column]
    return b"".join((*numbers, asked))


def unpack_plan(message: bytes | memoryview) -> StepPlan:
    head = 4 + len(_SINGLES) + len(_TUPLES)
    index, decodes, new_slots, begun, *lengths = memoryview(message)[: 4 * head].cast("i").tolist()
    total = head + begun + sum(lengths)
    numbers = memoryview(message)[: 4 * total].cast("i")
    plan, first = StepPlan(index), head
    for name, length in zip((*_SINGLES, *_TUPLES), lengths, strict=True):
        column = numbers[first : first + length].tolist()
        width = _TUPLES.get(name)
        setattr(plan, name, column if width is None else list(zip(*[iter(column)] * width, strict=True)))
        first += length
    if decodes:
        plan.draw_one_each()
    if new_slots:
        asked = pickle.loads(memoryview(message)[4 * total :])
        for params, seed in asked:
            slot, tokens, prompt, blocks, sample, adapter = numbers[first : first + 6].tolist()
            first += 6
            held = numbers[first : first + tokens + blocks].tolist()
            first += tokens + blocks
            new = NewSlot(slot, held[:tokens], prompt, held[tokens:], params, seed, sample, adapter)
            plan.begin.append(new)
    return plan


class AdapterOrder(NamedTuple):
    """Told between plans: every rank puts its part of an adapter into a slot."""

    slot: int
    folder: str
    fingerprint: str  # of what rank 0 has read there


_ADAPTER = struct.pack("i", -(1 << 31))  # no plan has this number


def pack_order(order: AdapterOrder) -> bytes:
    return _ADAPTER + pickle.dumps(tuple(order), -1)


def unpack_message(message: bytes | memoryview) -> StepPlan | AdapterOrder:
    if memoryview(message)[:4] == _ADAPTER:
        return AdapterOrder(*pickle.loads(memoryview(message)[4:]))
    return unpack_plan(message)


def _all_decode(plan: StepPlan) -> bool:
    """Whether every row is one token and draws one, as `StepPlan.draw_one_each` says."""
    rows = len(plan.slots)
    return plan.draw_slots == plan.slots and plan.counts == [1] * rows and plan.draw_rows == list(range(rows))
