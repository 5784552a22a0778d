"""SamplingParams: what a user may ask of one request. Validated when made, so nothing below checks again."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Literal, get_args

from cumulo.errors import InvalidRequest

MAX_LOGPROBS = 100
MAX_SAMPLES = 128

GuideKind = Literal["json_object", "json_schema", "regex", "grammar"]
Pooling = Literal["mean", "last"]


@dataclass(frozen=True, slots=True, weakref_slot=True)  # what is compiled for it lives as long as it does
class Guide:
    """What an answer must look like: tokens that cannot lead there are never drawn (see guided.py).

    `source` is the JSON schema, the regular expression (the whole answer matches it) or the Lark grammar;
    `json_object` needs none. It is compiled, or refused with the reason, when the request is added.
    """

    kind: GuideKind
    source: str = ""

    def __post_init__(self) -> None:
        kinds = get_args(GuideKind)
        _require(self.kind in kinds, f"a guide's kind is one of {', '.join(kinds)}; got {self.kind!r}")
        _require(isinstance(self.source, str), f"a guide's source is text, got {type(self.source).__name__}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. The defaults sample at temperature 1.

    Order of application: logit bias, penalties, guide, temperature, top-k, top-p, min-p (as vLLM does).
    """

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # keep the k most likely tokens; 0: all
    top_p: float = 1.0  # keep the smallest set of tokens whose probability reaches p
    min_p: float = 0.0  # drop tokens less likely than min_p times the most likely one
    # > 1 discourages every token seen in prompt or output (Keskar et al. 2019).
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # subtracted once from each token already in the output
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # same seed, same output, whatever else runs beside it
    max_tokens: int | None = 256  # None: as many as the context allows
    min_tokens: int = 0  # end-of-sequence and stop tokens are impossible before this many
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep the stop string in the returned text
    ignore_eos: bool = False
    logprobs: int | None = None  # per output token: its log-probability and this many alternatives
    prompt_logprobs: int | None = None  # the same for every prompt token but the first
    n: int = 1  # samples returned
    best_of: int | None = None  # samples drawn; the n with the best mean log-probability are returned
    beam_width: int | None = None  # beam search with this many beams instead of sampling; n <= beam_width
    length_penalty: float = 1.0  # beam score = sum of log-probabilities / length ** length_penalty
    skip_special_tokens: bool = True
    guide: Guide | None = None  # the form the answer must have; ends by itself when it is complete
    # No tokens but an embedding, pooled like this; goes with nothing else here.
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "length_penalty",
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise InvalidRequest(f"{name} must be a finite number, got {value!r}")
        for name in (
            "top_k", "min_tokens", "n", "max_tokens", "seed", "logprobs", "prompt_logprobs", "best_of",
            "beam_width",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise InvalidRequest(f"{name} must be a whole number, got {value!r}")
        _require(self.temperature >= 0, f"temperature must be 0 or more, got {self.temperature}")
        _require(self.top_k >= 0, f"top_k must be 0 (off) or more, got {self.top_k}")
        _require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        _require(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}")
        _require(
            self.repetition_penalty > 0, f"repetition_penalty must be > 0, got {self.repetition_penalty}"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2 <= value <= 2, f"{name} must be in [-2, 2], got {value}")
        _require(
            self.max_tokens is None or self.max_tokens >= 1,
            f"max_tokens must be 1 or more, got {self.max_tokens}; leave it out for as many as fit",
        )
        _require(self.min_tokens >= 0, f"min_tokens must be 0 or more, got {self.min_tokens}")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})",
        )
        for text in self.stop:
            _require(isinstance(text, str), f"stop must be text, got {text!r}")
            _require(text != "", "a stop string must not be empty: it would end every answer at once")
        for token in self.stop_token_ids:
            _require(isinstance(token, int) and token >= 0, f"stop_token_ids holds {token!r}, not a token id")
        for token, bias in self.logit_bias.items():
            _require(isinstance(token, int) and token >= 0, f"logit_bias names {token!r}, not a token id")
            _require(
                isinstance(bias, (int, float)) and not math.isnan(bias), f"logit_bias of {token} is {bias!r}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(
                value is None or 0 <= value <= MAX_LOGPROBS,
                f"{name} must be 0 to {MAX_LOGPROBS}, got {value}",
            )
        _require(1 <= self.n <= MAX_SAMPLES, f"n must be 1 to {MAX_SAMPLES}, got {self.n}")
        if self.best_of is not None:
            _require(
                self.n <= self.best_of <= MAX_SAMPLES,
                f"best_of must be n ({self.n}) to {MAX_SAMPLES}, got {self.best_of}",
            )
        if self.beam_width is not None:
            _require(
                self.n <= self.beam_width <= MAX_LOGPROBS // 2,
                f"beam_width must be n ({self.n}) to {MAX_LOGPROBS // 2}, got {self.beam_width}",
            )
            _require(self.best_of is None, "best_of has no meaning with beam search; set n and beam_width")
            _require(
                self.guide is None, "a guide cannot steer beam search (beam_width): sample with n instead"
            )
        _require(
            self.guide is None or not self.ignore_eos,
            "ignore_eos and a guide exclude each other: a guided answer ends by its end-of-sequence token; "
            "leave ignore_eos out",
        )
        if self.pooling is not None:
            self._check_pooling()

    def _check_pooling(self) -> None:
        kinds = get_args(Pooling)
        _require(self.pooling in kinds, f"pooling is one of {', '.join(kinds)}; got {self.pooling!r}")
        for option in fields(self):
            default = {} if option.default is MISSING else option.default
            _require(
                option.name == "pooling" or getattr(self, option.name) == default,
                f"{option.name} has no meaning with pooling, which draws no tokens: leave it out",
            )

    @property
    def can_resume(self) -> bool:
        """Whether another engine can continue it from its output tokens so far: it has one line of tokens."""
        return self.samples == 1 and self.beam_width is None and self.pooling is None

    @property
    def can_resume_samples(self) -> bool:
        """Whether another engine can continue its several samples, each from its own output tokens so far."""
        return self.n > 1 and self.samples == self.n and self.beam_width is None

    @property
    def samples(self) -> int:
        """How many sequences are drawn for this request."""
        return self.beam_width or self.best_of or self.n

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(message)
