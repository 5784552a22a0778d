"""The response object of /v1/responses, its items, and every change to them as an event of its stream."""

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from cumulo.engine.decide.plan import TokenLogprobs
from cumulo.serve.api.openai.answer_form import AnswerReader
from cumulo.serve.api.openai.events import usage
from cumulo.serve.api.openai.logprobs import chat_logprobs
from cumulo.serve.api.responses.request import InputItem, ResponsesRequest
from cumulo.serve.call import Call
from cumulo.serve.engine_link.messages import Finished
from cumulo.serve.errors import ApiError
from cumulo.serve.formats.blocks import Block, BlockChange, Blocks
from cumulo.serve.model_text import ModelText

Entry = dict[str, Any]


class TextLogprobs:
    """Which tokens' log-probabilities belong to an answer's text, and which to its thoughts and calls: the engine
    reports tokens, the reader gives texts without markers."""

    def __init__(self, text: ModelText, top: int) -> None:
        self._text, self._top = text, top
        self._pending: list[Entry] = []  # of tokens whose text the reader has not given yet

    def push(self, entries: Iterable[TokenLogprobs]) -> None:
        self._pending += chat_logprobs(self._text, entries, self._top)["content"]

    def entries_for(self, text: str) -> list[Entry]:
        """The entries of the tokens that make this next text. Those of markers before it are dropped."""
        joined = "".join(entry["token"] for entry in self._pending)
        begins = joined.find(text)
        if begins < 0:  # a character cut in two tokens is spelled as two unknown ones
            taken, self._pending = self._pending, []
            return taken
        position = first = last = 0
        for entry in self._pending:
            if position >= begins + len(text):
                break
            position += len(entry["token"])
            last += 1
            first += position <= begins
        taken, self._pending = self._pending[first:last], self._pending[last:]
        return taken


Item = dict[str, Any]


class Output:
    """The whole answer and the streamed one are made by the same calls; a whole one leaves the events alone."""

    def __init__(self, response_id: str, reader: AnswerReader, logprobs: TextLogprobs | None) -> None:
        self.items: list[Item] = []
        self.finish_reason: str | None = None
        self._suffix = response_id.removeprefix("resp_")
        self._reader, self._logprobs = reader, logprobs
        self._blocks = Blocks()

    @property
    def thoughts(self) -> str:
        return "".join(block.text for block in self._blocks.blocks if block.kind == "thoughts")

    def add(self, text: str, last: bool, entries: Sequence[TokenLogprobs] = ()) -> list[Item]:
        pieces = self._reader.read(text, last)
        if self._logprobs is not None:
            self._logprobs.push(entries)
        return [event for change in self._blocks.add(pieces) for event in self._events(change)]

    def close(self, finish_reason: str) -> list[Item]:
        """The answer is complete."""
        self.finish_reason = finish_reason
        return [event for change in self._blocks.close() for event in self._events(change)]

    # -- one change as events, in the order that OpenAI's API has them ------------------------------------
    def _events(self, change: BlockChange) -> list[Item]:
        if change.what == "begun":
            return self._begin(change.block)
        if change.what == "grown":
            return [self._grow(change.block, change.text)]
        return self._end(change.block)

    def _begin(self, block: Block) -> list[Item]:
        item = _new_item(block, self._suffix)
        self.items.append(item)
        added = {"type": "response.output_item.added", "output_index": block.index}
        if block.kind == "call":
            return [{**added, "item": dict(item)}]
        return [
            {**added, "item": {**item, "content": []}},
            {
                **self._place(block, "response.content_part.added"),
                "content_index": 0,
                "part": _new_item(block, self._suffix)["content"][0],
            },
        ]

    def _grow(self, block: Block, text: str) -> Item:
        item = self.items[block.index]
        entries = self._logprobs.entries_for(text) if self._logprobs is not None else []
        if block.kind == "call":
            item["arguments"] += text
            return {**self._place(block, "response.function_call_arguments.delta"), "delta": text}
        part = item["content"][0]
        part["text"] += text
        grown = {**self._place(block, f"response.{part['type']}.delta"), "content_index": 0, "delta": text}
        if block.kind == "text":
            part["logprobs"] += entries
            grown["logprobs"] = entries
        return grown

    def _end(self, block: Block) -> list[Item]:
        item = self.items[block.index]
        item["status"] = "incomplete" if self.finish_reason == "length" else "completed"
        done = {"type": "response.output_item.done", "output_index": block.index, "item": item}
        if block.kind == "call":
            told = {"name": block.name, "arguments": block.text}
            return [{**self._place(block, "response.function_call_arguments.done"), **told}, done]
        part = item["content"][0]
        spoken = {"content_index": 0, "text": part["text"]}
        if block.kind == "text":
            spoken["logprobs"] = part["logprobs"]
        return [
            {**self._place(block, f"response.{part['type']}.done"), **spoken},
            {**self._place(block, "response.content_part.done"), "content_index": 0, "part": part},
            done,
        ]

    def _place(self, block: Block, kind: str) -> Item:
        return {"type": kind, "item_id": self.items[block.index]["id"], "output_index": block.index}


def _new_item(block: Block, suffix: str) -> Item:
    place = f"{suffix}_{block.index}"
    if block.kind == "call":
        told = {"call_id": block.call_id, "name": block.name, "arguments": ""}
        return {"id": f"fc_{place}", "type": "function_call", "status": "in_progress", **told}
    if block.kind == "thoughts":
        part: Item = {"type": "reasoning_text", "text": ""}
        item: Item = {"id": f"rs_{place}", "type": "reasoning", "summary": []}
    else:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"id": f"msg_{place}", "type": "message", "role": "assistant"}
    return {**item, "status": "in_progress", "content": [part]}


# -- input items as the API gives them back ---------------------------------------------------------------
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def spelled_inputs(items: Sequence[InputItem]) -> list[Item]:
    """The input items, each with an id."""
    suffix = secrets.token_hex(12)
    return [_spelled_input(item, f"{suffix}_in{index}") for index, item in enumerate(items)]


def _spelled_input(item: InputItem, place: str) -> Item:
    unused: Any = {"parsed_arguments": True, "content": {"__all__": {"logprobs", "prompt_cache_breakpoint"}}}
    told = item.model_dump(exclude_none=True, exclude=unused)
    return {"id": f"{_ID_PREFIXES[item.type]}_{place}", "status": "completed", **told}


def response_object(
    call: Call,
    body: ResponsesRequest,
    output: Output,
    results: list[Finished],
    error: ApiError | None = None,
) -> dict[str, Any]:
    """The response as it is now. `results` are there at the end; `error` if it failed."""
    status = {None: "in_progress", "length": "incomplete"}.get(output.finish_reason, "completed")
    if error is not None:
        status = "failed"
    wanted = body.text.format if body.text is not None else None
    tool_choice: Any = body.tool_choice or "auto"
    return {
        "id": call.id,
        "object": "response",
        "created_at": call.created,
        "completed_at": int(time.time()) if status == "completed" else None,
        "status": status,
        "background": False,
        "error": None if error is None else {"code": "server_error", "message": error.message},
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": call.model,
        "output": list(output.items),  # as it is now: the event is written later
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.store is not False and call.service.stored_responses.most > 0,
        "temperature": body.temperature,
        "text": {
            "format": wanted.model_dump(by_alias=True, exclude_none=True) if wanted else {"type": "text"}
        },
        "tool_choice": tool_choice if isinstance(tool_choice, str) else tool_choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": _usage(call, output, results) if results else None,
        "user": body.user,
    }


def _usage(call: Call, output: Output, results: list[Finished]) -> dict[str, Any]:
    counted = usage(results)
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": len(call.service.text.tokenizer.encode(output.thoughts))
        },
        "total_tokens": counted["total_tokens"],
    }
