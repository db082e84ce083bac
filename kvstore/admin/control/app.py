"""Puts the control API together: routes, faults, the page's files, and the gate before all.

Imported only once somebody asks (`serving`): FastAPI takes a fifth of a second and some 30 MB that
a worker without operators has no use for.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from .docs_page import render_docs_page
from .gate import Gate
from .handle import WorkerHandle
from .policy_routes import PolicyRoutes
from .problems import install_problems
from .spread import PolicySpreader
from .state_routes import StateRoutes

WEB_FOLDER = Path(__file__).parent / "web"
TITLE = "Cachalot control API"

# It would be sent wherever the process's surroundings say; /metrics is what we offer.
NO_TELEMETRY: TelemetryConfig = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": False,
}


def create_app(handle: WorkerHandle, token: str) -> ASGIApp:
    """The application for one worker; every request for data must carry `token`."""
    app = FastAPI(
        title=TITLE,
        # Both would load scripts from another host, which a cluster may not reach.
        docs_url=None,
        redoc_url=None,
        telemetry=NO_TELEMETRY,
    )
    app.include_router(StateRoutes(handle, token).router())
    app.include_router(PolicyRoutes(handle, PolicySpreader(handle)).router())
    install_problems(app)
    _add_pages(app)
    return Gate(app, token)


def _add_pages(app: FastAPI) -> None:
    async def docs() -> Response:
        return HTMLResponse(render_docs_page(app.openapi()))

    async def page() -> Response:
        return FileResponse(WEB_FOLDER / "index.html")

    app.add_api_route("/docs", docs, include_in_schema=False)
    app.add_api_route("/", page, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=WEB_FOLDER), name="static")
