"""Streams from any OpenAI endpoint, for `kvlb load` and `kvlb replay`: cheap enough to time tokens.

Over the balancer's own HTTP client, which costs a tenth of httpx per chunk. Proxies of the
environment are ignored, as everywhere here.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from textwrap import shorten
from typing import Final, Self

from balancer.core.errors import (
    BalancerError,
    ConnectTimeoutError,
    EngineClosedError,
    EngineProtocolError,
    EngineTimeoutError,
    EngineUnreachableError,
    StreamCutError,
)
from balancer.dataplane.connection import UpstreamAnswer
from balancer.dataplane.upstream import Upstream

CONNECT_TIMEOUT_S: Final = 10.0
MOST_ERROR_BYTES: Final = 64 * 1024
MOST_LIST_BYTES: Final = 16 * 1024 * 1024
MOST_REASON_CHARS: Final = 200
_KINDS: Final[tuple[tuple[type[BalancerError], str], ...]] = (
    (EngineUnreachableError, "unreachable"),
    (ConnectTimeoutError, "unreachable"),
    (EngineClosedError, "closed"),
    (StreamCutError, "cut"),
    (EngineTimeoutError, "silent"),
    (EngineProtocolError, "no_http"),
)


class CallFailedError(Exception):
    """A call brought no whole answer: its kind, for counting, and a sentence."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class OpenAiEndpoint:
    """One base URL, with its key. `async with` closes its connections."""

    def __init__(self, url: str, *, key: str | None = None, silence_s: float = 300.0) -> None:
        """`silence_s`: how long nothing may come, first byte included."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._upstream = Upstream(
            connect_timeout_s=CONNECT_TIMEOUT_S,
            first_byte_timeout_s=silence_s,
            idle_timeout_s=silence_s,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._upstream.close()

    async def first_model(self) -> str:
        """The first model listed. Raises CallFailedError."""
        answer = await self._send("GET", "/v1/models", b"", {})
        try:
            listed = await answer.read(MOST_LIST_BYTES)
            return str(json.loads(listed)["data"][0]["id"])
        except BalancerError as error:
            raise _failed(error) from error
        except (ValueError, LookupError, TypeError) as error:
            raise CallFailedError("no_model", "the answer lists no model") from error
        finally:
            answer.close()

    async def stream(
        self,
        path: str,
        body: bytes,
        on_piece: Callable[[bytes], None],
        headers: Mapping[str, str] | None = None,
    ) -> Mapping[str, str]:
        """Hand `on_piece` the answer's bytes in the moment they arrive; return its headers.

        Raises CallFailedError; what was handed over before may be anything.
        """

        def take(piece: bytes) -> bool:
            on_piece(piece)
            return True

        answer = await self._send("POST", path, body, headers or {})
        try:
            while not await answer.hand_to(take):
                pass
        except BalancerError as error:
            raise _failed(error) from error
        finally:
            answer.close()
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in answer.headers}

    async def _send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> UpstreamAnswer:
        """An answer of status 200; whoever gets it closes it."""
        pairs = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
        ]
        pairs.append((b"accept", b"text/event-stream, application/json"))
        if body:
            pairs.append((b"content-type", b"application/json"))
        if self._key:
            pairs.append((b"authorization", f"Bearer {self._key}".encode("latin-1")))
        try:
            answer = await self._upstream.send(self.url, method, path, pairs, body)
        except BalancerError as error:
            raise _failed(error) from error
        if answer.status == HTTPStatus.OK:
            return answer
        try:
            raise CallFailedError(
                f"status_{answer.status}", f"status {answer.status}{await _reason(answer)}"
            )
        finally:
            answer.close()


def _failed(error: BalancerError) -> CallFailedError:
    kind = next((name for each, name in _KINDS if isinstance(error, each)), "failed")
    return CallFailedError(kind, error.message)


async def _reason(answer: UpstreamAnswer) -> str:
    """What the body says of an error, in OpenAI's words or vLLM's older ones."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            body = json.loads(await answer.read(MOST_ERROR_BYTES))
    except (BalancerError, ValueError, TimeoutError, RecursionError):
        return ""
    if not isinstance(body, dict):
        return ""
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else body.get("message") or error
    if not isinstance(message, str):
        return ""
    return f": {shorten(message, MOST_REASON_CHARS, placeholder=' ...')}"
