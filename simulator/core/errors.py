"""The simulator's exception tree: what a caller did wrong, with the status an engine would answer."""


class SimulatorError(Exception):
    """Base of all deliberate errors of the simulator."""


class SettingsError(SimulatorError):
    """A setting cannot work; the message names it."""


class EngineDiedError(SimulatorError):
    """The engine would have died of a request."""


class RequestRefusedError(SimulatorError):
    """The engine answers with an error instead of running the request."""

    status = 400
    kind = "BadRequestError"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidBodyError(RequestRefusedError):
    """The body is not what the path takes: refused before any of it was understood."""

    kind = "Bad Request"


class ScaleOutOffError(RequestRefusedError):
    """The path is there for engines with `--enable-scale-out`."""

    status = 403
    kind = "PermissionDeniedError"


class UnknownModelError(RequestRefusedError):
    """No base model or adapter of that name."""

    status = 404
    kind = "NotFoundError"


class ResponseRefusedError(RequestRefusedError):
    """Of the Responses API's own refusals."""

    kind = "invalid_request_error"


class ResponseNotFoundError(ResponseRefusedError):
    """No response is kept under this id."""

    status = 404


class OverloadedError(RequestRefusedError):
    """The queue limit is reached; meant to be tried on another instance."""

    status = 503
    kind = "ServiceUnavailableError"


class GenerationFailedError(RequestRefusedError):
    """The request ended with `finish_reason` error, e.g. a failed block transfer."""

    status = 500
    kind = "InternalServerError"
