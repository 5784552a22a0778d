"""Cores to which the processes of a run are bound, as mpirun, srun and taskset print them."""

from collections import defaultdict

from cumulo.base import quick_re as re
from cumulo.plan.diagnose.diagnosis import TOPO_STEP
from cumulo.plan.diagnose.named.fault import SLOW, Fault

# Host (where it is said), rank or process, cores.
_LINES = (
    re.compile(
        r"^(?:\[([\w.-]+):\d+\] )?(?:\[[\w.-]+\]\s*)?(?:MCW )?[Rr]ank (\d+) (?:is )?bound to "
        r"(\S[^\n]*?)(?::\s|\s*$)",
        re.M,
    ),
    re.compile(
        r"^(?:cpu-bind\S*\s*[-=]\s*)\S*\s*-?\s*([\w.-]+), task\s+(\d+)\s+\d+ \[\d+\]: mask (0x[0-9a-fA-F,x]+)",
        re.M,
    ),
    re.compile(r"^()[^\n]*?pid (\d+)'s current affinity (?:list|mask): (\S+)", re.M),
    re.compile(r"^()[^\n]*?(?:rank|pid|local_rank)[ =:]*(\d+)\b[^\n]*Cpus_allowed_list:\s*(\S+)", re.M),
)
_FEW = 2  # cores that ranks share


def binding_faults(text: str) -> list[Fault]:
    for pattern in _LINES:
        sharers: dict[tuple[str, str], set[str]] = defaultdict(set)
        for host, rank, cores in pattern.findall(text):
            sharers[host, cores.strip()].add(rank)
        (host, cores), ranks = max(sharers.items(), key=lambda one: len(one[1]), default=(("", ""), set()))
        least = 2 if host else 3  # of several hosts each may have a process on its first core
        if len(ranks) >= least and _cores(cores) <= _FEW:
            return [_shared(len(ranks), cores)]
    return []


def _cores(words: str) -> int:
    """How many a binding names."""
    if words.startswith("0x"):
        return int(words.replace(",", "").replace("0x", ""), 16).bit_count()
    if named := re.findall(r"core[ :]*(\d+)(?:-(\d+))?", words):
        return sum(int(last or first) - int(first) + 1 for first, last in named)
    parts = re.findall(r"(\d+)(?:-(\d+))?", words)
    return sum(int(last or first) - int(first) + 1 for first, last in parts) if parts else 1 << 10


def _shared(ranks: int, cores: str) -> Fault:
    return Fault(
        "numa",
        f"{ranks} ranks are bound to the same core: their threads wait for each other, and every message is late.",
        f"{ranks} ranks bound to {cores[:80]}",
        (
            "give each process cores of its own, on its GPU's socket (--map-by ppr:4:socket:PE=8)",
            TOPO_STEP,
        ),
        SLOW | {"late-rank", "small-messages"},
        against=True,
    )
