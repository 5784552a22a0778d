"""StepWords: a step's plan as one array of int32 words, so that one copy takes it to the device. Used by
CudaRunner.

A CUDA graph is captured for fixed sizes, so a step is rounded up to a shape: rows, tokens and draws that only
fill it up have slot -1 and do nothing. The layout of the words follows from the shape alone.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cumulo.engine.decide.plan import Rounds, StepPlan, round_rows, round_tokens
from cumulo.engine.play.slot_table import StepRows
from cumulo.engine.sampling.distribution import Ints

# Columns of a draw, in the sampling kernel's order (kernels/cuda/sampling/sample.py). Floats travel as their bits.
DRAW_WORDS = (
    "slot",
    "position",
    "temperature",
    "seed_low",
    "seed_high",
    "sample_index",
    "top_k",
    "top_p",
    "min_p",
)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step is rounded up to."""

    tokens: int
    rows: int
    draws: int
    decodes_only: bool = False  # every row is one token
    cuts: bool = False  # some draw has top-k, top-p or min-p
    adapters: bool = False  # some row has an adapter
    follows: bool = False  # a draft head sees the tokens
    rounds: Rounds | None = None  # ... and drafts, in as many rounds
    greedy: bool = False  # ... whose draws are all greedy, so that nobody needs their logits
    # Of data-parallel attention: ranks that have different rows; the sizes above are one's,
    data_ranks: int = 0
    all_tokens: int = 0  # ... and what tokens of all of them are rounded up to

    @property
    def plain_words(self) -> int:
        """Without those about data-parallel ranks, which come last."""
        return 5 * self.rows + 1 + self.draws * (1 + len(DRAW_WORDS))

    @property
    def words(self) -> int:
        return self.plain_words + (self.data_ranks + 1 + self.draws if self.data_ranks else 0)


def shape_of(
    tokens: int, rows: int, draws: int, most: StepShape, cuts: bool = False, decodes_only: bool | None = None
) -> StepShape:
    """The shape for a step of so many, none larger than in `most`, which every step must fit into. `decodes_only`:
    where the numbers do not say it, as they are the largest of several ranks'."""
    if tokens > most.tokens or rows > most.rows or draws > most.draws:
        raise RuntimeError(
            f"a step of {tokens} tokens, {rows} rows and {draws} draws does not fit into buffers for "
            f"{most.tokens}, {most.rows} and {most.draws}"
        )
    if decodes_only is None:
        decodes_only = tokens == rows
    shape_rows = min(round_rows(rows), most.rows, most.tokens)  # of decodes alone, rows are tokens
    return StepShape(
        shape_rows if decodes_only else min(round_tokens(tokens), most.tokens),
        shape_rows,
        min(round_rows(draws), most.draws) if draws else 0,
        decodes_only,
        cuts,
    )


def pack(
    out: NDArray[np.int32],
    shape: StepShape,
    rows: StepRows,
    new_blocks: Mapping[int, tuple[int, int]],
    logit_rows: Ints,
    draws: NDArray[np.int32],
) -> None:
    """Fill the first `shape.words` of `out`. `new_blocks`: by row, the table index and block it gained."""
    count = len(rows.slots)
    size = shape.rows
    slots, starts = out[:size], out[size : 2 * size]
    query_starts = out[2 * size : 3 * size + 1]
    indices, blocks = out[3 * size + 1 : 4 * size + 1], out[4 * size + 1 : 5 * size + 1]
    slots[:count], slots[count:] = rows.slots, -1
    starts[:count], starts[count:] = rows.starts, 0
    query_starts[: count + 1], query_starts[count + 1 :] = rows.query_starts, rows.query_starts[-1]
    indices[:] = -1
    for row, (index, block) in new_blocks.items():
        indices[row], blocks[row] = index, block
    rest = out[5 * size + 1 : shape.plain_words]
    wanted, columns = rest[: shape.draws], rest[shape.draws :].reshape(shape.draws, len(DRAW_WORDS))
    wanted[: len(logit_rows)], wanted[len(logit_rows) :] = logit_rows, 0
    columns[: len(draws)] = draws
    columns[len(draws) :] = 0
    columns[len(draws) :, 0] = -1


def pack_split(out: NDArray[np.int32], shape: StepShape, shares: Ints, owners: Ints) -> None:
    """Behind what `pack` has filled: how many tokens each data-parallel rank has, and which has each draw's row."""
    words = out[shape.plain_words : shape.words]
    starts, owner_words = words[: shape.data_ranks + 1], words[shape.data_ranks + 1 :]
    starts[0] = 0
    np.cumsum(shares, out=starts[1:])
    owner_words[: len(owners)], owner_words[len(owners) :] = owners, 0


def draw_words(columns: NDArray[np.void], slots: Ints, positions: Ints) -> NDArray[np.int32]:
    """DRAW_WORDS of every draw, from the slot table's columns of the drawing slots."""
    words = np.empty((len(slots), len(DRAW_WORDS)), dtype=np.int32)
    words[:, 0], words[:, 1] = slots, positions
    temperature = np.where(columns["greedy"], 0.0, columns["temperature"])
    words[:, 2] = temperature.astype(np.float32).view(np.int32)
    words[:, 3:5] = columns["seed"].astype("<u8").view("<i4").reshape(-1, 2)
    words[:, 5], words[:, 6] = columns["sample_index"], np.minimum(columns["top_k"], np.iinfo(np.int32).max)
    words[:, 7] = _round_down(columns["top_p"]).view(np.int32)
    words[:, 8] = _round_down(columns["min_p"]).view(np.int32)
    return words


def _round_down(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """A mass that equal tokens reach exactly must not come out of their reach."""
    rounded = values.astype(np.float32)
    return np.where(rounded > values, np.nextafter(rounded, np.float32(0)), rounded)


def have_cuts(columns: NDArray[np.void], vocabulary: int) -> NDArray[np.bool_]:
    """Draws that top-k, top-p or min-p restrict."""
    cut = (columns["top_k"] > 0) & (columns["top_k"] < vocabulary)
    cut |= (columns["top_p"] < 1) | (columns["min_p"] > 0)
    drawn: NDArray[np.bool_] = cut & ~columns["greedy"]
    return drawn


def gained_blocks(
    plan: StepPlan, held: Ints
) -> tuple[dict[int, tuple[int, int]], list[tuple[int, int, int]]]:
    """The plan's new blocks: by row, at most one each, as (table index, block); and the rest as (slot, index,
    block).

    `held` is the number of blocks by slot before the plan; a slot that begins in it has those it begins with.
    """
    if not plan.extend:
        return {}, [(slot, index, block) for slot, index, block in plan.replace]
    begun = {new.slot: len(new.blocks) for new in plan.begin}
    counts: dict[int, int] = {}
    row_of = {slot: row for row, slot in enumerate(plan.slots)}
    of_row: dict[int, tuple[int, int]] = {}
    rest: list[tuple[int, int, int]] = []
    for slot, block in plan.extend:
        index = counts.get(slot)
        if index is None:
            index = begun[slot] if slot in begun else int(held[slot])
        counts[slot] = index + 1
        row = row_of.get(slot)
        if row is None or row in of_row:
            rest.append((slot, index, block))
        else:
            of_row[row] = index, block
    return of_row, rest + [(slot, index, block) for slot, index, block in plan.replace]


_ROWS = (1, 2, 4, 16)  # beside every number of tokens: what is rounded to less than 16 may be compiled apart


def sizes(most: int, rounded: Callable[[int], int]) -> list[int]:
    """Every size that steps of up to `most` are rounded to."""
    found, count = list[int](), 1
    while count <= most:
        found.append(min(rounded(count), most))
        count = found[-1] + 1
    return found


def warm_shapes(most: StepShape, adapters: bool) -> list[StepShape]:
    """Shapes that between them use every kernel that some step within `most` uses, decoding alone first."""
    shapes = dict.fromkeys(_without_adapters(most))
    if adapters:
        shapes |= dict.fromkeys(replace(shape, adapters=True) for shape in shapes)
    return list(shapes)


def _without_adapters(most: StepShape) -> Iterator[StepShape]:
    rows_sizes = sizes(min(most.rows, most.tokens), round_rows)
    for cuts in (False, True):
        for rows in rows_sizes:
            if rows <= most.draws:
                yield StepShape(rows, rows, rows, decodes_only=True, cuts=cuts)
    for tokens in sizes(most.tokens, round_tokens):
        for rows in {min(rows, most.rows) for rows in _ROWS if rows <= tokens}:
            for draws in (0, min(rows, most.draws)):
                yield StepShape(tokens, rows, draws)
    for rows in rows_sizes:
        tokens = min(round_tokens(2 * rows), most.tokens)
        for cuts in (False, True):
            yield StepShape(tokens, rows, min(rows, most.draws), cuts=cuts)
    for draws in sizes(most.draws, round_rows):  # more draws than rows: drafts
        tokens = min(round_tokens(2 * draws), most.tokens)
        yield StepShape(tokens, min(round_rows(draws), rows_sizes[-1]), draws)
