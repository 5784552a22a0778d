"""RunLease: who may write into a run's folder. One process at a time holds it, on this machine or on any other that
sees the folder; whoever takes it later fences that one off. The trainer takes it, and asks again before every
checkpoint becomes visible.

A claim is a file with the next number, which a file system creates for one process alone; the highest number owns
the run. Whether its owner still lives, a lock of the kernel says on the same machine at once. An owner on another
machine counts its heartbeats in its claim; clocks are never compared.
"""

import contextlib
import fcntl
import json
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path

from cumulo.base.files import write_whole
from cumulo.errors import ConfigError, TrainingError

_FOLDER = "owner"
_BEAT_S = 5.0
_PATIENCE_S = 4 * _BEAT_S  # an owner without a heartbeat for so long is gone


@dataclass(frozen=True, slots=True)
class Claim:
    """Who owns the run, as others read it."""

    host: str
    machine: str  # processes of one machine see each other's locks
    pid: int
    since: str
    command: str
    beats: int = 0
    released: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since} ({self.command})"


class RunLease:
    def __init__(
        self, folder: Path, number: int, claim: Claim, lock: TextIOWrapper, beat_s: float, made: bool
    ) -> None:
        """Made by `take_lease`. `made`: the run's folder came with it."""
        self.folder, self.number, self._claim, self._lock, self._made = folder, number, claim, lock, made
        self._write, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(beat_s,), name="run-lease", daemon=True)
        self._thread.start()
        self.taken_by: Claim | None = None  # as of the last heartbeat

    def check(self) -> None:
        """Whoever is about to make something visible asks first."""
        self._look()
        self.refuse_if_taken()

    def refuse_if_taken(self) -> None:
        """What the last heartbeat found: costs nothing."""
        if self.taken_by is not None:
            raise TrainingError(
                f"{self.folder.parent} belongs to {self.taken_by} now, which took it over: this process stops "
                "without writing to it"
            )

    def release(self) -> None:
        """The next owner need not wait. A run's folder into which nothing came goes, too."""
        self._closed.set()
        self._thread.join()
        if self.taken_by is None:
            with contextlib.suppress(OSError):  # its folder may be gone
                self._put(replace(self._claim, released=True))
                if self._made and [*self.folder.parent.iterdir()] == [self.folder]:
                    shutil.rmtree(self.folder.parent)
        self._lock.close()

    def _beat(self, every_s: float) -> None:
        while not self._closed.wait(every_s):
            with contextlib.suppress(OSError):  # a full disk is no reason to lose a run
                self._put(replace(self._claim, beats=self._claim.beats + 1))
            self._look()

    def _put(self, claim: Claim) -> None:
        self._claim = claim
        write_whole(_file(self.folder, self.number), json.dumps(asdict(claim)).encode())

    def _look(self) -> None:
        number, claim = _last(self.folder)
        if number > self.number:
            self.taken_by = claim


def take_lease(
    run_folder: Path,
    tell: Callable[[str], None] = lambda text: None,
    *,
    by_force: bool = False,
    beat_s: float = _BEAT_S,
    patience_s: float = _PATIENCE_S,
) -> RunLease:
    """The run's lease, or a ConfigError that says who has it. `by_force`: its owner is fenced off instead, and a
    process of this machine is waited for."""
    folder, made = run_folder / _FOLDER, not run_folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    machine = _machine()
    lock = (folder / "lock").open("a", encoding="utf-8")
    try:
        while True:
            here = _locked(lock)
            number, claim = _last(folder)
            if claim is not None and not claim.released and not by_force:
                gone = here and claim.machine == machine
                if here is False or not (gone or _is_silent(folder, number, claim, tell, patience_s)):
                    raise ConfigError(
                        f"{run_folder} is in use by {claim}; wait until it ends, stop it, or take the run over "
                        "with --take-over: that process then stops without writing to it"
                    )
            elif here is False and not by_force:  # between its lock and its claim
                time.sleep(0.1)
                continue
            host, since = platform.node(), datetime.now(UTC).isoformat(" ", "seconds")
            words = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200]
            own = Claim(host, machine, os.getpid(), since, words)
            try:
                with _file(folder, number + 1).open("x", encoding="utf-8") as stream:
                    stream.write(json.dumps(asdict(own)))
            except FileExistsError:
                continue  # somebody else was faster
            break
        if here is False:
            _wait_for_lock(lock, claim, patience_s)
    except BaseException:
        lock.close()
        raise
    for path in folder.glob("*.json"):  # of whom nobody asks any more
        if int(path.stem) < number:
            path.unlink(missing_ok=True)
    return RunLease(folder, number + 1, own, lock, beat_s, made)


def _machine() -> str:
    """What tells one running kernel from another; containers of one machine share it, and its locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return platform.node()


def _locked(lock: TextIOWrapper) -> bool | None:
    """Whether the lock is ours now; None: this file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _wait_for_lock(lock: TextIOWrapper, owner: Claim | None, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not _locked(lock):
        if time.monotonic() > deadline:
            raise ConfigError(f"{owner} has lost the run, but does not end: kill it, then start again")
        time.sleep(0.1)


def _is_silent(
    folder: Path, number: int, claim: Claim, tell: Callable[[str], None], patience_s: float
) -> bool:
    """Whether an owner that no lock tells of is gone: no heartbeat comes."""
    tell(f"the run was in use by {claim}: waiting {patience_s:.0f} s for a sign of life")
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        time.sleep(min(0.5, patience_s / 10))
        now_number, now = _last(folder)
        if now_number != number or now is None or now.beats != claim.beats:
            return False
        if now.released:
            break
    return True


def _last(folder: Path) -> tuple[int, Claim | None]:
    """The highest claim, and its number; 0 and None where there is none. One that is being written at this moment
    is that of a stranger who lives."""
    number = max((int(path.stem) for path in folder.glob("[0-9]*.json")), default=0)
    if not number:
        return 0, None
    try:
        return number, Claim(**json.loads(_file(folder, number).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return number, Claim("an unknown host", "", 0, "just now", "its claim cannot be read", beats=-1)


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"
