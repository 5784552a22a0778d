"""The response object: what /v1/responses answers with, whole, at the begin of a stream and at its end."""

import time
from typing import Any

from cumulo.serve.call import Call
from cumulo.serve.engine_link.messages import Finished
from cumulo.serve.errors import ApiError
from cumulo.serve.openai.usage import usage
from cumulo.serve.responses.items import Output
from cumulo.serve.responses.request import ResponsesRequest


def response_object(
    call: Call,
    body: ResponsesRequest,
    output: Output,
    results: list[Finished],
    error: ApiError | None = None,
) -> dict[str, Any]:
    """As it is now. `results` are there at the end; `error` if it failed."""
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
