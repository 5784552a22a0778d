"""The verdict by bandwidths and latencies, compared with the planner's network model."""

from cumulo.base.quantities import quantity
from cumulo.plan.diagnose.counters_text import congestion_counters
from cumulo.plan.diagnose.diagnosis import (
    ECN_STEP,
    GDR_STEP,
    LOG_STEP,
    PAIRS_STEP,
    PAUSES_STEP,
    PORTS_STEP,
    TEST_STEP,
    TOPO_STEP,
    Diagnosis,
)
from cumulo.plan.diagnose.expected import nearest_published
from cumulo.plan.diagnose.nccl_case import NcclCase

_HEALTHY_NEAR, _HEALTHY_FAR = 0.82, 0.88  # of what the model expects, in a node and between nodes
_HEALTHY_PCIE = 0.6  # over PCIe it depends on the board: switches, host bridges, the link between sockets
_FALLS = 1.5  # times the bandwidth of the largest messages, that smaller ones reach: buffers overflow
_TOO_GOOD = 1.25  # of the best algorithm's rate: it is another machine


def stated_ranks(case: NcclCase) -> Diagnosis | None:
    if case.test is None:
        return None
    if case.test.ratio is not None and case.test.ratio < 0.05:
        return case.answer(
            "wrong-ranks",
            "busbw is 0: every process ran alone, with one rank. The processes did not find each other.",
            ("build nccl-tests with MPI=1, and check that mpirun and the build use the same MPI",),
            "high",
        )
    if case.inferred is None:
        return None
    best, low, high = case.inferred
    slack = 0.15 + 0.02 * best
    claimed = [one for one in case.test.claimed if one > 1]
    wrong = [one for one in claimed if not low - slack <= one <= high + slack]
    if not claimed or not wrong or (len(wrong) < len(claimed) and case.test.hosts):
        return None
    case.evidence.append(
        f"busbw/algbw is {case.test.ratio:.4f}, which an {case.operation} of {best:.0f} ranks has; the "
        f"text states {', '.join(str(one) for one in wrong)}"
    )
    return case.answer(
        "wrong-ranks",
        f"{round(best)} ranks ran, not {wrong[0]}. Compare the bandwidth with that of {round(best)} ranks.",
        ("check -np, -g and the host file; count the `Rank` lines at the top of the output",),
        "high",
    )


def small_messages(case: NcclCase) -> Diagnosis | None:
    if case.test is None or case.test.rows[-1].size_bytes > 4 << 20:
        return None
    smallest = case.test.rows[0]
    case.evidence.append(f"the largest message has {quantity(case.test.rows[-1].size_bytes, 'B')}")
    if case.expected is not None:
        usual = case.expected.latency_us(case.operation)
        case.evidence.append(f"{smallest.time_us:.0f} µs for the smallest; about {usual:.0f} µs are usual")
        if smallest.time_us > 8 * usual:
            return case.answer(
                "unknown",
                "Messages are small, and even their latency is high.",
                (LOG_STEP, TEST_STEP),
                "low",
            )
    return case.answer(
        "small-messages",
        "At these sizes latency counts, not bandwidth: a low busbw says nothing about the links.",
        ("run with -b 8 -e 8G -f 2, and read busbw from 256 MiB up",),
        "high",
    )


def congested(case: NcclCase) -> Diagnosis | None:
    """Counters of pauses and losses, or a bandwidth that falls as messages grow."""
    if case.nodes == 1 or case.one_domain:
        return None
    counters = congestion_counters(case.text)
    rows = [row for row in case.test.rows if row.size_bytes >= 8 << 20] if case.test else []
    best = max(rows, key=lambda row: row.busbw, default=None)
    falls = best is not None and best.busbw > _FALLS * rows[-1].busbw and best is not rows[-1]
    slow = case.share is not None and case.share < _HEALTHY_FAR
    if not falls and not (counters and (slow or case.share is None)):
        return None
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
    if row.busbw > _TOO_GOOD * max(usual, case.expected.busbw(case.operation, row.size_bytes, best=True)):
        return case.answer(
            "unknown",
            "This is more than the network that the text names can carry, so that it is not the one that ran.",
            (LOG_STEP, "state the cards of a node, as in 8 x 400G"),
            "low",
        )
    if (published := nearest_published(case.expected)) is not None:
        case.evidence.append(f"published: {published}")
    return _near_numbers(case) if case.one_domain else _far_numbers(case, row.busbw)


def _near_numbers(case: NcclCase) -> Diagnosis:
    assert case.share is not None and case.expected is not None
    if case.share >= (_HEALTHY_NEAR if case.expected.has_nvlink else _HEALTHY_PCIE):
        return _healthy(case)
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
    if ring and 0.68 <= case.share < _HEALTHY_NEAR and (case.ranks or 0) >= 5:
        return case.answer(
            "nvls-off",
            "This is what a ring over NVLink reaches; with NVLS it would be a third more.",
            ("check that fabric manager runs and NCCL_NVLS_ENABLE is not 0", LOG_STEP),
            "medium",
        )
    links = "NVLink gives; more than PCIe does" if case.expected.has_nvlink else "its PCIe links could carry"
    return case.answer("unknown", f"{case.share:.0%} of what {links}.", (TOPO_STEP, LOG_STEP), "low")


def _far_numbers(case: NcclCase, busbw: float) -> Diagnosis:
    assert case.share is not None and case.expected is not None
    share = case.share
    card = case.expected.card_gbps / 8
    if share >= _HEALTHY_FAR:
        return _healthy(case)
    if share < 0.16 or busbw < 1.05 * card / 2:
        return case.answer(
            "wrong-nic",
            "So little goes over one slow card, or over TCP.",
            (LOG_STEP, "look at `NET/IB : Using` or `NET/Socket` in it, and at NCCL_IB_HCA", PORTS_STEP),
            "medium",
        )
    if share < 0.42:
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
    return case.answer(
        "unknown",
        f"{share:.0%} of what is usual: a rail that is missing (7 of 8 is 88%), links that flows hash onto "
        "together, or a slow node would all look so.",
        (PORTS_STEP, PAIRS_STEP, "run pairs of nodes, to find a slow one", LOG_STEP),
        "low",
    )


def _healthy(case: NcclCase) -> Diagnosis:
    assert case.share is not None
    return case.answer(
        "healthy",
        f"{case.share:.0%} of what such a machine should reach.",
        (),
        "high" if case.share > 0.92 else "medium",
    )
