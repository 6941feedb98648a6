"""Control calls to engines over httpx: probes, ranks, /tokenize. Proxied traffic never comes here.

Every failure leaves as an error of `core.control_errors`; no call retries.
"""

import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Self

import httpx
import msgspec

from balancer.core.control_errors import (
    ENGINE_UNTRUSTED,
    NAME_UNKNOWN,
    NO_FILES,
    EngineCallError,
    EngineDrainingError,
    RenderAbsentError,
    TokenizeRefusedError,
)
from balancer.core.fleet.cache_config import parse_cache_tokens
from balancer.core.fleet.probe_state import SLEEPING, ProbeAnswer, ProbeOutcome
from balancer.core.fleet.transfer_facts import Inquiry, TransferFacts
from balancer.core.http.own_mark import balancer_reason
from balancer.core.prompt.rendered import Rendered, RenderQuestion, read_rendered
from balancer.fleet.control_http import ControlHttp
from balancer.fleet.engine_sockets import NO_FILES_LEFT, causes, tls_context
from indexer.core.model_cards import ServedModels, parse_model_list
from indexer.core.types import InstanceId

KEEP_ALIVE_S = 4.0
"""Below the 5 s after which engines close an idle connection without a word."""

_UNREADABLE = (ValueError, RecursionError)
"""What decoding raises of an answer that is nothing we know, or is nested too deep."""
_REFUSED = frozenset({400, 413, 422})
_ABSENT = frozenset({403, 404, 405, 501})
"""403: there, but off (vLLM 0.30 and later); 501: the Rust frontend's."""


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class _Sleep(msgspec.Struct):
    is_sleeping: bool


class _Version(msgspec.Struct):
    version: str


class EngineClient:
    """Control calls to any instance, with that instance's own key."""

    def __init__(
        self,
        *,
        api_keys: Mapping[InstanceId, str],
        timeout_s: float,
        balancer_id: str = "",
        max_connections: int = 256,
    ) -> None:
        """`balancer_id` is ours: who answers with it is no engine, but us."""
        self._api_keys = api_keys
        self._balancer_id = balancer_id
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._outdated: list[httpx.AsyncClient] = []
        """Calls may be under way on them."""
        self._sleepless: set[InstanceId] = set()
        """Engines that can't sleep, or don't say."""
        self._tls = tls_context()
        self._http = self._open()

    def _open(self) -> httpx.AsyncClient:
        return ControlHttp(
            verify=self._tls,
            timeout=self._timeout_s,
            trust_env=False,
            limits=httpx.Limits(
                max_connections=self._max_connections,
                max_keepalive_connections=self._max_connections,
                keepalive_expiry=KEEP_ALIVE_S,
            ),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for each in (*self._outdated, self._http):
            await each.aclose()

    async def connect_anew(self) -> None:
        """Names lead elsewhere now: no connection is used again. Calls under way go on."""
        before, self._outdated = self._outdated, [self._http]
        self._http = self._open()
        for each in before:
            await each.aclose()

    async def probe(self, instance: InstanceId) -> ProbeAnswer:
        """Ask for health, then for models. Never raises for what the instance does."""
        try:
            await self.check_health(instance)
            models = await self.list_models(instance)
            is_asleep = await self.is_asleep(instance)
        except EngineDrainingError:
            return ProbeAnswer(outcome=ProbeOutcome.DRAINING)
        except EngineCallError as error:
            self._sleepless.discard(instance)  # who comes back may be another process
            return ProbeAnswer(outcome=ProbeOutcome.FAILED, reason=error.reason)
        if is_asleep:
            return ProbeAnswer(outcome=ProbeOutcome.FAILED, reason=SLEEPING, models=models)
        return ProbeAnswer(outcome=ProbeOutcome.OK, models=models)

    async def check_health(self, instance: InstanceId) -> None:
        """Return if it is healthy. Raises EngineDrainingError or EngineCallError."""
        answer = await self._call("GET", instance, "/health")
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise EngineDrainingError("draining")
        _refuse_failure(answer)

    async def is_asleep(self, instance: InstanceId) -> bool:
        """Ask an engine that can sleep (`/is_sleeping`, in development mode) whether it does.

        Raises EngineCallError. One that doesn't know the question is asked once.
        """
        if instance in self._sleepless:
            return False
        answer = await self._call("GET", instance, "/is_sleeping")
        try:
            told = msgspec.json.decode(answer.content, type=_Sleep) if answer.is_success else None
        except _UNREADABLE:
            told = None
        if told is None:
            self._sleepless.add(instance)
            return False
        return told.is_sleeping

    async def list_models(self, instance: InstanceId) -> ServedModels:
        """Read `/v1/models`. Raises EngineCallError."""
        answer = await self._call("GET", instance, "/v1/models")
        _refuse_failure(answer)
        try:
            return parse_model_list(msgspec.json.decode(answer.content))
        except _UNREADABLE as error:
            raise EngineCallError("bad_model_list") from error

    async def find_release(self, instance: InstanceId) -> str:
        """What `/version` says. Raises EngineCallError."""
        answer = await self._call("GET", instance, "/version")
        _refuse_failure(answer)
        try:
            return msgspec.json.decode(answer.content, type=_Version).version
        except _UNREADABLE as error:
            raise EngineCallError("bad_answer") from error

    async def find_ranks(self, instance: InstanceId) -> Sequence[int]:
        """Global ranks as `/kv_event_sources` lists them; none if the engine doesn't say.

        Raises EngineCallError if it could not be asked.
        """
        answer = await self._call("GET", instance, "/kv_event_sources")
        if not answer.is_success:
            return ()  # 404 before vLLM 0.31
        try:
            listed = msgspec.json.decode(answer.content, type=dict[int, Any], strict=False)
        except _UNREADABLE:
            return ()
        return sorted(rank for rank in listed if rank >= 0)

    async def learn(self, inquiry: Inquiry) -> TransferFacts:
        """Ask what a connector has to know. Raises EngineCallError(`transfer_unknown`)."""
        try:
            answer = await self._http.get(inquiry.url)
            if answer.is_success:
                return inquiry.read(msgspec.json.decode(answer.content))
        except (httpx.HTTPError, httpx.InvalidURL, *_UNREADABLE) as error:
            raise EngineCallError("transfer_unknown") from error
        raise EngineCallError("transfer_unknown")

    async def find_cache_tokens(self, instance: InstanceId) -> int | None:
        """Tokens that fit the KV caches of all its ranks; None if it doesn't say.

        Raises EngineCallError if it could not be asked.
        """
        answer = await self._call("GET", instance, "/metrics")
        return parse_cache_tokens(answer.text) if answer.is_success else None

    async def tokenize(self, instance: InstanceId, body: Mapping[str, Any]) -> Sequence[int]:
        """Ids that the engine makes of a prompt. Raises TokenizeRefusedError, EngineCallError."""
        answer = await self._call("POST", instance, "/tokenize", body)
        if answer.status_code in _REFUSED:
            raise TokenizeRefusedError("refused")
        _refuse_failure(answer)
        try:
            return msgspec.json.decode(answer.content, type=_Tokenized).tokens
        except _UNREADABLE as error:
            raise EngineCallError("bad_answer") from error

    async def render(self, instance: InstanceId, question: RenderQuestion) -> Sequence[Rendered]:
        """The prompts that the engine would make of a request.

        Raises RenderAbsentError, TokenizeRefusedError or EngineCallError.
        """
        answer = await self._call("POST", instance, question.path, question.body)
        if answer.status_code in _ABSENT:
            raise RenderAbsentError("no_render")
        if answer.status_code in _REFUSED:
            raise TokenizeRefusedError("refused")
        _refuse_failure(answer)
        try:
            return read_rendered(answer.content)
        except _UNREADABLE as error:
            raise EngineCallError("bad_answer") from error

    async def command(
        self, instance: InstanceId, target: str, body: bytes, *, timeout_s: float
    ) -> tuple[int, bytes]:
        """POST `body` to path and query `target`; status and body of whatever is answered.

        Raises EngineCallError.
        """
        answer = await self._send("POST", instance, target, body, timeout_s=timeout_s)
        return answer.status_code, answer.content

    async def _call(
        self,
        method: str,
        instance: InstanceId,
        path: str,
        body: Mapping[str, Any] | None = None,
    ) -> httpx.Response:
        content = b"" if body is None else msgspec.json.encode(body)
        return await self._send(method, instance, path, content)

    async def _send(
        self,
        method: str,
        instance: InstanceId,
        target: str,
        content: bytes,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        headers = {"content-type": "application/json"} if content else {}
        if key := self._api_keys.get(instance):
            headers["authorization"] = f"Bearer {key}"
        try:
            answer = await self._http.request(
                method,
                f"{instance}{target}",
                headers=headers,
                content=content,
                timeout=httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s,
            )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EngineCallError(_why_unconnected(error)) from error
        except httpx.TimeoutException as error:
            raise EngineCallError("probe_timeout") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineCallError("connection_failed") from error
        except UnicodeError:
            # A key that is no header value. No cause: its text, which a traceback shows, is the key.
            raise EngineCallError("connection_failed") from None
        reason = balancer_reason(answer.headers, self._balancer_id)
        if reason is not None:
            raise EngineCallError(reason)
        return answer


def _why_unconnected(error: Exception) -> str:
    """What httpx says of it is somebody else's text; what it was is behind it."""
    for each in causes(error):
        if isinstance(each, socket.gaierror):
            return NAME_UNKNOWN
        if isinstance(each, ssl.SSLCertVerificationError):
            return ENGINE_UNTRUSTED
        if isinstance(each, OSError) and each.errno in NO_FILES_LEFT:
            return NO_FILES
    return "engine_unreachable"


def _refuse_failure(answer: httpx.Response) -> None:
    if answer.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
        raise EngineCallError("unauthorized")
    if not answer.is_success:
        raise EngineCallError(f"http_{answer.status_code}")
