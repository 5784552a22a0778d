"""SVG text, the one writer of all pictures: elements, escaped text, numbers no longer than a pixel needs."""

from collections.abc import Iterable
from html import escape

XMLNS = "http://www.w3.org/2000/svg"
Points = Iterable[tuple[float, float]]


def tag(element: str, *inside: str, **attributes: object) -> str:
    """An element around `inside`, which is SVG already. `class_` is written class, `text_anchor` text-anchor; None
    is left out."""
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{element}{written}>{''.join(inside)}</{element}>" if inside else f"<{element}{written}/>"


def text(x: float, y: float, content: str, anchor: str | None = None, **attributes: object) -> str:
    return tag("text", escape(content), x=x, y=y, text_anchor=anchor, **attributes)


def upright(x: float, y: float, content: str) -> str:
    """A vertical axis' label, read from below and centred."""
    turned = f"translate({_value(x)} {_value(y)}) rotate(-90)"
    return tag("text", escape(content), transform=turned, text_anchor="middle")


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    return tag("line", class_=class_, x1=x1, y1=y1, x2=x2, y2=y2)


def polyline(points: Points, class_: str) -> str:
    return tag("polyline", class_=class_, points=" ".join(f"{_value(x)},{_value(y)}" for x, y in points))


def dot(x: float, y: float, radius: float, tip: str = "", **attributes: object) -> str:
    return tag("circle", *([title(tip)] if tip else []), cx=x, cy=y, r=radius, **attributes)


def title(content: str) -> str:
    """What the pointer tells where it rests on the element around this."""
    return tag("title", escape(content))


def picture(width: float, height: float, *inside: str, label: str | None = None, **attributes: object) -> str:
    """The whole drawing. `label`: what a screen reader says."""
    role = None if label is None else "img"
    box = f"0 0 {_value(width)} {_value(height)}"
    return tag("svg", *inside, viewBox=box, role=role, aria_label=label, **attributes)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return escape(str(value))
