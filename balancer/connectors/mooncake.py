"""MooncakeConnector (0.16 and later): both legs at once, found through the bootstrap server.

The bootstrap server in the prefill engine's first worker tells which engine id is behind each rank.
Ids are new after every restart, so they are asked for with each probe. Both legs name the same
transfer; the decode engine computes everything itself, silently, if one of its three fields is
missing, so it is never sent without. The prefill engine hands over only what ended by its length:
`min_tokens` 1 sees to it.

If the prefill engine fails, the decode engine waits for 480 s; the caller cancels it.
0.13 and 0.14 had another, serial protocol, which isn't spoken here.
"""

from collections.abc import Mapping
from typing import Any

from balancer.connectors.contract import (
    Connector,
    LegContext,
    LegRequest,
    NoTransferError,
    Style,
    bracketed,
    host_of,
    settings_of,
    with_params,
)
from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.fleet.transfer_facts import Inquiry, TransferFacts
from balancer.core.http.prefill_rewrite import prefill_body
from balancer.core.settings.transfer import MooncakeSettings


class MooncakeConnector(Connector):
    """Concurrent: the decode engine may come first."""

    name = "mooncake"

    def style(self, context: LegContext) -> Style:  # noqa: ARG002 - the contract's signature
        """Neither leg waits for the other."""
        return "concurrent"

    def prefill_leg(self, context: LegContext) -> LegRequest:
        """One token, and keep the blocks for the transfer of this name."""
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": _transfer_id(context),
        }
        return LegRequest(
            body=with_params(prefill_body(context.body), params),
            headers=_pinned(context.prefill, context.prefill_rank),
        )

    def decode_leg(
        self,
        context: LegContext,
        prefill_answer: Mapping[str, Any] | None,  # noqa: ARG002 - the contract's signature
    ) -> LegRequest:
        """The transfer's name, and where its blocks will be."""
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_bootstrap_addr": bootstrap_url(context.prefill),
            "remote_engine_id": _engine_id(context.prefill, context.prefill_rank),
            "transfer_id": _transfer_id(context),
        }
        return LegRequest(body=with_params(context.body, params))

    def inquiry(self, instance: Instance) -> Inquiry | None:
        """The engine ids of an instance that prefills."""
        if instance.role is not Role.PREFILL:
            return None
        return Inquiry(url=f"{bootstrap_url(instance)}/query", read=read_engine_ids)

    def params(self) -> frozenset[str]:
        """The fields of both legs."""
        return frozenset(
            {
                "do_remote_decode",
                "do_remote_prefill",
                "remote_bootstrap_addr",
                "remote_engine_id",
                "transfer_id",
            }
        )


def bootstrap_url(instance: Instance) -> str:
    """Where the instance's bootstrap server listens."""
    settings = settings_of(instance, MooncakeSettings)
    host = settings.bootstrap_host or host_of(instance)
    return f"http://{bracketed(host)}:{settings.bootstrap_port}"


def read_engine_ids(told: object) -> TransferFacts:
    """Read the bootstrap server's `/query`. Raises ValueError."""
    if not isinstance(told, Mapping) or not told:
        raise ValueError("no engine has registered yet")
    try:
        ids = {int(rank): entry["engine_id"] for rank, entry in told.items()}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError("not a list of engines by rank") from error
    if not all(isinstance(each, str) for each in ids.values()):
        raise ValueError("an engine id is no text")
    return TransferFacts(engine_ids=ids)


def _transfer_id(context: LegContext) -> str:
    return f"xfer-{context.attempt_id}"


def _engine_id(source: Instance, rank: int) -> str:
    """Where several addresses share a data-parallel group, each may count from 0."""
    ids = source.facts.engine_ids
    found = ids.get(rank) or ids.get(rank - source.rank_base)
    if found is None:
        raise NoTransferError(
            f"{source.alias} has told no engine id of rank {rank}: is its bootstrap server "
            "at `transfer.bootstrap_host` and `transfer.bootstrap_port`?"
        )
    return found


def _pinned(source: Instance, rank: int) -> tuple[tuple[bytes, bytes], ...]:
    """The id named to the decode engine is that of one rank, so the leg must run there."""
    if source.rank_header(rank) is not None:
        return ()  # pinned anyway
    return ((b"x-data-parallel-rank", str(rank - source.rank_base).encode()),)
