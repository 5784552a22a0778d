"""Prompts with sampling options of their own, from lines of text or JSON. `cumulo generate` reads them."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cumulo.engine.decide.params import SamplingParams
from cumulo.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to complete: plain text, or messages for the model's chat template."""

    prompt: str | list[dict[str, str]]
    sampling: Mapping[str, Any]  # the parameters that somebody chose; they are checked
    name: str | None = None  # the "id" of its JSON line

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)

    @property
    def shown(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]

    @property
    def messages(self) -> list[dict[str, str]]:
        return self.prompt if isinstance(self.prompt, list) else [{"role": "user", "content": self.prompt}]


def parse_lines(text: str, source: str, sampling: Mapping[str, Any]) -> list[Job]:
    """One job per line that is not blank; lines are JSON objects if the first one is."""
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise InvalidRequest(f"{source} contains no prompt: every line is blank")
    if not lines[0][1].lstrip().startswith("{"):
        SamplingParams(**sampling)
        return [Job(line, sampling) for _, line in lines]
    return [_parse_json_line(line, f"{source}, line {number}", sampling) for number, line in lines]


def _parse_json_line(line: str, where: str, sampling: Mapping[str, Any]) -> Job:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where} is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise InvalidRequest(f'{where} must be an object with either "prompt" or "messages"')
    own = {key: value for key, value in fields.items() if key not in ("prompt", "messages", "id")}
    # An embedding is no text to print: LLM.embed and /v1/embeddings make them.
    known = {item.name for item in dataclasses.fields(SamplingParams)} - {"pooling"}
    if unknown := sorted(set(own) - known):
        raise InvalidRequest(
            f"{where} has unknown fields {', '.join(unknown)}; sampling options are {sorted(known)}"
        )
    prompt = fields.get("prompt", fields.get("messages"))
    if isinstance(prompt, list) and not (prompt and all(_is_message(item) for item in prompt)):
        raise InvalidRequest(f'{where}: messages must be a list of {{"role": ..., "content": ...}}')
    if not isinstance(prompt, list if "messages" in fields else str):
        raise InvalidRequest(f"{where}: a prompt is text and messages are a list, got {prompt!r}")
    if "stop" in own:
        own["stop"] = own["stop"] or ()
    if "logit_bias" in own:  # JSON object keys are text
        own["logit_bias"] = _token_keys(own["logit_bias"], where)
    try:
        given = {**sampling, **own}
        SamplingParams(**given)
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error}") from error
    name = fields.get("id")
    return Job(prompt, given, None if name is None else str(name))


def _is_message(item: Any) -> bool:
    return (
        isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)
    )


def _token_keys(bias: Any, where: str) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except (AttributeError, ValueError) as error:
        raise InvalidRequest(f"{where}: logit_bias maps token ids to numbers, got {bias!r}") from error
