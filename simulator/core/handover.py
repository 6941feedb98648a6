"""What `kv_transfer_params` and a request id mean to each connector, and what it does without them.

Rules, as each engine has them:

1. nixl: blocks are kept for `do_remote_decode`; with `do_remote_prefill` all four `remote_*` fields
   are needed, else the prompt is computed here. Bidirectional: the same fields beside
   `do_remote_decode` are read, and a decode engine keeps its blocks, too.
2. nixl_push: the decode side needs engine id, host, port and `tp_size` (the engine fails without).
   Both sides meet by request id without its last eight digits, after 0.33 by `transfer_id`.
3. mooncake: the decode side needs bootstrap address, engine id and transfer id, else the prompt is
   computed here, silently. The prefill side hands over only what ended by its length.
4. moriio: the other's address comes from the request id or from fields (the engine fails without);
   a missing transfer id is made of the request id. WRITE meets by transfer id, READ as nixl; a
   reading decode side takes the prompt of a request without fields for read, whatever is there.
5. p2p_nccl: both addresses come from the request id (the engine fails without); both sides meet by
   the whole id, random digits included.
6. offloading: sides meet by `kv_request_id`, whichever comes first; half an address is none. Peers may be asked for what
   they have cached.
7. example, lmcache: nothing of this; `simulator.core.storage` is looked at.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simulator.core.errors import GenerationFailedError
from simulator.core.settings import EngineSettings
from simulator.core.transfer import SideChannel, TransferDirectory
from simulator.core.types import Keep, RemotePrefill

_FIRST_RELEASE_RANDOMIZING_IDS = (0, 14, 0)
_FIRST_RELEASE_PUSHING_BY_TRANSFER = (0, 34, 0)
_LENGTH = frozenset({"length"})
_MORIIO_READ_ABORT_S = 3600.0
_MORIIO_DEFER_S = 60.0
_MORIIO_RECEIVE_ABORT_S = 120.0
_STORE_S = 60.0
_LOAD_S = 30.0
_PREFILL_ADDRESS = re.compile(r"___prefill_addr_(.+?)___decode_addr_")
_DECODE_ADDRESS = re.compile(r"___decode_addr_(.+)_[0-9a-f]{32}(?:-.*)?$")

Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """A request's part in a transfer: nothing, to keep, to read, or both."""

    keep: Keep | None = None
    remote: RemotePrefill | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The rank that reads the parameters, and whom it can find."""

    settings: EngineSettings
    channel: SideChannel
    directory: TransferDirectory
    decodes: bool = False
    """The engine is a consumer only (`kv_role`)."""


def read_handover(side: Side, request_id: str, params: Params | None) -> Handover:
    """Read one request. Raises GenerationFailedError where the engine would."""
    readers = {
        "nixl": _nixl,
        "nixl_push": _nixl_push,
        "mooncake": _mooncake,
        "moriio": _moriio,
        "p2p_nccl": _p2p_nccl,
        "offloading": _offloading,
    }
    reader = readers.get(side.settings.kv_connector or "")
    return Handover() if reader is None else reader(side, request_id, params or {})


def _nixl(side: Side, request_id: str, params: Params) -> Handover:  # noqa: ARG001 - as all
    keeps = bool(params.get("do_remote_decode"))
    if keeps and not side.settings.bidirectional:
        return Handover(keep=Keep())
    remote = read_remote_prefill(params)
    if keeps:
        return Handover(keep=Keep(), remote=remote)
    if not params or not side.settings.bidirectional:
        return Handover(remote=remote)
    keep = Keep(lease_s=side.settings.decoder_kv_blocks_ttl_s, tells="decode")
    return Handover(keep=keep, remote=remote)


def _nixl_push(side: Side, request_id: str, params: Params) -> Handover:
    key = request_id.rpartition("-")[0]
    if side.settings.release >= _FIRST_RELEASE_PUSHING_BY_TRANSFER:
        key = params.get("transfer_id") or key
    if params.get("do_remote_decode"):
        return Handover(keep=Keep(key=key, tells="push"))
    if not params.get("do_remote_prefill"):
        return Handover()
    named = ("remote_engine_id", "remote_host", "remote_port", "tp_size")
    _need(params, named)
    listener = side.directory.at(f"{params['remote_host']}:{params['remote_port']}")
    if listener is None or listener != params["remote_engine_id"]:
        raise GenerationFailedError("the handshake failed: another engine listens there, or none")
    return Handover(remote=_waiting(listener, key, None))


def _mooncake(side: Side, request_id: str, params: Params) -> Handover:  # noqa: ARG001 - as all
    transfer = params.get("transfer_id")
    if params.get("do_remote_decode"):
        if not transfer:
            return Handover()
        lease_s = side.settings.transfer_abort_s
        return Handover(keep=Keep(key=transfer, reasons=_LENGTH, lease_s=lease_s, tells=None))
    named = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")
    if not params.get("do_remote_prefill") or any(params.get(name) is None for name in named):
        return Handover()
    known = side.directory.registered(params["remote_bootstrap_addr"])
    if params["remote_engine_id"] not in known:
        raise GenerationFailedError("the bootstrap server knows no such engine")
    waits_s = side.settings.transfer_abort_s
    return Handover(remote=_waiting(params["remote_engine_id"], str(transfer), waits_s))


def _moriio(side: Side, request_id: str, params: Params) -> Handover:
    key = str(params.get("transfer_id") or f"sidecar-{request_id}")
    reads = side.settings.reads
    if params.get("do_remote_decode"):
        if not reads:
            _moriio_peer(_DECODE_ADDRESS, request_id, params)
        lease_s = _MORIIO_READ_ABORT_S if reads else _MORIIO_DEFER_S
        return Handover(
            keep=Keep(key=key, reasons=_LENGTH, lease_s=lease_s, tells="read" if reads else None)
        )
    if not params.get("do_remote_prefill"):
        return Handover(remote=_nothing()) if reads and side.decodes else Handover()
    host, port = _moriio_peer(_PREFILL_ADDRESS, request_id, params)
    engine_id = side.directory.at(f"{host}:{port + int(params.get('remote_dp_rank') or 0)}")
    if reads:
        if not params.get("remote_block_ids") or "remote_engine_id" not in params:
            return Handover()
        return Handover(remote=_ready(params["remote_engine_id"], key))
    return Handover(remote=_waiting(engine_id or "nobody", key, _MORIIO_RECEIVE_ABORT_S))


def _moriio_peer(pattern: re.Pattern[str], request_id: str, params: Params) -> tuple[str, int]:
    """The other's host and notify port."""
    found = pattern.search(request_id)
    if found is None:
        named = ("remote_host", "remote_handshake_port", "remote_notify_port")
        _need(params, named)
        return str(params["remote_host"]), int(params["remote_notify_port"])
    parts = dict(part.partition(":")[::2] for part in found[1].split(","))
    _need(parts, ("host", "handshake", "notify"))
    return parts["host"], int(parts["notify"])


def _p2p_nccl(side: Side, request_id: str, params: Params) -> Handover:  # noqa: ARG001 - as all
    source, target = _PREFILL_ADDRESS.search(request_id), _DECODE_ADDRESS.search(request_id)
    if source is None or target is None:
        raise GenerationFailedError(f"request id {request_id} does not contain hostname and port")
    settings = side.settings
    randomizes = settings.randomizes_ids and settings.release >= _FIRST_RELEASE_RANDOMIZING_IDS
    key = request_id if randomizes else request_id.rpartition("-")[0]
    if side.channel.address == source[1]:
        return Handover(keep=Keep(key=key, tells=None, copies=True))
    engine_id = side.directory.at(source[1])
    return Handover(remote=_waiting(engine_id or "nobody", key, None))


def _offloading(side: Side, request_id: str, params: Params) -> Handover:  # noqa: ARG001 - as all
    served = params.get("remote_decoder")
    keep = None
    if isinstance(served, Mapping) and served.get("kv_request_id"):
        keep = Keep(key=served["kv_request_id"], lease_s=_STORE_S, tells=None, copies=True)
    asked = params.get("remote_prefiller") or params.get("remote_kv_source")
    if not isinstance(asked, Mapping):
        return Handover(keep=keep)
    engine_id = side.directory.at(f"{asked.get('remote_host')}:{asked.get('remote_port')}")
    key = asked.get("kv_request_id")
    if engine_id is None or not key:
        return Handover(keep=keep)
    if "remote_prefiller" in params:
        return Handover(keep=keep, remote=_waiting(engine_id, key, _LOAD_S))
    return Handover(keep=keep, remote=_ready(engine_id, key, probes=True))


def _need(params: Mapping[str, Any], names: tuple[str, ...]) -> None:
    missing = [name for name in names if params.get(name) is None]
    if missing:
        raise GenerationFailedError(f"kv_transfer_params lack {', '.join(missing)}")


def _waiting(engine_id: str, key: str, waits_s: float | None) -> RemotePrefill:
    """Blocks that come when the other side is ready."""
    return RemotePrefill(
        engine_id=engine_id,
        request_id=key,
        block_ids=(),
        prefill_cached_tokens=None,
        waits_s=float("inf") if waits_s is None else waits_s,
    )


def _nothing() -> RemotePrefill:
    """What is taken for the prompt's blocks is whatever was in them."""
    return RemotePrefill(
        engine_id="nobody",
        request_id=None,
        block_ids=(),
        prefill_cached_tokens=None,
        is_shared=True,
        is_foreign=True,
    )


def _ready(engine_id: str, key: str, *, probes: bool = False) -> RemotePrefill:
    return RemotePrefill(
        engine_id=engine_id,
        request_id=key,
        block_ids=(),
        prefill_cached_tokens=None,
        probes=probes,
    )


def read_remote_prefill(params: Params | None) -> RemotePrefill | None:
    """Return where the blocks wait, or None if the parameters don't say so in full."""
    params = params or {}
    asks_back = bool(params.get("do_remote_decode") and params.get("remote_block_ids"))
    if not params.get("do_remote_prefill") and not asks_back:
        return None
    engine_id = params.get("remote_engine_id")
    named = ("remote_block_ids", "remote_host", "remote_port")
    if not isinstance(engine_id, str) or any(params.get(name) is None for name in named):
        return None
    request_id, cached, tokens = (
        params.get("remote_request_id"),
        params.get("remote_prefill_cached_tokens"),
        params.get("remote_num_tokens"),
    )
    return RemotePrefill(
        engine_id=engine_id,
        request_id=request_id if isinstance(request_id, str) else None,
        block_ids=_flatten(params["remote_block_ids"]),
        prefill_cached_tokens=cached if isinstance(cached, int) else None,
        num_tokens=tokens if asks_back and isinstance(tokens, int) else None,
    )


def _flatten(block_ids: object) -> tuple[int, ...]:
    """Releases differ: a flat list, or one list per group of which we have one."""
    if not isinstance(block_ids, list):
        return ()
    if block_ids and isinstance(block_ids[0], list):
        return tuple(block_ids[0])
    return tuple(block_ids)
