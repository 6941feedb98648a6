"""Sends a workload through a virtual fleet, and notes what became of every call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from balancer.core.request import Endpoint, GenerateRequest, PromptView
from balancer.routing.route import Route
from indexer.core.types import RankId
from kvlb.bench.calls import MODEL, Call
from kvlb.bench.engine import Job
from kvlb.bench.fleet import VirtualFleet

_SPREAD = 61
"""Has no factor in common with 100: any hundred calls in a row are streamed as often."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One call: where it went, and when things happened, in virtual seconds."""

    call: Call
    rank: RankId
    arrived_s: float
    first_s: float = 0.0
    ended_s: float = 0.0
    cached_tokens: int = 0


class Play:
    """One workload on one fleet."""

    def __init__(
        self,
        fleet: VirtualFleet,
        calls: Sequence[Call],
        *,
        patience_s: float = inf,
        streamed: int = 100,
    ) -> None:
        """`patience_s`: times to first tokens, added up, after which the rest isn't played.

        `streamed`: per cent of the calls. Of the others the balancer sees only the end.
        """
        self._fleet = fleet
        self._patience_s = patience_s
        self._streamed = streamed
        self._calls = calls
        self._followers: dict[int, list[int]] = {}
        self._outcomes: dict[int, Outcome] = {}
        for number, call in enumerate(calls):
            if call.after is not None:
                self._followers.setdefault(call.after, []).append(number)

    def run(self) -> list[Outcome]:
        """Outcomes of the calls, in their order; none if patience ended."""
        for number, call in enumerate(self._calls):
            if call.after is None:
                self._send_at(call.at_s, number)
        self._fleet.clock.run()
        if self._patience_s < 0:
            return []
        return [self._outcomes[number] for number in sorted(self._outcomes)]

    def _send_at(self, when_s: float, number: int) -> None:
        self._fleet.clock.at(when_s, lambda: self._send(number))

    def _send(self, number: int) -> None:
        fleet, call = self._fleet, self._calls[number]
        request, view = self._asked(number)
        route = fleet.route(request, view)
        rank = route.plan.decode.candidate.rank
        outcome = Outcome(call=call, rank=rank, arrived_s=fleet.clock.now_s)
        self._outcomes[number] = outcome
        fleet.engines[rank].submit(
            Job(
                keys=call.keys,
                prompt_tokens=call.prompt.tokens,
                output_tokens=call.output_tokens,
                on_first=self._on_first(route, outcome, is_seen=request.stream),
                on_end=self._on_end(route, outcome, number),
            )
        )

    def _asked(self, number: int) -> tuple[GenerateRequest, PromptView]:
        call = self._calls[number]
        is_streamed = number * _SPREAD % 100 < self._streamed
        return _request(number, call, is_streamed), PromptView(prompts=(call.prompt,), source="ids")

    def _on_first(self, route: Route, outcome: Outcome, *, is_seen: bool) -> Callable[[Job], None]:
        def on_first(job: Job) -> None:
            outcome.first_s = self._fleet.clock.now_s
            outcome.cached_tokens = job.cached_tokens or 0
            if is_seen:
                route.decode_guard.first_token()
            self._patience_s -= outcome.first_s - outcome.arrived_s
            if self._patience_s < 0:
                self._fleet.clock.stop()

        return on_first

    def _on_end(self, route: Route, outcome: Outcome, number: int) -> Callable[[Job], None]:
        def on_end(job: Job) -> None:
            outcome.ended_s = now_s = self._fleet.clock.now_s
            route.decode_guard.generated(job.output_tokens)
            route.decode_guard.cached(job.cached_tokens or 0)
            route.__exit__(None, None, None)
            for follower in self._followers.get(number, ()):
                self._send_at(now_s + self._calls[follower].at_s, follower)

        return on_end


def _request(number: int, call: Call, is_streamed: bool) -> GenerateRequest:
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if call.session is not None:
        headers = ((b"x-session-id", call.session.encode()),)
    return GenerateRequest(
        request_id=f"r{number}",
        endpoint=Endpoint.CHAT,
        body={"stream": is_streamed},
        raw_body=b"",
        headers=headers,
        model=MODEL,
        base_model=MODEL,
        lora=None,
    )
