"""Request and Sequence: what the user asked for, and each line of tokens that grows to answer it.

A request draws one or more sequences (samples or beams). A sequence has tokens, of which the first
`computed` have their keys and values in blocks (or will have when the steps already planned have run) and
`pending` more that are being sampled right now. The scheduler's one rule is that `computed` catches up.
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import Any, Final, Literal, NamedTuple

from cumulo.engine.decide.core.block_pool import BlockHash, chain_hashes, root_hash
from cumulo.engine.decide.core.pooling import Pooled
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import TokenLogprobs
from cumulo.engine.decide.story import Story
from cumulo.errors import InvalidRequest
from cumulo.spec.slo import Slo

FinishReason = Literal["stop", "length", "abort", "error"]


class State:
    """Where a sequence is. Plain numbers: looking up a member of an Enum takes 0.17 us in Python 3.11, and every
    step looks at every sequence."""

    WAITING: Final = 0  # queued or preempted: holds no block
    RUNNING: Final = 1  # has a slot and blocks
    FINISHED: Final = 2
    RECEIVING: Final = 3  # has a slot and blocks, which somebody else fills


class DrawnSample(NamedTuple):
    """A sample as another engine has left it."""

    tokens: "array[int]"
    finish_reason: FinishReason | None = None  # None: it goes on


class TokenUsage:
    """The tokens that were drawn for whoever a request belongs to."""

    __slots__ = ("output_tokens",)

    def __init__(self) -> None:
        self.output_tokens = 0


class Request:
    __slots__ = (
        "adapter", "arrived_s", "beam", "cache_salt", "error", "forks_left", "id", "order", "output_limit",
        "params", "pooled", "prefill_only", "priority", "prompt_length", "prompt_logprobs", "reserved_slots",
        "seed", "sequences", "slo", "stop_ids", "story", "tag", "tenant", "usage",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt: Iterable[int],
        params: SamplingParams,
        *,
        seed: int,
        eos_ids: tuple[int, ...] = (),
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        arrived_s: float = 0.0,
        tag: Any = None,
        samples: ListLike[DrawnSample] = (),
        slo: Slo | None = None,
        adapter: int = -1,
    ) -> None:
        """`samples`: what another engine has drawn already; this one draws what follows. `adapter`: the slot of its
        low-rank adapter in the runner; -1: none."""
        try:
            tokens = array("i", prompt)
        except (TypeError, OverflowError) as error:
            raise InvalidRequest(f"a prompt is a list of token ids: {error}") from None
        if not tokens:
            raise InvalidRequest("the prompt is empty: there is nothing to continue")
        self.id, self.params, self.seed, self.prompt_length = request_id, params, seed, len(tokens)
        self.priority, self.cache_salt, self.arrived_s, self.tag = priority, cache_salt, arrived_s, tag
        self.tenant, self.adapter = tenant, adapter
        stops = () if params.ignore_eos else eos_ids
        self.stop_ids = frozenset((*stops, *params.stop_token_ids))
        self.slo = slo  # asked for; bounds that it leaves out are the engine's
        self.output_limit = 0  # set when the scheduler accepts it
        self.order: tuple[float, int] = (0.0, 0)
        self.usage: Any = TokenUsage()  # an extension may put one in its place that several requests have
        self.story = Story(arrived_s, prompt_tokens=len(tokens))
        self.forks_left = params.samples - 1 if params.beam_width is None else 0
        self.reserved_slots: list[int] = []  # for samples or beams that do not exist yet
        self.sequences = [Sequence(self, 0, tokens)]
        if samples:
            self._take_over(tokens, samples)
        self.prompt_logprobs: list[TokenLogprobs] | None = None if params.prompt_logprobs is None else []
        self.pooled = None if params.pooling is None else Pooled(params.pooling, len(tokens))
        self.beam: Any = None  # the search that chooses its tokens, with beam_width
        self.error: str | None = None
        self.prefill_only = False  # all of its tokens are computed for another engine, and nothing is drawn

    def _take_over(self, prompt: "array[int]", samples: ListLike[DrawnSample]) -> None:
        if not self.params.can_resume or len(samples) != self.params.n:
            raise InvalidRequest(
                f"{len(samples)} samples cannot be resumed: the request is for others, for beams or an embedding"
            )
        self.forks_left = 0
        self.sequences = [Sequence(self, index, prompt + one.tokens) for index, one in enumerate(samples)]
        for sequence, one in zip(self.sequences, samples, strict=True):
            if one.finish_reason is not None:
                sequence.state, sequence.finish_reason = State.FINISHED, one.finish_reason
        if self.finished:
            raise InvalidRequest("all samples of the request have ended: there is nothing to resume")
        self.story.add(self.arrived_s, "taken_over", output_tokens=sum(len(one.tokens) for one in samples))

    @property
    def prompt(self) -> "array[int]":
        """Kept once, as the beginning of its sequences."""
        return self.sequences[0].tokens[: self.prompt_length]

    @property
    def slots_to_reserve(self) -> int:
        """Slots its later samples or beams will need beside the one being admitted."""
        if self.beam is not None:
            live = sum(sequence.state != State.FINISHED for sequence in self.sequences)
            return int(self.beam.width) - live - len(self.reserved_slots)
        return self.forks_left - len(self.reserved_slots)

    @property
    def finished(self) -> bool:
        return self.forks_left == 0 and all(s.state == State.FINISHED for s in self.sequences)


class Sequence:
    __slots__ = (
        "blocks", "candidates", "capacity", "computed", "cumulative_logprob", "drafting", "finish_reason", "hashes",
        "last_step", "limit", "logprobs", "lost", "pending", "prompt_length", "queued", "request",
        "sample_index", "shares_tail", "slot", "state", "stop_reason", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, sample_index: int, tokens: "array[int]") -> None:
        self.request, self.sample_index, self.tokens = request, sample_index, tokens
        self.prompt_length = request.prompt_length
        self.limit = 0  # tokens in all at which it ends
        self.computed = 0
        self.pending = 0
        self.state: int = State.WAITING
        self.queued = 0  # the number of its entry in the waiting queue, 0 for none
        self.slot = -1
        self.blocks: list[int] = []
        self.capacity = 0  # len(blocks) * block_size, kept so that the hot loop need not compute it
        self.hashes: list[BlockHash] = []
        self.shares_tail = False  # its last block may be shared: look before writing
        self.lost = 0  # tokens computed once and dropped by preemption
        self.last_step = -1  # the last plan that has a row of this sequence
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob = 0.0
        self.logprobs: list[TokenLogprobs] = []
        self.drafting: Any = None  # speculation's notes on it
        # A beam's next tokens, until all beams have some.
        self.candidates: list[tuple[int, float]] | None = None

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def to_compute(self) -> int:
        """Known tokens that are not computed."""
        return len(self.tokens) - self.computed

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :].tolist()

    def fork(self, sample_index: int) -> "Sequence":
        """A sequence with the same past. The caller shares the blocks and gives it a slot."""
        twin = Sequence(self.request, sample_index, self.tokens[:])
        twin.limit, twin.computed, twin.state = self.limit, self.computed, State.RUNNING
        twin.blocks, twin.capacity, twin.hashes = self.blocks[:], self.capacity, self.hashes[:]
        twin.shares_tail = self.shares_tail = True
        twin.cumulative_logprob, twin.logprobs = self.cumulative_logprob, self.logprobs[:]
        twin.last_step = self.last_step
        return twin

    def extend_hashes(self, full_blocks: int, block_size: int) -> list[BlockHash]:
        """The hash chain of its first full_blocks blocks."""
        hashes = self.hashes
        if len(hashes) < full_blocks:
            parent = hashes[-1] if hashes else root_hash(self.request.cache_salt)
            tokens = self.tokens[len(hashes) * block_size : full_blocks * block_size]
            hashes += chain_hashes(parent, tokens, block_size)
        return hashes if len(hashes) == full_blocks else hashes[:full_blocks]
