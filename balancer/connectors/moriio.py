"""MoRIIOConnector (0.14 and later, ROCm): WRITE at once, READ one after the other.

Engines register themselves (address, ranks, mode) or are described in `transfer:`. Each leg is told
the other's address, in fields of its own or inside the request id, and the other's parallel sizes.
Both legs are pinned to a rank, to the same one where both have it; if the decode engine has no such
rank, the prefill rank is named all the same, and the claim that both agree is left out.

In READ mode a decode engine counts every prompt as handed over (read in 0.32): without a prefill
leg its text would be made of nothing, so none is sent without.

The prefill engine hands over only what ended by its length: `min_tokens` 1 sees to it. The client's
`max_tokens` stays what it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from balancer.connectors.contract import (
    REQUEST_ID,
    Connector,
    LegContext,
    LegRequest,
    NoTransferError,
    Style,
    settings_of,
    with_params,
)
from balancer.connectors.p2p_nccl import addressed_id
from balancer.core.fleet.snapshot import Instance
from balancer.core.fleet.transfer_facts import TransferMode
from balancer.core.http.prefill_rewrite import prefill_body
from balancer.core.settings.transfer import MoriioSettings

PREFIX = "tx"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One instance as the other has to know it."""

    zmq_address: str
    host: str
    handshake_port: int
    notify_port: int
    dp_size: int
    tp_size: int

    def described(self) -> dict[str, Any]:
        return {"remote_dp_size": self.dp_size, "remote_tp_size": self.tp_size}

    def addressed(self) -> dict[str, Any]:
        return {
            "remote_host": self.host,
            "remote_handshake_port": self.handshake_port,
            "remote_notify_port": self.notify_port,
        }


class MoriioConnector(Connector):
    """Concurrent if the prefill engine writes, serial if the decode engine reads."""

    name = "moriio"
    pairs_ranks = True

    def style(self, context: LegContext) -> Style:
        """As the prefill engine runs."""
        return "serial" if _mode(context.prefill) == "READ" else "concurrent"

    def prefill_leg(self, context: LegContext) -> LegRequest:
        """One token, under the transfer's name, with the decode engine's address and sizes."""
        other = _side(context.decode)
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "transfer_id": _transfer_id(context),
            **other.described(),
            **_explicit(context, other),
        }
        return LegRequest(
            body=with_params(prefill_body(context.body), params), request_id=_leg_id(context)
        )

    def decode_leg(
        self, context: LegContext, prefill_answer: Mapping[str, Any] | None
    ) -> LegRequest:
        """The transfer's name and the prefill engine's rank, address and sizes."""
        other = _side(context.prefill)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "transfer_id": _transfer_id(context),
            **other.described(),
            **_explicit(context, other),
            "remote_dp_rank": context.prefill_rank,
        }
        if self.style(context) == "serial":
            params |= _returned(prefill_answer)
        elif other.dp_size > 1 and context.decode_rank == context.prefill_rank:
            params["remote_dp_rank_override"] = True
        return LegRequest(body=with_params(context.body, params), request_id=_leg_id(context))

    def needs_prefill(self, instance: Instance) -> bool:
        """A reading engine takes every prompt for handed over, and reads nothing without fields."""
        return _mode(instance) == "READ"

    def mismatch(self, source: Instance, target: Instance) -> str | None:
        """One writes, the other waits to read."""
        modes = _mode(source), _mode(target)
        return None if modes[0] == modes[1] else f"one runs in mode {modes[0]}, one in {modes[1]}"

    def params(self) -> frozenset[str]:
        """The fields of both legs, and the id."""
        return frozenset(
            {
                "do_remote_decode",
                "do_remote_prefill",
                "remote_block_ids",
                "remote_dp_rank",
                "remote_dp_size",
                "remote_engine_id",
                "remote_handshake_port",
                "remote_host",
                "remote_notify_port",
                "remote_tp_size",
                "transfer_id",
                REQUEST_ID,
            }
        )


def _mode(instance: Instance) -> TransferMode:
    configured = settings_of(instance, MoriioSettings).mode
    registered = instance.facts.registration
    return configured or (registered.transfer_mode if registered is not None else None) or "WRITE"


def _side(instance: Instance) -> _Side:
    settings, registered = settings_of(instance, MoriioSettings), instance.facts.registration
    address = settings.zmq_address or (registered.zmq_address if registered is not None else None)
    if address is None:
        raise NoTransferError(
            f"the ZMQ address of {instance.alias} is unknown: it hasn't registered, and "
            "`transfer.zmq_address` isn't set"
        )
    host, handshake_port, notify_port = _parse(address, instance)
    told_dp, told_tp = (registered.dp_size, registered.tp_size) if registered else (None, None)
    return _Side(
        zmq_address=address,
        host=host,
        handshake_port=handshake_port,
        notify_port=notify_port,
        dp_size=settings.dp_size or told_dp or len(instance.ranks),
        tp_size=settings.tp_size or told_tp or 1,
    )


def _parse(address: str, instance: Instance) -> tuple[str, int, int]:
    """Take `host:IP,handshake:PORT,notify:PORT` apart; an IPv6 host keeps its colons."""
    parts = dict(part.strip().partition(":")[::2] for part in address.split(","))
    try:
        return parts["host"], int(parts["handshake"]), int(parts["notify"])
    except (KeyError, ValueError) as error:
        raise NoTransferError(
            f"the ZMQ address of {instance.alias} is not `host:IP,handshake:PORT,notify:PORT`"
        ) from error


def _transfer_id(context: LegContext) -> str:
    return f"{PREFIX}-{context.attempt_id}"


def _uses_ids(context: LegContext) -> bool:
    return settings_of(context.prefill, MoriioSettings).addresses == "request_id"


def _leg_id(context: LegContext) -> str | None:
    """The client's own id, unless engines look for addresses in it."""
    if not _uses_ids(context):
        return None
    source, target = _side(context.prefill), _side(context.decode)
    return addressed_id(source.zmq_address, target.zmq_address, context.attempt_id)


def _explicit(context: LegContext, other: _Side) -> dict[str, Any]:
    return {} if _uses_ids(context) else other.addressed()


def _returned(answer: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Everything a READ prefill engine handed over. Raises NoTransferError if that is nothing."""
    params = answer.get("kv_transfer_params") if answer is not None else None
    if not isinstance(params, Mapping) or params.get("do_remote_prefill") is not True:
        raise NoTransferError("the prefill answer names no blocks to read")
    return params
