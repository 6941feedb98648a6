"""The whole balancer: who answers a path, and how it starts and stops."""

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from balancer.app import create_app
from balancer.config import BalancerConfig
from balancer.core.fleet.snapshot import Role
from balancer.core.load.ledger import LegWork
from balancer.server import BalancerBrokenError, ListenError, serve
from indexer.core.types import BlockKey, RankId
from indexer.memory_index import MemoryIndex

IDS = {"model": "tiny", "prompt": [1, 2, 3]}
KEY = BlockKey(1)


async def test_engine_paths_are_proxied(balancer: Any, engine: Any) -> None:
    """With the headers that tell what was decided; everything else is answered here."""
    answer = await balancer.http.post("/v1/completions", json=IDS)

    assert answer.status_code == 200
    assert answer.headers["x-kvlb-instance"] == "m0"
    assert engine.calls("/v1/completions") == 1
    assert engine.calls("/health") > 0
    assert (await balancer.http.get("/health")).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("path", "raw"),
    [
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"a\\ud800"}]}'),
        ("/v1/completions", b'{"prompt":"a\\ud800","stream":false}'),
        ("/v1/completions", b'{"prompt":[1,2,3],"cache_salt":"\\ud800"}'),
    ],
    ids=["chat", "text", "salt"],
)
async def test_lone_surrogate_is_the_engines_business(
    balancer: Any, engine: Any, path: str, raw: bytes
) -> None:
    """Nothing of ours can tokenize or hash it, so it is routed by load."""
    answer = await balancer.http.post(path, content=raw)
    (decision,) = (await balancer.http.get("/explain/recent")).json()["decisions"]

    assert answer.status_code == 200
    assert decision["prompt_tokens"] is None
    assert [leg["outcome"] for leg in decision["legs"]] == ["unscorable"]
    assert engine.calls(path) == 1
    assert engine.calls("/tokenize") == 0


async def test_engines_get_their_key(engine_factory: Any, balancer_factory: Any) -> None:
    """Probes and requests alike; the client's own stays here."""
    async with engine_factory(api_key="k1") as engine:
        config = {"instances": [{"url": engine.url}], "engine_api_key": "k1"}
        async with balancer_factory(config) as balancer:
            await balancer.available()
            answer = await balancer.http.post(
                "/v1/completions", json=IDS, headers={"authorization": "Bearer user1"}
            )

    assert answer.status_code == 200
    assert all(
        headers["authorization"] == "Bearer k1"
        for path, _, headers in engine.received
        if path.startswith("/v1")
    )


async def test_dead_engine_is_found_by_a_request(
    engine_factory: Any, balancer_factory: Any
) -> None:
    """The request goes elsewhere, and the instance gets no more."""
    async with engine_factory() as here, engine_factory() as gone:
        config = {
            "instances": [{"url": gone.url}, {"url": here.url}],
            "probes": {"interval_s": 60},
            "routing": {"policy": "round_robin"},
        }
        async with balancer_factory(config) as balancer:
            await balancer.available(2)
            gone.server.should_exit = True
            await refused(gone.url)
            answers = [
                (await balancer.http.post("/v1/completions", json=IDS)).status_code
                for _ in range(4)
            ]
            dead = balancer.app.keeper.snapshot().by_id(gone.id)

    assert answers == [200] * 4
    assert dead is not None
    assert dead.unhealthy_reason == "engine_unreachable"


async def test_removed_instance_leaves_nothing_behind(engine: Any, balancer_factory: Any) -> None:
    """Predictions and series of an instance go with it."""
    async with balancer_factory({"instances": [{"url": engine.url}]}) as balancer:
        await balancer.available()
        await balancer.http.post("/v1/completions", json=IDS)
        before = (await balancer.http.get("/metrics")).text
        balancer.app.keeper.set_instances([])
        after = (await balancer.http.get("/metrics")).text

    assert 'instance="m0"' in before
    assert 'instance="m0"' not in after


async def test_first_request_works_right_after_the_first_probe(
    engine: Any, balancer_factory: Any
) -> None:
    """Nothing waits for an interval."""
    config = {"instances": [{"url": engine.url}], "probes": {"interval_s": 60}}
    async with balancer_factory(config) as balancer:
        async with asyncio.timeout(20):
            await balancer.app.keeper.first_round()
        answer = await balancer.http.post("/v1/completions", json=IDS)

    assert answer.status_code == 200


async def test_stop_lets_running_answers_finish(engine: Any, balancer_factory: Any) -> None:
    """New connections are refused, the old one gets its whole answer."""
    engine.hold = asyncio.Event()
    async with balancer_factory({"instances": [{"url": engine.url}]}) as balancer:
        await balancer.available()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(balancer.http.post("/v1/completions", json=IDS))
            await engine.wait_for_calls("/v1/completions", 1)
            balancer.stop.set()
            try:
                await refused(balancer.url)
            finally:
                engine.hold.set()

    assert running.result().status_code == 200


async def refused(url: str) -> None:
    """Wait until nobody accepts connections any more."""
    async with asyncio.timeout(20), httpx.AsyncClient(trust_env=False) as http:
        while True:
            try:
                await http.get(f"{url}/health")
            except httpx.ConnectError:
                return
            except httpx.TransportError:
                continue  # it was closing just then


async def test_drain_ends_in_time(engine: Any, balancer_factory: Any) -> None:
    """An answer that never ends doesn't keep the process."""
    engine.stall.add("/v1/completions")
    config = {"instances": [{"url": engine.url}], "drain_s": 1}
    async with balancer_factory(config) as balancer:
        await balancer.available()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(outcome(balancer.http, IDS))
            await engine.wait_for_calls("/v1/completions", 1)
            balancer.stop.set()

    assert running.result() == 503


async def test_drain_limit_ends_a_stream_honestly(
    engine: Any, balancer_factory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An error event, a broken connection, the request's own log line and no traceback."""
    engine.streams_forever = True
    config = {"instances": [{"url": engine.url}], "drain_s": 1}
    with capture_logs() as logs:
        async with balancer_factory(config) as balancer:
            await balancer.available()
            body = {**IDS, "stream": True}
            received: list[str] = []
            async with balancer.http.stream("POST", "/v1/completions", json=body) as answer:
                with pytest.raises(httpx.RemoteProtocolError):
                    await read_lines(answer, received, balancer.stop)

    done = [each for each in logs if each["event"] == "request_done"]
    events = [line for line in received if line]
    assert "shutting down" in events[-1]
    assert [(each["status"], each["error"]) for each in done] == [(200, "cancelled")]
    drain = {each["event"]: each for each in logs if each["event"].startswith("draining")}
    assert drain["draining_started"]["running"] == drain["draining_ended"]["cut"] == 1
    assert not [each for each in caplog.records if each.name.startswith("uvicorn")]


async def read_lines(answer: httpx.Response, received: list[str], stop: asyncio.Event) -> None:
    """Ask for the end as soon as something has come."""
    async for line in answer.aiter_lines():
        received.append(line)
        stop.set()


async def outcome(http: httpx.AsyncClient, body: Any) -> int | str:
    try:
        return (await http.post("/v1/completions", json=body)).status_code
    except httpx.HTTPError as error:
        return type(error).__name__


async def test_draining_balancer_is_not_ready(balancer: Any) -> None:
    """Whoever balances over balancers stops sending."""
    balancer.app.start_draining()

    ready = await balancer.http.get("/ready")
    status = await balancer.http.get("/status")

    assert ready.status_code == 503
    assert ready.json()["reasons"] == ["this balancer is shutting down"]
    assert status.json()["draining"] is True


async def test_address_in_use_is_told(balancer: Any) -> None:
    """By name, before anything starts."""
    app = create_app(config=BalancerConfig(), index=MemoryIndex(), registry=CollectorRegistry())
    port = int(balancer.url.rsplit(":", 1)[1])

    with pytest.raises(ListenError, match=f"127.0.0.1 port {port}"):
        await serve(app, host="127.0.0.1", port=port, drain_s=1, stop=asyncio.Event())


async def test_cancelled_server_closes_what_it_opened(engine: Any) -> None:
    """Somebody else's crash in the same process is no reason to leave probes running."""
    config = BalancerConfig(instances=(engine.settings(),))
    app = create_app(config=config, index=MemoryIndex(), registry=CollectorRegistry())
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(
            serve(
                app,
                host="127.0.0.1",
                port=0,
                drain_s=60,
                stop=asyncio.Event(),
                on_listening=port.set_result,
            )
        )
        await port
        task.cancel()

    assert not [each for each in asyncio.all_tasks() if "balancer" in repr(each)]


async def test_restarted_engine_keeps_no_predictions(engine: Any, balancer_factory: Any) -> None:
    """A refused connection means a dead process, and its cache is gone with it."""
    async with balancer_factory({"instances": [{"url": engine.url}]}) as balancer:
        await balancer.available()
        ledger = balancer.app.ledger
        rank = RankId(engine.id, 0)
        keys = [BlockKey(1)]
        work = LegWork(
            rank=rank, kind="whole", prompt_tokens=16, uncached_tokens=16, work_s=0.1, keys=keys
        )
        with ledger.hold(work):
            assert ledger.predicted_blocks(rank, keys, 0) == 1
            balancer.app.keeper.report(engine.id, False, "engine_unreachable")

            assert ledger.predicted_blocks(rank, keys, 0) == 0
            assert ledger.load(rank).requests == 1


async def test_rank_that_the_instance_has_no_more_is_forgotten(
    engine: Any, balancer_factory: Any
) -> None:
    """It came back with fewer ranks: what was predicted of the other one is void."""
    engine.answers["/kv_event_sources"] = (200, b'{"0": {}, "1": {}}')
    async with balancer_factory({"instances": [{"url": engine.url}]}) as balancer:
        await balancer.available()
        second = RankId(engine.id, 1)
        work = LegWork(
            rank=second, kind="whole", prompt_tokens=16, uncached_tokens=16, work_s=0.1, keys=[KEY]
        )
        with balancer.app.ledger.hold(work):
            engine.answers["/kv_event_sources"] = (200, b'{"0": {}}')
            balancer.app.keeper.report(engine.id, False, "engine_unreachable")
            async with asyncio.timeout(20):
                await balancer.app.keeper.wait_for(lambda fleet: second not in fleet.ranks)

            assert balancer.app.ledger.predicted_blocks(second, [KEY], 0) == 0


async def test_balancer_that_cannot_go_on_says_so_and_ends(engine: Any) -> None:
    """Whoever watches the process must not take it for alive."""
    config = BalancerConfig(instances=(engine.settings(),), drain_s=5)
    app = create_app(config=config, index=MemoryIndex(), registry=CollectorRegistry())
    engine.hold = asyncio.Event()

    async def end_early() -> None:
        await engine.wait_for_calls("/v1/completions", 1)
        raise RuntimeError("a bug")

    app.keeper.run = end_early  # type: ignore[method-assign]
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ended(serving(app, port)))
        url = f"http://127.0.0.1:{await port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as http:
            before = (await http.get("/health")).status_code
            await engine_is_known(app, engine)
            running = group.create_task(http.post("/v1/completions", json=IDS))
            async with asyncio.timeout(20):
                await app.broken.wait()
            app_says = [await ask(app, path) for path in ("/health", "/ready")]
            engine.hold.set()
            answer = await running
        error = await task

    assert before == 200
    assert app_says == [503, 503]
    assert answer.status_code == 200, "what runs is finished"
    assert isinstance(error, BalancerBrokenError)


async def engine_is_known(app: Any, engine: Any) -> None:
    """Probe once by hand: this test's keeper doesn't."""
    watched = app.keeper._watched[engine.id]
    answer = await app.keeper._look(watched)
    state = watched.state.after_probe(answer.outcome, None, app.keeper._thresholds)
    app.keeper._settle(watched, state, answer.models)


async def ended(work: Any) -> BaseException | None:
    try:
        await work
    except BalancerBrokenError as error:
        return error
    return None


async def serving(app: Any, port: asyncio.Future[int]) -> None:
    await serve(
        app,
        host="127.0.0.1",
        port=0,
        drain_s=5,
        stop=asyncio.Event(),
        on_listening=port.set_result,
    )


async def ask(app: Any, path: str) -> int:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://balancer"
    ) as http:
        return (await http.get(path)).status_code


async def test_conflicting_connectors_are_told(engine_factory: Any, balancer_factory: Any) -> None:
    """In the log once, in /status as long as it lasts; requests are answered all the same."""
    with capture_logs() as logs:
        async with engine_factory() as prefill, engine_factory() as decode:
            config = {
                "instances": [
                    {"url": prefill.url, "role": "prefill", "connector": "nixl"},
                    {"url": decode.url, "role": "decode", "connector": "none"},
                ]
            }
            async with balancer_factory(config) as balancer:
                await balancer.available(2)
                long = {"model": "tiny", "prompt": list(range(1000))}
                answer = await balancer.http.post("/v1/completions", json=long)
                status = (await balancer.http.get("/status")).json()
                balancer.app.keeper.set_instances([decode.settings(role=Role.DECODE)])
                mended = (await balancer.http.get("/status")).json()

    told = [each for each in logs if each["event"] == "connector_conflict"]
    assert len(told) == 1
    assert status["conflicts"] == [told[0]["conflict"]]
    assert mended["conflicts"] == []
    assert answer.status_code == 200
    assert answer.headers["x-kvlb-reason"] == "connector_mismatch"
    assert prefill.calls("/v1/completions") == 0
