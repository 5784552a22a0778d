"""GuideChecker: sees to the guides of new requests, so that a slow one holds up no step. Owned by EngineLoop;
`Engine.add` then finds the guide compiled.

Two threads, each with a killable worker in which guides are tried out. One takes only short tries, so a guide
that takes long never stands in front of a quick one; the other takes those that need longer first. A guide that
is compiled already does not wait at all.
"""

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Literal

from cumulo.base.sandbox.worker import JobEnded, Worker
from cumulo.engine.decide.params import Guide
from cumulo.engine.guides.guided import Guidance
from cumulo.engine.guides.trial import QUICK_TRIAL, TRIAL, GuideCompilerBusy, try_out
from cumulo.errors import InvalidRequest
from cumulo.serve.engine_link.messages import Submit

MOST_WAITING = 128  # different guides of one key
_FORGOTTEN_HALF_S = 20.0  # after this time half of what a key has used is forgotten

Lane = Literal["quick", "slow"]


@dataclass(slots=True)
class Waiting:
    """A guide that is to be compiled, and the requests of one key that wait for it."""

    guide: Guide
    tenant: str
    submits: list[Submit]
    lane: Lane = "quick"


@dataclass(slots=True)
class _Key:
    used_s: float = 0.0
    at_s: float = 0.0  # when `used_s` was that
    lanes: dict[Lane, deque[Waiting]] = field(default_factory=lambda: {"quick": deque(), "slow": deque()})

    def used_lately_s(self, now_s: float) -> float:
        age: float = max(0.0, now_s - self.at_s) / _FORGOTTEN_HALF_S
        return self.used_s * math.exp2(-age)

    @property
    def waiting(self) -> int:
        return sum(map(len, self.lanes.values()))


class FairQueue:
    """Which guide is compiled next, fair to keys.

    Every guide has a short try first; the few that need longer go to the slow lane, which has a worker of its
    own. In each lane the key goes first that has used the least compiling time lately, so a key that sends many
    slow guides waits for itself, and the others wait for one short try of it at most.
    """

    def __init__(self, most_waiting: int = MOST_WAITING) -> None:
        self._most_waiting = most_waiting
        self._keys: dict[str, _Key] = {}

    def add(self, submit: Submit, guide: Guide) -> bool:
        """False: this key has too many guides waiting. Requests that wait for the same guide count once."""
        key = self._keys.setdefault(submit.tenant, _Key())
        for lane in key.lanes.values():
            for waiting in lane:
                if waiting.guide == guide:
                    waiting.submits.append(submit)
                    return True
        if key.waiting >= self._most_waiting:
            return False
        key.lanes["quick"].append(Waiting(guide, submit.tenant, [submit]))
        return True

    def add_slow(self, waiting: Waiting) -> None:
        """Adds a guide whose short try was not enough."""
        waiting.lane = "slow"
        self._keys.setdefault(waiting.tenant, _Key()).lanes["slow"].append(waiting)

    def next_job(self, lanes: tuple[Lane, ...], now_s: float) -> Waiting | None:
        """The next guide of the first of these lanes that has one."""
        for lane in lanes:
            ready = [key for key in self._keys.values() if key.lanes[lane]]
            if ready:
                return min(ready, key=lambda key: key.used_lately_s(now_s)).lanes[lane].popleft()
        return None

    def charge(self, tenant: str, used_s: float, now_s: float) -> None:
        key = self._keys.setdefault(tenant, _Key())
        key.used_s, key.at_s = key.used_lately_s(now_s) + used_s, now_s

    def forget_idle(self, now_s: float) -> None:
        """Keys that wait for nothing and have used next to nothing."""
        self._keys = {
            name: key for name, key in self._keys.items() if key.waiting or key.used_lately_s(now_s) > 1e-3
        }

    def __len__(self) -> int:
        return sum(key.waiting for key in self._keys.values())


log = logging.getLogger(__name__)

_LANES: tuple[tuple[Lane, ...], ...] = (("quick",), ("slow", "quick"))  # of each thread, the first first


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of a request's guide. Without a refusal it is compiled."""

    submit: Submit
    refusal: str | None = None
    busy: bool = False  # the refusal says nothing about the guide: the request may be sent again
    aborted: bool = False  # by its client, meanwhile


class GuideChecker:
    def __init__(self, guidance: Guidance) -> None:
        self.checked = 0
        self.pending: dict[str, bool] = {}  # request ids; True: aborted by its client meanwhile
        self._guidance = guidance
        self._queue = FairQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._workers: list[Worker] = []
        self._done: SimpleQueue[Checked] = SimpleQueue()
        # Wakes the loop, which sleeps on descriptors; a full pipe rings just as loud.
        self.wakeup, self._waker = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(self._waker, False)
        self._waking = threading.Lock()
        for number, lanes in enumerate(_LANES):
            threading.Thread(
                target=self._work, args=(lanes,), name=f"cumulo-guides-{number}", daemon=True
            ).start()

    def begin(self, submit: Submit) -> None:
        guide = submit.params.guide
        assert guide is not None
        self.pending[submit.request_id] = False
        try:
            if self._guidance.knows(guide):
                self._tell(Checked(submit))
                return
        except InvalidRequest as error:
            self._tell(Checked(submit, str(error)))
            return
        with self._changed:
            if self._queue.add(submit, guide):
                self._changed.notify_all()
                return
        waits = "too many guides that are not compiled yet wait in this server for this key; try again later"
        self._tell(Checked(submit, waits, busy=True))

    def take_checked(self) -> list[Checked]:
        """The requests whose guides have been compiled or refused."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wakeup, 4096):
                pass
        done: list[Checked] = []
        while True:
            try:
                one = self._done.get_nowait()
            except Empty:
                return done
            aborted = self.pending.pop(one.submit.request_id)
            done.append(Checked(one.submit, one.refusal, one.busy, aborted))

    def close(self) -> None:
        """End the workers, and with them whatever is being tried out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            workers = list(self._workers)
        for worker in workers:
            worker.close()
        with self._waking:  # nobody may write to a descriptor that is somebody else's by then
            os.close(self._waker)
            os.close(self.wakeup)

    # -- in the threads -------------------------------------------------------------------------------------
    def _work(self, lanes: tuple[Lane, ...]) -> None:
        worker: Worker | None = None
        try:
            worker = self._guidance.new_worker()
            with self._changed:
                self._workers.append(worker)
            worker.start()  # now, not when the first guide waits
        except InvalidRequest:
            pass  # this model cannot be guided: requests that ask are told so
        except Exception:
            log.exception("a worker for guides did not start; it is tried again with the next guide")
        while True:
            with self._changed:
                while (waiting := self._queue.next_job(lanes, time.monotonic())) is None and not self._closed:
                    self._changed.wait()
                if self._closed or waiting is None:
                    return
            self._check(waiting, worker)

    def _check(self, waiting: Waiting, worker: Worker | None) -> None:
        refusal, busy = None, False
        begun_s = time.monotonic()
        try:
            if all(self.pending.get(submit.request_id, True) for submit in waiting.submits):
                refusal, busy = "the request was aborted before its guide was compiled", True
            elif not self._guidance.knows(waiting.guide):
                worker = worker or self._guidance.new_worker()  # for its reason
                trial = try_out(worker, waiting.guide, QUICK_TRIAL if waiting.lane == "quick" else TRIAL)
                self._guidance.admit(waiting.guide, trial)
        except JobEnded:
            with self._changed:
                self._queue.charge(waiting.tenant, time.monotonic() - begun_s, time.monotonic())
                self._queue.add_slow(waiting)
                self._changed.notify_all()
            self.checked += 1
            return
        except InvalidRequest as error:
            refusal = str(error)
        except GuideCompilerBusy as error:
            refusal, busy = str(error), True
        except Exception:
            log.exception("checking a guide failed")
            refusal = "this guide cannot be compiled; the server's log says more"
        with self._changed:
            now_s = time.monotonic()
            self._queue.charge(waiting.tenant, now_s - begun_s, now_s)
            self._queue.forget_idle(now_s)
        self.checked += 1
        for submit in waiting.submits:
            own = submit.params.guide
            if refusal is None and own is not None:
                with contextlib.suppress(InvalidRequest):  # then the engine says so
                    self._guidance.knows(own)  # kept for as long as this request needs it
            self._tell(Checked(submit, refusal, busy))

    def _tell(self, checked: Checked) -> None:
        self._done.put(checked)
        with self._waking, contextlib.suppress(BlockingIOError):
            if not self._closed:
                os.write(self._waker, b".")
