"""`kvlb record` of simulated engines: what is recorded, and what can't be."""

import asyncio
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from kvlb.audit.capture import Capture, read_capture
from kvlb.audit.command import find_files
from kvlb.audit.compare import audit_capture
from kvlb.audit.report import AuditReport
from kvlb.errors import KvlbError, SettingsError
from kvlb.record import session
from kvlb.record.proxy import RecordingProxy, serve_proxy
from kvlb.record.session import RecordOptions, record
from kvlb.record.stations import Station
from kvlb.record.writer import CaptureWriter
from kvlb.settings import KvlbSettings, Overrides, load_settings
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings
from simulator.service import RunningEngine

ENGINE = EngineSettings(inter_token_ms=1.0, prefill_tokens_per_s=200_000)


def clock() -> float:
    return datetime.now(UTC).timestamp()


def engine_like(**changes: Any) -> EngineSettings:
    return EngineSettings(inter_token_ms=1.0, prefill_tokens_per_s=200_000, **changes)


def told(engines: Sequence[RunningEngine], more: str = "") -> KvlbSettings:
    options = [f"{instance_option(each)}{more}" for each in engines]
    return load_settings(None, Overrides(instances=options), {})


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., Any]:
    """Records a simulated fleet and returns the capture."""

    async def run(
        spec: str, engine: EngineSettings = ENGINE, *, more: str = "", **changes: Any
    ) -> Capture:
        chosen = {"requests": 24, "minutes": None, "nonce": "test", **changes}
        options = RecordOptions(out=tmp_path / "run", **chosen)
        async with simulated_fleet(parse_fleet(spec), engine) as fleet:
            async with asyncio.timeout(50):
                await record(told(fleet.engines, more), options, clock, asyncio.Event())
        return read_capture(*find_files(options.out, None))

    return run


async def audited(capture: Capture) -> AuditReport:
    return await asyncio.to_thread(audit_capture, capture)


@pytest.mark.parametrize(
    ("spec", "engine"),
    [
        pytest.param("1", ENGINE, id="one"),
        pytest.param("2", ENGINE, id="two"),
        pytest.param("1", engine_like(dp_size=2), id="two-ranks"),
        pytest.param("1", engine_like(num_blocks=200), id="evicting"),
    ],
)
async def test_every_request_sent_alone_is_predicted(
    recorded: Callable[..., Any], spec: str, engine: EngineSettings
) -> None:
    """What was recorded is enough to say what each engine had cached."""
    capture = await recorded(spec, engine)
    report = await audited(capture)

    serial = report.phases["serial"]
    assert (serial.requests, serial.exact) == (24, 24)
    assert report.not_comparable == {}
    assert any(row.reported for row in report.rows)


async def test_old_release_is_recorded_from_its_sockets(recorded: Callable[..., Any]) -> None:
    """Array events, replay without a topic frame, no cached figure where nothing was cached."""
    report = await audited(await recorded("1", engine_like(version="0.16.0")))

    assert report.phases["serial"].exact == 24


async def test_engine_that_connects_is_recorded(recorded: Callable[..., Any]) -> None:
    """Its events come to a port that we bind."""
    report = await audited(await recorded("1", engine_like(events_host="127.0.0.1")))

    assert report.phases["serial"].exact == 24


async def test_both_legs_of_a_pair_are_recorded(recorded: Callable[..., Any]) -> None:
    """The decode engine counts what it was sent; the rest is exact."""
    capture = await recorded("1p1d")
    report = await audited(capture)

    assert {row.src for row in capture.requests} == {"p0", "d0"}
    assert report.unexplained == 0
    assert set(report.explained) <= {"remote_load"}


async def test_what_was_cached_before_is_recorded_as_a_replay(
    recorded: Callable[..., Any], tmp_path: Path
) -> None:
    """The same seed twice: the second recording finds the first one's blocks, and knows of them."""
    async with simulated_fleet(parse_fleet("1"), ENGINE) as fleet:
        settings = told(fleet.engines)
        for name in ("first", "second"):
            options = RecordOptions(
                out=tmp_path / name, requests=8, minutes=None, nonce=name, seed=3
            )
            await record(settings, options, clock, asyncio.Event())
    report = await audited(read_capture(*find_files(tmp_path / "second", None)))

    assert report.phases["serial"].exact == 8
    assert all(row.reported for row in report.rows if row.phase == "serial")


async def test_batches_lost_on_the_wire_are_in_the_replay(
    tmp_path: Path,
) -> None:
    """A gap in the numbers has everything asked for once more at the end."""
    options = RecordOptions(out=tmp_path / "run", requests=16, minutes=None, nonce="test")
    async with simulated_fleet(parse_fleet("1"), ENGINE) as fleet:
        fleet.engines[0].drop_live_batches(3)
        writer = await record(told(fleet.engines), options, clock, asyncio.Event())
    capture = read_capture(*find_files(options.out, None))
    report = await audited(capture)

    replays = [note for note in _rows(options.out) if note["kind"] == "replay"]
    assert [note["label"] for note in replays] == ["before", "after"]
    assert writer.replayed == sum(note["n"] for note in replays)
    assert report.phases["serial"].exact == 16
    told_late = report.events["replayed"]
    assert told_late > 0
    assert report.events == {"batches": writer.messages + told_late, "replayed": told_late}
    assert "lost" not in report.events


def _rows(out: Path) -> list[dict[str, Any]]:
    import gzip  # noqa: PLC0415 - here alone

    with gzip.open(find_files(out, None)[1]) as lines:
        return [json.loads(line) for line in lines]


async def test_same_seed_sends_the_same_requests(recorded: Callable[..., Any]) -> None:
    """Chats and texts, streams and not."""
    capture = await recorded("1", requests=24)
    bodies = [row.body or {} for row in capture.requests if row.phase == "serial"]

    assert {"messages" in body for body in bodies} == {True, False}
    assert {bool(body.get("stream")) for body in bodies} == {True, False}
    assert all(row.tokenize for row in capture.requests)
    assert capture.notes[0]["seed"] == 1


async def test_requests_under_way_at_once_have_a_phase_of_their_own(
    recorded: Callable[..., Any],
) -> None:
    """They are not held to be exact: blocks in flight are unknown when a request is sent."""
    report = await audited(await recorded("1", requests=30, concurrency=5))

    assert report.phases["load"].requests == 30
    assert report.not_comparable == {}


async def test_minutes_and_a_signal_end_a_recording(tmp_path: Path) -> None:
    """Whichever is first; the files are whole."""
    stopped = asyncio.Event()
    stopped.set()
    async with simulated_fleet(parse_fleet("1"), ENGINE) as fleet:
        for name, event in (("short", asyncio.Event()), ("stopped", stopped)):
            options = RecordOptions(out=tmp_path / name, requests=None, minutes=0.005, nonce=name)
            async with asyncio.timeout(20):
                await record(told(fleet.engines), options, clock, event)
            assert _rows(options.out)[-1]["kind"] == "stopped"


async def test_refused_requests_end_their_conversation_only(recorded: Callable[..., Any]) -> None:
    """A model that takes short prompts alone refuses the later turns."""
    capture = await recorded("1", engine_like(max_model_len=1200), requests=16)

    assert {row.status for row in capture.requests} == {200, 400}


async def refusal(settings: KvlbSettings, out: Path) -> str:
    options = RecordOptions(out=out, requests=1, minutes=None, nonce="test")
    with pytest.raises((KvlbError, BaseExceptionGroup)) as caught:
        await record(settings, options, clock, asyncio.Event())
    return str(_deliberate(caught.value))


def _deliberate(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def test_what_can_not_be_recorded_is_said(tmp_path: Path) -> None:
    """No events, nobody there, two models, prefill alone, a file that exists."""
    out = tmp_path / "run"
    async with (
        simulated_fleet(parse_fleet("1"), engine_like(events=False)) as silent,
        simulated_fleet(parse_fleet("1"), engine_like(model="other")) as other,
        simulated_fleet(parse_fleet("1p1d"), ENGINE) as pair,
    ):
        absent = load_settings(None, Overrides(instances=["http://127.0.0.1:9"]), {})
        alias = ",alias=o0"
        mixed = [instance_option(pair.engines[1]), other.engines[0].url + alias]
        assert "no events to record" in await refusal(told(silent.engines), out)
        assert "kvlb doctor" in await refusal(absent, out)
        assert "one model" in await refusal(
            load_settings(None, Overrides(instances=mixed), {}), out
        )
        assert "only prefill" in await refusal(told(pair.engines[:1]), out)
        assert "exists" in await refusal(told(pair.engines[:1]), out)


async def test_stream_that_brings_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording without events would be of no use."""
    monkeypatch.setattr(session, "EVENT_PATIENCE_S", 0.1)
    async with simulated_fleet(parse_fleet("1"), engine_like(prefix_caching=False)) as fleet:
        said = await refusal(told(fleet.engines), tmp_path / "run")

    assert "no event came" in said
    assert "kvlb doctor" in said


async def test_port_that_is_taken_is_said(tmp_path: Path) -> None:
    """A running kvlb binds the port that the engine connects to."""
    async with simulated_fleet(parse_fleet("1"), engine_like(events_host="127.0.0.1")) as fleet:
        context = zmq.Context()
        taken = context.socket(zmq.SUB)
        taken.bind(fleet.engines[0].events_endpoint)
        try:
            said = await refusal(told(fleet.engines), tmp_path / "run")
        finally:
            taken.close(0)
            context.term()

    assert "no event came" in said


async def test_requests_of_clients_are_recorded_on_their_way(tmp_path: Path) -> None:
    """Chats and texts, streams and not; a stream ends as streams end. They audit as our own do."""
    options = RecordOptions(out=tmp_path / "run", requests=4, minutes=None, nonce="test")
    long = "the same long question " * 20

    async def drive(stations: Sequence[Station], writer: CaptureWriter) -> None:
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        proxy = RecordingProxy(stations, writer, requests=4)
        async with asyncio.TaskGroup() as group, httpx.AsyncClient(trust_env=False) as http:
            group.create_task(
                serve_proxy(proxy, host="127.0.0.1", port=0, on_listening=listening.set_result)
            )
            url = f"http://127.0.0.1:{await listening}"
            chat = {"model": "sim", "messages": [{"role": "user", "content": long}]}
            models = await http.get(f"{url}/v1/models")
            refused = await http.post(f"{url}/v1/completions", content=b"{")
            nested = await http.post(f"{url}/v1/completions", content=b"[" * 100_000)
            plain = await http.post(f"{url}/v1/chat/completions", json={**chat, "max_tokens": 2})
            stream = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}
            streamed = await http.post(f"{url}/v1/chat/completions", json={**chat, **stream})
            text = {"model": "sim", "prompt": long, "max_tokens": 2}
            for _ in range(2):
                await http.post(f"{url}/v1/completions", json=text)
        assert models.json()["data"][0]["id"] == "sim"
        assert (refused.status_code, nested.status_code, plain.status_code) == (400, 400, 200)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text.rstrip().endswith("data: [DONE]")

    async with simulated_fleet(parse_fleet("1"), ENGINE) as fleet:
        await record(told(fleet.engines), options, clock, asyncio.Event(), drive)
    report = await audited(read_capture(*find_files(options.out, None)))

    assert (report.phases["load"].exact, report.not_comparable) == (4, {})
    assert max(row.reported or 0 for row in report.rows) > 256


async def test_engine_that_does_not_answer_a_client_is_recorded_so(tmp_path: Path) -> None:
    """The client gets 502, the file a request without an answer."""
    options = RecordOptions(out=tmp_path / "run", requests=1, minutes=None, nonce="test")
    async with simulated_fleet(parse_fleet("1"), ENGINE) as fleet:

        async def drive(stations: Sequence[Station], writer: CaptureWriter) -> None:
            await fleet.stop(fleet.engines[0])
            proxy = RecordingProxy(stations, writer, requests=1)
            answers = [await proxy.generate({"prompt": "x"}), await proxy.forward("/v1/models")]
            assert [each.status_code for each in answers] == [502, 502]
            assert proxy.finished.is_set()

        await record(told(fleet.engines), options, clock, asyncio.Event(), drive)
    capture = read_capture(*find_files(options.out, None))

    assert capture.requests[-1].status is None


async def test_legs_can_not_be_recorded_for_clients(tmp_path: Path) -> None:
    """Which leg goes where is a balancer's work."""
    options = RecordOptions(out=tmp_path / "run", requests=1, minutes=None, nonce="test")

    async def drive(stations: Sequence[Station], writer: CaptureWriter) -> None:
        with pytest.raises(SettingsError, match="no role"):
            RecordingProxy(stations, writer, requests=1)

    async with simulated_fleet(parse_fleet("1p1d"), ENGINE) as fleet:
        await record(told(fleet.engines), options, clock, asyncio.Event(), drive)


def test_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    """By the option's name."""
    with pytest.raises(SettingsError, match="--out"):
        CaptureWriter(tmp_path / "no" / "run", clock)
