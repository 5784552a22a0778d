"""Mistakes in NCCL's settings: an environment file against the fabric it is for."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cumulo.base.nearest import nearest
from cumulo.diagnose.lint import Finding, Severity
from cumulo.spec.cluster import Fabric

_LINE = re.compile(
    r"^\s*(?:export\s+|ENV\s+|-x\s+|-\s+)?([A-Z][A-Z0-9_]*)\s*[=:]\s*[\"']?([^\"'#\n]*)[\"']?", re.MULTILINE
)
_CODE_POINTS = ("24", "26", "34", "46")  # DSCPs that lossless queues are given most often
# Names without their NCCL_.
_NAMES = """
    ALGO ASYNC_ERROR_HANDLING BLOCKING_WAIT BUFFSIZE COLLNET_ENABLE COMM_BLOCKING CROSS_NIC
    CUMEM_ENABLE DEBUG DEBUG_FILE DEBUG_SUBSYS DMABUF_ENABLE GRAPH_FILE IB_ADAPTIVE_ROUTING
    IB_DISABLE IB_FIFO_TC IB_GID_INDEX IB_HCA IB_MERGE_NICS IB_PCI_RELAXED_ORDERING
    IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC
    IB_TIMEOUT IGNORE_CPU_AFFINITY LAUNCH_MODE MAX_CTAS MAX_NCHANNELS MIN_NCHANNELS NET
    NET_GDR_LEVEL NET_GDR_READ NET_PLUGIN NSOCKS_PERTHREAD NTHREADS NVLS_ENABLE P2P_DISABLE
    P2P_LEVEL PROTO PXN_DISABLE SHM_DISABLE SOCKET_FAMILY SOCKET_IFNAME SOCKET_NTHREADS
    TOPO_DUMP_FILE TOPO_FILE TUNER_PLUGIN
"""
KNOWN = tuple(f"NCCL_{name}" for name in _NAMES.split())


def settings_of(text: str) -> dict[str, str]:
    return {name: value.strip() for name, value in _LINE.findall(text)}


def lint_settings(given: Mapping[str, str], fabric: Fabric) -> Iterator[Finding]:
    yield from _off(given)
    yield from _names(given)
    if fabric.transport == "roce":
        yield from _roce(given)
    hca = given.get("NCCL_IB_HCA", "")
    if hca and not hca.startswith("^") and "," not in hca and re.search(r"_\w*\d+(:\d+)?$", hca):
        yield Finding(
            "warning",
            "nccl-hca",
            f"NCCL_IB_HCA={hca} names one card, and all GPUs of a node share it.",
            "name all compute cards, or only their prefix (NCCL_IB_HCA=mlx5)",
            "up to 8 times the bandwidth between nodes",
        )
    if fabric.kind == "rail" and given.get("NCCL_CROSS_NIC") == "1":
        yield Finding(
            "warning",
            "rails-crossed",
            "NCCL_CROSS_NIC=1 lets rings change rails, and rails meet in the spine only.",
            "set NCCL_CROSS_NIC=0 (or 2)",
            "rings stay below one leaf switch",
        )
    if fabric.kind == "rail" and given.get("NCCL_PXN_DISABLE") == "1":
        yield Finding(
            "warning",
            "rails-crossed",
            "NCCL_PXN_DISABLE=1: messages to other rails pass the spine.",
            "remove it, so that they change rails over NVLink",
            "all-to-alls stay below the leaf switches",
        )


@dataclass(frozen=True, slots=True)
class SlowSetting:
    """A setting that costs bandwidth: its bad values, or the least good one."""

    name: str
    does: str
    gain: str
    cause: str  # a key of CAUSES: what a run that has it suffers from
    bad: tuple[str, ...] = ()
    least: int = 0  # fewer are bad
    severity: Severity = "warning"
    rule: str = "nccl-setting"

    def is_bad(self, value: str) -> bool:
        return value.strip(".") in self.bad or (value.isdigit() and int(value) < self.least)


_NEAR, _CHANNELS = "10 times the bandwidth in a node", "several times the bandwidth of large messages"
# `cumulo diagnose` looks for them, too.
SLOW_SETTINGS = (
    SlowSetting("NCCL_IB_DISABLE", "sends everything over TCP", "10 times the bandwidth between nodes and more",
                "wrong-nic", ("1",), severity="error"),
    SlowSetting("NCCL_P2P_DISABLE", "keeps the GPUs of a node from using NVLink", _NEAR,
                "pcie-not-nvlink", ("1",), severity="error"),
    SlowSetting("NCCL_P2P_LEVEL", "keeps the GPUs of a node from using NVLink", _NEAR,
                "pcie-not-nvlink", ("LOC", "0"), severity="error"),
    SlowSetting("NCCL_NET_GDR_LEVEL", "copies all messages through host memory",
                "2 to 4 times the bandwidth between nodes", "no-gdr", ("LOC", "0"), severity="error"),
    SlowSetting("NCCL_SHM_DISABLE", "sends messages in a node over the network where P2P is not possible",
                "less traffic on the cards", "setting", ("1",)),
    SlowSetting("NCCL_NVLS_ENABLE", "keeps the NVSwitch from adding", "up to 1.3 times the all-reduce in a node",
                "setting", ("0",), severity="note"),
    SlowSetting("NCCL_MAX_NCHANNELS", "lets NCCL use few channels", _CHANNELS, "setting", least=8,
                rule="nccl-limit"),
    SlowSetting("NCCL_MAX_CTAS", "lets NCCL use few channels", _CHANNELS, "setting", least=8, rule="nccl-limit"),
    SlowSetting("NCCL_BUFFSIZE", "makes NCCL's buffers small", _CHANNELS, "setting", least=1 << 20,
                rule="nccl-limit"),
    SlowSetting("NCCL_NTHREADS", "gives each channel few threads", _CHANNELS, "setting", least=256,
                rule="nccl-limit"),
)  # fmt: skip


def slow_settings(given: Mapping[str, str]) -> list[SlowSetting]:
    return [one for one in SLOW_SETTINGS if one.name in given and one.is_bad(given[one.name])]


def _off(given: Mapping[str, str]) -> Iterator[Finding]:
    for one in slow_settings(given):
        sentence = f"{one.name}={given[one.name]} {one.does}."
        yield Finding(one.severity, one.rule, sentence, f"remove {one.name}", one.gain)
    if given.get("NCCL_ASYNC_ERROR_HANDLING") == "0":
        yield Finding(
            "warning",
            "nccl-setting",
            "NCCL_ASYNC_ERROR_HANDLING=0 lets a lost peer hang the job.",
            "remove NCCL_ASYNC_ERROR_HANDLING",
            "an error instead of a hang",
        )
    interface = given.get("NCCL_SOCKET_IFNAME", "")
    if re.match(r"(lo|docker|veth|br-|virbr)", interface):
        yield Finding(
            "error",
            "nccl-interface",
            f"NCCL_SOCKET_IFNAME={interface} is an interface that other nodes cannot reach.",
            "name the interface of the cluster's network, such as eth0 or bond0, or ^lo,docker0",
            "ranks find each other",
        )
    for name in ("NCCL_ALGO", "NCCL_PROTO"):
        if given.get(name) and "," not in given[name]:
            yield Finding(
                "warning",
                "nccl-pinned",
                f"{name}={given[name]} holds for all sizes, and NCCL chooses better by size.",
                f"remove {name}",
                "short messages are quicker with LL and trees, long ones with Simple and rings",
            )
    if given.get("NCCL_DEBUG", "").upper() == "TRACE":
        yield Finding(
            "note",
            "nccl-debug",
            "NCCL_DEBUG=TRACE writes a line for each call.",
            "set it to WARN",
            "less time in writing logs",
        )
    if given.get("NCCL_IB_RETRY_CNT") in ("0", "1", "2"):
        yield Finding(
            "warning",
            "nccl-timeout",
            f"NCCL_IB_RETRY_CNT={given['NCCL_IB_RETRY_CNT']}: a single lost packet may end the job.",
            "set it to 7",
            "a flap of some seconds does not end the job",
        )
    timeout = given.get("NCCL_IB_TIMEOUT", "")
    if timeout.isdigit() and int(timeout) < 18:
        yield Finding(
            "warning",
            "nccl-timeout",
            f"NCCL_IB_TIMEOUT={timeout} gives up after {4.096e-6 * 2 ** int(timeout) * 7:.2g} s, sooner "
            f"than a link's flap.",
            "set it to 20 or 22",
            "a flap of some seconds does not end the job",
        )


def _roce(given: Mapping[str, str]) -> Iterator[Finding]:
    index = given.get("NCCL_IB_GID_INDEX")
    if index in ("0", "1", "2"):
        yield Finding(
            "error",
            "roce-gid",
            f"NCCL_IB_GID_INDEX={index} is usually a RoCE v1 or link-local address, which routers drop.",
            "look at `show_gids` and take the RoCE v2 entry with the card's IPv4 address, most often 3; or "
            "leave it to "
            "NCCL 2.21 and later",
            "messages pass routers at all",
        )
    if given.get("NCCL_IB_TC", "0") == "0":
        now = "NCCL_IB_TC=0" if "NCCL_IB_TC" in given else "NCCL_IB_TC is not set"
        yield Finding(
            "warning",
            "roce-traffic-class",
            f"{now}: packets travel in class 0, which switches drop when full.",
            "set NCCL_IB_TC to the class of the lossless queue: 106 for DSCP 26",
            "no retransmissions under incast",
        )
    elif given["NCCL_IB_TC"] in _CODE_POINTS:
        yield Finding(
            "warning",
            "roce-traffic-class",
            f"NCCL_IB_TC={given['NCCL_IB_TC']} looks like a DSCP, and a traffic class is four times that.",
            f"a DSCP of {given['NCCL_IB_TC']} is NCCL_IB_TC={4 * int(given['NCCL_IB_TC'])}",
            "packets reach the lossless queue",
        )
    pairs = given.get("NCCL_IB_QPS_PER_CONNECTION", "1")
    if pairs.isdigit() and int(pairs) < 4 and given.get("NCCL_IB_ADAPTIVE_ROUTING") != "1":
        yield Finding(
            "warning",
            "ecmp-collisions",
            f"{pairs} queue pair for each connection: few flows hash onto many links.",
            "set NCCL_IB_QPS_PER_CONNECTION=4 and NCCL_IB_SPLIT_DATA_ON_QPS=1",
            "see `cumulo network lint` with --gpus",
        )
    mtu = next(
        (given[name] for name in ("MTU", "RDMA_MTU", "INTERFACE_MTU", "IB_MTU") if name in given), None
    )
    if mtu is not None and mtu.isdigit() and int(mtu) < 4096:
        yield Finding(
            "warning",
            "mtu",
            f"An MTU of {mtu} gives RDMA packets of {1024 if int(mtu) >= 1500 else 512} bytes.",
            "set the interfaces and switches to 9000 (4096 for RDMA)",
            "3 to 8% more bandwidth, and a quarter of the packets",
        )


def _names(given: Mapping[str, str]) -> Iterator[Finding]:
    for name in given:
        if name.startswith("NCCL_") and name not in KNOWN:
            close = nearest(name, KNOWN)
            if close:
                yield Finding(
                    "warning",
                    "nccl-name",
                    f"{name} is no setting of NCCL that this lint knows.",
                    f"did you mean {close[0]}?",
                    "the setting takes effect",
                )
