"""What a request costs kvlb itself, part by part: `python -m benchmarks.overhead.parts`.

A request goes from the bytes of its client's connection to the last bytes of its answer, over two
instances: 16 token ids by round robin, and 4,000 by the full policy, where one of the two holds half of the
prompt. The first of these also as a stream of two pieces, for what it takes to begin and to end one: head, each piece,
usage and `[DONE]` come one after the other, and the client asks for no usage, so that it is asked for and withheld.
Everything is kvlb's own but the sockets: engines and clients
are transports in this process. So no system call and no other process is measured, and what is left
out of a setting is what it costs:

- *protocols*: read, sent to the engine, its answer passed on; nothing else;
- *without deciding*: everything but the choice and the ledger, and but tokens, lookup and plan of the few
  prompts that round robin has read (`routing.observe_share`);
- *without bookkeeping*: everything but metrics, decision log and log line;
- *everything*.

CPU time, settings in turn, the least of all rounds: shared caches and cores only ever add to it.
"""

import asyncio
import itertools
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Self

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry
from uvicorn.server import ServerState

from balancer.connectors.available import connectors
from balancer.core.decision_log import DecisionLog
from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.http.body import whole
from balancer.core.http.headers import pass_answer_headers, pass_request_headers
from balancer.core.load.local_ledger import LocalLedger
from balancer.core.record import RequestRecord
from balancer.core.routing.plan import Candidate, Choice, Reason, RoutePlan
from balancer.core.routing.policies import named_policy
from balancer.core.settings.control import TokensSettings
from balancer.core.settings.dataplane import DataPlaneSettings
from balancer.core.settings.reliability import ReliabilitySettings
from balancer.core.settings.routing import PolicyName, RoutingSettings
from balancer.dataplane.connection import Connection
from balancer.dataplane.direct import DirectProtocol
from balancer.dataplane.exchange import Exchange
from balancer.dataplane.lookout import Lookout
from balancer.dataplane.plane import DataPlane
from balancer.dataplane.reliability import Reliability
from balancer.dataplane.upstream import Upstream
from balancer.metrics import BalancerMetrics
from balancer.routing.reporting import Reporting
from balancer.routing.route import UnreadRoute
from balancer.routing.router import Router
from balancer.tokens.reader import PromptReader
from benchmarks.index_workload import BLOCK_SIZE
from benchmarks.interpreter import built
from benchmarks.overhead.client import write_request
from benchmarks.overhead.engine import (
    ANSWER,
    CHUNK,
    DONE,
    MODEL,
    PLAIN_HEAD,
    SHORT_PROMPT_TOKENS,
    STREAM_HEAD,
    USAGE,
    chunked,
    held_tokens,
    long_prompts,
)
from indexer.core.hashing import Namespace
from indexer.core.index import BlocksHeld, GroupKind, GroupSpec, Prompt, RankUpdate
from indexer.core.model_cards import ServedModels
from indexer.core.types import InstanceId, RankId, Tier
from indexer.memory_index import MemoryIndex
from kvlb.event_loop import spare_startup_objects
from kvlb.logs import LineLog

ROUNDS, REQUESTS, CLIENTS = 15, 1000, 32
PIECES = 2

_BODY = ANSWER % (SHORT_PROMPT_TOKENS, SHORT_PROMPT_TOKENS + 16, 0)
_END = b"0\r\n\r\n"
_STREAM = (
    STREAM_HEAD,
    *PIECES * [chunked(CHUNK)],
    chunked(USAGE % (SHORT_PROMPT_TOKENS, SHORT_PROMPT_TOKENS + 64, 0)),
    chunked(DONE) + _END,
)
_MODELS = ServedModels(base=MODEL, aliases=frozenset({MODEL}), adapters=frozenset(), cards=())
_FLEET = Fleet(
    instances=tuple(
        Instance(
            id=InstanceId(f"http://e{each}:8000"), alias=f"e{each}", models=_MODELS, healthy=True
        )
        for each in range(2)
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked in turn, and what an engine answers."""

    policy: PolicyName
    requests: Sequence[bytes]
    answer: Sequence[bytes] = (PLAIN_HEAD % (b"200 OK", len(_BODY)) + _BODY,)
    """Each part comes in a turn of the loop of its own."""
    end: bytes = _BODY[-1:]
    """Only the last bytes that a client gets end so."""


class Wire:
    """A connection whose other end is `on_write`."""

    def __init__(self, on_write: Callable[[bytes], None]) -> None:
        self.write = on_write

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, _name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        """It stays open."""


class InstantEngines(Upstream):
    """Connections to engines that answer from the loop's next turn on."""

    def __init__(self, answer: Sequence[bytes]) -> None:
        super().__init__(connect_timeout_s=5, first_byte_timeout_s=600, idle_timeout_s=120)
        self._answer = answer

    async def _open(self, pool: Any) -> Connection:
        connection = Connection(on_reusable=partial(self._keep, pool), on_lost=pool.used.discard)
        loop = asyncio.get_running_loop()

        def come(part: int) -> None:
            if part + 1 < len(self._answer):
                loop.call_soon(come, part + 1)
            connection.data_received(self._answer[part])

        connection.connection_made(Wire(lambda _: loop.call_soon(come, 0)))
        return connection


class Protocols:
    """Passes requests and answers on, and does nothing else."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._turn = itertools.cycle(each.id for each in _FLEET.instances)

    def proxies(self, path: str) -> bool:
        return path.startswith("/v1/")

    async def handle(self, exchange: Exchange) -> None:
        body = await exchange.read_body(1 << 26)
        headers = pass_request_headers(exchange.headers)
        answer = await self._upstream.send(
            next(self._turn), "POST", exchange.path, headers, whole(body)
        )
        headers = pass_answer_headers(answer.headers)
        if answer.is_event_stream:
            await exchange.start(answer.status, headers)
            await answer.hand_to(exchange.push)
            await exchange.finish()
        else:
            await exchange.answer(answer.status, headers, answer.take())
        answer.close()


class _NoGuard:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...
    def handed_over(self, source: RankId) -> None: ...
    def first_token(self) -> None: ...
    def generated(self, tokens: int) -> None: ...
    def cached(self, tokens: int) -> None: ...


class InTurn:
    """A router that takes instances in turn."""

    def __init__(self) -> None:
        self._routes = itertools.cycle([self._route(each) for each in _FLEET.instances])

    def reads_prompt(self, *_: Any) -> bool:
        return False

    def route_unread(self, *_: Any) -> UnreadRoute:
        return next(self._routes)

    def _route(self, instance: Instance) -> UnreadRoute:
        candidate = Candidate(rank=RankId(instance.id, 0), instance=instance)
        plan = RoutePlan(decode=Choice(candidate=candidate, cost_s=0.0), reason=Reason.AGGREGATED)
        return UnreadRoute(plan, _NoGuard())


async def plane(
    log: LineLog, load: Load, *, decides: bool = True, keeps_books: bool = True
) -> DataPlane:
    """A data plane like that of `kvlb up`, with or without these parts."""
    clock = time.monotonic
    ledger = LocalLedger(clock)
    metrics = BalancerMetrics(CollectorRegistry(), lambda: _FLEET)
    decisions = DecisionLog(limit=1000)
    reliability = Reliability(ReliabilitySettings(), fleet=lambda: _FLEET, clock=clock)
    index = MemoryIndex()
    for engine, rank in enumerate(_FLEET.ranks):
        group = GroupSpec(group=0, kind=GroupKind.FULL, block_size=BLOCK_SIZE)
        changes = [group, *_held_by(engine)]
        await index.apply(RankUpdate(rank=rank, model=MODEL, epoch=1, seq=0, changes=changes))
    router = Router(
        index=index,
        ledger=ledger,
        policy=named_policy(load.policy),
        settings=RoutingSettings(),
        random=random.random,
        clock=clock,
        connectors=connectors(),
        vetting=reliability,
        on_lookup=metrics.on_lookup,
    )
    reader = PromptReader(settings=TokensSettings(), pool=None, engine=None, clock=clock)  # type: ignore[arg-type]

    def keep(record: RequestRecord) -> None:
        metrics.observe(record)
        decisions.add(record)

    parts: dict[str, Any] = {
        "router": router if decides else InTurn(),
        "on_record": keep if keeps_books else lambda _: None,
        "log_request": log.request_done if keeps_books else lambda _: None,
    }
    return DataPlane(
        fleet=lambda: _FLEET,
        upstream=InstantEngines(load.answer),
        connectors=connectors(),
        settings=DataPlaneSettings(),
        report_health=lambda *_: None,
        clock=clock,
        new_id=lambda: f"{random.getrandbits(128):032x}",
        ledger=ledger,
        reader=reader,
        on_leg_end=Reporting(None, clock=clock, on_outcome=metrics.on_prediction).on_leg_end,
        reliability=reliability,
        **parts,
    )


def _held_by(engine: int) -> list[BlocksHeld]:
    return [
        BlocksHeld(0, Tier.GPU, Prompt(Namespace(model=MODEL), prompt[:tokens]).keys(BLOCK_SIZE))
        for number, prompt in enumerate(long_prompts())
        if (tokens := held_tokens(number, prompt, engine))
    ]


async def cpu_s(answers: Any, load: Load) -> float:
    """CPU seconds of one request, many after the other on a few connections at once."""
    loop = asyncio.get_running_loop()
    config = uvicorn.Config("", interface="asgi3", loop="none", log_config=None)
    config.loaded, config.loaded_app, config.ws_protocol_class = True, None, None
    asked = itertools.cycle(load.requests)
    over: asyncio.Future[None] = loop.create_future()
    left = iter(range(REQUESTS, 0, -1))

    def connect() -> None:
        def on_write(data: bytes) -> None:
            if not data.endswith(load.end):
                return
            number = next(left)
            if number > CLIENTS:
                loop.call_soon(protocol.data_received, next(asked))
            elif number == 1:
                over.set_result(None)

        protocol = DirectProtocol(
            answers,
            lookout,
            limits,
            config=config,
            server_state=ServerState(),
            app_state={},
            _loop=loop,
        )
        protocol.connection_made(Wire(on_write))
        protocol.data_received(next(asked))

    limits, lookout = DataPlaneSettings(), Lookout(look_s=3600)  # nobody is late here
    started_s = time.process_time()
    for _ in range(CLIENTS):
        connect()
    await over
    return (time.process_time() - started_s) / REQUESTS


async def measure(log: LineLog, load: Load) -> dict[str, list[float]]:
    """Every setting in every round; the first round warms up."""
    settings: dict[str, Any] = {
        "protocols": Protocols(InstantEngines(load.answer)),
        "without deciding": await plane(log, load, decides=False),
        "without bookkeeping": await plane(log, load, keeps_books=False),
        "everything": await plane(log, load),
    }
    spare_startup_objects()
    taken_s: dict[str, list[float]] = {name: [] for name in settings}
    for round_ in range(ROUNDS + 1):
        for name, answers in settings.items():
            seconds = await cpu_s(answers, load)
            if round_:
                taken_s[name].append(seconds)
    return taken_s


def main() -> None:
    """Measure and print."""
    prompt = list(range(SHORT_PROMPT_TOKENS))
    short = (write_request(prompt),)
    streamed = (write_request(prompt, chunks=PIECES),)
    long = tuple(write_request(each) for each in long_prompts())
    loads = {
        "round_robin, 16 token ids": Load(policy="round_robin", requests=short),
        f"the same, streamed in {PIECES} pieces": Load(
            policy="round_robin", requests=streamed, answer=_STREAM, end=_END
        ),
        "kvlb, 4,000 token ids": Load(policy="kvlb", requests=long),
    }
    with (
        Path("/dev/null").open("wb") as nowhere,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        log = LineLog(nowhere, tells_requests=True)
        taken = [runner.run(measure(log, load)) for load in loads.values()]
    version = f"Python {platform.python_version()}, {built()}"
    print(f"{version}; {ROUNDS} rounds of {REQUESTS} requests.\n")
    print(f"| µs of CPU per request | {' | '.join(f'{name}: least | median' for name in loads)} |")
    print("| --- |" + len(loads) * " ---: | ---: |")
    for setting in taken[0]:
        figures = [each for settings in taken for each in _least_median(settings[setting])]
        print(f"| {setting} | {' | '.join(figures)} |")


def _least_median(taken_s: Sequence[float]) -> list[str]:
    return [f"{each(taken_s) * 1e6:.0f}" for each in (min, median)]


if __name__ == "__main__":
    main()
