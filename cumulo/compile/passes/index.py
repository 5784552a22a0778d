"""Where an element lies: linear forms over a tile's row `x` and column `y`, simplified so that views of views cost
nothing. The writer of Triton code asks it for every load and store.

An index is a sum of atoms times numbers. An atom is `x`, `y` or an IndexPart: (form // stride) % size. Splitting a
number into parts and putting them together again, as a view to another shape does, gives back the number.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IndexForm:
    terms: tuple[tuple["IndexPart | str", int], ...] = ()  # atom, coefficient; sorted by text
    constant: int = 0

    def __add__(self, other: "IndexForm") -> "IndexForm":
        return _form([*self.terms, *other.terms], self.constant + other.constant)

    def __mul__(self, factor: int) -> "IndexForm":
        if factor == 0:
            return IndexForm()
        return IndexForm(
            tuple((atom, number * factor) for atom, number in self.terms), self.constant * factor
        )

    def uses(self, variable: str) -> bool:
        return any(
            atom.inside.uses(variable) if isinstance(atom, IndexPart) else atom == variable
            for atom, _ in self.terms
        )

    def splits(self, variable: str) -> bool:
        """Whether the variable is divided somewhere: neighbours are then no neighbours in memory."""
        return any(isinstance(atom, IndexPart) and atom.inside.uses(variable) for atom, _ in self.terms)

    def __str__(self) -> str:
        words = [str(atom) if number == 1 else f"{atom} * {number}" for atom, number in self.terms]
        if self.constant or not words:
            words.append(str(self.constant))
        return " + ".join(words).replace("+ -", "- ")


@dataclass(frozen=True, slots=True)
class IndexPart:
    """(inside // stride) % size; without a size the last, which nothing limits."""

    inside: IndexForm
    stride: int
    size: int | None

    def __str__(self) -> str:
        text = str(self.inside)
        text = f"({text})" if " " in text else text
        text = text if self.stride == 1 else f"{text} // {self.stride}"
        return f"({text})" if self.size is None else f"({text} % {self.size})"


ROW, COLUMN = IndexForm((("x", 1),)), IndexForm((("y", 1),))


def number(constant: int) -> IndexForm:
    return IndexForm((), constant)


def split(form: IndexForm, sizes: tuple[int, ...], limits: dict[str, int]) -> tuple[IndexForm, ...]:
    """The coordinates in a shape of the element with this number. `limits`: x and y are less than these."""
    parts, stride = [], 1
    for place in range(len(sizes) - 1, -1, -1):
        size = sizes[place]
        first = all(one == 1 for one in sizes[:place])
        parts.append(number(0) if size == 1 else _part(form, stride, None if first else size, limits))
        stride *= size
    return tuple(reversed(parts))


def _part(form: IndexForm, stride: int, size: int | None, limits: dict[str, int]) -> IndexForm:
    """(form // stride) % size, simplified: with form = d q + r, where d divides the stride and r stays below d, it
    is (q // (stride / d)) % size."""
    terms = sorted(form.terms, key=lambda term: -abs(term[1]))
    for count in range(len(terms), -1, -1):
        divisor = math.gcd(stride, *(factor for _, factor in terms[:count]))
        rest = IndexForm(tuple(terms[count:]), form.constant % divisor)
        most = _most(rest, limits)
        if divisor > 1 and most is not None and most < divisor:
            high = tuple((atom, factor // divisor) for atom, factor in terms[:count])
            return _part(IndexForm(high, form.constant // divisor), stride // divisor, size, limits)
    if size is not None:
        # Multiples of stride * size go away; so does the remainder, where the rest stays within it.
        period = stride * size
        kept = IndexForm(tuple(term for term in form.terms if term[1] % period), form.constant % period)
        most = _most(kept, limits)
        if most is not None and kept != form:
            return _part(kept, stride, size, limits)
        if most is not None and most < period:
            size = None
    if stride == 1 and size is None:
        return form
    return _form([(IndexPart(form, stride, size), 1)], 0)


def _most(form: IndexForm, limits: dict[str, int]) -> int | None:
    total = form.constant
    for atom, factor in form.terms:
        if factor < 0:
            return None
        if isinstance(atom, IndexPart):
            if atom.size is None:
                inside = _most(atom.inside, limits)
                if inside is None:
                    return None
                total += factor * (inside // atom.stride)
            else:
                total += factor * (atom.size - 1)
        else:
            total += factor * (limits[atom] - 1)
    return total if form.constant >= 0 else None


def _form(terms: list[tuple["IndexPart | str", int]], constant: int) -> IndexForm:
    """Equal atoms summed, and neighbouring parts of one number joined."""
    sums: dict[IndexPart | str, int] = {}
    for atom, factor in terms:
        sums[atom] = sums.get(atom, 0) + factor
    joined = True
    while joined:
        joined = False
        parts = [atom for atom in sums if isinstance(atom, IndexPart)]
        for low in parts:
            for high in parts:
                if (
                    low.inside == high.inside
                    and low.size is not None
                    and high is not low
                    and high.stride == low.stride * low.size
                    and sums[high] == sums[low] * low.size
                ):
                    factor = sums.pop(low)
                    sums.pop(high)
                    size = None if high.size is None else high.size * low.size
                    if low.stride == 1 and size is None:
                        for atom, inner in low.inside.terms:
                            sums[atom] = sums.get(atom, 0) + inner * factor
                        constant += low.inside.constant * factor
                    else:
                        atom = IndexPart(low.inside, low.stride, size)
                        sums[atom] = sums.get(atom, 0) + factor
                    joined = True
                    break
            if joined:
                break
    kept = [(atom, factor) for atom, factor in sums.items() if factor]
    return IndexForm(tuple(sorted(kept, key=lambda term: str(term[0]))), constant)
