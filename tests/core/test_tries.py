"""How often one request is tried again, by what its attempts met."""

import pytest

from balancer.core.errors import (
    BalancerError,
    ConnectTimeoutError,
    EngineClosedError,
    EngineUnreachableError,
)
from balancer.core.reliability.tries import Tries

CLOSED = EngineClosedError("seen")
AWAY = EngineUnreachableError("not seen")
SLOW = ConnectTimeoutError("not seen")


def attempts(retries: int, errors: list[BalancerError]) -> int:
    """How many of these failures are met before no attempt is left."""
    tries = Tries(retries)
    for number, error in enumerate(errors, 1):
        if not tries.has_after(error):
            return number
        tries.spend(error)
    return len(errors) + 1


@pytest.mark.parametrize(
    ("errors", "met"),
    [
        pytest.param([CLOSED] * 9, 3, id="seen"),
        pytest.param([AWAY] * 9, 5, id="not-seen"),
        pytest.param([AWAY, CLOSED, SLOW, CLOSED, CLOSED], 5, id="mixed"),
        pytest.param([CLOSED, CLOSED, AWAY, AWAY, AWAY], 5, id="seen-first"),
    ],
)
def test_who_saw_nothing_costs_none_of_the_others(errors: list[BalancerError], met: int) -> None:
    """Two retries, and two more after engines that weren't reached."""
    assert attempts(2, errors) == met


@pytest.mark.parametrize("error", [CLOSED, AWAY])
def test_no_retries_are_none(error: BalancerError) -> None:
    """Whatever was met."""
    assert attempts(0, [error]) == 1
