"""The FastAPI application: `create_app` puts gate, endpoints and error shapes together around a Service."""

from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware

from cumulo import __version__
from cumulo.serve import direct_route, docs_page, errors, fleet_endpoints, operation
from cumulo.serve.access.gate import Gate
from cumulo.serve.adapters import endpoints as adapters
from cumulo.serve.anthropic import endpoints as anthropic
from cumulo.serve.batches import endpoints as batches
from cumulo.serve.batches import file_endpoints as files
from cumulo.serve.batches.desk import Batches
from cumulo.serve.bodies.reader import BodyReader
from cumulo.serve.fleet import state as fleet_state
from cumulo.serve.fleet.door import FleetDoor
from cumulo.serve.http.head_requests import HeadAsGet
from cumulo.serve.openai import chat, completions, embeddings
from cumulo.serve.openai.plain_chat import read_plain
from cumulo.serve.rank import endpoints as rank
from cumulo.serve.responses import endpoints as responses
from cumulo.serve.service import Service


def create_app(service: Service) -> FastAPI:
    app = FastAPI(
        title="Cumulo",
        version=__version__,
        summary="OpenAI-compatible language model server",
        redirect_slashes=False,
        openapi_url=None,  # this and the page are docs_page's: FastAPI's page loads its scripts from another host
        docs_url=None,
        redoc_url=None,
        # Tracing is ours (otel.py): FastAPI's own would tell the same twice, and asks for it in every request.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.service = service
    errors.install(app)
    app.state.batches = service.batches = Batches(app, service)
    rooms = (chat, completions, responses, anthropic, embeddings, rank, files, batches, operation)
    parts = [*(part.router for part in rooms), adapters.router, fleet_endpoints.router, fleet_state.router]
    app.state.routes = [route for router in parts for route in router.routes]
    # First those that are asked for with GET: FastAPI tries its routes in turn, and bodies do not go that way.
    for router in sorted(parts, key=lambda router: router is not operation.router):
        app.include_router(router)
    endpoints = direct_route.json_endpoints(parts)
    endpoints["/v1/chat/completions"] = replace(endpoints["/v1/chat/completions"], quick=read_plain)
    reader = BodyReader(lambda: service.engine.info.max_context if service.engine.info is not None else 0)
    direct_route.install(app, endpoints, reader, service.options.lenient)
    docs_page.install(app)
    app.add_middleware(HeadAsGet)
    app.add_middleware(Gate, service=service)
    app.add_middleware(FleetDoor, service=service)
    if service.options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.options.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=[
                "Authorization",
                "Content-Type",
                "X-Api-Key",
                "X-Cumulo-Lenient",
                "Anthropic-Version",
            ],
            expose_headers=["X-Request-Id", "Request-Id", "X-Cumulo-Warning", "Retry-After"],
        )
    app.openapi = lambda: _description(app, service)  # type: ignore[method-assign]
    return app


def _description(app: FastAPI, service: Service) -> dict[str, Any]:
    """FastAPI's description, corrected: what does not validate gets 400 here, never 422."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        paths = schema["paths"]
        schema["paths"] = {route.path: paths[route.path] for route in app.state.routes if route.path in paths}
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        parts = schema.setdefault("components", {})
        for name in ("HTTPValidationError", "ValidationError"):
            parts.get("schemas", {}).pop(name, None)
        for name in (
            "ChatRequest",
            "CompletionRequest",
            "ResponsesRequest",
            "MessagesRequest",
            "CountTokensRequest",
            "EmbeddingRequest",
            "ScoreRequest",
            "RerankRequest",
        ):  # a tool that reads this can ask right away
            if not service.adapters.most:  # others may come
                parts["schemas"][name]["properties"]["model"]["enum"] = [service.model_name]
        if service.keys is not None:
            parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"key": []}]
        app.openapi_schema = schema
    return app.openapi_schema
