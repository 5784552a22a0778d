"""GuideChecker: sees to the guides of new requests, so that a slow one holds up no step. Owned by EngineLoop;
`Engine.add` then finds the guide compiled.

Two threads, each with a killable worker in which guides are tried out. One takes only short tries, so a guide that
takes long never stands in front of a quick one; the other takes those that need longer first. A guide that is
compiled already does not wait at all.
"""

import contextlib
import logging
import os
import threading
import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from cumulo.base.sandbox.worker import JobEnded, Worker
from cumulo.engine.guides.guided import Guidance
from cumulo.engine.guides.trial import QUICK_TRIAL, TRIAL, GuideCompilerBusy, try_out
from cumulo.errors import InvalidRequest
from cumulo.serve.engine_link.fair_queue import FairQueue, Lane, Waiting
from cumulo.serve.engine_link.messages import Submit

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
        self.bell, self._rope = os.pipe()
        os.set_blocking(self.bell, False)
        os.set_blocking(self._rope, False)
        self._ringing = threading.Lock()
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
            while os.read(self.bell, 4096):
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
        with self._ringing:  # nobody may write to a descriptor that is somebody else's by then
            os.close(self._rope)
            os.close(self.bell)

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
        with self._ringing, contextlib.suppress(BlockingIOError):
            if not self._closed:
                os.write(self._rope, b".")
