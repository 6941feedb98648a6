"""When an instance has room for one more request."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from balancer.core.errors import NoInstanceError
from balancer.core.fleet.snapshot import Fleet, Role
from balancer.core.load.ledger import RankLoad, RankRates
from balancer.core.reliability.vetting import NoVetting
from balancer.core.settings.admission import AdmissionSettings
from balancer.dataplane.admission import Room
from indexer.core.types import RankId


@dataclass
class Loads:
    """A ledger that says what it was told."""

    by_rank: dict[RankId, RankLoad] = field(default_factory=dict)
    knows_prefill: bool = True

    def load(self, rank: RankId) -> RankLoad:
        return self.by_rank.get(rank, RankLoad())


def queue(seconds: float) -> RankLoad:
    """A busy rank with so much prefill before it."""
    rates = RankRates(prefill_s_per_token=0.001, fixed_s=0.0)
    tokens = round(seconds * 1000)
    return RankLoad(
        requests=8, queued_tokens=tokens, oldest_queued_s=0.0, head_tokens=tokens, rates=rates
    )


@pytest.fixture
def room(instance: Any) -> Any:
    """Whether there is room, with queues of so many seconds."""

    def is_there(
        queues: dict[str, float],
        *,
        roles: dict[str, Role] | None = None,
        knows_prefill: bool = True,
        promise_s: float = 2.0,
    ) -> bool:
        instances = tuple(
            instance(f"http://{alias}:1", alias, role=(roles or {}).get(alias, Role.MIXED))
            for alias in queues
        )
        by_rank = {next(iter(each.rank_ids())): queue(queues[each.alias]) for each in instances}
        room = Room(
            ledger=Loads(by_rank, knows_prefill),  # type: ignore[arg-type]
            vetting=NoVetting(),
            settings=AdmissionSettings(promise_s=promise_s),
            block_size=lambda _: None,
            max_requests_per_rank=lambda: 0,
        )
        return room.exists(Fleet(instances=instances), "m")

    return is_there


def test_one_short_queue_is_room(room: Any) -> None:
    """Only if every rank has more before it than promised nobody is let in."""
    assert room({"a": 3.0, "b": 1.9})
    assert not room({"a": 3.0, "b": 2.1})


def test_without_rates_queues_are_not_known(room: Any) -> None:
    """A prior could hold up a fleet that is ten times as fast."""
    assert room({"a": 30.0}, knows_prefill=False)
    assert room({"a": 30.0}, promise_s=0.0)


def test_a_prefill_rank_needs_room_as_well(room: Any) -> None:
    """Where there are some: the decode side alone can't begin."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE}

    assert room({"p": 1.0, "d": 0.0}, roles=roles)
    assert not room({"p": 3.0, "d": 0.0}, roles=roles)
    assert not room({"p": 0.0, "d": 3.0}, roles=roles)


def test_without_anybody_there_is_no_line(room: Any) -> None:
    """It isn't room that is missing."""
    with pytest.raises(NoInstanceError):
        room({"p": 0.0}, roles={"p": Role.PREFILL})
