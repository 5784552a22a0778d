"""Where a prompt is computed: here, or by which prefill engine. Asked by `handover.py` for each request."""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.routing import Ask, PrefixAware, ReplicaView, expected, held_tokens

MOST_ORDERS = 3  # of one request: after so many failures its prompt is computed where it waits


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    peer: str | None  # None: here
    here_s: float  # predicted delays in all
    there_s: float
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
        return PrefillChoice(None, here_s, float("inf"), "no prefill engine can be reached")
    there_s = tail_s + min(expected(ask, one, router.promised.get(one.name, ())).ttft_s for one in peers)
    words = f"({_ms(there_s)} against {_ms(here_s)})"
    if here_s <= there_s:
        return PrefillChoice(None, here_s, there_s, f"{missing} tokens are computed sooner here {words}")
    chosen = router.route(ask, peers)
    return PrefillChoice(
        chosen.replica, here_s, there_s, f"that delays everybody less than computing it here {words}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
