"""The verdict by what NCCL logged: it names links, cards and settings, so it decides before bandwidths do."""

from cumulo.base import quick_re as re
from cumulo.plan.diagnose.cloud_machines import efa_cards_of, tcp_gbps_of
from cumulo.plan.diagnose.diagnosis import (
    GDR_STEP,
    LOG_STEP,
    PAIRS_STEP,
    PORTS_STEP,
    TEST_STEP,
    TOPO_STEP,
    Diagnosis,
)
from cumulo.plan.diagnose.machine_names import node_of
from cumulo.plan.diagnose.nccl_case import NcclCase
from cumulo.plan.diagnose.nccl_log_text import NcclLog
from cumulo.plan.diagnose.table_verdict import dips_of

# A test was run, and its table is not in the text: what it measured is not known.
_TCP_HEALTHY, _TCP_SOME = 0.72, 0.2  # of the card's rate; less than that is another card
_MOST_OF_LINE = 1.05
_TABLE_MISSING = re.compile(r"nThread \d+|_perf\b|out-of-place|Avg bus bandwidth")


def log_verdict(case: NcclCase) -> Diagnosis | None:
    log = case.log
    if log is None:
        return None
    far = case.nodes > 1 or (bool(log.far) and not _one_host(case, log))
    found = (
        _events(case, log)
        or _alone(case, log)
        or (_through_cards(case, log) if not far else None)
        or _domain(case, log)
        or (_network(case, log) if far else None)
        or (_near(case, log) if not far else None)
        or (_missing_cards(case, log) if far else None)
        or (_gdr(case, log) if far else None)
        or _near(case, log)
    )
    if found is not None:
        return found
    if case.test is None and not _TABLE_MISSING.search(case.text):
        return _log_alone(case, log)
    return None


def _events(case: NcclCase, log: NcclLog) -> Diagnosis | None:
    bad = [one for one in log.events if "error" in one or "down" in one or "fatal" in one]
    if not bad:
        return None
    case.evidence.append(f"NCCL reports: {', '.join(bad)}")
    return case.answer("rail-down", "A port went down during the run.", (PORTS_STEP, PAIRS_STEP), "high")


def _alone(case: NcclCase, log: NcclLog) -> Diagnosis | None:
    if log.alone < 2:
        return None
    case.evidence.append(
        f"{log.alone} processes have a communicator of their own each, with one rank (nranks 1)"
    )
    return case.answer(
        "wrong-ranks",
        f"{log.alone} processes run alone: they did not find each other, and share nothing.",
        ("start them with torchrun or mpirun, so that RANK, WORLD_SIZE and MASTER_ADDR are set for each",),
        "high",
    )


def _one_host(case: NcclCase, log: NcclLog) -> bool:
    """Surely so: the list of devices or the log says it."""
    return bool(case.test and case.test.hosts == 1 and case.nodes == 1) or log.nodes == 1


def _through_cards(case: NcclCase, log: NcclLog) -> Diagnosis | None:
    if not log.far:
        return None
    case.evidence.append(f"GPUs of one host talk via {sorted(log.far)[0]}")
    return case.answer(
        "pcie-not-nvlink",
        "GPUs of a node talk over the network, not NVLink: P2P and shared memory are off.",
        ("remove NCCL_P2P_DISABLE, NCCL_P2P_LEVEL and NCCL_SHM_DISABLE", TOPO_STEP),
        "high",
    )


def _domain(case: NcclCase, log: NcclLog) -> Diagnosis | None:
    node = case.expected.node if case.expected else node_of(case.text)
    wide = node is not None and node.scale_up_gpus > node.gpus
    if not (wide and case.nodes > 1 and log.far and log.domain_off):
        return None
    case.evidence.append("NCCL says MNNVL 0: no NVLink between hosts")
    return case.apart("MNNVL 0", "high")


def _network(case: NcclCase, log: NcclLog) -> Diagnosis | None:
    if log.socket:
        case.evidence.append("NCCL uses the network Socket (TCP)")
        if (found := ethernet(case)) is not None:
            return found
        if log.settings.get("NCCL_IB_DISABLE", "0").strip(".") == "1":
            case.evidence.append("NCCL_IB_DISABLE is 1")
        return case.answer(
            "wrong-nic",
            "NCCL found no RDMA card that it may use and sends over TCP.",
            (
                "run `ibv_devinfo` inside the container",
                "remove NCCL_IB_DISABLE; set NCCL_IB_HCA=mlx5",
                LOG_STEP,
            ),
            "high",
        )
    counts = {len(cards) for cards in log.cards.values()}
    near = case.per_node
    named = log.settings.get("NCCL_IB_HCA", "")
    if named and counts and 1 < max(counts) <= near / 2 and case.share is not None and case.share < 0.7:
        case.evidence.append(f"NCCL_IB_HCA is {named}: {max(counts)} cards for {near} GPUs of a node")
        return case.answer(
            "wrong-nic",
            f"NCCL may use only {max(counts)} of a node's cards.",
            ("remove NCCL_IB_HCA, or name all compute cards in it", TOPO_STEP, PORTS_STEP),
            "medium",
        )
    if counts and max(counts) == 1 and near >= 4 and not _plenty(case) and not _only_card(case, log):
        card = next(iter(log.cards.values()))[0]
        case.evidence.append(f"of each node's cards NCCL uses one, {card}, for {near} GPUs")
        return case.answer(
            "wrong-nic",
            f"All GPUs of a node share the card {card}, which may be the management or storage card.",
            (f"remove NCCL_IB_HCA={card}, or name all compute cards in it", TOPO_STEP, PORTS_STEP),
            "high",
        )
    return None


def ethernet(case: NcclCase) -> Diagnosis | None:
    """Of machines without RDMA: what their Ethernet carries. One card carries all that leaves a node."""
    gbps = tcp_gbps_of(case.text)
    if gbps is None or case.test is None or case.share is None:
        return None
    row = case.test.rows[-1]
    leaves = row.busbw
    if case.operation not in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"):
        leaves *= case.per_node
    share = leaves * 8 / gbps
    case.said, case.share = True, share
    case.evidence.append(f"{leaves:.3g} GB/s leave a node: {share:.0%} of its {gbps:g} Gbit/s of Ethernet")
    if share > _MOST_OF_LINE or not case.full_rate:
        return None
    if share >= _TCP_HEALTHY and not dips_of(case):
        return case.answer(
            "healthy",
            f"TCP carries {share:.0%} of the {gbps:g} Gbit/s that a node has, and the text names nothing faster.",
            (),
            "medium",
        )
    if share >= _TCP_SOME:
        return case.answer(
            "setting",
            f"TCP carries {share:.0%} of the {gbps:g} Gbit/s: too few connections, or small frames.",
            (
                "set NCCL_SOCKET_NTHREADS=4 and NCCL_NSOCKS_PERTHREAD=4, and a large MTU (9000, Google Cloud 8896)",
                "run `iperf3 -P 8` between the nodes",
            ),
            "low",
        )
    return None


def _only_card(case: NcclCase, log: NcclLog) -> bool:
    """Nothing says that a node has more than this card, and the log says what is wrong with its use."""
    more = case.expected is not None and case.expected.stated
    return log.gdr_off and "NCCL_IB_HCA" not in log.settings and not more


def _plenty(case: NcclCase) -> bool:
    """It is as fast as the stated network: one card is all there is."""
    return (
        case.share is not None and case.share >= 0.88 and case.expected is not None and case.expected.stated
    )


def _missing_cards(case: NcclCase, log: NcclLog) -> Diagnosis | None:
    counts = {host: len(cards) for host, cards in log.cards.items()}
    near = case.per_node
    usual = efa_cards_of(case.text)
    if usual and log.found and min(log.found) < usual and min(log.found) != case.per_node:
        case.evidence.append(
            f"libfabric found {min(log.found)} network cards, and such a machine has {usual}"
        )
        return case.answer(
            "rail-down",
            f"{usual - min(log.found)} of the {usual} network cards of a node are missing.",
            ("run `fi_info -p efa` on each node, and inside the container", PORTS_STEP),
            "medium",
        )
    if not counts:
        return None
    most, least = max(counts.values()), min(counts.values())
    usual = near if most in (near, near - 1) else most
    short = [host for host, count in counts.items() if count < usual]
    if not short or (case.share is not None and case.share > 1.0 and most == least):
        return None
    case.evidence.append(f"{short[0]} has {least} network cards in use, of {usual}")
    return case.answer(
        "rail-down",
        f"{usual - least} of {usual} rails of {short[0]} is missing.",
        (PORTS_STEP, PAIRS_STEP),
        "high",
    )


def _gdr(case: NcclCase, log: NcclLog) -> Diagnosis | None:
    paths = [path for path in log.far if path.startswith("NET/IB")]
    if not log.gdr_off and not (paths and not any("GDRDMA" in path for path in paths)):
        return None
    if log.gdr_on and not log.gdr_off:
        return None
    case.evidence.append("messages between nodes go via NET/IB without GDRDMA")
    return case.answer(
        "no-gdr",
        "Data between nodes is copied through host memory, since GPUDirect RDMA is off.",
        (GDR_STEP, "load nvidia-peermem (or use dma-buf), and remove NCCL_NET_GDR_LEVEL", TOPO_STEP),
        "high",
    )


def _near(case: NcclCase, log: NcclLog) -> Diagnosis | None:
    node = case.expected.node if case.expected else node_of(case.text)
    pcie_device = node is not None and node.device.link_kind.startswith("pcie")
    shared = [path for path in log.near if path.startswith("SHM")]
    off = log.settings.get("NCCL_P2P_DISABLE", "0").startswith("1")
    if not (shared or off or log.pcie_path or log.p2p_off) or pcie_device:
        return None
    if log.pcie_path:
        case.evidence.append(f"NCCL found the path type {log.pcie_path} between GPUs, not NVL")
    if log.p2p_off:
        case.evidence.append("NCCL says that P2P is disabled between GPUs")
    if shared:
        case.evidence.append(f"GPUs of a node talk via {shared[0]}")
    settings = [f"{name}={value}" for name, value in log.settings.items() if "P2P" in name]
    if case.share is not None and case.share >= 0.82:
        return None  # a line of one pair, or of another try: the bandwidth is NVLink's
    case.evidence.extend(f"{one} is set" for one in settings)
    fixes = tuple(f"remove {one}" for one in settings)
    return case.answer("pcie-not-nvlink", "GPUs of a node do not use NVLink.", (*fixes, TOPO_STEP), "high")


def _log_alone(case: NcclCase, log: NcclLog) -> Diagnosis | None:
    good = all(path.startswith("P2P") for path in log.near) if log.near else log.nvls
    if case.nodes > 1 or log.far:
        plugin = log.network not in ("", "IB", "Socket")  # as libfabric's, which lists its cards otherwise
        whole = bool(log.near or log.far) and all("GDRDMA" in path for path in log.far)
        good = good and log.gdr_on and not log.gdr_off and whole and (bool(log.cards) or plugin)
        slow = re.search(r"transport protocol SENDRECV", case.text) and re.search(r"\bp[56]", case.text)
        good = good and not slow
    if not good:
        return None
    case.evidence.append(
        ("P2P between the GPUs of a node" if log.near else "NVLink SHARP in a node")
        + (", GPUDirect RDMA between nodes" if log.far else "")
    )
    return case.answer(
        "healthy",
        "The log shows the paths one would want. It has no bandwidth: measure it.",
        (TEST_STEP,),
        "medium",
    )
