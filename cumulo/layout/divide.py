"""Divisors: what would share evenly where a number cannot be shared as asked. Every check of a layout uses it."""


def divisors(number: int, largest: int) -> list[int]:
    """In order, none above `largest`."""
    return [size for size in range(1, min(number, largest) + 1) if number % size == 0]


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of a number that is nearest to `wanted`, the smaller one of two."""
    return min(divisors(number, number), key=lambda size: abs(size - wanted))


def uneven(axis: str, size: int, what: str, count: int) -> str:
    """Says that `size` ranks of an axis cannot share something, and how many could."""
    return f"{axis} {size} cannot share {count} {what} evenly; {axis} {nearest_divisor(count, size)} can"
