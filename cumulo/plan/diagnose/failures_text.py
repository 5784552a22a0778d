"""Messages with which a run ends or a driver reports a fault, and what each says. `diagnose` reads them before it
looks at bandwidths: what has failed measures nothing."""

from dataclasses import dataclass

from cumulo.base import quick_re as re
from cumulo.plan.diagnose.diagnosis import LOG_STEP, PAIRS_STEP, PORTS_STEP, TOPO_STEP, Diagnosis


@dataclass(frozen=True, slots=True)
class _Failure:
    pattern: str
    cause: str
    sentence: str
    steps: tuple[str, ...]
    confidence: str = "high"


_INTERFACE_STEP = "set NCCL_SOCKET_IFNAME to the interface that joins the nodes, such as eth0 or ^docker0,lo"
_DRIVER_STEP = "run `dmesg | grep -i xid` and `nvidia-smi -q` on the host, and take the GPU out of use"
# The first that fits counts: those that name a part come before those that only say that something failed.
_FAILURES = (
    _Failure(
        r"NVRM: Xid|\bXid \(PCI|fallen off the bus|uncorrectable (?:ECC|NVLink)|nvlink error|GPU is lost|"
        r"Unable to determine the device handle|Remapping Failure Occurred\s*:\s*Yes|uncorrectable ECC error",
        "gpu-fault",
        "The driver reports an error of a GPU or of its NVLink.",
        (_DRIVER_STEP, TOPO_STEP),
    ),
    _Failure(
        r"Got async (?:fatal )?event\s*:\s*(?:port error|device fatal|port.*down)|Link [Dd]own|carrier lost",
        "rail-down",
        "A port went down during the run.",
        (PORTS_STEP, PAIRS_STEP),
    ),
    _Failure(
        r"(?:completion|Completion|wc)[^\n]{0,80}(?:status[= ]|error[= ]|with error )\s*12\b|RETRY_EXC|"
        r"retry (?:counter )?exceeded",
        "rail-down",
        "A peer's card no longer acknowledges messages: its port, its cable or the path to it was lost.",
        (PORTS_STEP, PAIRS_STEP, "look at the host and card that the message names"),
        "medium",
    ),
    _Failure(
        r"Mismatched NCCL version|[Mm]ismatch(?:ed|ing)? NCCL version|NCCL version mismatch|"
        r"different (?:NCCL|RCCL) versions|driver version is insufficient|no kernel image is available|"
        r"forward compatibility was attempted|undefined symbol: nccl|version `NCCL|Driver/library version mismatch|"
        r"PTX was compiled with an unsupported",
        "version-mismatch",
        "Versions do not fit together: of NCCL between the nodes, or of CUDA and the driver.",
        (
            "compare `nvidia-smi` and `python -c 'import torch; print(torch.cuda.nccl.version())'` on all nodes",
            "use one container image on all nodes; look for another libnccl in LD_LIBRARY_PATH",
        ),
    ),
    _Failure(
        r"mismatch in rank count|rank count mismatch",
        "wrong-ranks",
        "Processes state different numbers of ranks: some belong to another run, or were started otherwise.",
        ("end the processes of older runs, and check that all nodes have the same world size",),
    ),
    _Failure(
        r"Duplicate GPU detected",
        "failed",
        "Two ranks use the same GPU.",
        ("give each rank its own: check CUDA_VISIBLE_DEVICES, local_rank and -g against ranks per node",),
    ),
    _Failure(
        r"invalid device ordinal|Invalid CUDA device",
        "failed",
        "A rank asks for a GPU that its host (or container) does not have.",
        ("compare the ranks of each node with `nvidia-smi -L` inside the container",),
    ),
    _Failure(
        r"no socket interface found|Bootstrap : Using (?:docker|lo\b|virbr|br-|veth)[^\n]*(?=[\s\S]*(?:refused|"
        r"timed out|unreachable|abort|failed))",
        "wrong-nic",
        "NCCL tries to reach its peers over an interface that does not lead to them.",
        (_INTERFACE_STEP, LOG_STEP),
    ),
    _Failure(
        r"[Aa]ddress already in use|EADDRINUSE",
        "no-connection",
        "The port of the rendezvous is taken: an older run still has it.",
        ("end the older processes, or use another MASTER_PORT (--rdzv-endpoint)",),
    ),
    _Failure(
        r"Name or service not known|[Tt]emporary failure in name resolution|getaddrinfo[^\n]*fail|"
        r"[Cc]ould not resolve|nodename nor servname",
        "no-connection",
        "A host's name cannot be resolved.",
        ("use its address for MASTER_ADDR, or mend DNS or /etc/hosts in the container",),
    ),
    _Failure(
        r"[Cc]onnect(?:ion)?[^\n]{0,60}(?:[Rr]efused|[Nn]etwork is unreachable)|"
        r"No route to host|Network is unreachable",
        "wrong-nic",
        "NCCL tries to reach its peers over an interface that does not lead to them.",
        (_INTERFACE_STEP, LOG_STEP),
        "medium",
    ),
    _Failure(
        r"\b\d+/\d+ clients joined",
        "no-connection",
        "Not all processes came to the rendezvous: a node did not start, or it cannot reach the others.",
        ("check that every node runs, with the same MASTER_ADDR and MASTER_PORT", _INTERFACE_STEP),
        "medium",
    ),
    _Failure(
        r"(?:client socket|socketPollConnect|socketStartConnect|TCPStore|rendezvous|RendezvousTimeout)[^\n]{0,120}"
        r"[Tt]imed? ?out|[Tt]imed out[^\n]{0,60}(?:connect|store|rendezvous)|RendezvousTimeoutError",
        "no-connection",
        "Processes do not find each other: a node did not start, or its address or port cannot be reached.",
        (
            "check that every node runs, with the same MASTER_ADDR and MASTER_PORT",
            "test with `nc -l 45000` on one node and `nc NODE 45000` on the other, for a firewall",
            _INTERFACE_STEP,
        ),
        "medium",
    ),
    _Failure(
        r"ibv_modify_qp failed|Failed to modify QP|[Uu]nable to (?:find|read) (?:the )?(?:sgid|GID)|"
        r"Couldn't find GID|ibv_query_gid|Unable to Connect the HCA|Failed to (?:create|resolve) (?:AH|route)",
        "no-path",
        "The cards find no path to each other: a wrong GID index (RoCE v2 is needed), or another subnet or VLAN.",
        ("run `show_gids`, and set NCCL_IB_GID_INDEX to the RoCE v2 row (usually 3)", PAIRS_STEP, LOG_STEP),
    ),
    _Failure(
        r"[Mm]ismatch(?:ed|ing)? (?:collective|between collectives)|Detected mismatch between collectives|"
        r"COLLECTIVE_TYPE_MISMATCH|SIZE_OR_SYNTAX_MISMATCH|COLLECTIVE_DTYPE_MISMATCH",
        "mismatched-calls",
        "Ranks do not call the same collective with the same sizes.",
        ("make all ranks take the same branch before this collective, with tensors of the same shape",),
    ),
    _Failure(
        r"(?:status|error)[= ]+(?:4|10)\b[^\n]*(?:opcode|vendor err)|local protection error|remote access error",
        "no-gdr",
        "A card may not reach the memory it was given: GPUDirect RDMA registration, IOMMU or ACS is wrong.",
        (
            "run again with NCCL_NET_GDR_LEVEL=LOC: if that works, mend nvidia-peermem, ACS or the IOMMU",
            LOG_STEP,
        ),
        "medium",
    ),
    _Failure(
        r"ncclRemoteError|remote process (?:exited|has terminated)|[Cc]onnection closed by (?:remote )?peer|"
        r"Connection reset by peer|[Ss]ocket.{0,20}closed|exited on signal|mpirun noticed that process rank",
        "late-rank",
        "A process ended while others waited for it.",
        ("look at the first message of the process that ended, not at those of its peers", LOG_STEP),
        "medium",
    ),
    _Failure(
        r"out of memory|CUDA_ERROR_OUT_OF_MEMORY",
        "failed",
        "A GPU has too little free memory for the test's buffers.",
        ("run with a smaller -e, and look for other processes with `nvidia-smi`",),
    ),
    _Failure(
        r"Test (?:NCCL|CUDA) failure|unhandled (?:system|cuda) error|ncclSystemError|ncclInternalError|"
        r"ncclInvalidUsage|Test failure common|failed with error|Couldn't connect to",
        "failed",
        "The run ended in an error before it measured anything.",
        (LOG_STEP, "read the first NCCL WARN of each host"),
        "medium",
    ),
)

# What has measured bandwidths did not end so.
_OF_NO_RUN = (
    "failed",
    "late-rank",
    "wrong-nic",
    "no-connection",
    "mismatched-calls",
    "version-mismatch",
    "no-gdr",
)


def failure_verdict(text: str, measured: bool) -> Diagnosis | None:
    """`measured`: there are bandwidths, so that only what names a part counts, and no general error."""
    for one in _FAILURES:
        found = re.search(one.pattern, text)
        if found is None or (measured and one.cause in _OF_NO_RUN):
            continue
        if one.cause == "no-connection" and (too_few := _too_few_started(text)):
            return too_few
        line = text[text.rfind("\n", 0, found.start()) + 1 :].split("\n", 1)[0].strip()
        return Diagnosis(
            one.cause, one.sentence, (f"the text says: {line[:160]}",), one.steps, one.confidence
        )
    return None


_JOINED = re.compile(r"\b(\d+)/(\d+) clients joined")
_STARTED = re.compile(r"\bWORLD_SIZE[=:]\s*(\d+)|(?:^|\s)(?:--ntasks|-np|-n)[ =](\d+)\b")
_NODES = re.compile(r"--nnodes[ =](\d+)\b(?!:)|(?:--nodes|-N)[ =](\d+)\b")
_EACH = re.compile(r"--nproc[_-]per[_-]node[ =](\d+)|--ntasks-per-node[ =](\d+)")


def _too_few_started(text: str) -> Diagnosis | None:
    """The program waits for more processes than were started."""
    if (joined := _JOINED.search(text)) is None:
        return None
    came, asked = int(joined[1]), int(joined[2])
    started = {int(one or other) for one, other in _STARTED.findall(text)}
    nodes, each = _NODES.search(text), _EACH.search(text)
    if nodes and each:
        started.add(int(nodes[1] or nodes[2]) * int(each[1] or each[2]))
    if came not in started or asked in started:
        return None
    return Diagnosis(
        "wrong-ranks",
        f"{came} processes were started, and the program waits for {asked}.",
        (f"the text says: {joined[0]}",),
        (f"take the world size from the launcher (WORLD_SIZE), or start {asked} processes",),
        "high",
    )
