"""`App`: what a server is given, and what others do with a running balancer.

Who answers which path is decided in `balancer.entry`.
"""

import asyncio
from collections.abc import Callable

from fastapi import FastAPI

from balancer.config import BalancerConfig
from balancer.core.load.ledger import LoadLedger
from balancer.dataplane.cross_origin import Message, Receive, Send
from balancer.entry import Entry
from balancer.fleet.control import FleetControl
from balancer.fleet.keeper import FleetKeeper
from balancer.siblings import Views


class App:
    """The balancer as an ASGI application. Its lifespan starts the probes and closes clients."""

    def __init__(  # noqa: PLR0913 - what others do with a running balancer
        self,
        *,
        routes: FastAPI,
        entry: Entry,
        keeper: FleetKeeper,
        ledger: LoadLedger,
        reconfigure: Callable[[BalancerConfig], None],
        control: FleetControl,
        views: Views,
    ) -> None:
        self._routes = routes
        self.entry = entry
        """Who answers which path; a server's own protocol may ask it without ASGI."""
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
        """Answer one connection of the server's."""
        await self.entry(scope, receive, send)

    @property
    def running(self) -> int:
        """Requests to engines under way."""
        return self.entry.dataplane.running

    @property
    def cut(self) -> int:
        """Those that ended because the server had to."""
        return self.entry.dataplane.cut

    def start_draining(self) -> None:
        """From now on `/ready` says no; what runs goes on."""
        self._routes.state.is_draining = True

    def break_down(self) -> None:
        """From now on `/health` and `/ready` say no, and whoever serves this has to end."""
        self._routes.state.is_broken = True
        self.broken.set()
