"""``saga browse``: pages to walk a memory and to replay episodes, served on this machine only unless asked otherwise.

Everything shown was written by models, worlds and files: it is escaped (:mod:`train.html`), and the pages forbid
scripts and anything from elsewhere. Only GET is answered, and only under the server's own names (a page of another
site could otherwise read the memory through a name that resolves to this machine).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import typer
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memory.records import MemoryRecordError
from memory.schema import memory_url
from memory.store import Store
from train.browse_pages import Browser, Page
from train.config import ConfigError
from train.html import environment, style
from train.run_folder import read_run
from train.target import CONFIG, REQUEST
from train.trajectory import TrajectoryError

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

_ICON = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><circle cx="8" cy="8" r="7" fill="#3567b5"/></svg>'

_PAGES: dict[str, Callable[[Browser, Request], Page]] = {
    "/": Browser.overview,
    "/items/{level:int}": Browser.items,
    "/records/{id}": Browser.record,
    "/trajectories": Browser.trajectories,
    "/phases/{phase}": Browser.phase,
    "/episodes/{id:path}": Browser.episode,
    "/states": Browser.states,
    "/states/{number:int}": Browser.state,
}


def browse(target: str, store: str | None, host: str, port: int) -> None:
    """Serve the pages until Ctrl-C.

    Args:
        target: a run's or an evaluation's folder, a memory file, or a PostgreSQL URL.
        store: the memory; None: the run's own, or ``target``.

    Raises:
        ConfigError: neither a run nor a memory. MemoryRecordError: no such memory.
    """
    import uvicorn

    folder = Path(target)
    run = read_run(folder) if (folder / CONFIG).is_file() or (folder / REQUEST).is_file() else None
    where = store or (run.store if run else target)
    with ExitStack() as stack:
        memory = stack.enter_context(Store(memory_url(where), create=False)) if where else None
        if not is_loopback(host):
            typer.echo(f"warning: --host {host}: whoever reaches this machine can read the memory", err=True)
        typer.echo(f"http://{f'[{host}]' if ':' in host else host}:{port}  (Ctrl-C ends it)")
        uvicorn.run(make_app(Browser(memory, run), host), host=host, port=port, log_level="warning")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_app(browser: Browser, host: str = "127.0.0.1") -> Starlette:
    """The pages of ``browser``, under the names of this machine (any name, where ``host`` is no loopback address)."""
    templates = environment()

    def show(request: Request, page: Page, status: int = 200) -> Response:
        here = request.url.path
        text = templates.get_template(page.template).render(browser=browser, here=here, **page.values)
        return HTMLResponse(text, status_code=status)

    def answer(make: Callable[[Browser, Request], Page], request: Request) -> Response:
        try:
            return show(request, make(browser, request))
        except (MemoryRecordError, ConfigError, TrajectoryError) as error:
            return show(request, Page("error.html", {"title": "Not found", "reason": str(error)}), 404)

    def nothing(request: Request, error: Exception) -> Response:
        reason = f"There is no page {request.url.path}"
        return show(request, Page("error.html", {"title": "Not found", "reason": reason}), 404)

    routes = [Route(path, partial(answer, make), methods=["GET"]) for path, make in _PAGES.items()]
    routes += [
        Route("/style.css", lambda _: Response(style(), media_type="text/css"), methods=["GET"]),
        Route("/icon.svg", lambda _: Response(_ICON, media_type="image/svg+xml"), methods=["GET"]),
    ]
    names = ["127.0.0.1", "localhost", "::1", "[::1]", host] if is_loopback(host) else ["*"]
    middleware = [Middleware(_Headers), Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={404: nothing})


class _Headers:
    """Adds :data:`HEADERS` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((name.lower().encode(), value.encode()) for name, value in HEADERS.items()),
                ]
            await send(message)

        await self.app(scope, receive, with_headers)
