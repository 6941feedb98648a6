"""Checks that hold engines against each other: block sizes, hashes, connectors, transfers.

Rules:

1. Engine hashes need to agree only where engines share blocks: kvlb's own keys don't depend on them.
   Each rank is a process, and draws a seed of its own where none is given.
2. A transfer that the decode engine carried out is fine, whatever can be dialled from here.

Cost: linear in the number of ranks, quadratic in nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address

import msgspec

from balancer.connectors.available import encoder_conflicts, pair_conflicts
from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.settings.transfer import ChildSettings, OffloadingSettings
from indexer.core.addresses import parse_instance_id
from kvlb.doctor.core.facts import FleetFacts, InstanceFacts
from kvlb.doctor.core.findings import Finding, Level


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
    """Ranks that share tiers name the same block differently, so they never find each other's."""
    sharing = [each for each in fleet.instances if _shared_tier(each) is not None]
    for (model, _), hashed in _by_first_block(sharing).items():
        several = list({facts.name: facts for facts, _ in hashed}.values())
        hashes = {value for _, value in hashed}
        if len(hashes) == 1:
            continue
        yield Finding(
            name="hash_seed_differs",
            level=Level.ERROR,
            instance=", ".join(facts.name for facts in several),
            seen=f"{len(hashes)} hashes for the same block of {model}, with blocks in shared tiers "
            f"({several[0].name}: {_shared_tier(several[0])})",
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
) -> Mapping[tuple[str, int], Sequence[tuple[InstanceFacts, int]]]:
    """What each rank called the block of the same tokens, by model and block size."""
    groups: dict[tuple[str, int], list[tuple[InstanceFacts, int]]] = defaultdict(list)
    for model, several in _by_model(instances).items():
        for facts in several:
            for stream in facts.streams:
                if stream.first_hash is not None and stream.block_size:
                    groups[model, stream.block_size].append((facts, stream.first_hash))
    return groups


def _version(facts: InstanceFacts) -> str:
    return "unknown" if facts.version is None else f"{facts.version[0]}.{facts.version[1]}"
