"""What the indexer finds out of an engine: its streams, ranks and model, or why it can't."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from indexer.config import InstanceSource
from indexer.core.types import RankId
from indexer.sources import InstanceRefusedError, InstanceUnreachableError

Stored = Callable[..., dict[str, Any]]
Published = Callable[..., dict[str, Any]]
RankOf = Callable[..., RankId]
Held = Callable[..., Awaitable[int | None]]
Find = Callable[..., Awaitable[Any]]


async def test_streams_of_every_rank_are_discovered(
    engine_http: Any,
    publishing: Any,
    indexing: Any,
    stored: Stored,
    published: Published,
    rank_of: RankOf,
    held: Held,
) -> None:
    """Wildcards stand for the host we know; each rank is a stream and a cache of its own."""
    async with engine_http() as engine, publishing() as first, publishing() as second:
        engine.sources = {"0": published(first), "1": published(second)}
        first.publish(stored(1))
        second.publish(stored(1, 2))
        async with indexing(InstanceSource(url=engine.url + "/")) as (service, index):
            await service.caught_up(rank_of(engine, 0), 0)
            await service.caught_up(rank_of(engine, 1), 0)

            assert await held(index, rank_of(engine, 0)) == 1
            assert await held(index, rank_of(engine, 1)) == 2
            assert [each.state for each in service.instances()] == ["following"]


async def test_older_engine_is_followed_by_configuration(
    engine_http: Any, publishing: Any, indexing: Any, stored: Stored, rank_of: RankOf, held: Held
) -> None:
    """Before 0.31 there is no discovery of endpoints; the model is asked all the same."""
    async with engine_http() as engine, publishing() as publisher:
        engine.model = "older"
        publisher.publish(stored(1))
        configured = InstanceSource(
            url=engine.url, events=publisher.events, replay=publisher.replay
        )
        async with indexing(configured) as (service, index):
            status = await service.caught_up(rank_of(engine), 0)

            assert status.model == "older"
            assert await held(index, rank_of(engine), "older") == 1


async def test_configuration_overrules_the_engine_and_counts_its_ranks(
    engine_http: Any, find: Find
) -> None:
    """A mapped port is known to the operator only; the offset per rank is vLLM's."""
    async with engine_http() as engine:
        entry = {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}
        engine.sources = {"0": entry, "1": {**entry, "endpoint": "tcp://*:5558"}}
        found = await find(InstanceSource(url=engine.url, events="tcp://10.0.0.9:15557"))

        assert [each.events for each in found.ranks] == [
            "tcp://10.0.0.9:15557",
            "tcp://10.0.0.9:15558",
        ]
        assert [each.replay for each in found.ranks] == ["tcp://127.0.0.1:6557"] * 2


async def test_ranks_beyond_the_first_node_have_global_numbers(find: Find) -> None:
    """Ports are counted from the configured one by global rank."""
    found = await find(
        InstanceSource(
            url="http://[fd00::7]:8000",
            events="tcp://*:5557",
            replay="tcp://*:6557",
            model="tiny",
            ranks=2,
            rank_base=2,
        )
    )

    assert [(each.rank.rank, each.events, each.replay) for each in found.ranks] == [
        (2, "tcp://[fd00::7]:5559", "tcp://[fd00::7]:6559"),
        (3, "tcp://[fd00::7]:5560", "tcp://[fd00::7]:6560"),
    ]


@pytest.mark.parametrize(
    ("endpoint", "direction", "resolved"),
    [
        pytest.param("tcp://*:5557", "connect", "tcp://127.0.0.1:5557", id="wildcard"),
        pytest.param("tcp://[::]:5557", "connect", "tcp://127.0.0.1:5557", id="wildcard-v6"),
        pytest.param(
            "tcp://[::ffff:10.1.2.3]:5557", "connect", "tcp://10.1.2.3:5557", id="mapped-v4"
        ),
        pytest.param("tcp://[fd00::1]:5557", "connect", "tcp://[fd00::1]:5557", id="v6"),
        pytest.param("ipc:///tmp/kv", "connect", "ipc:///tmp/kv", id="ipc"),
        pytest.param("tcp://10.1.2.3:5557", "bind", "tcp://10.1.2.3:5557", id="ours"),
        pytest.param("tcp://0.0.0.0:5557", "bind", "tcp://0.0.0.0:5557", id="no-marker"),
        pytest.param("tcp://indexer:5557", "bind", "tcp://*:5557", id="our-name"),
    ],
)
async def test_who_binds_is_read_off_the_endpoint(
    engine_http: Any, endpoint: str, direction: str, resolved: str, find: Find
) -> None:
    """The rule of vLLM: `*` or `::` makes the engine bind; anything else it connects to."""
    async with engine_http() as engine:
        engine.sources = {"0": {"endpoint": endpoint, "topic": "t"}}
        found = await find(InstanceSource(url=engine.url))

        (source,) = found.ranks
        assert (source.direction, source.events) == (direction, resolved)
        assert source.topic == ("t" if direction == "bind" else None)
        assert source.replay is None


@pytest.mark.parametrize(
    ("sources", "reason"),
    [
        pytest.param({}, "events_off", id="empty-object"),
        pytest.param(
            {"0": {"enable_kv_cache_events": False, "endpoint": "tcp://*:1"}},
            "events_off",
            id="disabled",
        ),
        pytest.param({"0": {"publisher": "null"}}, "events_off", id="null-publisher"),
        pytest.param(None, "no_events_endpoint", id="older-release"),
    ],
)
async def test_engine_without_events_says_why(
    engine_http: Any, sources: Any, reason: str, find: Find
) -> None:
    """No fault: it is routed to by load."""
    async with engine_http() as engine:
        engine.sources = sources
        found = await find(InstanceSource(url=engine.url))

        assert (found.ranks, found.reason, found.model) == ((), reason, "tiny")


@pytest.mark.parametrize(
    "sources",
    [
        pytest.param([], id="no-object"),
        pytest.param({"0": 5}, id="entry-no-object"),
        pytest.param(msgspec.Raw(b"[" * 100_000), id="nested"),
        pytest.param({"0": {"topic": "t"}}, id="no-endpoint"),
        pytest.param({"0": {"endpoint": 5}}, id="endpoint-no-text"),
        pytest.param({"zero": {"endpoint": "tcp://*:5557"}}, id="rank-no-number"),
        pytest.param({"0": {"endpoint": "tcp://*"}}, id="no-port"),
        pytest.param({"0": {"endpoint": "udp://*:5557"}}, id="no-tcp"),
        pytest.param({"0": {"endpoint": "tcp://*:99999"}}, id="port-too-high"),
    ],
)
async def test_nonsense_from_an_engine_is_refused(
    engine_http: Any, sources: Any, find: Find
) -> None:
    """Said once, tried again; never a crash."""
    async with engine_http() as engine:
        engine.sources = sources

        with pytest.raises(InstanceRefusedError):
            await find(InstanceSource(url=engine.url))


async def test_engine_without_a_model_is_refused(engine_http: Any, find: Find) -> None:
    """There would be no name to keep its blocks under."""
    async with engine_http() as engine:
        engine.model = ""

        with pytest.raises(InstanceRefusedError, match="no base model"):
            await find(InstanceSource(url=engine.url))


async def test_own_key_is_sent_and_a_wrong_one_reported(engine_http: Any, find: Find) -> None:
    """Engines guard `/v1` with their key, which is never shown."""
    async with engine_http() as engine:
        engine.key = "secret-1"
        right = InstanceSource(url=engine.url, api_key="secret-1")
        assert (await find(right)).model == "tiny"
        assert "secret-1" not in repr(right)

        with pytest.raises(InstanceRefusedError, match="401"):
            await find(InstanceSource(url=engine.url, api_key="secret-2"))


async def test_engine_that_is_down_is_unreachable(unused_url: str, find: Find) -> None:
    """Ask again later."""
    with pytest.raises(InstanceUnreachableError):
        await find(InstanceSource(url=unused_url))


def test_address_has_one_spelling() -> None:
    """The balancer's, so that both mean the same rank."""
    assert InstanceSource(url="HTTP://Engine/").instance == "http://engine:80"

    with pytest.raises(ValueError, match="no scheme"):
        InstanceSource(url="engine:8000")


@pytest.mark.parametrize("key", ["bro\nken-key#", "ké-key#"], ids=["control", "not-ascii"])
async def test_key_that_cannot_be_sent_shows_in_no_error(
    key: str, engine_http: Any, find: Find
) -> None:
    """What the client library says of it quotes the header."""
    async with engine_http() as engine:
        with pytest.raises(InstanceUnreachableError) as raised:
            await find(InstanceSource(url=engine.url, api_key=key))

    assert key[-2:] not in str(raised.value)
