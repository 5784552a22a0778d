"""The FastAPI application: `create_app` puts gate, endpoints and error shapes together around a Service."""

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

from cumulo import __version__
from cumulo.serve import errors
from cumulo.serve.api import operation, rank
from cumulo.serve.api.anthropic import messages
from cumulo.serve.api.batches import endpoints as batches
from cumulo.serve.api.batches.manager import Batches
from cumulo.serve.api.ollama import endpoints as ollama
from cumulo.serve.api.ollama import models as ollama_models
from cumulo.serve.api.openai import chat, completions, embeddings
from cumulo.serve.api.openai.schemas_out import schemas
from cumulo.serve.api.responses import endpoints as responses
from cumulo.serve.bodies.reader import BodyReader
from cumulo.serve.fleet import endpoints as fleet_endpoints
from cumulo.serve.fleet import state as fleet_state
from cumulo.serve.fleet.gateway_access import GatewayAccess
from cumulo.serve.gate import Gate
from cumulo.serve.model_table import ModelTable
from cumulo.serve.service import Service

_ENDPOINTS = (
    chat, completions, responses, messages, ollama, ollama_models, embeddings, rank, batches, operation,
    fleet_endpoints, fleet_state,
)  # fmt: skip
# The page /docs loads nothing from another host, and is in nobody's frame.
_DOCS_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"
)


def create_app(models: ModelTable) -> FastAPI:
    service = models.first
    app = FastAPI(
        title="Cumulo",
        version=__version__,
        summary="OpenAI-compatible language model server",
        redirect_slashes=False,
        docs_url=None,  # FastAPI's page loads its scripts from another host
        redoc_url=None,
        # Tracing is ours (otel.py): FastAPI's own would tell the same twice, and asks for it in every request.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.service, app.state.models = service, models
    app.state.bodies = BodyReader(lambda: service.engine.info.max_context if service.engine.info else 0)
    app.state.batches = Batches(app, service)  # started by the server, when the engine is up
    app.state.routes = [route for part in _ENDPOINTS for route in part.router.routes]
    errors.install(app)
    for part in _ENDPOINTS:
        app.include_router(part.router)
    _add_docs(app)
    app.add_middleware(Gate, service=service)
    app.add_middleware(GatewayAccess, service=service)
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


def _add_docs(app: FastAPI) -> None:
    """FastAPI's page of the description, with Swagger UI from this package."""
    app.mount("/docs/assets", StaticFiles(directory=Path(__file__).parent / "swagger_ui"))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        page = get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="Cumulo's API",
            swagger_js_url="/docs/assets/swagger-ui-bundle.js",
            swagger_css_url="/docs/assets/swagger-ui.css",
            swagger_favicon_url="data:,",
        )
        page.headers["Content-Security-Policy"] = _DOCS_POLICY
        page.headers["X-Content-Type-Options"] = "nosniff"
        return page


def _description(app: FastAPI, service: Service) -> dict[str, Any]:
    """FastAPI's description, corrected: what does not validate gets 400 here, never 422."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        for operations in schema["paths"].values():
            for operation_of_path in operations.values():
                operation_of_path["responses"].pop("422", None)
        parts = schema.setdefault("components", {})
        parts["schemas"] = parts.get("schemas", {}) | schemas()
        for name in ("HTTPValidationError", "ValidationError"):
            parts["schemas"].pop(name, None)
        if not (service.adapters.most or app.state.models.several):  # others may come
            # A tool that reads the description can ask right away.
            for name, described in parts["schemas"].items():
                if name.endswith("Request") and "model" in described.get("required", ()):
                    described["properties"]["model"]["enum"] = [service.model_name]
        if service.keys is not None:
            parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"key": []}]
        app.openapi_schema = schema
    return app.openapi_schema
