"""An engine that hands back what it was sent."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def echo() -> Callable[[Any, Any], Awaitable[None]]:
    """A script for `engine`: the request's body is the answer's."""

    async def answer(received: Any, wire: Any) -> None:
        head = (
            f"HTTP/1.1 200 OK\r\ncontent-length: {len(received.body)}\r\n"
            "content-type: application/octet-stream\r\n\r\n"
        )
        await wire.raw(head.encode() + received.body)

    return answer
