"""Which requests can be run at all, and how long their answers may become. Asked by the scheduler on arrival."""

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.scheduler_config import SchedulerConfig
from cumulo.errors import InvalidRequest


def output_limit(
    prompt_tokens: int, params: SamplingParams, config: SchedulerConfig
) -> tuple[int, str | None]:
    """The number of output tokens at which a request ends, and why, if that is less than it asked for.

    Raises InvalidRequest for one that could never run. What passes always fits when it runs alone.
    """
    if params.pooling is not None:
        check_whole(prompt_tokens, config, "embed")
        return 0, None
    if prompt_tokens >= config.max_context:
        raise InvalidRequest(
            f"the prompt has {prompt_tokens} tokens; the context holds {config.max_context} including the "
            f"answer: shorten the prompt or raise max_context"
        )
    if params.samples > config.max_running:
        raise InvalidRequest(
            f"{params.samples} samples were asked for, but only {config.max_running} sequences run at a "
            f"time: lower n, best_of or beam_width, or raise max_running"
        )
    # The last token drawn is never computed, so it needs no room in a block.
    cache_tokens = config.blocks // config.homes * config.block_size + 1
    if prompt_tokens >= cache_tokens:
        raise InvalidRequest(
            f"the prompt has {prompt_tokens} tokens; the KV cache holds {cache_tokens - 1}: shorten the "
            f"prompt or give the cache more memory (kv_memory_gib)"
        )
    room = min(config.max_context, cache_tokens) - prompt_tokens
    if params.max_tokens is None or params.max_tokens > room:
        what = "context" if room == config.max_context - prompt_tokens else "KV cache"
        return room, None if params.max_tokens is None else f"the {what} ends there"
    return params.max_tokens, None


def check_whole(tokens: int, config: SchedulerConfig, verb: str) -> None:
    """Nothing is drawn, so the text may fill the context to its end."""
    cache_tokens = config.blocks // config.homes * config.block_size
    what, limit = "context", config.max_context
    if cache_tokens < limit:
        what, limit = "KV cache", cache_tokens
    if tokens > limit:
        option = "max_context" if what == "context" else "kv_memory_gib"
        raise InvalidRequest(
            f"there are {tokens} tokens to {verb}; the {what} holds {limit}: shorten the text or raise {option}"
        )
