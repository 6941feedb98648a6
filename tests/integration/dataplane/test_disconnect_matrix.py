"""Clients that leave: every phase, streamed or not, one leg or two, as the engines see it.

On uvloop (`conftest.py`), which kvlb runs on.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from balancer.connectors.contract import Connector, LegContext, LegRequest, Style
from balancer.core.fleet.snapshot import Fleet, Role
from balancer.core.http.prefill_rewrite import prefill_body
from balancer.core.prompt.known_ids import IdTexts
from balancer.core.request import GenerateRequest, PromptView
from balancer.core.settings.routing import RoutingSettings
from indexer.core.hashing import Namespace
from indexer.core.index import PrefixMatch, Prompt
from indexer.core.types import BlockKey, RankId

COMPLETIONS = "/v1/completions"
IDS = list(range(1000))
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
TURNS = 100
"""Of 10 ms: an engine must have seen it after one second in which this process was served."""


class SlowPrompts:
    """A tokens stage that doesn't come to an end."""

    texts = IdTexts(limit_bytes=0)

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    async def read(self, fleet: Fleet, request: GenerateRequest) -> PromptView:  # noqa: ARG002
        self.reached.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class SlowIndex:
    """An index that doesn't answer."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    async def match(self, prompt: Prompt) -> Mapping[RankId, PrefixMatch]:  # noqa: ARG002
        self.reached.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class PushConnector(Connector):
    """Both legs at once."""

    name = "push"

    def style(self, context: LegContext) -> Style:  # noqa: ARG002 - the contract's signature
        return "concurrent"

    def prefill_leg(self, context: LegContext) -> LegRequest:
        return LegRequest(body=prefill_body(context.body))

    def decode_leg(
        self,
        context: LegContext,
        prefill_answer: Mapping[str, Any] | None,  # noqa: ARG002 - likewise
    ) -> LegRequest:
        return LegRequest(body=context.body)


async def stay_silent(received: Any, wire: Any) -> None:
    await received.gone.wait()


async def head_only(received: Any, wire: Any) -> None:
    """What vLLM does before it has computed a stream's prompt."""
    await wire.head(content_type="text/event-stream")
    await received.gone.wait()


async def one_token(received: Any, wire: Any) -> None:
    await wire.head(content_type="text/event-stream")
    await wire.chunk(TOKEN)
    await received.gone.wait()


async def tokens_for_ever(received: Any, wire: Any) -> None:
    await wire.head(content_type="text/event-stream")
    while not received.gone.is_set():
        await wire.chunk(TOKEN)
        await asyncio.sleep(0.005)


async def flood(received: Any, wire: Any) -> None:
    """Faster than anybody reads: every buffer on the way fills."""
    await wire.head(content_type="text/event-stream")
    while not received.gone.is_set():
        await wire.chunk(TOKEN * 1000)


async def half_a_body(received: Any, wire: Any) -> None:
    await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
    await wire.raw(b"content-length: 1000\r\n\r\n{")
    await received.gone.wait()


async def half_a_large_body(received: Any, wire: Any) -> None:
    """More than is held back: it has begun to reach the client."""
    await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
    await wire.raw(b"content-length: 9000000\r\n\r\n" + b"{" * 2_000_000)
    await received.gone.wait()


async def prefill_ok(received: Any, wire: Any) -> None:
    await wire.json({"kv_transfer_params": {"do_remote_prefill": True}})


@dataclass
class Stage:
    """A balancer with its engines, and a client in front of it."""

    proxy: Any
    client: Any
    answering: Any
    prefill: Any = None
    reached: asyncio.Event | None = None
    """Set once the request is where no engine hears of it."""

    @property
    def engines(self) -> list[Any]:
        return [each for each in (self.prefill, self.answering) if each is not None]

    async def ask(self, *, stream: bool, times: int = 1) -> None:
        body = json.dumps({"model": "m", "prompt": IDS, "stream": stream})
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        await self.client.send((head + body).encode() * times)


@dataclass(frozen=True)
class Phase:
    """Where a request is when its client leaves."""

    answer: Callable[..., Any] = stay_silent
    reaches: str = "answering"
    """Which engine it has got to: `answering`, `prefill` or `none`."""
    until: bytes | None = None
    """What the client reads before it leaves."""
    streams: tuple[bool, ...] = (False, True)
    half_sent: bool = False
    options: Callable[[], dict[str, Any]] = dict


PHASES = {
    "reading-the-body": Phase(reaches="none", half_sent=True),
    "tokenizing": Phase(reaches="none", options=lambda: {"reader": SlowPrompts()}),
    "choosing": Phase(
        reaches="none",
        options=lambda: {
            "index": SlowIndex(),
            "routing": RoutingSettings(lookup_timeout_s=60.0, observe_share=1.0),
        },
    ),
    "prefill-leg": Phase(reaches="prefill"),
    "waiting-for-headers": Phase(),
    "waiting-for-the-first-byte": Phase(answer=head_only),
    "streaming": Phase(answer=tokens_for_ever, until=TOKEN, streams=(True,)),
    "silence-in-a-stream": Phase(answer=one_token, until=TOKEN, streams=(True,)),
    "not-reading": Phase(answer=flood, until=TOKEN, streams=(True,)),
    "body-held": Phase(answer=half_a_body, streams=(False,)),
    "body-passing": Phase(answer=half_a_large_body, until=b"{{{", streams=(False,)),
}
FLEETS = ("whole", "whole-over-asgi", "serial", "concurrent")
MATRIX = [
    pytest.param(name, stream, fleet, id=f"{name}-{'stream' if stream else 'json'}-{fleet}")
    for name, phase in PHASES.items()
    for stream in phase.streams
    for fleet in FLEETS
    if not (name == "prefill-leg" and fleet.startswith("whole"))
]
MORE = {
    "later": b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
    "later-and-large": b"POST /explain HTTP/1.1\r\nhost: x\r\ncontent-length: 4000000\r\n\r\n"
    + b"a" * 3_000_000,
}
"""What a client may send besides, once its request is where it is left."""
BEFORE_THEIR_TURN = [
    pytest.param(name, stream, fleet, more, id=f"{name}-{fleet}-{more}")
    for name, phase in PHASES.items()
    if name != "reading-the-body"
    for stream in phase.streams[-1:]
    for fleet, more in zip(FLEETS, ("later", "later", "later-and-large", "at-once"), strict=True)
    if not (name == "prefill-leg" and fleet.startswith("whole"))
]


@pytest.fixture
def staged(engine: Any, balancer: Any, instance: Any, raw_client: Any) -> Any:
    """Starts engines, a balancer and a client for one cell of the matrix."""

    @asynccontextmanager
    async def start(phase: Phase, fleet: str) -> AsyncIterator[Stage]:
        options = phase.options()
        async with AsyncExitStack() as stack:
            answering = await stack.enter_async_context(engine(phase.answer))
            if fleet.startswith("whole"):
                options["is_direct"] = fleet == "whole"
                members = [instance(answering, "m0")]
                prefill = None
            else:
                before = stay_silent if phase.reaches == "prefill" else prefill_ok
                prefill = await stack.enter_async_context(engine(before))
                connector = "push" if fleet == "concurrent" else "nixl"
                members = [
                    instance(prefill, "p0", role=Role.PREFILL, connector=connector),
                    instance(answering, "d0", role=Role.DECODE, connector=connector),
                ]
            if fleet == "concurrent":
                options["connectors"] = {"push": PushConnector()}
            proxy = await stack.enter_async_context(balancer(*members, **dict(options)))
            client = await stack.enter_async_context(raw_client(proxy))
            slow = (getattr(each, "reached", None) for each in options.values())
            reached = next((each for each in slow if each is not None), None)
            yield Stage(proxy, client, answering, prefill, reached)

    return start


async def bring_to(stage: Stage, phase: Phase, *, stream: bool, times: int = 1) -> None:
    """Ask, and wait until the request is where the client is to leave it."""
    if phase.half_sent:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
        await stage.client.send(head.encode() + b'{"model')
        for _ in range(TURNS):  # who leaves before it is begun isn't even a request
            if stage.proxy.dataplane.running:
                break
            await asyncio.sleep(0.01)
        return
    await stage.ask(stream=stream, times=times)
    if stage.reached is not None:
        await stage.reached.wait()
    elif phase.reaches == "answering":
        if stage.prefill is not None:
            await stage.prefill.wait_for_requests(1)
        await stage.answering.wait_for_requests(1)
    else:
        await stage.prefill.wait_for_requests(1)
    if phase.until is not None:
        await stage.client.read_until(phase.until)


def predicted(stage: Stage) -> dict[str, int]:
    """Blocks of the prompt that are expected on each instance."""
    prompt = Prompt(Namespace(model="m", lora=None, cache_salt=None), IDS)
    keys: list[BlockKey] = list(prompt.keys(16))
    return {
        each.alias: stage.proxy.ledger.predicted_blocks(rank, keys, 0)
        for each in stage.proxy.fleet.instances
        for rank in each.rank_ids()
    }


async def check_leaving(
    stage: Stage, phase: Phase, eventually: Any, *, stream: bool, more: str = "nothing"
) -> None:
    """Engines see it within a second, nothing stays counted, expected, open or running."""
    proxy = stage.proxy
    tasks_before = len(asyncio.all_tasks())
    await bring_to(stage, phase, stream=stream, times=1 + (more == "at-once"))
    asked_before = [len(each.received) for each in stage.engines]
    if more in MORE:
        await send_more(stage, MORE[more])
    stage.client.leave()

    open_legs = [
        received.gone
        for each in stage.engines
        for received in each.received
        if each is stage.answering or phase.reaches == "prefill"
    ]
    for _ in range(TURNS):
        if proxy.records and all(each.is_set() for each in open_legs):
            break
        await asyncio.sleep(0.01)
    (record,) = proxy.records
    assert all(each.is_set() for each in open_legs)
    await stage.answering.wait_for_connections(0)
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks_before + len(idle(stage)))

    assert record.error == "ClientClosedRequest"
    assert [len(each.received) for each in stage.engines] == asked_before
    assert proxy.in_flight() == 0
    # What a prefill engine has computed is there, whoever it was for.
    is_prefilled = stage.prefill is not None and phase.reaches == "answering"
    expected = {each.alias: 0 for each in proxy.fleet.instances}
    assert predicted(stage) == expected | ({"p0": len(IDS) // 16} if is_prefilled else {})


async def send_more(stage: Stage, data: bytes) -> None:
    """Send what comes before its turn, and let the balancer take of it what it takes."""
    await stage.client.send(data)
    for _ in range(10):
        await asyncio.sleep(0.002)


@pytest.mark.parametrize(("name", "stream", "fleet"), MATRIX)
async def test_client_leaves(
    staged: Any, eventually: Any, name: str, stream: bool, fleet: str
) -> None:
    """Engines see it within a second, nothing stays counted, expected, open or running."""
    async with staged(PHASES[name], fleet) as stage, asyncio.timeout(20):
        await check_leaving(stage, PHASES[name], eventually, stream=stream)


@pytest.mark.parametrize(("name", "stream", "fleet", "more"), BEFORE_THEIR_TURN)
async def test_client_leaves_that_has_sent_more(
    staged: Any, eventually: Any, name: str, stream: bool, fleet: str, more: str
) -> None:
    """What waits behind a request, even more than is taken, doesn't hide that its client is gone."""
    async with staged(PHASES[name], fleet) as stage, asyncio.timeout(20):
        await check_leaving(stage, PHASES[name], eventually, stream=stream, more=more)


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize("fleet", FLEETS)
async def test_client_leaves_the_line(
    staged: Any, raw_client: Any, eventually: Any, fleet: str, stream: bool
) -> None:
    """Its place is free, no engine hears of it, and whom it waited for goes on."""
    one_each = Phase(options=lambda: {"routing": RoutingSettings(max_requests_per_rank=1)})
    async with staged(one_each, fleet) as stage, asyncio.timeout(20):
        await bring_to(stage, one_each, stream=False)
        async with raw_client(stage.proxy) as second:
            first, stage.client = stage.client, second
            await stage.ask(stream=stream)
            await eventually(lambda: sum(stage.proxy.admission.waiting.values()) == 1)
            asked_before = [len(each.received) for each in stage.engines]
            await send_more(stage, MORE["later"])
            second.leave()
            for _ in range(TURNS):
                if stage.proxy.records:
                    break
                await asyncio.sleep(0.01)

        (record,) = stage.proxy.records
        assert record.error == "ClientClosedRequest"
        assert stage.proxy.admission.waiting == {}
        assert [len(each.received) for each in stage.engines] == asked_before
        assert not stage.answering.received[0].gone.is_set()
        first.leave()


def idle(stage: Stage) -> list[Any]:
    """Connections that are kept for the next request: each has a task in the fake engine."""
    return [each for pool in stage.proxy.upstream._pools.values() for each in pool.idle]
