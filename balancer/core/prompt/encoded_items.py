"""Which encode instance saw an item last, and whether what it encoded may still be counted on.

Rules:

1. An item goes to the instance that saw it last: its own cache may spare the encoder. That ends where
   it has `affinity_legs` more legs than the least loaded; then, and for new items, the least loaded
   takes it, equals in turn.
2. An encoding may be counted on for `reuse_s` after it was made, as long as its instance is available and
   has not been lost meanwhile. Nobody tells when an engine drops one, so whoever counts on it must be
   able to do without.
3. At most `remembered_items` are known, the longest unseen leave first. All of it is advice, of this
   process only.

Cost: O(1) per item, O(instances) per choice; about 300 bytes an item.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from balancer.core.fleet.snapshot import Instance
from balancer.core.settings.encode import EncodeSettings
from indexer.core.types import InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenItem:
    """An item on the instance that saw it last."""

    instance: InstanceId
    encoding: Any = None
    """What its connector needs of it; None: it may not be counted on."""
    made_s: float
    life: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderChoice:
    """Who encodes an item, and why: `affinity`, `least_loaded` or `only_one`."""

    instance: Instance
    reason: str


class EncodedItems:
    """One per process."""

    def __init__(self, settings: EncodeSettings) -> None:
        self.settings = settings
        """May be replaced while it is used."""
        self._seen: OrderedDict[bytes, SeenItem] = OrderedDict()
        self._lives: Counter[InstanceId] = Counter()
        self._turn = 0

    def __len__(self) -> int:
        return len(self._seen)

    def put(self, key: bytes, instance: InstanceId, encoding: Any, made_s: float) -> None:
        """An encode leg has ended well; `encoding` None: it serves this request only."""
        life = self._lives[instance]
        self._seen[key] = SeenItem(instance=instance, encoding=encoding, made_s=made_s, life=life)
        self._seen.move_to_end(key)
        self._turn += 1
        while len(self._seen) > self.settings.remembered_items:
            self._seen.popitem(last=False)

    def usable(self, key: bytes, available: Iterable[Instance], now_s: float) -> SeenItem | None:
        """An encoding that may be counted on now."""
        seen = self._seen.get(key)
        if seen is None or seen.encoding is None:
            return None
        is_over = now_s - seen.made_s >= self.settings.reuse_s
        if is_over or seen.life != self._lives[seen.instance]:
            return None
        if all(each.id != seen.instance for each in available):
            return None
        self._seen.move_to_end(key)
        return seen

    def drop(self, keys: Iterable[bytes]) -> None:
        """Somebody counted on these in vain."""
        for key in keys:
            self._seen.pop(key, None)

    def forget(self, instance: InstanceId) -> None:
        """It left or lost its process: nothing it had is there any more."""
        self._lives[instance] += 1

    def choose(
        self, key: bytes, available: Sequence[Instance], legs: Callable[[Instance], int]
    ) -> EncoderChoice:
        """Who of `available` (not empty) should encode the item. `legs` are those in flight."""
        if len(available) == 1:
            return EncoderChoice(instance=available[0], reason="only_one")
        loads = {each.id: legs(each) for each in available}
        least = min(loads.values())
        last = self._seen[key].instance if key in self._seen else None
        for each in available:
            if each.id == last and loads[each.id] <= least + self.settings.affinity_legs:
                return EncoderChoice(instance=each, reason="affinity")
        equals = [each for each in available if loads[each.id] == least]
        return EncoderChoice(instance=equals[self._turn % len(equals)], reason="least_loaded")
