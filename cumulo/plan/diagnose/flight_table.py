"""Tables of how far each rank came, as scripts print them from flight-recorder dumps: one row for each rank, or for
each of its last collectives. Columns are known by their headings, in any order. `diagnose` calls it."""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from cumulo.base import quick_re as re
from cumulo.plan.diagnose.flight_text import EQUAL_COUNTS, Hang

# What a heading means: the first that fits. Of times of day nothing follows.
_COLUMNS = (
    ("", re.compile(r"stack|frame|host|time_?(?:stamp|created|discovered)")),
    ("age", re.compile(r"(?:^|_)(?:age|since|elapsed|pending_for|waiting)(?:_|$)")),
    ("rank", re.compile(r"^(?:global_|world_)?rank(?:_id)?$")),
    ("queued", re.compile(r"enq|queued|issued|scheduled|launched")),
    ("started", re.compile(r"started|running")),
    ("ended", re.compile(r"(?<!in)complete|finished|ended|retired")),
    ("number", re.compile(r"(?:^|_)seq(?:_?(?:id|num|no|number))?(?:_|$)|^(?:coll\w*|work)_?(?:id|num|no)$")),
    ("state", re.compile(r"^(?:last_)?(?:state|status)$")),
    ("group", re.compile(r"^(?:pg|process_?group|group|comm)(?:_?(?:name|id|desc))?$")),
    ("name", re.compile(r"^(?:last_)?(?:op|op_?type|op_?name|operation|coll|collective|profiling_name|name)$")),
    ("count", re.compile(r"^(?:num_?el|numel|input|in)(?:_?(?:in|sizes?|shape|count))?$|^(?:count|elements)$")),
)  # fmt: skip
_WORDS = re.compile(
    r"(?i)\b(last(?= \w)|oldest(?= \w)|global(?= rank)|process(?= group)|age(?= \()|seq(?= (?:id|num))) "
)
_SILENT = re.compile(r"^\W*(?:rank\s*)?(\d+)\b", re.I)
_ENDED = re.compile(r"(?<!in)(?<!not )(?<!un)(?:complete|done|finish|success|retired)", re.I)
_SPLITS = (r"\s*\|\s*", r"\t+", r"\s*[,;]\s*", r"\s{2,}", r"\s+")
_AGE = re.compile(r"\bage\b\s*[:=]?\s*(\d+(?:\.\d+)?)\s*(us|µs|ms|s|sec|min)\b", re.I)
_CELL = re.compile(r"^(\d+(?:\.\d+)?)\s*(us|µs|ms|s|sec|min)?$", re.I)
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0}
_NAME = re.compile(r"\bnccl:(\w+)|\bcollective:\s*(?!nccl:)(\w+)")
_RANK = re.compile(r"(?<![a-z])rank[ _:=#\[]*(\d+)", re.I)
_SEQ = re.compile(r"\b(?:collective_)?seq(?:_?(?:id|num|no))?\s*[:=#]?\s*(\d+)", re.I)
_STATE = re.compile(r"\b(?:completed|started|scheduled)\b")
_EQUAL = {name.replace("_", "").lower() for name in EQUAL_COUNTS}
_IN_FLIGHT = 1.0  # seconds: a collective takes less


@dataclass(slots=True)
class _Rank:
    queued: int = -1  # the last collective that it called
    started: int | None = None
    ended: int | None = None  # the last that ended
    ages: list[float] = field(default_factory=list)  # seconds, of what has not ended
    calls: dict[int, tuple[str, str]] = field(
        default_factory=dict
    )  # by number: what, and of how many elements

    @property
    def open(self) -> bool:
        return self.ended is None or self.ended < self.queued


def parse_progress(text: str) -> Hang | None:
    groups: dict[str, dict[int, _Rank]] = defaultdict(lambda: defaultdict(_Rank))
    silent = set[int]()  # ranks of which no dump is here
    for row in _rows(text):
        if "number" not in row and "ended" not in row:
            silent.add(int(row["rank"]))
            continue
        _add(groups[row.get("group", "")][int(row["rank"])], row)
    if not groups:
        return None
    ages = [float(age) * _SECONDS[unit.lower()] for age, unit in _AGE.findall(text)]
    ages += [age for ranks in groups.values() for one in ranks.values() for age in one.ages]
    young = bool(ages) and max(ages) < _IN_FLIGHT
    found = [_of_group(ranks, text, young) for ranks in groups.values()]
    worst = [one for one in found if one.differ]
    worst += [one for one in found if one.missing and not one.joined] + [one for one in found if one.missing]
    if worst:
        return worst[0]
    everyone = silent | {rank for ranks in groups.values() for rank in ranks}
    largest = max(found, key=lambda one: one.ranks)
    open_ = any(one.joined for one in found)
    if re.search(r"\bErrors?\s*:\s*[1-9]", text) or (open_ and not young):
        return next((one for one in found if one.joined), largest)
    stated = re.findall(r"\bloaded (\d+) files|\bworld[ _-]?size\s*[:=]?\s*(\d+)", text)
    world = max([int(one or other) for one, other in stated] + [1 + max(everyone)])
    return Hang("none", 0, largest.waiting, (), "", "", largest.ranks, world=world, joined=open_)


def _of_group(ranks: dict[int, _Rank], text: str, young: bool) -> Hang:
    """The first collective that no rank has ended, and who came to it."""
    done = {rank: one.queued - 1 if one.ended is None else one.ended for rank, one in ranks.items()}
    open_ = any(one.open for one in ranks.values())
    front = min(max(one.queued for one in ranks.values()), max(done.values()) + 1)
    missing = {rank for rank, one in ranks.items() if one.queued < front}
    began = [one.started is not None and one.started >= front for one in ranks.values()]
    if not missing and not young and any(began):  # it was called, but the rank's GPU is not there yet
        missing = {rank for rank, one in ranks.items() if one.started is not None and one.started < front}
    calls = {rank: one.calls[front] for rank, one in ranks.items() if front in one.calls}
    name = _NAME.search(text)
    called = next(
        (call for call, _ in calls.values() if call), (name[1] or name[2]) if name else "a collective"
    )
    just_now = bool(missing) and young and all(front - ranks[rank].queued == 1 for rank in missing)
    return Hang(
        called,
        front,
        tuple(sorted(set(ranks) - missing)),
        tuple(sorted(missing)),
        _differ(calls),
        "",
        len(ranks),
        joined=just_now if missing else open_,
    )


def _differ(calls: dict[int, tuple[str, str]]) -> str:
    names = {name for name, _ in calls.values()}
    if len(names) > 1:
        return f"ranks call different collectives: {', '.join(sorted(names))}"
    counts = Counter(count for _, count in calls.values() if count)
    if len(counts) < 2 or next(iter(names)).replace("_", "") not in _EQUAL:
        return ""
    usual = counts.most_common(1)[0][0]
    who = [f"rank {rank} gives {count}" for rank, (_, count) in sorted(calls.items()) if count != usual]
    return f"ranks give different sizes: {', '.join(who[:4])} elements, the others {usual}"


def _add(rank: _Rank, row: dict[str, str]) -> None:
    if number := row.get("number"):
        at, state = int(number), row.get("state", "")
        rank.queued = max(rank.queued, at)
        rank.calls[at] = (re.sub(r"^\w+:", "", row.get("name", "")).lower(), row.get("count", ""))
        if _ENDED.search(state):
            rank.ended = max(at, rank.ended or 0)
        elif row.get("age"):
            rank.ages.append(float(row["age"]))
        return
    started, ended = row.get("started"), int(row["ended"])
    rank.queued = int(row.get("queued") or started or ended)
    rank.started, rank.ended = int(started) if started else None, ended
    if rank.open and row.get("age"):
        rank.ages = [float(row["age"])]


def _rows(text: str) -> Iterator[dict[str, str]]:
    """Of all tables with a heading for ranks and one for what they came to, or else of lines that say as much."""
    lines = text.splitlines()
    found_any = False
    for at, line in enumerate(lines):
        if not re.search(r"rank", line, re.I):
            continue
        for split in _SPLITS:
            heads = _cells(_WORDS.sub(r"\1_", line) if split == r"\s+" else line, split)
            kinds = [_kind(head) for head in heads]
            by_number = "number" in kinds and ("state" in kinds or "name" in kinds)
            by_last = "ended" in kinds and ("queued" in kinds or "started" in kinds)
            if kinds.count("rank") != 1 or not (by_number or by_last):
                continue
            if found := list(_table(lines[at + 1 :], split, heads, kinds)):
                found_any = True
                yield from found
                break
    if not found_any:
        yield from _said(lines)


def _said(lines: list[str]) -> Iterator[dict[str, str]]:
    """Entries that name their number and state, under a heading for each rank or with the rank in the line."""
    rank = ""
    for line in lines:
        if heading := _RANK.search(line):
            rank = heading[1]
        number, state = _SEQ.search(line), _STATE.search(line)
        if rank and number and state:
            name = _NAME.search(line)
            yield {
                "rank": rank,
                "number": number[1],
                "state": state[0],
                "name": name[1] or name[2] if name else "",
            }


def _table(lines: list[str], split: str, heads: list[str], kinds: list[str]) -> Iterator[dict[str, str]]:
    last = -1
    for line in lines:
        if not re.search(r"\w", line):
            continue  # a rule, or rows that are left out
        cells = _cells(re.sub(r"(?i)\brank\s+(?=\d)", "", line), split)
        said = _SILENT.match(line)
        if len(cells) != len(heads) and said and int(said[1]) == last + 1 > 0:  # "7  no dump"
            last += 1
            yield {"rank": said[1]}
            continue
        if len(cells) != len(heads):
            return
        row: dict[str, str] = {}
        for kind, head, cell in zip(kinds, heads, cells, strict=True):
            row.setdefault(kind, _seconds(head, cell) if kind == "age" else cell)
        row["rank"] = re.sub(r"(?i)^rank|[\[\]r:]", "", row["rank"])
        row = {
            kind: cell for kind, cell in row.items() if kind not in _NUMBERS or re.fullmatch(r"-?\d+", cell)
        }
        if "rank" not in row:
            return
        last = int(row["rank"])
        yield row


_NUMBERS = ("rank", "number", "queued", "started", "ended")


def _cells(line: str, split: str) -> list[str]:
    return re.split(split, line.strip().strip("|").strip())


@functools.lru_cache(maxsize=4096)  # the same words stand in many lines
def _kind(head: str) -> str:
    plain = re.sub(r"[^a-z]+", "_", head.lower()).strip("_")
    return next((kind for kind, pattern in _COLUMNS if pattern.search(plain)), "")


def _seconds(head: str, cell: str) -> str:
    """An age in seconds; "": its unit is not said."""
    found = _CELL.match(cell)
    unit = (found and found[2]) or next(iter(re.findall(r"[_ (\[](us|µs|ms|s|sec|min)\b", head.lower())), "")
    return str(float(found[1]) * _SECONDS[unit.lower()]) if found and unit else ""
