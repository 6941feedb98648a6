"""The FastAPI application: what isn't proxied. Model list, health, metrics, status, explain.

`/status` and `/explain` tell addresses and what others asked, so they are open on this machine
only (`balancer/core/http/local_clients.py`), and with the admin key from elsewhere. The other routes are for everybody.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from balancer.core.errors import (
    BadRequestError,
    BalancerError,
    BodyTooLargeError,
    MethodNotAllowedError,
    ModelNotFoundError,
    PathNotFoundError,
)
from balancer.core.fleet.snapshot import Fleet
from balancer.core.fleet.view import (
    RankFacts,
    example_status,
    merge_models,
    readiness,
    render_instance,
)
from balancer.core.http.described_paths import with_engine_paths
from balancer.core.http.generate import read_generate
from balancer.core.http.openai_errors import render_error
from balancer.core.http.own_mark import BALANCER
from balancer.core.http.rewrite import decode_body, encode_body
from balancer.core.load.ledger import LoadLedger
from balancer.core.prompt.encoded_items import EncodedItems
from balancer.core.request import SPLIT, Endpoint, GenerateRequest
from balancer.core.routing.explain import explain_encode, render_plan
from balancer.core.settings.control import AdminSettings
from balancer.guards import guard
from balancer.routing.router import Router
from balancer.siblings import Views
from balancer.tokens.reader import PromptReader
from indexer.core.types import InstanceId

DESCRIPTION = """
Cache-aware load balancer for vLLM. OpenAI paths (`/v1/chat/completions`, `/v1/completions`, and what
else the engines serve) are proxied: what is told of them here (`engines`) is the least that all engines have in common.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """What the routes show and use."""

    fleet: Callable[[], Fleet]
    router: Router
    reader: PromptReader
    ledger: LoadLedger
    views: Views
    encoded: EncodedItems
    clock: Callable[[], float]
    admin: Callable[[], AdminSettings]
    summary: Callable[[], Mapping[str, Any]]
    """Configuration without secrets."""
    breaker: Callable[[InstanceId], Mapping[str, Any]]
    index_status: Callable[[], RankFacts]
    tokens: Callable[[], Mapping[str, Any]]
    """By model where tokens come from, and how they compare with the engine's."""
    max_body_bytes: int
    """Of what `/explain` is asked."""
    conflicts: Callable[[], Sequence[str]]
    """Sentences about instances that can't hand over to each other."""
    version: str
    balancer_id: str
    """By which other balancers know that this is none of their engines."""
    control: APIRouter
    """What changes the fleet and its engines."""


def create_routes(
    surface: Surface,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """Build the application."""
    # Fleets often have no way out: the docs page brings its scripts along instead of a CDN's.
    api = FastAPIOffline(
        title="kvlb",
        version=surface.version,
        description=DESCRIPTION,
        lifespan=lifespan,
        redoc_url=None,
    )
    api.state.is_draining = False
    api.state.is_broken = False
    add_error_answers(api)
    _add_model_routes(api, surface)
    _add_process_routes(api, surface)
    _add_operator_routes(api, surface)
    api.include_router(surface.control)
    _describe_engine_paths(api)
    return api


def _describe_engine_paths(api: FastAPI) -> None:
    """Add to the document what stands in front of this application."""
    own_paths = api.openapi

    def describe() -> dict[str, Any]:
        if api.openapi_schema is None:
            api.openapi_schema = with_engine_paths(own_paths())
        return api.openapi_schema

    # The way that FastAPI documents to extend its document.
    api.openapi = describe  # type: ignore[method-assign]


def add_error_answers(api: FastAPI) -> None:
    """Answer every error in OpenAI's form."""
    api.add_exception_handler(BalancerError, _answer_error)
    api.add_exception_handler(HTTPException, _answer_http_error)
    api.add_exception_handler(RequestValidationError, _answer_invalid)


_NOT_NOW: dict[int | str, dict[str, Any]] = {503: {"description": "It isn't, and why."}}


def _add_model_routes(api: FastAPI, surface: Surface) -> None:
    mark = {BALANCER: surface.balancer_id}

    @api.head("/v1/models", include_in_schema=False)
    @api.get("/v1/models", tags=["public"])
    async def list_models() -> Response:
        """Every model and adapter that can be asked for now, each once."""
        return _json({"object": "list", "data": merge_models(surface.fleet())}, headers=mark)

    @api.get("/v1/models/{model:path}", tags=["public"])
    async def show_model(model: str) -> Response:
        """One model's card, as its engine gave it."""
        for card in merge_models(surface.fleet()):
            if card["id"] == model:
                return _json(card)
        raise ModelNotFoundError("no available instance serves this model", param="model")


def _add_process_routes(api: FastAPI, surface: Surface) -> None:
    mark = {BALANCER: surface.balancer_id}

    @api.head("/health", include_in_schema=False)
    @api.get("/health", tags=["public"], responses=_NOT_NOW)
    async def health() -> Response:
        """200 while the process is alive, whatever the engines do; 503 if it has to be restarted."""
        if api.state.is_broken:
            return _json({"status": "broken"}, 503, mark)
        return _json({"status": "ok"}, headers=mark)

    @api.head("/ready", include_in_schema=False)
    @api.get("/ready", tags=["public"], responses=_NOT_NOW)
    async def ready() -> Response:
        """200 if requests can be routed, else 503 with what keeps instances out."""
        is_ready, reasons = readiness(surface.fleet())
        if api.state.is_draining or api.state.is_broken:
            is_ready, reasons = False, ["this balancer is shutting down"]
        return _json({"ready": is_ready, "reasons": reasons}, 200 if is_ready else 503, mark)

    @api.get("/healthcheck", include_in_schema=False)
    async def healthcheck() -> Response:
        """What the NIXL toy proxy answers there. Like it, it says nothing of the engines' health."""
        counts = example_status(surface.fleet())
        return _json(
            {
                "status": "ok",
                "prefill_instances": counts["prefill_node_count"],
                "decode_instances": counts["decode_node_count"],
            }
        )

    @api.get("/metrics", tags=["public"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus metrics, of all workers together."""
        # On the loop: gauges read the load ledger, which belongs to it.
        return Response(await surface.views.exposition(), media_type=CONTENT_TYPE_LATEST)


def _add_operator_routes(api: FastAPI, surface: Surface) -> None:
    guarded = [Depends(guard(surface.admin))]

    @api.get("/status", tags=["operator"], dependencies=guarded)
    async def status() -> Response:
        """Instances with health, models, load and cache knowledge by rank; the settings in use.

        With the fields of vLLM's example proxies: how many prefill and decode instances, and where.
        """
        fleet = surface.fleet()
        facts = surface.index_status()
        is_ready, reasons = readiness(fleet)
        return _json(
            {
                "version": surface.version,
                "ready": is_ready and not api.state.is_draining,
                "draining": api.state.is_draining,
                "reasons": reasons,
                "conflicts": surface.conflicts(),
                "index_problem": surface.router.index_problem,
                "tokens": surface.tokens(),
                "instances": [
                    render_instance(
                        each, surface.ledger, facts, surface.router.belief, surface.breaker(each.id)
                    )
                    for each in fleet.instances
                ],
                **example_status(fleet),
                "config": surface.summary(),
            }
        )

    @api.post("/explain", tags=["operator"], dependencies=guarded, openapi_extra=EXPLAIN_BODY)
    async def explain(request: Request, path: str | None = None) -> Response:
        """What would be done with a request, and why. Nothing is sent, booked or counted.

        The body is the OpenAI body itself (`?path=` names the endpoint), or
        `{"path": ..., "body": {...}}`. Without a path a body with a `prompt` is a completion, any
        other a chat.
        """
        fleet = surface.fleet()
        asked = read_explain_request(await _read_body(request, surface.max_body_bytes), path, fleet)
        prompt = await surface.reader.read(fleet, asked)
        plan = await surface.router.explain(fleet, asked, prompt)
        encode = explain_encode(
            asked,
            fleet,
            surface.encoded,
            lambda each: sum(surface.ledger.load(rank).requests for rank in each.rank_ids()),
            surface.clock(),
        )
        return _json({"model": asked.model, **render_plan(plan, prompt), "encode": encode})

    @api.get("/explain/recent", tags=["operator"], dependencies=guarded)
    async def recent(limit: Annotated[int, Query(ge=1, le=1000)] = 50) -> Response:
        """The last decisions with what was predicted and what the engines delivered.

        Up to 100 of them with every candidate's terms, as `/explain` shows them (`plan`).
        """
        return _json({"decisions": await surface.views.recent(limit)})


EXPLAIN_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"type": "object"},
                "example": {
                    "path": Endpoint.COMPLETIONS.value,
                    "body": {"model": "my-model", "prompt": "Once upon a time"},
                },
            }
        },
    }
}


async def _read_body(request: Request, limit_bytes: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit_bytes:
            raise BodyTooLargeError(f"the body is over {limit_bytes} bytes")
    return bytes(body)


def read_explain_request(raw_body: bytes, path: str | None, fleet: Fleet) -> GenerateRequest:
    """Read what `/explain` is asked. Raises RequestError or NoInstanceError."""
    body = decode_body(raw_body).value
    if isinstance(body.get("body"), dict):
        path, body = body.get("path", path), body["body"]
        raw_body = encode_body(body)
    if path is None:
        is_text = "messages" not in body and ("prompt" in body or "prompt_embeds" in body)
        path = (Endpoint.COMPLETIONS if is_text else Endpoint.CHAT).value
    if path not in SPLIT:
        valid = " or ".join(each.value for each in SPLIT)
        raise BadRequestError(f"`path` must be {valid}", param="path")
    return read_generate(Endpoint(path), raw_body, fleet, request_id="explain")


def _json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


async def _answer_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, BalancerError):
        raise error
    rendered = render_error(error, path=request.url.path)
    headers = {name.decode(): value.decode() for name, value in rendered.headers}
    return Response(rendered.body, rendered.status, headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, in the same shape as every other error."""
    if isinstance(error, HTTPException) and error.status_code == 405:
        allow = next(
            (value for name, value in (error.headers or {}).items() if name.lower() == "allow"),
            None,
        )
        refused = MethodNotAllowedError("this path does not take this method", allow=allow)
        return await _answer_error(request, refused)
    return await _answer_error(request, PathNotFoundError("there is no such path"))


async def _answer_invalid(request: Request, error: Exception) -> Response:
    """Refuse a query parameter of the wrong type or out of range."""
    first = error.errors()[0] if isinstance(error, RequestValidationError) else {}
    name = str((first.get("loc") or ("", "?"))[-1])
    message = f"`{name}`: {first.get('msg', 'invalid')}"
    return await _answer_error(request, BadRequestError(message, param=name))
