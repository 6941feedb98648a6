"""Asks the operator's own handlers about a request, and carries their verdict out."""

import asyncio
import traceback
from collections.abc import Callable
from typing import Self, TypeVar, assert_never

import msgspec
import structlog

from balancer.core.errors import BalancerError
from balancer.core.fleet.snapshot import Fleet
from balancer.core.handlers import (
    Amend,
    CompletionHandler,
    HandlerFailedError,
    Refuse,
    RefusedByHandlerError,
    Reply,
    SeenRequest,
    Verdict,
    amended_headers,
    seen,
)
from balancer.core.http.generate import read_generate
from balancer.core.http.rewrite import encode_body
from balancer.core.request import Endpoint, GenerateRequest
from balancer.core.settings.handlers import HandlerSettings
from balancer.own_code import load_handler

T = TypeVar("T")

_logger = structlog.stdlib.get_logger(__name__)


class Handling:
    """One per balancer; without handlers it needn't be asked (`is_on`)."""

    def __init__(
        self,
        *,
        completion: CompletionHandler | None = None,
        chat_completion: CompletionHandler | None = None,
        forwarded: CompletionHandler | None = None,
        timeout_s: float = 1.0,
        on_failure: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self._handlers = {Endpoint.COMPLETIONS: completion, Endpoint.CHAT: chat_completion}
        self.is_on = completion is not None or chat_completion is not None
        """Whether any handler sees requests that may be split."""
        self._forwarded = forwarded
        self.sees_forwarded = forwarded is not None
        self._timeout_s = timeout_s
        self._on_failure = on_failure

    @classmethod
    def configured(cls, settings: HandlerSettings, on_failure: Callable[[Exception], None]) -> Self:
        """With the handlers that the settings name. Raises ConfigError."""
        return cls(
            completion=load_handler(settings.completion, "handlers.completion"),
            chat_completion=load_handler(settings.chat_completion, "handlers.chat_completion"),
            forwarded=load_handler(settings.forwarded, "handlers.forwarded"),
            timeout_s=settings.timeout_s,
            on_failure=on_failure,
        )

    async def judge(self, request: GenerateRequest, fleet: Fleet) -> GenerateRequest | Reply:
        """The request to go on with, or its answer. Raises BalancerError."""
        handler = self._handlers[request.endpoint]
        if handler is None:
            return request
        told = await self._ask(
            handler, seen(request), lambda verdict: _amended(request, verdict, fleet)
        )
        return request if told is None else told

    async def judge_forwarded(
        self, shown: SeenRequest, amend: Callable[[Amend], T]
    ) -> T | Reply | None:
        """What `amend` makes of a change, an answer, or None: go on. Raises BalancerError."""
        if self._forwarded is None:
            return None
        return await self._ask(self._forwarded, shown, amend)

    async def _ask(
        self, handler: CompletionHandler, shown: SeenRequest, amend: Callable[[Amend], T]
    ) -> T | Reply | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                verdict = await handler(shown)
            return _outcome(verdict, amend)
        except BalancerError:
            raise
        except Exception as error:
            # Where, not what: messages and locals may hold a prompt.
            frames = traceback.extract_tb(error.__traceback__)
            places = [f"{frame.filename}:{frame.lineno}" for frame in frames[-4:]]
            _logger.error("handler_failed", error=type(error).__name__, frames=places)  # noqa: TRY400
            self._on_failure(error)
            raise HandlerFailedError("this balancer's own handler failed") from error


def _outcome(verdict: Verdict, amend: Callable[[Amend], T]) -> T | Reply | None:
    match verdict:
        case None:
            return None
        case Refuse():
            raise RefusedByHandlerError(verdict.message, verdict)
        case Reply():
            return verdict
        case Amend():
            return amend(verdict)
        case never:
            assert_never(never)


def _amended(request: GenerateRequest, verdict: Amend, fleet: Fleet) -> GenerateRequest:
    headers = amended_headers(request.headers, verdict.headers)
    if verdict.body is None:
        return msgspec.structs.replace(request, headers=headers)
    return read_generate(
        request.endpoint,
        encode_body(verdict.body),
        fleet,
        request_id=request.request_id,
        headers=headers,
    )
