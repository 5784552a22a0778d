"""/v1/files and /v1/batches: upload files of requests, run them, look at both. Installed by `create_app`.

With API keys, a file belongs to the name of the key that uploaded it, and nobody else sees it.
"""

import asyncio
from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response
from starlette.types import Message

from cumulo.serve.access.keys import CALLER_KEY, caller_of
from cumulo.serve.api.batches.manager import Batches
from cumulo.serve.api.batches.schemas import BatchObject, BatchRequest, FileObject, shown
from cumulo.serve.api.openai.events import json_response, page
from cumulo.serve.api.openai.schemas_out import ERRORS, answer
from cumulo.serve.bodies.reader import JsonRoute
from cumulo.serve.errors import ApiError, invalid
from cumulo.serve.http.limits import FORM_BYTES

router = APIRouter(route_class=JsonRoute, responses=ERRORS)

Limit = Annotated[int, Query(ge=1, le=100, description="How many at most.")]
After = Annotated[str | None, Query(max_length=64, description="Go on after the batch with this id.")]


def batches_of(request: Request) -> Batches:
    batches: Batches = request.app.state.batches
    return batches


@router.post("/v1/batches", summary="Run the requests of a file", response_model=BatchObject)
async def create_batch(body: BatchRequest, request: Request) -> Response:
    """Requests run with the lowest priority, as the engine has room for them. The results are files."""
    return json_response(
        shown(await batches_of(request).create(caller_of(request).name, body, request.scope.get(CALLER_KEY)))
    )


@router.get("/v1/batches", summary="Your batches", responses=answer("BatchPage"))
async def list_batches(request: Request, limit: Limit = 20, after: After = None) -> Response:
    found = batches_of(request).owned_by(caller_of(request).name)
    return json_response(page(list(map(shown, found)), limit, after))


@router.get("/v1/batches/{batch_id}", summary="One batch", response_model=BatchObject)
async def get_batch(batch_id: str, request: Request) -> Response:
    return json_response(shown(batches_of(request).get(batch_id, caller_of(request).name)))


@router.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch", response_model=BatchObject)
async def cancel_batch(batch_id: str, request: Request) -> Response:
    """What has been answered by then is in its files."""
    batches = batches_of(request)
    record = batches.get(batch_id, caller_of(request).name)
    await batches.cancel(record)
    return json_response(shown(record))


_UPLOADS_AT_A_TIME = 4  # per key
_MOST_FIELDS = 8
_MOST_FIELD_BYTES = 4096


class UploadForm(BaseModel):  # for the description: Starlette reads the form, piece by piece
    purpose: Literal["batch"]
    file: bytes


_FORM_CONTENT = {"multipart/form-data": {"schema": UploadForm.model_json_schema()}}
FileLimit = Annotated[int, Query(ge=1, le=10_000, description="How many at most.")]
AfterFile = Annotated[str | None, Query(max_length=64, description="Go on after the file with this id.")]
Order = Annotated[Literal["asc", "desc"], Query(description="By when they were made; desc: newest first.")]


@router.post(
    "/v1/files",
    summary="Upload a file of requests",
    openapi_extra={"requestBody": {"required": True, "content": _FORM_CONTENT}},
    response_model=FileObject,
)
async def create_file(request: Request) -> Response:
    """A form with `purpose` (batch) and `file`: one request per line, as JSON. See /v1/batches."""
    batches, owner = batches_of(request), caller_of(request).name
    store, running = batches.store, batches.uploads
    store.check_count(owner)
    if running[owner] >= _UPLOADS_AT_A_TIME:
        raise ApiError(
            429,
            f"this key is uploading {running[owner]} files already: wait until one is there",
            code="too_many_uploads",
            retry_after_s=1,
        )
    running[owner] += 1
    try:
        with store.claiming(owner) as claim:
            async with _form_of(request, claim).form(
                max_files=1, max_fields=_MOST_FIELDS, max_part_size=_MOST_FIELD_BYTES
            ) as form:
                upload = _checked(form, batches.service.options.max_file_bytes)
                claim(upload.size or 0)
                stored = await asyncio.to_thread(store.keep, owner, upload.filename or "", upload.file)
    except HTTPException as error:  # Starlette's parser
        raise invalid(f"the body is not valid multipart/form-data: {error.detail}") from error
    except OSError as error:
        raise ApiError(
            507, f"the file cannot be stored ({error.strerror}); tell the operator", code="storage_full"
        ) from error
    finally:
        running[owner] -= 1
    return json_response(shown(stored))


def _form_of(request: Request, claim: Callable[[int], None]) -> Request:
    """The request, whose body claims room as it comes. Its file goes to disk piece by piece."""
    received_bytes = 0

    async def receive() -> Message:
        nonlocal received_bytes
        message = await request.receive()
        received_bytes += len(message.get("body", b""))
        claim(max(0, received_bytes - FORM_BYTES))
        return message

    return Request(request.scope, receive)


def _checked(form: FormData, limit_bytes: int) -> UploadFile:
    purpose, upload = form.get("purpose"), form.get("file")
    if not isinstance(upload, UploadFile):
        raise invalid(
            "a file is uploaded as multipart/form-data with the fields `purpose` and `file`, and here `file` is "
            "missing or has no filename",
            "file",
            "missing_required_parameter",
        )
    if purpose is None:
        raise invalid("the form has no `purpose`; send `batch`", "purpose", "missing_required_parameter")
    if purpose != "batch":
        raise invalid(
            f"files are taken for the purpose `batch`, not {str(purpose)[:64]!r}", "purpose", "invalid_value"
        )
    if not upload.size:
        raise invalid("the file is empty", "file", "invalid_value")
    if upload.size > limit_bytes:
        raise ApiError(
            413,
            f"the file is larger than the {limit_bytes:,} bytes this server takes: split it",
            code="file_too_large",
        )
    return upload


@router.get("/v1/files", summary="Your files", responses=answer("FilePage"))
async def list_files(
    request: Request,
    purpose: Annotated[str | None, Query(max_length=64)] = None,
    limit: FileLimit = 10_000,
    after: AfterFile = None,
    order: Order = "desc",
) -> Response:
    found = [
        shown(stored)
        for stored in batches_of(request).store.owned_by(caller_of(request).name)
        if purpose is None or stored.purpose == purpose
    ]
    return json_response(page(found[:: -1 if order == "asc" else 1], limit, after))


@router.get("/v1/files/{file_id}", summary="One file", response_model=FileObject)
async def get_file(file_id: str, request: Request) -> Response:
    return json_response(shown(batches_of(request).store.get(file_id, caller_of(request).name)))


@router.get(
    "/v1/files/{file_id}/content",
    summary="A file's content",
    response_class=Response,
    responses={
        200: {"description": "The bytes.", "content": {"application/octet-stream": {}}},
    },
)
async def get_content(file_id: str, request: Request) -> Response:
    store = batches_of(request).store
    stored = store.get(file_id, caller_of(request).name)
    # To be saved, never shown: what somebody uploaded must not run as a page of this server's origin.
    return FileResponse(
        store.path(stored.id),
        media_type="application/octet-stream",
        filename=f"{stored.id}.jsonl",
        headers={"X-Content-Type-Options": "nosniff"},
    )


@router.delete("/v1/files/{file_id}", summary="Delete a file", responses=answer("Deleted"))
async def delete_file(file_id: str, request: Request) -> Response:
    batches = batches_of(request)
    stored = batches.store.get(file_id, caller_of(request).name)
    reader = batches.reader_of(stored.id)
    if reader is not None:
        raise invalid(
            f"the batch {reader} still reads this file: cancel it, or wait for its end", code="file_in_use"
        )
    batches.store.delete(stored)
    return json_response({"id": stored.id, "object": "file", "deleted": True})
