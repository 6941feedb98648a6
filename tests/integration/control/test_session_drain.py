"""A WebSocket session while the whole balancer shuts down."""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import connect

from simulator.core.settings import EngineSettings
from simulator.service import FleetSpec, running_fleet


async def refuses_connections(url: str) -> None:
    """Wait until nobody listens any more."""
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
            except OSError:
                return
            writer.transport.abort()
            await asyncio.sleep(0.01)


async def test_session_gets_the_time_of_the_drain(balancer_factory: Any) -> None:
    """It goes on while nothing new is taken, and is closed with 1012 when the time is over."""
    engine = EngineSettings(serves="transcription")
    async with running_fleet(FleetSpec.parse("1"), engine=engine) as fleet:
        config = {"instances": [{"url": fleet.engines[0].url}], "drain_s": 1}
        async with balancer_factory(config) as balancer:
            await balancer.available()
            url = balancer.url.replace("http", "ws") + "/v1/realtime"
            async with connect(url, proxy=None) as session:
                created = json.loads(await session.recv())
                balancer.stop.set()
                await refuses_connections(balancer.url)
                await session.send("{")
                answered = json.loads(await session.recv())
                async with asyncio.timeout(20):
                    await session.wait_closed()

    assert created["type"] == "session.created"
    assert answered["code"] == "invalid_json"
    assert session.close_code == 1012
