"""Engine: the loop. Requests go in, the scheduler plans, a runner plays, text comes out.

While the runner computes step N, this thread finishes N-1 and plans N+1 (`overlap`), unless the scheduler would
rather see who arrives meanwhile. Nothing here decides what runs, and nothing here computes.
"""

import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

from cumulo.engine.adapters import AdapterStore
from cumulo.engine.decide.adapters import salted
from cumulo.engine.decide.core.extension import StepTiming
from cumulo.engine.decide.core.request import DrawnSample, Request, Sequence, State
from cumulo.engine.decide.core.step_result import take_back
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import PendingStep, Runner, StepPlan, StepResult
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.guides.guided import Guidance
from cumulo.engine.outputs import Delta, RequestOutput, Sample, TextStream, normalised
from cumulo.engine.play.disk_tier import TierMover
from cumulo.engine.play.transfer_receiver import TransferReceiver
from cumulo.engine.play.transfer_sender import TransferSender
from cumulo.errors import InvalidRequest, RanksFailed
from cumulo.models.text.tokenizer import Tokenizer
from cumulo.spec.slo import Slo

log = logging.getLogger(__name__)

_FILES_S = 0.01  # how long a step with nothing to compute waits for files


@dataclass(slots=True)
class StepOutput:
    deltas: list[Delta] = field(default_factory=list)  # of requests added with stream=True
    finished: list[RequestOutput] = field(default_factory=list)  # of all requests that ended, however


@dataclass(frozen=True, slots=True)
class _Client:
    """What the engine remembers of whoever asked: rides along in Request.tag."""

    prompt_text: str | None
    stream: bool
    streams: dict[int, TextStream] = field(default_factory=dict)  # by sample, where text is needed early
    told: set[int] = field(default_factory=set)  # samples whose last Delta has been sent


class Engine:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_ids: tuple[int, ...] = (),
        overlap: bool = True,
        seed: int = 0,
        guidance: Guidance | None = None,
        depth: int = 1,
    ) -> None:
        """`depth`: with `overlap`, how many steps are on their way while the next is planned: one for each stage of
        a pipeline."""
        self.scheduler, self.runner, self.tokenizer = scheduler, runner, tokenizer
        self.vocab_size, self.eos_ids, self.overlap = vocab_size, eos_ids, overlap
        self.guidance = guidance
        self._seeds = random.Random(seed)
        self._ids = itertools.count(1)
        self._depth = depth if overlap else 0
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self.link: TransferSender | TransferReceiver | None = None  # of an engine with a role
        self.adapters: AdapterStore | None = None  # where adapters are served
        self.mover: TierMover | None = None  # of KV blocks between host memory and disk
        self.on_step: Callable[[StepPlan, StepResult], None] = lambda plan, result: None  # told of every step
        self.idle = False  # the last step had nothing to compute: what is here waits for another engine

    # -- requests ---------------------------------------------------------------------------------------
    def add(
        self,
        prompt: Iterable[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        prompt_text: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        stream: bool = False,
        samples: ListLike[DrawnSample] = (),
        slo: Slo | None = None,
        adapter: str = "",
    ) -> Request:
        """Queue a request, or raise InvalidRequest. With `stream`, text comes in Deltas as it is made.

        `samples`: what another engine has drawn already. What follows is what that engine would have drawn.
        """
        held = self.scheduler.adapters.find(adapter) if adapter else None
        request = Request(
            request_id if request_id is not None else f"request-{next(self._ids)}",
            prompt,
            params,
            seed=params.seed if params.seed is not None else self._seeds.getrandbits(63),
            eos_ids=self.eos_ids,
            priority=priority,
            cache_salt=cache_salt if held is None else salted(cache_salt, held.fingerprint),
            tenant=tenant,
            arrived_s=time.perf_counter(),
            tag=_Client(prompt_text, stream),
            samples=samples,
            slo=slo,
            adapter=-1 if held is None else held.slot,
        )
        self._check_tokens(request)
        self.scheduler.add(request)
        if samples and (stream or params.stop):
            self._read_again(request)
        return request

    def _read_again(self, request: Request) -> None:
        """The text of tokens that another engine drew, so that the next one's text continues it."""
        client: _Client = request.tag
        for sequence in request.sequences:
            if sequence.state == State.FINISHED:
                client.told.add(sequence.sample_index)
            if self.tokenizer is not None:
                stream = client.streams[sequence.sample_index] = TextStream(self.tokenizer, request.params)
                for token in sequence.output_tokens:
                    stream.push(token)

    def _check_tokens(self, request: Request) -> None:
        params = request.params
        for name, tokens in (
            ("the prompt", request.sequences[0].tokens),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
            ("logprob_token_ids", params.logprob_token_ids),
        ):
            if tokens and not (min(tokens) >= 0 and max(tokens) < self.vocab_size):
                bad = next(t for t in tokens if not 0 <= t < self.vocab_size)
                raise InvalidRequest(f"{name} contains token {bad}; token ids are 0 to {self.vocab_size - 1}")
        if params.stop and self.tokenizer is None:
            raise InvalidRequest(
                "stop strings need a tokenizer, and this engine has none: use stop_token_ids"
            )
        if params.guide is not None:
            if self.guidance is None:
                raise InvalidRequest("a guide needs a tokenizer, and this engine has none: omit guide")
            self.guidance.check(params.guide)
        if request.tag.stream and params.pooling is not None:
            raise InvalidRequest("an embedding cannot be streamed: omit stream")
        if request.tag.stream and params.best_of is not None and params.best_of > params.n:
            raise InvalidRequest(
                "best_of is known only at the end, so it cannot be streamed: use n, or no stream"
            )

    def abort(self, request_id: str) -> bool:
        """End a request now; its output so far comes with the next step. False if it had ended already."""
        return self.scheduler.abort(request_id, time.perf_counter())

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight) or bool(self.scheduler.closed)

    # -- the loop ---------------------------------------------------------------------------------------
    def step(self) -> StepOutput:
        """Plan a step and hand it to the runner; then finish the oldest, once more are on their way than `depth`
        (without overlap: this one) or if nothing else can be planned, or should be before the oldest has ended."""
        exchanges = self.link is not None or self.mover is not None
        if exchanges:
            self.exchange()
        now_s, plan = time.perf_counter(), None
        if not self._in_flight or self.scheduler.plans_ahead(self._in_flight[-1][0], now_s):
            plan = self.scheduler.plan(now_s)
        if plan is not None:
            self._in_flight.append((plan, self.runner.submit(plan)))
        if exchanges:
            self.exchange()  # what was planned is known to other engines while it is computed
        output = StepOutput()
        finishes = bool(self._in_flight) and (plan is None or len(self._in_flight) > self._depth)
        if finishes:
            self._finish(*self._in_flight.popleft(), output)
        for request in self.scheduler.closed:
            self._close(request, output)
        self.scheduler.closed.clear()
        self.idle = plan is None and not finishes
        if not self.has_work and self.scheduler.pool.used_count and not self.scheduler.transferring:
            raise RuntimeError(f"{self.scheduler.pool.used_count} KV blocks leaked: a bug in the scheduler")
        return output

    def save_tiers(self, patience_s: float) -> None:
        """An idle engine ends: KV blocks go to disk, as far as there is time."""
        if self.mover is not None:
            if not self.has_work:
                self.mover.save(lambda plan: self.runner.submit(plan).result(), patience_s)
            self.mover.close()
            self.mover = None

    def exchange(self) -> None:
        """Take in what other engines said, and tell them what was decided."""
        if self.link is not None:
            self.link.exchange(self.scheduler, time.perf_counter())
        if self.mover is not None:
            if self.idle:  # the last step had nothing to do but to wait for files
                self.mover.news.wait(_FILES_S)
            self.mover.exchange(time.perf_counter())

    def _finish(self, plan: StepPlan, pending: PendingStep, output: StepOutput) -> None:
        """Take a step's result in. If the runner failed, those in the step fail and the others go on."""
        try:
            result = pending.result()
        except RanksFailed:
            raise  # the ranks no longer agree on what they hold: nobody can go on
        except Exception as error:
            log.exception("step %d failed", plan.index)
            message = f"the engine could not compute this step ({type(error).__name__}: {error})"
            self.scheduler.fail_step(plan, message, time.perf_counter())
            return
        self.on_step(plan, result)
        if self.link is not None:
            self.link.step_done(plan)
        now_s = time.perf_counter()
        timing = StepTiming(
            result.finished_s - result.started_s,
            result.proposing_s,
            sum(map(len, result.proposed.values())) if result.proposed else 0,
        )
        self.scheduler.observe(plan, timing, now_s)
        advanced = self.scheduler.apply(plan, result, now_s)
        gained = self.scheduler.batch.gained if plan.may_accept else {}
        # This loop runs for every sequence at every step: keep it lean.
        for sequence in advanced:
            request = sequence.request
            client: _Client = request.tag
            if client.stream or request.params.stop:
                tokens = sequence.tokens
                fresh = [tokens[-1]]
                if gained:
                    fresh = tokens[len(tokens) - gained.get(sequence, 1) :].tolist()
                text = self._push_text(sequence, client, fresh, now_s)
                if client.stream:
                    self._tell(sequence, text, fresh, output)

    def _push_text(self, sequence: Sequence, client: _Client, fresh: list[int], now_s: float) -> str:
        """Feed the sample's newest tokens to its text; a stop string found there ends the sample without the tokens
        after it, which `fresh` loses, too."""
        if self.tokenizer is None:
            return ""
        stream = client.streams.get(sequence.sample_index)
        if stream is None:
            stream = client.streams[sequence.sample_index] = TextStream(
                self.tokenizer, sequence.request.params
            )
        text = ""
        for index, token in enumerate(fresh if sequence.finish_reason != "stop" else fresh[:-1], 1):
            text += stream.push(token)
            if stream.matched is not None:
                take_back(sequence, len(fresh) - index)
                del fresh[index:]
                break
        if stream.matched is not None:
            self.scheduler.batch.finish(sequence, "stop", now_s, stream.matched)
            sequence.finish_reason, sequence.stop_reason = "stop", stream.matched  # also if it hit its length
        elif sequence.state == State.FINISHED:
            text += stream.finish()
        return text

    @staticmethod
    def _tell(sequence: Sequence, text: str, tokens: list[int], output: StepOutput) -> None:
        request = sequence.request
        logprobs = sequence.logprobs[-len(tokens) :] if request.params.logprobs is not None and tokens else []
        if sequence.state == State.FINISHED:
            request.tag.told.add(sequence.sample_index)
        of_prompt = request.prompt_logprobs
        if of_prompt is not None and sequence.output_length != 1:
            of_prompt = None
        output.deltas.append(
            Delta(
                request.id, sequence.sample_index, text, tokens, sequence.finish_reason, logprobs, of_prompt
            )
        )

    # -- ends -------------------------------------------------------------------------------------------
    def _close(self, request: Request, output: StepOutput) -> None:
        """Everything about an ended request, and for a stream the last Delta of samples not yet told."""
        if request.prefill_only:
            return  # the engine that ordered it knows
        client: _Client = request.tag
        if client.stream:
            for sequence in request.sequences:
                if sequence.sample_index not in client.told and request.beam is None:
                    stream = client.streams.get(sequence.sample_index)
                    self._tell(sequence, stream.finish() if stream else "", [], output)
        searched = request.beam is not None and request.beam.done  # a search cut short returns its live beams
        samples = self._beams(request) if searched else self._samples(request)
        if client.stream and request.beam is not None:
            output.deltas += [
                Delta(
                    request.id,
                    s.index,
                    s.text,
                    s.token_ids,
                    s.finish_reason,
                    s.logprobs,
                    request.prompt_logprobs,
                )
                for s in samples
            ]
        output.finished.append(
            RequestOutput(
                request_id=request.id,
                prompt=client.prompt_text,
                prompt_token_ids=request.prompt.tolist(),
                samples=samples,
                story=request.story,
                prompt_logprobs=request.prompt_logprobs,
                error=request.error,
                embedding=_embedding(request),
            )
        )

    def _samples(self, request: Request) -> list[Sample]:
        """The n samples to return; with best_of, those of the best mean log-probability, best first."""
        params, drawn = request.params, list(request.sequences)
        if params.best_of is not None and params.best_of > params.n:
            drawn.sort(key=lambda s: s.cumulative_logprob / max(1, s.output_length), reverse=True)
        samples = []
        for index, sequence in enumerate(drawn[: params.n]):
            stream = request.tag.streams.get(sequence.sample_index)
            samples.append(
                Sample(
                    index=index,
                    text=self._text(sequence.output_tokens, request) if stream is None else stream.text,
                    token_ids=sequence.output_tokens,
                    finish_reason=sequence.finish_reason or "abort",
                    stop_reason=sequence.stop_reason,
                    cumulative_logprob=sequence.cumulative_logprob if sequence.logprobs else None,
                    logprobs=sequence.logprobs if params.logprobs is not None else [],
                )
            )
        return samples

    def _beams(self, request: Request) -> list[Sample]:
        beam = request.beam
        assert beam is not None
        return [
            Sample(
                index=index,
                text=self._text(list(hypothesis.tokens), request),
                token_ids=list(hypothesis.tokens),
                finish_reason=hypothesis.finish_reason,
                stop_reason=None,
                cumulative_logprob=hypothesis.logprob,
            )
            for index, hypothesis in enumerate(beam.best())
        ]

    def _text(self, tokens: list[int], request: Request) -> str:
        if self.tokenizer is None:
            return ""
        if tokens and tokens[-1] in request.stop_ids:
            tokens = tokens[:-1]  # what ended it is not part of the text
        return self.tokenizer.decode(tokens, skip_special=request.params.skip_special_tokens, continues=True)


def _embedding(request: Request) -> list[float] | None:
    if request.pooled is None or request.pooled.total is None:
        return None
    vector: list[float] = normalised(request.pooled.total).tolist()
    return vector
