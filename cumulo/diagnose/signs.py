"""The signs of causes in a run, in the order in which they count: what tools name comes before what bandwidths
suggest. Each sign is a function of a RunCase; the first that finds something is the answer."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from cumulo.base.quantities import quantity
from cumulo.diagnose.case import RINGS, RunCase
from cumulo.diagnose.diagnosis import Diagnosis, verdict
from cumulo.diagnose.lint.settings import slow_settings
from cumulo.diagnose.machine import node_of

_FALLS = 1.3  # times the bandwidth of the largest messages, that smaller ones reach: buffers overflow
_DIP = 0.7  # of the bandwidths before and after
# Shares of what is usual between nodes, as far as a single cause explains them.
_ONE_CARD, _THROUGH_HOST, _HALF = 0.16, 0.46, 0.62
_OVER_PCIE = 0.32  # of NVLink's bandwidth
_OPTIONAL = ("NCCL_ALGO", "NCCL_PROTO")  # settings that suit some sizes, and slow others down


_GPUS_SAID = re.compile(r"\b(\d+)\s*(?:[x×]\s*(?:NVIDIA )?(?:GB|[ABHV]|MI)\d{2,3}\w*|GPUs\b|ranks\b)", re.I)


def judge(case: RunCase) -> Diagnosis:
    looks = (look(case) for look in (*_NAMED, *_MEASURED))
    found = next((one for one in looks if one is not None), None) or _unexplained(case)
    return replace(found, evidence=(*found.evidence, *case.numbers), ranks=case.ranks, share=case.share)


def _unexplained(case: RunCase) -> Diagnosis:
    if case.run is None:
        return verdict("log-without-fault")
    if case.share is None:
        return verdict("unknown-gpus")
    return verdict("slow-without-reason", share=case.share)


# -- what tools name ------------------------------------------------------------------------------------------
def _wrong_results(case: RunCase) -> Diagnosis | None:
    rows = [row for row in case.run.rows if row.wrong] if case.run else []
    if not rows or case.run is None:
        return None
    size = quantity(rows[0].size_bytes, "B")
    return verdict("wrong-results", wrong=rows[0].wrong, size=size, bad=len(rows), rows=len(case.run.rows))


def _ranks_alone(case: RunCase) -> Diagnosis | None:
    alone = case.log.alone if case.log else 0
    if alone >= 2:
        return verdict("own-communicators", alone=alone)
    if case.run and case.run.ratio is not None and case.run.ratio < 0.05:
        return verdict("one-rank")
    return None


def _stated_ranks(case: RunCase) -> Diagnosis | None:
    """The ranks by busbw/algbw, or by the list of devices, against those that were asked for or listed."""
    if case.run is None:
        return None
    listed = len(case.run.devices) if case.run.all_listed else 0
    if case.inferred is None:
        ran, seen = listed, f"the output lists {listed} ranks"
        stated = [case.run.asked_ranks]
    else:
        best, low, high = case.inferred
        ran = round(best)
        seen = f"busbw/algbw is {case.run.ratio:.4f}, which an {case.operation} of {ran} ranks has"
        slack = 0.15 + 0.02 * best
        logged = case.log.ranks if case.log and case.log.ranks else 0
        stated = [
            one
            for one in (case.run.asked_ranks, listed, logged)
            if one and not low - slack <= one <= high + slack
        ]
    wrong = [one for one in stated if one and one != ran]
    return verdict("other-ranks", ran=ran, stated=wrong[0], seen=seen) if ran and wrong else None


def _is_far(case: RunCase) -> bool:
    return case.nodes > 1 or bool(case.log and case.log.far and case.log.nodes != 1)


def _over_tcp(case: RunCase) -> Diagnosis | None:
    if case.log is None or not case.log.socket or not _is_far(case):
        return None
    node = case.machine.node if case.machine else node_of(case.everything)
    has_nvlink = node is not None and not node.device.link_kind.startswith("pcie")
    return verdict("tcp" if has_nvlink else "tcp-without-nvlink")


def _few_cards(case: RunCase) -> Diagnosis | None:
    """One card for all GPUs of a node, or a card fewer than GPUs."""
    if case.log is None or not case.log.cards or not _is_far(case):
        return None
    counts = {host: len(cards) for host, cards in case.log.cards.items()}
    most, least, near = max(counts.values()), min(counts.values()), case.per_node
    enough = case.share is not None and case.is_enough and case.machine is not None and case.machine.stated
    if enough and most == least:
        return None
    if most == 1 and near >= 4:
        card = next(iter(case.log.cards.values()))[0]
        confidence = "medium" if case.log.gdr_off else "high"
        return verdict("one-card", confidence=confidence, card=card, gpus=near)
    usual = near if most in (near, near - 1) else most
    short = next((host for host, count in counts.items() if count < usual), None)
    if short is None:
        return None
    return verdict("rail-missing", missing=usual - least, usual=usual, host=short, least=least)


def _without_gdr(case: RunCase) -> Diagnosis | None:
    off = case.log is not None and _is_far(case) and case.log.gdr_off
    return verdict("gdr-off") if off else None


def _without_nvlink(case: RunCase) -> Diagnosis | None:
    log = case.log
    node = case.machine.node if case.machine else node_of(case.everything)
    if log is None or (node is not None and node.device.link_kind.startswith("pcie")):
        return None
    shared = sorted(path for path in log.near if path.startswith("SHM"))
    inside = sorted(log.far) if log.far and log.nodes == 1 else []
    if case.share is not None and case.share >= 0.82:
        return None  # a line of one pair, or of another try: the bandwidth is NVLink's
    if not (shared or inside or log.pcie_path or log.p2p_off):
        return None
    said = (
        (log.pcie_path, f"NCCL found the path type {log.pcie_path} between GPUs, not NVL"),
        (log.p2p_off, "NCCL says that P2P is disabled between GPUs"),
        (shared or inside, f"GPUs of a node talk via {(shared or inside or [''])[0]}"),
    )
    return verdict("without-nvlink", *(text for known, text in said if known))


def _good_paths(case: RunCase) -> Diagnosis | None:
    log = case.log
    if case.run is not None or log is None or not log.near or log.socket or case.host.port_down:
        return None
    near = all(path.startswith("P2P") for path in log.near)
    far = not _is_far(case) or (
        bool(log.far) and all("GDRDMA" in path for path in log.far) and not log.gdr_off
    )
    if not near or not far or "_perf" in case.text or slow_settings(case.host.settings):
        return None
    seen = "P2P between the GPUs of a node" + (", GPUDirect RDMA between nodes" if log.far else "")
    return verdict("good-paths", seen)


def _small_messages(case: RunCase) -> Diagnosis | None:
    if case.run is None or case.full_rate:
        return None
    largest = case.run.rows[-1].size_bytes
    size, asked = quantity(largest, "B"), quantity(case.run.asked_bytes, "B")
    if case.run.asked_bytes >= 16 * largest:
        return verdict("table-cut", size=size, asked=asked)
    return verdict("latency-counts", size=size)


# -- what bandwidths say --------------------------------------------------------------------------------------
def _impossible(case: RunCase) -> Diagnosis | None:
    return verdict("impossible") if case.share is not None and case.impossible else None


def _healthy(case: RunCase) -> Diagnosis | None:
    """Healthy is said only if nothing in the text speaks against it."""
    if case.share is None or not case.is_enough or _uneven(case):
        return None
    host = case.host
    doubts = (
        ("" if case.one_domain else host.port_down),
        ("" if case.one_domain else host.no_peermem),
        host.narrow_link,
        host.throttled,
        f"{host.nvlinks[1]} NVLinks are inactive" if case.one_domain and host.nvlinks[1] else "",
        _more_gpus(case),
    )
    if doubt := next((one for one in doubts if one), ""):
        return verdict("healthy-with-fault", said=doubt)
    return verdict("healthy", confidence="high" if case.share > 0.92 else "medium", share=case.share)


def _more_gpus(case: RunCase) -> str:
    """The text speaks of more GPUs than ran."""
    stated = [
        found for found in _GPUS_SAID.finditer(case.everything) if int(found[1]) > 1.05 * (case.ranks or 0)
    ]
    return f"{stated[0][0]} (and {case.ranks} ranks ran)" if stated else ""


def _faulty_part(case: RunCase) -> Diagnosis | None:
    """A part that the text names and that explains a slow run."""
    host, far = case.host, not case.one_domain
    active, inactive = host.nvlinks
    parts = {
        "throttled": host.throttled,
        "port-down": host.port_down if far or case.machine is None else "",
        "no-peermem": host.no_peermem if far else "",
        "narrow-link": host.narrow_link,
        "link-errors": host.link_errors,
        "some-nvlinks": f"{inactive} NVLinks are inactive, {active} active" if active else "",
        "no-nvlinks": f"all {inactive} NVLinks are inactive",
    }
    if far or not inactive:
        parts["some-nvlinks"] = parts["no-nvlinks"] = ""
    name = next((name for name, said in parts.items() if said), None)
    if name is None:
        return None
    return verdict(name, confidence="high" if case.share else "medium", said=parts[name])


def _slow_setting(case: RunCase) -> Diagnosis | None:
    given = case.host.settings
    for one, found in slow_settings(given):
        if (one.cause in ("wrong-nic", "no-gdr")) == (not case.one_domain) or one.cause == "setting":
            return Diagnosis(one.cause, found.what, (), "high", (found.change,))
    for name in _OPTIONAL:
        if given.get(name):
            return verdict("fixed-choice", name=name, setting=f"{name}={given[name]}")
    return None


def _congested(case: RunCase) -> Diagnosis | None:
    if case.one_domain:
        return None
    counters = tuple(f"{name} is {count:,}" for name, count in case.host.congestion[:4])
    uneven = _uneven(case)
    if not uneven and not counters:
        return None
    confidence = "high" if uneven and counters else "medium" if counters else "low"
    return verdict("congested", *((uneven,) if uneven else ()), *counters, confidence=confidence)


def _uneven(case: RunCase) -> str:
    """Bandwidth that falls as messages grow, or dips at some sizes: no link is that slow."""
    rows = case.large
    if len(rows) < 3:
        return ""
    best = max(rows, key=lambda row: row.busbw)
    if best.busbw > _FALLS * rows[-1].busbw:
        return f"busbw falls from {best.busbw:.4g} GB/s to {rows[-1].busbw:.4g} as messages grow"
    for at, row in enumerate(rows[1:-1], 1):
        before, after = max(one.busbw for one in rows[:at]), max(one.busbw for one in rows[at + 1 :])
        if row.busbw < _DIP * min(before, after):
            return f"busbw dips to {row.busbw:.4g} GB/s at {quantity(row.size_bytes, 'B')}"
    return ""


def _share_in_a_node(case: RunCase) -> Diagnosis | None:
    if case.share is None or case.machine is None or not case.one_domain or not case.machine.has_nvlink:
        return None
    return verdict("like-pcie", share=case.share) if case.share < _OVER_PCIE else None


def _share_between_nodes(case: RunCase) -> Diagnosis | None:
    if case.share is None or case.machine is None or case.one_domain or case.run is None:
        return None
    share, steady = case.share, all(later.busbw > 0.95 * row.busbw for row, later in pairwise(case.large))
    if not steady or case.operation not in (*RINGS, "broadcast", "reduce"):
        return None
    if share < _ONE_CARD or (
        case.per_node > 1 and case.run.rows[-1].busbw < 0.5 * case.machine.card_gbps / 8
    ):
        return verdict("like-one-card")
    if share < _THROUGH_HOST and not (case.log and case.log.gdr_on):
        return verdict("like-host-memory", share=share)
    if _THROUGH_HOST <= share < _HALF and case.machine.stated:
        return verdict("like-half", share=share)
    return None


_Look = Callable[[RunCase], Diagnosis | None]
_NAMED: tuple[_Look, ...] = (
    _wrong_results, _ranks_alone, _stated_ranks, _over_tcp, _few_cards, _without_gdr, _without_nvlink, _good_paths,
    _small_messages,
)  # fmt: skip
_MEASURED: tuple[_Look, ...] = (
    _impossible, _healthy, _faulty_part, _slow_setting, _congested, _share_in_a_node, _share_between_nodes,
)  # fmt: skip
