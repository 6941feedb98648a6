"""What every process has, as values: time, chance, and the other processes of its balancer."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAndChance:
    """What every process has, handed in so that tests can hold it still."""

    clock: Callable[[], float] = time.monotonic
    random: Callable[[], float] = random.random
    wall_clock: Callable[[], float] = lambda: datetime.now(UTC).timestamp()
    new_id: Callable[[], str] = lambda: f"{random.getrandbits(128):032x}"
    strftime_now: Callable[[str], str] = lambda form: datetime.now().astimezone().strftime(form)
