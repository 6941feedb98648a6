"""An httpx client that loses no connection when a call is cancelled.

httpx closes connections that have been idle for too long when the next call begins, one after the
other. Who is cancelled meanwhile as asyncio does it breaks that off, and what was still to be closed stays
open until it is garbage: httpcore guards its closing with anyio's scopes, which `Task.cancel` walks
through. So a call is a task that is ended by a scope of anyio's.
"""

import asyncio
from typing import Any

import anyio
import httpx


class ControlHttp(httpx.AsyncClient):
    """For whoever calls many engines, and is cancelled by timeouts and by clients that leave."""

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """As httpx's own; a cancelled call is broken off, and its engine sees it."""
        scope = anyio.CancelScope()
        # No group's: a group that is left cancels as asyncio does. It is waited for here.
        call = asyncio.get_running_loop().create_task(self._send(scope, request, options))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            scope.cancel()
            await asyncio.wait((call,))
            if not call.cancelled():
                call.exception()  # seen: it may have failed just now
            raise

    async def _send(
        self, scope: anyio.CancelScope, request: httpx.Request, options: dict[str, Any]
    ) -> httpx.Response:
        with scope:
            return await super().send(request, **options)
        raise asyncio.CancelledError  # the scope swallows its own
