"""/api/tags, /api/ps, /api/show, /api/version, /api/pull and /api/delete: what models there are, and how others
come and go, in Ollama's API.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from cumulo import __version__
from cumulo.errors import CumuloError, ModelError
from cumulo.models.files.pull import PullProgress, pull
from cumulo.models.files.pulled import pulled_models, remove_pulled
from cumulo.serve.access.keys import require_operator
from cumulo.serve.api.openai.events import json_response, to_line
from cumulo.serve.api.openai.schemas_out import OLLAMA_ERRORS, STREAMED_LINES
from cumulo.serve.bodies.reader import JsonRoute
from cumulo.serve.bodies.strict import Strict
from cumulo.serve.errors import ApiError, invalid, ollama_error
from cumulo.serve.model_table import ModelTable, ServedModel
from cumulo.serve.options import ALL_PULLED

router = APIRouter(route_class=JsonRoute, responses=OLLAMA_ERRORS)
Item = dict[str, Any]
_TELL_S = 0.1  # between two lines of progress
_FOR_EVER_S = 100 * 365 * 86400.0


class NamedModel(Strict):
    model: str | None = None
    name: str | None = Field(None, description="The older name of model.")
    loads_model: ClassVar[bool] = False
    ignores_unknown: ClassVar[bool] = True

    @property
    def asked(self) -> str:
        name = self.model or self.name
        if not name:
            raise invalid("'model' is missing", "model", "missing_required_parameter")
        return name


class PullModel(NamedModel):
    stream: bool | None = Field(True, description="Send the progress as lines of JSON.")


@router.get("/api/version", summary="Cumulo's version, in Ollama's API")
async def version() -> Response:
    return json_response({"version": __version__})


@router.get("/api/tags", summary="All models, in Ollama's API")
async def tags(request: Request) -> Response:
    models = await _described(request)
    return json_response(
        {"models": [_entry(row) | {"modified_at": _changed(row)} for row in models.listed.values()]}
    )


@router.get("/api/ps", summary="The models in memory, in Ollama's API")
async def loaded(request: Request) -> Response:
    models = await _described(request)
    found = []
    for row in models.rows.values():
        if row.state == "loaded" and row.forecast is not None:
            info = row.service.engine.info if row.service is not None else None
            on_gpu = info is not None and "cuda" in info.runs_on.lower()
            need = row.forecast.need_bytes
            stays_s = row.expires_s if models.several else _FOR_EVER_S
            expires = datetime.fromtimestamp(time.time() + min(stays_s, _FOR_EVER_S), UTC).isoformat()
            found.append(_entry(row) | {"size": need, "size_vram": need if on_gpu else 0, "expires_at": expires,
                                        "context_length": row.max_context})  # fmt: skip
    return json_response({"models": found})


@router.post("/api/show", summary="One model, in Ollama's API")
async def show(body: NamedModel, request: Request) -> Response:
    models = await _described(request)
    row = _named(models, body.asked)
    forecast = row.forecast
    assert forecast is not None
    if forecast.problem and not forecast.format:
        raise invalid(forecast.problem, "model")
    service = await models.service_of(row)
    template = service.text.tokenizer.chat_template
    formats, pulled = service.text.formats, _pulled(row)
    capabilities = [
        "completion",
        "embedding",
        *(["tools"] if template else []),
        *(["thinking"] if formats.thinks else []),
    ]
    info = service.engine.info
    defaults = info.generation_defaults if info is not None else {}
    family = forecast.family or "unknown"
    return json_response(
        {
            "modelfile": f"FROM {row.name}\n",
            "parameters": "\n".join(f"{name} {value}" for name, value in defaults.items()),
            "template": template.source if template is not None else "",
            "license": pulled.license if pulled is not None else "",
            "details": _details(row),
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": forecast.parameters,
                f"{family}.context_length": row.max_context,
                f"{family}.embedding_length": forecast.hidden,
            },
            "capabilities": capabilities,
            "modified_at": _changed(row),
        }
    )


# -- getting and dropping models: with API keys they need one that may operate ------------------------------------
@router.post("/api/pull", summary="Download a model, in Ollama's API", responses=STREAMED_LINES)
async def pull_model(body: PullModel, request: Request) -> Response:
    require_operator(request)
    models, name = _managed(request), body.asked
    news: asyncio.Queue[Item | CumuloError | None] = asyncio.Queue()
    loop, gone = asyncio.get_running_loop(), False
    told_s = 0.0

    def tell(progress: PullProgress) -> None:
        nonlocal told_s
        if gone:
            raise ModelError("whoever asked has hung up; ask again to resume")
        file, ended = progress.file, progress.file_bytes == progress.file.size
        if ended or time.monotonic() - told_s > _TELL_S:
            told_s = time.monotonic()
            loop.call_soon_threadsafe(news.put_nowait, _progress(file.path, file.checksum, progress))

    def work() -> None:
        last: Item | CumuloError = {"status": "success"}
        try:
            pull(name, models.first.options.hub, tell)
        except CumuloError as error:
            last = error
        for one in (last, None):
            loop.call_soon_threadsafe(news.put_nowait, one)

    working = asyncio.create_task(asyncio.to_thread(work))
    first = await news.get()
    if isinstance(first, CumuloError):
        raise invalid(str(first), "model", "not_pulled")

    async def lines() -> AsyncIterator[bytes]:
        nonlocal gone
        try:
            yield to_line({"status": "pulling manifest"}) + b"\n"
            one: Item | CumuloError | None = first
            while one is not None:
                yield (ollama_error(str(one)) if isinstance(one, CumuloError) else to_line(one)) + b"\n"
                one = await news.get()
            await working
            models.refresh()
        finally:
            gone = True

    if body.stream is not False:
        return StreamingResponse(lines(), media_type="application/x-ndjson")
    last = [line async for line in lines()][-1]
    return Response(last, 200 if b'"success"' in last else 500, media_type="application/json")


def _progress(path: str, checksum: str, progress: PullProgress) -> Item:
    kind = "sha256" if len(checksum) == 64 else "sha1"
    return {
        "status": f"pulling {path}", "digest": f"{kind}:{checksum}", "total": progress.file.size,
        "completed": progress.file_bytes,
    }  # fmt: skip


@router.delete("/api/delete", summary="Delete a pulled model, in Ollama's API")
async def delete_model(body: NamedModel, request: Request) -> Response:
    require_operator(request)
    models = _managed(request)
    row = models.rows.get(body.asked) or models.rows.get(body.asked.removesuffix(":latest"))
    try:
        model = await asyncio.to_thread(remove_pulled, row.name if row is not None else body.asked)
    except ModelError as error:
        raise ApiError(404, str(error), param="model", code="model_not_found") from None
    if (row := models.rows.get(model.name)) is not None:
        models.unload(row)
    models.refresh()
    return json_response({"status": "success"})


def _managed(request: Request) -> ModelTable:
    models: ModelTable = request.app.state.models
    if ALL_PULLED not in models.first.options.models:
        raise ApiError(
            403, "this server does not serve pulled models: start it without MODEL, or with --models pulled",
            code="models_not_managed",
        )  # fmt: skip
    return models


# -- words ------------------------------------------------------------------------------------------------
async def _described(request: Request) -> ModelTable:
    models: ModelTable = request.app.state.models
    models.refresh()
    await models.describe()
    return models


def _named(models: ModelTable, name: str) -> ServedModel:
    row = models.named(name)
    if row is None:
        models.first.check_model(name)
        return models.rows[models.first.model_name]
    return row


def _tagged(name: str) -> str:
    """Ollama's names have a tag, and its clients add one where it is missing."""
    return name if ":" in name else f"{name}:latest"


def _entry(row: ServedModel) -> Item:
    forecast = row.forecast
    size = forecast.weight_bytes if forecast is not None else 0
    digest = hashlib.sha256(f"{row.name} {row.model} {size}".encode()).hexdigest()
    return {"name": _tagged(row.name), "model": _tagged(row.name), "size": size, "digest": digest,
            "details": _details(row)}  # fmt: skip


def _details(row: ServedModel) -> Item:
    forecast = row.forecast
    assert forecast is not None
    size = forecast.parameters
    return {
        "parent_model": "",
        "format": forecast.format,
        "family": forecast.family,
        "families": [forecast.family],
        "parameter_size": f"{size / 1e9:.1f}B" if size >= 1e9 else f"{size / 1e6:.0f}M",
        "quantization_level": forecast.number_format,
    }


def _pulled(row: ServedModel) -> Any:
    return next((one for one in pulled_models() if str(one.path) == row.model), None)


def _changed(row: ServedModel) -> str:
    path = Path(row.model) if row.model else None
    changed_s = path.stat().st_mtime if path is not None and path.exists() else 0.0
    return datetime.fromtimestamp(changed_s, UTC).isoformat()
