"""The encoder connectors: how what an encode instance has encoded reaches the engine that computes the prompt.

Rules:

1. Pure, like KV connectors. One item, one leg: the item alone, no text, one token, not a stream.
2. The media stay in the client's body on every leg: the engine that doesn't find an item can encode it,
   and both engines name an item by the hash of the same content (or the client's `uuid`).
3. What is handed over goes into `ec_transfer_params` of the legs that carry the prompt. Clients can't set
   that field.

| name | vLLM's | to encode | from encode | to the consumer |
| --- | --- | --- | --- | --- |
| `ec_example` | `ECExampleConnector` | | | nothing: a directory both mount |
| `ec_cpu` | `ECCPUConnector` with `ec_enable_nixl` | | by hash: `peer_host`, `peer_port`, `size_bytes` | the same, unread |
| `ec_mooncake` | `ECMooncakeConnector` | `consumer_zmq`, `ec_items` | the hash | `ec_items` |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from balancer.connectors.contract import NoTransferError
from balancer.core.fleet.snapshot import Instance
from balancer.core.prompt.media_items import PROCESSING_FIELDS

PARAMS: Final = "ec_transfer_params"
PASSED_FIELDS = ("model", *PROCESSING_FIELDS, "priority", "session_id", "cache_salt")
"""Of the client's body: what decides how an item is encoded, and when."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeContext:
    """One item of one request on its way to an encode instance."""

    body: Mapping[str, Any]
    """The client's. Not to be mutated."""
    part: Mapping[str, Any]
    consumer: Instance | None = None
    """Who computes the prompt: the prefill instance of a pair, else the one that answers. None: not
    chosen yet, as long as the connector doesn't push."""
    consumer_rank: int = 0
    transfer_id: str
    """32 hexadecimal digits that no other item has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """What is known of an item that an encode instance has."""

    connector: str
    handle: Mapping[str, Any]
    """In the connector's own words; empty: there is nothing to tell the consumer."""


class EncoderConnector(Protocol):
    """Every one inherits from it and passes tests/conformance/test_encoder_connectors.py."""

    name: str
    reuses: bool = True
    """What was encoded once serves later requests, and other consumers."""
    allows_local: bool = True
    """A consumer that gets nothing encodes the item itself, instead of waiting for it."""

    def encode_body(self, context: EncodeContext) -> Mapping[str, Any]:
        """The encode leg's body. Raises NoTransferError if something is unknown that it needs."""
        return _item_alone(context)

    def read(self, context: EncodeContext, answer: Mapping[str, Any]) -> Encoding:  # noqa: ARG002
        """What the leg's 200 tells; one that tells of an error never gets here."""
        return Encoding(connector=self.name, handle={})

    def consumer_params(self, handles: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:  # noqa: ARG002
        """`ec_transfer_params` for the items of a prompt, in their order."""
        return {}


class EcExampleConnector(EncoderConnector):
    """Files named by the item's hash in a directory that both mount. Nobody deletes them."""

    name = "ec_example"


class EcCpuConnector(EncoderConnector):
    """The consumer reads out of the encode engine's memory, where the answer says it is.

    What has been dropped there is refused to the consumer, which then encodes the item itself.
    """

    name = "ec_cpu"

    def read(self, context: EncodeContext, answer: Mapping[str, Any]) -> Encoding:  # noqa: ARG002
        """An item that could not be kept comes without an address, and isn't announced."""
        told = _params(answer)
        kept = {name: value for name, value in told.items() if _has_address(value)}
        return Encoding(connector=self.name, handle=kept)

    def consumer_params(self, handles: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """All that was told, by hash."""
        return {name: value for handle in handles for name, value in handle.items()}


class EcMooncakeConnector(EncoderConnector):
    """The encode engine pushes to one rank of the consumer, under a name that is used once.

    The consumer waits for its push (`push_wait_timeout_s`, 60 s) and then fails the request with 500: there
    is no encoding it itself.
    """

    name = "ec_mooncake"
    reuses = False
    allows_local = False

    def encode_body(self, context: EncodeContext) -> Mapping[str, Any]:
        """The item, its transfer's name, and where the consumer's rank listens."""
        params = {
            "consumer_zmq": _push_address(context),
            "ec_items": [{"transfer_id": context.transfer_id}],
        }
        return {**_item_alone(context), PARAMS: params}

    def read(self, context: EncodeContext, answer: Mapping[str, Any]) -> Encoding:
        """The name and, if it is told, the hash: in a list of items, or by hash, as releases differ."""
        told = _params(answer)
        items = told.get("ec_items")
        if isinstance(items, list) and items and isinstance(items[0], Mapping):
            mm_hash = items[0].get("mm_hash")
        else:
            names = [name for name in told if name != "ec_items"]
            mm_hash = names[0] if len(names) == 1 else None
        handle = {"transfer_id": context.transfer_id}
        return Encoding(
            connector=self.name,
            handle={"mm_hash": mm_hash, **handle} if isinstance(mm_hash, str) else handle,
        )

    def consumer_params(self, handles: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """One entry per item, in order: without a hash the position counts."""
        return {"ec_items": [dict(handle) for handle in handles]} if handles else {}


def encoder_connectors() -> dict[str, EncoderConnector]:
    """Every one by the name used in the configuration."""
    every = (EcExampleConnector(), EcCpuConnector(), EcMooncakeConnector())
    return {each.name: each for each in every}


def _item_alone(context: EncodeContext) -> Mapping[str, Any]:
    body = {name: context.body[name] for name in PASSED_FIELDS if name in context.body}
    messages = [{"role": "user", "content": [context.part]}]
    return {**body, "messages": messages, "max_tokens": 1, "stream": False}


def _params(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    told = answer.get(PARAMS)
    return told if isinstance(told, Mapping) else {}


def _has_address(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("peer_host") is not None


def _push_address(context: EncodeContext) -> str:
    consumer = context.consumer
    assert consumer is not None  # noqa: S101 - chosen before, where something is pushed
    number = context.consumer_rank - consumer.rank_base
    if not 0 <= number < len(consumer.ec_zmq_addrs):
        raise NoTransferError(
            f"{consumer.alias} has no address for rank {context.consumer_rank}: set its `ec_zmq_addrs`"
        )
    return consumer.ec_zmq_addrs[number]
