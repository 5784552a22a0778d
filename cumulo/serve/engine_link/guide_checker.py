"""GuideChecker: sees to the guides of new requests, so that a slow one holds up no step. Owned by EngineLoop;
`Engine.add` then finds the guide compiled.

Two threads, each with a killable worker in which guides are tried out. One takes only short tries, so a guide
that takes long never stands in front of a quick one; the other takes those that need longer first. A guide that
is compiled already does not wait at all.
"""

import contextlib
import logging
import math
import threading
import time
from dataclasses import dataclass, replace
from typing import Literal

from cumulo.base.sandbox.worker import JobEnded, Worker
from cumulo.engine.decide.params import Guide
from cumulo.engine.guides.guided import Guidance
from cumulo.engine.guides.trial import QUICK_TRIAL, TRIAL, GuideCompilerBusy, try_out
from cumulo.engine.play.mailbox import Mailbox
from cumulo.errors import InvalidRequest
from cumulo.serve.engine_link.messages import Submit

log = logging.getLogger(__name__)

MOST_WAITING = 128  # different guides of one key
_FORGOTTEN_HALF_S = 20.0  # after this time half of what a key has used is forgotten

Lane = Literal["quick", "slow"]
_LANES: tuple[tuple[Lane, ...], ...] = (("quick",), ("slow", "quick"))  # of each thread, the first first


@dataclass(slots=True, eq=False)
class Waiting:
    """A guide that is to be compiled, and the requests of one key that wait for it."""

    guide: Guide
    tenant: str
    submits: list[Submit]
    lane: Lane = "quick"


class FairQueue:
    """Which guide is compiled next, fair to keys.

    Every guide has a short try first; the few that need longer go to the slow lane, which has a worker of its
    own. In each lane the key goes first that has used the least compiling time lately, so a key that sends many
    slow guides waits for itself, and the others wait for one short try of it at most.
    """

    def __init__(self, most_waiting: int = MOST_WAITING) -> None:
        self._most_waiting = most_waiting
        self._lanes: dict[Lane, list[Waiting]] = {"quick": [], "slow": []}
        self.used: dict[str, tuple[float, float]] = {}  # by key: seconds used, and when it was that many

    def add(self, submit: Submit, guide: Guide) -> bool:
        """False: this key has too many guides waiting. Requests that wait for the same guide count once."""
        own = [one for lane in self._lanes.values() for one in lane if one.tenant == submit.tenant]
        for waiting in own:
            if waiting.guide == guide:
                waiting.submits.append(submit)
                return True
        if len(own) >= self._most_waiting:
            return False
        self._lanes["quick"].append(Waiting(guide, submit.tenant, [submit]))
        return True

    def add_slow(self, waiting: Waiting) -> None:
        """Adds a guide whose short try was not enough."""
        waiting.lane = "slow"
        self._lanes["slow"].append(waiting)

    def next_job(self, lanes: tuple[Lane, ...], now_s: float) -> Waiting | None:
        """The next guide of the first of these lanes that has one."""
        for lane in lanes:
            if ready := self._lanes[lane]:
                used = {tenant: self._used_lately_s(tenant, now_s) for tenant in self.used}
                chosen = min(ready, key=lambda one: used.get(one.tenant, 0.0))
                ready.remove(chosen)
                return chosen
        return None

    def charge(self, tenant: str, used_s: float, now_s: float) -> None:
        """Enters compiling time, and forgets keys that have used next to nothing lately."""
        self.used[tenant] = self._used_lately_s(tenant, now_s) + used_s, now_s
        self.used = {key: used for key, used in self.used.items() if self._used_lately_s(key, now_s) > 1e-3}

    def _used_lately_s(self, tenant: str, now_s: float) -> float:
        used_s, at_s = self.used.get(tenant, (0.0, now_s))
        return used_s * math.exp2(-max(0.0, now_s - at_s) / _FORGOTTEN_HALF_S)

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))


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
        self.done: Mailbox[Checked] = Mailbox()  # wakes the loop, which sleeps on descriptors
        self._guidance = guidance
        self._queue = FairQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._workers: list[Worker] = []
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
                self.done.put(Checked(submit))
                return
        except InvalidRequest as error:
            self.done.put(Checked(submit, str(error)))
            return
        with self._changed:
            if self._queue.add(submit, guide):
                self._changed.notify_all()
                return
        waits = "too many guides that are not compiled yet wait in this server for this key; try again later"
        self.done.put(Checked(submit, waits, busy=True))

    def take_checked(self) -> list[Checked]:
        """The requests whose guides have been compiled or refused."""
        return [replace(one, aborted=self.pending.pop(one.submit.request_id)) for one in self.done.take_all()]

    def close(self) -> None:
        """End the workers, and with them whatever is being tried out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            workers = list(self._workers)
        for worker in workers:
            worker.close()
        self.done.close()

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
        refusal, busy, goes_on = None, False, False
        begun_s = time.monotonic()
        try:
            if all(self.pending.get(submit.request_id, True) for submit in waiting.submits):
                refusal, busy = "the request was aborted before its guide was compiled", True
            elif not self._guidance.knows(waiting.guide):
                worker = worker or self._guidance.new_worker()  # for its reason
                trial = try_out(worker, waiting.guide, QUICK_TRIAL if waiting.lane == "quick" else TRIAL)
                self._guidance.admit(waiting.guide, trial)
        except JobEnded:
            goes_on = True
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
            if goes_on:
                self._queue.add_slow(waiting)
                self._changed.notify_all()
        self.checked += 1
        for submit in () if goes_on else waiting.submits:
            own = submit.params.guide
            if refusal is None and own is not None:
                with contextlib.suppress(InvalidRequest):  # then the engine says so
                    self._guidance.knows(own)  # kept for as long as this request needs it
            self.done.put(Checked(submit, refusal, busy))
