"""`App`: the ASGI callable that decides who answers a path.

Engines' paths go to the data plane without touching the web framework; everything else goes to
the FastAPI application of `balancer.routes`.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import FastAPI

from balancer.config import BalancerConfig
from balancer.core.load import LoadLedger
from balancer.dataplane.exchange import AsgiExchange
from balancer.dataplane.plane import DataPlane
from balancer.fleet.control import FleetControl
from balancer.fleet.keeper import FleetKeeper
from balancer.siblings import Views

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class App:
    """The balancer as an ASGI application. Its lifespan starts the probes and closes clients."""

    def __init__(  # noqa: PLR0913 - what others do with a running balancer
        self,
        *,
        routes: FastAPI,
        dataplane: DataPlane,
        keeper: FleetKeeper,
        ledger: LoadLedger,
        reconfigure: Callable[[BalancerConfig], None],
        control: FleetControl,
        views: Views,
    ) -> None:
        self._routes = routes
        self._dataplane = dataplane
        self.keeper = keeper
        self.ledger = ledger
        self.reconfigure = reconfigure
        """Take over those settings that can change while it runs (`config.reloaded`)."""
        self.control = control
        """Membership of the fleet."""
        self.views = views
        """What this process has to show."""
        self.broken = asyncio.Event()
        """Set once something has ended that the balancer can't do without: stop serving."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Hand engines' paths to the data plane, everything else to the web framework."""
        if scope["type"] != "http":
            await self._routes(scope, receive, send)
            return
        try:
            if self._dataplane.proxies(scope["path"]):
                await self._dataplane.handle(AsgiExchange(scope, receive, send))
            else:
                await self._routes(scope, receive, send)
        except asyncio.CancelledError:
            # Only a server that has to end cancels an answer, and nothing of the task is left to
            # do: it would log a traceback for what the request's own line tells.
            return

    def start_draining(self) -> None:
        """From now on `/ready` says no; what runs goes on."""
        self._routes.state.is_draining = True

    def break_down(self) -> None:
        """From now on `/health` and `/ready` say no, and whoever serves this has to end."""
        self._routes.state.is_broken = True
        self.broken.set()
