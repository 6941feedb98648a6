"""Local tokens beside the engine's own: what one difference leads to, over real tokenizers and HTTP."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from balancer.core.control_errors import EngineCallError, RenderAbsentError, TokenizeRefusedError
from balancer.core.fleet.snapshot import Fleet
from balancer.core.prompt.rendered import Rendered, RenderQuestion
from balancer.core.prompt.shape import TextShape
from balancer.core.record import LegRecord, RequestRecord
from balancer.core.request import Endpoint, GenerateRequest
from balancer.core.settings.control import TokensSettings
from balancer.tokens.parity import WAITING, ParityWatch
from balancer.tokens.pool import TokenPool
from balancer.tokens.reader import PromptReader
from indexer.core.types import InstanceId

MakeRequest = Callable[..., GenerateRequest]
FleetOf = Callable[..., Fleet]
HI = [{"role": "user", "content": "a secret of mine"}]


@dataclass
class TellingEngine:
    """Answers `/tokenize` with what it was given, the last answer for ever."""

    answers: list[Sequence[int] | Exception] = field(default_factory=list)
    is_silent: bool = False
    asked: list[tuple[InstanceId, Mapping[str, Any]]] = field(default_factory=list)

    async def tokenize(self, instance: InstanceId, body: Mapping[str, Any]) -> Sequence[int]:
        self.asked.append((instance, body))
        if self.is_silent:
            await asyncio.Event().wait()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def render(self, _instance: InstanceId, _question: RenderQuestion) -> Sequence[Rendered]:
        raise RenderAbsentError("no_render")


@dataclass
class Watched:
    """A reader whose tokens are compared."""

    reader: PromptReader
    watch: ParityWatch
    pool: TokenPool

    async def outcomes(self, count: int = 1) -> Mapping[str, int]:
        """Wait until so many comparisons have ended."""
        async with asyncio.timeout(20):
            found = self._outcomes()
            while sum(found.values()) < count:
                await asyncio.sleep(0.001)
                found = self._outcomes()
        return found

    def _outcomes(self) -> Mapping[str, int]:
        known = self.watch.book.models.get("tiny")
        return {} if known is None else known.outcomes

    async def own(self, text: str) -> list[int]:
        return list((await self.pool.encode("tiny", TextShape(texts=(text,)))).tokens[0])


Watch = Callable[..., AbstractAsyncContextManager[Watched]]


@pytest.fixture
def watching(tokenizer_directory: str) -> Watch:
    """Starts a reader and its watch before an engine."""

    @asynccontextmanager
    async def start(engine: Any, **fields: Any) -> AsyncIterator[Watched]:
        settings = TokensSettings(models={"tiny": tokenizer_directory}, deadline_s=5.0, **fields)
        pool = TokenPool(settings.models, workers=1, cache_bytes=1 << 20, strftime_now=str)
        clock = asyncio.get_running_loop().time
        watch = ParityWatch(settings=settings, pool=pool, engine=engine, clock=clock)
        reader = PromptReader(
            settings=settings, pool=pool, engine=engine, clock=clock, parity=watch
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(watch.run())
            yield Watched(reader=reader, watch=watch, pool=pool)
            task.cancel()
        pool.close()

    return start


async def test_equal_tokens_stay_local(
    engine: Any, watching: Watch, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """The engine was asked beside the request, and says the same."""
    teller = TellingEngine()
    async with watching(teller) as watched:
        teller.answers = [await watched.own("hi")]
        await watched.reader.read(fleet_of(engine), make_request({"prompt": "hi"}))

        assert await watched.outcomes() == {"same": 1}
        again = await watched.reader.read(fleet_of(engine), make_request({"prompt": "hi"}))
        assert again.source == "cache"
        assert watched.watch.status()["tiny"] == {
            "source": "local",
            "comparisons": {"same": 1},
            "difference": None,
        }


async def test_one_difference_switches_to_the_engine(
    engine: Any,
    watching: Watch,
    make_request: MakeRequest,
    fleet_of: FleetOf,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With an alarm that names the place and nothing of the prompt; nothing local is used again."""
    teller = TellingEngine()
    async with watching(teller) as watched:
        own = await watched.own("a secret of mine")
        teller.answers = [[*own[:2], 1, 2]]
        request = make_request({"prompt": "a secret of mine"})
        first = await watched.reader.read(fleet_of(engine), request)

        assert await watched.outcomes() == {"different": 1}
        second = await watched.reader.read(fleet_of(engine), request)
        status = watched.watch.status()["tiny"]
        registry = CollectorRegistry()
        registry.register(watched.watch)
        metrics = generate_latest(registry).decode()

    assert [first.source, second.source] == ["cache", "engine"]
    assert second.prompt_tokens == 4
    assert status["source"] == "engine"
    assert status["difference"] == {
        "first_difference": 2,
        "own_tokens": len(own),
        "engine_tokens": 4,
        "instance": status["difference"]["instance"],
    }
    assert 'kvlb_token_comparisons_total{model="tiny",outcome="different"} 1.0' in metrics
    logged = capsys.readouterr().out
    assert "token_parity_lost" in logged
    assert "first_difference=2" in logged
    assert "secret" not in logged


async def test_difference_that_does_not_stand_is_none(
    engine: Any, watching: Watch, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """A template that tells the time may have told another one."""
    teller = TellingEngine()
    async with watching(teller) as watched:
        teller.answers = [[1, 2, 3], await watched.own("hi")]
        await watched.reader.read(fleet_of(engine), make_request({"prompt": "hi"}))

        assert await watched.outcomes() == {"same": 1}


async def test_without_the_engine_a_model_that_differs_is_unscorable(
    engine: Any, watching: Watch, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """`engine_fallback: false`; wrong tokens are worse than none."""
    async with watching(TellingEngine([[1]]), engine_fallback=False) as watched:
        await watched.reader.read(fleet_of(engine), make_request({"prompt": "hi"}))
        await watched.outcomes()

        view = await watched.reader.read(fleet_of(engine), make_request({"prompt": "hi"}))

    assert (view.unscorable, view.prompts) == ("parity", ())


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        pytest.param(TokenizeRefusedError("x"), "refused", id="refused"),
        pytest.param(EngineCallError("x"), "failed", id="failed"),
    ],
)
async def test_what_cannot_be_compared_changes_nothing(
    answer: Exception,
    outcome: str,
    engine: Any,
    watching: Watch,
    make_request: MakeRequest,
    fleet_of: FleetOf,
) -> None:
    """It is counted."""
    async with watching(TellingEngine([answer])) as watched:
        await watched.reader.read(fleet_of(engine), make_request({"prompt": "hi"}))

        assert await watched.outcomes() == {outcome: 1}
        view = await watched.reader.read(fleet_of(engine), make_request({"prompt": "hi"}))
        assert view.source == "cache"


async def test_counters_begin_at_zero(watching: Watch) -> None:
    """One that began with its first difference would show a dashboard no rise."""
    async with watching(TellingEngine()) as watched:
        registry = CollectorRegistry()
        registry.register(watched.watch)
        metrics = generate_latest(registry).decode()

    assert 'kvlb_token_comparisons_total{model="tiny",outcome="different"} 0.0' in metrics
    assert 'kvlb_token_comparisons_total{model="tiny",outcome="same"} 0.0' in metrics


async def test_nobody_to_compare_with(
    watching: Watch, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """All instances are down."""
    async with watching(TellingEngine()) as watched:
        await watched.reader.read(fleet_of(), make_request({"prompt": "hi"}))

        assert await watched.outcomes() == {"no_engine": 1}


async def test_what_the_engine_cannot_be_asked_is_counted(
    engine: Any, watching: Watch, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """Its answer would be that of another prompt."""
    request = msgspec.structs.replace(
        make_request({"messages": HI, "thinking": {"type": "disabled"}}), endpoint=Endpoint.MESSAGES
    )
    async with watching(TellingEngine([[1]])) as watched:
        view = await watched.reader.read(fleet_of(engine), request)

        assert await watched.outcomes() == {"not_asked": 1}
        assert view.source == "local"


async def test_requests_never_wait_for_a_comparison(
    engine: Any, watching: Watch, make_request: MakeRequest, fleet_of: FleetOf
) -> None:
    """An engine that doesn't answer has a few of them waiting, the others aren't compared."""
    async with watching(TellingEngine(is_silent=True)) as watched:
        for number in range(3 * WAITING):
            view = await watched.reader.read(
                fleet_of(engine), make_request({"prompt": f"{number}"})
            )
            assert view.source == "local"


async def test_balancer_compares_what_it_routes(
    engine: Any, balancer_factory: Any, tokenizer_directory: str
) -> None:
    """From a client's request to `/status`: this engine tells other ids than we find."""
    config = {
        "instances": [{"url": engine.url}],
        "tokens": {"models": {"tiny": tokenizer_directory}},
    }
    async with balancer_factory(config) as balancer:
        await balancer.available()
        body = {"model": "tiny", "messages": HI}
        assert (await balancer.http.post("/v1/chat/completions", json=body)).status_code == 200

        async with asyncio.timeout(20):
            tokens = (await balancer.http.get("/status")).json()["tokens"]
            while tokens["tiny"]["difference"] is None:
                await asyncio.sleep(0.01)
                tokens = (await balancer.http.get("/status")).json()["tokens"]
        await balancer.http.post("/v1/chat/completions", json=body)
        recent = (await balancer.http.get("/explain/recent")).json()["decisions"]

    assert tokens["tiny"]["source"] == "engine"
    assert {decision["prompt_source"] for decision in recent} == {"local", "engine"}


@pytest.mark.parametrize(
    ("own", "told", "expected"),
    [(5, [5, None], False), (5, [None, 6], True), (None, [6], False), (5, [], False)],
)
def test_engines_count_shows_a_difference(
    own: int | None, told: list[int | None], expected: bool
) -> None:
    """Where both are known."""
    record = RequestRecord(request_id="r", path="/", arrived_s=0.0, prompt_tokens=own)
    record.legs = [
        LegRecord(kind="decode", alias="m0", overlap_tokens=0, started_s=0.0, prompt_tokens=each)
        for each in told
    ]

    assert record.counted_otherwise == expected
