"""The signs of causes in a run, in the order in which they count: what tools name comes before what bandwidths
suggest. Each sign is a function of a RunCase; the first that finds something is the answer."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from cumulo.base.quantities import quantity
from cumulo.diagnose.case import RINGS, RunCase
from cumulo.diagnose.diagnosis import Diagnosis
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
    for look in (*_NAMED, *_MEASURED):
        if (found := look(case)) is not None:
            evidence = (*found.evidence, *case.numbers)
            return replace(found, evidence=evidence, ranks=case.ranks, share=case.share)
    return Diagnosis("unknown", _read(case), case.numbers, "low", (), case.ranks, case.share)


def _read(case: RunCase) -> str:
    """Why nothing can be said."""
    if case.run is None:
        return "The log names no fault, and has no bandwidth."
    if case.share is None:
        return "The text does not say which GPUs ran, so that the bandwidth cannot be compared with theirs."
    return f"{case.share:.0%} of what is usual, and nothing in the text says why."


# -- what tools name ------------------------------------------------------------------------------------------
def _wrong_results(case: RunCase) -> Diagnosis | None:
    rows = [row for row in case.run.rows if row.wrong] if case.run else []
    if not rows or case.run is None:
        return None
    where = f"#wrong is {rows[0].wrong} at {quantity(rows[0].size_bytes, 'B')}"
    return Diagnosis(
        "wrong-results",
        "Sums differ from what they should be: memory, a link or a driver corrupts data. Do not train on it.",
        (f"{where}, and not 0 in {len(rows)} of {len(case.run.rows)} rows",),
    )


def _ranks_alone(case: RunCase) -> Diagnosis | None:
    alone = case.log.alone if case.log else 0
    if alone >= 2:
        evidence = f"{alone} processes have a communicator of their own each, with one rank (nranks 1)"
        return Diagnosis("wrong-ranks", "The processes run alone: they did not find each other.", (evidence,))
    if case.run and case.run.ratio is not None and case.run.ratio < 0.05:
        return Diagnosis("wrong-ranks", "busbw is 0: every process ran alone, with one rank.")
    return None


def _stated_ranks(case: RunCase) -> Diagnosis | None:
    """The ranks by busbw/algbw, or by the list of devices, against those that were asked for or listed."""
    if case.run is None:
        return None
    listed = len(case.run.devices) if case.run.all_listed else 0
    if case.inferred is None:
        ran, evidence = listed, f"the output lists {listed} ranks"
        stated = [case.run.asked_ranks]
    else:
        best, low, high = case.inferred
        ran = round(best)
        evidence = f"busbw/algbw is {case.run.ratio:.4f}, which an {case.operation} of {ran} ranks has"
        slack = 0.15 + 0.02 * best
        logged = case.log.ranks if case.log and case.log.ranks else 0
        stated = [
            one
            for one in (case.run.asked_ranks, listed, logged)
            if one and not low - slack <= one <= high + slack
        ]
    wrong = [one for one in stated if one and one != ran]
    if not ran or not wrong:
        return None
    return Diagnosis(
        "wrong-ranks",
        f"{ran} ranks ran, not {wrong[0]}. Compare the bandwidth with that of {ran} ranks.",
        (f"{evidence}; the text states {wrong[0]}",),
    )


def _is_far(case: RunCase) -> bool:
    return case.nodes > 1 or bool(case.log and case.log.far and case.log.nodes != 1)


def _over_tcp(case: RunCase) -> Diagnosis | None:
    if case.log is None or not case.log.socket or not _is_far(case):
        return None
    node = case.machine.node if case.machine else node_of(case.everything)
    if node is None or node.device.link_kind.startswith("pcie"):
        return Diagnosis(
            "unknown",
            "Data goes over TCP: that is right on machines without RDMA cards, and slow on others.",
            ("NCCL uses the network Socket (TCP)",),
            "low",
            ("run `ibv_devinfo` on each node: if it lists cards, NCCL does not find them",),
        )
    return Diagnosis(
        "wrong-nic",
        "NCCL found no RDMA card that it may use and sends over TCP.",
        ("NCCL uses the network Socket (TCP)",),
    )


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
        return Diagnosis(
            "wrong-nic",
            f"All GPUs of a node share the card {card}, which may be the management or storage card.",
            (f"of each node's cards NCCL uses one, {card}, for {near} GPUs",),
            "medium" if case.log.gdr_off else "high",
        )
    usual = near if most in (near, near - 1) else most
    short = next((host for host, count in counts.items() if count < usual), None)
    if short is None:
        return None
    return Diagnosis(
        "rail-down",
        f"{usual - least} of {usual} rails of {short} is missing.",
        (f"{short} has {least} network cards in use, of {usual}",),
    )


def _without_gdr(case: RunCase) -> Diagnosis | None:
    if case.log is None or not _is_far(case) or not case.log.gdr_off:
        return None
    return Diagnosis(
        "no-gdr",
        "Data between nodes is copied through host memory, since GPUDirect RDMA is off.",
        ("messages between nodes go via NET/IB without GDRDMA",),
    )


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
    return Diagnosis(
        "pcie-not-nvlink", "GPUs of a node do not use NVLink.", tuple(text for known, text in said if known)
    )


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
    return Diagnosis(
        "healthy",
        "The log shows the paths one would want. It has no bandwidth: measure it.",
        ("P2P between the GPUs of a node" + (", GPUDirect RDMA between nodes" if log.far else ""),),
        "medium",
    )


def _small_messages(case: RunCase) -> Diagnosis | None:
    if case.run is None or case.full_rate:
        return None
    largest = case.run.rows[-1]
    size = quantity(largest.size_bytes, "B")
    if case.run.asked_bytes >= 16 * largest.size_bytes:
        asked = quantity(case.run.asked_bytes, "B")
        return Diagnosis(
            "unknown", f"The table ends at {size}, long before the largest message asked for ({asked})."
        )
    return Diagnosis(
        "small-messages",
        "At these sizes latency counts, not bandwidth: a low busbw says nothing about the links.",
        (f"the largest message has {size}",),
    )


# -- what bandwidths say --------------------------------------------------------------------------------------
def _impossible(case: RunCase) -> Diagnosis | None:
    if case.share is None or not case.impossible:
        return None
    sentence = (
        "This is more than the network that the text names can carry, so that it is not the one that ran."
    )
    return Diagnosis("unknown", sentence, (), "low", ("state the cards of a node, as in 8 x 400G",))


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
    doubt = next((one for one in doubts if one), "")
    if doubt:
        sentence = (
            "The bandwidth is what is usual, and yet the text names a fault: does this run use that part?"
        )
        return Diagnosis("unknown", sentence, (f"the text says: {doubt}",), "low")
    return Diagnosis(
        "healthy",
        f"{case.share:.0%} of what such a machine should reach.",
        (),
        "high" if case.share > 0.92 else "medium",
    )


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
    parts = (
        (host.throttled, "gpu-fault", "A GPU is throttled, and all others wait for it."),
        (host.port_down if far or case.machine is None else "", "rail-down", "A port is down."),
        (host.no_peermem if far else "", "no-gdr", "nvidia-peermem is not loaded."),
        (host.narrow_link, "slow-link", "A link runs below its rate."),
        (host.link_errors, "slow-link", "A link has errors: cable, transceiver or connector."),
        (f"{inactive} NVLinks are inactive, {active} active" if inactive and active and not far else "",
         "slow-link", "Some NVLinks are down."),
        (f"all {inactive} NVLinks are inactive" if inactive and not active and not far else "",
         "pcie-not-nvlink", "GPUs of a node do not use NVLink."),
    )  # fmt: skip
    for said, cause, sentence in parts:
        if said:
            return Diagnosis(cause, sentence, (f"the text says: {said}",), "high" if case.share else "medium")
    return None


def _slow_setting(case: RunCase) -> Diagnosis | None:
    given = case.host.settings
    for one, found in slow_settings(given):
        if (one.cause in ("wrong-nic", "no-gdr")) == (not case.one_domain) or one.cause == "setting":
            return Diagnosis(one.cause, found.what, (), "high", (found.change,))
    for name in _OPTIONAL:
        if given.get(name):
            sentence = f"{name}={given[name]} holds for all sizes, and NCCL chooses better by size."
            return Diagnosis("setting", sentence, (), "medium", (f"remove {name}",))
    return None


def _congested(case: RunCase) -> Diagnosis | None:
    if case.one_domain:
        return None
    counters = tuple(f"{name} is {count:,}" for name, count in case.host.congestion[:4])
    uneven = _uneven(case)
    if not uneven and not counters:
        return None
    return Diagnosis(
        "congested",
        "Large messages fill the switches' buffers: senders are paused, or packets are lost and sent again.",
        (*((uneven,) if uneven else ()), *counters),
        "high" if uneven and counters else "medium" if counters else "low",
    )


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
    if case.share >= _OVER_PCIE:
        return None
    sentence = f"{case.share:.0%} of what NVLink gives; PCIe gives as much."
    return Diagnosis("pcie-not-nvlink", sentence, (), "medium")


def _share_between_nodes(case: RunCase) -> Diagnosis | None:
    if case.share is None or case.machine is None or case.one_domain or case.run is None:
        return None
    share, steady = case.share, all(later.busbw > 0.95 * row.busbw for row, later in pairwise(case.large))
    if not steady or case.operation not in (*RINGS, "broadcast", "reduce"):
        return None
    if share < _ONE_CARD or (
        case.per_node > 1 and case.run.rows[-1].busbw < 0.5 * case.machine.card_gbps / 8
    ):
        return Diagnosis("wrong-nic", "So little goes over one slow card, or over TCP.", (), "medium")
    if share < _THROUGH_HOST and not (case.log and case.log.gdr_on):
        sentence = f"{share:.0%} of the cards' rate is what copies through host memory reach."
        return Diagnosis("no-gdr", sentence, (), "medium")
    if _THROUGH_HOST <= share < _HALF and case.machine.stated:
        sentence = f"{share:.0%}, about half: one card seems to carry two GPUs' traffic, and all wait for it."
        return Diagnosis("rail-down", sentence, (), "medium")
    return None


_Look = Callable[[RunCase], Diagnosis | None]
_NAMED: tuple[_Look, ...] = (
    _wrong_results, _ranks_alone, _stated_ranks, _over_tcp, _few_cards, _without_gdr, _without_nvlink, _good_paths,
    _small_messages,
)  # fmt: skip
_MEASURED: tuple[_Look, ...] = (
    _impossible, _healthy, _faulty_part, _slow_setting, _congested, _share_in_a_node, _share_between_nodes,
)  # fmt: skip
