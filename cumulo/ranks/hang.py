"""HangWatch: when a step takes for ever, says which ranks the others wait for and where every rank stands, and ends
this one so that all are started again. The trainer tells it of every step.

Each rank's watching thread writes its stacks to the run's folder; the first that can reads them all and judges. A
rank that waits for others stands in a collective; the one that stands elsewhere, or says nothing, holds them up.
"""

import json
import linecache
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank is."""

    rank: int
    step: int  # that it works on
    waits: bool  # for other ranks, in a collective
    line: str  # of our code that it is in
    stacks: str


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
        self._steps_s: deque[float] = deque(maxlen=_LAST_STEPS)
        self._end, self._grace_s, self._clock = end, grace_s, clock
        self._trains = threading.get_ident()
        self._step, self._since, self._begun = 0, 0.0, 0
        self._watches = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)

    @property
    def after_s(self) -> float:
        """How long a step may take."""
        if self._given_s is not None:
            return self._given_s
        known = list(self._steps_s)
        return _UNKNOWN_S if len(known) < _KNOWN_STEPS else max(_LEAST_S, _TIMES_LONGEST * max(known))

    def begin(self, step: int) -> None:
        """A step begins."""
        self._step, self._since, self._watches = step, self._clock(), True
        self._begun += 1

    def pause(self) -> None:
        """The step is done. What follows may take its time: a checkpoint, an evaluation."""
        if self._watches and self._begun > 1:  # the first one imports, compiles and reserves
            self._steps_s.append(self._clock() - self._since)
        self._watches = False

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
            now_s, after_s = self._clock(), self.after_s
            if self._watches and now_s - self._since > after_s:
                self._report(after_s)
                self._end(HUNG)
                return

    def _report(self, after_s: float) -> None:
        own = _standing(self.rank, self._step, self._trains)
        aside = self._file(self.rank).with_suffix(".part")
        aside.write_text(json.dumps(asdict(own)), "utf-8")
        aside.replace(self._file(self.rank))
        deadline = time.monotonic() + self._grace_s
        while time.monotonic() < deadline and len(self._found()) < self.world:
            time.sleep(0.1)
        found = self._found()
        text = verdict(found, self.world, after_s)
        report_refusal(RanksFailed(text.splitlines()[0]))  # to whoever started it
        if found[0].rank == self.rank:  # somebody has to say it
            (self.folder / "stacks.txt").write_text(
                "\n".join(f"rank {one.rank}, step {one.step}\n{one.stacks}" for one in found), "utf-8"
            )
            print(f"error: {text}\nall stacks: {self.folder / 'stacks.txt'}", file=sys.stderr, flush=True)
        time.sleep(self._grace_s / 5)  # the one that speaks reads our file

    def _found(self) -> list[Standing]:
        return [
            Standing(**json.loads(self._file(rank).read_text("utf-8")))
            for rank in range(self.world)
            if self._file(rank).is_file()
        ]

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
