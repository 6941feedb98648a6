"""What a human has befall an engine over HTTP: `POST /simulator/misfortunes`, asked of any engine of the fleet.

A stopped or frozen engine answers nothing, so another one has to be asked to bring it back. Orders
are carried out one after the other, by one task of the fleet.
"""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, Protocol

import msgspec
import structlog

from simulator.core.errors import RequestRefusedError

_logger = structlog.get_logger(__name__)


class Misfortune(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What befalls whom."""

    engine: str
    what: Literal["kill", "start", "freeze", "thaw", "cut"]


class Victim(Protocol):
    """An engine that things befall."""

    @property
    def is_running(self) -> bool: ...

    async def start(self, group: asyncio.TaskGroup) -> None: ...

    async def stop(self) -> None: ...

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...

    def cut(self) -> None: ...


class Misfortunes:
    """The orders of one fleet."""

    def __init__(self) -> None:
        self.victims: Mapping[str, Victim] = MappingProxyType({})
        """By name."""
        self._orders: asyncio.Queue[tuple[Misfortune, asyncio.Future[str]]] = asyncio.Queue()

    def check(self, misfortune: Misfortune) -> None:
        """Raise RequestRefusedError if it can't befall that engine now."""
        victim = self.victims.get(misfortune.engine)
        if victim is None:
            known = ", ".join(self.victims)
            raise RequestRefusedError(
                f"no engine is called {misfortune.engine!r}; there are {known}"
            )
        if victim.is_running == (misfortune.what == "start"):
            state = "running" if victim.is_running else "stopped"
            raise RequestRefusedError(f"{misfortune.engine} is {state}")

    def order(self, misfortune: Misfortune) -> asyncio.Future[str]:
        """Have it happen soon; the result says why it couldn't, or nothing. Raises RequestRefusedError."""
        self.check(misfortune)
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._orders.put_nowait((misfortune, done))
        return done

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Carry orders out until cancelled; what runs in an engine runs in `group`."""
        while True:
            misfortune, done = await self._orders.get()
            failure = ""
            try:
                self.check(misfortune)  # something else may have befallen it meanwhile
                await self._carry_out(misfortune, group)
            except (RequestRefusedError, OSError) as error:
                failure = str(error)
                _logger.warning("misfortune_failed", engine=misfortune.engine, error=failure)
            if not done.done():  # who asked may be gone
                done.set_result(failure)

    async def _carry_out(self, misfortune: Misfortune, group: asyncio.TaskGroup) -> None:
        victim = self.victims[misfortune.engine]
        match misfortune.what:
            case "kill":
                await victim.stop()
            case "start":
                await victim.start(group)
            case "freeze":
                victim.freeze()
            case "thaw":
                victim.thaw()
            case "cut":
                victim.cut()
