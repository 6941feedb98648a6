"""Records somebody else's requests: a small OpenAI endpoint in front of the engines.

Completions and chats go to the ranks in turn and into the files. Answers are passed on whole, a
stream's, too: this is for recording, not for serving. Everything else goes to the first engine.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from balancer.core.fleet.snapshot import Role
from balancer.core.request import SPLIT
from balancer.server import listen
from kvlb.engine_http import Answer, CallFailedError
from kvlb.errors import SettingsError
from kvlb.record.asking import ask
from kvlb.record.stations import Station
from kvlb.record.writer import CaptureWriter
from kvlb.status_server import serve_status

PHASE = "load"
LABEL = "client"
JSON, STREAM = "application/json", "text/event-stream"
NO_ANSWER = Answer(
    status=502,
    body=None,
    text='{"error": {"message": "the engine did not answer", "type": "BadGatewayError"}}',
)


class RecordingProxy:
    """One endpoint for all stations; `finished` is set after so many requests."""

    def __init__(
        self, stations: Sequence[Station], writer: CaptureWriter, *, requests: int | None
    ) -> None:
        """Raises SettingsError if an instance only prefills: both legs are a balancer's work."""
        if any(each.instance.role is not Role.MIXED for each in stations):
            raise SettingsError("--listen: give the instances no role; legs need a balancer")
        self.finished = asyncio.Event()
        self._first = stations[0]
        self._turns = cycle(stations)
        self._writer = writer
        self._left = requests

    async def generate(self, body: Mapping[str, Any]) -> Response:
        """Have the next rank answer, and write it down."""
        exchanged = await ask(next(self._turns), self._writer, body, phase=PHASE, label=LABEL)
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                self.finished.set()
        answer = exchanged.answer or NO_ANSWER
        is_stream = bool(body.get("stream")) and answer.is_ok
        return _response(answer, STREAM if is_stream else JSON)

    async def forward(self, path: str) -> Response:
        """Hand a page of the first engine on, unrecorded."""
        try:
            return _response(await self._first.engine.get(path), JSON)
        except CallFailedError:
            return _response(NO_ANSWER, JSON)


def _response(answer: Answer, media_type: str) -> Response:
    return Response(answer.text, status_code=answer.status, media_type=media_type)


def create_proxy_app(proxy: RecordingProxy) -> FastAPI:
    """The endpoint as an application."""
    api = FastAPI(openapi_url=None)

    async def generate(request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body())
        except (msgspec.DecodeError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return _response(Answer(status=400, body=None, text='{"error": "no JSON"}'), JSON)
        return await proxy.generate(body)

    async def forward(request: Request) -> Response:
        return await proxy.forward(request.url.path)

    for endpoint in SPLIT:
        api.add_api_route(endpoint.value, generate, methods=["POST"])
    api.add_api_route("/{path:path}", forward, methods=["GET"])
    return api


async def serve_proxy(
    proxy: RecordingProxy, *, host: str, port: int, on_listening: Callable[[int], None]
) -> None:
    """Serve until enough was recorded, or cancelled. Raises ListenError."""
    with listen(host, port) as listener:
        await serve_status(
            create_proxy_app(proxy),
            listener=listener,
            stop=proxy.finished,
            on_listening=on_listening,
        )
