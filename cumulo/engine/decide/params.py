"""SamplingParams: what a user may ask of one request. Validated when made, so nothing below checks again."""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_args

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
    logprob_token_ids: tuple[int, ...] = ()  # tokens told besides the drawn one, instead of the likeliest
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
        for name, (is_whole, words, is_allowed) in _NUMBERS.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            is_number = isinstance(value, int if is_whole else (int, float)) and not isinstance(value, bool)
            if not is_number or not (is_whole or math.isfinite(value)):
                kind = "whole" if is_whole else "finite"
                raise InvalidRequest(f"{name} must be a {kind} number, got {value!r}")
            _require(is_allowed(value), f"{name} must be {words}, got {value}")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})",
        )
        for text in self.stop:
            _require(isinstance(text, str), f"stop must be text, got {text!r}")
            _require(text != "", "a stop string must not be empty: it would end every answer at once")
        object.__setattr__(self, "logprob_token_ids", tuple(self.logprob_token_ids))
        for name in ("stop_token_ids", "logprob_token_ids"):
            for token in getattr(self, name):
                _require(isinstance(token, int) and token >= 0, f"{name} holds {token!r}, not a token id")
        if self.logprob_token_ids and (self.logprobs is None or self.beam_width is not None):
            raise InvalidRequest("logprob_token_ids needs logprobs, and has no meaning with beam search")
        for token, bias in self.logit_bias.items():
            _require(isinstance(token, int) and token >= 0, f"logit_bias names {token!r}, not a token id")
            _require(
                isinstance(bias, (int, float)) and not math.isnan(bias), f"logit_bias of {token} is {bias!r}"
            )
        if self.best_of is not None:
            _require(self.n <= self.best_of, f"best_of must be n ({self.n}) or more, got {self.best_of}")
        if self.beam_width is not None:
            _require(
                self.n <= self.beam_width, f"beam_width must be n ({self.n}) or more, got {self.beam_width}"
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
        """Whether another engine can continue its samples, each from its own output tokens so far."""
        return self.samples == self.n and self.beam_width is None and self.pooling is None

    @property
    def samples(self) -> int:
        """How many sequences are drawn for this request."""
        return self.beam_width or self.best_of or self.n

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before a token is drawn: by penalties or a bias."""
        penalised = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(penalised or self.logit_bias)


# Of each number: whether it is a whole one, what it must be in words, and the rule.
_NUMBERS: dict[str, tuple[bool, str, Callable[[Any], bool]]] = {
    "temperature": (False, "in [0, 2]", lambda value: 0 <= value <= 2),
    "top_k": (True, "0 (off) or more", lambda value: value >= 0),
    "top_p": (False, "in (0, 1]", lambda value: 0 < value <= 1),
    "min_p": (False, "in [0, 1]", lambda value: 0 <= value <= 1),
    "repetition_penalty": (False, "> 0", lambda value: value > 0),
    "presence_penalty": (False, "in [-2, 2]", lambda value: -2 <= value <= 2),
    "frequency_penalty": (False, "in [-2, 2]", lambda value: -2 <= value <= 2),
    "length_penalty": (False, "finite", lambda value: True),
    "seed": (True, "whole", lambda value: True),
    "max_tokens": (True, "1 or more, or left out for as many as fit", lambda value: value >= 1),
    "min_tokens": (True, "0 or more", lambda value: value >= 0),
    "logprobs": (True, f"0 to {MAX_LOGPROBS}", lambda value: 0 <= value <= MAX_LOGPROBS),
    "prompt_logprobs": (True, f"0 to {MAX_LOGPROBS}", lambda value: 0 <= value <= MAX_LOGPROBS),
    "n": (True, f"1 to {MAX_SAMPLES}", lambda value: 1 <= value <= MAX_SAMPLES),
    "best_of": (True, f"n to {MAX_SAMPLES}", lambda value: value <= MAX_SAMPLES),
    "beam_width": (True, f"n to {MAX_LOGPROBS // 2}", lambda value: value <= MAX_LOGPROBS // 2),
}
_MAY_BE_NONE = {"seed", "max_tokens", "logprobs", "prompt_logprobs", "best_of", "beam_width"}


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(message)
