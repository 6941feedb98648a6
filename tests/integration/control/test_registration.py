"""Engines announce themselves over real ZMQ; the balancer takes them in, and lets them go."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from balancer.config import BalancerConfig
from balancer.core.fleet.registrations import RegistrationBook
from balancer.core.settings.errors import ConfigError, decode_settings
from balancer.core.settings.registration import RegistrationSettings
from balancer.fleet.registration import RegistrationService

IDS = {"model": "tiny", "prompt": [1, 2, 3]}
# A connector that is there whatever else is.
SETTINGS = {"port": 0, "connector": "nixl", "silent_s": 1.5, "remove_s": 3.0}


def announcement(engine: Any, kind: str = "D", **more: Any) -> dict[str, Any]:
    return {
        "type": kind,
        "http_address": engine.url.removeprefix("http://"),
        "zmq_address": "host:127.0.0.1,handshake:6301,notify:61005",
        "dp_size": 1,
        "tp_size": 1,
        "transfer_mode": "WRITE",
        **more,
    }


@asynccontextmanager
async def dealer(port: int, identity: bytes = b"") -> AsyncIterator[Callable[..., Any]]:
    """An engine's side: send what is given, packed unless it is bytes."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        if identity:
            socket.set(zmq.IDENTITY, identity)
        socket.connect(f"tcp://127.0.0.1:{port}")

        async def send(*frames: Any) -> None:
            packed = [x if isinstance(x, bytes) else msgspec.msgpack.encode(x) for x in frames]
            await socket.send_multipart(packed)

        yield send


def port_of(balancer: Any) -> int:
    service = balancer.app.control.registration
    assert isinstance(service, RegistrationService)
    return service.port


async def holds(balancer: Any, *expected: str | None) -> None:
    """Wait until the fleet's members are held so."""
    async with asyncio.timeout(20):
        await balancer.app.keeper.wait_for(
            lambda fleet: [each.hold for each in fleet.instances] == list(expected)
        )


async def test_registered_engine_gets_requests_while_it_beats(
    engine: Any, balancer_factory: Any
) -> None:
    """Silent for some beats: nothing new. Silent for long: gone. Heard again: back."""
    async with (
        balancer_factory({"registration": SETTINGS}) as balancer,
        dealer(port_of(balancer)) as send,
    ):
        await send({"type": "HELLO"})
        await send(announcement(engine))
        await balancer.available()
        served = await balancer.http.post("/v1/completions", json=IDS)
        await holds(balancer, "silent")
        refused = await balancer.http.post("/v1/completions", json=IDS)
        await holds(balancer)
        await send(announcement(engine))
        await balancer.available()

    assert served.status_code == 200
    assert refused.status_code == 503


async def test_own_address_that_registers_keeps_nobody_else_out(
    engine: Any, balancer_factory: Any
) -> None:
    """Whoever announced it: others are added as before."""
    config = {"port": 9, "registration": SETTINGS, "admin": {"api_key": "k"}}
    async with balancer_factory(config) as balancer, dealer(port_of(balancer)) as send:
        await send(announcement(engine, http_address="127.0.0.1:9"))
        await holds(balancer, None)
        added = await balancer.http.post(
            "/instances/add", json={"url": engine.url}, headers={"x-api-key": "k"}
        )

    assert added.status_code == 200


async def test_beat_brings_a_silent_engine_back(engine: Any, balancer_factory: Any) -> None:
    """What it announced is in the snapshot that connectors see."""
    settings = {**SETTINGS, "remove_s": 60.0}
    async with (
        balancer_factory({"registration": settings}) as balancer,
        dealer(port_of(balancer)) as send,
    ):
        await send(announcement(engine, "P", tp_size=4))
        await holds(balancer, "silent")
        await send(announcement(engine, "P", tp_size=4))
        await holds(balancer, None)
        (instance,) = balancer.app.keeper.snapshot().instances

    assert instance.role.value == "prefill"
    assert instance.facts.registration.tp_size == 4
    assert instance.facts.registration.zmq_address.startswith("host:127.0.0.1,")


async def test_engine_whose_host_was_lost_is_heard_again(
    engine: Any, balancer_factory: Any
) -> None:
    """Its old connection, of the same name, was never closed: the new one takes over."""
    config = {"registration": {**SETTINGS, "remove_s": 60.0}}
    async with balancer_factory(config) as balancer:
        port = port_of(balancer)
        async with dealer(port, b"127.0.0.1:21001") as lost:
            await lost(announcement(engine))
            await holds(balancer, None)
            await holds(balancer, "silent")
            async with dealer(port, b"127.0.0.1:21001") as returned:
                await returned(announcement(engine))
                await holds(balancer, None)


async def test_peer_that_answers_no_ping_is_let_go() -> None:
    """A lost host closes nothing: without pings its connections would stay for good."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL".ljust(55, b"\0")
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    service = RegistrationService(
        RegistrationBook(RegistrationSettings(port=0)),
        bind="127.0.0.1",
        port=0,
        clock=lambda: 0.0,
        on_change=lambda: None,
        ping_s=0.05,
    )
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(greeting + b"\x04" + bytes([len(ready)]) + ready)
        async with asyncio.timeout(20):
            told = await reader.read()  # until the end
        writer.close()
    finally:
        service.close()

    assert b"READY" in told
    assert b"PING" in told


async def test_what_cannot_be_used_is_counted_and_changes_nothing(
    engine: Any, balancer_factory: Any, eventually: Any
) -> None:
    """One log line per reason, however often; the next good message is taken."""
    with capture_logs() as log:
        async with (
            balancer_factory({"registration": SETTINGS}) as balancer,
            dealer(port_of(balancer)) as send,
        ):
            for _ in range(3):
                await send(b"\xc1 junk")
            await send(b"a", b"b", b"c")
            await send(announcement(engine, http_address="nowhere"))
            await send(announcement(engine))
            await send(announcement(engine, transfer_mode="READ", http_address="127.0.0.1:9"))
            await balancer.available()
            service = balancer.app.control.registration
            await eventually(lambda: service.heard == 7)
            metrics = (await balancer.http.get("/metrics")).text

    refused = [each["reason"] for each in log if each["event"] == "registration_refused"]
    assert service.refused == {"not_a_map": 3, "frames": 1, "http_address": 1, "transfer_mode": 1}
    assert sorted(refused) == ["frames", "http_address", "not_a_map", "transfer_mode"]
    assert 'kvlb_registrations_refused_total{reason="not_a_map"} 3.0' in metrics


async def test_removed_engine_stays_out_while_it_beats(
    engine: Any, balancer_factory: Any, eventually: Any
) -> None:
    """Until it has stopped announcing itself and begins anew."""
    config = {"registration": SETTINGS, "admin": {"api_key": "k"}}
    async with (
        balancer_factory(config) as balancer,
        dealer(port_of(balancer)) as send,
    ):
        await send(announcement(engine))
        await balancer.available()
        await balancer.http.post(
            "/instances/remove", json={"url": engine.url}, headers={"x-api-key": "k"}
        )
        await send(announcement(engine))
        book = balancer.app.control._book
        out = balancer.app.keeper.snapshot().instances
        await eventually(lambda: not book.announced())
        await send(announcement(engine))
        await balancer.available()

    assert out == ()


async def test_instance_of_the_file_is_not_replaced(engine: Any, balancer_factory: Any) -> None:
    """An engine may announce itself and be configured; what the operator wrote counts."""
    config = {"instances": [{"url": engine.url, "role": "mixed"}], "registration": SETTINGS}
    async with (
        balancer_factory(config) as balancer,
        dealer(port_of(balancer)) as send,
    ):
        await send(announcement(engine))
        await balancer.available()
        async with asyncio.timeout(20):
            await balancer.app.keeper.wait_for(
                lambda fleet: fleet.instances[0].facts.registration is not None
            )
        (instance,) = balancer.app.keeper.snapshot().instances

    assert (instance.alias, instance.role.value, instance.hold) == ("m0", "mixed", None)


def test_port_that_is_taken_is_named() -> None:
    """At start, by its key."""
    settings = RegistrationSettings(port=0)
    book = RegistrationBook(settings)

    def listen(port: int) -> RegistrationService:
        return RegistrationService(
            book, bind="127.0.0.1", port=port, clock=lambda: 0.0, on_change=lambda: None
        )

    first = listen(0)
    try:
        with pytest.raises(ConfigError, match=r"`registration.port`: 127.0.0.1"):
            listen(first.port)
    finally:
        first.close()


@pytest.mark.parametrize(
    ("section", "key"),
    [
        pytest.param({"networks": ["10.0.0.0/40"]}, "registration.networks", id="no-network"),
        pytest.param({"port": -1}, "registration.port", id="no-port"),
        pytest.param({"silent_s": 0}, "registration.silent_s", id="no-time"),
        pytest.param({"prot": 1}, "registration.prot", id="unknown-key"),
    ],
)
def test_settings_are_refused_by_name(section: dict[str, Any], key: str) -> None:
    """Like every other."""
    with pytest.raises(ConfigError, match=key):
        decode_settings({"registration": section}, BalancerConfig, where="")
