"""Endpoints for operators of several replicas: /v1/fleet. With API keys they need one that may operate."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from cumulo.serve.access.keys import require_operator
from cumulo.serve.api.openai.events import json_response
from cumulo.serve.api.openai.schemas_out import OPERATOR_ERRORS, answer
from cumulo.serve.errors import ApiError
from cumulo.serve.observe.fleet_report import fleet_report, replica_report
from cumulo.serve.replicas import operations
from cumulo.serve.replicas.fleet import Fleet
from cumulo.serve.service import Service

router = APIRouter(responses=OPERATOR_ERRORS)
_REPLICA, _CHANGED = answer("ReplicaAnswer"), answer("ReplicaAnswer", 202)  # at once, or in a while
Move = Annotated[bool, Query(description="Continue its requests on other replicas at once")]


def _fleet(request: Request) -> Fleet:
    service: Service = request.app.state.service
    require_operator(request)
    if service.fleet is None:
        raise ApiError(
            409,
            "this server has a single engine; start it with --replicas 2 or more",
            code="no_fleet",
        )
    return service.fleet


def _answer(operate: Any, request: Request, *more: Any, status: int = 200) -> Response:
    fleet = _fleet(request)
    try:
        replica = operate(fleet, *more)
    except operations.NoSuchReplica as error:
        raise ApiError(404, str(error), code="replica_not_found") from error
    except operations.NotPossibleNow as error:
        raise ApiError(409, str(error), code="not_possible_now") from error
    return json_response(fleet_report(fleet) if replica is None else replica_report(fleet, replica), status)


def _patience_s(request: Request) -> float:
    service: Service = request.app.state.service
    return service.options.drain_timeout_s


@router.get(
    "/v1/fleet", summary="Replicas, their load, and recent routing decisions", responses=answer("FleetAnswer")
)
async def get_fleet(request: Request) -> Response:
    return json_response(fleet_report(_fleet(request)))


@router.post(
    "/v1/fleet/restart",
    summary="Restart all replicas, one after the other",
    status_code=202,
    responses=answer("FleetAnswer", 202),
)
async def restart_all(request: Request) -> Response:
    """Running requests have --drain-timeout seconds to finish on their replica; the rest is continued by others."""
    return _answer(operations.begin_rolling_restart, request, _patience_s(request), status=202)


@router.post("/v1/fleet/replicas", summary="Add a replica", status_code=202, responses=_CHANGED)
async def add_replica(request: Request) -> Response:
    return _answer(operations.add, request, status=202)


@router.delete("/v1/fleet/replicas/{name}", summary="Remove a replica", status_code=202, responses=_CHANGED)
async def remove_replica(name: str, request: Request) -> Response:
    """It is drained first, as for a restart."""
    return _answer(operations.begin_removal, request, name, _patience_s(request), status=202)


@router.post("/v1/fleet/replicas/{name}/drain", summary="Send a replica no new requests", responses=_REPLICA)
async def drain_replica(name: str, request: Request, move: Move = False) -> Response:
    return _answer(operations.drain, request, name, move)


@router.post("/v1/fleet/replicas/{name}/undrain", summary="Send a replica requests again", responses=_REPLICA)
async def undrain_replica(name: str, request: Request) -> Response:
    return _answer(operations.undrain, request, name)


@router.post(
    "/v1/fleet/replicas/{name}/restart", summary="Restart a replica", status_code=202, responses=_CHANGED
)
async def restart_replica(name: str, request: Request) -> Response:
    return _answer(operations.begin_restart, request, name, _patience_s(request), status=202)
