"""Which step shapes to play before the first request, so that no request waits for a kernel to be compiled.

A kernel is compiled per tile size, which follows the number of tokens, rows or draws alone, so every size is met
once beside the smallest others; combinations need nothing new. Read by CudaRunner.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from cumulo.engine.play.cuda.step_words import StepShape, round_rows, round_tokens

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
