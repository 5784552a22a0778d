"""Beam search over HTTP: `use_beam_search`, `beam_width` and `length_penalty`. Used where requests become
SamplingParams; what has no meaning in a search, or what the engine cannot do in one, is refused by its name.
"""

from typing import TYPE_CHECKING, Any

from cumulo.serve.errors import invalid

if TYPE_CHECKING:
    from cumulo.serve.openai.schemas import ChatRequest, CompletionRequest

# Fields that a search has no use for, each with the values that ask for nothing.
_MEANINGLESS: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1), "top_p": (1,), "top_k": (0,), "min_p": (0,), "logprobs": (False,), "stop": ([],),
    "response_format": (), "tools": ([],), "functions": ([],), "best_of": (),
}  # fmt: skip
_WHY = {
    "logprobs": "the engine keeps none for beams",
    "stop": "the engine compares beams by tokens: use stop_token_ids",
    "response_format": "a guide cannot steer beam search",
    "tools": "a guide cannot steer beam search",
    "functions": "a guide cannot steer beam search",
    "best_of": "set n and beam_width",
}
_DRAWING = ("temperature", "top_k", "top_p", "min_p")


def is_search(body: "ChatRequest | CompletionRequest") -> bool:
    return bool(body.use_beam_search or body.beam_width is not None)


def search_for(body: "ChatRequest | CompletionRequest", fields: dict[str, Any]) -> None:
    """Put what the request says about beam search into the fields of its SamplingParams."""
    n = body.n or 1
    if body.use_beam_search is False and body.beam_width is not None:
        raise invalid("beam_width needs use_beam_search, which is false: leave one of them out", "beam_width")
    if not is_search(body):
        if body.length_penalty is not None:
            raise invalid("length_penalty needs beam search: give beam_width, too", "length_penalty")
        return
    width = body.beam_width or n
    if n > width:
        raise invalid(f"n ({n}) is more than beam_width ({width}): a search returns its best beams", "n")
    for name, neutral in _MEANINGLESS.items():
        value = getattr(body, name, None)
        asks_nothing = value is None or value in neutral or getattr(value, "type", None) == "text"
        if not asks_nothing:
            why = _WHY.get(name, "a search does not draw at random")
            raise invalid(f"{name} has no meaning with beam search ({why}): leave it out", name)
    for name in _DRAWING:
        fields.pop(name, None)  # also what the model's authors recommend
    fields["beam_width"] = width
    if body.length_penalty is not None:
        fields["length_penalty"] = body.length_penalty
