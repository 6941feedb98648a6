"""Finding streams over HTTP, a fleet that changes, and what the indexer shows of itself."""

import asyncio
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import HTTPException, Request
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from indexer.config import IndexerConfig, InstanceSource
from indexer.core.hashing import Namespace
from indexer.core.index import BlockIndex, Prompt
from indexer.core.types import InstanceId, RankId, Trust
from indexer.memory_index import MemoryIndex
from indexer.service import IndexerService
from indexer.sources import InstanceRefusedError, InstanceUnreachableError, find_sources
from indexer.status import IndexerCollector, indexer_status_app

TOKENS = range(64)


def stored(*hashes: int) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": None,
        "token_ids": list(TOKENS[: 16 * len(hashes)]),
        "block_size": 16,
    }


def published(publisher: Any, **more: Any) -> dict[str, Any]:
    """One rank's entry in `/kv_event_sources`."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{publisher.port}",
        "replay_endpoint": f"tcp://0.0.0.0:{publisher.replay_port}",
        "topic": "kv-events",
        **more,
    }


def rank_of(engine: Any, rank: int = 0) -> RankId:
    return RankId(InstanceId(engine.url), rank)


async def held(index: BlockIndex, rank: RankId, model: str = "tiny") -> int | None:
    match = (await index.match(Prompt(Namespace(model=model), TOKENS))).get(rank)
    return None if match is None else match.tokens // 16


async def find(engine: InstanceSource, **settings: Any) -> Any:
    async with httpx.AsyncClient() as http:
        return await find_sources(engine, config=IndexerConfig(**settings), http=http)


async def test_streams_of_every_rank_are_discovered(
    engine_http: Any, publishing: Any, indexing: Any
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
    engine_http: Any, publishing: Any, indexing: Any
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


async def test_configuration_overrules_the_engine_and_counts_its_ranks(engine_http: Any) -> None:
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


async def test_ranks_beyond_the_first_node_have_global_numbers() -> None:
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
    engine_http: Any, endpoint: str, direction: str, resolved: str
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
async def test_engine_without_events_says_why(engine_http: Any, sources: Any, reason: str) -> None:
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
        pytest.param({"0": {"topic": "t"}}, id="no-endpoint"),
        pytest.param({"0": {"endpoint": 5}}, id="endpoint-no-text"),
        pytest.param({"zero": {"endpoint": "tcp://*:5557"}}, id="rank-no-number"),
        pytest.param({"0": {"endpoint": "tcp://*"}}, id="no-port"),
        pytest.param({"0": {"endpoint": "udp://*:5557"}}, id="no-tcp"),
        pytest.param({"0": {"endpoint": "tcp://*:99999"}}, id="port-too-high"),
    ],
)
async def test_nonsense_from_an_engine_is_refused(engine_http: Any, sources: Any) -> None:
    """Said once, tried again; never a crash."""
    async with engine_http() as engine:
        engine.sources = sources

        with pytest.raises(InstanceRefusedError):
            await find(InstanceSource(url=engine.url))


async def test_engine_without_a_model_is_refused(engine_http: Any) -> None:
    """There would be no name to keep its blocks under."""
    async with engine_http() as engine:
        engine.model = ""

        with pytest.raises(InstanceRefusedError, match="no base model"):
            await find(InstanceSource(url=engine.url))


async def test_own_key_is_sent_and_a_wrong_one_reported(engine_http: Any) -> None:
    """Engines guard `/v1` with their key, which is never shown."""
    async with engine_http() as engine:
        engine.key = "secret-1"
        right = InstanceSource(url=engine.url, api_key="secret-1")
        assert (await find(right)).model == "tiny"
        assert "secret-1" not in repr(right)

        with pytest.raises(InstanceRefusedError, match="401"):
            await find(InstanceSource(url=engine.url, api_key="secret-2"))


async def test_engine_that_is_down_is_unreachable(unused_url: str) -> None:
    """Ask again later."""
    with pytest.raises(InstanceUnreachableError):
        await find(InstanceSource(url=unused_url))


def test_address_has_one_spelling() -> None:
    """The balancer's, so that both mean the same rank."""
    assert InstanceSource(url="HTTP://Engine/").instance == "http://engine:80"

    with pytest.raises(ValueError, match="no scheme"):
        InstanceSource(url="engine:8000")


async def test_configured_streams_need_no_answer(unused_url: str) -> None:
    """The event socket may be up before the HTTP server is."""
    found = await find(InstanceSource(url=unused_url, events="tcp://*:5557", model="tiny"))

    assert len(found.ranks) == 1


async def test_engine_that_comes_up_later_is_found(
    engine_http: Any, publishing: Any, indexing: Any, unused_url: str, eventually: Any
) -> None:
    """Discovery goes on; the indexer is ready meanwhile."""
    async with publishing() as publisher, indexing(InstanceSource(url=unused_url)) as (service, _):
        await eventually(lambda: [each.state for each in service.instances()] == ["unreachable"])
        assert service.is_ready
        assert service.instances()[0].problem

        async with engine_http(int(unused_url.rpartition(":")[2])) as engine:
            engine.sources = {"0": published(publisher)}
            publisher.publish(stored(1))
            await service.caught_up(rank_of(engine), 0)


async def test_another_model_at_the_same_address_inherits_nothing(
    engine_http: Any, publishing: Any, indexing: Any
) -> None:
    """F56: rows of the old model are gone, the stream begins anew under the new name."""
    async with engine_http() as engine, publishing() as publisher:
        engine.sources = {"0": published(publisher)}
        publisher.publish(stored(1))
        async with indexing(InstanceSource(url=engine.url)) as (service, index):
            rank = rank_of(engine)
            await service.caught_up(rank, 0)

            engine.model = "other"
            await service.until(rank, lambda now: now.model == "other" and now.last_seq == 0)

            assert await held(index, rank) is None
            assert await held(index, rank, "other") == 1


async def test_rank_that_is_no_longer_published_is_forgotten(
    engine_http: Any, publishing: Any, indexing: Any, eventually: Any
) -> None:
    """The engine says so itself."""
    async with engine_http() as engine, publishing() as first, publishing() as second:
        engine.sources = {"0": published(first), "1": published(second)}
        second.publish(stored(1))
        async with indexing(InstanceSource(url=engine.url)) as (service, index):
            await service.caught_up(rank_of(engine, 1), 0)

            engine.sources = {"0": published(first)}
            await eventually(lambda: len(service.status()) == 1)

            assert await held(index, rank_of(engine, 1)) is None


class ForgetfulIndex(MemoryIndex):
    """Fails once while it forgets, as a bug would."""

    failures = 1

    async def retire(self, rank: RankId) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("broken on purpose")
        await super().retire(rank)


async def test_engine_whose_discovery_fails_begins_anew(
    engine_http: Any, publishing: Any, indexing: Any
) -> None:
    """A bug costs that engine a second."""
    async with engine_http() as engine, publishing() as publisher:
        engine.sources = {"0": published(publisher)}
        publisher.publish(stored(1))
        index = ForgetfulIndex()
        async with indexing(InstanceSource(url=engine.url), index=index) as (service, _):
            rank = rank_of(engine)
            await service.caught_up(rank, 0)

            engine.model = "other"
            await service.until(rank, lambda now: now.model == "other" and now.last_seq == 0)

            assert await held(index, rank, "other") == 1


async def test_engine_that_leaves_takes_its_series_along(
    engine_http: Any, publishing: Any, indexing: Any, eventually: Any
) -> None:
    """F58: metrics are bounded by the present fleet."""
    async with engine_http() as engine, publishing() as publisher:
        engine.sources = {"0": published(publisher)}
        publisher.publish(stored(1, 2), {"type": "NewInSomeRelease"})
        async with indexing(InstanceSource(url=engine.url, alias="gpu-0")) as (service, index):
            registry = CollectorRegistry()
            registry.register(IndexerCollector(service))
            await service.caught_up(rank_of(engine), 0)
            await service.until(rank_of(engine), lambda now: now.trust is Trust.EXACT)
            await service.measure()
            lines = generate_latest(registry).decode().splitlines()

            labels = '{instance="gpu-0",rank="0"'
            assert f"kvlb_events_applied_total{labels}}} 1.0" in lines
            assert f'kvlb_events_rejected_total{labels},reason="unknown_event"}} 1.0' in lines
            assert f'kvlb_rank_trust{labels},trust="exact"}} 1.0' in lines
            assert f'kvlb_epochs_total{labels},reason="started"}} 1.0' in lines
            assert f"kvlb_index_rank_entries{labels}}} 2.0" in lines

            service.set_sources([])
            await eventually(lambda: not service.instances())
            await service.measure()
            text = generate_latest(registry).decode()

            assert "gpu-0" not in text
            assert "kvlb_index_entries 0.0" in text.splitlines()
            assert await held(index, rank_of(engine)) is None


async def test_status_app_answers(
    engine_http: Any, publishing: Any, indexing: Any, eventually: Any
) -> None:
    """Health, readiness, metrics and the whole state."""
    async with engine_http() as engine, publishing() as publisher:
        engine.sources = {"0": published(publisher)}
        publisher.publish(stored(1))
        async with indexing(InstanceSource(url=engine.url)) as (service, _):
            registry = CollectorRegistry()
            registry.register(IndexerCollector(service))
            app = indexer_status_app(service, registry)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://i") as client:
                unready = (await client.get("/ready")).status_code
                await service.caught_up(rank_of(engine), 0)
                ready = (await client.get("/ready")).status_code
                status = msgspec.json.decode((await client.get("/status")).content)
                metrics = await client.get("/metrics")

                assert (await client.get("/health")).json() == {"status": "ok"}
                assert (unready, ready) == (503, 200)
                assert status["ranks"][0]["last_seq"] == 0
                assert status["ranks"][0]["block_sizes"] == {"0": 16}
                assert status["instances"][0]["state"] == "following"
                assert "kvlb_index_entries 1.0" in metrics.text.splitlines()


async def test_new_key_does_not_start_an_instance_anew(
    engine_http: Any, publishing: Any, indexing: Any, eventually: Any
) -> None:
    """What is known of its cache stays; the engine is asked with the new key."""
    async with engine_http() as engine, publishing() as publisher:
        engine.sources = {"0": published(publisher)}
        async with indexing(InstanceSource(url=engine.url, api_key="k1")) as (service, index):
            await publisher.subscribed()
            publisher.publish(stored(1))
            await service.caught_up(rank_of(engine), 0)
            service.set_sources([InstanceSource(url=engine.url, api_key="k2")])
            await eventually(lambda: engine.keys_seen[-1:] == ["Bearer k2"])

            assert service.status()[0].epoch_reason == "started"
            assert service.status()[0].counts.connections == 1
            assert await held(index, rank_of(engine)) is not None


async def test_new_name_does_not_start_an_instance_anew(
    engine_http: Any, publishing: Any, indexing: Any
) -> None:
    """Epoch, connection and blocks stay; status, metrics and log say the new name."""
    async with engine_http() as engine, publishing() as publisher:
        engine.sources = {"0": published(publisher)}
        async with indexing(InstanceSource(url=engine.url, alias="old")) as (service, index):
            registry = CollectorRegistry()
            registry.register(IndexerCollector(service))
            await publisher.subscribed()
            publisher.publish(stored(1))
            before = await service.caught_up(rank_of(engine), 0)
            service.set_sources([InstanceSource(url=engine.url, alias="new")])
            renamed = await service.until(rank_of(engine), lambda now: now.alias == "new")
            with capture_logs() as log:
                publisher.publish({"type": "NewInSomeRelease"})
                await service.caught_up(rank_of(engine), 1)
            metrics = generate_latest(registry).decode()

            assert renamed.epoch == before.epoch
            assert renamed.counts.connections == 1
            assert await held(index, rank_of(engine)) == 1
            assert [each.alias for each in service.instances()] == ["new"]
            refused = [each for each in log if each["event"] == "events_rejected"]
            assert [each["instance"] for each in refused] == ["new"]
            assert 'instance="old"' not in metrics


async def test_rank_found_while_its_instance_is_renamed_has_the_new_name(
    publishing: Any, eventually: Any
) -> None:
    """The engine was asked under the old one."""
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        asked.set()
        await may_answer.wait()
        body = {"data": [{"id": "tiny", "root": "tiny", "parent": None}]}
        return httpx.Response(200, json=body if request.url.path == "/v1/models" else sources)

    async with (
        publishing() as publisher,
        httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http,
        asyncio.TaskGroup() as group,
        asyncio.timeout(20),
    ):
        sources = {"0": published(publisher)}
        old, new = (InstanceSource(url="http://127.0.0.1:1", alias=name) for name in ("old", "new"))
        service = IndexerService(
            config=IndexerConfig(), sources=[old], index=MemoryIndex(), http=http
        )
        running = group.create_task(service.run())
        await asked.wait()
        service.set_sources([new])
        await eventually(lambda: service.instances()[0].alias == "new")
        may_answer.set()
        status = await service.until(RankId(old.instance, 0), lambda _: True)
        running.cancel()

    assert status.alias == "new"


async def test_status_can_be_guarded(
    engine_http: Any, publishing: Any, indexing: Any, eventually: Any
) -> None:
    """It tells addresses; health, readiness and metrics stay open."""

    async def refuse(request: Request) -> None:
        raise HTTPException(status_code=403)

    async with indexing() as (service, _):
        app = indexer_status_app(service, CollectorRegistry(), refuse)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://i") as client:
            answers = {
                path: (await client.get(path)).status_code
                for path in ("/health", "/metrics", "/status")
            }

    assert answers == {"/health": 200, "/metrics": 200, "/status": 403}


@pytest.mark.parametrize("key", ["bro\nken-key#", "ké-key#"], ids=["control", "not-ascii"])
async def test_key_that_cannot_be_sent_shows_in_no_error(key: str, engine_http: Any) -> None:
    """What the client library says of it quotes the header."""
    async with engine_http() as engine:
        with pytest.raises(InstanceUnreachableError) as raised:
            await find(InstanceSource(url=engine.url, api_key=key))

    assert key[-2:] not in str(raised.value)
