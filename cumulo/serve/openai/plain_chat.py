"""PlainChat: a chat request in its commonest form, read in a fraction of the time. Used by the direct route.

Most requests are texts by roles and a few numbers. Those are decoded and checked in one pass by msgspec; whatever
does not fit here (tools, response formats, parts of contents, anything wrong) is read by ChatRequest, which also
words the errors. What is accepted here ChatRequest would accept, and means the same; a test compares them.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from cumulo.serve.openai.schemas import MAX_MESSAGES, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

Label = Annotated[str, Meta(max_length=512)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
CountOrNone = Annotated[int, Meta(ge=0, le=1 << 31)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class PlainStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: ClassVar[bool] = False


class PlainMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str
    # What a plain message has not; here for whoever reads a Message.
    name: ClassVar[None] = None
    tool_calls: ClassVar[None] = None
    tool_call_id: ClassVar[None] = None
    reasoning_content: ClassVar[None] = None
    function_call: ClassVar[None] = None


class PlainChat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Its fields have the names, bounds and defaults of ChatRequest's."""

    model: str
    messages: Annotated[list[PlainMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool | None = False
    stream_options: PlainStreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = 1
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    user: Label | None = None
    top_k: CountOrNone | None = None
    min_p: Share | None = None
    min_tokens: CountOrNone | None = None
    ignore_eos: bool | None = None
    # What a plain request has not; here for whoever reads a ChatRequest.
    logit_bias: ClassVar[None] = None
    repetition_penalty: ClassVar[None] = None
    stop_token_ids: ClassVar[None] = None
    skip_special_tokens: ClassVar[None] = None
    include_stop_str_in_output: ClassVar[None] = None
    priority: ClassVar[None] = None
    cache_salt: ClassVar[None] = None
    slo: ClassVar[None] = None
    explain: ClassVar[None] = None
    metadata: ClassVar[None] = None
    safety_identifier: ClassVar[None] = None
    prompt_cache_key: ClassVar[None] = None
    response_format: ClassVar[None] = None
    tools: ClassVar[None] = None
    tool_choice: ClassVar[None] = None
    parallel_tool_calls: ClassVar[None] = None
    add_generation_prompt: ClassVar[None] = None
    functions: ClassVar[None] = None
    function_call: ClassVar[None] = None
    reasoning_effort: ClassVar[None] = None
    store: ClassVar[None] = None
    service_tier: ClassVar[None] = None
    continue_final_message: ClassVar[None] = None
    echo: ClassVar[None] = None
    chat_template_kwargs: ClassVar[None] = None
    use_beam_search: ClassVar[None] = None
    beam_width: ClassVar[None] = None
    length_penalty: ClassVar[None] = None
    return_token_ids: ClassVar[None] = None
    prompt_logprobs: ClassVar[None] = None


read_plain = msgspec.json.Decoder(PlainChat).decode


def plain_conversation(messages: list[PlainMessage]) -> list[dict[str, Any]]:
    """What `conversation` makes of plain messages."""
    return [
        {"role": "system" if message.role == "developer" else message.role, "content": message.content}
        for message in messages
    ]
