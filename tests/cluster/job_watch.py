"""JobWatch: looks at a job's processes, leases and checkpoints while it is killed. Says where two own one run, a
finished checkpoint was written again, or something outlived the job. For `kill_campaign`."""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "CUMULO_KILL_CAMPAIGN"  # in the environment of all that a campaign starts


@dataclass(frozen=True, slots=True)
class Seen:
    """A process that lives."""

    pid: int
    parent: int
    began: int  # with the pid, this is one process and no other
    words: tuple[str, ...]  # its command
    environment: dict[str, str]

    @property
    def command(self) -> str:
        return " ".join(self.words)

    @property
    def rank(self) -> int | None:
        """Of a training run; its run is the folder that its command names."""
        trains = "train" in self.words and "RANK" in self.environment
        return int(self.environment["RANK"]) if trains and "python" in self.words[0] else None


def processes(campaign: Path) -> list[Seen]:
    """All that the campaign has started, and what came of it."""
    found = (seen(int(entry.name)) for entry in Path("/proc").glob("[0-9]*"))
    return [one for one in found if one is not None and one.environment.get(MARK) == str(campaign)]


def seen(pid: int) -> Seen | None:
    with suppress(OSError, ValueError, IndexError):
        folder = Path(f"/proc/{pid}")
        fields = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        if fields[0] in "ZX":
            return None
        environ = (folder / "environ").read_bytes().decode("utf-8", "replace").split("\0")
        environment = dict(line.split("=", 1) for line in environ if "=" in line)
        words = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        return Seen(pid, int(fields[1]), int(fields[19]), tuple(filter(None, words)), environment)
    return None


def lives(one: Seen) -> bool:
    now = seen(one.pid)
    return now is not None and now.began == one.began


def ranks_of(run: Path, found: list[Seen]) -> list[Seen]:
    """The ranks of a run, without what they have forked."""
    ranks = {one.pid: one for one in found if one.rank is not None and str(run) in one.words}
    return [one for one in ranks.values() if one.parent not in ranks]


class JobWatch:
    """Looks four times a second, from when it is entered; `wrong` says what must not be."""

    def __init__(self, campaign: Path, run: Path) -> None:
        self.campaign, self.run = campaign, run
        self.wrong: list[str] = []
        self.looks = self.owners = 0
        self._claims: dict[int, Seen | None] = {}  # the process of every claim
        self._published: dict[str, int] = {}  # checkpoints, by their inodes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "JobWatch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.25):
            for told in (*self._gangs(), *self._owners(), *self._checkpoints()):
                if told not in self.wrong:
                    self.wrong.append(told)
            self.looks += 1

    def _gangs(self) -> Iterator[str]:
        """No rank is there twice."""
        by_rank = defaultdict(list)
        for one in ranks_of(self.run, processes(self.campaign)):
            by_rank[one.rank].append(one)
        for rank, some in by_rank.items():
            if len(alive := [one for one in some if lives(one)]) > 1:
                yield f"rank {rank} is there {len(alive)} times: processes {[one.pid for one in alive]}"

    def _owners(self) -> Iterator[str]:
        """Whoever claims the run finds nobody who still has it."""
        claims = {}
        for path in (self.run / "owner").glob("[0-9]*.json"):
            with suppress(OSError, ValueError):  # it is being written, or removed
                claims[int(path.stem)] = json.loads(path.read_text("utf-8"))
        for number, claim in claims.items():
            if number not in self._claims:
                self._claims[number] = seen(claim["pid"])
        self.owners = max(claims, default=self.owners)
        for number, claim in claims.items():
            process = self._claims[number]
            if number < self.owners and not claim["released"] and process is not None and lives(process):
                yield f"claim {self.owners} was made, and process {process.pid} of claim {number} lives"

    def _checkpoints(self) -> Iterator[str]:
        """A finished checkpoint stays what it is until it is removed, and one is written at a time."""
        with suppress(OSError):
            found = {path.name: path.stat().st_ino for path in (self.run / "checkpoints").glob("step-*")}
            if len(writing := [name for name in found if "." in name]) > 1:
                yield f"{', '.join(sorted(writing))} are written at once"
            for name, inode in found.items():
                if "." not in name and self._published.setdefault(name, inode) != inode:
                    yield f"{name} was written twice"


def outlived(
    work: Callable[[], list[Seen]], patience_s: float, clock: Callable[[], float] = time.monotonic
) -> tuple[list[Seen], float]:
    """What of a job's `work` is there when `patience_s` are over, and after how many seconds nothing was."""
    begin_s = clock()
    while (left := work()) and clock() - begin_s < patience_s:
        time.sleep(0.1)
    return left, clock() - begin_s
