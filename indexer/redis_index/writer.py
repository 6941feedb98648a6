"""Writes ranks to Redis: the indexer's side. Each update is one script, applied as a whole.

Rules:

1. A rank is claimed before its first write; the token makes this process its owner.
2. The script compares owner, epoch and the last batch with what Redis has. Anything but what this
   process wrote last means that Redis lost something or applied a write we took for failed: the
   rank is not whole, and only `rewrite`, a new epoch or `retire` goes on with it.
3. While a rank is rewritten it has no life, so no reader sees half of it.

Not handled: one rank written by two tasks at once. Its keeper sees to that.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from struct import error as StructError  # noqa: N812 - it is a class
from typing import Any

import msgspec

from indexer.core.block_rows import RankFacts
from indexer.core.index import (
    IndexLostError,
    IndexSize,
    NotOwnerError,
    RankUpdate,
    StaleEpochError,
)
from indexer.core.journal import RankRecord
from indexer.core.types import RankId, Trust
from indexer.redis_index.connection import Part, RedisConnection, Script, load_script
from indexer.redis_index.home import Home
from indexer.redis_index.keys import RankKeys, model_keys
from indexer.redis_index.packing import (
    ROW_BYTES,
    PackedKeys,
    RankEntry,
    encode_entry,
    read_entry,
    unpack_row,
)
from indexer.redis_index.places import Places
from indexer.redis_index.program import Groups, Program

_NO_FACTS = RankFacts()
_MOST_WRITERS = 2
"""Updates on the way to Redis at once."""


class RedisIndexWriter:
    """The write side of a `BlockIndex`, and a `RankJournal`."""

    def __init__(self, connection: RedisConnection, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._clock = clock
        self._homes: dict[RankId, Home] = {}
        self._told: dict[RankId, tuple[Trust, str]] = {}
        """How far each can be believed, and why."""
        self._taken: dict[RankId, bytes] = {}
        """Ranks that another process took, with the token under which we had them."""
        self._swept_s: dict[str, float] = {}
        self._places = Places(_MOST_WRITERS)
        self._lease_ms = round(connection.settings.lease_s * 1000)
        self._apply = load_script("apply", writes=True)
        self._claim = load_script("claim", writes=True)
        self._renew = load_script("renew", writes=True)
        self._retire = load_script("retire", writes=True)
        self._sweep = load_script("sweep", writes=True)
        self._release = load_script("release", writes=True)

    @property
    def heartbeat_s(self) -> float:
        return self._connection.settings.heartbeat_s

    def keys_of(self, rank: RankId) -> list[str]:
        """Every key that a rank of this process can have."""
        home = self._homes[rank]
        return [home.keys.life, home.keys.state, *home.data_keys()]

    # BlockIndex.

    async def apply(self, update: RankUpdate) -> None:
        home = self._homes.get(update.rank) or await self._home(update.rank, update.model)
        home.check_epoch(update)  # before a late update moves it to another model
        home = await self._home(update.rank, update.model)
        if update.epoch > home.epoch:
            program = Program(home.keys, update.epoch, {})
            program.unlink(home.epoch, home.groups)
            program.add(update.changes, update.rows)
            await self._write(update.rank, home, "open", update, program)
            return
        if not home.is_whole:
            raise IndexLostError("something was lost; the rank has to be written anew")
        program = Program(home.keys, update.epoch, home.groups)
        program.add(update.changes, update.rows)
        await self._write(update.rank, home, "next", update, program)

    async def set_trust(self, rank: RankId, trust: Trust, reason: str = "") -> None:
        told = self._told[rank] = trust, "" if trust is Trust.EXACT else reason
        home = self._homes.get(rank)
        if home is None or not home.epoch or not home.is_whole or home.told == told:
            return
        nothing = RankUpdate(
            rank=rank, model=home.model, epoch=home.epoch, seq=int(home.seq), changes=()
        )
        home.told = told
        program = Program(home.keys, home.epoch, home.groups)
        await self._write(rank, home, "trust", nothing, program)

    async def retire(self, rank: RankId) -> None:
        self._told.pop(rank, None)
        self._taken.pop(rank, None)
        home = self._homes.pop(rank, None)
        if home is not None:
            await self._remove(home, keep_state=False)

    async def size(self) -> IndexSize:
        owned = [rank for rank, home in tuple(self._homes.items()) if home.epoch]
        by_rank = {rank: await self.entries(rank) for rank in owned}
        return IndexSize(entries=sum(by_rank.values()), entries_by_rank=by_rank)

    # RankJournal.

    def writing(self) -> AbstractAsyncContextManager[None]:
        return self._places.one()

    async def restore(self, rank: RankId, model: str) -> RankRecord | None:
        self._homes.pop(rank, None)
        home = await self._home(rank, model)
        if home.is_spoilt:
            raise IndexLostError("what Redis had of the rank can't be read")
        # An epoch without a batch has the number -1: there is nothing an engine could prove.
        if not home.is_whole or not home.seq.isdigit():
            return None
        try:
            await self._extend(rank, home, is_first=True)
            return await self._read(home)
        except (StructError, msgspec.DecodeError) as error:
            home.is_whole = False
            raise IndexLostError("what Redis had of the rank can't be read") from error

    async def last_epoch(self, rank: RankId, model: str) -> int:
        return (await self._home(rank, model)).epoch

    async def rewrite(self, model: str, trust: Trust, parts: Iterable[RankUpdate]) -> None:
        home: Home | None = None
        last: RankUpdate | None = None
        for number, part in enumerate(parts):
            if self._told.get(part.rank, _EXACT)[0] is not trust:
                self._told[part.rank] = trust, ""
            if home is None:
                home = await self._begin(part, model)
            program = Program(home.keys, home.epoch, home.groups)
            program.add(part.changes, part.rows)
            await self._write(part.rank, home, f"part{number}", part, program)
            last = part
        if home is not None and last is not None:
            program = Program(home.keys, home.epoch, home.groups)
            await self._write(last.rank, home, "end", last, program)

    async def renew(self, rank: RankId) -> None:
        home = self._homes.get(rank)
        if home is None or not home.epoch:
            return
        if not home.is_whole:
            raise IndexLostError("something was lost; the rank has to be written anew")
        await self._extend(rank, home)

    async def _extend(self, rank: RankId, home: Home, *, is_first: bool = False) -> None:
        keys = home.keys
        answer = await self._run(
            self._renew,
            [
                keys.model.generation,
                keys.model.ranks,
                keys.life,
                keys.state,
                *home.data_keys(),
            ],
            [
                home.owner,
                home.epoch,
                home.seq,
                self._lease_ms,
                keys.digest,
                home.description,
                int(is_first),
            ],
        )
        self._check(answer, rank, home)
        await self._sweep_ended(home)

    async def entries(self, rank: RankId) -> int:
        home = self._homes.get(rank)
        keys = [] if home is None else home.set_keys()
        return sum([await self._connection.cardinality(key) for key in keys])

    async def withdraw(self, rank: RankId) -> None:
        home = self._homes.get(rank)
        if home is not None:
            home.is_whole = False
            await self._remove(home, keep_state=True)

    async def probe(self) -> None:
        await self._connection.ping()

    async def release(self) -> None:
        homes, self._homes = self._homes, {}
        by_model: dict[str, list[Home]] = {}
        for home in homes.values():
            by_model.setdefault(home.model, []).append(home)
        for owned in by_model.values():
            model = owned[0].keys.model
            states = [home.keys.state for home in owned]
            await self._run(
                self._release,
                [model.generation, model.ranks, *states],
                [home.owner for home in owned],
            )

    # Ownership.

    async def _home(self, rank: RankId, model: str) -> Home:
        """Where `rank` lives, claimed. A rank that serves another model now leaves the old one."""
        home = self._homes.get(rank)
        if home is not None and home.model != model:
            await self._remove(home, keep_state=False)
            del self._homes[rank]
            home = None
        if home is None:
            home = self._homes[rank] = await self._claim_rank(rank, model)
        return home

    async def _claim_rank(self, rank: RankId, model: str) -> Home:
        keys = model_keys(self._connection.settings.prefix, model).rank(rank)
        answer = await self._run(
            self._claim,
            [keys.model.generation, keys.model.ranks, keys.life, keys.state],
            [keys.digest, self._lease_ms, self._taken.get(rank, b"")],
        )
        if answer is None:
            raise NotOwnerError("another indexer writes this rank: stop one of the two")
        self._taken.pop(rank, None)
        owner, spoilt, life, description, epoch, seq, digest, facts = answer
        entry = read_entry(description)
        is_whole = entry is not None and life is not None and life == epoch
        if spoilt and entry is not None:
            epoch = entry.epoch  # whose keys have to go, and which no new one may be older than
        home = Home(
            model=model,
            keys=keys,
            owner=owner,
            epoch=int(epoch or 0),
            seq=seq or b"",
            told=self._told.get(rank) or ((entry.trust, entry.reason) if entry else _EXACT),
            groups={each.group: each for each in entry.groups} if entry else {},
            clears=entry.clears if entry else 0,
            is_whole=is_whole,
            is_spoilt=bool(spoilt),
            description=description or b"",
            record=(digest, facts),
        )
        self._told.setdefault(rank, home.told)
        return home

    async def _remove(self, home: Home, *, keep_state: bool) -> None:
        keys = home.keys
        await self._run(
            self._retire,
            [keys.model.generation, keys.model.ranks, keys.life, keys.state, *home.data_keys()],
            [home.owner, keys.digest, self._lease_ms, int(keep_state)],
        )

    async def _sweep_ended(self, home: Home) -> None:
        """Once per lease and model: ranks that no one renews leave the table."""
        now_s = self._clock()
        lease_s = self._connection.settings.lease_s
        if now_s < self._swept_s.get(home.model, float("-inf")) + lease_s:
            return
        self._swept_s[home.model] = now_s
        keys = home.keys.model
        digests = [name.decode() for name in await self._connection.fields(keys.ranks)]
        lives = [RankKeys(keys, digest).life for digest in digests]
        await self._run(
            self._sweep, [keys.generation, keys.ranks, *lives], [self._lease_ms, *digests]
        )

    # Writing.

    async def _begin(self, part: RankUpdate, model: str) -> Home:
        """Take the rank out of sight and empty it."""
        home = await self._home(part.rank, model)
        home.check_epoch(part)
        program = Program(home.keys, part.epoch, {})
        program.unlink(home.epoch, home.groups)
        await self._write(part.rank, home, "begin", part, program)
        return home

    async def _write(
        self, rank: RankId, home: Home, step: str, update: RankUpdate, program: Program
    ) -> None:
        """Run the apply script; what is known of the rank follows only if it was applied."""
        is_visible = step in {"open", "next", "end", "trust"}
        clears = program.clears + (home.clears if update.epoch == home.epoch else 0)
        is_changed = program.groups != home.groups or program.clears > 0
        is_described = is_visible and (step != "next" or is_changed)
        entry = self._entry(rank, update.epoch, program.groups, clears) if is_described else None
        description = encode_entry(entry) if entry else b""
        seq = str(update.seq).encode() if is_visible else step.encode()
        home.is_whole = False
        answer = await self._run(
            self._apply,
            program.keys,
            [
                _STEPS.get(step, "part"),
                home.owner,
                update.epoch,
                home.seq,
                seq,
                *self._kept(home, step, update),
                self._lease_ms,
                home.keys.digest,
                description,
                ROW_BYTES,
                program.encode(),
                *program.blobs,
            ],
        )
        self._check(answer, rank, home)
        home.epoch, home.seq, home.groups = update.epoch, seq, program.groups
        home.clears = clears
        home.is_whole = is_visible
        if entry:
            home.told, home.description = (entry.trust, entry.reason), description

    def _kept(self, home: Home, step: str, update: RankUpdate) -> Sequence[Part]:
        """Digest and facts of the last batch, as far as they change; of facts nothing, if they don't."""
        digest, before = home.record
        if step == "trust":
            return [digest or b"", b""]
        facts = update.facts or _NO_FACTS
        packed = before if facts is home.facts else msgspec.msgpack.encode(facts)
        home.record, home.facts = (str(update.digest).encode(), packed), facts
        is_new = step in {"open", "begin"} or packed != before
        return [home.record[0] or b"", (packed or b"") if is_new else b""]

    def _entry(self, rank: RankId, epoch: int, groups: Groups, clears: int) -> RankEntry:
        trust, reason = self._told.get(rank, _EXACT)
        return RankEntry(
            instance=rank.instance,
            rank=rank.rank,
            epoch=epoch,
            trust=trust,
            groups=tuple(groups[number] for number in sorted(groups)),
            clears=clears,
            reason=reason,
        )

    async def _read(self, home: Home) -> RankRecord:
        digest, facts = home.record
        rows = {}
        for group in home.groups:
            key = home.keys.rows(home.epoch, group)
            rows[group] = [
                unpack_row(name, value) async for name, value in self._connection.scan_hash(key)
            ]
        return RankRecord(
            epoch=home.epoch,
            seq=int(home.seq),
            digest=int(digest or 0),
            trust=home.told[0],
            facts=msgspec.msgpack.decode(facts or b"", type=RankFacts),
            groups=[entry.spec for entry in home.groups.values()],
            rows=rows,
        )

    async def _run(self, script: Script, keys: Sequence[str], args: Sequence[Part]) -> Any:
        parts = [part if isinstance(part, bytes) else str(part).encode() for part in args]
        timeout_s = self._connection.settings.write_timeout_s
        return await self._connection.run(script, PackedKeys(keys), parts, timeout_s=timeout_s)

    def _check(self, answer: object, rank: RankId, home: Home) -> None:
        """Raise what the fence said."""
        if answer == b"ok":
            return
        home.is_whole = False
        if answer == b"owner":
            self._homes.pop(rank, None)
            self._taken[rank] = home.owner
            raise NotOwnerError("another indexer writes this rank: stop one of the two")
        if answer == b"stale":
            self._homes.pop(rank, None)  # whoever claims it anew finds which
            raise StaleEpochError("a newer epoch of the rank is known")
        raise IndexLostError("Redis doesn't have what was written last")


_EXACT = (Trust.EXACT, "")
_STEPS = {"open": "open", "next": "next", "trust": "next", "begin": "begin", "end": "end"}
