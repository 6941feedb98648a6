"""Calls of an operator."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

KEY = {"x-api-key": "k"}


@pytest.fixture
def post() -> Callable[..., Awaitable[Any]]:
    """With the operator's key."""

    async def send(balancer: Any, path: str, body: Any, **headers: str) -> Any:
        return await balancer.http.post(path, json=body, headers={**KEY, **headers})

    return send


@pytest.fixture
def until_gone() -> Callable[[Any, str], Awaitable[None]]:
    """Wait until the instance has left the fleet."""

    async def wait(balancer: Any, instance: str) -> None:
        async with asyncio.timeout(20):
            await balancer.app.keeper.wait_for(
                lambda fleet: all(each.id != instance for each in fleet.instances)
            )

    return wait
