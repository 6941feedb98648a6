"""What is known of an instance's side of a KV transfer beyond what its operator wrote down.

Rules:

1. Facts belong to one life of an engine process: engine ids and addresses are new after a restart,
   so whoever notices one drops them and asks again. A connector without the facts it needs fails
   the leg (`NoTransferError`), it never sends yesterday's.
2. Values only: learned by the fleet keeper's probe (an `Inquiry` that the connector declares) or
   sent by the engine itself to the registration service (`registration`), read by
   `balancer.connectors`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

TransferMode = Literal["READ", "WRITE"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What an engine's connector announces of itself every few seconds (MoRIIO, P2P-NCCL)."""

    http_address: str
    """Host and port of its HTTP server, as it knows itself."""
    zmq_address: str
    """MoRIIO: `host:IP,handshake:PORT,notify:PORT`; P2P-NCCL: `ip:port`. Opaque here: ids carry it
    as it is."""
    dp_size: int = 1
    """Data-parallel ranks; P2P-NCCL doesn't say."""
    tp_size: int = 1
    """Tensor-parallel ranks of each; P2P-NCCL doesn't say."""
    transfer_mode: TransferMode | None = None
    """MoRIIO: who moves the blocks. None: not said (P2P-NCCL)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFacts:
    """Everything learned of one instance in its present life."""

    engine_ids: Mapping[int, str] = field(default_factory=dict)
    """Id of the KV engine behind each rank, by its global number."""
    kv_host: str | None = None
    """Host of its side channel, as the engine itself tells it to peers."""
    kv_port: int | None = None
    """Port of its first rank's side channel."""
    tp_size: int | None = None
    pp_size: int | None = None
    registration: Registration | None = None


NO_FACTS = TransferFacts()
"""Of an instance that hasn't been asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """A question that has to be answered before an instance can take its part in transfers."""

    url: str
    """To be fetched with GET, without the instance's key: it may be another port."""
    read: Callable[[object], TransferFacts]
    """Turns the JSON of a 200 into facts. Raises ValueError if it isn't what was asked for."""
