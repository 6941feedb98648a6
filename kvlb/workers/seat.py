"""What a worker's balancer is given instead of what a single process has: a socket, and company."""

import asyncio
import socket
from collections.abc import Callable, Sequence

import msgspec
import structlog

from balancer.core.decision_log import TimedDecision
from balancer.core.merged_figures import Family, Figures
from balancer.sharing import Company
from balancer.siblings import Views
from kvlb.settings import KvlbSettings
from kvlb.workers.pipe import Load, Pipe, PipeClosedError, Ready

FIGURES, RECENT = "figures", "recent"
PATIENCE_S = 3.0
"""Longer than the parent waits for any worker."""

_logger = structlog.get_logger(__name__)
_figures = msgspec.msgpack.Decoder(list[Family])
_decisions = msgspec.msgpack.Decoder(list[TimedDecision])


def decode_figures(payload: bytes) -> list[Family]:
    """Raises msgspec.DecodeError."""
    return _figures.decode(payload)


def decode_recent(payload: bytes) -> list[TimedDecision]:
    """Raises msgspec.DecodeError."""
    return _decisions.decode(payload)


class PipeChannel:
    """A `Channel` that the parent passes on."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    async def send(self, messages: Sequence[bytes]) -> None:
        if messages:
            self._pipe.send(Load(list(messages)))

    async def receive(self, on_message: Callable[[bytes], None]) -> None:
        def take(messages: Sequence[bytes]) -> None:
            for message in messages:
                on_message(message)

        self._pipe.on_load = take
        await asyncio.Event().wait()


class PipeSiblings:
    """`Siblings` through the parent."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    async def figures(self) -> Figures | None:
        payload = await self._ask(FIGURES, 0)
        return None if payload is None else decode_figures(payload)

    async def recent(self, limit: int) -> Sequence[TimedDecision] | None:
        payload = await self._ask(RECENT, limit)
        return None if payload is None else decode_recent(payload)

    async def _ask(self, what: str, limit: int) -> bytes | None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                if payload := await self._pipe.ask(what, limit):
                    return payload
        except (TimeoutError, PipeClosedError):
            pass
        _logger.warning("parent_silent", asked=what)
        return None  # this process's own will do


class Seat:
    """Of one worker."""

    def __init__(
        self, number: int, listener: socket.socket, pipe: Pipe, *, balancer_id: str = ""
    ) -> None:
        self.number = number
        self.listener = listener
        self._pipe = pipe
        self._balancer_id = balancer_id

    def company(self, settle_s: float) -> Company:
        return Company(
            channel=PipeChannel(self._pipe),
            siblings=PipeSiblings(self._pipe),
            balancer_id=self._balancer_id,
            settle_s=settle_s,
        )

    def share(self, settings: KvlbSettings) -> KvlbSettings:
        """What only one process can do, the first does: its siblings hear of it through Redis."""
        if not self.number:
            return settings
        return msgspec.structs.replace(settings, registration=None, lmcache_notices=None)

    def attach(self, views: Views) -> None:
        """From now on the parent may ask what this process has to show."""

        async def answer(what: str, limit: int) -> bytes:
            shown = views.own_figures() if what == FIGURES else views.own_recent(limit)
            return msgspec.msgpack.encode(shown)

        self._pipe.answer = answer

    def ready(self) -> None:
        """Connections are accepted."""
        self._pipe.send(Ready())
