"""Names that are looked up again and again: engines found by DNS, engines that move."""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from structlog.testing import capture_logs

from balancer.core.settings.errors import ConfigError, decode_settings
from balancer.fleet.members import Members
from indexer.core.types import InstanceId
from kvlb.errors import SettingsError
from kvlb.names.resolver import LookupFailedError, NameUnknownError, resolve
from kvlb.names.settings import DiscoverySettings
from kvlb.names.watch import NameWatch
from kvlb.running import run_kvlb
from kvlb.settings import InstanceEntry, KvlbSettings, Overrides, load_fleet
from kvlb.simulated import parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings

PROMPT = {"model": "sim", "prompt": list(range(3, 131)), "max_tokens": 2}


class Names:
    """A resolver whose answers a test sets: addresses, or an error to raise."""

    def __init__(self, **known: Any) -> None:
        self.known: dict[str, Any] = {
            name.replace("_", "-"): value for name, value in known.items()
        }
        self.asked: list[str] = []

    async def __call__(self, name: str) -> frozenset[str]:
        self.asked.append(name)
        answer = self.known.get(name, NameUnknownError(name))
        if isinstance(answer, Exception):
            raise answer
        return frozenset(answer)


class Watching:
    """A watch over settings, by hand."""

    def __init__(self, names: Names, **settings: Any) -> None:
        self.settings = decode_settings(settings, KvlbSettings, where="")
        self.members: Members[KvlbSettings] = Members(self.settings, wall_clock=lambda: 0.0)
        self.moved: list[InstanceId] = []
        self.watch = NameWatch(self.members, resolve=names, on_moved=self._on_moved)

    async def _on_moved(self, instances: Sequence[InstanceId]) -> None:
        self.moved += instances

    async def look(self) -> list[str]:
        """Look once; who is a member then."""
        await self.watch.look(self.members.present.config)
        return [each.id for each in self.members.present.members]


DNS = {"dns": "pods", "port": 8000, "role": "decode", "events": "tcp://*:5557"}


async def test_each_address_is_an_instance() -> None:
    """With what its entry says, IPv6 in brackets."""
    watching = Watching(Names(pods={"10.0.0.1", "fd00::1"}), discovery=[DNS])

    found = await watching.look()
    entries = watching.members.present.config.instances

    assert found == ["http://10.0.0.1:8000", "http://[fd00::1]:8000"]
    assert {(each.role.value, each.events) for each in entries} == {("decode", "tcp://*:5557")}
    assert [each.origin.value for each in watching.members.present.members] == ["discovered"] * 2


async def test_lookup_is_whole_and_its_failure_changes_nothing() -> None:
    """An address that vanished while nobody could look is out with the next answer (F56)."""
    names = Names(pods={"10.0.0.1", "10.0.0.2"})
    watching = Watching(names, discovery=[DNS])
    await watching.look()
    names.known["pods"] = LookupFailedError("the resolver is down")
    with capture_logs() as log:
        during = [await watching.look() for _ in range(5)]
    names.known["pods"] = {"10.0.0.2", "10.0.0.3"}
    after = await watching.look()

    assert during == [["http://10.0.0.1:8000", "http://10.0.0.2:8000"]] * 5
    assert [each["event"] for each in log] == ["name_lookup"]
    assert after == ["http://10.0.0.2:8000", "http://10.0.0.3:8000"]


async def test_service_without_pods_is_empty_after_a_while() -> None:
    """A headless service without any has no name."""
    names = Names(pods={"10.0.0.1"})
    watching = Watching(names, discovery=[DNS])
    await watching.look()
    del names.known["pods"]

    assert [len(await watching.look()) for _ in range(3)] == [1, 1, 0]


async def test_number_is_bounded() -> None:
    """A name that stands for half the internet is a mistake; it is said once."""
    many = {f"10.0.{number // 250}.{number % 250}" for number in range(600)}
    watching = Watching(Names(pods=many), discovery=[{**DNS, "max_instances": 3}])

    with capture_logs() as log:
        found = [await watching.look() for _ in range(3)]

    assert [len(each) for each in found] == [3, 3, 3]
    assert [each["problem"] for each in log if each["event"] == "name_lookup"] == ["600 addresses"]


async def test_instances_behind_a_name_that_moved_are_told() -> None:
    """By their own name or by that of their events; addresses aren't looked up at all."""
    names = Names(engine={"10.0.0.1"}, bus={"10.0.0.5"}, still={"10.0.0.9"})
    watching = Watching(
        names,
        instances=[
            {"url": "http://engine:8000"},
            {"url": "http://still:8000", "events": "tcp://bus:5557"},
            {"url": "http://still:8001"},
            {"url": "http://10.0.0.7:1", "events": "ipc:///tmp/x"},
            {"url": "http://localhost:1"},
        ],
    )
    await watching.look()
    first = list(watching.moved)
    names.known["engine"] = {"10.0.0.2"}
    await watching.look()
    second = list(watching.moved)
    names.known["bus"] = {"10.0.0.6"}
    await watching.look()

    assert (first, second) == ([], ["http://engine:8000"])
    assert watching.moved == ["http://engine:8000", "http://still:8000"]
    assert set(names.asked) == {"engine", "still", "bus"}


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        pytest.param({}, "dns", id="no-name"),
        pytest.param({"dns": ""}, "dns", id="empty-name"),
        pytest.param({"dns": "a b"}, "dns", id="no-host"),
        pytest.param({"dns": "a", "port": 0}, "port", id="no-port"),
        pytest.param({"dns": "a", "role": "boss"}, "role", id="role"),
        pytest.param({"dns": "a", "connector": "nope"}, "connector", id="connector"),
        pytest.param({"dns": "a", "events": "tcp://h:1"}, r"tcp://\*:port", id="one-host-for-all"),
        pytest.param({"dns": "a", "nope": 1}, "nope", id="unknown-key"),
    ],
)
def test_settings_are_refused_by_name(tmp_path: Path, entry: dict[str, Any], says: str) -> None:
    """As every other."""
    file = tmp_path / "kvlb.yaml"
    file.write_text(yaml.safe_dump({"discovery": [entry]}))

    with pytest.raises(SettingsError, match=rf"discovery.*{says}"):
        load_fleet(file, Overrides(), {})


def test_name_is_not_discovered_twice(tmp_path: Path) -> None:
    """Not on the same port."""
    file = tmp_path / "kvlb.yaml"
    file.write_text(yaml.safe_dump({"discovery": [{"dns": "a"}, {"dns": "A."}]}))

    with pytest.raises(SettingsError, match=r"discovery\[1\].dns"):
        load_fleet(file, Overrides(), {})


def test_entry_that_the_fleet_does_not_know_is_refused() -> None:
    """The type of the fleet's entries decides."""
    found = DiscoverySettings(dns="a", events="tcp://*:1")

    with pytest.raises(ConfigError, match="events"):
        found.entries(["10.0.0.1"], InstanceEntry.__bases__[0])


def test_every_interface_is_each_instances_own(tmp_path: Path) -> None:
    """`tcp://*:5557` of two hosts are two streams, of one host one."""
    file = tmp_path / "kvlb.yaml"
    entries = [{"url": url, "events": "tcp://*:5557"} for url in ("http://a:1", "http://b:1")]
    file.write_text(yaml.safe_dump({"instances": entries}))
    two = load_fleet(file, Overrides(), {}).instances
    entries[1]["url"] = "http://a:2"
    file.write_text(yaml.safe_dump({"instances": entries}))

    assert len(two) == 2
    with pytest.raises(SettingsError, match=r"instances\[1\].events"):
        load_fleet(file, Overrides(), {})


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        pytest.param(socket.gaierror(socket.EAI_NONAME, "?"), NameUnknownError, id="unknown"),
        pytest.param(socket.gaierror(socket.EAI_AGAIN, "?"), LookupFailedError, id="no-resolver"),
        pytest.param(OSError("?"), LookupFailedError, id="no-network"),
        pytest.param(UnicodeError("?"), LookupFailedError, id="no-name"),
    ],
)
async def test_resolver_says_unknown_or_failed(
    monkeypatch: pytest.MonkeyPatch, fault: Exception, error: type[Exception]
) -> None:
    """What the system says of a name that isn't there is no failure."""

    def fail(*_: Any, **__: Any) -> None:
        raise fault

    monkeypatch.setattr(socket, "getaddrinfo", fail)

    with pytest.raises(error):
        await resolve("name")


async def test_resolver_leaves_out_what_is_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses with a zone; each other one once. A name with only such has none."""
    zoned = (socket.AF_INET6, 1, 6, "", ("fe80::1%eth0", 0, 0, 2))
    plain = (socket.AF_INET, 1, 6, "", ("10.0.0.1", 0))
    answers = iter(([zoned, plain, plain], [zoned]))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: next(answers))

    assert await resolve("name") == {"10.0.0.1"}
    with pytest.raises(NameUnknownError):
        await resolve("name")


async def test_pods_come_and_go() -> None:
    """Requests and event streams follow a headless service, here two addresses of this machine."""
    settings = EngineSettings(inter_token_ms=1.0)
    names = Names(pods={"127.0.0.1"})
    async with simulated_fleet(parse_fleet("1"), settings) as first:
        url = first.engines[0].url
        port = int(url.rpartition(":")[2])
        async with simulated_fleet(parse_fleet("1"), settings, host="127.0.0.2", base_port=port):
            config = {
                "port": 0,
                "resolve_interval_s": 0.1,
                "probes": {"interval_s": 0.1},
                "routing": {"lookup_timeout_s": 5.0},
                "discovery": [{"dns": "pods", "port": port}],
            }
            stop = asyncio.Event()
            listening: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            async with asyncio.TaskGroup() as group:
                group.create_task(
                    run_kvlb(
                        decode_settings(config, KvlbSettings, where=""),
                        stop=stop,
                        on_listening=listening.set_result,
                        resolve=names,
                    )
                )
                kvlb = await listening
                async with httpx.AsyncClient(base_url=kvlb.url, trust_env=False) as http:
                    try:
                        await _exact(http, {url})
                        one = await http.post("/v1/completions", json=PROMPT)
                        names.known["pods"] = {"127.0.0.1", "127.0.0.2"}
                        other = url.replace("127.0.0.1", "127.0.0.2")
                        await _exact(http, {url, other})
                        names.known["pods"] = {"127.0.0.2"}
                        await _exact(http, {other})
                        two = await http.post("/v1/completions", json=PROMPT)
                    finally:
                        stop.set()

    assert (one.status_code, two.status_code) == (200, 200)
    assert one.headers["x-kvlb-instance"] != two.headers["x-kvlb-instance"]


async def _exact(http: httpx.AsyncClient, urls: set[str]) -> None:
    """Wait until these are the fleet, each available and followed exactly."""
    async with asyncio.timeout(20):
        while True:
            shown = (await http.get("/status")).json()["instances"]
            well = {
                each["url"]
                for each in shown
                if each["available"] and (each["ranks"][0]["index"] or {}).get("trust") == "exact"
            }
            if well == urls == {each["url"] for each in shown}:
                return
            await asyncio.sleep(0.02)
