"""Transcriptions: uploads, and sessions over a WebSocket. What was "said" is the size of the sound."""

import base64
import re
from typing import Any

import msgspec
import structlog

from simulator.core.errors import InvalidBodyError, RequestRefusedError, UnknownModelError
from simulator.engine import SimulatedEngine
from simulator.exchange import Exchange, Receive, Scope, Send

_BYTES_PER_S = 32_000
"""PCM16 at 16 kHz."""
_NAME = re.compile(rb'\bname="([^"]*)"')

_logger = structlog.get_logger(__name__)


async def transcribe(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Answer an upload."""
    form = read_form(exchange.headers.get("content-type", ""), exchange.body)
    sound = form.get("file")
    if sound is None:
        raise InvalidBodyError("Field required: file", param="body.file")
    engine.find_adapter(form.get("model", b"").decode())
    seconds = -(-len(sound) // _BYTES_PER_S)
    if form.get("stream") == b"true":
        await exchange.start_stream()
        for word in describe(len(sound)).split(" "):
            await exchange.send_event({"object": "transcription.chunk", "text": word})
        await exchange.end_stream()
    elif form.get("response_format") == b"text":
        await exchange.send(describe(len(sound)).encode(), content_type="text/plain")
    else:
        usage = {"type": "duration", "seconds": seconds}
        await exchange.send_json({"text": describe(len(sound)), "usage": usage})


def describe(size_bytes: int) -> str:
    """What is understood of a sound."""
    return f"{size_bytes} bytes of sound"


def read_form(content_type: str, body: bytes) -> dict[str, bytes]:
    """Return the parts of a form by their names, the last one of each."""
    _, found, boundary = content_type.partition("boundary=")
    if not found:
        raise InvalidBodyError("Unsupported Media Type: expected a form", param="body")
    parts: dict[str, bytes] = {}
    for part in body.split(b"--" + boundary.strip('"').encode())[1:-1]:
        head, _, value = part.partition(b"\r\n\r\n")
        name = _NAME.search(head)
        if name is not None:
            parts[name.group(1).decode()] = value.removesuffix(b"\r\n")
    return parts


class RealtimeSession:
    """One session of /v1/realtime."""

    def __init__(self, engine: SimulatedEngine, receive: Receive, send: Send) -> None:
        self._engine = engine
        self._receive = receive
        self._send = send
        self._is_model_known = False
        self._sound_bytes = 0

    async def run(self) -> None:
        """Answer events until the client closes."""
        await self._receive()
        await self._send({"type": "websocket.accept"})
        session = {"type": "session.created", "id": f"sess-{self._engine.random_hex(32)}"}
        await self._tell({**session, "created": int(self._engine.wall_clock())})
        while (message := await self._receive())["type"] == "websocket.receive":
            await self._on_message(message.get("text") or "")
        _logger.debug("session_closed", code=message.get("code"))

    async def _on_message(self, text: str) -> None:
        try:
            event = msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError:
            await self._refuse("Invalid JSON", "invalid_json")
            return
        match event.get("type"):
            case "session.update":
                await self._on_update(event.get("model"))
            case "input_audio_buffer.append":
                self._sound_bytes += len(base64.b64decode(event.get("audio", "")))
            case "input_audio_buffer.commit":
                await self._on_commit(is_final=bool(event.get("final")))
            case other:
                await self._refuse(f"Unknown event type: {other}", "unknown_event")

    async def _on_update(self, model: str | None) -> None:
        try:
            self._engine.find_adapter(model)
        except UnknownModelError as error:
            await self._refuse(error.message, "model_not_found")
        else:
            self._is_model_known = True

    async def _on_commit(self, *, is_final: bool) -> None:
        if not self._is_model_known:
            await self._refuse(
                "Model not validated. Make sure to validate the model by sending a session.update "
                "event.",
                "model_not_validated",
            )
        elif is_final:
            text = describe(self._sound_bytes)
            for word in text.split(" "):
                await self._tell({"type": "transcription.delta", "delta": word})
            words = len(text.split(" "))
            usage = {"prompt_tokens": 1, "total_tokens": 1 + words, "completion_tokens": words}
            await self._tell({"type": "transcription.done", "text": text, "usage": usage})
            self._sound_bytes = 0

    async def _tell(self, event: dict[str, Any]) -> None:
        await self._send({"type": "websocket.send", "text": msgspec.json.encode(event).decode()})

    async def _refuse(self, error: str, code: str) -> None:
        await self._tell({"type": "error", "error": error, "code": code})


async def serve_session(
    engine: SimulatedEngine, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer a WebSocket: a session, or the refusal of a framework that has no such path."""
    if scope["path"] != "/v1/realtime" or engine.settings.serves != "transcription":
        await receive()
        await send({"type": "websocket.close"})
        return
    try:
        await RealtimeSession(engine, receive, send).run()
    except (OSError, RequestRefusedError):
        _logger.debug("session_lost")
