"""What goes into a simulated run and what comes out: arrivals, costs, what became of every request. Made by the
planner, filled by `simulate`.
"""

from array import array
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

from cumulo.engine.decide.core.extension import Extension
from cumulo.engine.decide.core.request import Request, Sequence
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.errors import InvalidRequest
from cumulo.spec.slo import ServedTimes


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the traffic: when it comes, how long it is, what it shares with others."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    # The beginning of the prompt in pieces (name, tokens): prompts that begin with the same pieces share their KV.
    shared: tuple[tuple[int, int], ...] = ()
    # When another engine has drawn its first token: it arrives with keys and values.
    first_token_s: float | None = None
    tenant: str = ""  # whose it is: an API key

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise InvalidRequest(
                f"a request needs a prompt and an answer of 1 token or more, got {self.prompt_tokens} and "
                f"{self.output_tokens}"
            )
        if not 0 <= self.arrived_s < float("inf"):
            raise InvalidRequest(f"requests arrive at 0 s or later, got {self.arrived_s}")
        if any(tokens < 0 for _, tokens in self.shared):
            raise InvalidRequest(f"a shared piece has 0 tokens or more, got {self.shared}")


class StepTime(NamedTuple):
    """What one step costs. The host's two parts run while the device computes other steps."""

    submit_s: float  # of the host, to plan the step and hand it over
    device_s: float
    apply_s: float  # of the host, to take its tokens in


class DecodeTime(NamedTuple):
    """What a step of so many single tokens costs, whatever their contexts."""

    submit_s: float
    fixed_s: float  # of the device
    context_token_s: float  # ... for each token they attend to
    shared_saving: float  # share of that which is saved on tokens that an earlier sequence holds, too
    apply_s: float

    def time_with(self, context_tokens: int, shared_tokens: int) -> StepTime:
        read = context_tokens - shared_tokens * self.shared_saving
        return StepTime(self.submit_s, self.fixed_s + read * self.context_token_s, self.apply_s)


class StepClock(Protocol):
    def time_of(self, plan: StepPlan, shared: Mapping[int, int]) -> StepTime:
        """`shared`: by slot, tokens of its context that an earlier sequence holds, too."""
        ...

    def decode(self, rows: int) -> DecodeTime | None:
        """The time of a step of single tokens as a line; None where it is no such line."""
        ...

    def arrival_s(self, prompt_tokens: int) -> float:
        """The time of the engine's loop to take a request in."""
        ...


@dataclass(slots=True)
class Served:
    """What became of one request; times are on the simulation's clock."""

    arrival: Arrival
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished: bool = False
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    promised: bool = False  # a latency, and it has ended
    refused: str | None = None  # why it could never run, or that its latency could not be promised
    tokens: int = 0  # where a run judges by ITL: of its tokens after the first one,
    late_tokens: int = 0  # those that came later than the bound

    @property
    def ttft_s(self) -> float:
        return (self.first_token_s or 0.0) - self.arrival.arrived_s

    @property
    def e2e_s(self) -> float:
        return (self.last_token_s or 0.0) - self.arrival.arrived_s

    def judge_gaps(self, tokens: int, late: int) -> None:
        """So many further tokens have come, some of them late."""
        self.tokens += tokens
        self.late_tokens += late

    def times(self, whole: Arrival | None = None) -> ServedTimes | None:
        """What an SLO judges; None: it was not answered. `whole`: the request that this one is a part of."""
        if not self.finished or self.first_token_s is None or self.last_token_s is None:
            return None
        asked = whole or self.arrival
        return ServedTimes.from_answer(
            self.first_token_s - asked.arrived_s,
            self.last_token_s - self.first_token_s,
            asked.output_tokens,
            self.tokens,
            self.late_tokens,
        )


class StepInFlight(NamedTuple):
    plan: StepPlan
    time: StepTime
    done_s: float


@dataclass(slots=True)
class Run:
    """A simulated run: every request, every inter-token latency, and where the device's time went."""

    served: list[Served] = field(default_factory=list)
    # Times between two tokens of a request, over all requests: how long, and how many of that length in a step.
    itl_s: "array[float]" = field(default_factory=lambda: array("d"))
    itl_counts: "array[int]" = field(default_factory=lambda: array("q"))
    steps: int = 0
    computed_tokens: int = 0
    drafted_tokens: int = 0  # by speculation, of requests that ended
    accepted_tokens: int = 0
    device_busy_s: float = 0.0
    ended_s: float = 0.0
    most_running: int = 0
    most_blocks: int = 0
    all_finished: bool = True
    itl_bound_s: float | None = None  # to judge single requests by
    # Steps of stretches, which no cost was asked about one by one: how many of so many rows, and what they read.
    stretch_steps: Counter[int] = field(default_factory=Counter)
    stretch_read: float = 0.0

    def count_step(self, rows: int, tokens: int, device_s: float) -> None:
        self.steps += 1
        self.computed_tokens += tokens
        self.device_busy_s += device_s
        if rows > self.most_running:
            self.most_running = rows

    def count_stretch(self, rows: int, device_s: ListLike[float], time: DecodeTime) -> None:
        """Steps of so many single tokens, one for each of these times."""
        self.steps += len(device_s)
        self.computed_tokens += rows * len(device_s)
        self.device_busy_s += sum(device_s)
        self.most_running = max(self.most_running, rows)
        self.stretch_steps[rows] += len(device_s)
        if time.context_token_s:
            self.stretch_read += (sum(device_s) - len(device_s) * time.fixed_s) / time.context_token_s

    def close(self, request: Request, now_s: float) -> None:
        """A request has ended."""
        served, story = request.tag, request.story
        served.finished, served.last_token_s = True, now_s
        served.cached_tokens, served.preemptions = story.cached_tokens, story.preemptions
        served.recomputed_tokens, served.promised = story.recomputed_tokens, story.promise is not None
        self.drafted_tokens += story.drafted_tokens
        self.accepted_tokens += story.accepted_tokens
        request.sequences = []  # they know each other: apart, both are freed at once and not by the collector


_OWN_TOKEN = 1 << 23  # from here on tokens of a prompt that its answer repeats


def take_in(arrival: Arrival, number: int, scheduler: Scheduler, cost: StepClock, run: Run) -> float:
    """Queue a request; returns what that costs the loop."""
    served = Served(arrival)
    run.served.append(served)
    params = _params(arrival.output_tokens)
    prompt = _prompt(arrival, number, scheduler.config.speculate == "ngram")
    request = Request(
        str(number), prompt, params, seed=0, tenant=arrival.tenant, arrived_s=arrival.arrived_s, tag=served
    )
    try:
        scheduler.add(request)
    except InvalidRequest as error:
        served.refused = str(error)
    else:
        if arrival.first_token_s is not None:
            request.sequences[0].tokens.append(0)
            served.first_token_s = served.last_token_s = arrival.first_token_s
    return cost.arrival_s(arrival.prompt_tokens)


class Landing(Extension):
    """Requests whose prompts another engine has computed: keys and values are there once the scheduler has room for
    them. What of them is lost to preemption is computed again."""

    def tokens_elsewhere(self, sequence: Sequence, cached: int) -> int:
        return sequence.prompt_length - cached if _has_landed(sequence.request) else 0

    def admitted(self, sequence: Sequence, cached: int, plan: StepPlan, now_s: float) -> int:
        if _has_landed(sequence.request):
            sequence.computed = sequence.prompt_length
        return 0


def _has_landed(request: Request) -> bool:
    return request.tag.arrival.first_token_s is not None and request.story.admitted_s is None


@lru_cache(4096)
def _params(output_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_tokens, ignore_eos=True)


def _prompt(arrival: Arrival, number: int, can_repeat: bool = False) -> bytes:
    """Token ids that hash as the traffic shares: a piece's name over and over, then the request's own number.
    With `can_repeat` further ones behind that, each of them once: an answer that repeats them can be looked up.

    As bytes, which an array takes over at once; one by one its tokens would cost more than scheduling them.
    """
    if not arrival.shared and not can_repeat:
        return (array("i", (number,)) * arrival.prompt_tokens).tobytes()
    tokens = array("i")
    for name, length in arrival.shared:
        tokens.extend(array("i", (-1 - name,)) * min(length, arrival.prompt_tokens - len(tokens)))
    own = arrival.prompt_tokens - len(tokens)
    if can_repeat and own:
        tokens.append(number)
        tokens.extend(range(_OWN_TOKEN, _OWN_TOKEN + own - 1))
    else:
        tokens.extend(array("i", (number,)) * own)
    return tokens.tobytes()
