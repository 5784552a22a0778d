"""/v1/files: upload, list, look at, read and delete files. Installed by `create_app`.

With API keys, a file belongs to the name of the key that uploaded it, and nobody else sees it.
"""

import asyncio
from collections import Counter
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import FileResponse, Response

from cumulo.serve.access.keys import caller_of
from cumulo.serve.batches import upload
from cumulo.serve.batches.endpoints import batches_of
from cumulo.serve.batches.paging import page
from cumulo.serve.batches.schemas import DeletedFile, FileList, FileObject
from cumulo.serve.batches.store import StoredFile
from cumulo.serve.errors import ApiError, invalid
from cumulo.serve.openai.descriptions import answers, plain
from cumulo.serve.openai.events import json_response

router = APIRouter()

_UPLOADS_AT_A_TIME = 4  # per key
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "file": {"type": "string", "format": "binary"},
                    },
                    "required": ["purpose", "file"],
                }
            }
        },
    }
}
Limit = Annotated[int, Query(ge=1, le=10_000, description="How many at most.")]
After = Annotated[str | None, Query(max_length=64, description="Go on after the file with this id.")]
Order = Annotated[Literal["asc", "desc"], Query(description="By when they were made; desc: newest first.")]


@router.post(
    "/v1/files",
    summary="Upload a file of requests",
    openapi_extra=_FORM,
    responses=answers(plain(FileObject, "The file."), 400, 401, 413, 429, 503),
)
async def create_file(request: Request) -> Response:
    """A form with `purpose` (batch) and `file`: one request per line, as JSON. See /v1/batches."""
    batches, owner = batches_of(request), caller_of(request).name
    store, running = batches.store, batches.uploads
    if running[owner] >= _UPLOADS_AT_A_TIME:
        raise ApiError(
            429,
            f"this key is uploading {running[owner]} files already: wait until one is there",
            code="too_many_uploads",
            retry_after_s=1,
        )
    room_bytes, limit_bytes = store.room_bytes(owner), batches.service.options.max_file_bytes
    if limit_bytes <= room_bytes:
        words = f"the file is larger than the {limit_bytes:,} bytes this server takes: split it"
    else:
        words = (
            f"this key may store {store.bytes_per_key:,} bytes and has {max(0, room_bytes):,} left: delete files "
            "you no longer need"
        )
    running[owner] += 1
    try:
        with store.writing() as (file_id, descriptor):
            form = await upload.receive(request, descriptor, max(0, min(room_bytes, limit_bytes)), words)
            _check(form)
            stored = await asyncio.to_thread(store.add, file_id, None, owner, form.filename or "", "batch")
    finally:
        _leave(running, owner)
    return json_response(stored.as_json())


def _check(form: upload.Upload) -> None:
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise invalid("the form has no `purpose`; send `batch`", "purpose", "missing_required_parameter")
    if purpose != "batch":
        raise invalid(
            f"files are taken for the purpose `batch`, not {purpose[:64]!r}", "purpose", "invalid_value"
        )
    if form.size_bytes == 0:
        raise invalid("the file is empty", "file", "invalid_value")


def _leave(running: Counter[str], owner: str) -> None:
    running[owner] -= 1
    if not running[owner]:
        del running[owner]


@router.get("/v1/files", summary="Your files", responses=answers(plain(FileList, "The files."), 400, 401))
async def list_files(
    request: Request,
    purpose: Annotated[str | None, Query(max_length=64)] = None,
    limit: Limit = 10_000,
    after: After = None,
    order: Order = "desc",
) -> Response:
    found = [
        stored
        for stored in batches_of(request).store.owned_by(caller_of(request).name)
        if purpose is None or stored.purpose == purpose
    ]
    return json_response(page(found[:: -1 if order == "asc" else 1], StoredFile.as_json, limit, after))


@router.get(
    "/v1/files/{file_id}",
    summary="One file",
    responses=answers(plain(FileObject, "The file."), 400, 401, 404),
)
async def get_file(file_id: str, request: Request) -> Response:
    return json_response(batches_of(request).store.get(file_id, caller_of(request).name).as_json())


@router.get(
    "/v1/files/{file_id}/content",
    summary="A file's content",
    response_class=Response,
    responses={
        **answers(plain(FileObject, ""), 400, 401, 404),
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


@router.delete(
    "/v1/files/{file_id}",
    summary="Delete a file",
    responses=answers(plain(DeletedFile, "It is gone."), 400, 401, 404),
)
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
