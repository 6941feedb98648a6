"""`kvlb record` on simulated engines, what `kvlb audit` says of it, and `kvlb audit --live`."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import zmq
from typer.testing import CliRunner, Result

from kvlb.audit.capture import Capture, read_capture
from kvlb.audit.command import find_files, print_audit
from kvlb.audit.compare import audit_capture
from kvlb.audit.live import BalancerWatch, watch_balancer
from kvlb.audit.report import AuditReport, Verdict, build_report
from kvlb.cli import app
from kvlb.errors import KvlbError, PeerError, SettingsError
from kvlb.record import session
from kvlb.record.proxy import RecordingProxy, serve_proxy
from kvlb.record.session import RecordOptions, record
from kvlb.record.stations import Station
from kvlb.record.writer import CaptureWriter
from kvlb.running import running_kvlb
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
        await record(told(fleet.engines), options, clock, asyncio.Event())
    capture = read_capture(*find_files(options.out, None))
    report = await audited(capture)

    labels = [note["label"] for note in _rows(options.out) if note["kind"] == "replay"]
    assert labels == ["before", "after"]
    assert report.phases["serial"].exact == 16
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
            plain = await http.post(f"{url}/v1/chat/completions", json={**chat, "max_tokens": 2})
            stream = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}
            streamed = await http.post(f"{url}/v1/chat/completions", json={**chat, **stream})
            text = {"model": "sim", "prompt": long, "max_tokens": 2}
            for _ in range(2):
                await http.post(f"{url}/v1/completions", json=text)
        assert models.json()["data"][0]["id"] == "sim"
        assert (refused.status_code, plain.status_code) == (400, 200)
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


@dataclass(frozen=True, slots=True)
class Balancer:
    """A running kvlb, and a client for it and its engines."""

    url: str
    http: httpx.AsyncClient

    async def chat(self, text: str, **more: Any) -> None:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **more}
        answer = await self.http.post(f"{self.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        # It is in the log once the last byte is out, which the client may have seen before.
        await until(lambda: self._has_logged(answer.headers["x-request-id"]))

    async def _has_logged(self, request_id: str) -> bool:
        recent = (await self.http.get(f"{self.url}/explain/recent")).json()["decisions"]
        return request_id in {each["request_id"] for each in recent}

    async def held_blocks(self) -> int:
        status = (await self.http.get(f"{self.url}/status")).json()
        ranks = [rank for instance in status["instances"] for rank in instance["ranks"]]
        return sum(rank["index"]["held_blocks"] for rank in ranks)

    async def is_ready(self) -> bool:
        answer = await self.http.get(f"{self.url}/ready")
        return answer.status_code == 200 and not answer.json()["reasons"]


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait, with a deadline, for what nobody announces."""
    async with asyncio.timeout(20):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def balancing(engines: Sequence[RunningEngine]) -> AsyncIterator[Balancer]:
    options = [instance_option(each) for each in engines]
    settings = load_settings(None, Overrides(instances=options, port=0), {})
    async with running_kvlb(settings) as kvlb, httpx.AsyncClient(trust_env=False) as http:
        balancer = Balancer(kvlb.url, http)
        await until(balancer.is_ready)
        yield balancer


async def test_balancer_is_watched_while_it_serves() -> None:
    """Each request once; what ended before is none of ours."""
    long = "the same long question " * 20
    async with (
        simulated_fleet(parse_fleet("2"), ENGINE) as fleet,
        balancing(fleet.engines) as balancer,
    ):
        await balancer.chat("before anybody watched")
        watch = BalancerWatch(balancer.url, balancer.http)
        await watch.begin()
        await balancer.chat(long)
        await until(lambda: _holds(balancer, 28))
        await watch.look()
        await balancer.chat(long)
        await watch.look()
        report = watch.report()

    assert (report.requests, report.exact) == (2, 2)
    assert [row.reported for row in report.rows] == [0, 464]


async def _holds(balancer: Balancer, blocks: int) -> bool:
    return await balancer.held_blocks() >= blocks


async def test_cache_reset_behind_our_back_is_an_error_that_is_seen() -> None:
    """More was predicted than there was, and the report says how much."""
    long = "the same long question " * 20
    async with (
        simulated_fleet(parse_fleet("1"), ENGINE) as fleet,
        balancing(fleet.engines) as balancer,
    ):
        watch = BalancerWatch(balancer.url, balancer.http)
        await watch.begin()
        await balancer.chat(long)
        await until(lambda: _holds(balancer, 28))
        await balancer.http.post(f"{fleet.engines[0].url}/reset_prefix_cache")
        await balancer.chat(long)
        await watch.look()
        report = watch.report()

    assert (report.requests, report.over, report.over_tokens) == (2, 1, 464)
    assert report.rows[-1].verdict is not Verdict.EXACT


async def test_watching_what_is_no_balancer_is_said() -> None:
    """Nobody there, or something else."""
    with pytest.raises(PeerError, match="no balancer answers"):
        await watch_balancer("http://127.0.0.1:9", minutes=1, stopped=asyncio.Event())
    async with simulated_fleet(parse_fleet("1"), ENGINE) as fleet:
        with pytest.raises(PeerError, match="answered 404"):
            await watch_balancer(fleet.engines[0].url, minutes=1, stopped=asyncio.Event())


async def test_balancer_that_goes_away_leaves_what_was_seen() -> None:
    """The looks that got no answer are counted."""
    async with simulated_fleet(parse_fleet("1"), ENGINE) as fleet:
        async with balancing(fleet.engines) as balancer, httpx.AsyncClient() as http:
            watch = BalancerWatch(balancer.url, http)
            await watch.begin()
            await balancer.chat("a question")
            await watch.look()
        async with httpx.AsyncClient(trust_env=False) as http:
            watch._balancer._http = http
            await watch.look()
        report = watch.report()

    assert len(report.rows) == 1
    assert report.events == {"unanswered": 1}


def test_report_without_a_request_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """And exits 1: nothing compared is no success."""
    assert print_audit(build_report([], {}), as_json=False) == 1
    assert "no request ended meanwhile" in capsys.readouterr().err


@pytest.fixture
def default_logs() -> Iterator[None]:
    """Commands set up logs for their process; other tests keep theirs."""
    kept = structlog.get_config()
    yield
    structlog.configure(**kept)


def run_kvlb(*arguments: str) -> Result:
    """The command in this thread."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


@pytest.mark.usefixtures("default_logs")
def test_commands_record_and_audit(
    engines_beside: Callable[..., list[str]], tmp_path: Path
) -> None:
    """One after the other, by the name of the recording; and both at once."""
    name = str(tmp_path / "run")
    (option,) = engines_beside("1", ENGINE)
    said = run_kvlb("record", "--instance", option, "--out", name, "--requests", "8")
    audited = run_kvlb("audit", name, "--format", "json")
    live = run_kvlb(
        "audit", "--live", "--instance", option, "--minutes", "0.02", "--format", "json"
    )

    assert said.exit_code == 0, said.output
    assert "9 requests" in said.stdout
    assert audited.exit_code == 0
    assert json.loads(audited.stdout)["phases"]["serial"]["exact"] == 8
    assert live.exit_code == 0
    assert json.loads(live.stdout)["unexplained"] == 0


@pytest.mark.usefixtures("default_logs")
def test_recording_stops_somewhere_if_nobody_says_when(
    engines_beside: Callable[..., list[str]], tmp_path: Path
) -> None:
    """64 requests, and the one that shows the stream to be live."""
    (option,) = engines_beside("1", ENGINE)
    said = run_kvlb(
        "record", "--instance", option, "--out", str(tmp_path / "run"), "--concurrency", "8"
    )

    assert "65 requests" in said.stdout


@pytest.mark.usefixtures("default_logs")
def test_port_that_can_not_be_listened_on_is_said(
    engines_beside: Callable[..., list[str]], tmp_path: Path
) -> None:
    """By the option's name, before or after the engines were asked."""
    (option,) = engines_beside("1", ENGINE)
    taken = option.partition(",")[0].rpartition(":")[2]
    recording = ("record", "--instance", option, "--out", str(tmp_path / "run"), "--listen")

    assert "--listen" in str(run_kvlb(*recording, "nonsense").exception)
    assert "--listen" in str(run_kvlb(*recording, taken).exception)


async def test_command_watches_a_balancer() -> None:
    """As a process of its own, for as long as it is told to; nothing compared is exit code 1."""
    async with (
        simulated_fleet(parse_fleet("1"), ENGINE) as fleet,
        balancing(fleet.engines) as balancer,
    ):
        watching = ("audit", "--live", "--url", balancer.url, "--minutes", "0.01")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvlb", *watching, stderr=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()

    assert process.returncode == 1
    assert b"no request ended meanwhile" in said


@pytest.mark.usefixtures("default_logs")
@pytest.mark.parametrize("arguments", [[], ["run", "--live"]])
def test_audit_is_of_a_recording_or_live(arguments: list[str]) -> None:
    """One of them."""
    refused = run_kvlb("audit", *arguments)

    assert refused.exit_code == 2
    assert "--live" in refused.output


@pytest.mark.usefixtures("default_logs")
def test_audit_watches_the_balancer_that_is_named() -> None:
    """Nobody is there: the error says where."""
    refused = run_kvlb("audit", "--live", "--url", "http://127.0.0.1:9/")

    assert "http://127.0.0.1:9 (" in str(refused.exception)
