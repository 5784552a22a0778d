"""The table of `nvidia-smi topo -m` as a MachineGraph."""

import re

from cumulo.collectives.topology.machine_graph import CardPlace, GpuPlace, MachineGraph, links
from cumulo.errors import ConfigError

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_LEGEND = re.compile(r"^\s*(NIC\d+)\s*:\s*(\S+)", re.MULTILINE)
_KIND = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")
_DEVICE = re.compile(r"GPU\d+|NIC\d+|mlx\d_\w+|\w*(?:roce|bnxt_re|irdma|efa)\w*")


def parse_topo(text: str) -> MachineGraph:
    plain = _ESCAPE.sub("", text)
    lines = [line for line in plain.splitlines() if line.strip()]
    header = next((line for line in lines if len(re.findall(r"GPU\d+", line)) and not _row(line)), None)
    if header is None:
        raise ConfigError("the text has no table of `nvidia-smi topo -m`: no line that names GPU0, GPU1, ...")
    columns = _DEVICE.findall(header.split("CPU Affinity")[0])
    rows = {match[0]: match[1] for line in lines if (match := _row(line)) is not None}
    legend = dict(_LEGEND.findall(plain))
    gpus = [name for name in columns if name.startswith("GPU")]
    cards = [name for name in columns if not name.startswith("GPU")]
    near, card_near, numa = {}, {}, {}
    for gpu, name in enumerate(gpus):
        if name not in rows:
            raise ConfigError(f"the table has no row for {name}")
        kinds, rest = rows[name]
        for column, kind in zip(columns, kinds, strict=False):
            if kind == "X":
                continue
            if column in gpus:
                near[gpu, gpus.index(column)] = kind
            else:
                card_near[gpu, cards.index(column)] = kind
        numa[gpu] = _numa(rest)
    pairs = [links(kind) for kind in near.values()]
    return MachineGraph(
        tuple(GpuPlace(name, numa=numa.get(at)) for at, name in enumerate(gpus)),
        tuple(CardPlace(legend.get(name, name)) for name in cards),
        near,
        card_near,
        numa_nodes=len({one for one in numa.values() if one is not None}) or 1,
        switched=len(gpus) > 4 and bool(pairs) and min(pairs) == max(pairs) > 0,
    )


def _row(line: str) -> tuple[str, tuple[list[str], str]] | None:
    words = line.split()
    if len(words) < 2 or not _DEVICE.fullmatch(words[0]) or not _KIND.fullmatch(words[1]):
        return None
    kinds = []
    for word in words[1:]:
        if not _KIND.fullmatch(word):
            break
        kinds.append(word)
    return words[0], (kinds, " ".join(words[1 + len(kinds) :]))


def _numa(rest: str) -> int | None:
    words = rest.split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else None
