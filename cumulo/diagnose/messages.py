"""Messages with which a run ends or a driver reports a fault, and the cause that each names. `diagnose` reads them
before it looks at bandwidths: what has failed measures nothing."""

import re
from dataclasses import dataclass

from cumulo.diagnose.diagnosis import Diagnosis
from cumulo.diagnose.plain_text import line_of


@dataclass(frozen=True, slots=True)
class _Message:
    pattern: str
    cause: str
    sentence: str
    with_numbers: bool = False  # it counts, too, where bandwidths were measured


# The first that fits counts: those that name a part come before those that only say that something failed.
_MESSAGES = (
    _Message(
        r"NVRM: Xid|\bXid \(PCI|fallen off the bus|uncorrectable (?:ECC|NVLink)|GPU is lost|"
        r"Unable to determine the device handle|Remapping Failure Occurred\s*:\s*Yes",
        "gpu-fault",
        "The driver reports an error of a GPU or of its NVLink.",
        with_numbers=True,
    ),
    _Message(
        r"Got async (?:fatal )?event\s*:\s*(?:port error|device fatal|port.*down)|Link [Dd]own|carrier lost",
        "rail-down",
        "A port went down during the run.",
        with_numbers=True,
    ),
    _Message(
        r"(?:completion|Completion|wc)[^\n]{0,80}(?:status[= ]|error[= ]|with error )\s*12\b|RETRY_EXC|"
        r"retry (?:counter )?exceeded",
        "rail-down",
        "A peer's card no longer acknowledges messages: its port, its cable or the path to it was lost.",
    ),
    _Message(
        r"[Mm]ismatch(?:ed|ing)? NCCL version|NCCL version mismatch|driver version is insufficient|"
        r"no kernel image is available|forward compatibility was attempted|Driver/library version mismatch",
        "version-mismatch",
        "Versions do not fit together: of NCCL between the nodes, or of CUDA and the driver.",
    ),
    _Message(
        r"mismatch in rank count|rank count mismatch",
        "wrong-ranks",
        "Processes state different numbers of ranks: some belong to another run, or were started otherwise.",
    ),
    _Message(
        r"no socket interface found|Bootstrap : Using (?:docker|lo\b|virbr|br-|veth)[^\n]*(?=[\s\S]*(?:refused|"
        r"timed out|unreachable|abort|failed))",
        "wrong-nic",
        "NCCL tries to reach its peers over an interface that does not lead to them.",
    ),
    _Message(
        r"[Aa]ddress already in use|EADDRINUSE",
        "no-connection",
        "The port of the rendezvous is taken: an older run still has it.",
    ),
    _Message(
        r"Name or service not known|[Tt]emporary failure in name resolution|[Cc]ould not resolve",
        "no-connection",
        "A host's name cannot be resolved.",
    ),
    _Message(
        r"[Cc]onnect(?:ion)?[^\n]{0,60}(?:[Rr]efused|[Nn]etwork is unreachable)|No route to host|"
        r"\b\d+/\d+ clients joined|RendezvousTimeoutError|(?:client socket|socketPollConnect|TCPStore|rendezvous)"
        r"[^\n]{0,120}[Tt]imed? ?out|[Tt]imed out[^\n]{0,60}(?:connect|store|rendezvous)",
        "no-connection",
        "Processes do not find each other: a node did not start, or its address or port cannot be reached.",
    ),
    _Message(
        r"Detected mismatch between collectives|[Mm]ismatch(?:ed|ing)? collective",
        "mismatched-calls",
        "Ranks do not call the same collective with the same sizes.",
    ),
    _Message(
        r"remote process (?:exited|has terminated)|[Cc]onnection closed by (?:remote )?peer|"
        r"Connection reset by peer|exited on signal|mpirun noticed that process rank",
        "late-rank",
        "A process ended while others waited for it: the first message of that process says why.",
    ),
    _Message(
        r"Test (?:NCCL|CUDA) failure|unhandled (?:system|cuda) error|ncclSystemError|ncclInternalError|"
        r"ncclInvalidUsage|Test failure common|Couldn't connect to|out of memory|Duplicate GPU detected|"
        r"invalid device ordinal|failed with error",
        "unknown",
        "The run ended in an error before it measured anything. Read the first message of each host.",
    ),
)


def message_verdict(text: str, measured: bool) -> Diagnosis | None:
    """`measured`: there are bandwidths, so that only what names a part counts, and no general error."""
    for one in _MESSAGES:
        if measured and not one.with_numbers:
            continue
        if found := re.search(one.pattern, text):
            confidence = "low" if one.cause == "unknown" else "high" if one.with_numbers else "medium"
            return Diagnosis(one.cause, one.sentence, (f"the text says: {line_of(found)}",), confidence)
    return None
