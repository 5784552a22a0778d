"""ForwardedRequest: one request that a gateway forwards to this server. Made by GatewayAccess, kept by the Call.

It gives the request the gateway's id and seed, seals the events of its stream with the ids of their tokens, and
brings the writer of a resumed stream to where the other server's was: the tokens that the client has are read
again, and what is said about them is thrown away.
"""

import dataclasses
from array import array
from collections.abc import Sequence

import msgspec

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import TokenLogprobs
from cumulo.engine.outputs import Delta, TextStream
from cumulo.fleet.wire import FleetAsk, PromptTold, ResumeBody, written
from cumulo.models.text.tokenizer import Tokenizer
from cumulo.serve.engine_link.messages import Finished

FORWARDED = "forwarded"  # in the state of a request's scope
_SEED_BITS = (1 << 63) - 1
_read_logprobs = msgspec.json.Decoder(list[TokenLogprobs]).decode


class ForwardedRequest:
    def __init__(self, ask: FleetAsk, resume: ResumeBody | None = None) -> None:
        self.ask = ask
        self.prompt: PromptTold | None = None  # known once submitted
        self._ids = list(resume.ids) if resume is not None else []
        self._logprobs = _read_logprobs(resume.logprobs) if resume is not None else []
        self._told = dict(resume.counts) if resume is not None else {}  # tokens its client has, by sample
        self._drawn: dict[str, int] = {}  # tokens that this server has drawn, by sample
        self._one_line = True  # of tokens, which another server can continue
        self._unsealed: list[Delta] = []

    # -- asking -------------------------------------------------------------------------------------------
    def begin(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> SamplingParams:
        """Note what is asked; returns how tokens are drawn."""
        self._one_line = (
            len(prompts) == 1 and params.n == 1 and params.can_resume and params.prompt_logprobs is None
        )
        self.prompt = PromptTold(sum(map(len, prompts)))
        if params.seed is None and params.pooling is None and not params.greedy:
            return dataclasses.replace(params, seed=self.ask.seed)
        return params

    def params_of(self, position: int, own_seed: bool, params: SamplingParams) -> SamplingParams:
        """Prompts of one list draw differently, unless the client gave their seed."""
        if position == 0 or own_seed or params.seed is None:
            return params
        return dataclasses.replace(params, seed=(params.seed + position) & _SEED_BITS)

    @property
    def resumed(self) -> bytes:
        """Output tokens for the engine to continue, packed."""
        return array("i", self._ids).tobytes() if self._one_line else b""

    def read_again(self, tokenizer: Tokenizer, params: SamplingParams) -> list[tuple[int, Delta | Finished]]:
        """What another server said of the resumed tokens."""
        stream = TextStream(tokenizer, params)
        logprobs: Sequence[TokenLogprobs | None] = self._logprobs or [None] * len(self._ids)
        return [
            (0, Delta("", 0, stream.push(token), [token], None, [] if entry is None else [entry]))
            for token, entry in zip(self._ids, logprobs, strict=True)
        ]

    # -- telling ------------------------------------------------------------------------------------------
    def is_told(self, position: int, item: Delta | Finished) -> bool:
        """Whether the client has this already: it was drawn again. Every item is asked about once, in order."""
        if not isinstance(item, Delta):
            return False
        self._unsealed.append(item)
        if self._one_line:
            return False
        sample = f"{position}.{item.index}"
        self._drawn[sample] = self._drawn.get(sample, 0) + _weight(item)
        return self._drawn[sample] <= self._told.get(sample, 0)

    def seal(self) -> bytes:
        """Ends a batch of events."""
        unsealed, self._unsealed = self._unsealed, []
        if not self._one_line:
            counts = {name: max(count, self._told.get(name, 0)) for name, count in self._drawn.items()}
            return b": " + written(self._told | counts) + b"\n\n"
        ids = " ".join([str(token) for item in unsealed for token in item.token_ids]).encode()
        logprobs = [entry for item in unsealed for entry in item.logprobs]
        return b": %s %s\n\n" % (ids, written(logprobs)) if logprobs else b": %s\n\n" % ids

    @staticmethod
    def end_seal(cached_tokens: int) -> bytes:
        return b": end %d\n\n" % cached_tokens

    @staticmethod
    def failure_seal(status: int) -> bytes:
        return b": failed %d\n\n" % status


def _weight(item: Delta) -> int:
    """A sample may end without a further token; that, too, is told once."""
    return len(item.token_ids) + (item.finish_reason is not None)
