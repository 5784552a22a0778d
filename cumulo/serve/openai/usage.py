"""Token counts as OpenAI's API reports them."""

from collections.abc import Iterable
from typing import Any

from cumulo.serve.engine_link.messages import Finished


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
