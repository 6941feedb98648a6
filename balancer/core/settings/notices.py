"""Settings of the port where LMCache says that blocks have been sent. Frozen, checked."""

from typing import Annotated

import msgspec

from indexer.core.limits import Port, PositiveFloat


class NoticeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LMCache's senders say here that a prompt's blocks are where the decode engine receives them.

    What LMCache's configuration calls `pd_proxy_host` and `pd_proxy_port`. Decode legs to instances with
    `transfer.receiver_host` wait for it. Of several processes only the first one listens; what the
    others carry doesn't wait. More: docs/connectors.md.
    """

    port: Port = 8500
    """Port of the ZMQ PULL. 0 takes any free one."""
    bind: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1"
    """Address to listen on; `0.0.0.0` for every interface."""
    wait_s: PositiveFloat = 2.0
    """Longest wait after the prefill leg has answered. Then the decode leg goes out all the same, and
    its engine computes what isn't there."""
