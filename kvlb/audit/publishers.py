"""Whose events are these? Maps every recorded message to the instance and rank that published it.

Rules:

1. A message's `src` is the instance itself, or `<instance>.<rank>` where every rank has a label.
2. Any other `src` is a socket several instances shared: there the topic tells. Which topic is
   whose is read from the engines' own `/kv_event_sources` answers, else from the configured list
   of topics, else both sides are paired in natural order if they are equally many.
3. Without a rank in its label, the rank is the one the batch itself names, else 0.
4. A message that stays without an owner is counted, never guessed.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from indexer.core.events import UndecodableBatchError, decode_batch
from indexer.core.types import InstanceId, RankId
from kvlb.audit.capture import Capture, Message

_RANK_LABEL = re.compile(r"(?P<instance>.+)\.(?P<rank>\d+)")
_DIGITS = re.compile(r"(\d+)")


class Publishers:
    """The owners of one capture's messages."""

    def __init__(self, capture: Capture) -> None:
        instances = {row.src for row in capture.requests}
        labels = {message.src for message in capture.messages}
        self._instances = instances
        shared = {label for label in labels if self._own_label(label) is None}
        topics = {message.topic for message in capture.messages if message.src in shared}
        self._by_topic = _match_topics(
            sorted(instances, key=_natural), sorted(topics, key=_natural), capture.notes
        )

    def ranks(self, messages: Iterable[Message]) -> dict[RankId | None, list[Message]]:
        """Messages by owner, in the order given; None holds those without one."""
        by_rank: dict[RankId | None, list[Message]] = defaultdict(list)
        for message in messages:
            by_rank[self._owner(message)].append(message)
        return dict(by_rank)

    def _own_label(self, label: str) -> tuple[str, int | None] | None:
        if label in self._instances:
            return label, None
        found = _RANK_LABEL.fullmatch(label)
        if found and found["instance"] in self._instances:
            return found["instance"], int(found["rank"])
        return None

    def _owner(self, message: Message) -> RankId | None:
        own = self._own_label(message.src)
        if own is None:
            instance = self._by_topic.get(message.topic)
            return None if instance is None else RankId(InstanceId(instance), _rank_of(message))
        instance, rank = own
        return RankId(InstanceId(instance), _rank_of(message) if rank is None else rank)


def _rank_of(message: Message) -> int:
    try:
        return decode_batch(message.payload).rank or 0
    except UndecodableBatchError:
        return 0


def _match_topics(
    instances: Sequence[str], topics: Sequence[str], notes: Iterable[Mapping[str, Any]]
) -> Mapping[str, str]:
    if not topics:
        return {}
    for declared in _declared_topics(notes):
        if len(set(declared)) == len(declared) == len(instances) and set(topics) <= set(declared):
            return dict(zip(declared, instances, strict=True))
    if len(topics) == len(instances):
        return dict(zip(topics, instances, strict=True))
    return {}


def _declared_topics(notes: Iterable[Mapping[str, Any]]) -> Iterable[list[str]]:
    """Lists of topics, one per instance, that the capture's notes contain; best first."""
    configured: list[list[str]] = []
    for note in notes:
        sources, topics = note.get("sources"), note.get("topics")
        if isinstance(sources, list):
            yield [topic for source in sources for topic in _first_topic(source)]
        if isinstance(topics, list) and all(isinstance(topic, str) for topic in topics):
            configured.append(topics)
    yield from configured


def _first_topic(source: object) -> Iterable[str]:
    ranks = source.values() if isinstance(source, Mapping) else ()
    topics = [rank.get("topic") for rank in ranks if isinstance(rank, Mapping)]
    return [topic for topic in topics if isinstance(topic, str)][:1]


def _natural(text: str) -> list[tuple[int, str]]:
    """Sort key under which `w2` comes before `w10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(text)]
