"""StreamCounts: the token counts that the chunks of a streamed answer have. One per streamed completion.

Without `include_usage` chunks have none; with it `usage` is null until the last chunk, and with
`continuous_usage_stats` every chunk has the counts so far, as vLLM's server sends them.
"""

from typing import Any

from cumulo.engine.outputs import Delta
from cumulo.serve.call import Call


class StreamCounts:
    def __init__(self, call: Call, options: Any) -> None:
        """`options`: the request's stream_options."""
        self.wanted = options is not None and options.include_usage
        self.continuous = self.wanted and options.continuous_usage_stats
        self._prompt_tokens = sum(map(len, call.prompts))
        self._output_tokens = 0

    def note(self, item: Delta) -> None:
        self._output_tokens += len(item.token_ids)

    def field(self) -> dict[str, Any]:
        """What a chunk says now."""
        if not self.continuous:
            return {"usage": None} if self.wanted else {}
        return {
            "usage": {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": self._output_tokens,
                "total_tokens": self._prompt_tokens + self._output_tokens,
            }
        }
