"""/v1/batches: run the requests of a file, look at it, list, cancel. Installed by `create_app`."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from cumulo.serve.access.keys import caller_of
from cumulo.serve.batches.desk import Batches
from cumulo.serve.batches.paging import page
from cumulo.serve.batches.record import BatchRecord
from cumulo.serve.batches.schemas import BatchList, BatchObject, BatchRequest
from cumulo.serve.bodies.reader import JsonRoute
from cumulo.serve.openai.descriptions import answers, plain
from cumulo.serve.openai.events import json_response

router = APIRouter(route_class=JsonRoute)

Limit = Annotated[int, Query(ge=1, le=100, description="How many at most.")]
After = Annotated[str | None, Query(max_length=64, description="Go on after the batch with this id.")]


def batches_of(request: Request) -> Batches:
    batches: Batches = request.app.state.batches
    return batches


@router.post(
    "/v1/batches",
    summary="Run the requests of a file",
    responses=answers(plain(BatchObject, "The batch, which begins now."), 400, 401, 404, 413, 429, 503),
)
async def create_batch(body: BatchRequest, request: Request) -> Response:
    """Requests run with the lowest priority, as the engine has room for them. The results are files."""
    return json_response((await batches_of(request).create(caller_of(request).name, body)).as_json())


@router.get(
    "/v1/batches", summary="Your batches", responses=answers(plain(BatchList, "The batches."), 400, 401)
)
async def listbatches_of(request: Request, limit: Limit = 20, after: After = None) -> Response:
    return json_response(
        page(batches_of(request).owned_by(caller_of(request).name), BatchRecord.as_json, limit, after)
    )


@router.get(
    "/v1/batches/{batch_id}",
    summary="One batch",
    responses=answers(plain(BatchObject, "The batch."), 400, 401, 404),
)
async def get_batch(batch_id: str, request: Request) -> Response:
    return json_response(batches_of(request).get(batch_id, caller_of(request).name).as_json())


@router.post(
    "/v1/batches/{batch_id}/cancel",
    summary="Cancel a batch",
    responses=answers(plain(BatchObject, "The batch, which ends."), 400, 401, 404, 429, 503),
)
async def cancel_batch(batch_id: str, request: Request) -> Response:
    """What has been answered by then is in its files."""
    batches = batches_of(request)
    record = batches.get(batch_id, caller_of(request).name)
    await batches.cancel(record)
    return json_response(record.as_json())
