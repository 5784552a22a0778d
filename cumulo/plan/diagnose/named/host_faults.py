"""Faults of a host that a text names: PCIe redirection, NUMA binding, limits, services that do not run, errors of
links, other people's processes. Each is found in the output of the tool that shows it."""

from cumulo.base import quick_re as re
from cumulo.plan.diagnose.diagnosis import LOG_STEP, PORTS_STEP, TOPO_STEP
from cumulo.plan.diagnose.link_states import whole_line
from cumulo.plan.diagnose.named.fault import FAILED, SLOW, SLOW_NETWORK, SLOW_NODE, Fault

_ACS = re.compile(
    r"ACSCtl:[^\n]*(?:ReqRedir|CmpltRedir|P2PReqRedirect)\+|\bACS (?:is |was )?(?:on|enabled|active)\b", re.I
)
_DIED = re.compile(
    r"oom[_-]?kill|OOM[- ]?Killed|[Oo]ut [Oo]f [Mm]emory: Killed|\bKilled process \d+|task \d+: Out Of Memory|"
    r"exitcode\s*:\s*-(?:9|11|7|6)\b|Segmentation fault|\bSIG(?:KILL|SEGV|BUS|ABRT)\b|exited on signal|"
    r"torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory|device-side assert triggered|"
    r"an illegal memory access was encountered"
)
_RAISED = re.compile(
    r"^(?:\[rank\d+\]:\s*)?(?:Key|Value|Type|Index|FileNotFound|OS|IO|Attribute|ZeroDivision|Assertion|Memory|Import|"
    r"ModuleNotFound|Unicode\w*|EOF|Permission|NotImplemented)Error\b[^\n]*",
    re.M,
)
_STACK = re.compile(r"^\s+\w+ \([^\n]*\)(?:\n\s+\w+ \([^\n]*\))+", re.M)
_STACKS = (
    (r"dataloader|_next_data|queue\.py|dataset", "waits for data (its data loader)"),
    (r"torch/serialization|\bsave\b|checkpoint", "writes or reads a checkpoint"),
    (r"compile|inductor|triton", "compiles"),
    (r"", "is elsewhere in the program, as its stack shows"),
)
_IOMMU = re.compile(
    r"\b(?:intel|amd)_iommu=on\b|DMAR: IOMMU enabled|AMD-Vi: (?:Interrupt remapping|IOMMU) enabled|"
    r"iommu: Default domain type: Translated|\bIOMMU (?:is )?(?:on|enabled)\b",
    re.I,
)
_CARD_NODE = re.compile(r"numa_node[^\n]*\n\s*(\d)\s*$|\bNUMA[ _]node\s*[:=]\s*(\d)", re.M | re.I)
_BOUND = re.compile(
    r"\b(?:cpubind|nodebind|membind|cpunodebind)\s*[:=]\s*(\d)\s*$|--cpunodebind[= ](\d)", re.M
)
_NUMA_WORDS = re.compile(
    r"\b(?:wrong|far|other|remote|opposite) (?:numa(?: node)?|socket)\b|\bcross(?:es|ing)?[ -](?:numa|socket)",
    re.I,
)
_ERRORS = re.compile(
    r"\b((?:Symbol|LinkErrorRecovery|LinkDowned|PortRcv(?:Errors?)?|RcvErrors?|LocalLinkIntegrity\w*|"
    r"symbol_error|link_error_recovery|link_downed|port_rcv_errors|rx_symbol_err_phy|rx_crc_errors_phy|"
    r"rx_pcs_symbol_err_phy|phy_symbol_errors)\w*)\s*[:=.]+\s*(\d+)|"
    r"((?:Replay|CRC(?: FLIT)?|Recovery|FLIT|Raw)(?: Error| Data CRC Error)?s?(?: Count(?:er)?)?)\s*:\s*(\d+)",
    re.I,
)
_MANY_ERRORS = 100
_BAD_SIGNAL = re.compile(
    r"[Bb]ad signal integrity|(?:raw|effective) (?:physical )?BER\s*:\s*\d(?:\.\d+)?E-0?[1-8]\b", re.I
)
_PROCESS = re.compile(r"^\|\s+(\d+)\s+\S+\s+\S+\s+(\d+)\s+C\s+(\S+)\s+(\d+)MiB\s*\|", re.M)
_WORDS_BUSY = re.compile(
    r"\b(?:other|another|someone else'?s?|second|colleague'?s?) (?:training |inference )?"
    r"(?:job|process|run|user|tenant)s? (?:is |are |was |were )?(?:on|using|running|uses|still|also)\b",
    re.I,
)
_THROTTLE_STEP = "run again on free GPUs (`nvidia-smi` lists the processes of each)"


def host_faults(text: str) -> list[Fault]:
    readers = (_died, _stuck, _redirected, _unbound, _link_errors, _busy)
    return [found for read in readers if (found := read(text)) is not None]


def _died(text: str) -> Fault | None:
    if (found := _DIED.search(text) or _RAISED.search(text)) is None:
        return None
    rank = re.search(r"\[rank(\d+)\]", whole_line(found)) or re.search(
        r"\b(?:local_rank|task):? (\d+)", whole_line(found)
    )
    who = f"The process of rank {rank[1]}" if rank else "A process"
    return Fault(
        "process-died",
        f"{who} died (memory, a signal or an exception), and the others wait for it in the collective.",
        whole_line(found),
        (
            "look at the first message of the process that died, and at `dmesg` of its host for the OOM killer",
            "give it more host memory (fewer data workers, --mem), if it was killed for memory",
        ),
        frozenset({"late-rank", "failed", "unknown", "no-connection"}),
        sure=True,
    )


def _stuck(text: str) -> Fault | None:
    """Where a stack shows what the rank does that did not come."""
    if (found := _STACK.search(text)) is None:
        return None
    what = next(words for pattern, words in _STACKS if re.search(pattern, found[0], re.I))
    rank = re.search(r"\brank[ _]?(\d+)\b[^\n]*\n[^\n]*(?:Thread|MainThread)|#\s*rank[ _]?(\d+)", text, re.I)
    who = f"Rank {rank[1] or rank[2]}" if rank else "The rank that did not come"
    return Fault(
        "late-rank",
        f"{who} {what}: it never came to the collective. The network is not at fault.",
        found[0].strip(),
        ("look at that rank's storage, data workers and logs",),
        frozenset({"late-rank"}),
        sure=True,
    )


def _redirected(text: str) -> Fault | None:
    if (found := _ACS.search(text)) is None:
        return _translated(text)
    return Fault(
        "acs",
        "PCIe ACS is on: traffic between devices of one switch goes up through the root complex.",
        whole_line(found),
        (
            "turn ACS off in the BIOS, or with `setpci` on every switch port (ECAP_ACS+6.w=0)",
            "in virtual machines use ATS, or give GPU and card together to one guest",
        ),
        SLOW | FAILED,
    )


def _translated(text: str) -> Fault | None:
    found = _IOMMU.search(text)
    if found is None or re.search(
        r"\biommu(?:\.passthrough)?=(?:pt|1)\b|iommu: Default domain type: Passthrough", text
    ):
        return None
    return Fault(
        "acs",
        "The IOMMU is on: traffic between devices is translated, and goes up through the root complex.",
        whole_line(found),
        ("boot with iommu=pt (or turn the IOMMU off), and ACS off on the switch ports", TOPO_STEP),
        (SLOW_NODE | {"no-gdr"}) - {"nvls-off", "late-rank"},
        confidence="medium",
    )


def _unbound(text: str) -> Fault | None:
    """A card's socket, and the socket to which the process is bound."""
    card, bound = _CARD_NODE.search(text), _BOUND.search(text)
    words = _NUMA_WORDS.search(text)
    apart = card and bound and (card[1] or card[2]) != (bound[1] or bound[2])
    if not apart and not words:
        return None
    said = "the card is on NUMA node {}, the process on {}".format(
        (card[1] or card[2]) if card else "?", (bound[1] or bound[2]) if bound else "?"
    )
    return numa_fault(said if apart else whole_line(words) if words else said)


def numa_fault(words: str) -> Fault:
    return Fault(
        "numa",
        "The process runs on the other socket than its card: traffic crosses the link between sockets.",
        words,
        (
            "bind each process to the socket of its GPU and card (numactl -N, --cpu-bind, --map-by numa)",
            TOPO_STEP,
        ),
        SLOW - {"rail-down"},
    )


def _link_errors(text: str) -> Fault | None:
    for counter in _ERRORS.finditer(text):
        count = int(counter[2] or counter[4])
        near = counter[3] is not None
        if count >= _MANY_ERRORS:
            return Fault(
                "link-errors",
                ("An NVLink" if near else "A port")
                + " has many errors: a bad cable, transceiver or connector.",
                whole_line(counter),
                (
                    "clean or change the cable and transceiver, and watch whether the counters still rise",
                    TOPO_STEP if near else PORTS_STEP,
                ),
                SLOW_NODE if near else SLOW_NETWORK,
                against=True,
            )
    if found := _BAD_SIGNAL.search(text):
        return Fault(
            "link-errors",
            "A port has a bad signal: the cable or transceiver is at fault.",
            whole_line(found),
            ("clean or change the cable and transceiver",),
            SLOW_NETWORK,
            against=True,
        )
    return None


def _busy(text: str) -> Fault | None:
    """Processes on the GPUs that are not the test's own."""
    foreign = [one for one in _PROCESS.findall(text) if "_perf" not in one[2]]
    own = [one for one in _PROCESS.findall(text) if "_perf" in one[2]]
    words = _WORDS_BUSY.search(text)
    if not (foreign and own) and not words:
        return None
    said = whole_line(words) if words else f"GPU {foreign[0][0]}: process {foreign[0][1]} {foreign[0][2]}"
    return Fault(
        "busy",
        "Another job uses the same GPUs or links.",
        said,
        (_THROTTLE_STEP, LOG_STEP),
        SLOW,
        confidence="medium",
    )
