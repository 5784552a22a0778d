"""One order on its way, as either side keeps it, and where a prompt is computed: here, or by which prefill engine.
Asked by `transfers.py`.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import NamedTuple

from cumulo.engine.decide.core.request import Sequence
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.routing import Ask, PrefixAware, ReplicaView, expected, held_tokens
from cumulo.engine.decide.transfer.orders import (
    OrderBegun,
    PeerLoad,
    TransferPlan,
)


@dataclass(slots=True)
class Incoming:
    """An order of a decode engine, from when it is sent until nothing writes into its blocks any more."""

    number: int
    sequence: Sequence
    peer: str
    tokens: int
    asked_s: float
    heard_s: float
    failed_at: frozenset[str] = frozenset()
    begun: OrderBegun | None = None
    plan: TransferPlan | None = None
    blocks: list[int] = field(default_factory=list)  # given up, but perhaps still written to
    over: bool = False  # released: waits for CopyStopped


@dataclass(slots=True)
class Peer:
    load: PeerLoad
    heard_s: float


class PrefillChoice(NamedTuple):
    peer: str | None  # None: here
    why: str


def why_whole(params: SamplingParams, tokens: int) -> str | None:
    """What keeps a request from being split, in words; None if nothing does."""
    if params.pooling is not None:
        return "an embedding needs the hidden states of its tokens, and only KV is sent"
    if params.prompt_logprobs is not None:
        return "prompt log-probabilities need every token's logits, and only KV is sent"
    return "there is one token to compute" if tokens < 2 else None


def choose_prefill(
    ask: Ask, here: ReplicaView, peers: ListLike[ReplicaView], tail_s: float, router: PrefixAware
) -> PrefillChoice:
    """The least sum of delays. Elsewhere: the queue there, the prompt, and what of the transfer is left when its
    last layer is computed. Here: the queue and the prompt, for which every running sequence waits, too; an engine
    that runs nothing counts one, because somebody will come."""
    missing = ask.prompt_tokens - held_tokens(ask, here)
    compute_s = missing / here.prompt_tok_s
    here_s = here.waiting_tokens / here.prompt_tok_s + compute_s * (1 + max(1, here.running))
    if not peers:
        return PrefillChoice(None, "no prefill engine can be reached")
    there_s = tail_s + min(expected(ask, one, router.promised.get(one.name, ())).ttft_s for one in peers)
    words = f"({_ms(there_s)} against {_ms(here_s)})"
    if here_s <= there_s:
        return PrefillChoice(None, f"{missing} tokens are computed sooner here {words}")
    why = f"that delays everybody less than computing it here {words}"
    return PrefillChoice(router.route(ask, peers).replica, why)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
