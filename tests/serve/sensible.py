"""Makes a fuzzer's request bodies go together, so that they get past the checks and into the engine. Used by
test_fuzz.

A description cannot say that `top_logprobs` needs `logprobs`, or which fields a message of which role has; what
follows it alone is nearly always refused for such a reason. Everything else stays as the fuzzer made it.
"""

import copy
from typing import Any

LONGEST_TEXT = 20  # the tests' context is short
_VOCABULARY = 389


def sensible(path: str, body: Any) -> Any:
    body = copy.deepcopy(body)
    if path == "/v1/chat/completions":
        _sampling(body)
        _chat(body)
    elif path == "/v1/completions":
        _sampling(body)
        _completion(body)
    elif path == "/v1/responses":
        _responses(body)
    return body


def _responses(body: dict[str, Any]) -> None:
    body.pop("previous_response_id", None)  # none is known
    if body.get("top_logprobs"):
        body["include"] = ["message.output_text.logprobs"]
    wanted = (body.get("text") or {}).get("format")
    if wanted is not None:
        _only(wanted, {"json_schema": "schema", "regex": "regex", "grammar": "grammar"})
    if isinstance(body["input"], list):
        called = {"type": "function_call", "call_id": "call", "name": "f", "arguments": "{}"}
        for item in body["input"]:
            if item.get("type") == "function_call":
                item["arguments"] = "{}"
            elif item.get("type") == "function_call_output":
                item["call_id"] = "call"
        body["input"].insert(0, called)
    tools = body.get("tools")
    if not tools:
        body["tool_choice"] = None
        return
    body.pop("text", None)
    for index, tool in enumerate(tools):
        tool["name"] = f"{tool['name'][:50]}_{index}"
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        for named in choice["tools"] if choice["type"] == "allowed_tools" else [choice]:
            named["name"] = tools[-1]["name"]


def _sampling(body: dict[str, Any]) -> None:
    if body.get("stream_options") is not None:
        body["stream"] = True
    else:
        body["stream_options"] = None
    if body.get("prompt_logprobs") is not None:
        body.update(stream=False, stream_options=None)
    if body.get("beam_width") or body.get("use_beam_search"):
        _beams(body)
    else:
        for name in ("beam_width", "use_beam_search", "length_penalty"):
            body.pop(name, None)
    if body.get("min_tokens"):
        body["min_tokens"] = min(body["min_tokens"], 2)
    if body.get("logit_bias"):
        body["logit_bias"] = {
            str(number % _VOCABULARY): bias for number, bias in enumerate(body["logit_bias"].values())
        }
    if body.get("stop_token_ids"):
        body["stop_token_ids"] = [int(token) % _VOCABULARY for token in body["stop_token_ids"]]


def _beams(body: dict[str, Any]) -> None:
    for name in (
        "temperature", "top_p", "top_k", "min_p", "logprobs", "top_logprobs", "stop", "best_of", "response_format",
        "tools", "tool_choice", "parallel_tool_calls",
    ):  # fmt: skip
        body.pop(name, None)
    body["n"] = min(body.get("n") or 1, 3)
    body.update(use_beam_search=True, beam_width=3)


def _chat(body: dict[str, Any]) -> None:
    body["messages"] = body["messages"][:2]
    for message in body["messages"]:
        _message(message)
    last = body["messages"][-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):
        body["add_generation_prompt"] = None if body.get("continue_final_message") else True
    else:
        body.pop("continue_final_message", None)
    if not body.get("continue_final_message"):
        body.pop("echo", None)
    variables = body.get("chat_template_kwargs") or {}
    body["chat_template_kwargs"] = {f"v{number}": value for number, value in enumerate(variables.values())}
    if body.get("max_completion_tokens") is not None:
        body.pop("max_tokens", None)
    if body.get("top_logprobs") is not None:
        body["logprobs"] = True
    tools = body.get("tools")
    if not tools:
        body.pop("parallel_tool_calls", None)
        body["tool_choice"] = None
    else:
        body.pop("ignore_eos", None)
        body.pop("response_format", None)
        for index, tool in enumerate(tools):
            tool["function"]["name"] = f"{tool['function']['name'][:50]}_{index}"
        choice = body.get("tool_choice")
        if isinstance(choice, dict):
            allowed = choice["allowed_tools"]["tools"] if choice["type"] == "allowed_tools" else [choice]
            for named in allowed:
                named["function"]["name"] = tools[-1]["function"]["name"]
    form = body.get("response_format")
    if form is not None:
        _only(form, {"json_schema": "json_schema", "regex": "regex", "grammar": "grammar"})
        if form["type"] != "text":
            body.pop("ignore_eos", None)


def _message(message: dict[str, Any]) -> None:
    content = message.get("content") or "x"
    message["content"] = content[:LONGEST_TEXT] if isinstance(content, str) else content[:1]
    if message["role"] == "tool":
        message["tool_call_id"] = message.get("tool_call_id") or "call"
    else:
        message.pop("tool_call_id", None)
    if message["role"] != "assistant":
        for name in ("tool_calls", "reasoning_content"):
            message.pop(name, None)
    for call in message.get("tool_calls") or ():
        call["function"]["arguments"] = "{}"


def _completion(body: dict[str, Any]) -> None:
    prompt = body["prompt"]
    if not prompt:
        body["prompt"] = "x"
    elif isinstance(prompt, list):
        body["prompt"] = [_prompt(item) for item in prompt]
    if body.get("best_of") is not None:
        body.update(stream=False, stream_options=None)
        body["best_of"] = max(body["best_of"], body.get("n") or 1)
    if body.get("max_tokens") == 0 and not body.get("echo"):
        body["max_tokens"] = 1


def _prompt(item: Any) -> Any:
    if isinstance(item, list):
        return [int(token) % _VOCABULARY for token in item]
    return int(item) % _VOCABULARY if isinstance(item, int | float) else item or "x"


def _only(form: dict[str, Any], field_of: dict[str, str]) -> None:
    """Only the field that the form's type needs; a plain one where the fuzzer gave none."""
    plain = {"schema": {"type": "integer"}, "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    for kind, field in field_of.items():
        if form["type"] != kind:
            form.pop(field, None)
        elif form.get(field) is None:
            form[field] = plain.get(field, "[a-z]+" if field == "regex" else 'start: "a"')
