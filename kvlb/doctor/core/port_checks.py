"""Checks of ports: those that engines listen on, and those of ours that they connect to.

Rules:

1. Ports are compared as the engines declare them, else as the configuration implies them: rank r
   has the port of rank 0 plus r, for events and for replay.
2. Where engines connect to us a port may be shared, as long as each has a topic of its own there.

Cost: linear in the number of ranks.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from indexer.core.addresses import parse_instance_id, without_loopback_names
from indexer.core.endpoints import (
    EndpointError,
    bindable,
    dialable,
    engine_binds,
    offset_port,
    split_endpoint,
)
from indexer.core.types import InstanceId
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
    yield *_socket("tcp://" + parse_instance_id(told.url).partition("://")[2]), "HTTP"
    for rank, declared in _sources(facts).items():
        if engine_binds(declared.endpoint) or facts.declared is None:
            yield *_dialled(declared.endpoint, told.url), f"events of rank {rank}"
        if declared.replay is not None:
            yield *_dialled(declared.replay, told.url), f"replay of rank {rank}"


def _dialled(endpoint: str, url: str) -> tuple[str, int]:
    if not endpoint.startswith("tcp://"):
        return endpoint, 0
    return _socket(dialable(endpoint, url))


def _socket(endpoint: str) -> tuple[str, int]:
    """Host and port; names of this machine's own interface are one."""
    host, port = split_endpoint(endpoint)
    return without_loopback_names(InstanceId(f"http://{host}:{port}")), port


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


def topic_shared(fleet: FleetFacts) -> Iterator[Finding]:
    """Engines that connect to one port of ours under one topic: whose events came nobody can tell."""
    by_port: dict[str, list[tuple[InstanceFacts, str | None]]] = defaultdict(list)
    for facts in fleet.instances:
        for declared in _connecting(facts):
            topic = facts.told.topic or declared.topic
            by_port[bindable(declared.endpoint)].append((facts, topic))
    for endpoint, several in by_port.items():
        topics = [topic for _, topic in several]
        sharing = [
            facts
            for facts, topic in several
            if len(several) > 1 and (None in topics or topics.count(topic) > 1)
        ]
        if sharing:
            yield _shared(endpoint, sharing)


def _connecting(facts: InstanceFacts) -> list[Declared]:
    """Ranks that connect to us, as far as nothing else is configured."""
    declared = facts.declared if facts.told.events is None else None
    return [each for each in (declared or {}).values() if not engine_binds(each.endpoint)]


def _shared(endpoint: str, sharing: list[InstanceFacts]) -> Finding:
    return Finding(
        name="topic_shared",
        level=Level.ERROR,
        instance=", ".join(dict.fromkeys(facts.name for facts in sharing)),
        seen=f"{len(sharing)} streams with the same topic connect to {endpoint}: none is believed",
        change="give each engine that connects to one port a `topic` of its own in "
        "--kv-events-config, or a port of its own",
    )
