"""Generations whose streams are named events: Messages and Responses."""

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from simulator.answers import Choice, WholeAnswer
from simulator.bodies import GenerationBody
from simulator.core.errors import GenerationFailedError, RequestRefusedError
from simulator.exchange import Exchange
from simulator.generation import LOAD_FAILED, Generation, Sequences
from simulator.rank import EngineRank

Event = dict[str, Any]
"""Its `type` is its name."""


class NamedAnswer(WholeAnswer, Protocol):
    """How one path renders an answer of one choice, and its stream of events."""

    def render_begin(self, choice: Choice, /) -> Iterable[Event]: ...

    def render_text(self, text: str) -> Iterable[Event]: ...

    def render_end(self, choice: Choice) -> Iterable[Event]: ...

    def render_failed(self, error: RequestRefusedError) -> Event: ...


class NamedGeneration(Generation):
    """One accepted request until its last byte."""

    def __init__(
        self,
        rank: EngineRank,
        exchange: Exchange,
        body: GenerationBody,
        answer: NamedAnswer,
        sequences: Sequences,
    ) -> None:
        super().__init__(rank, exchange, body, answer, sequences)
        self._named = answer

    async def _run_stream(self) -> bool:
        await self._exchange.start_stream()
        (choice,) = self._choices
        await self._send(self._named.render_begin(choice))
        while self._open:
            await self._next_choice()
            if choice.finish_reason == "error":
                failure = self._named.render_failed(GenerationFailedError(LOAD_FAILED))
                await self._send([failure])
                break
            text = choice.output.take(is_final=choice.finish_reason is not None)
            if text:
                await self._send(self._named.render_text(text))
        else:
            await self._send(self._named.render_end(choice))
        await self._exchange.finish()
        return choice.finish_reason != "error"

    async def _send(self, events: Iterable[Event]) -> None:
        for event in events:
            head = f"event: {event['type']}\ndata: ".encode()
            await self._exchange.send_chunk(head + msgspec.json.encode(event) + b"\n\n")
