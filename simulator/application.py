"""One engine's HTTP surface as a plain ASGI application: who answers what, and how errors look."""

import asyncio
from typing import Any, TypeVar

import msgspec
import structlog
from prometheus_client import CONTENT_TYPE_LATEST

from simulator.bodies import DetokenizeBody, TokenizeBody, decode_body
from simulator.core import tokenizer
from simulator.core.errors import RequestRefusedError
from simulator.core.event_faults import EventFaults
from simulator.engine import ReceivedRequest, SimulatedEngine
from simulator.exchange import ClientGoneError, Exchange, Receive, Scope, Send, render_error
from simulator.exposition import render_metrics, render_server_info, render_state
from simulator.misfortunes import Misfortune
from simulator.model_routes import Route, kept_response_routes, model_routes
from simulator.prompts import read_tokenize_prompt
from simulator.speech_api import serve_session

_logger = structlog.get_logger(__name__)

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
_FIRST_RELEASE_WITH_SOURCES = (0, 31, 0)
_PHRASES = {404: "Not Found", 405: "Method Not Allowed"}


class EngineApplication:
    """Routes requests to one engine."""

    def __init__(self, engine: SimulatedEngine, sources: dict[str, dict[str, object]]) -> None:
        self._engine = engine
        self._sources = sources
        self._routes: dict[str, dict[str, Route]] = {
            **model_routes(engine),
            "/v1/models": {"GET": self._list_models},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/health": {"GET": self._report_health},
            "/ping": {"GET": self._report_health, "POST": self._report_health},
            "/version": {"GET": self._report_version},
            "/load": {"GET": self._report_load},
            "/metrics": {"GET": self._report_metrics},
            "/simulator/state": {"GET": self._report_state},
            "/server_info": {"GET": self._report_server_info},
            "/simulator/faults": {"GET": self._report_faults, "POST": self._set_faults},
            "/simulator/misfortunes": {"POST": self._befall},
            "/reset_prefix_cache": {"POST": self._reset_prefix_cache},
            "/sleep": {"POST": self._sleep},
            "/wake_up": {"POST": self._wake_up},
            "/is_sleeping": {"GET": self._report_sleep},
            "/v1/load_lora_adapter": {"POST": self._load_adapter},
            "/v1/unload_lora_adapter": {"POST": self._unload_adapter},
        }
        if engine.settings.tokenizer_info:
            self._routes["/tokenizer_info"] = {"GET": self._report_tokenizer}
        if engine.settings.release >= _FIRST_RELEASE_WITH_SOURCES:
            self._routes["/kv_event_sources"] = {"GET": self._report_sources}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await serve_session(self._engine, scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        try:
            await exchange.read_body()
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(exchange.run_until_gone())
                await self._answer(exchange)
                watch.cancel()
        except* ClientGoneError:
            _logger.debug("client_gone", path=exchange.path)

    async def _answer(self, exchange: Exchange) -> None:
        self._engine.received.append(
            ReceivedRequest(
                method=exchange.method,
                path=exchange.path,
                headers=exchange.headers,
                body=exchange.body,
            )
        )
        if not self._is_allowed(exchange):
            await exchange.send_json({"error": "Unauthorized"}, status=401)
            return
        methods = self._routes.get(exchange.path) or kept_response_routes(
            self._engine, exchange.path
        )
        if methods is None:
            await _refuse_route(exchange, 404)
            return
        route = methods.get(exchange.method)
        if route is None:
            await _refuse_route(exchange, 405)
            return
        try:
            await route(exchange)
        except RequestRefusedError as error:
            settings = self._engine.settings
            status = 200 if settings.hides_errors else error.status
            await exchange.send_json(render_error(error, settings.release), status=status)

    def _is_allowed(self, exchange: Exchange) -> bool:
        key = self._engine.settings.api_key
        if key is None or not exchange.path.startswith(_GUARDED):
            return True
        return exchange.headers.get("authorization") == f"Bearer {key}"

    async def _list_models(self, exchange: Exchange) -> None:
        settings = self._engine.settings
        cards = [
            self._render_card(
                settings.model, settings.model, parent=None, context=settings.context_tokens
            ),
            *(
                self._render_card(name, adapter.path, parent=settings.model, context=None)
                for name, adapter in self._engine.adapters.items()
            ),
        ]
        await exchange.send_json({"object": "list", "data": cards})

    def _render_card(
        self, name: str, root: str, *, parent: str | None, context: int | None
    ) -> dict[str, Any]:
        created = int(self._engine.wall_clock())
        permission = {
            "id": f"modelperm-{self._engine.random_hex(16)}",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": context,
            "permission": [permission],
        }

    async def _tokenize(self, exchange: Exchange) -> None:
        body = decode_body(exchange.body, exchange.headers.get("content-type", ""), TokenizeBody)
        self._engine.find_adapter(body.model)
        token_ids = read_tokenize_prompt(body).token_ids
        texts = tokenizer.describe_tokens(token_ids) if body.return_token_strs else None
        await exchange.send_json(
            {
                "count": len(token_ids),
                "max_model_len": self._engine.settings.context_tokens,
                "tokens": token_ids,
                "token_strs": texts,
            }
        )

    async def _detokenize(self, exchange: Exchange) -> None:
        body = decode_body(exchange.body, exchange.headers.get("content-type", ""), DetokenizeBody)
        self._engine.find_adapter(body.model)
        await exchange.send_json({"prompt": tokenizer.decode(body.tokens)})

    async def _report_tokenizer(self, exchange: Exchange) -> None:
        template = "ChatML, by simulator.core.chat_template"
        told = {"tokenizer_class": "ByteTokenizer", "chat_template": template}
        await exchange.send_json(told)

    async def _report_health(self, exchange: Exchange) -> None:
        is_dead = any(rank.core.is_dead for rank in self._engine.ranks)
        status = 503 if is_dead or self._engine.is_draining else 200
        await exchange.send(b"", content_type="", status=status)

    async def _report_server_info(self, exchange: Exchange) -> None:
        """As in development mode, as far as transfers are concerned."""
        await exchange.send_json(render_server_info(self._engine))

    async def _report_version(self, exchange: Exchange) -> None:
        await exchange.send_json({"version": self._engine.settings.version})

    async def _report_load(self, exchange: Exchange) -> None:
        in_flight = sum(rank.in_flight for rank in self._engine.ranks)
        await exchange.send_json({"server_load": in_flight})

    async def _report_metrics(self, exchange: Exchange) -> None:
        await exchange.send(render_metrics(self._engine), content_type=CONTENT_TYPE_LATEST)

    async def _report_state(self, exchange: Exchange) -> None:
        await exchange.send_json(render_state(self._engine))

    async def _report_sources(self, exchange: Exchange) -> None:
        await exchange.send_json(self._sources)

    async def _reset_prefix_cache(self, exchange: Exchange) -> None:
        await exchange.send_json({"success": self._engine.reset_prefix_cache()})

    async def _sleep(self, exchange: Exchange) -> None:
        self._engine.sleep()
        await exchange.send(b"", content_type="")

    async def _wake_up(self, exchange: Exchange) -> None:
        self._engine.wake_up()
        await exchange.send(b"", content_type="")

    async def _report_sleep(self, exchange: Exchange) -> None:
        await exchange.send_json({"is_sleeping": self._engine.is_asleep})

    async def _load_adapter(self, exchange: Exchange) -> None:
        body = _decode_plain(exchange.body, _LoadAdapter)
        if body.lora_name in self._engine.adapters and not body.load_inplace:
            raise RequestRefusedError(
                f"The lora adapter '{body.lora_name}' has already been loaded."
            )
        self._engine.load_adapter(body.lora_name, body.lora_path)
        await exchange.send(b"Success", content_type="text/plain")

    async def _unload_adapter(self, exchange: Exchange) -> None:
        self._engine.unload_adapter(_decode_plain(exchange.body, _UnloadAdapter).lora_name)
        await exchange.send(b"Success", content_type="text/plain")

    async def _report_faults(self, exchange: Exchange) -> None:
        faults = self._engine.ranks[0].publisher.faults
        await exchange.send_json(msgspec.to_builtins(faults))

    async def _set_faults(self, exchange: Exchange) -> None:
        self._engine.set_event_faults(_decode_plain(exchange.body, EventFaults))
        await self._report_faults(exchange)

    async def _befall(self, exchange: Exchange) -> None:
        misfortune = _decode_plain(exchange.body, Misfortune)
        misfortunes, is_own = (
            self._engine.misfortunes,
            misfortune.engine == self._engine.places.name,
        )
        if is_own:  # which may keep it from answering later
            misfortunes.check(misfortune)
            await exchange.send_json(msgspec.to_builtins(misfortune), status=202)
            misfortunes.order(misfortune)
        else:
            if failure := await misfortunes.order(misfortune):
                raise RequestRefusedError(failure)
            await exchange.send_json(msgspec.to_builtins(misfortune))


class _LoadAdapter(msgspec.Struct):
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class _UnloadAdapter(msgspec.Struct):
    lora_name: str


_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def _decode_plain(body: bytes, type_: type[_Struct]) -> _Struct:
    """Read a body that isn't one of the OpenAI API's. Raises RequestRefusedError."""
    try:
        return msgspec.json.decode(body, type=type_)
    except msgspec.DecodeError as error:
        raise RequestRefusedError(str(error)) from error


class BootstrapApplication:
    """Mooncake's bootstrap server of one engine: which KV engine is behind each rank."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.read_body()
        if exchange.path != "/query":
            await _refuse_route(exchange, 404)
            return
        ids = self._engine.engine_ids
        workers = {
            str(rank): {"engine_id": each, "worker_addr": {"0": {"0": f"tcp://worker:{rank}"}}}
            for rank, each in enumerate(ids)
        }
        await exchange.send_json(workers)


async def _refuse_route(exchange: Exchange, status: int) -> None:
    phrase = _PHRASES[status]
    error = {"message": phrase, "type": phrase, "param": None, "code": status}
    await exchange.send_json({"error": error}, status=status)
