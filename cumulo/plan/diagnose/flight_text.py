"""Flight-recorder dumps and watchdog messages of PyTorch as data: which rank did not come to which collective.
`diagnose` calls it. Dumps are JSON or what Python prints of them: one object for each rank, all in one object, one
after another, or entry by entry under a heading for each rank."""

import ast
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from cumulo.base import quick_re as re

_TIMEOUT = re.compile(
    r"\bRank (\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)"
)
_COUNTS = re.compile(
    r"\[([^\[\]]*)\bRank (\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), "
    r"OpType=(\w+), NumelIn=(\d+), NumelOut=(\d+)"
)
# Collectives whose ranks all give as many elements.
EQUAL_COUNTS = (
    "ALLREDUCE",
    "BROADCAST",
    "_ALLGATHER_BASE",
    "_REDUCE_SCATTER_BASE",
    "ALLTOALL_BASE",
    "REDUCE",
)
_LAST = re.compile(
    r"Rank (\d+)\].*?last enqueued (?:NCCL )?work: (-?\d+), last completed (?:NCCL )?work: (-?\d+)"
)
# What torchfrtrace prints of the dumps of all ranks.
_MISSING = re.compile(r"[Mm]issing ranks\s*:?\s*[{\[(]?\s*(\d+(?:\s*,\s*\d+)*)")
_NUMBER = re.compile(r"(?:sequence number|collective(?:_seq_id)?)\s*[:#=]?\s*(\d+)")
_ERROR = re.compile(r"Error type: (\w*MISMATCH\w*)|\b(\w+_MISMATCH)\b")
_NAME = re.compile(r"\bnccl:(\w+)|\bcollective:\s*(?!nccl:)(\w+)")

_HEADING = re.compile(r"rank[ _:=#\[]*(\d+)", re.I)
_TRIES = 3  # texts that look like Python's and are not: none costs more than its length
_LONGEST = 4_000_000  # characters of one dump as Python prints it

_SILENT = 0.2  # of the ranks that wait; of a smaller group more would be missing
_WAITED = 0.4  # of the other ranks' time in a collective


@dataclass(frozen=True, slots=True)
class Hang:
    collective: str
    sequence: int
    waiting: tuple[int, ...]  # ranks that came to it
    missing: tuple[int, ...]  # ranks that did not
    differ: str  # what ranks disagree about: "", or a sentence
    where: str  # the line of the program, where it is recorded
    ranks: int = 0  # whose dumps are here
    slow: str = ""  # the rank for which others wait, by how long their collectives take
    world: int = 0  # ranks of the largest group, where the dumps say it
    joined: bool = False  # all came to it, and it has not ended; how long it runs is not known


def parse_hang(text: str) -> Hang | None:
    readers = (_from_dumps, _mismatch, _from_report, _from_watchdog)
    return next((found for read in readers if (found := read(text)) is not None), None)


def _from_report(text: str) -> Hang | None:
    missing = _MISSING.search(text)
    if missing is None:
        return None
    number, name = _NUMBER.search(text), _NAME.search(text)
    ranks = tuple(int(one) for one in missing[1].split(","))
    called = (name[1] or name[2]) if name else "a collective"
    return Hang(called, int(number[1]) if number else 0, (), ranks, "", "")


def _mismatch(text: str) -> Hang | None:
    """What torchfrtrace says of ranks that called something else."""
    if (error := _ERROR.search(text)) is None:
        return None
    number, name = _NUMBER.search(text), _NAME.search(text)
    culprits = sorted({int(rank) for rank in re.findall(r"Culprit rank (\d+)", text)})
    found = re.findall(r"found (?:collective type|[\w ]+)?:?\s*'?\[?([\w, ]+)'?", text)
    who = f"rank {', '.join(map(str, culprits))}" if culprits else "some ranks"
    what = f" ({found[0].strip()})" if found and found[0].strip() else ""
    kind = (error[1] or error[2]).lower().replace("_", " ")
    called = (name[1] or name[2]) if name else "a collective"
    differ = f"ranks do not call the same: {who} differs{what} ({kind})"
    return Hang(called, int(number[1]) if number else 0, (), (), differ, "")


def _from_watchdog(text: str) -> Hang | None:
    found = _TIMEOUT.findall(text)
    if not found:
        return None
    sequence = max(int(number) for _, number, _ in found)
    waiting = {int(rank) for rank, number, _ in found if int(number) == sequence}
    behind = {int(rank) for rank, number, _ in found if int(number) < sequence}
    behind |= {int(rank) for rank, queued, _ in _LAST.findall(text) if int(queued) < sequence}
    silent = set(range(max(waiting))) - waiting - behind
    if not behind and len(waiting) >= 3 and len(silent) <= _SILENT * len(waiting):
        behind = silent  # all others report that they wait
    operation = next(name for _, number, name in found if int(number) == sequence)
    kinds = {name for _, number, name in found if int(number) == sequence}
    differ = f"ranks call different collectives: {', '.join(sorted(kinds))}" if len(kinds) > 1 else ""
    differ = differ or _other_count(text, sequence)
    return Hang(operation, sequence, tuple(sorted(waiting - behind)), tuple(sorted(behind)), differ, "")


def _other_count(text: str, sequence: int) -> str:
    """Which rank of a group gives another number of elements than the others."""
    counts: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for group, rank, number, operation, given, _ in _COUNTS.findall(text):
        if int(number) == sequence and operation in EQUAL_COUNTS:
            counts[group.strip(), operation][int(rank)] = int(given)
    for ranks in counts.values():
        usual = Counter(ranks.values()).most_common(1)[0][0]
        if other := {rank: count for rank, count in ranks.items() if count != usual}:
            who = ", ".join(f"rank {rank} gives {count}" for rank, count in sorted(other.items())[:4])
            return f"ranks give different sizes: {who} elements, the others {usual}"
    return ""


def _from_dumps(text: str) -> Hang | None:
    last: dict[int, dict[str, Any]] = {}
    names: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    behind, world = False, 0
    for rank, dump in _dumps(text):
        entries = [one for one in dump.get("entries", []) if not one.get("is_p2p")]
        for entry in entries:
            names[int(entry.get("collective_seq_id", 0))][rank] = entry
        for status in (dump.get("pg_status") or {}).values():
            behind |= status.get("last_completed_collective", 0) < status.get("last_enqueued_collective", 0)
        world = max([world, *_sizes(dump)])
        if entries:
            last[rank] = max(entries, key=lambda one: int(one.get("collective_seq_id", 0)))
    if not last:
        return None
    open_ = [one for one in last.values() if one.get("state") != "completed"]
    if not open_ and not behind and len({int(one["collective_seq_id"]) for one in last.values()}) == 1:
        return Hang("none", 0, tuple(sorted(last)), (), "", "", len(last), _straggler(names), world)
    sequence = max(int(one["collective_seq_id"]) for one in last.values())
    here = names[sequence]
    missing = tuple(sorted(rank for rank in last if rank not in here))
    stuck = {rank: last[rank] for rank in missing if last[rank].get("state") != "completed"}
    one = next(iter(here.values()))
    kinds = {str(entry.get("profiling_name")) for entry in here.values()}
    sizes = {str(entry.get("input_sizes")) for entry in here.values()}
    differ = ""
    if len(kinds) > 1:
        differ = f"ranks call different collectives: {', '.join(sorted(kinds))}"
    elif len(sizes) > 1:
        differ = f"ranks give different sizes: {', '.join(sorted(sizes))}"
    frames = one.get("frames") or [{}]
    where = f"{frames[0].get('filename', '')}:{frames[0].get('line', '')}".strip(":")
    name = str(one.get("profiling_name", "")).removeprefix("nccl:")
    still = "".join(
        f" Rank {rank} is still in {str(entry.get('profiling_name', '')).removeprefix('nccl:')} number "
        f"{entry['collective_seq_id']} ({entry.get('state')})."
        for rank, entry in sorted(stuck.items())[:2]
    )
    return Hang(name, sequence, tuple(sorted(here)), missing, differ, where, len(last), still)


def _sizes(dump: dict[str, Any]) -> list[int]:
    """Of the groups that a dump describes."""
    groups = (dump.get("pg_config") or {}).values()
    return [len(re.findall(r"\d+", str(one.get("ranks", "")))) for one in groups if isinstance(one, dict)]


def _straggler(names: dict[int, dict[int, dict[str, Any]]]) -> str:
    """The rank whose collectives are much shorter than the others': they wait in each until it comes."""
    times: dict[int, list[float]] = defaultdict(list)
    for ranks in names.values():
        for rank, entry in ranks.items():
            if isinstance(took := entry.get("duration_ms"), int | float):
                times[rank].append(float(took))
    means = {rank: sum(one) / len(one) for rank, one in times.items()}
    if len(means) < 3:
        return ""
    usual = median(means.values())
    first = min(means, key=lambda rank: means[rank])
    last = max(means, key=lambda rank: means[rank])
    if means[first] < _WAITED * usual:
        return (
            f"rank {first} takes {means[first]:.3g} ms in each and the others {usual:.3g}: they wait for it"
        )
    if usual < _WAITED * means[last]:
        return f"rank {last} takes {means[last]:.3g} ms in each and the others {usual:.3g}"
    return ""


def _dumps(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    alone: dict[int, list[dict[str, Any]]] = defaultdict(list)  # entries that stand in no dump
    rank, last = 0, 0
    for begin, end, found in _objects(text):
        if headings := _HEADING.findall(text, last, begin):
            rank = int(headings[-1])
        last = end
        if "collective_seq_id" in found:
            alone[int(found.get("rank", rank))].append(found)
        else:
            yield from _in_object(found)
    for rank, entries in alone.items():
        yield rank, {"entries": entries}


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Where each object begins and ends, and the object."""
    decoder, at, tries = json.JSONDecoder(), 0, _TRIES
    while (at := text.find("{", at)) >= 0:
        try:
            found, end = decoder.raw_decode(text, at)
        except ValueError:
            python = tries > 0 and text.startswith("'", at + 1)
            end = _literal_end(text, at) if python else 0
            try:
                found = ast.literal_eval(text[at:end]) if end else None
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                found = None
            tries -= python and found is None
        if isinstance(found, dict):
            yield at, end, found
            at = end
        else:
            at += 1


def _literal_end(text: str, begin: int) -> int:
    """After the brace that closes the one at `begin`; 0: none does, nearby."""
    depth, quote = 0, ""
    for at in range(begin, min(len(text), begin + _LONGEST)):
        if quote:
            quote = "" if text[at] == quote and text[at - 1] != "\\" else quote
        elif text[at] in "'\"":
            quote = text[at]
        elif text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return at + 1
    return 0


def _in_object(found: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    if "entries" in found:
        yield int(found.get("rank", 0)), found
        return
    for name, one in found.items():
        if isinstance(one, dict) and "entries" in one:
            digits = re.sub(r"\D", "", name)
            yield int(one.get("rank", digits or 0)), one
