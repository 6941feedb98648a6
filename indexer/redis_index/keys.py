"""Every key in Redis. Nothing else spells one.

All keys of a model share a hash tag, so that a script may touch them together in a cluster. Models
and ranks appear as digests: no name, address or salt is part of a key.
"""

from dataclasses import dataclass

from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from indexer.core.types import RankId

SCHEMA = 1
"""Version of the layout, part of every key: docs/redis-schema.md says when it changes."""


@dataclass(frozen=True, slots=True)
class ModelKeys:
    """Keys of one base model."""

    tag: str

    @property
    def generation(self) -> str:
        """String: another number whenever `ranks` changes."""
        return f"{self.tag}:gen"

    @property
    def ranks(self) -> str:
        """Hash: rank digest to its description."""
        return f"{self.tag}:ranks"

    def rank(self, rank: RankId) -> "RankKeys":
        return RankKeys(self, rank_digest(rank))


@dataclass(frozen=True, slots=True)
class RankKeys:
    """Keys of one rank."""

    model: ModelKeys
    digest: str

    @property
    def life(self) -> str:
        """String: the epoch that counts. Without it the rank isn't there."""
        return f"{self.model.tag}:{self.digest}:life"

    @property
    def state(self) -> str:
        """Hash: owner, epoch, last batch and what else a restarted indexer needs."""
        return f"{self.model.tag}:{self.digest}:state"

    def blocks(self, epoch: int, group: int, block_size: int, tier: int) -> str:
        """Set: block keys held, eight bytes each."""
        return f"{self.model.tag}:{self.digest}:{epoch}:{group}:{block_size}:{tier}"

    def rows(self, epoch: int, group: int) -> str:
        """Hash: engine hash to its row (`packing.pack_rows`)."""
        return f"{self.model.tag}:{self.digest}:{epoch}:{group}:rows"


def model_keys(prefix: str, model: str) -> ModelKeys:
    """Keys of `model` under the deployment's own prefix."""
    return ModelKeys(f"{prefix}:{SCHEMA}:{{{xxh3_128_hexdigest(model.encode())[:16]}}}")


def rank_digest(rank: RankId) -> str:
    """64 bits: two ranks of one model collide once in 10**15 fleets of a hundred ranks."""
    return xxh3_64_hexdigest(f"{rank.instance}|{rank.rank}".encode())
