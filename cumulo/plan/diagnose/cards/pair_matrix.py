"""Matrices of bandwidths between the GPUs of a node, as CUDA's p2pBandwidthLatencyTest and nvbandwidth print them:
one GPU whose links are slower than the others', or PCIe where there should be NVLink. What is usual differs between
machines, and they say nothing of a network, so that no machine is called healthy by them."""

from statistics import median

from cumulo.base import quick_re as re
from cumulo.plan.diagnose.diagnosis import TEST_STEP, TOPO_STEP, Diagnosis
from cumulo.plan.diagnose.machine_names import node_of
from cumulo.plan.diagnose.nccl_case import MOST_PCIE

_TITLE = re.compile(
    r"^[^\n]*(?:P2P=(Enabled|Disabled)[^\n]*Bandwidth|memcpy[^\n]*)[^\n]*\((?:GB/s|row\))[^\n]*", re.M | re.I
)
_HEAD = re.compile(r"^\s*(?:D\\D)?((?:\s+\d+)+)\s*$")
_SLOWER = 0.75  # of what most GPUs reach with their best neighbour


def pair_verdict(text: str) -> Diagnosis | None:
    """By the first matrix with peer-to-peer access."""
    for title in _TITLE.finditer(text):
        rates = _matrix(text[title.end() :].splitlines()[1:40])
        if title[1] != "Disabled" and len(rates) >= 2:
            return _verdict(rates, text)
    return None


def _matrix(lines: list[str]) -> dict[tuple[int, int], float]:
    """GB/s of each pair of different GPUs."""
    if not lines or (head := _HEAD.match(lines[0])) is None:
        return {}
    columns = [int(one) for one in head[1].split()]
    rates = {}
    for line in lines[1 : len(columns) + 1]:
        cells = line.split()
        if len(cells) != len(columns) + 1 or not cells[0].isdecimal():
            break
        for column, cell in zip(columns, cells[1:], strict=True):
            if column != int(cells[0]) and re.fullmatch(r"\d+(?:\.\d+)?", cell):
                rates[int(cells[0]), column] = float(cell)
    return rates


def _verdict(rates: dict[tuple[int, int], float], text: str) -> Diagnosis:
    usual = median(rates.values())
    gpus = sorted({gpu for pair in rates for gpu in pair})
    best = {gpu: max(rate for pair, rate in rates.items() if gpu in pair) for gpu in gpus}
    slow = [gpu for gpu in gpus if best[gpu] < _SLOWER * median(best.values())]
    evidence = (
        f"pairs reach {min(rates.values()):g} to {max(rates.values()):g} GB/s, half of them {usual:g}",
    )
    node = node_of(text)
    if slow and len(slow) < len(gpus) / 2:
        return Diagnosis(
            "slow-link",
            f"GPU {', '.join(map(str, slow))} reaches every other GPU slower than they reach each other.",
            evidence,
            ("run `nvidia-smi nvlink --status` and look for inactive links", TOPO_STEP),
            "high",
        )
    if node is not None and node.device.link_kind.startswith("nvlink") and usual < MOST_PCIE:
        return Diagnosis(
            "pcie-not-nvlink",
            "PCIe gives as much: GPUs of a node do not use NVLink.",
            evidence,
            (TOPO_STEP,),
            "medium",
        )
    return Diagnosis(
        "unknown",
        "No GPU is slower than the others; copies between pairs say nothing more of a collective.",
        evidence,
        (TEST_STEP, TOPO_STEP),
        "low",
    )
