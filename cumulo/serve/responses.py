"""/v1/responses: OpenAI's newer way to ask for text. The same conversation as a chat completion, told in items."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cumulo.engine.outputs import Delta
from cumulo.serve.answer_reader import AnswerReader, Piece
from cumulo.serve.call import Batch, Call
from cumulo.serve.chat import begin_chat
from cumulo.serve.descriptions import answers, streamed
from cumulo.serve.errors import invalid
from cumulo.serve.events import json_response, open_stream, to_line
from cumulo.serve.formats import Reasoning, Text
from cumulo.serve.messages import Finished
from cumulo.serve.schemas import ChatRequest
from cumulo.serve.schemas_out import ResponseObject
from cumulo.serve.schemas_responses import InputMessage, ResponsesRequest, TextFormat
from cumulo.serve.service import Service
from cumulo.serve.usage import usage

router = APIRouter()
Item = dict[str, Any]


@router.post("/v1/responses", summary="Answer an input", responses=answers(streamed(ResponseObject)))
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Nothing is kept: send the earlier items again to go on (`previous_response_id` is refused)."""
    service: Service = request.app.state.service
    call, form, _ = await begin_chat(service, request, _as_chat(body), "resp_", guide_param="text.format")
    output = Output(call.id, form.reader())
    if body.stream:
        return await open_stream(call, ResponseEvents(call, body, output))
    results = await call.results()
    sample = results[0].samples[0]
    output.add(sample.text, last=True)
    output.close(sample.finish_reason)
    return json_response(_response(call, body, output, results))


def _as_chat(body: ResponsesRequest) -> ChatRequest:
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += [{"role": item.role, "content": _text_of(item)} for item in body.input]
    return ChatRequest.model_validate(
        {
            "model": body.model,
            "messages": messages,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "max_completion_tokens": body.max_output_tokens,
            "response_format": _response_format(body.text.format if body.text is not None else None),
        }
    )


def _text_of(item: InputMessage) -> str:
    if isinstance(item.content, str):
        return item.content
    return "\n".join(part.text for part in item.content)


def _response_format(wanted: TextFormat | None) -> Item | None:
    """As chat completions call it."""
    if wanted is None:
        return None
    for name, kind in (("schema_", "json_schema"), ("regex", "regex"), ("grammar", "grammar")):
        given, param = getattr(wanted, name) is not None, f"text.format.{name.rstrip('_')}"
        if given != (wanted.type == kind):
            problem = f"needs type {kind}, not {wanted.type}" if given else "is missing"
            raise invalid(f"'{param}' {problem}", param, "invalid_value")
    schema = {"name": wanted.name or "", "schema": wanted.schema_, "strict": wanted.strict}
    return {
        "type": wanted.type,
        "json_schema": schema if wanted.type == "json_schema" else None,
        "regex": wanted.regex,
        "grammar": wanted.grammar,
    }


class Output:
    """The items of an answer as they grow; every change is also an event for a stream."""

    def __init__(self, response_id: str, reader: AnswerReader | None) -> None:
        self.items: list[Item] = []
        self.finish_reason: str | None = None
        self._id, self._reader = response_id, reader

    @property
    def thoughts(self) -> str:
        return "".join(item["content"][0]["text"] for item in self.items if item["type"] == "reasoning")

    def add(self, text: str, last: bool) -> list[Item]:
        pieces: list[Piece] = [Text(text)] if text else []
        if self._reader is not None:
            pieces = self._reader.read(text, last)
        events: list[Item] = []
        for piece in pieces:
            assert isinstance(piece, Text | Reasoning)  # no tools, no calls
            kind = "message" if isinstance(piece, Text) else "reasoning"
            if not self.items or self.items[-1]["type"] != kind:
                events += self._end_item() + self._begin_item(kind)
            part = self.items[-1]["content"][0]
            part["text"] += piece.text
            more: Item = {"logprobs": []} if kind == "message" else {}
            events.append({**self._place(f"response.{part['type']}.delta"), "delta": piece.text, **more})
        return events

    def close(self, finish_reason: str) -> list[Item]:
        """The answer is complete. One without any text still has a message."""
        self.finish_reason = finish_reason
        begun = [] if self.items else self._begin_item("message")
        return begun + self._end_item()

    def _begin_item(self, kind: str) -> list[Item]:
        number = len(self.items)
        part: Item = {"type": "reasoning_text", "text": ""}
        item: Item = {"id": f"rs_{self._id}_{number}", "type": kind, "summary": [], "content": [part]}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": f"msg_{self._id}_{number}", "type": kind, "role": "assistant", "content": [part]}
        item["status"] = "in_progress"
        self.items.append(item)
        added = {
            "type": "response.output_item.added",
            "output_index": number,
            "item": {**item, "content": []},
        }
        return [added, {**self._place("response.content_part.added"), "part": dict(part)}]

    def _end_item(self) -> list[Item]:
        if not self.items:
            return []
        item = self.items[-1]
        part = item["content"][0]
        item["status"] = "incomplete" if self.finish_reason == "length" else "completed"
        more: Item = {"logprobs": []} if item["type"] == "message" else {}
        return [
            {**self._place(f"response.{part['type']}.done"), "text": part["text"], **more},
            {**self._place("response.content_part.done"), "part": part},
            {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item},
        ]

    def _place(self, kind: str) -> Item:
        return {
            "type": kind,
            "item_id": self.items[-1]["id"],
            "output_index": len(self.items) - 1,
            "content_index": 0,
        }


def _response(call: Call, body: ResponsesRequest, output: Output, results: list[Finished]) -> Item:
    status = {None: "in_progress", "length": "incomplete"}.get(output.finish_reason, "completed")
    counts = None
    if results:
        counted = usage(results)
        thought_tokens = len(call.service.text.tokenizer.encode(output.thoughts))
        counts = {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"],
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought_tokens},
            "total_tokens": counted["total_tokens"],
        }
    wanted = body.text.format if body.text is not None else None
    return {
        "id": call.id,
        "object": "response",
        "created_at": call.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": call.service.model_name,
        "output": list(output.items),  # as it is now: the event is written later
        "parallel_tool_calls": False,
        "temperature": body.temperature,
        "text": {
            "format": wanted.model_dump(by_alias=True, exclude_none=True) if wanted else {"type": "text"}
        },
        "tool_choice": "none",
        "tools": [],
        "top_p": body.top_p,
        "usage": counts,
    }


class ResponseEvents:
    """The answer as numbered events: what is added to which item, and the whole response before and after."""

    def __init__(self, call: Call, body: ResponsesRequest, output: Output) -> None:
        self._call, self._body, self._output = call, body, output
        self._number = 0

    def add(self, batch: Batch) -> bytes:
        events: list[Item] = []
        if not self._number:
            for kind in ("response.created", "response.in_progress"):
                events.append({"type": kind, "response": _response(self._call, self._body, self._output, [])})
        for _, item in batch:
            if isinstance(item, Delta):
                events += self._output.add(item.text, last=item.finish_reason is not None)
                if item.finish_reason is not None:
                    events += self._output.close(item.finish_reason)
        return self._packed(events)

    def end(self) -> bytes:
        results = [finished for finished in self._call.finished if finished is not None]
        response = _response(self._call, self._body, self._output, results)
        return self._packed([{"type": f"response.{response['status']}", "response": response}])

    def _packed(self, events: list[Item]) -> bytes:
        lines = []
        for content in events:
            numbered = to_line({**content, "sequence_number": self._number})
            lines.append(b"event: " + content["type"].encode() + b"\ndata: " + numbered + b"\n\n")
            self._number += 1
        return b"".join(lines)
