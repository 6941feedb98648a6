"""Requests that were sent, and what was forecast of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from indexer.core.hashing import Namespace
from indexer.core.types import InstanceId, RankId
from kvlb.audit.forecast import Forecast, Step
from kvlb.audit.sent import Sent

BLOCK = 16
RANK = RankId(InstanceId("w0"), 0)
PROMPT = tuple(range(100, 165))
"""65 tokens: four full blocks, all of which may be cached."""


@pytest.fixture(scope="session")
def sent() -> Callable[..., Sent]:
    """A request to the one rank."""

    def make(
        *,
        i: int = 1,
        tokens: tuple[int, ...] = PROMPT,
        t0: float = 10.0,
        t1: float = 11.0,
        body: Mapping[str, Any] | None = None,
        path: str = "/v1/completions",
        salt: str | None = None,
    ) -> Sent:
        return Sent(
            position=i,
            rank=RANK,
            path=path,
            body=body or {},
            namespace=Namespace(model="tiny", cache_salt=salt),
            tokens=tokens,
            t0=t0,
            t1=t1,
        )

    return make


@pytest.fixture(scope="session")
def forecast() -> Callable[..., Forecast]:
    """So many tokens are cached, as far as events tell."""

    def make(
        tokens: int,
        *,
        steps: Sequence[Step] = (),
        missing_since: float = float("-inf"),
        unsalted_tokens: int = 0,
        counted_once_tokens: int | None = None,
        cleared: bool = False,
        restarted: bool = False,
        windows_unnamed: bool = False,
    ) -> Forecast:
        return Forecast(
            tokens=tokens,
            missing_since=missing_since,
            unsalted_tokens=unsalted_tokens,
            counted_once_tokens=tokens if counted_once_tokens is None else counted_once_tokens,
            block_size=BLOCK,
            limit_tokens=64,
            steps=list(steps),
            cleared=cleared,
            restarted=restarted,
            windows_unnamed=windows_unnamed,
        )

    return make
