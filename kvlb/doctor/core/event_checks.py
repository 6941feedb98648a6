"""Checks of where an engine's events come from, and of what came.

Rules:

1. One fault, one finding: an engine that publishes nothing for a reason found elsewhere isn't
   called silent, too.
2. Where vLLM binds and where it connects is told by `indexer.core.endpoints`, as in the indexer.
"""

from collections.abc import Iterator, Sequence

from indexer.core.endpoints import engine_binds, is_every_interface, split_endpoint
from kvlb.doctor.core.facts import InstanceFacts, Stream
from kvlb.doctor.core.findings import Finding, Level

EVENTS_CONFIG = (
    '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", '
    '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}\''
)
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})


def events_off(facts: InstanceFacts) -> Iterator[Finding]:
    """The engine says itself that no rank publishes."""
    if facts.declared is not None and not facts.declared:
        yield _finding(
            facts,
            "events_off",
            "/kv_event_sources lists no rank",
            f"start the engine with {EVENTS_CONFIG}",
        )


def events_unknown(facts: InstanceFacts) -> Iterator[Finding]:
    """Before 0.31 nobody tells where events are."""
    is_asked = facts.fault is None and facts.declared is None
    if is_asked and not facts.streams and facts.told.events is None:
        yield _finding(
            facts,
            "events_unknown",
            "it has no /kv_event_sources (vLLM before 0.31), and `events` is not set",
            f"start the engine with {EVENTS_CONFIG} and set `events: tcp://{facts.told.host}:5557` "
            f"and `replay: tcp://{facts.told.host}:5657` of the instance",
        )


def no_replay(facts: InstanceFacts) -> Iterator[Finding]:
    """A lost batch stays lost, and what was stored before we came is never known."""
    ranks = [each.rank for each in facts.streams if each.answers_replay is None]
    if ranks:
        yield _finding(
            facts,
            "no_replay",
            f"no replay endpoint ({_ranks(ranks)})",
            'add "replay_endpoint": "tcp://*:5657" to --kv-events-config, and `replay` to the '
            "instance if its `events` is set",
            level=Level.WARNING,
        )


def replay_silent(facts: InstanceFacts) -> Iterator[Finding]:
    """There should be a replay socket, and nobody answers there."""
    ranks = [each.rank for each in facts.streams if each.answers_replay is False]
    if ranks:
        yield _finding(
            facts,
            "replay_silent",
            f"no answer from the replay socket ({_ranks(ranks)})",
            "open its port between engine and kvlb; if ports are mapped, set `replay` of the "
            "instance to the mapped one",
            level=Level.WARNING,
        )


def publisher_connects(facts: InstanceFacts) -> Iterator[Finding]:
    """An endpoint without `*` or `::` makes vLLM's PUB socket connect, here to itself."""
    declared = facts.declared or {}
    for rank, source in declared.items():
        if engine_binds(source.endpoint):
            continue
        host, port = split_endpoint(source.endpoint)
        if is_every_interface(host) or host in _LOOPBACK or host == facts.told.host:
            yield _finding(
                facts,
                "publisher_connects",
                f"rank {rank} has endpoint {source.endpoint}: vLLM connects to it instead of "
                "listening",
                f'write "endpoint": "tcp://*:{port - rank}" in --kv-events-config',
            )
            return


def events_unconnected(facts: InstanceFacts) -> Iterator[Finding]:
    """Nobody listens where events should come from."""
    if any(publisher_connects(facts)):
        return
    for each in facts.streams:
        if not each.is_connected and not each.binds and each.problem is None:
            yield _finding(
                facts,
                "events_unconnected",
                f"no connection to {each.endpoint} (rank {each.rank})",
                "open the port between engine and kvlb; if ports are mapped, set `events` of the "
                "instance to the mapped one",
            )
            return


def events_unseen(facts: InstanceFacts) -> Iterator[Finding]:
    """We could not listen ourselves, so nothing is said of what comes."""
    for each in facts.streams:
        if each.problem is not None:
            yield _finding(
                facts,
                "events_unseen",
                each.problem,
                "if a kvlb listens there, its /status shows the streams; else stop what does",
                level=Level.INFO,
            )
            return


def events_silent(facts: InstanceFacts) -> Iterator[Finding]:
    """Requests were computed and no event came."""
    if facts.metrics.has_prefix_caching is False or any(publisher_connects(facts)):
        return
    ranks = [each.rank for each in facts.streams if _is_silent(each)]
    if ranks:
        yield _finding(
            facts,
            "events_silent",
            f"requests were answered, no event came ({_ranks(ranks)})",
            f"start the engine with {EVENTS_CONFIG} and prefix caching on; up to 0.11.0 "
            '"publisher": "zmq" must be spelled out',
        )


def wrong_rank(facts: InstanceFacts) -> Iterator[Finding]:
    """Batches name another rank than the one their endpoint belongs to."""
    for each in facts.streams:
        others = sorted(each.named_ranks - {each.rank})
        if others:
            yield _finding(
                facts,
                "wrong_rank",
                f"events from {each.endpoint}, taken for rank {each.rank}, name {_ranks(others)}",
                f"set `rank_base` to the global number of the first rank behind {facts.told.url}, "
                "or correct the port in `events`",
            )
            return


def ranks_differ(facts: InstanceFacts) -> Iterator[Finding]:
    """The file says another number of ranks than the engine has."""
    told, declared = facts.told.ranks, facts.declared
    if told is not None and declared and len(declared) != told:
        yield _finding(
            facts,
            "ranks_differ",
            f"`ranks: {told}`, but /kv_event_sources lists {_ranks(sorted(declared))}",
            f"set `ranks: {len(declared)}` or leave it out",
        )


def ipc_with_ranks(facts: InstanceFacts) -> Iterator[Finding]:
    """Vllm derives no ipc endpoint for ranks above 0, it fails to start."""
    events = facts.told.events or ""
    if events.startswith("ipc://") and (facts.told.ranks or 1) > 1:
        yield _finding(
            facts,
            "ipc_with_ranks",
            f"`events: {events}` with {facts.told.ranks} ranks",
            'use a TCP endpoint such as "tcp://*:5557": an ipc path can\'t be counted up',
        )


def _is_silent(stream: Stream) -> bool:
    answered = stream.probed is not None and stream.probed.problem is None
    can_hear = stream.problem is None and (stream.is_connected or stream.binds)
    return answered and can_hear and not stream.batches


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _finding(
    facts: InstanceFacts, name: str, seen: str, change: str, *, level: Level = Level.ERROR
) -> Finding:
    return Finding(name=name, level=level, instance=facts.name, seen=seen, change=change)
