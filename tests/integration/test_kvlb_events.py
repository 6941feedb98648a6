"""`kvlb events` against simulated engines over real sockets: what comes, what went missing."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from indexer.config import RankSource
from indexer.core.types import InstanceId, RankId
from kvlb.errors import PeerError, SettingsError
from kvlb.event_lines import Line, render_line
from kvlb.events_view import (
    ConnectionView,
    EventsOptions,
    ShownBatches,
    find_streams,
    follow_streams,
    nobody_reads,
    watch,
)
from kvlb.simulated import parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings
from simulator.service import RunningEngine

ENGINE = EngineSettings(num_blocks=64, inter_token_ms=1.0)


class Screen:
    """Collects lines, and lets a test wait for one."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._grown = asyncio.Event()

    def write(self, line: Line) -> None:
        self.lines.append(line)
        self._grown.set()

    def shown(self, what: str) -> list[Line]:
        return [line for line in self.lines if line["what"] == what]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                self._grown.clear()
                await self._grown.wait()


def options(engine: str, **changes: object) -> EventsOptions:
    defaults = {"replay": None, "start": None, "limit": None, "as_json": False}
    return EventsOptions(engine=engine, **{**defaults, **changes})  # type: ignore[arg-type]


@asynccontextmanager
async def one_engine(settings: EngineSettings = ENGINE) -> AsyncIterator[RunningEngine]:
    async with simulated_fleet(parse_fleet("1"), settings) as fleet:
        yield fleet.engines[0]


@asynccontextmanager
async def watching(asked: EventsOptions) -> AsyncIterator[Screen]:
    """Follow until the block ends; it begins when the stream is known to be live."""
    screen = Screen()
    sources = await find_streams(asked)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(
            follow_streams(sources, asked.start, ShownBatches(asked.limit), screen.write)
        )
        await screen.until(lambda: bool(screen.shown("trust")))
        yield screen
        task.cancel()


async def ask(engine: RunningEngine, prompt: list[int]) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(
            f"{engine.url}/v1/completions",
            json={"model": "sim", "prompt": prompt, "max_tokens": 1},
        )
    assert answer.status_code == 200


async def test_stored_and_cleared_are_shown_with_sequence_rank_and_tokens() -> None:
    """An engine is found by its address alone; a reset shows with the next step."""
    async with one_engine() as engine, watching(options(engine.url)) as screen:
        await ask(engine, list(range(40)))
        async with httpx.AsyncClient(trust_env=False) as http:
            await http.post(f"{engine.url}/reset_prefix_cache")
        await ask(engine, list(range(100, 140)))
        await screen.until(lambda: len(screen.shown("stored")) == 2)

    first = screen.shown("stored")[0]
    assert (first["seq"], first["rank"], first["tokens"], first["blocks"]) == (0, 0, 32, 2)
    assert [line["seq"] for line in screen.shown("cleared")] == [1]


async def test_removed_blocks_are_shown() -> None:
    """A cache that is full gives up its oldest blocks."""
    async with one_engine() as engine, watching(options(engine.url)) as screen:
        for start in (0, 1000, 2000):
            await ask(engine, list(range(start, start + 500)))
        await screen.until(lambda: bool(screen.shown("removed")))

    assert screen.shown("removed")[0]["tokens"] >= 16


async def test_gap_and_its_replay_are_shown() -> None:
    """A batch lost on the wire is asked for and applied in its place."""
    async with one_engine() as engine, watching(options(engine.url)) as screen:
        engine.drop_live_batches(2)
        for start in (0, 100, 200, 300):
            await ask(engine, list(range(start, start + 16)))
        await screen.until(lambda: bool(screen.shown("repaired")))

    gap, repaired = screen.shown("gap")[0], screen.shown("repaired")[0]
    assert gap["first_seq"] == repaired["first_seq"]
    assert screen.shown("replay")[0]["from_seq"] == gap["first_seq"]
    seqs = [line["seq"] for line in screen.shown("stored")]
    assert seqs == sorted(seqs)


async def test_history_is_shown_only_if_asked_for() -> None:
    """Without --from the stream begins now; with it, at the number given."""
    async with one_engine() as engine:
        for start in (0, 100, 200):
            await ask(engine, list(range(start, start + 16)))
        async with watching(options(engine.url)) as live:
            await ask(engine, list(range(300, 316)))
            await live.until(lambda: bool(live.shown("stored")))
        async with watching(options(engine.url, start=1)) as history:
            await history.until(lambda: len(history.shown("stored")) == 3)

    assert [line["seq"] for line in live.shown("stored")] == [3]
    assert [line["seq"] for line in history.shown("stored")] == [1, 2, 3]


async def test_sockets_can_be_named_instead_of_an_address() -> None:
    """For engines that can't say where their events are."""
    async with one_engine() as engine:
        asked = options(engine.events_endpoint, replay=engine.replay_endpoint, start=0)
        async with watching(asked) as screen:
            await ask(engine, list(range(16)))
            await screen.until(lambda: bool(screen.shown("stored")))

    assert screen.shown("following")[0]["endpoint"] == engine.events_endpoint


async def test_every_rank_of_an_engine_is_followed() -> None:
    """Ranks are streams of their own."""
    settings = EngineSettings(num_blocks=64, dp_size=2)
    async with one_engine(settings) as engine, watching(options(engine.url)) as screen:
        await screen.until(lambda: len(screen.shown("following")) == 2)

    assert {line["rank"] for line in screen.shown("following")} == {0, 1}


async def test_limit_counts_batches_over_all_ranks() -> None:
    """The command ends with the last batch wanted, and shows none after it."""
    batches = ShownBatches(2)

    assert [batches.count() for _ in range(3)] == [True, True, False]
    assert batches.reached.is_set()
    assert not ShownBatches(None).reached.is_set()


async def test_engine_without_events_is_told_what_to_set() -> None:
    """The flag to add is in the message."""
    async with one_engine(EngineSettings(events=False)) as engine:
        with pytest.raises(PeerError, match="--kv-events-config"):
            await find_streams(options(engine.url))


async def test_engine_that_cannot_say_is_followed_by_naming_its_sockets() -> None:
    """Before 0.31 there is no /kv_event_sources."""
    async with one_engine(EngineSettings(version="0.30.0")) as engine:
        with pytest.raises(PeerError, match="--replay tcp://"):
            await find_streams(options(engine.url))


async def test_engine_that_is_down_is_named() -> None:
    """Nothing listens there."""
    async with one_engine() as engine:
        pass

    with pytest.raises(PeerError, match=f"no engine answers at {engine.url}"):
        await find_streams(options(engine.url))


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(options("localhost:5557"), id="engine"),
        pytest.param(options("tcp://localhost"), id="no-port"),
        pytest.param(options("tcp://localhost:1", replay="localhost:2"), id="replay"),
    ],
)
async def test_endpoint_that_is_none_is_refused(asked: EventsOptions) -> None:
    """With what an endpoint looks like."""
    with pytest.raises(SettingsError, match="tcp://host:port"):
        await find_streams(asked)


async def test_address_with_a_path_is_refused() -> None:
    """An instance is scheme, host and port."""
    with pytest.raises(SettingsError, match="only scheme, host and port"):
        await find_streams(options("http://127.0.0.1:1/v1"))


def test_history_needs_a_replay_socket() -> None:
    """--from without one can't be answered."""
    with pytest.raises(SettingsError, match="--from needs a replay socket"):
        watch(options("tcp://127.0.0.1:1", start=0))


def a_stream(endpoint: str) -> RankSource:
    return RankSource(
        rank=RankId(InstanceId(endpoint), 0), alias="e", model="-", events=endpoint, replay=None
    )


async def test_address_where_nobody_publishes_is_waited_at(unused_url: str) -> None:
    """It isn't called followed before somebody is there."""
    screen = Screen()
    endpoint = unused_url.replace("http", "tcp")
    async with asyncio.TaskGroup() as group:
        following = follow_streams([a_stream(endpoint)], None, ShownBatches(None), screen.write)
        task = group.create_task(following)
        await screen.until(lambda: bool(screen.shown("waiting")))
        task.cancel()

    assert screen.lines == [{"what": "waiting", "rank": 0, "endpoint": endpoint}]
    assert render_line(screen.lines[0]).endswith(f"waiting for a publisher at {endpoint}")


async def test_engine_that_stops_is_waited_for_again() -> None:
    """And followed when it is back."""
    async with simulated_fleet(parse_fleet("1"), ENGINE) as fleet:
        (engine,) = fleet.engines
        async with watching(options(engine.url)) as screen:
            await fleet.stop(engine)
            await screen.until(lambda: bool(screen.shown("waiting")))
            await fleet.start(engine)
            await screen.until(lambda: len(screen.shown("following")) == 2)

    connection = [each["what"] for each in screen.lines if "endpoint" in each]
    assert connection == ["following", "waiting", "following"]


async def test_long_wait_says_once_what_to_check() -> None:
    """For each time that nobody is there."""
    screen = Screen()
    connection = ConnectionView(a_stream("tcp://e:1"), screen.write, patience_s=0.0, hint_s=0.0)

    def hints() -> int:
        return sum("hint" in line for line in screen.lines)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(connection.run())
        await screen.until(lambda: hints() == 1)
        connection.on_connection(True)
        connection.on_connection(False)
        await screen.until(lambda: hints() == 2)
        task.cancel()

    waiting = ["waiting", "waiting"]
    assert [line["what"] for line in screen.lines] == [*waiting, "following", *waiting]
    assert "--kv-events-config" in render_line(screen.lines[1])


async def test_who_reads_no_more_is_noticed_without_a_line() -> None:
    """`| head -1` may have all it wanted before a stream falls quiet."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as output:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(nobody_reads(output))
            done, _ = await asyncio.wait((waiting,), timeout=0.05)
            os.close(reading)

    assert not done
