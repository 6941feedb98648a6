"""Asks the operator's own handlers about a request, and carries their verdict out.

Rules:

1. A handler may be what keeps somebody out: whatever it raises, answers that can't be carried out
   (`core.verdicts`), and more time than it has, refuse the request. Time is measured: a handler that
   swallows its cancellation, or blocks the loop, is late all the same.
2. That is a matter of this request: `sys.exit()` or a CancelledError of its own end nothing else.
3. When the client leaves, or the server ends, the request ends, whatever the handler makes of that.
"""

import asyncio
import traceback
from collections.abc import Callable
from typing import Self, TypeVar, assert_never, cast

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
from balancer.core.verdicts import UnusableVerdictError, checked
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
        on_failure: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self._handlers = {Endpoint.COMPLETIONS: completion, Endpoint.CHAT: chat_completion}
        self.is_on = completion is not None or chat_completion is not None
        """Whether any handler sees requests that may be split."""
        self._forwarded = forwarded
        self.sees_forwarded = forwarded is not None
        self._timeout_s = timeout_s
        self._on_failure = on_failure

    @classmethod
    def configured(
        cls, settings: HandlerSettings, on_failure: Callable[[BaseException], None]
    ) -> Self:
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
        verdict = await self._verdict(handler, shown)
        try:
            return _outcome(verdict, amend)
        except BalancerError:
            raise
        except Exception as error:
            raise self._failed(error) from error

    async def _verdict(self, handler: CompletionHandler, shown: SeenRequest) -> Verdict:
        """Raises HandlerFailedError."""
        task = cast("asyncio.Task[object]", asyncio.current_task())
        loop = asyncio.get_running_loop()
        was_cancelled, asked_s = task.cancelling(), loop.time()
        verdict, failure = None, None
        try:
            async with asyncio.timeout(self._timeout_s):
                verdict = checked(await handler(shown))
        except BaseException as error:  # noqa: BLE001 - somebody else's code, whatever it does
            failure = error
        if task.cancelling() > was_cancelled:
            raise asyncio.CancelledError from failure
        if failure is None and loop.time() - asked_s > self._timeout_s:
            failure = TimeoutError()
        if failure is not None:
            raise self._failed(failure) from failure
        return verdict

    def _failed(self, error: BaseException) -> HandlerFailedError:
        """Write down and count a failure."""
        # Where, not what: messages and locals may hold a prompt.
        frames = traceback.extract_tb(error.__traceback__)
        _logger.error(
            "handler_failed",
            error=type(error).__name__,
            reason=str(error) if isinstance(error, UnusableVerdictError) else None,
            frames=[f"{frame.filename}:{frame.lineno}" for frame in frames[-4:]],
        )
        self._on_failure(error)
        return HandlerFailedError("this balancer's own handler failed")


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
