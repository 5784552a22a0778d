"""Flight-recorder dumps and watchdog messages of PyTorch as data: which rank did not come to which collective.
`diagnose` calls it. Dumps are JSON: one object for each rank, all in one object, or one after another."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_TIMEOUT = re.compile(
    r"\bRank (\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)"
)
_LAST = re.compile(
    r"Rank (\d+)\].*?last enqueued (?:NCCL )?work: (-?\d+), last completed (?:NCCL )?work: (-?\d+)"
)
# What torchfrtrace prints of the dumps of all ranks.
_MISSING = re.compile(r"[Mm]issing ranks\s*:?\s*[{\[(]?\s*(\d+(?:\s*,\s*\d+)*)")
_NUMBER = re.compile(r"(?:sequence number|collective(?:_seq_id)?)\s*[:#=]?\s*(\d+)")
_NAME = re.compile(r"\bnccl:(\w+)|\bcollective:\s*(\w+)")


@dataclass(frozen=True, slots=True)
class Hang:
    collective: str
    sequence: int
    waiting: tuple[int, ...]  # ranks that came to it
    missing: tuple[int, ...]  # ranks that did not
    differ: str  # what ranks disagree about: "", or a sentence
    where: str  # the line of the program, where it is recorded


def parse_hang(text: str) -> Hang | None:
    return _from_dumps(text) or _from_report(text) or _from_watchdog(text)


def _from_report(text: str) -> Hang | None:
    missing = _MISSING.search(text)
    if missing is None:
        return None
    number, name = _NUMBER.search(text), _NAME.search(text)
    ranks = tuple(int(one) for one in missing[1].split(","))
    called = (name[1] or name[2]) if name else "a collective"
    return Hang(called, int(number[1]) if number else 0, (), ranks, "", "")


def _from_watchdog(text: str) -> Hang | None:
    found = _TIMEOUT.findall(text)
    if not found:
        return None
    sequence = max(int(number) for _, number, _ in found)
    waiting = {int(rank) for rank, number, _ in found if int(number) == sequence}
    behind = {int(rank) for rank, number, _ in found if int(number) < sequence}
    behind |= {int(rank) for rank, queued, _ in _LAST.findall(text) if int(queued) < sequence}
    operation = next(name for _, number, name in found if int(number) == sequence)
    kinds = {name for _, number, name in found if int(number) == sequence}
    differ = f"ranks call different collectives: {', '.join(sorted(kinds))}" if len(kinds) > 1 else ""
    return Hang(operation, sequence, tuple(sorted(waiting - behind)), tuple(sorted(behind)), differ, "")


def _from_dumps(text: str) -> Hang | None:
    last: dict[int, dict[str, Any]] = {}
    names: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for rank, dump in _dumps(text):
        entries = [one for one in dump.get("entries", []) if not one.get("is_p2p")]
        for entry in entries:
            names[int(entry.get("collective_seq_id", 0))][rank] = entry
        if entries:
            last[rank] = max(entries, key=lambda one: int(one.get("collective_seq_id", 0)))
    if not last:
        return None
    open_ = [one for one in last.values() if one.get("state") != "completed"]
    if not open_ and len({int(one["collective_seq_id"]) for one in last.values()}) == 1:
        return Hang("none", 0, (), (), "", "")
    sequence = max(int(one["collective_seq_id"]) for one in last.values())
    here = names[sequence]
    missing = tuple(sorted(rank for rank in last if rank not in here))
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
    return Hang(name, sequence, tuple(sorted(here)), missing, differ, where)


def _dumps(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    decoder, at = json.JSONDecoder(), 0
    while (at := text.find("{", at)) >= 0:
        try:
            found, end = decoder.raw_decode(text, at)
        except ValueError:
            at += 1
            continue
        at = end
        if isinstance(found, dict):
            yield from _in_object(found)


def _in_object(found: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    if "entries" in found:
        yield int(found.get("rank", 0)), found
        return
    for name, one in found.items():
        if isinstance(one, dict) and "entries" in one:
            digits = re.sub(r"\D", "", name)
            yield int(one.get("rank", digits or 0)), one
