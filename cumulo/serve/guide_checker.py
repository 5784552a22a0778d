"""GuideChecker: compiles the guides of new requests in a thread, so that a slow one holds up no step. Owned by
EngineLoop; `Engine.add` then finds the guide compiled.

One thread: guides are compiled in the order they came, and take one core at most.
"""

import logging
import threading
from queue import Empty, SimpleQueue

import zmq

from cumulo.engine.guided import Guidance
from cumulo.errors import InvalidRequest
from cumulo.serve.messages import Submit

log = logging.getLogger(__name__)


class GuideChecker:
    def __init__(self, guidance: Guidance, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.checked = 0
        self.pending: dict[str, bool] = {}  # request ids; True: aborted by its client meanwhile
        self._guidance = guidance
        self._begun: SimpleQueue[Submit] = SimpleQueue()
        self._done: SimpleQueue[tuple[Submit, str | None]] = SimpleQueue()
        # Wakes the loop, which sleeps on its sockets. Each end is used by one thread only.
        address = f"inproc://guides-{id(self)}"
        self.bell: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self.bell.bind(address)
        self._ringer: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._ringer.connect(address)
        threading.Thread(target=self._work, name="cumulo-guides", daemon=True).start()

    def begin(self, submit: Submit) -> None:
        self.pending[submit.request_id] = False
        self._begun.put(submit)

    def _work(self) -> None:
        while True:
            submit = self._begun.get()
            assert submit.params.guide is not None
            refusal = None
            try:
                self._guidance.check(submit.params.guide)
            except InvalidRequest as error:
                refusal = str(error)
            except Exception:
                log.exception("checking a guide failed")
                refusal = "this guide cannot be compiled; the server's log says more"
            self._done.put((submit, refusal))
            try:
                self._ringer.send(b"")
            except zmq.ZMQError:  # the process ends
                return

    def take(self) -> list[tuple[Submit, str | None, bool]]:
        """The requests whose guides have been compiled (None) or refused (why), and whether they were aborted
        meanwhile; in the order they came."""
        while self.bell.poll(0):
            self.bell.recv()
        done: list[tuple[Submit, str | None, bool]] = []
        while True:
            try:
                submit, refusal = self._done.get_nowait()
            except Empty:
                break
            done.append((submit, refusal, self.pending.pop(submit.request_id)))
        self.checked += len(done)
        return done
