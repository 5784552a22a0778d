"""Service: what the endpoints share. Owns the engine client, the tokenizer, limits, metrics and stories.

It decides whether a request may come in, and is told by the engine client what becomes of it.
"""

import hashlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request

from cumulo import __version__
from cumulo.base.nearest import did_you_mean
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.outputs import Delta
from cumulo.fleet.decide.autoscale_settings import parse_autoscale
from cumulo.models.adapters.config import greatest_rank
from cumulo.ranks.rank_meter import RankState
from cumulo.serve.access.keys import ApiKeys, Caller
from cumulo.serve.access.limits import RateLimits
from cumulo.serve.adapter_registry import AdapterRefused, AdapterRegistry, ServedAdapter, named_loras
from cumulo.serve.engine_link.engine_client import EngineClient
from cumulo.serve.engine_link.engine_settings import EngineSettings
from cumulo.serve.engine_link.in_flight import InFlight
from cumulo.serve.engine_link.messages import AdapterReport, Failure, Finished, Ready, Stats, StepRecord
from cumulo.serve.errors import ApiError, invalid
from cumulo.serve.model_text import ModelText
from cumulo.serve.observe.fleet_metrics import rank_metrics, replica_metrics
from cumulo.serve.observe.fleet_report import replica_reports
from cumulo.serve.observe.metrics import Metrics
from cumulo.serve.observe.step_history import StepHistory
from cumulo.serve.observe.stories import Record, Rejections, Stories
from cumulo.serve.options import ServeOptions
from cumulo.serve.replicas.autoscaler import FleetAutoscaler
from cumulo.serve.replicas.fleet import Fleet
from cumulo.serve.stored_responses import StoredResponses

if TYPE_CHECKING:
    from cumulo.serve.observe.otel import Tracing

log = logging.getLogger(__name__)

_RECENT_STEPS = 512  # for the console
_RECENT_ENDS = 64  # to estimate how fast the queue moves
# Every token of every answer brings its own log-probability and that of `k` alternatives. 128 answers of 8,000
# tokens with 20 alternatives would be 21 million entries, gigabytes in this process. The bound is on what may
# come, so a request is refused at once and in words, not half-way.
MAX_LOGPROBS = 262_144


HELD_SERVICE = "service"  # in a request's state: that of the model it names, where the server has several


def service_of(request: Request) -> "Service":
    service: Service = request.scope["state"].get(HELD_SERVICE) or request.app.state.service
    return service


def not_served(name: str, known: Sequence[str], why: str = "") -> ApiError:
    name = name[:140]  # it may be as long as a body, and comparing names takes time
    if not why and len(known) == 1:
        why = f"this server has {known[0]!r}"
    elif not why:
        why = did_you_mean(name, known, quoted=True, otherwise=f"; this server has {', '.join(known)}")[2:]
    words = f"the model {name!r} is not served here; {why}"
    return ApiError(404, words, param="model", code="model_not_found")


class Service:
    def __init__(
        self, options: ServeOptions, text: ModelText, model_name: str, beside: "Service | None" = None
    ) -> None:
        """`beside`: the service of the server's first model, with which this one shares keys, limits, stories and
        what is stored."""
        named = named_loras(options.lora)
        ranks = [greatest_rank(Path(folder)) for folder in named.values()]
        options = replace(options, engine=options.engine.with_adapters(ranks))
        self.options, self.text, self.model_name = options, text, model_name
        self.started_s = time.time()
        # What a seeded answer depends on besides its request.
        settings_text = repr((__version__, model_name, options.model, options.engine))
        self.fingerprint = f"fp_{hashlib.blake2s(settings_text.encode(), digest_size=5).hexdigest()}"
        self.adapters = AdapterRegistry(options.engine.max_loras, model_name)
        for name, folder in named.items():
            self.adapters.put(name, folder)
        settings = EngineSettings(
            model=options.model,
            config=options.engine,
            adapters=self.adapters,
            stall_timeout_s=options.stall_timeout_s,
            start_timeout_s=options.start_timeout_s,
            log_level=options.log_level,
            for_router=options.fleet_key is not None,
        )
        scaled = parse_autoscale(options.autoscale) if options.autoscale else None
        several = options.replicas > 1 or options.prefill > 0 or scaled is not None
        most = scaled.limits.most if scaled is not None else 0
        most_prefill = scaled.prefill.most if scaled is not None and scaled.prefill is not None else 0
        self.fleet = (
            Fleet(settings, self, options.replicas, options.router, options.prefill, most, most_prefill)
            if several
            else None
        )
        self.autoscaler = (
            FleetAutoscaler(self.fleet, scaled, options.engine.slo) if self.fleet and scaled else None
        )
        self.engine: EngineClient | Fleet = self.fleet or EngineClient(settings, self)
        self.adapters.on_free = lambda adapter: self.engine.drop_adapter(adapter.key)
        anyone = Caller("anyone", options.requests_per_minute, options.tokens_per_minute, may_operate=True)
        self.anyone = anyone
        if beside is None:
            self.keys = ApiKeys(options.api_keys, anyone) if options.api_keys is not None else None
            self.limits = RateLimits()
            self.metrics = Metrics(model_name)
            self.stories = Stories(options.stories)
            self.rejections = Rejections(options.stories)
            self.stored_responses = StoredResponses(options.stored_responses)
        else:
            self.keys, self.limits, self.stories = beside.keys, beside.limits, beside.stories
            self.rejections, self.stored_responses = beside.rejections, beside.stored_responses
            self.metrics = Metrics(model_name, beside.metrics)
        if (fleet := self.fleet) is not None:
            replica_metrics(self.metrics.registry, model_name, lambda: replica_reports(fleet))
        if options.engine.layout.world > 1:
            rank_metrics(self.metrics.registry, model_name, self.rank_states)
        self.step_history = StepHistory()
        self.recent_steps: deque[StepRecord] = deque(maxlen=_RECENT_STEPS)
        self.tracing: Tracing | None = None  # set by the server, with --otlp-endpoint
        self.fairness_index = 1.0
        self.draining = False
        self.unsent = 0  # prompts of running calls that follow as the engine takes them
        self.abort_reason = "the request was aborted"
        self._callers: dict[str, Caller] = {}  # of requests in flight
        self._ends_s: deque[float] = deque(maxlen=_RECENT_ENDS)
        self.metrics.series("engine_up").set_function(lambda: float(self.takes_requests))
        self.metrics.series("engine_restarts").set_function(lambda: float(self.engine.restarts))
        self.metrics.series("lora_adapters").set_function(lambda: float(len(self.adapters.served)))

    def rank_states(self) -> dict[str, list[RankState]]:
        """The ranks of each engine that runs over several, by its name."""
        clients = {one.name: one.client for one in self.fleet.replicas.values()} if self.fleet else {}
        if isinstance(self.engine, EngineClient):
            clients["engine"] = self.engine
        return {
            name: client.stats.ranks
            for name, client in clients.items()
            if client.stats is not None and client.stats.ranks
        }

    async def start(self) -> Ready:
        info = await self.engine.start()
        if self.autoscaler is not None and self.fleet is not None:
            self.fleet.keep(self.autoscaler.run())
        for report in info.adapters:
            self._now_served(self.adapters.all[report.key], report)
        self.text.max_context = info.max_context
        self.metrics.on_ready(info)
        return info

    @property
    def takes_requests(self) -> bool:
        """Whether requests are answered: at once, or when the model has been loaded again for them."""
        again = self.fleet is None and self.engine.info is not None
        return self.engine.state in ("ready", "unloaded") or (again and self.engine.state == "starting")

    async def close(self) -> None:
        await self.engine.close()
        self.text.close()

    async def unload(self) -> None:
        """Free the engine's memory while no request runs; `start` loads the model again."""
        assert isinstance(self.engine, EngineClient)
        await self.engine.unload()

    @property
    def info(self) -> Ready:
        """What the engine said about itself; ApiError 503 before it has."""
        if self.engine.info is None:
            raise ApiError(503, "the model is still being loaded", code="not_ready", retry_after_s=5)
        return self.engine.info

    def caller_named(self, name: str) -> Caller | None:
        """The caller of this name with the limits it has now, for work that outlives its request; None while there
        is no such key."""
        if self.keys is not None:
            return self.keys.named(name)
        return self.anyone if name == self.anyone.name else None

    # -- may it come in? ----------------------------------------------------------------------------------
    def check_model(self, name: str | None) -> None:
        if name is None or name == self.model_name or self.adapters.named(name) is not None:
            return
        lost = next((one for one in self.adapters.all.values() if one.name == name and one.error), None)
        why = f"its adapter was lost when the engine restarted ({lost.error})" if lost is not None else ""
        raise not_served(name, [self.model_name, *self.adapters.served], why)

    # -- adapters -----------------------------------------------------------------------------------------
    def hold_adapter(self, name: str) -> ServedAdapter | None:
        """The adapter that a request names as its model; None: it names the model itself. Released when it has
        ended."""
        if name == self.model_name:
            return None
        self.check_model(name)
        adapter = self.adapters.named(name)
        assert adapter is not None
        self.adapters.hold(adapter)
        self.metrics.series("lora_requests", name).inc()
        return adapter

    async def load_adapter(self, name: str, folder: str) -> ServedAdapter:
        """Returns when requests can name it; AdapterRefused if it cannot be loaded."""
        adapter = self.adapters.put(name, folder)
        try:
            report = await self.engine.load_adapter(adapter)
            if report is None:
                raise AdapterRefused("the engine is being restarted; try again when it is back")
            if report.error:
                raise AdapterRefused(report.error)
        except BaseException:
            self.adapters.remove(adapter)
            self.engine.drop_adapter(adapter.key)
            raise
        self._now_served(adapter, report)
        log.info("adapter %s is loaded from %s (rank %d)", name, folder, adapter.rank)
        return adapter

    def _now_served(self, adapter: ServedAdapter, report: AdapterReport) -> None:
        adapter.rank, adapter.fingerprint, adapter.ready = report.rank, report.fingerprint, True

    def check_ready(self) -> None:
        if self.engine.state != "ready":
            loads = self.engine.state in ("starting", "unloaded")
            doing = "loading its model" if loads else "being restarted"
            raise ApiError(503, f"the engine is {doing}; try again soon", code="not_ready", retry_after_s=3)

    def check_lengths(self, prompts: list[list[int]], params: SamplingParams) -> None:
        info = self.info
        for tokens in prompts:
            # An embedding leaves no room for an answer.
            what, holds = ("prompt", " including the answer") if params.pooling is None else ("input", "")
            if len(tokens) >= info.max_context + (params.pooling is not None):
                raise invalid(
                    f"the {what} has {len(tokens):,} tokens; this model's context holds {info.max_context:,}"
                    f"{holds}: shorten the {what}",
                    code="context_length_exceeded",
                )

    def admit(self, caller: Caller, prompts: list[list[int]], params: SamplingParams, at_a_time: int) -> None:
        """Raise ApiError unless these prompts may go to the engine now, so many at a time. Charges the caller."""
        self.check_ready()
        info = self.info
        self.check_lengths(prompts, params)
        check_logprobs(prompts, params, info.max_context)
        waiting = self.engine.waiting
        if waiting + min(at_a_time, len(prompts)) > self.options.max_queue + self._free_places():
            raise ApiError(
                429,
                f"{waiting} requests are waiting already and at most {self.options.max_queue} may: try again later",
                code="queue_full",
                retry_after_s=self._retry_after_s(waiting),
            )
        self.limits.charge_prompt(caller, sum(map(len, prompts)))

    def _free_places(self) -> int:
        stats = self.engine.stats
        running = stats.running if stats is not None else 0
        return max(0, self.engine.max_running - running) if not (stats and stats.waiting) else 0

    def _retry_after_s(self, waiting: int) -> float:
        """How long the present queue takes at the pace of the last ends; 1 to 60 seconds."""
        if len(self._ends_s) < 2:
            return 1.0
        pace_s = (self._ends_s[-1] - self._ends_s[0]) / (len(self._ends_s) - 1)
        return min(60.0, max(1.0, waiting * pace_s))

    def note_submitted(self, caller: Caller, record: Record) -> None:
        self._callers[record.request_id] = caller
        self.stories.add(record)

    # -- what becomes of it: the engine client's Observer -------------------------------------------------
    def on_progress(self, stats: Stats) -> None:
        self.recent_steps.extend(stats.records)
        self.step_history.note(stats, time.perf_counter())
        self.metrics.on_progress(stats)
        if stats.fairness is not None:
            self.fairness_index = stats.fairness.index
        if self.engine.info is not None:
            self.metrics.on_ready(self.engine.info)  # a restarted engine has measured anew

    def on_delta(self, request: InFlight, delta: Delta, now_s: float) -> None:
        if not delta.token_ids:
            return
        self.metrics.series("generation_tokens").inc(len(delta.token_ids))
        if request.last_token_s is not None and request.submit.params.n == 1:
            self.metrics.series("inter_token_latency_seconds").observe(now_s - request.last_token_s)
        request.last_token_s = now_s
        record = self.stories.get(delta.request_id)
        if record is not None:
            record.note_token(now_s)

    def on_end(self, request: InFlight, end: Finished | Failure) -> None:
        now_s = time.perf_counter()
        self._ends_s.append(now_s)
        caller = self._callers.pop(request.submit.request_id)
        story = end.story if isinstance(end, Finished) else None
        if story is not None:
            self.limits.charge_output(caller, story.output_tokens)
            if not request.submit.stream:
                self.metrics.series("generation_tokens").inc(story.output_tokens)
        record = self.stories.get(request.submit.request_id)
        if record is None:  # pushed out by many newer ones
            return
        record.ended_s, record.story, record.retried = now_s, story, request.resubmitted_at >= 0
        if isinstance(end, Failure):
            record.outcome, record.error = "error", end.message
            if end.retry_after_s is not None:
                self.metrics.series("slo_requests", "refused").inc()
        else:
            record.outcome = end.samples[0].finish_reason if end.samples else "abort"
        self.metrics.on_end(record)
        if self.autoscaler is not None and story is not None and record.first_token_s is not None:
            first_s = record.first_token_s
            rest_s = (story.finished_s or first_s) - first_s
            self.autoscaler.note_end(first_s - record.received_s, rest_s, story.output_tokens, record.itls_s)

    # -- the end ------------------------------------------------------------------------------------------
    def abort_all(self, reason: str) -> None:
        """End everything that runs; the clients are told why."""
        self.abort_reason = reason
        for request_id in list(self.engine.in_flight):
            self.engine.abort(request_id)


def check_logprobs(prompts: Sequence[Sequence[int]], params: SamplingParams, max_context: int) -> None:
    """Raise ApiError if so many log-probabilities could come that no answer may hold them."""
    if params.logprobs is None and params.prompt_logprobs is None:
        return
    answers = max(params.n, params.best_of or 1, params.beam_width or 1)
    entries = of_prompts = 0
    for tokens in prompts:
        room = max(1, max_context - len(tokens))
        if params.logprobs is not None:
            longest = room if params.max_tokens is None else min(params.max_tokens, room)
            entries += answers * longest * (params.logprobs + 1)
        if params.prompt_logprobs is not None:
            of_prompts += params.n * len(tokens) * (params.prompt_logprobs + 1)  # told with every answer
    if entries + of_prompts > MAX_LOGPROBS:
        raise invalid(
            f"this request could bring {entries + of_prompts:,} log-probabilities ({of_prompts:,} of its prompts), "
            f"and an answer holds {MAX_LOGPROBS:,}: ask for fewer alternatives or answers, a smaller max_tokens or "
            "shorter prompts",
            "prompt_logprobs" if params.logprobs is None else "logprobs",
            "too_many_logprobs",
        )
