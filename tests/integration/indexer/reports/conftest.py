"""What a balancer reports of one rank."""

from collections.abc import Callable

import pytest

from indexer.core.hashing import Namespace
from indexer.core.index import Prompt
from indexer.core.reports import CacheReport
from indexer.core.types import InstanceId, RankId

SIZE = 4
R0 = RankId(InstanceId("http://e0:8000"), 0)
PROMPT = Prompt(Namespace(model="tiny"), range(100 * SIZE + 1))


@pytest.fixture
def contradiction() -> Callable[..., CacheReport]:
    """The engine lacked a block that was promised, and three more below it."""

    def report(
        block: int = 0, *, rank: RankId = R0, epoch: int = 1, age_s: float = 0.0
    ) -> CacheReport:
        return CacheReport(
            rank=rank,
            epoch=epoch,
            age_s=age_s,
            block_size=SIZE,
            predicted_tokens=(block + 4) * SIZE,
            cached_tokens=block * SIZE,
            key=PROMPT.keys(SIZE)[block],
        )

    return report
