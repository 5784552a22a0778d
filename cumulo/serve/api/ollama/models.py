"""/api/tags, /api/ps, /api/show, /api/version, /api/pull and /api/delete: what models there are, and how others
come and go, in Ollama's API.
"""

import asyncio
import hashlib
import itertools
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from cumulo import __version__
from cumulo.errors import CumuloError, ModelError
from cumulo.models.files.hub import files_and_license
from cumulo.models.files.pull import PullProgress, pull
from cumulo.models.files.pulled import remove_pulled
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
    return json_response({"models": [_entry(row) for row in models.listed.values()]})


@router.get("/api/ps", summary="The models in memory, in Ollama's API")
async def loaded(request: Request) -> Response:
    models = await _described(request)
    found = []
    for row in models.rows.values():
        if row.state == "loaded" and row.service is not None:
            need, stays_s = row.forecast.need_bytes, row.expires_s if models.several else _FOR_EVER_S
            told = {"size": need, "size_vram": need if "cuda" in row.service.info.runs_on.lower() else 0,
                    "expires_at": _when(time.time() + min(stays_s, _FOR_EVER_S)),
                    "context_length": row.max_context}  # fmt: skip
            found.append(_entry(row) | told)
    return json_response({"models": found})


@router.post("/api/show", summary="One model, in Ollama's API")
async def show(body: NamedModel, request: Request) -> Response:
    models = await _described(request)
    if (row := models.named(body.asked)) is None:
        models.first.check_model(body.asked)
        row = models.rows[models.first.model_name]
    told = row.forecast
    if told.problem and not told.format:
        raise invalid(told.problem, "model")
    service = await models.service_of(row)
    template, info = service.text.tokenizer.chat_template, service.engine.info
    can = {"completion": True, "embedding": True, "tools": template, "thinking": service.text.formats.thinks}
    defaults = info.generation_defaults if info is not None else {}
    more = {
        "modelfile": f"FROM {row.name}\n",
        "parameters": "\n".join(f"{name} {value}" for name, value in defaults.items()),
        "template": template.source if template is not None else "",
        "license": files_and_license(row.model)[1],
        "model_info": {
            "general.architecture": told.family,
            "general.parameter_count": told.parameters,
            f"{told.family}.context_length": row.max_context,
            f"{told.family}.embedding_length": told.hidden,
        },
        "capabilities": [name for name, has in can.items() if has],
    }
    return json_response(_entry(row) | more)


# -- getting and dropping models: with API keys they need one that may operate ------------------------------------
@router.post("/api/pull", summary="Download a model, in Ollama's API", responses=STREAMED_LINES)
async def pull_model(body: PullModel, request: Request) -> Response:
    require_operator(request)
    steps = pull(body.asked, _managed(request).first.options.hub)
    try:
        first = await asyncio.to_thread(next, steps)
    except CumuloError as error:
        raise invalid(str(error), "model", "not_pulled") from None
    lines = _lines(itertools.chain([first], steps))
    if body.stream is not False:
        return StreamingResponse(lines, media_type="application/x-ndjson")
    last = await asyncio.to_thread(lambda: list(lines)[-1])
    return Response(last, 200 if b'"success"' in last else 500, media_type="application/json")


def _lines(steps: Iterator[PullProgress]) -> Iterator[bytes]:
    """Read in threads; the download ends with its reader, and is resumed when it is asked for again."""
    yield to_line({"status": "pulling manifest"}) + b"\n"
    try:
        for now in steps:
            digest = f"{'sha256' if len(now.file.checksum) == 64 else 'sha1'}:{now.file.checksum}"
            told = {"status": f"pulling {now.file.path}", "digest": digest}
            yield to_line(told | {"total": now.file.size, "completed": now.file_bytes}) + b"\n"
        yield to_line({"status": "success"}) + b"\n"
    except CumuloError as error:
        yield ollama_error(str(error)) + b"\n"


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


async def _described(request: Request) -> ModelTable:
    models: ModelTable = request.app.state.models
    models.refresh()
    await models.describe()
    return models


def _entry(row: ServedModel) -> Item:
    """Ollama's names have a tag, and its clients add one where it is missing."""
    told, name = row.forecast, row.name if ":" in row.name else f"{row.name}:latest"
    path, _ = files_and_license(row.model)
    size = f"{told.parameters / 1e9:.1f}B" if told.parameters >= 1e9 else f"{told.parameters / 1e6:.0f}M"
    return {
        "name": name,
        "model": name,
        "size": told.weight_bytes,
        "digest": hashlib.sha256(f"{row.name} {row.model} {told.weight_bytes}".encode()).hexdigest(),
        "modified_at": _when(path.stat().st_mtime if path.exists() else 0.0),
        "details": {
            "parent_model": "", "format": told.format, "family": told.family, "families": [told.family],
            "parameter_size": size, "quantization_level": told.number_format,
        },
    }  # fmt: skip


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
