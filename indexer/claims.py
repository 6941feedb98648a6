"""Who hears which topic of a port that engines connect to; where two want one, nobody hears it.

Rules:

1. Two ranks on one port that publish under one topic can't be told apart: what one stores would be
   credited to both. While both are followed neither claim holds.
2. A rank without a topic takes whatever comes, so it has to be alone on its port.
3. Where we connect the connection is the identity, and every claim holds.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from indexer.config import RankSource


class TopicSharedError(Exception):
    """A claim doesn't hold any more: another rank publishes under the same topic."""


class Claim:
    """One rank's, for as long as it is followed."""

    def __init__(self, source: RankSource) -> None:
        self._source = source
        self._rivals: tuple[RankSource, ...] = ()
        self._holds, self._is_lost = asyncio.Event(), asyncio.Event()

    @property
    def holds(self) -> bool:
        return not self._rivals

    @property
    def problem(self) -> str | None:
        """Whose messages can't be told from this rank's, and what to change."""
        if not self._rivals:
            return None
        own = self._source
        others = ", ".join(sorted({f"{each.alias} ({_topic(each)})" for each in self._rivals}))
        return (
            f"{own.events}: engines that connect to one port need a topic each: {_topic(own)} here "
            f"can't be told from {others}; set another `topic` in --kv-events-config"
        )

    async def until_it_holds(self) -> None:
        await self._holds.wait()

    async def until_lost(self) -> None:
        """Raise TopicSharedError as soon as it doesn't hold."""
        await self._is_lost.wait()
        raise TopicSharedError(self.problem)

    def weigh(self, others: list["Claim"]) -> None:
        """`others` are all who listen on the same port, this one among them."""
        sources = [each._source for each in others if each is not self]  # noqa: SLF001 - its own class
        self._rivals = tuple(each for each in sources if _is_same(each.topic, self._source.topic))
        if self._rivals:
            self._holds.clear()
            self._is_lost.set()
        else:
            self._is_lost.clear()
            self._holds.set()


class Claims:
    """Of all ranks that are followed."""

    def __init__(self) -> None:
        self._by_port: defaultdict[str, list[Claim]] = defaultdict(list)

    @contextmanager
    def claiming(self, source: RankSource) -> Iterator[Claim]:
        """Claim the messages of `source` until the block ends; both sides learn of a conflict."""
        claim = Claim(source)
        if source.direction == "connect":
            claim.weigh([])
            yield claim
            return
        port = self._by_port[source.events]
        port.append(claim)
        _weigh_all(port)
        try:
            yield claim
        finally:
            port.remove(claim)
            _weigh_all(port)
            if not port:
                self._by_port.pop(source.events, None)


def _weigh_all(port: list[Claim]) -> None:
    for claim in port:
        claim.weigh(port)


def _is_same(topic: str | None, other: str | None) -> bool:
    return topic == other or topic is None or other is None


def _topic(source: RankSource) -> str:
    return "any topic" if source.topic is None else f"topic {source.topic!r}"
