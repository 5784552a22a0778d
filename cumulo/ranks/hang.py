"""HangWatch: when a step takes for ever, says which ranks the others wait for and where every rank stands, and ends
this one so that all are started again. The trainer tells it of every step.

Each rank's watching thread writes its stacks to the run's folder; the first that can reads them all and judges. A
rank that waits for others stands in a collective; the one that stands elsewhere, or says nothing, holds them up.
Between steps (a checkpoint, an evaluation) ranks may be slow, and only one that says nothing counts as hung.
"""

import json
import linecache
import math
import os
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

from cumulo.errors import RanksFailed
from cumulo.ranks.launch import HUNG, report_refusal

_HERE = Path(__file__).parent
_GRACE_S = 5.0  # for the other ranks' reports: their watches were set within moments of each other
_UNKNOWN_S = 600.0  # for a step, while nobody knows how long steps take
_KNOWN_STEPS = 3
_LAST_STEPS = 50
_TIMES_LONGEST = (
    6.0  # steps of sequences of different lengths, or beside another program, take several times as long
)
_LEAST_S = 10.0
_LEAST_BETWEEN_S = 20.0
_STEP = "step"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank is."""

    rank: int
    step: int  # that it works on
    waits: bool  # for other ranks, in a collective
    line: str  # of our code that it is in
    stacks: str
    looks: int = 0  # how often it has written this


@dataclass(frozen=True, slots=True, eq=False)
class _Phase:
    what: Hashable  # a step, or what is between two
    step: int
    since_s: float


class HangWatch:
    def __init__(
        self,
        folder: Path,
        rank: int,
        world: int,
        after_s: float | None,
        end: Callable[[int], None] = os._exit,
        grace_s: float = _GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder` is seen by all ranks. Made by the thread that trains. `after_s`: how long a step may take; None:
        it is learnt from the steps before."""
        self.folder, self.rank, self.world, self._given_s = folder, rank, world, after_s
        self._times_s: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=_LAST_STEPS))
        self._phase: _Phase | None = None  # what goes on now; None: nothing that is watched
        self._patience, self._looks = 1, 0
        self._end, self._grace_s, self._clock = end, grace_s, clock
        self._trains = threading.get_ident()
        self._begun = 0
        self._asks = folder / "asks"  # the step at which a rank asks who is there
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)

    @property
    def after_s(self) -> float:
        """How long what goes on now may take."""
        return self._limit_s(_STEP if self._phase is None else self._phase.what)

    def _limit_s(self, what: Hashable) -> float:
        known = list(self._times_s[what])
        if what != _STEP:
            learnt_s = max(_LEAST_BETWEEN_S, self._given_s or 0.0, _TIMES_LONGEST * max(known, default=0.0))
            return self._patience * learnt_s if known else math.inf
        if self._given_s is not None:
            return self._given_s
        return _UNKNOWN_S if len(known) < _KNOWN_STEPS else max(_LEAST_S, _TIMES_LONGEST * max(known))

    def begin(self, step: int) -> None:
        """A step begins."""
        self.pause()
        self._begun += 1
        self._phase = _Phase(_STEP, step, self._clock())

    def between(self, what: Hashable, step: int) -> None:
        """The step is done, and all ranks do `what` before the next one begins. Its first time is not watched."""
        self.pause()
        self._patience = 1
        self._phase = _Phase(what, step, self._clock())

    def pause(self) -> None:
        """What went on is done, and what follows may take its time."""
        done, self._phase = self._phase, None
        if done is not None and (done.what != _STEP or self._begun > 1):
            # A first step imports, compiles and reserves.
            self._times_s[done.what].append(self._clock() - done.since_s)

    def __enter__(self) -> "HangWatch":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file(self.rank).unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self.after_s / 4)):
            now_s, phase = self._clock(), self._phase
            if phase is None:
                continue
            took_s, after_s = now_s - phase.since_s, self._limit_s(phase.what)
            late, steps = took_s > after_s, phase.what == _STEP
            if not late and took_s > _LEAST_S and self._is_asked(phase):
                self._write(phase)
            if not late or not (steps or self._is_one_silent(phase)):
                continue
            if steps:
                self._write(phase)
                self._wait_until(lambda phase=phase: len(self._found(phase)) == self.world)  # type: ignore[misc]
            self._report(phase, after_s)
            self._end(HUNG)
            return

    def _is_one_silent(self, phase: _Phase) -> bool:
        """Ask all ranks whether they are there. If they are, what goes on may take longer."""
        self._asks.write_text(str(phase.step), "utf-8")
        before = {one.rank: one.looks for one in self._found(phase)}
        silent = set(range(self.world))

        def answered() -> bool:
            self._write(phase)
            silent.difference_update(
                one.rank for one in self._found(phase) if one.looks != before.get(one.rank)
            )
            return not silent or self._phase is not phase

        self._wait_until(answered)
        self._patience *= 2
        for rank in silent:  # what it said before
            self._file(rank).unlink(missing_ok=True)
        return bool(silent) and self._phase is phase

    def _is_asked(self, phase: _Phase) -> bool:
        return self._asks.is_file() and self._asks.read_text("utf-8") == str(phase.step)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._grace_s
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.1)

    def _write(self, phase: _Phase) -> None:
        self._looks += 1
        own = replace(_standing(self.rank, phase.step, self._trains), looks=self._looks)
        aside = self._file(self.rank).with_suffix(".part")
        aside.write_text(json.dumps(asdict(own)), "utf-8")
        aside.replace(self._file(self.rank))

    def _report(self, phase: _Phase, after_s: float) -> None:
        found = self._found(phase)
        text = verdict(found, self.world, after_s)
        report_refusal(RanksFailed(text.splitlines()[0]))  # to whoever started it
        if found[0].rank == self.rank:  # somebody has to say it
            (self.folder / "stacks.txt").write_text(
                "\n".join(f"rank {one.rank}, step {one.step}\n{one.stacks}" for one in found), "utf-8"
            )
            print(f"error: {text}\nall stacks: {self.folder / 'stacks.txt'}", file=sys.stderr, flush=True)
        time.sleep(self._grace_s / 5)  # the one that speaks reads our file

    def _found(self, phase: _Phase) -> list[Standing]:
        """What ranks have written; not in an earlier step."""
        paths = (self._file(rank) for rank in range(self.world))
        found = [Standing(**json.loads(path.read_text("utf-8"))) for path in paths if path.is_file()]
        return [one for one in found if one.step >= phase.step]

    def _file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.json"


def verdict(found: Sequence[Standing], world: int, after_s: float) -> str:
    """Who holds up whom, for people."""
    silent = sorted(set(range(world)) - {one.rank for one in found})
    waiting = [one for one in found if one.waits]
    elsewhere = [one for one in found if not one.waits]
    holds = sorted([*silent, *(one.rank for one in elsewhere)])
    who = f"{_ranks(holds)} held it up" if holds else "nobody can go on"
    lines = [f"step {max(one.step for one in found)} has taken more than {after_s:.3g} s: {who}"]
    if silent:
        lines.append(f"  {_ranks(silent)} did not answer: stopped, or the machine is gone")
    lines += [f"  rank {one.rank} did not arrive: it stands at {one.line}" for one in elsewhere]
    if waiting:
        places = sorted({one.line for one in waiting})
        lines.append(f"  {_ranks([one.rank for one in waiting])} waited at {'; '.join(places)}")
    if not silent and not elsewhere:
        lines.append("  all wait for each other: they are in different collectives, or the network is gone")
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _standing(rank: int, step: int, trains: int) -> Standing:
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = "\n".join(
        f"  thread {names.get(ident, ident)}\n" + "".join(traceback.format_stack(frames[ident]))
        for ident in sorted(frames, key=lambda ident: ident != trains)
    )
    frame = frames[trains]
    return Standing(rank, step, _waits(frame), _own_line(frame), stacks)


def _waits(frame: FrameType) -> bool:
    """In torch.distributed, or at a `work.wait()`."""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return f"torch{os.sep}distributed" in frame.f_code.co_filename or ".wait(" in text


def _own_line(frame: FrameType) -> str:
    """The innermost line that is neither torch's nor of these wrappers around it, with what it says."""
    at: FrameType | None = frame
    while at is not None and (
        f"{os.sep}torch{os.sep}" in at.f_code.co_filename or Path(at.f_code.co_filename).parent == _HERE
    ):
        at = at.f_back
    at = at or frame
    name = at.f_code.co_filename
    text = linecache.getline(name, at.f_lineno).strip()
    return f"{Path(*Path(name).parts[-3:])}:{at.f_lineno} ({text})"
