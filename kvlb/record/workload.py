"""The requests that `kvlb record` sends: seeded conversations, moved from rank to rank.

The same seed and the same engines give the same requests. A conversation stays for two turns, then
moves on: caches are hit whole, in part and not at all.
"""

import asyncio
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from balancer.connectors.available import connectors
from balancer.connectors.contract import LegContext, NoTransferError
from balancer.core.fleet.snapshot import Role
from balancer.core.request import Endpoint
from kvlb.errors import SettingsError
from kvlb.record.asking import Exchanged, ask
from kvlb.record.stations import Station
from kvlb.record.writer import CaptureWriter
from simulator.workload import Conversation, WorkloadShape, conversations

SHAPE = WorkloadShape(
    conversations=8,
    turns=5,
    shared_system_chars=200,
    first_message_chars=600,
    next_message_chars=150,
    answer_tokens=12,
)
STAY_TURNS = 2
STREAM_EVERY = 4
TEXT_EVERY = 4
"""Every fourth conversation is one growing text for `/v1/completions`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where one request goes: to one rank, or first to one that prefills."""

    decode: Station
    prefill: Station | None = None


def find_targets(stations: Sequence[Station]) -> list[Target]:
    """Every mixed or decode rank; decode ranks are paired with prefill ranks in turn."""
    prefill = [each for each in stations if each.instance.role is Role.PREFILL]
    targets = []
    for number, station in enumerate(each for each in stations if each not in prefill):
        needs_pair = station.instance.role is Role.DECODE and bool(prefill)
        source = prefill[number % len(prefill)] if needs_pair else None
        targets.append(Target(decode=station, prefill=source))
    if not targets:
        raise SettingsError("only prefill instances are named; add a decode instance to record")
    return targets


class Player:
    """Plays conversations until `requests` were sent."""

    def __init__(
        self,
        targets: Sequence[Target],
        writer: CaptureWriter,
        *,
        seed: int,
        requests: int | None,
        concurrency: int,
    ) -> None:
        self._targets = targets
        self._writer = writer
        self._seed = seed
        self._left = requests
        self._concurrency = concurrency
        self._phase = "serial" if concurrency == 1 else "load"

    async def run(self) -> None:
        """Play until enough was sent; for ever if nobody said how much."""
        waiting = enumerate(_endless(self._seed))

        async def play_in_turn() -> None:
            while self._left is None or self._left > 0:
                await self._play(*next(waiting))

        async with asyncio.TaskGroup() as group:
            for _ in range(self._concurrency):
                group.create_task(play_in_turn())

    async def _play(self, number: int, conversation: Conversation) -> None:
        messages: list[dict[str, str]] = []
        if conversation.system:
            messages.append({"role": "system", "content": conversation.system})
        for turn_number, turn in enumerate(conversation.turns):
            if self._left is not None and self._left <= 0:
                return
            messages.append({"role": "user", "content": turn.text})
            target = self._targets[(number + turn_number // STAY_TURNS) % len(self._targets)]
            body = self._body(number, messages, target.decode.model, turn.max_tokens)
            if (number + turn_number) % STREAM_EVERY == STREAM_EVERY - 1:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            label = f"{conversation.name} turn {turn_number}"
            exchanged = await self._send(target, body, label)
            if exchanged.answer is None or not exchanged.answer.is_ok:
                return
            messages.append({"role": "assistant", "content": exchanged.text})

    def _body(
        self, number: int, messages: Sequence[Mapping[str, str]], model: str, max_tokens: int
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0}
        if number % TEXT_EVERY == TEXT_EVERY - 1:
            return {**body, "prompt": "\n".join(each["content"] for each in messages)}
        return {**body, "messages": list(messages)}

    async def _send(self, target: Target, body: Mapping[str, Any], label: str) -> Exchanged:
        if target.prefill is None:
            return await self._ask(target.decode, body, label)
        return await self._send_pair(target.prefill, target.decode, body, label)

    async def _send_pair(
        self, prefill: Station, decode: Station, body: Mapping[str, Any], label: str
    ) -> Exchanged:
        connector = connectors()[prefill.instance.connector]
        context = LegContext(
            request_id="kvlb-record",
            attempt_id=uuid.uuid4().hex,
            path=(Endpoint.CHAT if "messages" in body else Endpoint.COMPLETIONS).value,
            body=body,
            prefill=prefill.instance,
            prefill_rank=prefill.source.rank.rank,
            decode=decode.instance,
            decode_rank=decode.source.rank.rank,
        )
        leg = connector.prefill_leg(context)
        if connector.style(context) == "concurrent" or leg.request_id is not None:
            raise SettingsError(f"connector {connector.name}: its legs can't be recorded yet")
        first = await self._ask(prefill, leg.body, f"{label} [P]")
        answer = first.answer
        if answer is None or not answer.is_ok or not isinstance(answer.body, Mapping):
            return first
        try:
            leg = connector.decode_leg(context, answer.body)
        except NoTransferError as error:
            raise SettingsError(f"{prefill.name}: {error}; `kvlb doctor` says more") from error
        return await self._ask(decode, leg.body, f"{label} [D]")

    async def _ask(self, station: Station, body: Mapping[str, Any], label: str) -> Exchanged:
        if self._left is not None:
            self._left -= 1
        return await ask(station, self._writer, body, phase=self._phase, label=label)


def _endless(seed: int) -> Iterator[Conversation]:
    for each in count(seed):
        yield from conversations(each, SHAPE)
