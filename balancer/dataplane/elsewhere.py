"""Tries one place after the other for what isn't scored, as long as another try is safe."""

from collections.abc import Awaitable, Callable

from balancer.core.errors import EngineError
from balancer.core.record import RequestRecord
from balancer.dataplane.placing import Place
from balancer.dataplane.reliability import Reliability


async def try_places(
    places: list[Place],
    carry: Callable[[Place], Awaitable[None]],
    *,
    record: RequestRecord,
    reliability: Reliability,
    retries: int,
    is_lacking: Callable[[EngineError], bool],
) -> None:
    """Have `carry` answer from the first place that can. Raises BalancerError.

    A place that `is_lacking` the path costs no retry: it has done nothing.
    """
    while True:
        place = places.pop(0)
        reliability.claim(place.instance)
        try:
            await carry(place)
        except EngineError as error:
            if record.status is not None or not places:
                raise
            if is_lacking(error):
                continue
            is_safe = error.retryable and retries > 0
            if not is_safe or not reliability.may_retry(record):
                raise
            retries -= 1
        else:
            return
