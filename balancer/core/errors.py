"""Every deliberate failure of the read path, with its HTTP status and whether a retry is safe.

BalancerError
├── RequestError          the client's fault; never retried, always 4xx
│   ├── BadRequestError 400   UnauthorizedError 401   ForbiddenError 403   ModelNotFoundError 404
│   ├── PathNotFoundError 404   ResponseNotFoundError 404   MethodNotAllowedError 405
│   ├── BodyTooLargeError 413   RequestLateError 408   TargetTooLongError 414   HeadTooLargeError 431
│   └── MemberNotFoundError 404   MemberConflictError 409   MemberRefusedError 422   (/instances)
├── FleetError            nobody can serve it now
│   ├── NotSplittableError 503    who is there takes nothing without a prefill leg
│   ├── NoInstanceError 503       no enabled, healthy instance of the model and role
│   ├── OverloadedError 503       all of them are full; carries Retry-After
│   └── ChangesLostError 503      a change of the fleet can't be kept now
├── EngineError           an engine failed us: as long as the client has no byte another may be tried
│   ├── EngineUnreachableError 502   before the engine could see the request
│   ├── EngineClosedError 502        closed before the first token of its answer
│   ├── EngineTimeoutError 504       connect, first-byte or idle limit passed
│   │   ├── ConnectTimeoutError 504  no connection in time
│   │   └── EngineLostError 504      it stopped answering its probes, too, before its first byte
│   ├── EngineProtocolError 502      its bytes were not HTTP
│   ├── EngineRefusedError (status of the engine)   it answered 4xx/5xx before any byte went out
│   ├── HandOverFailedError 502      it couldn't load what another engine had computed
│   └── StreamCutError 502           it died in the middle of its answer
├── LeaseEndedError 503     the blocks of its prefill leg may be gone
│   └── BlocksReadError 502          or read already: the engine closed its connection
├── PrefillFailedError 503  no prefill leg succeeded and local prefill isn't allowed
├── EncodeFailedError 503   no encode leg of an item succeeded and nobody may stand in
├── LoopError 508           a balancer sent it: an instance is no engine
└── ClientGoneError 499     the client went away; nothing is answered
"""

_NOT_SPLITTABLE = (
    "this can't run over two legs, and no instance here takes a request without a prefill leg"
)
_NO_FILES = "this balancer may open no more connections: raise its limit of open files"
LOOPED = 508
"""What a balancer answers to a request of its own: no engine is behind that address."""
_ELSEWHERE = frozenset({500, 502, 503, 504, LOOPED})
"""Statuses of an engine after which another one may do better."""


class BalancerError(Exception):
    """Base of all deliberate errors. Anything else that escapes is a bug.

    `message` is shown to the client, so it never holds prompts, keys or engine addresses.
    """

    status = 500
    retryable = False
    type = "InternalServerError"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(BalancerError):
    """The client has to change its request."""

    status = 400
    type = "BadRequestError"


class BadRequestError(RequestError):
    """Malformed JSON, a wrong type, a missing field."""


class UnauthorizedError(RequestError):
    """No key, or a wrong one."""

    status = 401
    type = "AuthenticationError"
    code = "invalid_api_key"


class ForbiddenError(RequestError):
    """Nobody may ask for this from where the client is."""

    status = 403
    type = "PermissionDeniedError"
    code = "forbidden"


class ModelNotFoundError(RequestError):
    """No instance has ever served a model of this name."""

    status = 404
    type = "NotFoundError"
    code = "model_not_found"


class PathNotFoundError(RequestError):
    """No engine serves this path."""

    status = 404
    type = "NotFoundError"
    code = "path_not_found"


class ResponseNotFoundError(RequestError):
    """No instance keeps the response; in the words that engines have for it."""

    status = 404
    type = "invalid_request_error"
    code = "response_not_found"


class MethodNotAllowedError(RequestError):
    """The path exists, the method doesn't."""

    status = 405
    type = "MethodNotAllowedError"

    def __init__(self, message: str, *, allow: str | None = None) -> None:
        super().__init__(message)
        self.allow = allow


class BodyTooLargeError(RequestError):
    """The body is over the configured limit."""

    status = 413
    type = "RequestEntityTooLargeError"
    code = "body_too_large"


class RequestLateError(RequestError):
    """The rest of the request doesn't come."""

    status = 408
    type = "RequestTimeoutError"
    code = "request_late"


class TargetTooLongError(RequestError):
    """Path and query are over the configured limit."""

    status = 414
    type = "RequestURITooLongError"
    code = "target_too_long"


class HeadTooLargeError(RequestError):
    """The head is over the configured limit."""

    status = 431
    type = "RequestHeaderFieldsTooLargeError"
    code = "head_too_large"


class MemberNotFoundError(RequestError):
    """No such instance in the fleet."""

    status = 404
    type = "NotFoundError"
    code = "instance_not_found"


class MemberConflictError(RequestError):
    """The fleet has such an instance already, or is full."""

    status = 409
    type = "ConflictError"
    code = "instance_conflict"


class MemberRefusedError(RequestError):
    """The instance was asked, and can't be taken in. `code` says why."""

    status = 422
    type = "UnprocessableEntityError"
    code = "instance_refused"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code or self.code


class FleetError(BalancerError):
    """Nobody can serve the request at this moment."""

    status = 503
    type = "ServiceUnavailableError"


class NoInstanceError(FleetError):
    """No enabled, healthy instance serves this model in this role."""

    code = "no_instance"


class NotSplittableError(FleetError):
    """Two legs can't serve it, and every instance's connector takes nothing without a prefill leg."""

    code = "not_splittable"

    def __init__(self, message: str = _NOT_SPLITTABLE) -> None:
        super().__init__(message)


class OverloadedError(FleetError):
    """Every instance is full."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoFilesError(FleetError):
    """This process may open no further connection; engines are not to blame."""

    code = "no_files"

    def __init__(self, message: str = _NO_FILES) -> None:
        super().__init__(message)


class ChangesLostError(FleetError):
    """What keeps run-time changes of the fleet doesn't answer: nothing was changed."""

    code = "changes_unavailable"


class EngineError(BalancerError):
    """An engine failed. Generating has no effect but its answer: it may be done again."""

    status = 502
    retryable = True
    type = "BadGatewayError"


class EngineUnreachableError(EngineError):
    """The connection failed before the engine could see the request."""

    code = "engine_unreachable"


class EngineClosedError(EngineError):
    """The engine closed or reset the connection before the first token of its answer."""

    code = "engine_closed"


class EngineTimeoutError(EngineError):
    """A connect, first-byte or idle limit passed."""

    status = 504
    type = "GatewayTimeoutError"
    code = "engine_timeout"


class ConnectTimeoutError(EngineTimeoutError):
    """No connection within the connect limit, so the engine saw nothing."""

    code = "connect_timeout"


class EngineLostError(EngineTimeoutError):
    """The engine doesn't answer its probes any more; nothing of its answer has come."""

    code = "engine_lost"


class EngineProtocolError(EngineError):
    """The engine's bytes were not HTTP."""

    code = "engine_protocol"


class EngineRefusedError(EngineError):
    """The engine answered 4xx or 5xx. Its answer reaches the client as it is.

    A 503 asks for another instance (full queue, paused), 500, 502, 504 and 508 say that this one can't.
    """

    code = "engine_refused"

    def __init__(
        self, status: int, headers: tuple[tuple[bytes, bytes], ...], body: bytes, *, alias: str
    ) -> None:
        super().__init__(f"the engine answered {status}")
        self.status = status
        self.retryable = status in _ELSEWHERE
        self.headers = headers
        self.body = body
        self.alias = alias


class HandOverFailedError(EngineError):
    """The engine couldn't load what another had computed. Both legs may run again elsewhere."""

    code = "hand_over_failed"


class StreamCutError(EngineError):
    """The engine died in the middle of its answer."""

    code = "stream_cut"


class LeaseEndedError(BalancerError):
    """What the prefill engine kept may be gone: both legs have to run again.

    Nobody's fault.
    """

    status = 503
    retryable = True
    type = "ServiceUnavailableError"
    code = "lease_ended"


class BlocksReadError(LeaseEndedError):
    """The engine closed a kept connection, and may have read the blocks: not a lease that ended.

    To its client it is what it would have been on a new connection.
    """

    status = EngineClosedError.status
    type = EngineClosedError.type
    code = EngineClosedError.code


class PrefillFailedError(BalancerError):
    """No prefill leg succeeded, and prefill on the decode instance isn't allowed."""

    status = 503
    type = "ServiceUnavailableError"
    code = "prefill_failed"


class EncodeFailedError(BalancerError):
    """An item could not be encoded by any encode instance, and the one that needs it may not or can't."""

    status = 503
    type = "ServiceUnavailableError"
    code = "encode_failed"


class LoopError(BalancerError):
    """A balancer sent the request as a leg, perhaps this very one. No other instance does better."""

    status = 508
    type = "LoopDetectedError"
    code = "loop"


class ClientGoneError(BalancerError):
    """The client went away. Nothing is answered any more."""

    status = 499
    type = "ClientClosedRequest"
