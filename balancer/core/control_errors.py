"""How control calls to engines fail: part of the one error tree, never shown to clients."""

from balancer.core.errors import EngineError

NAME_UNKNOWN = "name_unknown"
"""Its host name stands for no address, as far as this machine can tell."""
ENGINE_UNTRUSTED = "engine_untrusted"
"""Its certificate is of no authority that is trusted here, of another host, or outdated."""

NO_FILES = "no_files"
"""This process may open no further connection; the engine may be well."""


class EngineCallError(EngineError):
    """A control call failed. `reason` is a short constant for status pages and logs."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class EngineDrainingError(EngineCallError):
    """503 on /health: it takes no new requests."""


class TokenizeRefusedError(EngineCallError):
    """The engine refuses this very prompt: it is well, the request is not."""


class RenderAbsentError(EngineCallError):
    """This engine renders nothing on this path: it is too old, or wasn't started for it."""
