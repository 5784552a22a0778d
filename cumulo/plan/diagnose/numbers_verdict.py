"""The verdict by bandwidths and latencies, compared with the planner's network model."""

from itertools import pairwise

from cumulo.base import quick_re as re
from cumulo.base.quantities import quantity
from cumulo.plan.diagnose.cloud_machines import tcp_machine_gbps
from cumulo.plan.diagnose.counters_text import congestion_counters
from cumulo.plan.diagnose.diagnosis import (
    ECN_STEP,
    GDR_STEP,
    LOG_STEP,
    PAIRS_STEP,
    PAUSES_STEP,
    PORTS_STEP,
    TOPO_STEP,
    Diagnosis,
)
from cumulo.plan.diagnose.expected import nearest_published
from cumulo.plan.diagnose.log_verdict import ethernet
from cumulo.plan.diagnose.nccl_case import HEALTHY_NEAR, MOST_PCIE, TOO_GOOD, NcclCase
from cumulo.plan.diagnose.states_verdict import states_verdict
from cumulo.plan.diagnose.table_rows import TestRow
from cumulo.plan.diagnose.table_verdict import dips_of

_FALLS = 1.3  # times the bandwidth of the largest messages, that smaller ones reach: buffers overflow


def congested(case: NcclCase) -> Diagnosis | None:
    """Counters of pauses and losses, or a bandwidth that falls as messages grow."""
    if case.nodes == 1 or case.one_domain:
        return None
    counters = congestion_counters(case.text)
    rows = [row for row in case.test.rows if row.size_bytes >= 8 << 20] if case.test else []
    best = max(rows, key=lambda row: row.busbw, default=None)
    falls = best is not None and best.busbw > _FALLS * rows[-1].busbw and best is not rows[-1]
    slow = case.share is not None and not case.enough
    dips = dips_of(case)
    if not (falls or dips) and not (counters and (slow or case.share is None)):
        return None
    if dips and not falls:
        case.evidence.append(
            f"busbw is {dips[0].busbw:.4g} GB/s at {quantity(dips[0].size_bytes, 'B')}, much less than at the "
            "sizes before and after it"
        )
    if falls and best is not None:
        case.evidence.append(
            f"busbw falls from {best.busbw:.4g} GB/s at {quantity(best.size_bytes, 'B')} to "
            f"{rows[-1].busbw:.4g} at {quantity(rows[-1].size_bytes, 'B')}"
        )
    case.evidence.extend(f"{name} is {count:,}" for name, count in counters[:4])
    return case.answer(
        "congested",
        "Large messages fill the switches' buffers: senders are paused, or packets are lost and sent again.",
        (
            PAUSES_STEP,
            ECN_STEP,
            "run `cumulo network lint FABRIC` for the layout's collisions",
            PAIRS_STEP,
        ),
        "high" if falls and counters else "medium",
    )


def numbers_verdict(case: NcclCase) -> Diagnosis | None:
    if case.share is None or case.expected is None or case.test is None:
        return None
    row = case.test.rows[-1]
    usual = case.expected.busbw(case.operation, row.size_bytes)
    case.say_numbers()
    if row.busbw > TOO_GOOD * max(usual, case.expected.busbw(case.operation, row.size_bytes, best=True)):
        return case.answer(
            "unknown",
            "This is more than the network that the text names can carry, so that it is not the one that ran.",
            (LOG_STEP, "state the cards of a node, as in 8 x 400G"),
            "low",
        )
    if case.enough:
        case.compare_with_peer()
    if (found := states_verdict(case)) is not None:
        return found
    if (published := nearest_published(case.expected)) is not None:
        case.evidence.append(f"published: {published}")
    return _near_numbers(case, row) if case.one_domain else _far_numbers(case, row.busbw)


def _near_numbers(case: NcclCase, row: TestRow) -> Diagnosis:
    assert case.share is not None and case.expected is not None
    if dips := dips_of(case):
        case.evidence.append(f"busbw dips to {dips[0].busbw:.4g} GB/s at {quantity(dips[0].size_bytes, 'B')}")
        return case.answer(
            "unknown",
            "Bandwidth dips at some sizes: something else uses the GPUs or the links now and then.",
            ("look for other processes with `nvidia-smi`, and run again with -n 100", TOPO_STEP),
            "low",
        )
    if case.enough:
        return _healthy(case)
    if case.peer and row.busbw <= MOST_PCIE < case.peer.rate:
        return case.answer(
            "pcie-not-nvlink",
            "No PCIe link carries what the like run reaches, and this one is no faster than PCIe: its GPUs do not "
            "use NVLink.",
            (TOPO_STEP, "look for a bridge that is not seated, and compare the two in the matrix", LOG_STEP),
            "medium",
        )
    if case.share < 0.32 and case.expected.has_nvlink and case.nodes > 1:
        return case.apart(f"{case.share:.0%} of what the NVLink domain gives", "medium")
    if case.share < 0.32 and case.expected.has_nvlink:
        return case.answer(
            "pcie-not-nvlink",
            f"{case.share:.0%} of what NVLink gives; PCIe gives as much.",
            (TOPO_STEP, "look for NCCL_P2P_DISABLE and NCCL_P2P_LEVEL in the environment", LOG_STEP),
            "medium",
        )
    ring = case.operation == "all_reduce" and case.expected.network.profile.nvls_bytes_per_s > 0
    if case.log and case.log.nvls_off:
        case.evidence.append("NCCL says that NVLS is not available, or is told not to use it")
    if ring and 0.68 <= case.share < HEALTHY_NEAR and (case.ranks or 0) >= 5:
        return case.answer(
            "nvls-off",
            "This is what a ring over NVLink reaches; with NVLS it would be a third more.",
            ("check that fabric manager runs and NCCL_NVLS_ENABLE is not 0", LOG_STEP),
            "medium",
        )
    if case.expected.has_nvlink:
        return case.answer(
            "slow-link",
            f"{case.share:.0%} of what {'a like run reaches' if case.peer else 'NVLink gives'}, and more than PCIe "
            "does: some NVLinks seem to be down, or a GPU is slow.",
            ("run `nvidia-smi nvlink --status` and look for inactive links", TOPO_STEP, LOG_STEP),
            "low",
        )
    usual = "what a like run reaches" if case.peer else "what its PCIe links could carry"
    return case.answer("unknown", f"{case.share:.0%} of {usual}.", (TOPO_STEP, LOG_STEP), "low")


def _far_numbers(case: NcclCase, busbw: float) -> Diagnosis:
    assert case.share is not None and case.expected is not None
    share = case.share
    card = case.expected.card_gbps / 8
    if case.enough:
        return _healthy(case)
    if case.peer is None and tcp_machine_gbps(case.text) and (found := ethernet(case)):
        return found
    if share < 0.16 or (case.per_node > 1 and busbw < 1.05 * card / 2):
        return case.answer(
            "wrong-nic",
            "So little goes over one slow card, or over TCP.",
            (LOG_STEP, "look at `NET/IB : Using` or `NET/Socket` in it, and at NCCL_IB_HCA", PORTS_STEP),
            "medium",
        )
    if _many_leaves(case):
        return case.answer(
            "oversubscribed",
            f"{share:.0%} of what is usual, on nodes of several leaves or racks: their uplinks seem to be too few.",
            (
                "run the same on nodes of one leaf, and compare the downlinks and uplinks of each leaf",
                "run `cumulo network lint FABRIC` for the layout's collisions",
                PAUSES_STEP,
            ),
            "low",
        )
    if share < 0.46 and case.log and case.log.gdr_on:
        return case.answer(
            "unknown",
            f"{share:.0%} of the cards' rate although GPUDirect RDMA is on: flows collide, senders are paused, or "
            "a card is slow.",
            (PAIRS_STEP, PAUSES_STEP, PORTS_STEP),
            "low",
        )
    if share < 0.46:
        return case.answer(
            "no-gdr",
            f"{share:.0%} of the cards' rate is what copies through host memory reach.",
            (GDR_STEP, LOG_STEP, PAIRS_STEP),
            "medium",
        )
    if share < 0.62:
        return case.answer(
            "rail-down",
            f"{share:.0%}, about half: one card seems to carry two GPUs' traffic, and all wait for it."
            + (
                ""
                if case.expected.stated
                else f" Or the cards have less than {case.expected.card_gbps:.0f} Gbit/s."
            ),
            (PORTS_STEP, PAIRS_STEP, LOG_STEP),
            "medium",
        )
    if _steady(case):
        return case.answer(
            "rail-down",
            f"{share:.0%} of what is usual, at all large sizes: a rail seems to be missing (7 of 8 is 88%), or a "
            "node is slow.",
            (PORTS_STEP, PAIRS_STEP, "run pairs of nodes, to find a slow one", LOG_STEP),
            "low",
        )
    return case.answer(
        "congested",
        f"{share:.0%} of what is usual, and unevenly: flows seem to share links (ECMP collisions), or packets are "
        "lost.",
        (PAUSES_STEP, ECN_STEP, "run `cumulo network lint FABRIC` for the layout's collisions", PAIRS_STEP),
        "low",
    )


def _many_leaves(case: NcclCase) -> bool:
    """The bandwidth is uneven on many nodes, and the text speaks of the tiers above them."""
    tiers = re.search(
        r"\b(?:leaf|leaves|racks?|spines?|pods|uplinks?|oversubscri\w+|\d:1)\b", case.text, re.I
    )
    return case.nodes >= 8 and tiers is not None and not _steady(case)


def _steady(case: NcclCase) -> bool:
    """Large messages grow towards one bandwidth, as over links of one rate."""
    rows = case.test.large if case.test else ()
    return all(later.busbw > 0.95 * row.busbw for row, later in pairwise(rows))


def _healthy(case: NcclCase) -> Diagnosis:
    assert case.share is not None
    through_host = case.one_domain and case.share < 0.6
    return case.answer(
        "healthy",
        "This is what such boards reach through host memory: they may not reach each other's."
        if through_host
        else f"{case.share:.0%} of what such a machine should reach.",
        (),
        "high" if case.share > 0.92 else "medium",
    )
