"""The ASGI application: requests in, answers of `bunkbed.serve.source` out."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

import anyio
import anyio.to_thread
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, Strict
from starlette.datastructures import State
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

import bunkbed
from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError
from bunkbed.serve.answers import ARROW, encode, media_type_of
from bunkbed.serve.errors import ERRORS, answer_errors
from bunkbed.serve.metrics import CONTENT_TYPE, Metrics
from bunkbed.serve.settings import ServeSettings
from bunkbed.serve.source import Found, Source, opened
from bunkbed.train.settings.run_config import CONFIG_NAME

#: Seconds within which the body of a request must arrive.
_BODY_S = 10.0
#: Requests whose bodies may be arriving, for each that may wait for its answer.
_ARRIVING = 4
#: Lookups at once; more wait. One reads from the disk while another encodes; more would wait for the interpreter.
_LOOKUPS = 2
_Int = Annotated[int, Strict()]
_Label = Annotated[int, Strict()] | Annotated[str, Strict()]
# One bad element is enough for an answer: an error of each of a million would block the server.
_Ints = Annotated[list[_Int], Field(fail_fast=True)]
_Labels = Annotated[list[_Label], Field(fail_fast=True)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LookupBody(_Body):
    """Rows by id, or by label in a training run. `table` may be left out where there is one."""

    ids: _Ints | None = None
    labels: _Labels | None = None
    table: str | None = None

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"ids": [3, 1, 4]}]})


class NeighborsBody(LookupBody):
    """The stored rows most similar to each given one."""

    k: _Int = 10
    metric: Literal["dot", "cosine"] = "dot"

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"ids": [3], "k": 5}]})


class RecommendBody(_Body):
    """The items with the highest scores for each user, by their labels in the training file."""

    users: _Labels
    k: _Int = 10
    include_seen: bool = False
    items: _Labels | None = None

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"users": ["u-17"], "k": 5}]})


def create_app(settings: ServeSettings, source: Source | None = None) -> FastAPI:
    """Return the application.

    Args:
        settings: what is served, and the limits.
        source: open already, and closed by the caller; None: the application opens and closes its own.
    """
    app = FastAPI(
        title=f"Bunkbed: {Path(settings.path).resolve().name}",
        version=bunkbed.__version__,
        lifespan=_lifespan(settings, source),
        redoc_url=None,
    )
    is_trained = (Path(settings.path) / CONFIG_NAME).exists()
    lookups, scans = anyio.CapacityLimiter(_LOOKUPS), anyio.CapacityLimiter(1)
    binary: dict[int | str, Json] = {
        200: {"content": {ARROW: {}}, "description": "Columns of equal length, and the number of the commit"},
        **ERRORS,
    }

    async def answer(request: Request, limiter: anyio.CapacityLimiter, find: Callable[[], Found]) -> Response:
        media_type = media_type_of(request.headers.get("accept", ""))

        def work() -> bytes:
            began = time.perf_counter()
            encoded = encode(find(), media_type)
            metrics: Metrics = request.app.state.metrics
            metrics.answered(request.url.path, time.perf_counter() - began)
            return encoded

        return Response(await anyio.to_thread.run_sync(work, limiter=limiter), media_type=media_type)

    @app.post("/lookup", responses=binary, summary="Rows")
    async def lookup(request: Request, body: LookupBody) -> Response:
        source: Source = request.app.state.source
        return await answer(request, lookups, lambda: source.lookup(body.table, body.ids, body.labels))

    @app.post("/neighbors", responses=binary, summary="The most similar rows")
    async def neighbors(request: Request, body: NeighborsBody) -> Response:
        source: Source = request.app.state.source
        return await answer(
            request, scans, lambda: source.neighbors(body.table, body.ids, body.labels, body.k, body.metric)
        )

    @app.post("/recommend", responses=binary, summary="The best items of users", include_in_schema=is_trained)
    async def recommend(request: Request, body: RecommendBody) -> Response:
        source: Source = request.app.state.source
        return await answer(request, scans, lambda: source.recommend(body.users, body.k, body.include_seen, body.items))

    @app.get("/info", summary="What is served")
    async def info(request: Request) -> JSONResponse:
        return JSONResponse(await anyio.to_thread.run_sync(request.app.state.source.facts))

    @app.get("/healthz", summary="200 while the rows are as fresh as they must be, otherwise 503")
    async def healthz(request: Request) -> JSONResponse:
        return JSONResponse(await anyio.to_thread.run_sync(request.app.state.source.health))

    @app.get("/metrics", summary="Counters for Prometheus", response_class=Response)
    async def metrics(request: Request) -> Response:
        counters: Metrics = request.app.state.metrics
        with suppress(BunkbedError, OSError, ValueError):  # of a reader whose files are gone; its age says so
            await anyio.to_thread.run_sync(counters.update)
        return Response(await anyio.to_thread.run_sync(counters.render), media_type=CONTENT_TYPE)

    bodies: dict[str, type[BaseModel]] = {
        "/lookup": LookupBody,
        "/neighbors": NeighborsBody,
        "/recommend": RecommendBody,
    }
    answer_errors(app, {path: list(body.model_fields) for path, body in bodies.items()})
    paths = {getattr(route, "path", "") for route in app.routes}
    app.add_middleware(_Limits, settings=settings, paths=paths, state=app.state)
    return app


def _lifespan(settings: ServeSettings, given: Source | None) -> Lifespan[FastAPI]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with opened(settings, given) as source:
            app.state.source = source
            app.state.metrics = Metrics(source, settings.ram_of_each)
            updates = asyncio.create_task(_update(app.state.metrics, settings.parent))
            yield
            updates.cancel()

    return lifespan


async def _update(metrics: Metrics, parent: int) -> None:
    """Take the present values each second: another worker may be asked for them. End where the parent has ended."""
    while True:
        if parent and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)  # a worker whose parent was killed would keep the port
        with suppress(BunkbedError, OSError, ValueError):
            await anyio.to_thread.run_sync(metrics.update)
        await asyncio.sleep(1.0)


class _Limits:
    """Bounds the body and the number of requests, and counts them. An ASGI application around another."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, paths: set[str], state: State) -> None:
        self._app = app
        self._settings = settings
        self._paths = paths
        self._state = state
        self._now = 0  # questions that have arrived and are not answered
        self._arriving = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"
        began, status = time.perf_counter(), 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._bounded(scope, receive, noting, is_question=scope["method"] == "POST")
        finally:
            self._state.metrics.count(path, status, time.perf_counter() - began)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send, *, is_question: bool) -> None:
        most = self._settings.max_waiting
        if self._arriving >= _ARRIVING * most:
            await _refuse(send, 503, f"more than {_ARRIVING * most} requests are arriving at once; try again later")
            return
        self._arriving += 1
        try:
            async with asyncio.timeout(_BODY_S):
                body = await self._body(receive)
        except TimeoutError:
            await _refuse(send, 408, f"the request did not arrive within {_BODY_S:g} s")
            return
        except ClientDisconnect:
            return
        finally:
            self._arriving -= 1
        if body is None:
            await _refuse(send, 413, f"the request has more than {self._settings.max_body} bytes (--max-body)")
            return
        if is_question and self._now >= most:
            await _refuse(send, 503, f"more than {most} requests at once; try again later")
            return
        self._now += is_question
        try:
            await self._pass_on(scope, body, receive, send)
        finally:
            self._now -= is_question

    async def _pass_on(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        is_read = False

        async def replay() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()  # the client's leaving
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _body(self, receive: Receive) -> bytes | None:
        """Return the body, or None where it is larger than it may be."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._settings.max_body:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)


async def _refuse(send: Send, status: int, text: str) -> None:
    response = JSONResponse({"error": text}, status)
    headers = [*response.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})
