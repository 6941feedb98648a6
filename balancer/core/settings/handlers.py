"""Settings of the operator's own handlers."""

import msgspec

from indexer.core.limits import PositiveFloat


class HandlerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Code of your own that is asked about each request.

    An `async` function, or a class, by its import path `package.module:name`: it may refuse a request,
    change it, or answer it (docs/extending.md). Installed beside kvlb, or in a folder of `PYTHONPATH`.
    """

    completion: str | None = None
    """For `/v1/completions`."""
    chat_completion: str | None = None
    """For `/v1/chat/completions`."""
    forwarded: str | None = None
    """For every other request to an engine: `/v1/messages`, `/v1/responses`, embeddings and all; not
    for sessions (`/v1/realtime`)."""
    timeout_s: PositiveFloat = 1.0
    """For one request; one that takes longer, whatever it does, is refused with 503 `handler_failed`."""
