"""Plays a workload against one balancer: every conversation its own user, turn after turn.

Arrivals are open-loop: each turn has a planned time that depends on the seed alone, so both
policies get the same load. A turn only waits longer if the answer before it isn't complete.
"""

import asyncio
from collections.abc import Callable, Sequence

from openai import AsyncOpenAI

from kvlb.demo.client import Answer, ask, open_client
from kvlb.demo.report import NONE, RoutedRequest
from kvlb.demo.stage import Stage
from simulator.workload import Conversation


async def play(
    url: str,
    conversations: Sequence[Conversation],
    *,
    stage: Stage,
    clock: Callable[[], float],
    on_answer: Callable[[], None],
) -> tuple[RoutedRequest, ...]:
    """Return every request, ordered by conversation and turn."""
    started_s = clock()
    async with open_client(url) as client, asyncio.TaskGroup() as group:
        players = [
            _Player(client, number, conversation, stage, clock, on_answer)
            for number, conversation in enumerate(conversations)
        ]
        tasks = [group.create_task(player.play(started_s)) for player in players]
    return tuple(request for task in tasks for request in task.result())


class _Player:
    """One user."""

    def __init__(
        self,
        client: AsyncOpenAI,
        number: int,
        conversation: Conversation,
        stage: Stage,
        clock: Callable[[], float],
        on_answer: Callable[[], None],
    ) -> None:
        self._client = client
        self._number = number
        self._conversation = conversation
        self._stage = stage
        self._clock = clock
        self._on_answer = on_answer

    async def play(self, started_s: float) -> list[RoutedRequest]:
        """Say every turn at its time; the next one holds all answers before it."""
        system = self._conversation.system
        messages = [{"role": "system", "content": system}] if system else []
        requests = []
        planned_s = started_s + self._conversation.start_s
        for number, turn in enumerate(self._conversation.turns):
            planned_s += turn.think_s + (self._stage.answer_allowance_s if number else 0.0)
            await asyncio.sleep(max(0.0, planned_s - self._clock()))
            messages.append({"role": "user", "content": turn.text})
            answer = await ask(
                self._client,
                model=self._stage.engine.model,
                messages=messages,
                max_tokens=turn.max_tokens,
                clock=self._clock,
            )
            messages.append({"role": "assistant", "content": answer.text})
            requests.append(_describe(self._number, number, answer))
            self._on_answer()
        return requests


def _describe(conversation: int, turn: int, answer: Answer) -> RoutedRequest:
    headers = answer.headers
    overlap = headers.get("x-kvlb-overlap-tokens")
    return RoutedRequest(
        conversation=conversation,
        turn=turn,
        text=answer.text,
        ttft_s=answer.ttft_s,
        instance=headers.get("x-kvlb-instance", "?"),
        prefill=headers.get("x-kvlb-prefill", NONE),
        reason=headers.get("x-kvlb-reason", "?"),
        overlap_tokens=int(overlap) if overlap and overlap.isdecimal() else None,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
    )
