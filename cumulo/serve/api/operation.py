"""Endpoints for operators and tools: health, metrics, version, models, tokens, explanations, adapters."""

import contextlib
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response

from cumulo import __version__
from cumulo.serve.access.keys import Caller, caller_of, require_operator, shown_key
from cumulo.serve.adapter_registry import AdapterRefused, ServedAdapter
from cumulo.serve.api.openai.chat import chat_prompt
from cumulo.serve.api.openai.events import json_response
from cumulo.serve.api.openai.schemas import ChatRequest, DetokenizeRequest, Templated, TokenizeRequest
from cumulo.serve.api.openai.schemas_out import ERRORS, OPERATOR_ERRORS, answer
from cumulo.serve.bodies.reader import JsonRoute
from cumulo.serve.bodies.strict import Strict
from cumulo.serve.engine_link.messages import Ready
from cumulo.serve.errors import ApiError, invalid
from cumulo.serve.model_table import ModelTable, ServedModel
from cumulo.serve.model_text import COUNTED_CONTEXTS
from cumulo.serve.observe.stories import NotUnique, explanation
from cumulo.serve.observe.trace import chrome_trace
from cumulo.serve.service import Service, service_of

router = APIRouter(route_class=JsonRoute, responses=ERRORS)
Format = Annotated[Literal["json", "trace"], Query(description="trace: a Chrome/Perfetto trace")]


# -- is it well? ----------------------------------------------------------------------------------------------
def _health(service: Service, good: bool) -> Response:
    engine = service.engine
    body = {
        "status": "ok" if good else "unavailable",
        "engine": "draining" if service.draining else engine.state,
        "detail": engine.last_failure,
        "restarts": engine.restarts,
        "running": engine.stats.running if engine.stats is not None else 0,
        "waiting": engine.waiting,
    }
    return json_response(body, 200 if good else 503)


_HEALTH = answer("Health") | answer("Health", 503, description="It is not.")


@router.get("/health", summary="Is the engine alive and moving?", responses=_HEALTH)
async def health(request: Request) -> Response:
    """Fails when the engine's process died, or has work and finished no step within the bound, until a new one is
    up. Loading the model at start-up is not a failure; /ready tells when requests are taken."""
    service = service_of(request)
    return _health(service, service.engine.state == "starting" or service.takes_requests)


@router.get("/ready", summary="Are requests taken?", responses=_HEALTH)
async def ready(request: Request) -> Response:
    service = service_of(request)
    return _health(service, service.takes_requests and not service.draining)


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses={200: {"description": "Prometheus' text format", "content": {"text/plain": {}}}},
)
async def metrics(request: Request) -> Response:
    """With API keys, their names are shown to callers whose key may see them; others see numbers. Names of
    adapters are shown to callers with a key."""
    service = service_of(request)
    caller = _caller(service, request)
    known = caller is not None
    text = service.metrics.text(with_names=caller is not None and caller.may_see_names, with_adapters=known)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _caller(service: Service, request: Request) -> Caller | None:
    """The path needs no key, so nobody has looked for one yet."""
    if service.keys is None:
        return service.anyone
    with contextlib.suppress(ApiError):
        return service.keys.caller_of(shown_key(request.headers))
    return None


@router.get("/version", summary="Cumulo's version", responses=answer("Version"))
async def version() -> Response:
    return json_response({"version": __version__})


# -- models ---------------------------------------------------------------------------------------------------
def _models(models: ModelTable) -> list[dict[str, Any]]:
    """List the first model, its adapters, and the models that are loaded on request."""
    models.refresh()
    _, *others = models.listed.values()
    service = models.first
    adapters = [_model(service, adapter) for adapter in service.adapters.served.values()]
    return [_model(service), *adapters, *map(_further_model, others)]


def _further_model(row: ServedModel) -> dict[str, Any]:
    if row.service is not None:
        return _model(row.service) | {"state": row.state}
    return {
        "id": row.name, "object": "model", "created": 0, "owned_by": "cumulo", "max_model_len": row.max_context,
        "generation_defaults": None, "root": row.name, "parent": None, "state": row.state,
    }  # fmt: skip


def _model(service: Service, adapter: ServedAdapter | None = None) -> dict[str, Any]:
    info = service.engine.info
    return {
        "id": service.model_name if adapter is None else adapter.name,
        "object": "model",
        "created": int(service.started_s if adapter is None else adapter.loaded_s),
        "owned_by": "cumulo",
        "max_model_len": info.max_context if info is not None else None,
        "generation_defaults": _defaults(service, info) if info is not None else None,
        "root": service.model_name if adapter is None else adapter.folder,
        "parent": None if adapter is None else service.model_name,
    }


def _defaults(service: Service, info: Ready) -> dict[str, Any]:
    """What a request gets for fields it leaves out: the model's recommendation, then OpenAI's default."""
    openai = {"temperature": 1.0, "top_p": 1.0}
    return {**openai, **info.generation_defaults, "max_tokens": service.options.chat_limit or None}


@router.get("/v1/models", summary="What is served", responses=answer("ModelList"))
async def list_models(request: Request) -> Response:
    return json_response({"object": "list", "data": _models(request.app.state.models)})


@router.get("/v1/models/{name:path}", summary="One model", responses=answer("Model"))
async def get_model(name: str, request: Request) -> Response:
    service, models = service_of(request), request.app.state.models
    row = models.named(name)
    if row is not None and row.service is not service:
        return json_response(_further_model(row))
    service.check_model(name)
    return json_response(_model(service, service.adapters.named(name)))


# -- tokens ---------------------------------------------------------------------------------------------------
@router.post("/tokenize", summary="Text or messages to tokens", responses=answer("Tokenized"))
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    service = service_of(request)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    if body.messages is not None:
        # The tokens that a chat completion with the same fields would send to the engine.
        fields = {name: getattr(body, name) for name in ("messages", *Templated.model_fields)}
        chat = ChatRequest.model_construct(model=service.model_name, **fields)
        _, _, tokens = await chat_prompt(service, chat, COUNTED_CONTEXTS)
    else:
        _refuse_for_prompts(body)
        assert body.prompt is not None
        tokens = await service.text.encode(
            body.prompt, body.add_special_tokens, body.parse_special_tokens, COUNTED_CONTEXTS
        )
    spelled = [service.text.token_text(token)[0] for token in tokens] if body.return_token_strs else None
    info = service.engine.info
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": info.max_context if info is not None else None,
            "tokens": tokens,
            "token_strs": spelled,
        }
    )


def _refuse_for_prompts(body: TokenizeRequest) -> None:
    for name in ("tools", "chat_template_kwargs", "reasoning_effort", "continue_final_message"):
        if getattr(body, name):
            raise invalid(f"{name} goes with messages, not with a prompt: leave it out", name)


@router.post("/detokenize", summary="Tokens to text", responses=answer("Detokenized"))
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    service = service_of(request)
    service.check_model(body.model)
    known = service.text.tokenizer.vocab_size
    for token in body.tokens:
        if token >= known:
            raise invalid(f"there is no token {token}; token ids are 0 to {known - 1}", "tokens")
    return json_response({"prompt": await service.text.decode(body.tokens)})


# -- why? -----------------------------------------------------------------------------------------------------
@router.get(
    "/v1/requests/{request_id}/explain",
    summary="What happened to a request, and why",
    responses=answer("ExplanationList"),
)
async def explain(request_id: str, request: Request, format: Format = "json") -> Response:
    """The id is the answer's `id`, or the beginning of it that no other request has. With API keys, each caller
    sees only their own requests."""
    service = service_of(request)
    caller = caller_of(request)
    try:
        records = service.stories.named(request_id, lambda name: name == caller.name)
    except NotUnique as error:
        raise invalid(str(error), "request_id", "request_not_unique") from error
    if not records:
        raise ApiError(
            404,
            f"nothing is known of a request {request_id!r}; the last {service.options.stories} requests are kept",
            code="request_not_found",
        )
    if format == "trace":
        return json_response(chrome_trace(records))
    stories = [explanation(record) for record in records]
    return json_response({"id": request_id, "object": "list", "data": stories})


# -- adapters: with API keys they need one that may operate -------------------------------------------------------
class UnloadAdapterRequest(Strict):
    lora_name: str = Field(
        min_length=1, max_length=128, description="What requests call it, as their `model`"
    )


class LoadAdapterRequest(UnloadAdapterRequest):
    lora_path: str = Field(
        min_length=1,
        max_length=4096,
        description="A folder on the server, as PEFT or `cumulo train` writes it",
    )


def _adapter(adapter: ServedAdapter) -> dict[str, Any]:
    state = "leaving" if adapter.dropped and adapter.calls else "dropped" if adapter.dropped else "loaded"
    return {
        "name": adapter.name,
        "object": "adapter",
        "state": state,
        "path": adapter.folder,
        "rank": adapter.rank,
        "fingerprint": adapter.fingerprint,
        "running": adapter.calls,
        "created": int(adapter.loaded_s),
    }


@router.post(
    "/v1/load_lora_adapter", summary="Load an adapter", responses=OPERATOR_ERRORS | answer("AdapterAnswer")
)
async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> Response:
    """Answers when all engines have it: from then on requests name it as their `model`."""
    require_operator(request)
    service = service_of(request)
    service.check_ready()
    try:
        adapter = await service.load_adapter(body.lora_name, body.lora_path)
    except AdapterRefused as error:
        raise ApiError(400, str(error), param="lora_path", code="adapter_refused") from error
    return json_response(_adapter(adapter))


@router.post(
    "/v1/unload_lora_adapter", summary="Drop an adapter", responses=OPERATOR_ERRORS | answer("AdapterAnswer")
)
async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> Response:
    """New requests cannot name it from now on. Those that run are answered; then its memory is free."""
    require_operator(request)
    service = service_of(request)
    try:
        adapter = service.adapters.drop(body.lora_name)
    except AdapterRefused as error:
        raise ApiError(404, str(error), param="lora_name", code="adapter_not_found") from error
    return json_response(_adapter(adapter))
