"""Endpoints that load and drop adapters while the server runs, with vLLM's names. With API keys they need one that
may operate."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from cumulo.serve.access.keys import require_operator
from cumulo.serve.adapter_registry import AdapterRefused, ServedAdapter
from cumulo.serve.api.openai.events import json_response
from cumulo.serve.api.openai.schemas_out import OPERATOR_ERRORS, AdapterAnswer
from cumulo.serve.bodies.reader import JsonRoute
from cumulo.serve.bodies.strict import Strict
from cumulo.serve.errors import ApiError
from cumulo.serve.service import Service

router = APIRouter(route_class=JsonRoute, responses=OPERATOR_ERRORS)
Name = Annotated[
    str, Field(min_length=1, max_length=128, description="What requests call it, as their `model`")
]


class LoadAdapterRequest(Strict):
    lora_name: Name
    lora_path: Annotated[
        str,
        Field(
            min_length=1,
            max_length=4096,
            description="A folder on the server, as PEFT or `cumulo train` writes it",
        ),
    ]


class UnloadAdapterRequest(Strict):
    lora_name: Name


def adapter_answer(adapter: ServedAdapter) -> dict[str, Any]:
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


def _operator(request: Request) -> Service:
    require_operator(request)
    service: Service = request.app.state.service
    return service


@router.post("/v1/load_lora_adapter", summary="Load an adapter", response_model=AdapterAnswer)
async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> Response:
    """Answers when all engines have it: from then on requests name it as their `model`."""
    service = _operator(request)
    service.check_ready()
    try:
        adapter = await service.load_adapter(body.lora_name, body.lora_path)
    except AdapterRefused as error:
        raise ApiError(400, str(error), param="lora_path", code="adapter_refused") from error
    return json_response(adapter_answer(adapter))


@router.post("/v1/unload_lora_adapter", summary="Drop an adapter", response_model=AdapterAnswer)
async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> Response:
    """New requests cannot name it from now on. Those that run are answered; then its memory is free."""
    service = _operator(request)
    try:
        adapter = service.adapters.drop(body.lora_name)
    except AdapterRefused as error:
        raise ApiError(404, str(error), param="lora_name", code="adapter_not_found") from error
    return json_response(adapter_answer(adapter))
