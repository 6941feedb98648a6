"""Sends a workload through a simulated fleet, and notes what became of every call."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from balancer.core.request import Endpoint, GenerateRequest, PromptView
from balancer.core.routing.plan import RoutePlan
from balancer.routing.route import Route
from benchmarks.routing.fleet import SimulatedFleet
from benchmarks.routing.traces import MODEL, Call
from benchmarks.routing.virtual_time import VirtualClock
from simulator.core.generation import FixedTokens
from simulator.core.handover import read_remote_prefill
from simulator.core.types import EngineRequest, RemotePrefill, TokenOutput

ANSWER = FixedTokens(())


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One call: when things happened, in virtual seconds, and how it was decided."""

    call: Call
    plan: RoutePlan
    arrived_s: float
    first_s: float = 0.0
    ended_s: float = 0.0
    failed: bool = False

    @property
    def first_token_s(self) -> float:
        return self.first_s - self.arrived_s

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.arrived_s


class _Running:
    """One call on its way: what `balancer.dataplane.legs` does, without HTTP."""

    def __init__(self, fleet: SimulatedFleet, call: Call, number: int) -> None:
        self._fleet = fleet
        self._call = call
        self._number = number
        self._tokens = 0
        self.outcome: Outcome | None = None

    async def start(self) -> None:
        fleet, call = self._fleet, self._call
        request = GenerateRequest(
            request_id=f"r{self._number}",
            endpoint=Endpoint.CHAT,
            body={"stream": True},
            raw_body=b"",
            headers=(),
            model=MODEL,
            base_model=MODEL,
            lora=None,
        )
        view = PromptView(prompts=(call.prompt,), source="ids")
        route = await fleet.router.route(fleet.fleet, request, view)
        self.outcome = Outcome(call=call, plan=route.plan, arrived_s=fleet.clock.now_s)
        if route.plan.prefill is None:
            self._decode(route, None)
        else:
            rank = fleet.ranks[route.plan.prefill.candidate.rank]
            rank.submit(
                self._engine_request(max_tokens=1, keeps_blocks=True),
                lambda output: self._on_prefilled(route, output),
            )

    def _engine_request(
        self, *, max_tokens: int, keeps_blocks: bool = False, remote: RemotePrefill | None = None
    ) -> EngineRequest:
        return EngineRequest(
            request_id=f"r{self._number}",
            prompt_token_ids=self._call.token_ids,
            sampler=ANSWER,
            max_tokens=max_tokens,
            ignore_eos=True,
            keeps_blocks=keeps_blocks,
            remote=remote,
        )

    def _on_prefilled(self, route: Route, output: TokenOutput) -> None:
        route.end_prefill()
        self._decode(route, read_remote_prefill(output.transfer_params))

    def _decode(self, route: Route, remote: RemotePrefill | None) -> None:
        rank = self._fleet.ranks[route.plan.decode.candidate.rank]
        rank.submit(
            self._engine_request(max_tokens=self._call.output_tokens, remote=remote),
            lambda output: self._on_token(route, output),
        )

    def _on_token(self, route: Route, output: TokenOutput) -> None:
        outcome = self.outcome
        assert outcome is not None  # noqa: S101 - routed before anything was sent
        now_s = self._fleet.clock.now_s
        if not self._tokens:
            outcome.first_s = now_s
            route.decode_guard.first_token()
        self._tokens += 1
        if output.finish_reason is None:
            return
        outcome.ended_s = now_s
        outcome.failed = output.finish_reason == "error"
        route.decode_guard.generated(self._tokens)
        route.__exit__(None, None, None)


def replay(clock: VirtualClock, fleet: SimulatedFleet, calls: Sequence[Call]) -> list[Outcome]:
    """Run all calls to their end; outcomes in the order of arrival."""
    running = [_Running(fleet, call, number) for number, call in enumerate(calls)]
    for each, call in zip(running, calls, strict=True):
        clock.at(call.at_s, each.start)
    asyncio.run(clock.run())
    return [each.outcome for each in running if each.outcome is not None]
