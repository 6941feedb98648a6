"""NixlPushConnector (0.24 and later): both legs at once, the prefill engine writes into decode's blocks.

The decode engine is told where the prefill engine listens, registers its own blocks there and
waits. The prefill engine compares request ids (without the eight digits that an engine appends) to
find whose blocks are whose: same id, same path. The id is made for the attempt, so that neither a
second attempt nor another client's equal id can meet this one's blocks. Engines after 0.33 go by the
`transfer_id` of both legs instead; earlier ones don't look at it, so it is always sent.

The decode engine waits for minutes if the prefill engine fails; the caller cancels it.
Ids of ranks: with data parallelism an engine appends `_dp<rank>` to its id (read in 0.32).
"""

from collections.abc import Mapping
from typing import Any

from balancer.connectors.contract import (
    REQUEST_ID,
    Connector,
    LegContext,
    LegRequest,
    NoTransferError,
    Style,
    host_of,
    settings_of,
    with_params,
)
from balancer.connectors.nixl import KEYS, PREFILL_PARAMS
from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.fleet.transfer_facts import Inquiry, TransferFacts
from balancer.core.http.prefill_rewrite import prefill_body
from balancer.core.settings.transfer import NixlPushSettings

USUAL_PORT = 5600
SERVER_INFO = "/server_info?config_format=json"


class NixlPushConnector(Connector):
    """Concurrent: the prefill engine's address is known before it has answered."""

    name = "nixl_push"

    def style(self, context: LegContext) -> Style:  # noqa: ARG002 - the contract's signature
        """Neither leg waits for the other."""
        return "concurrent"

    def prefill_leg(self, context: LegContext) -> LegRequest:
        """One token, and keep the blocks until they are written to the other side."""
        params = {**PREFILL_PARAMS, "transfer_id": _transfer_id(context)}
        return LegRequest(
            body=with_params(prefill_body(context.body), params), request_id=_leg_id(context)
        )

    def decode_leg(
        self,
        context: LegContext,
        prefill_answer: Mapping[str, Any] | None,  # noqa: ARG002 - the contract's signature
    ) -> LegRequest:
        """Where the prefill engine listens; no blocks, they are the decode engine's own."""
        source, rank = context.prefill, context.prefill_rank
        settings, facts = settings_of(source, NixlPushSettings), source.facts
        leg_id = _leg_id(context)
        port = settings.side_channel_port or facts.kv_port or USUAL_PORT
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": _engine_id(source, rank, settings),
            "remote_host": settings.kv_host or facts.kv_host or host_of(source),
            "remote_port": port + rank,
            "tp_size": settings.tp_size or facts.tp_size or 1,
            "pp_size": settings.pp_size or facts.pp_size or 1,
            "remote_request_id": leg_id,
            "transfer_id": _transfer_id(context),
        }
        return LegRequest(body=with_params(context.body, params), request_id=leg_id)

    def inquiry(self, instance: Instance) -> Inquiry | None:
        """Its engine id, of an instance that prefills and wasn't given one."""
        settings = settings_of(instance, NixlPushSettings)
        if instance.role is not Role.PREFILL or settings.engine_id is not None:
            return None
        return Inquiry(url=f"{instance.id}{SERVER_INFO}", read=read_server_info)

    def params(self) -> frozenset[str]:
        """Those of the pull side, and the ids."""
        return KEYS | {REQUEST_ID, "transfer_id"}


def _leg_id(context: LegContext) -> str:
    return f"{context.request_id}-{context.attempt_id}"


def _transfer_id(context: LegContext) -> str:
    return f"xfer-{context.attempt_id}"


def _engine_id(source: Instance, rank: int, settings: NixlPushSettings) -> str:
    base = settings.engine_id or source.facts.engine_ids.get(source.rank_base)
    if base is None:
        raise NoTransferError(
            f"the engine id of {source.alias} is unknown: set `transfer.engine_id`"
        )
    is_one_of_several = len(source.ranks) > 1 or source.rank_base > 0
    return f"{base}_dp{rank}" if is_one_of_several else base


def read_server_info(told: object) -> TransferFacts:
    """Read what an engine in development mode tells of itself. Raises ValueError."""
    config = _mapping(told, "vllm_config")
    transfer, parallel = _mapping(config, "kv_transfer_config"), _mapping(config, "parallel_config")
    environment = _mapping(told, "vllm_env")
    engine_id = transfer.get("engine_id")
    if not isinstance(engine_id, str):
        raise ValueError("kv_transfer_config.engine_id is missing")  # noqa: TRY004 - one word for all
    host = environment.get("VLLM_NIXL_SIDE_CHANNEL_HOST")
    return TransferFacts(
        engine_ids={_count(parallel, "data_parallel_rank") or 0: engine_id},
        # Its default is no address for others.
        kv_host=host if isinstance(host, str) and host != "localhost" else None,
        kv_port=_count(environment, "VLLM_NIXL_SIDE_CHANNEL_PORT"),
        tp_size=_count(parallel, "tensor_parallel_size"),
        pp_size=_count(parallel, "pipeline_parallel_size"),
    )


def _mapping(told: object, key: str) -> Mapping[str, Any]:
    found = told.get(key) if isinstance(told, Mapping) else None
    if not isinstance(found, Mapping):
        raise ValueError(f"{key} is missing")  # noqa: TRY004 - one word for all
    return found


def _count(told: Mapping[str, Any], key: str) -> int | None:
    value = told.get(key)
    return value if isinstance(value, int) else None
