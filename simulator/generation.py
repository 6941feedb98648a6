"""Requests that were accepted, until the last byte of their answers."""

from collections.abc import Callable
from typing import Any, TypeVar

from simulator.answers import Answer, AnswerOptions, Choice, WholeAnswer
from simulator.bodies import GenerationBody
from simulator.core.errors import GenerationFailedError
from simulator.core.types import EngineRequest
from simulator.exchange import Exchange
from simulator.rank import EngineRank, OutputStream

LOAD_FAILED = (
    "Internal server error: the engine that prefilled this prompt is not in this process. Simulated "
    "engines hand blocks over only inside one `kvlb simulate`; there, it was restarted meanwhile"
)
"""The only failure that a simulated request meets. A real engine says no more than the first words."""

Sequences = list[tuple[Choice, EngineRequest]]


class Generation:
    """One accepted request until its last byte."""

    def __init__(
        self,
        rank: EngineRank,
        exchange: Exchange,
        body: GenerationBody,
        answer: WholeAnswer,
        sequences: Sequences,
    ) -> None:
        self.rank = rank
        self._exchange = exchange
        self._body = body
        self._whole = answer
        self._requests = [request for _choice, request in sequences]
        self._choices = [choice for choice, _request in sequences]
        self._open = {choice.request_id: choice for choice in self._choices}
        self._stream = OutputStream(sum(request.max_tokens for request in self._requests))

    @property
    def loads_prompt(self) -> bool:
        """Another engine has computed the prompt, media included."""
        return any(request.remote is not None for request in self._requests)

    async def run(self) -> bool:
        """Generate and answer; what is unfinished when the client goes is aborted.

        False if a stream ended in an error. Raises GenerationFailedError where there is none.
        """
        for request in self._requests:
            self.rank.submit(request, self._stream)
        try:
            return await (self._run_stream() if self._body.stream else self._run_whole())
        finally:
            for request_id in self._open:
                self.rank.abort(request_id)

    async def _run_whole(self) -> bool:
        while self._open:
            choice = await self._next_choice()
            if choice.finish_reason == "error":
                raise GenerationFailedError(LOAD_FAILED)
        await self._exchange.send_json(self._whole.render_whole(self._choices))
        return True

    async def _run_stream(self) -> bool:
        """Stream in the events of the subclass's own API; one without streams answers in one piece."""
        return await self._run_whole()

    async def _next_choice(self) -> Choice:
        """Wait for a token of an open choice and return that choice."""
        while True:
            output = await self._stream.next()
            choice = self._open.get(output.request_id)
            # Tokens that were on their way when a stop string ended the choice.
            if choice is not None:
                break
        choice.accept(output, min_tokens=self._body.min_tokens)
        if choice.finish_reason is not None:
            del self._open[choice.request_id]
            if output.finish_reason is None:
                self.rank.abort(choice.request_id)
        return choice


class ChunkGeneration(Generation):
    """One whose stream is a chunk per token, as of completions and chats."""

    _shows_all = False
    """Also tokens that make no text yet."""

    def __init__(
        self,
        rank: EngineRank,
        exchange: Exchange,
        body: GenerationBody,
        answer: Answer,
        sequences: Sequences,
    ) -> None:
        super().__init__(rank, exchange, body, answer, sequences)
        self._answer = answer

    async def _run_stream(self) -> bool:
        await self._exchange.start_stream()
        for choice in self._choices:
            opening = self._answer.render_opening(choice)
            if opening is not None:
                if self._body.repeats_usage:
                    opening["usage"] = self._answer.render_usage([choice])["usage"]
                await self._exchange.send_event(opening)
        is_complete = await self._stream_tokens()
        if is_complete and self._body.includes_usage:
            await self._exchange.send_event(self._answer.render_usage(self._choices))
        await self._exchange.end_stream()
        return is_complete

    async def _stream_tokens(self) -> bool:
        """Send tokens until all choices are complete; False if one failed."""
        while self._open:
            choice = await self._next_choice()
            if choice.finish_reason == "error":
                failure = GenerationFailedError(LOAD_FAILED)
                await self._exchange.send_event(self._answer.render_failure(failure))
                return False
            is_final = choice.finish_reason is not None
            text = choice.output.take(is_final=is_final)
            if self._is_shown(choice, text):
                await self._exchange.send_event(self._render_chunk(choice, text))
        return True

    def _is_shown(self, choice: Choice, text: str) -> bool:
        ends = choice.finish_reason is not None
        return bool(text) or ends or self._shows_all or bool(self._body.return_token_ids)

    def _render_chunk(self, choice: Choice, text: str) -> dict[str, Any]:
        chunk = self._answer.render_chunk(choice, text, choice.token_ids[-1])
        if self._body.repeats_usage:
            chunk["usage"] = self._answer.render_usage([choice])["usage"]
        return chunk


MakeGeneration = Callable[
    [EngineRank, Exchange, GenerationBody, AnswerOptions, Sequences], Generation
]
AnswerT = TypeVar("AnswerT", bound=WholeAnswer)


def making(
    kind: Callable[[EngineRank, Exchange, GenerationBody, AnswerT, Sequences], Generation],
    answer: Callable[[AnswerOptions], AnswerT],
) -> MakeGeneration:
    """Makes a generation of this kind of what was asked; its answer is rendered so."""

    def make(
        rank: EngineRank,
        exchange: Exchange,
        body: GenerationBody,
        options: AnswerOptions,
        sequences: Sequences,
    ) -> Generation:
        return kind(rank, exchange, body, answer(options), sequences)

    return make
