"""Indexer, balancer and simulated engines in one process, as `kvlb up` and `kvlb demo` run them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from rich.console import Console
from structlog.testing import capture_logs

from balancer.core.settings.control import TokensSettings
from kvlb.demo.report import DemoReport, judge
from kvlb.demo.run import run_policy
from kvlb.demo.stage import Stage, set_stage
from kvlb.demo.tables import show_report
from kvlb.errors import KvlbError, PeerError, SettingsError
from kvlb.event_loop import run_command
from kvlb.explain import explain, explain_finished
from kvlb.running import RunningKvlb, running_kvlb
from kvlb.settings import Overrides, load_settings
from kvlb.simulated import instance_option, parse_fleet, simulated_fleet
from simulator.core.settings import EngineSettings
from simulator.workload import WorkloadShape, conversations

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@asynccontextmanager
async def up(fleet: str = "1p1d") -> AsyncIterator[RunningKvlb]:
    """A simulated fleet and a balancer that knows all of it."""
    async with simulated_fleet(parse_fleet(fleet), EngineSettings(inter_token_ms=1.0)) as engines:
        options = tuple(instance_option(engine) for engine in engines.engines)
        settings = msgspec.structs.replace(
            load_settings(None, Overrides(instances=options, port=0), {}),
            # A busy machine must not make a prompt unscorable.
            tokens=TokensSettings(deadline_s=10.0),
        )
        async with running_kvlb(settings) as kvlb:
            await until_ready(kvlb, len(engines.engines))
            yield kvlb


async def until_ready(kvlb: RunningKvlb, engines: int) -> None:
    async with asyncio.timeout(20):
        while True:
            status = await get_json(f"{kvlb.url}/status")
            ranks = [rank["index"] for each in status["instances"] for rank in each["ranks"]]
            known = [rank for rank in ranks if rank and rank["trust"] == "exact"]
            if status["ready"] and not status["reasons"] and len(known) == engines:
                return
            await asyncio.sleep(0.01)


async def get_json(url: str) -> Any:
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.get(url)).json()


async def ask_explain(kvlb: RunningKvlb, request: str, *, as_json: bool = False) -> None:
    """The command is synchronous; the balancer it asks runs on this loop."""
    await asyncio.to_thread(explain, request, url=kvlb.url, path=None, as_json=as_json)


async def test_one_process_routes_indexes_and_shows_both() -> None:
    """A chat is answered; status and metrics know engines' health and caches alike."""
    async with up() as kvlb, httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(f"{kvlb.url}/v1/chat/completions", json=CHAT)
        metrics = (await http.get(f"{kvlb.url}/metrics")).text
        status = (await http.get(f"{kvlb.url}/status")).json()

    assert answer.status_code == 200
    assert answer.headers["x-kvlb-instance"] == "d0"
    assert "kvlb_requests_total" in metrics
    assert 'kvlb_rank_trust{instance="d0",rank="0",trust="exact"} 1.0' in metrics
    assert "process_cpu_seconds_total" in metrics
    assert [each["alias"] for each in status["instances"]] == ["p0", "d0"]
    assert status["config"]["indexer"]["replay_timeout_s"] == 5.0


async def test_port_in_use_says_which_and_what_to_do() -> None:
    """Two balancers can't share a port."""
    async with up() as kvlb:
        port = int(kvlb.url.rsplit(":", 1)[1])
        second = load_settings(None, Overrides(instances=("http://127.0.0.1:1",), port=port), {})
        with pytest.raises(BaseExceptionGroup) as caught:
            async with running_kvlb(second):
                pass

    (error,) = leaves(caught.value)
    assert isinstance(error, SettingsError)
    assert f"port {port}" in str(error)
    assert "--port" in str(error)


def leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]


async def test_explain_shows_candidates_terms_and_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A long prompt takes both legs; each has a table."""
    long = {**CHAT, "messages": [{"role": "user", "content": "Hello " * 200}]}
    async with up("2p2d") as kvlb:
        await ask_explain(kvlb, json.dumps(long))

    shown = capsys.readouterr().out
    assert "remote_prefill" in shown
    assert "→ d" in shown
    assert "→ p" in shown
    assert "prefill leg" in shown
    assert "cost" in shown


async def test_explain_for_programs_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt is taken for a completion, messages for a chat."""
    async with up() as kvlb:
        capsys.readouterr()
        await ask_explain(kvlb, '{"model": "sim", "prompt": "Hello"}', as_json=True)
        printed = capsys.readouterr().out

    plan = json.loads(printed)
    assert plan["reason"] == "short_prompt"
    assert plan["decode"]["chosen"]["instance"] == "d0"


async def test_explain_shows_no_more_candidates_than_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A large fleet is cut to its cheapest, and says so."""
    async with up("8") as kvlb:
        await ask_explain(kvlb, json.dumps(CHAT))

    assert "and 2 more" in capsys.readouterr().out


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
async def test_finished_request_is_explained_by_its_id(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    """With the candidates and terms of that time, both legs."""
    long = {**CHAT, "messages": [{"role": "user", "content": "Hello " * 200}], "max_tokens": 2}
    async with up("2p2d") as kvlb, httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"{kvlb.url}/v1/chat/completions", json=long)
        name = answer.headers["x-request-id"]
        await asyncio.to_thread(explain_finished, name, url=kvlb.url, as_json=as_json)

    shown = capsys.readouterr().out
    if as_json:
        printed, _ = json.JSONDecoder().raw_decode(shown, shown.index("{\n"))  # behind log lines
        legs = printed["plan"]
        assert all(leg["considered"][0]["terms"] for leg in legs.values())
    else:
        assert "remote_prefill" in shown
        assert "decode leg" in shown
        assert "prefill leg" in shown


async def test_unknown_request_is_told_as_such() -> None:
    """It may have finished long ago."""
    async with up() as kvlb:
        with pytest.raises(PeerError, match="none of the last 100 finished requests"):
            await asyncio.to_thread(explain_finished, "x", url=kvlb.url, as_json=False)


async def test_explain_passes_on_the_balancers_refusal() -> None:
    """An unknown model is the balancer's word, not a traceback."""
    async with up() as kvlb:
        with pytest.raises(PeerError, match="answered 404"):
            await ask_explain(kvlb, '{"model": "nope", "prompt": "Hello"}')


async def test_explain_reads_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Long requests are no arguments."""
    path = tmp_path / "request.json"
    path.write_text(json.dumps(CHAT))
    async with up() as kvlb:
        await ask_explain(kvlb, str(path))

    assert "short_prompt" in capsys.readouterr().out


async def test_explain_knows_what_is_no_balancer() -> None:
    """An engine answers 404 in its own way."""
    async with simulated_fleet(parse_fleet("1"), EngineSettings()) as fleet:
        with pytest.raises(PeerError, match="/explain answered 404"):
            await asyncio.to_thread(
                explain, json.dumps(CHAT), url=fleet.engines[0].url, path=None, as_json=False
            )


@pytest.mark.parametrize(
    ("request_text", "says"),
    [
        pytest.param("{", "not valid JSON", id="json"),
        pytest.param('{"a":' + "[" * 100_000, "not valid JSON", id="nested"),
        pytest.param("[1]", "must be a JSON object", id="list"),
        pytest.param("absent.json", "neither JSON nor a file", id="file"),
    ],
)
def test_explain_refuses_what_is_no_request(request_text: str, says: str) -> None:
    """Before anybody is asked."""
    with pytest.raises(SettingsError, match=says):
        explain(request_text, url="http://127.0.0.1:1", path=None, as_json=False)


def test_explain_says_if_no_balancer_answers() -> None:
    """With the two ways out."""
    with pytest.raises(PeerError, match="--url"):
        explain(json.dumps(CHAT), url="http://127.0.0.1:1", path=None, as_json=False)


async def test_demo_policies_see_the_same_requests_and_answers() -> None:
    """A tiny run of both: equal texts, counters that add up, round robin skips nothing."""
    report = await tiny_demo()

    ours, theirs = report.ours, report.theirs
    assert [each.text for each in ours.requests] == [each.text for each in theirs.requests]
    assert len(ours.requests) == 4
    assert ours.counts.prompt_tokens == theirs.counts.prompt_tokens
    assert ours.counts.prompt_tokens == sum(each.prompt_tokens or 0 for each in ours.requests)
    assert theirs.prefill_legs_skipped == 0
    assert theirs.prefill_legs_run == 4
    assert ours.counts.prefilled_tokens < theirs.counts.prefilled_tokens


async def tiny_demo() -> DemoReport:
    shape = WorkloadShape(
        conversations=2,
        turns=2,
        first_message_chars=800,
        answer_tokens=4,
        arrivals_per_s=20.0,
        think_s=0.0,
    )
    engine = EngineSettings(prefill_tokens_per_s=100_000.0, inter_token_ms=1.0)
    stage = Stage(engine=engine, shape=shape, answer_allowance_s=0.2)
    script = conversations(1, shape)
    ours = await run_policy("kvlb", script, stage, on_answer=lambda: None)
    theirs = await run_policy("round_robin", script, stage, on_answer=lambda: None)
    return judge(ours, theirs)


async def test_demo_report_fits_a_terminal() -> None:
    """Every column has its heading at 80 characters; texts of users are not in it."""
    report = await tiny_demo()
    paper = StringIO()
    show_report(report, Console(file=paper, width=80))

    shown = paper.getvalue()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    for word in ("overlap", "cached", "reason", "cached ratio", "TTFT p99", "Verdict"):
        assert word in shown


def test_larger_demo_has_larger_caches_and_slower_users() -> None:
    """The load per second stays, so does the share of conversations that a cache holds."""
    small, large = set_stage(12, 6), set_stage(24, 6)

    assert large.engine.num_blocks == pytest.approx(2 * small.engine.num_blocks, rel=0.01)
    assert large.shape.think_s > small.shape.think_s


def test_error_inside_task_groups_comes_out_as_itself() -> None:
    """One deliberate error, however deep, is one line for the user."""

    async def fail() -> None:
        async with asyncio.TaskGroup() as outer:
            outer.create_task(nested())
            await asyncio.Event().wait()

    async def nested() -> None:
        async with asyncio.TaskGroup():
            raise SettingsError("change this")

    with pytest.raises(KvlbError, match="change this"):
        run_command(fail())


def test_bug_inside_task_groups_stays_a_bug() -> None:
    """Nothing else is hidden behind a deliberate error."""

    async def fail() -> None:
        async with asyncio.TaskGroup():
            raise ZeroDivisionError

    with pytest.raises(BaseExceptionGroup):
        run_command(fail())


async def test_fleet_that_answers_no_client_is_warned_of() -> None:
    """It starts, and says at once what is missing; `/ready` says it, too."""
    settings = load_settings(
        None, Overrides(instances=("http://127.0.0.1:9,role=prefill",), port=0), {}
    )
    with capture_logs() as logs:
        async with running_kvlb(settings) as kvlb, httpx.AsyncClient(trust_env=False) as http:
            ready = await http.get(f"{kvlb.url}/ready")

    assert "no_instance_answers_clients" in [each["event"] for each in logs]
    assert ready.status_code == 503
    assert "none answers clients" in ready.text
