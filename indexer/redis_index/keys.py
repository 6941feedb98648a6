"""Every key in Redis. Nothing else spells one.

All keys of a model share a hash tag, so that a script may touch them together in a cluster. Models
and ranks appear as digests: no name, address or salt is part of a key. What is of no model has a key
without a tag.
"""

from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from indexer.core.types import RankId

SCHEMA = 1
"""Version of the layout, part of every key: docs/redis-schema.md says when it changes."""


class ModelKeys:
    """Keys of one base model."""

    __slots__ = ("generation", "ranks", "tag")

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.generation = f"{tag}:gen"
        """String: another number whenever `ranks` changes."""
        self.ranks = f"{tag}:ranks"
        """Hash: rank digest to its description."""

    @property
    def reports(self) -> str:
        """List: what balancers tell of finished legs (`reports.py`)."""
        return f"{self.tag}:reports"

    def rank(self, rank: RankId) -> "RankKeys":
        return RankKeys(self, rank_digest(rank))


class RankKeys:
    """Keys of one rank. Names that were asked for once are remembered: every batch needs them."""

    __slots__ = ("_epoch", "_names", "digest", "life", "model", "state")

    def __init__(self, model: ModelKeys, digest: str) -> None:
        self.model = model
        self.digest = digest
        self.life = f"{model.tag}:{digest}:life"
        """String: the epoch that counts. Without it the rank isn't there."""
        self.state = f"{model.tag}:{digest}:state"
        """Hash: owner, epoch, last batch and what else a restarted indexer needs."""
        self._epoch = 0
        self._names: dict[tuple[int, ...], str] = {}

    def blocks(self, epoch: int, group: int, block_size: int, tier: int) -> str:
        """Set: block keys held, eight bytes each."""
        names = self._names_in(epoch)
        name = names.get((group, block_size, tier))
        if name is None:
            name = f"{self.model.tag}:{self.digest}:{epoch}:{group}:{block_size}:{tier}"
            names[group, block_size, tier] = name
        return name

    def rows(self, epoch: int, group: int) -> str:
        """Hash: engine hash to its row (`packing.pack_rows`)."""
        names = self._names_in(epoch)
        name = names.get((group,))
        if name is None:
            name = names[(group,)] = f"{self.model.tag}:{self.digest}:{epoch}:{group}:rows"
        return name

    def _names_in(self, epoch: int) -> dict[tuple[int, ...], str]:
        if epoch != self._epoch:
            self._epoch, self._names = epoch, {}
        return self._names


def model_keys(prefix: str, model: str) -> ModelKeys:
    """Keys of `model` under the deployment's own prefix."""
    return ModelKeys(f"{prefix}:{SCHEMA}:{{{xxh3_128_hexdigest(model.encode())[:16]}}}")


def fleet_key(prefix: str) -> str:
    """Hash: what was changed of the fleet while it ran, by kind and address. Of all models."""
    return f"{prefix}:{SCHEMA}:fleet"


def load_key(prefix: str) -> str:
    """Stream: what balancers tell each other of their legs. Of all models."""
    return f"{prefix}:{SCHEMA}:load"


def rank_digest(rank: RankId) -> str:
    """64 bits: two ranks of one model collide once in 10**15 fleets of a hundred ranks."""
    return xxh3_64_hexdigest(f"{rank.instance}|{rank.rank}".encode())
