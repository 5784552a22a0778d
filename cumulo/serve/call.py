"""Call: one HTTP request on its way through the engine. Made by the completion endpoints.

It may be several engine requests (a list of prompts). All their news come to one inbox; if the client goes
away, or one of them fails, the others are aborted, within one step.
"""

import asyncio
import logging
import secrets
import time
from array import array
from collections import deque
from collections.abc import Callable

from starlette.requests import Request

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import TokenLogprobs
from cumulo.engine.outputs import Delta, Sample
from cumulo.serve.access.keys import caller_of
from cumulo.serve.adapter_registry import ServedAdapter
from cumulo.serve.engine_link.in_flight import Inbox
from cumulo.serve.engine_link.messages import Failure, Finished, Submit
from cumulo.serve.errors import ApiError, ClientGone, invalid
from cumulo.serve.fleet.forwarded import FORWARDED, ForwardedRequest
from cumulo.serve.formats.events import repeatable_call_ids
from cumulo.serve.observe.stories import Record
from cumulo.serve.service import service_of
from cumulo.spec.slo import Slo

log = logging.getLogger(__name__)

LEAST_PRIORITY_KEY = "least_priority"  # in the scope's state: the request is no more important than this
_UNKNOWN_PARAMS = SamplingParams()
_BATCH_AT_A_TIME = 4  # prompts of one line of a batch, so that it leaves the queue to others

Batch = list[tuple[int, Delta | Finished]]  # what is new, with the position of the prompt it belongs to


class Call:
    def __init__(self, request: Request, prefix: str, model: str) -> None:
        """Raises ApiError unless the model is served and the engine ready. `prefix`: how ids of this endpoint's
        answers begin, separator included (`chatcmpl-`, `resp_`). `model`: what the request names, the model itself
        or an adapter."""
        self.service = service_of(request)
        self.service.check_model(model)
        self.service.check_ready()
        self.model = model
        self._adapter: ServedAdapter | None = None  # held until the call has ended
        self.forwarded: ForwardedRequest | None = request.scope["state"].get(FORWARDED)  # a gateway's request
        if self.forwarded is None:
            self.id, self.created = f"{prefix}{secrets.token_hex(12)}", int(time.time())
        else:
            self.id, self.created = f"{prefix}{self.forwarded.ask.id}", self.forwarded.ask.created
            repeatable_call_ids(self.id)
        self.received_s: float = request.scope["state"]["received_s"]
        self.caller = caller_of(request)
        request.scope["state"]["call_id"] = self.id
        self.finished: list[Finished | None] = []
        self.prompts: list[list[int]] = []  # as token ids; known once submitted
        self.params = _UNKNOWN_PARAMS  # likewise
        # Output tokens, where the server and not the client set the limit.
        self.default_limit: int | None = None
        self._least_priority: int | None = request.scope["state"].get(LEAST_PRIORITY_KEY)
        self._request = request
        self._inbox = Inbox()
        self._request_ids: list[str] = []
        self._guide_param: str | None = None
        self._client_gone = False
        self._unfinished = 0
        self._failure: Failure | None = None
        self._unsent: deque[tuple[int, list[int]]] = deque()  # prompts the engine has not got yet
        self._send: Callable[[int, list[int]], None]
        self._watcher: asyncio.Task[None] | None = None

    def log(self, what: str, text: object) -> None:
        """Log a prompt or an answer, if the operator wants them in the log."""
        if self.service.options.log_prompts:
            log.info("%s %s: %r", self.id, what, text)

    # -- asking -------------------------------------------------------------------------------------------
    def submit(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        stream: bool,
        priority: int | None = None,
        cache_salt: str | None = None,
        guide_param: str | None = None,
        at_a_time: int | None = None,
        session: str = "",
        slo: Slo | None = None,
    ) -> None:
        """Send all prompts to the engine, or raise ApiError and send none. `guide_param`: the field that the
        guide in `params` comes from. `at_a_time`: at most so many are in the engine, the others follow.
        `session`: the caller's name of it; its requests prefer one replica. `slo`: the latency that the request
        asks for, instead of its key's or the server's."""
        priority = priority or 0
        if priority < 0 and not self.caller.may_go_first:
            raise invalid(
                f"priority {priority} would go before every other key's requests, and this key may not: send 0 or "
                "more, or ask the operator for may_go_first in the file of keys",
                "priority",
            )
        promises = self.service.options.engine.slo is not None or self.caller.slo is not None
        # With neither keys here nor at a gateway there is nobody to share with: long prompts are computed whole.
        tenant = self.caller.name if self.caller != self.service.anyone else ""
        if slo is not None and tenant and not promises:
            # An engine that keeps promises serves by deadline: one key's request must not end the others' shares.
            raise invalid("this server promises no latency: start it with --slo, or leave slo out", "slo")
        self._guide_param = guide_param
        at_a_time = at_a_time or len(prompts)
        if self._least_priority is not None:
            priority, at_a_time = max(priority, self._least_priority), min(at_a_time, _BATCH_AT_A_TIME)
        promised = self.caller.promised(slo, priority)
        self.service.admit(self.caller, prompts, params, at_a_time)
        salt = self.caller.salt(cache_salt or "")
        self._adapter = adapter = self.service.hold_adapter(self.model)
        forwarded, own_seed, resumed = self.forwarded, params.seed is not None, b""
        if forwarded is not None:
            params = forwarded.begin(prompts, params)
            resumed = forwarded.resumed
        session = f"{self.caller.name}\0{session}" if session else ""
        self.params = params
        self.finished = [None] * len(prompts)
        self.prompts = prompts
        self._unfinished = len(prompts)

        def send(position: int, tokens: list[int]) -> None:
            request_id = self._unused_id(self.id if len(prompts) == 1 else f"{self.id}-{position}")
            self._request_ids.append(request_id)
            drawn = params if forwarded is None else forwarded.params_of(position, own_seed, params)
            submit = Submit(
                request_id,
                array("i", tokens).tobytes(),
                drawn,
                stream,
                priority,
                salt,
                tenant,
                resumed,
                session=session,
                slo=promised,
                adapter="" if adapter is None else adapter.key,
            )
            submitted_s = time.perf_counter()
            # First: the engine wakes while this is written down.
            in_flight = self.service.engine.submit(submit, self._inbox, position)
            record = Record(
                request_id=request_id,
                call_id=self.id,
                caller=self.caller.name,
                model=self.model,
                received_s=self.received_s,
                submitted_s=submitted_s,
                prompt_tokens=len(tokens),
                samples=drawn.n,
                stream=stream,
                priority=priority,
                default_limit=self.default_limit,
                dispatches=in_flight.dispatches,
                resumed_tokens=len(resumed) // 4,
            )
            self.service.note_submitted(self.caller, record)

        self._send = send
        self._unsent.extend(enumerate(prompts))
        self.service.unsent += len(prompts)
        self._send_more(at_a_time)
        self._watcher = asyncio.create_task(self._watch())

    def _unused_id(self, name: str) -> str:
        """A gateway may send a request to a server that still computes it, or remembers it: to one that was slow to
        answer, for instance. What the engine says of the one is nothing for the other."""
        if self.forwarded is None:
            return name
        service, found, times = self.service, name, 1
        while found in service.engine.in_flight or service.stories.get(found) is not None:
            times += 1
            found = f"{name}.{times}"
        return found

    def _send_more(self, count: int) -> None:
        for _ in range(min(count, len(self._unsent))):
            self.service.unsent -= 1
            self._send(*self._unsent.popleft())

    async def _watch(self) -> None:
        """Abort as soon as the client hangs up."""
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._client_gone = True
        self.abort()

    def abort(self) -> None:
        for position, request_id in enumerate(self._request_ids):
            if self.finished[position] is None:
                self.service.engine.abort(request_id)

    def close(self) -> None:
        """The answer is complete, or will never be: leave nothing running."""
        self.service.unsent -= len(self._unsent)
        self._unsent.clear()
        self.abort()
        if self._adapter is not None:
            self.service.adapters.release(self._adapter)
            self._adapter = None
        if self._watcher is not None:
            self._watcher.cancel()

    # -- answers ------------------------------------------------------------------------------------------
    def spoken(self, made: Delta | Sample) -> list[TokenLogprobs]:
        """The log-probabilities of what was made, without the token that ended it: that is not part of the text."""
        entries = made.logprobs
        if made.finish_reason == "stop" and entries:
            last = entries[-1].token
            if last in self.params.stop_token_ids or last in self.service.info.eos_ids:
                return entries[:-1]
        return entries

    @property
    def ended(self) -> list[Finished]:
        """What has come of the prompts that are done, in their order."""
        return [finished for finished in self.finished if finished is not None]

    @property
    def complete(self) -> bool:
        """Every request has finished well: nothing more will come."""
        return not self._unfinished and self._failure is None

    async def next_batch(self) -> Batch:
        """Everything that is new, waiting until something is. Raises ApiError when a request has failed, after
        what was made before the failure: that belongs to the client."""
        if self._failure is not None:
            raise self._as_error(self._failure)
        batch: Batch = []
        ended = 0
        for position, item in await self._inbox.next_items():
            if isinstance(item, Failure):
                self._failure = self._failure or item
                continue
            if isinstance(item, Finished):
                ended += 1
                self.finished[position] = item
                for sample in item.samples:
                    self.log(f"answer {position}.{sample.index}", sample.text)
                aborted = any(sample.finish_reason == "abort" for sample in item.samples)
                if aborted and not self._client_gone:
                    self._failure = self._failure or Failure(self.service.abort_reason)
            batch.append((position, item))
        self._unfinished -= ended
        if self._client_gone:
            raise ClientGone
        if self._failure is None:
            self._send_more(ended)
        elif not batch:
            raise self._as_error(self._failure)
        return batch

    async def results(self) -> list[Finished]:
        """Everything at once, in the order of the prompts."""
        try:
            while not self.complete:
                await self.next_batch()
            return self.ended
        finally:
            self.close()

    def _as_error(self, failure: Failure) -> ApiError:
        if failure.busy:
            return ApiError(
                503, failure.message, kind="server_error", code="guide_compiler_busy", retry_after_s=2
            )
        if failure.retry_after_s is not None:
            return ApiError(
                429, failure.message, param="slo", code="slo_not_kept", retry_after_s=failure.retry_after_s
            )
        if failure.of_guide:
            message = failure.message
            if self._guide_param == "tools":
                message = f"the parameters of these tools cannot be enforced: {message}"
            return invalid(message, self._guide_param, "invalid_value")
        if failure.refused:
            return invalid(failure.message, code="invalid_value")
        return ApiError(503, failure.message, kind="server_error", code="engine_error", retry_after_s=1)
