"""Flight-recorder dumps (JSON), reports of torchfrtrace and watchdog messages of PyTorch as data: which rank did
not come to which collective."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

_TIMEOUT = re.compile(
    r"\bRank (\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)"
)
_LAST = re.compile(r"Rank (\d+)\].{0,500}?last enqueued (?:NCCL )?work: (-?\d+), last completed")
_MISSING = re.compile(r"[Mm]issing ranks\s*:?\s*[{\[(]?\s*(\d+(?:\s*,\s*\d+)*)")
_NUMBER = re.compile(r"(?:sequence number|collective(?:_seq_id)?)\s*[:#=]?\s*(\d+)")
_MISMATCH = re.compile(r"\b(\w+_MISMATCH)\b")
_OBJECT = re.compile(r'\{\s*"')
_NAME = re.compile(r"\bnccl:(\w+)|\bcollective:\s*(?!nccl:)(\w+)")
_SILENT = 0.2  # of the ranks that wait; of a smaller group more would be missing
_WAITED = 0.4  # of the other ranks' time in a collective


@dataclass(frozen=True, slots=True)
class RankProgress:
    """How far ranks came."""

    collective: str  # in which some wait; "": none does
    sequence: int = 0
    waiting: tuple[int, ...] = ()  # ranks that came to it
    missing: tuple[int, ...] = ()  # ranks that did not
    differ: str = ""  # what ranks disagree about, as a sentence
    where: str = ""  # the line of the program, where it is recorded
    ranks: int = 0  # whose dumps are here
    world: int = 0  # ranks of the largest group, where the dumps say it
    slow: str = ""  # the rank for which others wait, by how long their collectives take


def parse_progress(text: str) -> RankProgress | None:
    readers = (_from_dumps, _from_report, _from_watchdog)
    return next((found for read in readers if (found := read(text)) is not None), None)


def _from_report(text: str) -> RankProgress | None:
    """What torchfrtrace prints of the dumps of all ranks."""
    missing, mismatch = _MISSING.search(text), _MISMATCH.search(text)
    if missing is None and mismatch is None:
        return None
    number, name = _NUMBER.search(text), _NAME.search(text)
    differ = ""
    if mismatch is not None:
        culprits = sorted({int(rank) for rank in re.findall(r"Culprit rank (\d+)", text)})
        who = f"rank {', '.join(map(str, culprits))}" if culprits else "some ranks"
        differ = f"{who} differs from the others ({mismatch[1].lower().replace('_', ' ')})"
    return RankProgress(
        (name[1] or name[2]) if name else "a collective",
        int(number[1]) if number else 0,
        missing=tuple(int(one) for one in missing[1].split(",")) if missing else (),
        differ=differ,
    )


def _from_watchdog(text: str) -> RankProgress | None:
    found = [(int(rank), int(number), name) for rank, number, name in _TIMEOUT.findall(text)]
    if not found:
        return None
    sequence = max(number for _, number, _ in found)
    here = [one for one in found if one[1] == sequence]
    waiting = {rank for rank, *_ in here}
    behind = {rank for rank, number, *_ in found if number < sequence}
    behind |= {int(rank) for rank, queued in _LAST.findall(text) if int(queued) < sequence}
    silent = set(range(max(waiting))) - waiting - behind
    if not behind and len(waiting) >= 3 and len(silent) <= _SILENT * len(waiting):
        behind = silent  # all others report that they wait
    kinds = sorted({name for _, _, name in here})
    differ = f"ranks call different collectives: {', '.join(kinds)}" if len(kinds) > 1 else ""
    return RankProgress(kinds[0], sequence, tuple(sorted(waiting - behind)), tuple(sorted(behind)), differ)


def _from_dumps(text: str) -> RankProgress | None:
    last: dict[int, dict[str, Any]] = {}
    calls: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)  # by number, then by rank
    world = 0
    for rank, dump in _dumps(text):
        entries = [one for one in dump["entries"] if isinstance(one, dict) and not one.get("is_p2p")]
        for entry in entries:
            calls[int(entry.get("collective_seq_id", 0))][rank] = entry
        groups = [one for one in (dump.get("pg_config") or {}).values() if isinstance(one, dict)]
        world = max([world, *(len(re.findall(r"\d+", str(one.get("ranks", "")))) for one in groups)])
        if entries:
            last[rank] = max(entries, key=lambda one: int(one.get("collective_seq_id", 0)))
    if not last:
        return None
    sequence = max(calls)
    here = calls[sequence]
    if all(one.get("state") == "completed" for one in last.values()) and len(here) == len(last):
        return RankProgress("", ranks=len(last), world=world, slow=_straggler(calls))
    one = next(iter(here.values()))
    kinds = sorted({str(entry.get("profiling_name")) for entry in here.values()})
    sizes = sorted({str(entry.get("input_sizes")) for entry in here.values()})
    differ = f"ranks call different collectives: {', '.join(kinds)}" if len(kinds) > 1 else ""
    if not differ and len(sizes) > 1:
        differ = f"ranks give different sizes: {', '.join(sizes)}"
    frame = (one.get("frames") or [{}])[0]
    return RankProgress(
        str(one.get("profiling_name", "")).removeprefix("nccl:"),
        sequence,
        tuple(sorted(here)),
        tuple(sorted(rank for rank in last if rank not in here)),
        differ,
        f"{frame.get('filename', '')}:{frame.get('line', '')}".strip(":"),
        len(last),
        world,
    )


def _dumps(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rank and dump: one object for each rank, or one that holds them by rank."""
    decoder, at = json.JSONDecoder(), 0
    while (begin := _OBJECT.search(text, at)) is not None:
        try:
            found, at = decoder.raw_decode(text, begin.start())
        except (ValueError, RecursionError):
            at = begin.end()
            continue
        if "entries" in found:
            yield int(found.get("rank", 0)), found
        for name, one in found.items():
            if isinstance(one, dict) and "entries" in one:
                yield int(one.get("rank", re.sub(r"\D", "", name) or 0)), one


def _straggler(calls: dict[int, dict[int, dict[str, Any]]]) -> str:
    """The rank whose collectives are much shorter than the others': they wait in each until it comes."""
    times: dict[int, list[float]] = defaultdict(list)
    for ranks in calls.values():
        for rank, entry in ranks.items():
            if isinstance(took := entry.get("duration_ms"), int | float):
                times[rank].append(float(took))
    means = {rank: sum(one) / len(one) for rank, one in times.items()}
    if len(means) < 3:
        return ""
    usual, first = median(means.values()), min(means, key=lambda rank: means[rank])
    if means[first] >= _WAITED * usual:
        return ""
    return f"rank {first} takes {means[first]:.3g} ms in each and the others {usual:.3g}: they wait for it"
