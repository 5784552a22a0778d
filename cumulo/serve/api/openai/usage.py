"""Token counts as OpenAI's API reports them."""

from collections.abc import Iterable
from typing import Any

from cumulo.engine.outputs import Delta
from cumulo.serve.call import Call
from cumulo.serve.engine_link.messages import Finished


class StreamCounts:
    """The token counts that the chunks of a streamed answer have. Without `include_usage` chunks have none; with it
    `usage` is null until the last chunk, and with `continuous_usage_stats` every chunk has the counts so far, as
    vLLM's server sends them."""

    def __init__(self, call: Call, options: Any) -> None:
        """`options`: the request's stream_options."""
        self.wanted = options is not None and options.include_usage
        self.continuous = self.wanted and options.continuous_usage_stats
        self._prompt_tokens = sum(map(len, call.prompts))
        self._output_tokens = 0

    def note(self, item: Delta) -> None:
        self._output_tokens += len(item.token_ids)

    def field(self) -> dict[str, Any]:
        """The `usage` field of a chunk that is sent now."""
        if not self.continuous:
            return {"usage": None} if self.wanted else {}
        return {
            "usage": {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": self._output_tokens,
                "total_tokens": self._prompt_tokens + self._output_tokens,
            }
        }


def usage(results: Iterable[Finished], dropped_tokens: int = 0, searched: bool = False) -> dict[str, Any]:
    """The sum over a call's requests; a prompt counts once however many samples share it. `searched`: by beam
    search, of which the answers count and not the beams that were given up."""
    prompt = output = cached = 0
    for finished in results:
        prompt += finished.story.prompt_tokens
        returned = sum(len(sample.token_ids) for sample in finished.samples)
        output += returned if searched else finished.story.output_tokens
        cached += finished.story.cached_tokens
    output -= dropped_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
