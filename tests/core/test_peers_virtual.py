"""The comparison in virtual time: the rule of the others, and tables of the same calls."""

from collections.abc import Sequence

import pytest

from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.load.ledger import RankLoad
from balancer.core.routing.cost import LoadedCandidate, RequestShape
from balancer.core.routing.plan import Candidate
from benchmarks.peers.virtual import TextTree, policies, run_virtually
from indexer.core.types import BlockKey, InstanceId, RankId, Trust

SHAPE = RequestShape(prompt_tokens=64)


def candidates(requests: Sequence[int]) -> list[LoadedCandidate]:
    found = []
    for number, each in enumerate(requests):
        instance = Instance(
            id=InstanceId(f"http://e{number}:8000"), alias=f"e{number}", role=Role.MIXED
        )
        candidate = Candidate(
            rank=RankId(instance.id, 0),
            instance=instance,
            overlap_tokens=0,
            predicted_tokens=0,
            trust=Trust.EXACT,
            block_size=16,
        )
        found.append(LoadedCandidate(candidate=candidate, load=RankLoad(requests=each)))
    return found


def chosen(tree: TextTree, keys: Sequence[int], requests: Sequence[int] = (0, 0)) -> str:
    """Who gets a prompt of these blocks; of equals the first."""
    tree.keys = [BlockKey(key) for key in keys]
    choices = tree.choose(
        SHAPE, candidates(requests), lambda rank: float(rank.instance[8:9] == "1")
    )
    tree.chosen(choices[0].candidate.rank)
    assert len(choices) == len(requests)
    return choices[0].candidate.instance.alias


def test_prompt_goes_where_its_beginning_was_sent() -> None:
    """If that is over the threshold of it; else where least was sent."""
    tree = TextTree(0.5, 64, 1.5)

    where = [chosen(tree, keys) for keys in ([1, 2, 3, 4], [1, 2, 3, 9], [1, 5, 6, 7])]

    assert where == ["e0", "e0", "e1"]


@pytest.mark.parametrize(
    ("requests", "expected"),
    [([9, 0], "e1"), ([8, 0], "e0"), ([50, 41], "e0")],
    ids=["uneven", "not-by-enough", "not-by-ratio"],
)
def test_uneven_load_is_evened_out(requests: Sequence[int], expected: str) -> None:
    """Whatever was sent where."""
    tree = TextTree(0.1, 8, 1.3)
    chosen(tree, [1, 2])

    assert chosen(tree, [1, 2], requests) == expected


def test_every_policy_gets_the_same_calls() -> None:
    """In every repetition, so that differences can be paired."""
    cells = list(run_virtually(["arxiv"], 2, 0.5, 12))

    assert [(cell.repeat, cell.router) for cell in cells] == [
        (repeat, name) for repeat in range(2) for name in policies()
    ]
    assert {cell.figures.calls for cell in cells} == {12}
    assert all(cell.is_valid for cell in cells)
