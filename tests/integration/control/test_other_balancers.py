"""A balancer in an engine's place, this one or another: known by its answer, whoever named it."""

import asyncio
from typing import Any

import httpx
import pytest

from balancer.config import BalancerConfig, check_config
from balancer.core.fleet.probe_state import AT_ONCE
from balancer.core.settings.control import InstanceSettings
from balancer.core.settings.errors import ConfigError, decode_settings

IDS = {"model": "tiny", "prompt": [1, 2, 3]}
KEY = {"x-api-key": "k"}
ADMIN = {"admin": {"api_key": "k"}}
MARK = "x-kvlb-balancer"


async def reason_of(balancer: Any, url: str) -> str:
    """Why `url` gets nothing, once it was probed."""
    async with asyncio.timeout(20):
        fleet = await balancer.app.keeper.wait_for(
            lambda now: any(
                each.id == url and each.unhealthy_reason != "not_probed" for each in now.instances
            )
        )
    reason: str = next(each.unhealthy_reason for each in fleet.instances if each.id == url)
    return reason


async def add(balancer: Any, url: str) -> httpx.Response:
    answer: httpx.Response = await balancer.http.post(
        "/instances/add", json={"url": url}, headers=KEY
    )
    return answer


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models"])
async def test_balancer_says_that_it_is_one(balancer: Any, path: str) -> None:
    """The same name on each, and no engine's."""
    first, again = await balancer.http.get("/health"), await balancer.http.get(path)

    assert len(first.headers[MARK]) == 32
    assert again.headers[MARK] == first.headers[MARK]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.1"])
async def test_balancer_refuses_to_add_itself(
    engine: Any, balancer_factory: Any, host: str
) -> None:
    """By whatever name it is reached: it answers with its own id."""
    config = {"instances": [{"url": engine.url}], **ADMIN}
    async with balancer_factory(config) as balancer:
        await balancer.available()
        answer = await add(balancer, balancer.url.replace("127.0.0.1", host))
        listed = (await balancer.http.get("/instances")).json()["instances"]

    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "own_address"
    assert "this balancer listens itself" in answer.json()["error"]["message"]
    assert len(listed) == 1


async def test_balancer_refuses_to_add_another(engine: Any, balancer_factory: Any) -> None:
    """The message says what to name instead."""
    config = {"instances": [{"url": engine.url}], **ADMIN}
    async with balancer_factory(config) as one, balancer_factory(config) as other:
        await one.available()
        await other.available()
        answer = await add(one, other.url)

    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["code"] == "another_balancer"
    assert other.url in error["message"]
    assert "name the engines behind it" in error["message"]


async def test_own_listening_address_is_refused_at_start_and_at_run_time(
    balancer_factory: Any,
) -> None:
    """Nobody has to be asked for that."""
    with pytest.raises(ConfigError, match=r"`instances\[0\]\.url`.*listens itself"):
        check_config(
            decode_settings(
                {"instances": [{"url": "http://localhost:8080"}]}, BalancerConfig, where=""
            ),
            {},
        )
    async with balancer_factory({"port": 9, **ADMIN}) as balancer:
        answer = await add(balancer, "http://localhost:9")

    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "own_address")


async def test_two_balancers_that_name_each_other_send_each_other_nothing(
    balancer_factory: Any, engine: Any
) -> None:
    """By the file: each finds out with its first probe, and serves with its engines alone."""
    config = {"instances": [{"url": engine.url}], **ADMIN}
    async with balancer_factory(config) as one, balancer_factory(config) as other:
        for each, peer in ((one, other), (other, one)):
            await each.available()
            named = {"instances": [{"url": engine.url}, {"url": peer.url}], **ADMIN}
            changed = decode_settings(named, BalancerConfig, where="")
            each.app.reconfigure(check_config(changed, {}))
        reasons = [await reason_of(one, other.url), await reason_of(other, one.url)]
        served = await one.http.post("/v1/completions", json=IDS)
        ready = (await one.http.get("/ready")).json()

    assert reasons == ["another_balancer", "another_balancer"]
    assert served.status_code == 200
    assert any(each.endswith(": another_balancer") for each in ready["reasons"])


async def test_balancer_found_by_dns_gets_nothing(balancer: Any) -> None:
    """Sources that nobody answers for are watched like any other."""
    balancer.app.control.members.set_discovered([InstanceSettings(url=balancer.url)])

    assert await reason_of(balancer, balancer.url) == "own_address"


@pytest.mark.parametrize(
    "there",
    [
        InstanceSettings(url="http://127.0.0.1:9"),
        InstanceSettings(url="http://127.0.0.1:8", connector="none-such"),
    ],
    ids=["own-address", "unknown-connector"],
)
async def test_what_came_by_another_door_refuses_nobody_else(
    engine: Any, engine_factory: Any, balancer_factory: Any, there: InstanceSettings
) -> None:
    """What a request adds, or the file names, is judged by itself: who is there stays what it is."""
    config = {"port": 9, "instances": [{"url": engine.url}], **ADMIN}
    async with balancer_factory(config) as balancer, engine_factory() as other:
        members = balancer.app.control.members
        members.set_discovered([there])
        added = await add(balancer, other.url)
        again = await add(balancer, there.url)
        named = {"port": 9, "instances": [{"url": engine.url}, {"url": "http://127.0.0.1:7"}]}
        balancer.app.reconfigure(check_config(decode_settings(named, BalancerConfig, where=""), {}))
        origins = [each.origin.value for each in members.present.members]

    assert (added.status_code, again.status_code) == (200, 409)
    assert origins == ["file", "file", "added", "discovered"]


async def test_request_that_comes_back_is_refused(balancer: Any, engine: Any) -> None:
    """Should an instance lead back here all the same: one leg, not hundreds."""
    mark = (await balancer.http.get("/health")).headers[MARK]
    answers = [
        await balancer.http.post(path, json=IDS, headers={MARK: mark})
        for path in ("/v1/completions", "/v1/embeddings", "/v1/messages")
    ]

    assert [each.status_code for each in answers] == [508, 508, 508]
    assert answers[0].json()["error"]["code"] == "loop"
    assert engine.calls("/v1/completions") == engine.calls("/v1/embeddings") == 0


def sending_back_to(balancer: Any) -> Any:
    """What a proxy does whose upstream is the balancer itself."""

    async def send_back(path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        kept = {name: headers[name] for name in headers if name not in {"host", "content-length"}}
        answer = await balancer.http.post(path, json=body, headers=kept)
        return answer.status_code, answer.content

    return send_back


@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_costs_no_client_its_answer(
    engine: Any, engine_factory: Any, balancer_factory: Any, stream: bool
) -> None:
    """Another instance is asked, and after a few the one that loops is held back."""
    async with (
        engine_factory() as proxy,
        balancer_factory({"instances": [{"url": proxy.url}, {"url": engine.url}]}) as b,
    ):
        proxy.forward = sending_back_to(b)
        await b.available(2)
        answers = [
            await b.http.post("/v1/completions", json={**IDS, "stream": stream}) for _ in range(20)
        ]

    assert {answer.status_code for answer in answers} == {200}
    assert 1 <= proxy.calls("/v1/completions") <= 4


async def test_a_loop_behind_a_proxy_is_one_leg(engine_factory: Any, balancer_factory: Any) -> None:
    """It answers probes as an engine would and sends every request back."""
    async with (
        engine_factory() as proxy,
        balancer_factory({"instances": [{"url": proxy.url}]}) as b,
    ):
        proxy.forward = sending_back_to(b)
        await b.available()
        answer = await b.http.post("/v1/completions", json=IDS)

    assert (answer.status_code, answer.json()["error"]["code"]) == (508, "loop")
    assert proxy.calls("/v1/completions") == 1


async def test_request_of_another_balancer_is_refused(balancer: Any) -> None:
    """Its engines can be named to it, so that it sees what they cache."""
    answer = await balancer.http.post("/v1/completions", json=IDS, headers={MARK: "other"})

    assert answer.status_code == 508
    assert "another kvlb balancer" in answer.json()["error"]["message"]


async def test_legs_carry_the_name(balancer: Any, engine: Any) -> None:
    """So that another balancer knows them."""
    mark = (await balancer.http.get("/health")).headers[MARK]
    await balancer.http.post("/v1/completions", json=IDS)
    await balancer.http.post("/v1/embeddings", json=IDS)

    seen = [
        headers[MARK]
        for path, _, headers in engine.received
        if path in {"/v1/completions", "/v1/embeddings"}
    ]
    assert seen == [mark, mark]


def test_a_balancer_in_an_engines_place_needs_no_second_probe() -> None:
    """It would get requests until then."""
    assert {"own_address", "another_balancer"} <= AT_ONCE
