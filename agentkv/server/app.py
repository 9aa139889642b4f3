"""The FastAPI app: routes, error bodies, and the lines to paste into a client's settings. No logic of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from agentkv.errors import AgentkvError, EngineFault, UnknownOption
from agentkv.server.auth import Auth
from agentkv.server.chat import Chat
from agentkv.server.job import Threads
from agentkv.server.metrics import CONTENT_TYPE, Metrics
from agentkv.server.ports import RuntimePort
from agentkv.server.seats import Seats
from agentkv.server.sessions import Sessions
from agentkv.server.wire import check_model, error_object, json_response
from agentkv.types import Policy


def create_app(
    runtime: RuntimePort,
    *,
    api_keys: Sequence[str] = (),
    policy: Policy | None = None,
    log: Callable[[str], Any] = print,
) -> FastAPI:
    """An app that serves this runtime; it does not close it.

    api_keys: accepted bearer keys, each its own tenant; none: everyone is one tenant. policy: pruning for sessions that bring
    none. log: gets one line a turn.
    """
    app = FastAPI(title="agentkv", docs_url="/docs", redoc_url=None)
    auth, metrics, threads = Auth(api_keys), Metrics(runtime), Threads()
    seats = Seats(runtime, policy)
    chat = Chat(runtime, seats, auth, metrics, threads, log)
    sessions = Sessions(runtime, seats, auth, metrics, threads, log, policy)
    add_probes(app, runtime, auth, metrics, threads)
    add_errors(app, metrics)

    async def completions(request: Request) -> Response:
        return await chat(request)

    app.add_api_route(
        "/v1/chat/completions", completions, methods=["POST"], summary="Continue a conversation", response_model=None
    )
    app.include_router(sessions.router())
    return app


def add_probes(app: FastAPI, runtime: RuntimePort, auth: Auth, metrics: Metrics, threads: Threads) -> None:
    """Models, health, readiness, metrics."""
    model = {
        "id": runtime.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "agentkv",
        "max_model_len": runtime.window,
    }

    async def models(request: Request) -> Response:
        auth.tenant(request)
        return json_response({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        auth.tenant(request)
        check_model(request.path_params["name"], runtime.model_name)
        return json_response(model)

    async def healthz() -> Response:
        return json_response({"alive": True})

    async def readyz() -> Response:
        trouble = runtime.trouble()
        return json_response({"ready": True}) if trouble is None else json_response({"ready": False, "reason": trouble}, 503)

    async def scrape(request: Request) -> Response:
        auth.tenant(request)  # counts tell one tenant about another
        return Response(await threads.call(metrics.render), headers={"Content-Type": CONTENT_TYPE})

    for path, answer, summary in (
        ("/v1/models", models, "The model served here"),
        ("/v1/models/{name:path}", one_model, "The model served here, by name"),
        ("/healthz", healthz, "The process is alive"),
        ("/readyz", readyz, "Tokens progress while work is queued"),
        ("/metrics", scrape, "Prometheus metrics"),
    ):
        app.add_api_route(path, answer, methods=["GET"], summary=summary, response_model=None)


def add_errors(app: FastAPI, metrics: Metrics) -> None:
    """Every error has the OpenAI body and its class's status."""

    async def ours(request: Request, error: Exception) -> Response:
        if not isinstance(error, AgentkvError):
            raise error
        metrics.failed(_route(request), error.code)
        return error_response(error)

    async def http(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        known = UnknownOption(f"{request.method} {request.url.path}: no such route", hint="See /docs for the routes")
        metrics.failed("other", known.code)
        return json_response(error_object(known), status, getattr(error, "headers", None))

    async def foreign(request: Request, error: Exception) -> Response:
        fault = EngineFault(f"internal error: {type(error).__name__}: {error}")
        metrics.failed(_route(request), fault.code)
        return error_response(fault)

    app.add_exception_handler(AgentkvError, ours)
    app.add_exception_handler(Exception, foreign)
    app.add_exception_handler(HTTPException, http)


def error_response(error: AgentkvError) -> Response:
    """The body, status and headers of an error."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_object(error), error.http_status, headers)


def paste_lines(base_url: str, model: str, window: int | None = None) -> str:
    """Settings for three clients, ready to paste. window: the most tokens of a prompt (OpenHands does not ask for it)."""
    limit = "" if window is None else f"max_input_tokens={window}, "
    url = base_url.rstrip("/")
    url = url if url.endswith("/v1") else url + "/v1"
    return f"""\
serving {model} at {url}

mini-SWE-agent (agentkv.yaml, then: MSWEA_CONFIGURED=true mini -c mini.yaml -c agentkv.yaml):
  model:
    model_name: "openai/{model}"
    cost_tracking: ignore_errors
    model_kwargs:
      api_base: "{url}"
      api_key: "none"

OpenHands SDK:
  LLM(model="openai/{model}", base_url="{url}", api_key=SecretStr("none"), usage_id="agent",
      {limit}input_cost_per_token=0.0, output_cost_per_token=0.0)

openai client:
  client = OpenAI(base_url="{url}", api_key="none")
  client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "hello"}}])
"""


def _route(request: Request) -> str:
    """A label of bounded variety."""
    path = request.url.path
    if path == "/v1/chat/completions":
        return "chat"
    return "sessions" if path.startswith("/v1/sessions") else "other"
