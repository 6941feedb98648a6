"""What simulated engines make of transfer fields, connector by connector, and of missing ones."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.core.blocks import BlockPool
from simulator.core.errors import GenerationFailedError
from simulator.core.handover import Handover, Side, read_handover
from simulator.core.kv_cache import KvCache
from simulator.core.settings import ConnectorName, EngineSettings
from simulator.core.transfer import SideChannel, TransferDirectory

ID = "cmpl-abc-0-01234567"
PEER = "10.0.0.1:5600"
BOOTSTRAP = "http://10.0.0.1:8998"
PULL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "p",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_request_id": "r",
    "remote_num_tokens": 32,
}
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}


def side(connector: ConnectorName | None, *, decodes: bool = True, **changes: Any) -> Side:
    """A decode rank that can find one prefill engine."""
    directory = TransferDirectory()
    cache = KvCache(BlockPool(4), block_size=4, none_hash=b"")
    directory.listen(SideChannel(engine_id="p", host="10.0.0.1", port=5600), cache)
    directory.register(BOOTSTRAP, "p")
    settings = EngineSettings(kv_connector=connector)
    return Side(
        settings=msgspec.structs.replace(settings, **changes),
        channel=SideChannel(engine_id="d", host="10.0.0.2", port=5600),
        directory=directory,
        decodes=decodes,
    )


def read(
    connector: ConnectorName | None, params: Any, request_id: str = ID, **changes: Any
) -> Handover:
    return read_handover(side(connector, **changes), request_id, params)


@pytest.mark.parametrize("connector", [None, "example", "lmcache"])
def test_without_a_protocol_fields_are_ignored(connector: ConnectorName | None) -> None:
    """Blocks are found elsewhere, or nowhere."""
    assert read(connector, PULL) == Handover()


# nixl


def test_nixl_reads_what_all_fields_name() -> None:
    """The whole prompt, at once."""
    remote = read("nixl", PULL).remote

    assert remote is not None
    assert (remote.engine_id, remote.request_id, remote.block_ids) == ("p", "r", (1, 2))
    assert (remote.num_tokens, remote.waits_s) == (None, None)


@pytest.mark.parametrize("missing", ["remote_engine_id", "remote_block_ids", "remote_host"])
def test_nixl_computes_itself_with_a_field_missing(missing: str) -> None:
    """Nothing is said of it."""
    assert read("nixl", {**PULL, missing: None}) == Handover()


@pytest.mark.parametrize(
    ("told", "expected"), [([1, 2], (1, 2)), ([[1, 2]], (1, 2)), ([], ()), ("odd", ())]
)
def test_nixl_takes_block_ids_of_every_release(told: Any, expected: tuple[int, ...]) -> None:
    """A flat list, or one per group."""
    remote = read("nixl", {**PULL, "remote_block_ids": told}).remote

    assert remote is not None
    assert remote.block_ids == expected


def test_nixl_keeps_blocks_if_asked() -> None:
    """A block of its own request."""
    keep = read("nixl", KEEP).keep

    assert keep is not None
    assert (keep.key, keep.tells) == (None, "pull")


def test_nixl_both_ways_reads_for_a_prefill_and_keeps_for_the_next() -> None:
    """As many tokens as the decode engine said."""
    prefill = read("nixl", {**PULL, **KEEP}, bidirectional=True)
    decode = read("nixl", PULL, bidirectional=True)

    assert prefill.remote is not None
    assert prefill.remote.num_tokens == 32
    assert decode.keep is not None
    assert decode.keep.tells == "decode"
    assert read("nixl", {}, bidirectional=True) == Handover()
    assert read("nixl", {**PULL, **KEEP}).remote is None


# nixl_push

PUSH = {k: v for k, v in PULL.items() if k != "remote_block_ids"} | {"tp_size": 1}


def test_push_meets_by_request_id_without_its_random_end() -> None:
    """Both sides come to the same name."""
    keep, remote = read("nixl_push", KEEP).keep, read("nixl_push", PUSH).remote

    assert keep is not None
    assert remote is not None
    assert keep.key == remote.request_id == "cmpl-abc-0"
    assert remote.waits_s == float("inf")
    assert read("nixl_push", {}) == Handover()


def test_push_after_0_33_meets_by_its_transfer() -> None:
    """Whatever the two ids are; without one they decide as before."""
    named = {"transfer_id": "xfer-1"}
    keep = read("nixl_push", KEEP | named, "cmpl-abc-0-89abcdef", version="0.34.0").keep
    remote = read("nixl_push", PUSH | named, "cmpl-def-0-01234567", version="0.34.0").remote
    unnamed = read("nixl_push", KEEP, version="0.34.0").keep
    earlier = read("nixl_push", KEEP | named).keep

    assert keep is not None
    assert remote is not None
    assert keep.key == remote.request_id == "xfer-1"
    assert unnamed is not None
    assert earlier is not None
    assert unnamed.key == earlier.key == "cmpl-abc-0"


@pytest.mark.parametrize("missing", ["remote_engine_id", "remote_host", "remote_port", "tp_size"])
def test_push_fails_with_a_field_missing(missing: str) -> None:
    """The engine reads it without asking."""
    with pytest.raises(GenerationFailedError, match=missing):
        read("nixl_push", {**PUSH, missing: None})


@pytest.mark.parametrize("wrong", [{"remote_port": 5601}, {"remote_engine_id": "another"}])
def test_push_fails_where_another_engine_listens(wrong: dict[str, Any]) -> None:
    """One global coordinate for several prefill engines is wrong for all but one."""
    with pytest.raises(GenerationFailedError, match="handshake"):
        read("nixl_push", PUSH | wrong)


# mooncake

COMES = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_bootstrap_addr": BOOTSTRAP,
    "transfer_id": "xfer-1",
}


def test_mooncake_meets_by_transfer_id() -> None:
    """And keeps only what ended by its length."""
    keep = read("mooncake", {**KEEP, "transfer_id": "xfer-1"}).keep
    remote = read("mooncake", COMES).remote

    assert keep is not None
    assert remote is not None
    assert keep.key == remote.request_id == "xfer-1"
    assert (keep.reasons, keep.tells) == (frozenset({"length"}), None)
    assert remote.waits_s == 480


@pytest.mark.parametrize("missing", ["remote_engine_id", "remote_bootstrap_addr", "transfer_id"])
def test_mooncake_computes_itself_with_a_field_missing(missing: str) -> None:
    """Silently; and keeps nothing without a name for it."""
    assert read("mooncake", {**COMES, missing: None}) == Handover()
    assert read("mooncake", KEEP) == Handover()
    assert read("mooncake", {}) == Handover()


@pytest.mark.parametrize(
    "wrong", [{"remote_engine_id": "yesterday's"}, {"remote_bootstrap_addr": "http://x:1"}]
)
def test_mooncake_fails_for_an_engine_that_nobody_knows(wrong: dict[str, Any]) -> None:
    """As after a restart whose new id wasn't asked for."""
    with pytest.raises(GenerationFailedError, match="bootstrap"):
        read("mooncake", COMES | wrong)


def test_engines_that_left_are_nowhere() -> None:
    """Neither at an address nor in a bootstrap server."""
    known = side("mooncake").directory
    known.leave("p")
    known.leave("nobody")

    assert (known.at(PEER), known.registered(BOOTSTRAP), known.cache_of("p")) == (None, [], None)


# moriio

ADDRESSED = {"remote_host": "10.0.0.1", "remote_handshake_port": 6301, "remote_notify_port": 5600}
IN_ID = (
    "___prefill_addr_host:10.0.0.1,handshake:6301,notify:5600"
    f"___decode_addr_host:10.0.0.2,handshake:6301,notify:5600_{'0' * 32}"
)


@pytest.mark.parametrize(
    ("params", "request_id"),
    [
        pytest.param(ADDRESSED, ID, id="fields"),
        pytest.param({}, f"cmpl-{IN_ID}-0-01234567", id="id"),
    ],
)
def test_moriio_finds_the_other_side(params: dict[str, Any], request_id: str) -> None:
    """By fields or by the request id, on both legs; they meet by the transfer's name."""
    named = {**params, "transfer_id": "tx-1"}
    keep = read("moriio", {**KEEP, **named}, request_id).keep
    remote = read("moriio", {"do_remote_prefill": True, **named}, request_id).remote

    assert keep is not None
    assert remote is not None
    assert keep.key == remote.request_id == "tx-1"
    assert remote.engine_id == "p"


@pytest.mark.parametrize("params", [KEEP, {"do_remote_prefill": True}])
def test_moriio_fails_without_an_address(params: dict[str, Any]) -> None:
    """There is no safe default."""
    with pytest.raises(GenerationFailedError, match="remote_host"):
        read("moriio", params)


def test_moriio_waits_for_a_rank_that_isnt_there() -> None:
    """The notification goes to nobody."""
    remote = read("moriio", {"do_remote_prefill": True, **ADDRESSED, "remote_dp_rank": 3}).remote

    assert remote is not None
    assert (remote.engine_id, remote.request_id) == ("nobody", f"sidecar-{ID}")


def test_moriio_reading_takes_the_prefill_answer() -> None:
    """The prefill side needs no address; without block ids the prompt is computed."""
    keep = read("moriio", {**KEEP, "transfer_id": "tx-1"}, reads=True).keep
    told = {"do_remote_prefill": True, **ADDRESSED, "transfer_id": "tx-1", "remote_engine_id": "p"}
    remote = read("moriio", {**told, "remote_block_ids": [[1]]}, reads=True).remote

    assert keep is not None
    assert keep.tells == "read"
    assert remote is not None
    assert (remote.engine_id, remote.request_id, remote.waits_s) == ("p", "tx-1", None)
    assert read("moriio", told, reads=True) == Handover()


def test_moriio_reading_takes_nothing_for_something() -> None:
    """A decode engine without fields believes that its prompt has been read."""
    remote = read("moriio", {}, reads=True).remote

    assert remote is not None
    assert remote.is_foreign
    assert read("moriio", {}, reads=True, decodes=False) == Handover()
    assert read("moriio", {}) == Handover()


# p2p_nccl

P2P = f"___prefill_addr_10.0.0.1:5600___decode_addr_10.0.0.2:5600_{'0' * 32}"


@pytest.mark.parametrize(
    ("changes", "meets"),
    [
        pytest.param({"version": "0.13.0"}, True, id="before-0.14"),
        pytest.param({"version": "0.23.0"}, False, id="random-ends"),
        pytest.param({"version": "0.23.0", "randomizes_ids": False}, True, id="switched-off"),
    ],
)
def test_p2p_nccl_meets_only_without_random_ends(changes: dict[str, Any], meets: bool) -> None:
    """With them, decode waits for ever."""
    remote = read("p2p_nccl", None, f"cmpl-{P2P}-0-01234567", **changes).remote
    source = seen_from_prefill(side("p2p_nccl", **changes))
    keep = read_handover(source, f"cmpl-{P2P}-0-89abcdef", None).keep

    assert remote is not None
    assert keep is not None
    assert remote.engine_id == "p"
    assert (remote.request_id == keep.key) is meets


def seen_from_prefill(found: Side) -> Side:
    """The same surroundings, seen from the prefill engine."""
    return Side(
        settings=found.settings,
        channel=SideChannel(engine_id="p", host="10.0.0.1", port=5600),
        directory=found.directory,
    )


def test_p2p_nccl_fails_for_a_plain_id() -> None:
    """Every request has to name both engines."""
    with pytest.raises(GenerationFailedError, match="hostname and port"):
        read("p2p_nccl", {})


def test_p2p_nccl_waits_for_an_engine_that_isnt_there() -> None:
    """Nobody tells it."""
    remote = read("p2p_nccl", {}, f"cmpl-{P2P.replace('.1:5600', '.9:1')}-0-01234567").remote

    assert remote is not None
    assert remote.engine_id == "nobody"


# offloading

ASKED = {"kv_request_id": "k", "remote_host": "10.0.0.1", "remote_port": 5600}


def test_offloading_peers_meet_by_name() -> None:
    """What is served is copied out of the cache."""
    keep = read("offloading", {"remote_decoder": {"kv_request_id": "k"}}).keep
    remote = read("offloading", {"remote_prefiller": ASKED}).remote

    assert keep is not None
    assert (keep.key, keep.copies) == ("k", True)
    assert remote is not None
    assert (remote.engine_id, remote.request_id, remote.probes) == ("p", "k", False)


def test_offloading_probes_a_peer() -> None:
    """It has what it has."""
    remote = read("offloading", {"remote_kv_source": ASKED}).remote

    assert remote is not None
    assert (remote.engine_id, remote.probes) == ("p", True)


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"remote_decoder": {}}, id="no-name-to-serve"),
        pytest.param({"remote_prefiller": {**ASKED, "remote_port": 1}}, id="nobody-there"),
        pytest.param({"remote_kv_source": {**ASKED, "kv_request_id": None}}, id="no-name"),
    ],
)
def test_offloading_computes_what_isnt_said_in_full(params: dict[str, Any]) -> None:
    """Half an address is none."""
    assert read("offloading", params) == Handover()


values = st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=3) | st.just([[1]])
names = st.sampled_from(
    [*PULL, "transfer_id", "tp_size", "remote_bootstrap_addr", "remote_dp_rank"]
)


@given(
    connector=st.sampled_from(["nixl", "nixl_push", "mooncake", "offloading"]),
    params=st.dictionaries(names, values),
)
def test_any_fields_are_understood_or_fail_the_request(
    connector: ConnectorName, params: dict[str, Any]
) -> None:
    """No value of a client's ends the simulator itself."""
    try:
        handover = read(connector, params)
    except GenerationFailedError:
        return

    assert handover.remote is None or handover.remote.engine_id
