"""The words of the index: identifiers, tiers, trust. Everything else is built from these.

Two kinds of hash never mix: a `BlockKey` is computed by us from tokens and means the same on
every engine; an `EngineHash` is what an engine published and means something on that rank only.
"""

from enum import StrEnum
from typing import NamedTuple, NewType

InstanceId = NewType("InstanceId", str)
"""An engine's base URL without a trailing slash, for example `http://10.0.0.1:8000`."""

BlockKey = NewType("BlockKey", int)
"""64-bit hash of a block *and its whole prefix*, computed by us: the key of the index."""

EngineHash = NewType("EngineHash", int)
"""The low 64 bits, unsigned, of the hash an engine published. Opaque: never recomputed.

Engines publish signed ints, unsigned ints or byte strings of the same digest; the last eight
bytes, big-endian, are common to all three (vLLM's own int form), so removals always meet stores.
"""


class RankId(NamedTuple):
    """One data-parallel rank of one instance: one cache, one event stream, one candidate."""

    instance: InstanceId
    rank: int
    """The *global* data-parallel rank, as events name it."""


class Tier(StrEnum):
    """Where a block lies. Fastest first."""

    GPU = "gpu"
    CPU = "cpu"
    STORAGE = "storage"


class Trust(StrEnum):
    """How far a rank's index entries can be believed. Best first."""

    EXACT = "exact"
    DEGRADED = "degraded"
    """Events were lost or contradicted: entries may be stale."""
    APPROXIMATE = "approximate"
    """No events: entries are guesses from what was routed."""
    LOAD_ONLY = "load_only"
    """Nothing is known about the cache."""
