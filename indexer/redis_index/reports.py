"""Reports through Redis: a bounded list per model, beside that model's other keys.

Each message is what one balancer sends at one time, with the time of Redis in front: by that clock
its wait is measured. The oldest leave when nobody takes them, and the list itself when nobody writes
to it.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from indexer.core.reports import Report, aged
from indexer.redis_index.connection import RedisConnection, load_script
from indexer.redis_index.keys import model_keys
from indexer.redis_index.packing import PackedKeys

_MOST_MESSAGES = 1024
_POLL_S = 0.1
_KEPT_MS = 10_000
"""What has lain longer says nothing any more."""

_decoder = msgspec.msgpack.Decoder(list[Report])


class RedisReports:
    """Both a `ReportSink` and a `ReportSource`, over a connection that somebody else closes."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._report = load_script("report", writes=False)
        self._take_reports = load_script("take_reports", writes=False)

    async def send(self, model: str, reports: Sequence[Report]) -> None:
        limits = [str(_MOST_MESSAGES).encode(), str(_KEPT_MS).encode()]
        await self._connection.run(
            self._report,
            self._keys(model),
            [msgspec.msgpack.encode(reports), *limits],
            timeout_s=self._connection.settings.write_timeout_s,
        )

    async def wait(self) -> None:
        await asyncio.sleep(_POLL_S)

    async def take(self, model: str) -> Sequence[Report]:
        answer = await self._connection.run(
            self._take_reports,
            self._keys(model),
            [],
            timeout_s=self._connection.settings.write_timeout_s,
        )
        now_us, *messages = answer
        taken: list[Report] = []
        for message in messages:
            sent_us, _, packed = message.partition(b" ")
            try:
                waited_s = (int(now_us) - int(sent_us)) / 1e6
                taken += aged(_decoder.decode(packed), max(0.0, waited_s))
            except (msgspec.DecodeError, ValueError):
                continue  # another version's
        return taken

    def _keys(self, model: str) -> PackedKeys:
        return PackedKeys([model_keys(self._connection.settings.prefix, model).reports])
