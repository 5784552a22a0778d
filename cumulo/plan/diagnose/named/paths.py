"""Faults of a path between hosts that other tools show: pings of large packets that are lost, RoCE addresses (GIDs)
that no router knows, and versions of NCCL that differ between hosts."""

from cumulo.base import quick_re as re
from cumulo.plan.diagnose.diagnosis import LOG_STEP, PAIRS_STEP
from cumulo.plan.diagnose.named.fault import FAILED, SLOW_NETWORK, Fault
from cumulo.plan.diagnose.named.settings import settings_of

_PING = re.compile(r"\bping6?\b[^\n]*?\s-s\s*(\d+)[^\n]*((?:\n(?![^\n]*\bping6?\s+-)[^\n]*){0,12})")
_LOST = re.compile(r"100(?:\.0)?% packet loss|[Mm]essage too long|[Ff]rag(?:mentation)? needed|local error")
_CAME = re.compile(r"\b\d+ bytes from\b|\b0(?:\.0)?% packet loss|rtt min/avg/max|round-trip min/avg/max")
_JUMBO = 2000  # bytes: more than Ethernet's usual frame

# As a process prints it, not as people speak of it.
_VERSION = re.compile(
    r"^\s*(?:\S+:\d+:\d+ \[\d+\] )?(?:NCCL INFO )?[NR]CCL version\s*:?\s*(\d+\.\d+\.\d+)(?:\+\S+)?\s*$", re.M
)
_TRUNCATED = re.compile(r"[^\n]*Message truncated\s*:\s*received \d+ bytes instead of \d+[^\n]*")

_GID_ROW = re.compile(
    r"^\s*(\S+)\s+\d+\s+(\d+)\s+([0-9a-f]{4}(?::[0-9a-f]{4}){7})\s+(\S*\s+)?(v1|v2)\b", re.M | re.I
)
_LINK_LOCAL = re.compile(r"local_?[Gg]id\w*[ =:]*fe80::?|[Rr]emote_?[Gg]id\w*[ =:]*fe80::?")
_BROKEN_PATH = frozenset({"rail-down", "no-path"}) | FAILED


def path_faults(text: str) -> list[Fault]:
    readers = (_lost_pings, _versions, _wrong_gid)
    return [found for read in readers if (found := read(text)) is not None]


def _lost_pings(text: str) -> Fault | None:
    """Large packets are lost, and small ones arrive."""
    pings = [(int(size), answer) for size, answer in _PING.findall(text)]
    lost = [size for size, answer in pings if _LOST.search(answer)]
    came = [size for size, answer in pings if size not in lost and _CAME.search(answer)]
    large = [one for one in lost if one > _JUMBO]
    if (
        not large
        or any(one >= min(large) for one in came)
        or (not came and not re.search(r"\bmtu[ =]\d", text))
    ):
        return None
    small = f", and {max(came)} arrive" if came else ""
    return Fault(
        "mtu",
        f"Packets of {min(large)} bytes are lost{small}: a port on the path has a smaller MTU than the hosts.",
        f"ping -s {min(large)} is lost",
        (
            "set every switch port on the path to MTU 9216, and ping again with -M do -s 8972",
            PAIRS_STEP,
        ),
        SLOW_NETWORK | FAILED,
        sure=True,
    )


def _versions(text: str) -> Fault | None:
    """Processes of one run that have different versions, where it failed."""
    versions = sorted(set(_VERSION.findall(text)))
    cut = _TRUNCATED.search(text)
    if len(versions) < 2 and cut is None:
        return None
    which = f" ({' and '.join(versions)})" if len(versions) > 1 else ""
    return Fault(
        "version-mismatch",
        f"The processes have different versions of NCCL{which}: they do not understand each other's messages.",
        cut[0].strip() if cut else f"NCCL version {versions[0]} and {versions[-1]}",
        (
            "use one container image on all nodes; look for another libnccl in LD_LIBRARY_PATH",
            LOG_STEP,
        ),
        FAILED,
        sure=len(versions) > 1 and cut is not None,
        confidence="high" if len(versions) > 1 else "medium",
    )


def _wrong_gid(text: str) -> Fault | None:
    """The chosen GID is of RoCE v1 or of one link only, so that no router forwards it."""
    index = settings_of(text).get("NCCL_IB_GID_INDEX", "")
    rows = {row[2]: row for row in _GID_ROW.finditer(text)}
    chosen = rows.get(index)
    words = ""
    if chosen is not None and (chosen[5].lower() == "v1" or chosen[3].lower().startswith("fe80")):
        words = chosen[0].strip()
    elif "RoCE" in text and (local := _LINK_LOCAL.search(text)):
        words = local[0]
    if not words:
        return None
    good = next((at for at, row in rows.items() if row[5] == "v2" and "ffff" in row[3].lower()), "3")
    set_to = f"NCCL_IB_GID_INDEX={index} chooses" if index else "The cards use"
    return Fault(
        "no-path",
        f"{set_to} a GID that no router forwards (RoCE v1, or of one link): the cards do not reach each other.",
        words,
        (f"set NCCL_IB_GID_INDEX={good} (RoCE v2 with the IPv4 address; see `show_gids`)", PAIRS_STEP),
        _BROKEN_PATH,
        sure=True,
    )
