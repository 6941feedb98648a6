"""Checks that hold engines against each other: ports, block sizes, hashes, connectors, transfers.

Rules:

1. Ports are compared as the engines declare them, else as the configuration implies them: rank r
   has the port of rank 0 plus r, for events and for replay.
2. Engine hashes need to agree only where engines share blocks: kvlb's own keys don't depend on them.
3. A transfer that the decode engine carried out is fine, whatever can be dialled from here.

Cost: linear in the number of ranks, quadratic in nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_address

import msgspec

from balancer.connectors.available import encoder_conflicts, pair_conflicts
from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.settings.transfer import ChildSettings, OffloadingSettings
from indexer.core.addresses import parse_instance_id
from indexer.core.endpoints import (
    EndpointError,
    dialable,
    engine_binds,
    offset_port,
    split_endpoint,
)
from kvlb.doctor.core.facts import Declared, FleetFacts, InstanceFacts
from kvlb.doctor.core.findings import Finding, Level


def ports_clash(fleet: FleetFacts) -> Iterator[Finding]:
    """Two sockets of the engines' machines want one port; the later one fails or goes mute."""
    users: dict[tuple[str, int], tuple[InstanceFacts, str]] = {}
    named: set[tuple[str, str]] = set()
    for facts in fleet.instances:
        for host, port, use in _ports(facts):
            other, other_use = users.setdefault((host, port), (facts, use))
            pair = (other.name, facts.name)
            if (other, other_use) == (facts, use) or pair in named:
                continue
            named.add(pair)
            yield _clash(facts, other, f"port {port}: {other_use} and {use}")


def _clash(facts: InstanceFacts, other: InstanceFacts, seen: str) -> Finding:
    if other is facts:
        ranks = len(facts.declared or {}) or facts.told.ranks or 1
        change = (
            f"set the replay_endpoint's port at least {ranks} away from the endpoint's, for "
            'instance "tcp://*:5557" and "tcp://*:5657": rank r adds r to both'
        )
    else:
        seen = f"{seen}, of {other.name} and {facts.name}"
        change = "give each engine of one machine event and replay ports of its own"
    return Finding(
        name="ports_clash", level=Level.ERROR, instance=facts.name, seen=seen, change=change
    )


def _ports(facts: InstanceFacts) -> Iterator[tuple[str, int, str]]:
    told = facts.told
    host, port = split_endpoint("tcp://" + parse_instance_id(told.url).partition("://")[2])
    yield host, port, "HTTP"
    for rank, declared in _sources(facts).items():
        if engine_binds(declared.endpoint) or facts.declared is None:
            yield *_dialled(declared.endpoint, told.url), f"events of rank {rank}"
        if declared.replay is not None:
            yield *_dialled(declared.replay, told.url), f"replay of rank {rank}"


def _dialled(endpoint: str, url: str) -> tuple[str, int]:
    if not endpoint.startswith("tcp://"):
        return endpoint, 0
    return split_endpoint(dialable(endpoint, url))


def _sources(facts: InstanceFacts) -> Mapping[int, Declared]:
    """What each rank listens on, as far as anybody says."""
    told = facts.told
    if facts.declared is not None or told.events is None or told.binds:
        return facts.declared or {}
    found: dict[int, Declared] = {}
    for rank in range(told.rank_base, told.rank_base + (told.ranks or 1)):
        try:
            replay = offset_port(told.replay, rank) if told.replay else None
            found[rank] = Declared(endpoint=offset_port(told.events, rank), replay=replay)
        except EndpointError:
            break  # `ipc_with_ranks`, or refused by the settings
    return found


def block_sizes_differ(fleet: FleetFacts) -> Iterator[Finding]:
    """Engines of one model cut prompts differently: overlaps can't be compared block by block."""
    for model, several in _by_model(fleet.instances).items():
        sizes: dict[int, list[str]] = defaultdict(list)
        for facts in several:
            if facts.block_size is not None:
                sizes[facts.block_size].append(facts.name)
        if len(sizes) > 1:
            listed = "; ".join(f"{size}: {', '.join(names)}" for size, names in sizes.items())
            yield Finding(
                name="block_sizes_differ",
                level=Level.WARNING,
                instance=", ".join(facts.name for facts in several),
                seen=f"block sizes of {model}: {listed}",
                change="start all engines of a model with the same --block-size; a prefill and a "
                "decode engine can't exchange blocks of different sizes",
            )


def hash_seed_differs(fleet: FleetFacts) -> Iterator[Finding]:
    """Engines that share tiers name the same block differently, so they never find each other's."""
    for (model, _), several in _by_first_block(fleet.instances).items():
        sharing = [each for each in several if _shared_tier(each) is not None]
        hashes = {facts.streams[0].first_hash for facts in several}
        if not sharing or len(hashes) == 1:
            continue
        yield Finding(
            name="hash_seed_differs",
            level=Level.ERROR,
            instance=", ".join(facts.name for facts in several),
            seen=f"{len(hashes)} hashes for the same block of {model}, with blocks in shared tiers "
            f"({sharing[0].name}: {_shared_tier(sharing[0])})",
            change=_same_hashes(several),
        )


def _same_hashes(several: Iterable[InstanceFacts]) -> str:
    algorithms = {each.metrics.hash_algorithm for each in several} - {None}
    seed = (
        "start every engine with the same PYTHONHASHSEED in its environment: without it each "
        "process draws its own"
    )
    if len(algorithms) > 1:
        return f"start every engine with the same --prefix-caching-hash-algo; {seed}"
    if "sha256" in "".join(map(str, algorithms)):
        return f"{seed} (sha256 up to vLLM 0.28; since then releases that hash alike agree)"
    return f"{seed} (xxhash, in every release), or use --prefix-caching-hash-algo sha256"


def _shared_tier(facts: InstanceFacts) -> str | None:
    """What shows that this engine's blocks go where others could find them."""
    for stream in facts.streams:
        others = stream.tiers - {"gpu"}
        if others:
            return f"events of tier {min(others)}"
    if facts.metrics.offload is not None:
        return facts.metrics.offload
    told = facts.told
    if isinstance(told.transfer, ChildSettings):
        return _told_tier(told.transfer.children, "child `offloading`", "children.offloading.")
    return _told_tier({told.connector: told.transfer}, "`connector: offloading`", "")


def _told_tier(
    transfers: Mapping[str, msgspec.Struct | None], plainly: str, where: str
) -> str | None:
    """Of what is configured for each connector; `where` its settings are."""
    if "offloading" not in transfers:
        return None
    transfer = transfers["offloading"]
    if isinstance(transfer, OffloadingSettings) and transfer.p2p_host is not None:
        return f"`transfer.{where}p2p_host: {transfer.p2p_host}`"
    # Between prefill and decode engines without peers of their own, both use one storage.
    return plainly


def connectors_differ(fleet: FleetFacts) -> Iterator[Finding]:
    """An instance of a prefill/decode fleet that no other fits."""
    for conflict in pair_conflicts(_instances(fleet)):
        yield Finding(
            name="connectors_differ",
            level=Level.ERROR,
            instance=conflict.instance,
            seen=conflict.sentence.partition(":")[0],
            change="give both the same `connector`, and start both engines with it "
            "(--kv-transfer-config)",
        )


def encoders_differ(fleet: FleetFacts) -> Iterator[Finding]:
    """Encode instances that don't go together, or have nobody to push to."""
    for conflict in encoder_conflicts(_instances(fleet)):
        yield Finding(
            name="encoders_differ",
            level=Level.ERROR,
            instance=conflict.instance,
            seen=conflict.seen,
            change=conflict.change,
        )


def _instances(fleet: FleetFacts) -> list[Instance]:
    return [
        Instance(
            id=parse_instance_id(facts.told.url),
            alias=facts.name,
            role=facts.told.role,
            connector=facts.told.connector,
            transfer=facts.told.transfer,
            ec_zmq_addrs=facts.told.ec_zmq_addrs,
            ranks=tuple(range(facts.told.ranks or 1)),
            models=facts.models,
        )
        for facts in fleet.instances
    ]


def role_alone(fleet: FleetFacts) -> Iterator[Finding]:
    """Prefill without decode instances of the same model, or the other way round."""
    partner = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
    for model, several in _by_model(fleet.instances).items():
        roles = {facts.told.role for facts in several}
        for facts in several:
            missing = partner.get(facts.told.role)
            if missing is None or missing in roles:
                continue
            is_useless = facts.told.role is Role.PREFILL
            yield Finding(
                name="role_alone",
                level=Level.ERROR if is_useless else Level.WARNING,
                instance=facts.name,
                seen=f"role {facts.told.role.value}, and no {missing.value} instance of {model}",
                change=f"add a {missing.value} instance, or set `role: mixed`",
            )


def releases_differ(fleet: FleetFacts) -> Iterator[Finding]:
    """NIXL compares versions when two engines meet, and refuses others."""
    for model, several in _by_model(fleet.instances).items():
        pairs = [each for each in several if each.told.connector == "nixl"]
        versions = {each.version for each in pairs} - {None}
        if len(versions) > 1:
            listed = ", ".join(f"{each.name}: {_version(each)}" for each in pairs)
            yield Finding(
                name="releases_differ",
                level=Level.WARNING,
                instance=", ".join(each.name for each in pairs),
                seen=f"releases of {model}: {listed}",
                change="run prefill and decode engines of a model on one vLLM release",
            )


def no_transfer(facts: InstanceFacts) -> Iterator[Finding]:
    """A prefill leg handed nothing over."""
    transfer = facts.transfer
    if transfer is not None and transfer.problem is not None:
        connector = facts.told.connector
        yield Finding(
            name="no_transfer",
            level=Level.ERROR,
            instance=facts.name,
            seen=f"a prefill leg: {transfer.problem}",
            change=f"start the engine with the connector that `connector: {connector}` stands for "
            "(--kv-transfer-config), or correct `connector`",
        )


def nixl_unreachable(facts: InstanceFacts) -> Iterator[Finding]:
    """Decode engines are told an address at which they don't find the blocks."""
    transfer = facts.transfer
    if transfer is None or transfer.host is None or not _is_out_of_reach(facts):
        return
    yield Finding(
        name="nixl_unreachable",
        level=Level.ERROR if transfer.decode_problem or transfer.decode else Level.WARNING,
        instance=facts.name,
        seen=f"blocks are offered at {transfer.host}:{transfer.port}, "
        + (transfer.dial_problem or "which other machines can't reach"),
        change="set VLLM_NIXL_SIDE_CHANNEL_HOST of the engine to an address that decode engines "
        "reach (it is localhost if unset), and open VLLM_NIXL_SIDE_CHANNEL_PORT there (5600, plus "
        "the rank)",
    )


def transfer_failed(facts: InstanceFacts) -> Iterator[Finding]:
    """The side channel answers, and still the decode leg failed."""
    transfer = facts.transfer
    if transfer is None or transfer.decode_problem is None or _is_out_of_reach(facts):
        return
    yield Finding(
        name="transfer_failed",
        level=Level.ERROR,
        instance=facts.name,
        seen=f"the decode leg on {transfer.decode}: {transfer.decode_problem}",
        change="read the decode engine's log; both need the same release, connector, model and "
        "block size, and a network between them that the transfer can use",
    )


def _is_out_of_reach(facts: InstanceFacts) -> bool:
    transfer = facts.transfer
    if transfer is None or transfer.host is None:
        return False
    if transfer.decode is not None and transfer.decode_problem is None:
        return False
    is_elsewhere = bool(transfer.decode_host) and transfer.decode_host != facts.told.host
    return transfer.dial_problem is not None or (is_elsewhere and _is_own(transfer.host))


def _is_own(host: str) -> bool:
    """An address that means another machine on every machine."""
    if host == "localhost":
        return True
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _by_model(instances: Iterable[InstanceFacts]) -> dict[str, list[InstanceFacts]]:
    by_model: dict[str, list[InstanceFacts]] = defaultdict(list)
    for facts in instances:
        if facts.model is not None:
            by_model[facts.model].append(facts)
    return by_model


def _by_first_block(
    instances: Iterable[InstanceFacts],
) -> dict[tuple[str, int], list[InstanceFacts]]:
    """Engines that hashed the same tokens, by model and block size."""
    groups: dict[tuple[str, int], list[InstanceFacts]] = defaultdict(list)
    for model, several in _by_model(instances).items():
        for facts in several:
            first = next(iter(facts.streams), None)
            if first is not None and first.first_hash is not None and first.block_size:
                groups[model, first.block_size].append(facts)
    return groups


def _version(facts: InstanceFacts) -> str:
    return "unknown" if facts.version is None else f"{facts.version[0]}.{facts.version[1]}"
