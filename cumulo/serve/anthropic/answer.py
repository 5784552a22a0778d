"""Answer: what the model says as Anthropic's content blocks, and every change as events of their streams."""

from typing import Any, Literal

from pydantic_core import from_json

from cumulo.serve.anthropic.as_chat import tool_use_id
from cumulo.serve.engine_link.messages import Finished
from cumulo.serve.formats import Reasoning, Text
from cumulo.serve.formats.blocks import Begun, Block, Blocks, Change, Grown
from cumulo.serve.openai.answer_reader import AnswerReader, Piece
from cumulo.serve.openai.usage import usage

Item = dict[str, Any]
Thoughts = Literal["shown", "omitted", "dropped"]
# Anthropic's servers sign thoughts and check them when they come back; nothing here depends on them being genuine.
_SIGNATURE = "not-signed"


class MessageAnswer:
    """The whole answer and the streamed one are made by the same calls; a whole one leaves the events alone."""

    def __init__(self, reader: AnswerReader | None, thoughts: Thoughts) -> None:
        self._reader, self._thoughts = reader, thoughts
        self._blocks = Blocks()

    def add(self, text: str, last: bool) -> list[Item]:
        pieces: list[Piece] = [Text(text)] if text else []
        if self._reader is not None:
            pieces = self._reader.read(text, last)
        if self._thoughts == "dropped":
            pieces = [piece for piece in pieces if not isinstance(piece, Reasoning)]
        changes = self._blocks.add(pieces) + (self._blocks.close() if last else [])
        return [event for change in changes for event in self._events(change)]

    def content(self) -> list[Item]:
        return [self._whole(block) for block in self._blocks.blocks]

    def stop(self, finished: Finished) -> Item:
        """Why the answer ended, in this API's words."""
        sample = finished.samples[0]
        if sample.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(sample.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_reason}
        called = any(block.kind == "call" for block in self._blocks.blocks)
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}

    # -- spelling -----------------------------------------------------------------------------------------
    def _events(self, change: Change) -> list[Item]:
        place = {"index": change.block.index}
        if isinstance(change, Begun):
            begun = {"type": "content_block_start", **place, "content_block": _empty(change.block)}
            # Proxies and clients look for one; OpenAI's API has none.
            return [begun, {"type": "ping"}] if change.block.index == 0 else [begun]
        delta = {"type": "content_block_delta", **place}
        if isinstance(change, Grown):
            if change.block.kind == "thoughts" and self._thoughts == "omitted":
                return []
            return [{**delta, "delta": _delta(change)}]
        stop = {"type": "content_block_stop", **place}
        if change.block.kind != "thoughts":
            return [stop]
        return [{**delta, "delta": {"type": "signature_delta", "signature": _SIGNATURE}}, stop]

    def _whole(self, block: Block) -> Item:
        if block.kind == "text":
            return {**_empty(block), "text": block.text}
        if block.kind == "call":
            return {**_empty(block), "input": _input(block.text)}
        shown = block.text if self._thoughts == "shown" else ""
        return {**_empty(block), "thinking": shown, "signature": _SIGNATURE}


def _empty(block: Block) -> Item:
    if block.kind == "text":
        return {"type": "text", "text": "", "citations": None}
    if block.kind == "thoughts":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": tool_use_id(block.call_id), "name": block.name, "input": {}}


def _delta(change: Grown) -> Item:
    if change.block.kind == "text":
        return {"type": "text_delta", "text": change.text}
    if change.block.kind == "thoughts":
        return {"type": "thinking_delta", "thinking": change.text}
    return {"type": "input_json_delta", "partial_json": change.text}


def _input(arguments: str) -> Item:
    """A call that max_tokens cut gives what there is of it."""
    try:
        read = from_json(arguments, allow_partial=True)
    except ValueError:
        read = None
    return read if isinstance(read, dict) else {}


def counts(finished: Finished) -> Item:
    """Token counts; cached tokens are not among the input tokens here."""
    counted = usage([finished])
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counted["completion_tokens"],
    }
