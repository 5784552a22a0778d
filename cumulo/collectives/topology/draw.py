"""A machine as SVG: NUMA nodes with their GPUs and cards, NVLink above, PCIe paths below. `cumulo
topology` writes it."""

from cumulo.base import svg
from cumulo.collectives.topology.machine_graph import MachineGraph, links

_BOX, _GAP, _TOP = 92, 14, 120
_COLOURS = {"PIX": "#16a34a", "PXB": "#65a30d", "PHB": "#d97706", "NODE": "#ea580c", "SYS": "#dc2626"}


def draw_machine(machine: MachineGraph, title: str) -> str:
    order = sorted(range(len(machine.gpus)), key=lambda gpu: (machine.gpus[gpu].numa or 0, gpu))
    width = max(6, len(order), len(machine.cards)) * (_BOX + _GAP) + 80
    x = {gpu: 40 + at * (_BOX + _GAP) for at, gpu in enumerate(order)}
    parts = [
        svg.tag("rect", width=width, height=420, fill="#ffffff"),
        svg.text(40, 28, title, font_size=16, font_weight="bold"),
    ]
    parts += _nvlinks(machine, x)
    for gpu, left in x.items():
        place = machine.gpus[gpu]
        parts.append(
            svg.tag("rect", x=left, y=_TOP, width=_BOX, height=50, rx=6, fill="#dcfce7", stroke="#16a34a")
        )
        parts.append(svg.text(left + _BOX / 2, _TOP + 22, place.name, "middle", font_weight="bold"))
        where = f"NUMA {place.numa}" if place.numa is not None else place.bus
        parts.append(svg.text(left + _BOX / 2, _TOP + 40, where, "middle", font_size=10))
    parts += _cards(machine, x)
    legend = [(f"GPU to card: {kind}", colour) for kind, colour in _COLOURS.items()]
    for at, (name, colour) in enumerate(legend):
        left = 40 + at * 150
        parts.append(svg.tag("rect", x=left, y=390, width=12, height=12, fill=colour))
        parts.append(svg.text(left + 18, 400, name))
    return svg.picture(
        width, 420, *parts, label=title, xmlns=svg.XMLNS, font_family="sans-serif", font_size=12
    )


def _nvlinks(machine: MachineGraph, x: dict[int, int]) -> list[str]:
    joined = [gpu for gpu in x if any(links(machine.near.get((gpu, other), "")) for other in x)]
    if not joined:
        return []
    parts = []
    if machine.switched:
        left, right = min(x[gpu] for gpu in joined), max(x[gpu] for gpu in joined) + _BOX
        parts.append(
            svg.tag(
                "rect", x=left, y=50, width=right - left, height=28, rx=6, fill="#dbeafe", stroke="#2563eb"
            )
        )
        most = max(links(kind) for kind in machine.near.values())
        text = f"NVSwitch: {most} NVLinks to each GPU, {most * machine.nvlink_gbps:.0f} GB/s each way"
        parts.append(svg.text((left + right) / 2, 69, text, "middle"))
        for gpu in joined:
            middle = x[gpu] + _BOX / 2
            parts.append(svg.tag("path", d=f"M{middle:.0f} 78V{_TOP}", stroke="#2563eb", stroke_width=4))
        return parts
    for (one, other), kind in machine.near.items():
        if one < other and links(kind):
            a, b = x[one] + _BOX / 2, x[other] + _BOX / 2
            high = _TOP - 14 - min(60, abs(b - a) / 8)
            curve = f"M{a:.0f} {_TOP}Q{(a + b) / 2:.0f} {high:.0f} {b:.0f} {_TOP}"
            parts.append(
                svg.tag(
                    "path",
                    svg.title(kind),
                    d=curve,
                    fill="none",
                    stroke="#2563eb",
                    stroke_width=1 + links(kind) / 3,
                )
            )
    return parts


def _cards(machine: MachineGraph, x: dict[int, int]) -> list[str]:
    parts = []
    for card, place in enumerate(machine.cards):
        left = 40 + card * (_BOX + _GAP)
        parts.append(
            svg.tag("rect", x=left, y=290, width=_BOX, height=44, rx=6, fill="#fef3c7", stroke="#d97706")
        )
        parts.append(svg.text(left + _BOX / 2, 309, place.name, "middle", font_weight="bold"))
        speed = f"{place.gbps:.0f} Gbit/s" if place.gbps else ""
        parts.append(svg.text(left + _BOX / 2, 326, speed, "middle", font_size=10))
    for gpu, left in x.items():
        nearest = machine.nearest_card(gpu)
        if nearest is None:
            continue
        kind = machine.card_near.get((gpu, nearest), "SYS")
        a, b = left + _BOX / 2, 40 + nearest * (_BOX + _GAP) + _BOX / 2
        parts.append(
            svg.tag(
                "path",
                svg.title(kind),
                d=f"M{a:.0f} {_TOP + 50}L{b:.0f} 290",
                stroke=_COLOURS.get(kind, "#dc2626"),
                stroke_width=3,
            )
        )
    return parts
