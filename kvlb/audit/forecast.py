"""What the product would have predicted for each request of one rank, and what it could learn later.

Rules:

1. The prediction is the index's answer when the request was sent: everything known by then applied,
   nothing else.
2. While a request may still be looking up its blocks, every further batch is applied and the question
   asked again: those answers are its `steps`.
3. What batches were lost counts for every request that was sent since the batch before them, until a
   clear or a new life.
4. A second index leaves out what `kv_cache_report_mode: full` re-announced, if anybody used it.

Cost: one match per request, and one per request under way and batch.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from indexer.core.events import AllBlocksCleared, BlockStored, Event, EventBatch
from indexer.core.hashing import Namespace
from indexer.core.index import (
    AllDropped,
    BlocksDropped,
    BlocksHeld,
    GroupKind,
    GroupSpec,
    Prompt,
    RankUpdate,
)
from indexer.core.rank_blocks import RankBlocks
from indexer.core.types import BlockKey, RankId
from indexer.memory_index import MemoryIndex
from kvlb.audit.sent import Sent
from kvlb.audit.streams import GRACE_S, TimedBatch

NEVER, ALWAYS = float("-inf"), float("inf")


@dataclass(frozen=True, slots=True)
class Step:
    """The answer after one more batch."""

    stamped_s: float
    tokens: int


@dataclass(slots=True, kw_only=True)
class Forecast:
    """What is known of one request's cached prefix, at send time and shortly after."""

    tokens: int
    """The prediction."""
    missing_since: float
    """When the first block that wasn't held was last dropped; -inf if it never was held, inf if it
    is held and only other groups of a hybrid model lack it."""
    unsalted_tokens: int
    """The same prompt without its salt."""
    counted_once_tokens: int
    """The same prompt, with re-announced blocks not counted again."""
    block_size: int = 0
    """Of the rank's full-attention group, 0 if it never published any."""
    limit_tokens: int = 0
    """Full blocks before the prompt's last token."""
    steps: list[Step] = field(default_factory=list)
    cleared: bool = False
    """The cache was reset, unseen, before the request was answered."""
    restarted: bool = False
    """The next thing heard of the rank was a new process."""
    events_lost: bool = False
    """Batches before it, of what its cache held, are not in the recording."""
    windows_unnamed: bool = False
    """The rank has groups that leave blocks out, and its events don't say what they need."""


class RankReplay:
    """One rank's blocks in an index of its own."""

    def __init__(self, rank: RankId, model: str) -> None:
        self._rank = rank
        self._model = model
        self._index = MemoryIndex()
        self._blocks = RankBlocks(rank=rank, model=model, epoch=1)
        self._epoch = 1
        self._held: set[BlockKey] = set()
        self._dropped_at: dict[BlockKey, float] = {}
        self._emptied_at = NEVER
        self._full_groups: set[int] = set()
        self.block_size = 0

    async def apply(self, timed: TimedBatch, events: list[Event] | None = None) -> None:
        """Apply one batch, or only `events` of it."""
        if timed.epoch != self._epoch:
            self._epoch = timed.epoch
            self._blocks.close()
            self._blocks = RankBlocks(rank=self._rank, model=self._model, epoch=timed.epoch)
            self._empty(timed.known_s)
        batch = timed.batch
        if events is not None:
            batch = EventBatch(ts=batch.ts, rank=batch.rank, events=events)
        update = self._blocks.apply(timed.seq, batch)
        self._note(update, timed.known_s)
        await self._index.apply(update)

    async def tokens(self, prompt: Prompt) -> int:
        found = (await self._index.match(prompt)).get(self._rank)
        return 0 if found is None else found.tokens

    def missing_since(self, prompt: Prompt, held_tokens: int) -> float:
        """When the block after the first `held_tokens` was last known to leave."""
        if not self.block_size:
            return self._emptied_at
        missing = prompt.keys(self.block_size)[held_tokens // self.block_size :][:1]
        if not self._held.isdisjoint(missing):
            return ALWAYS
        return max([self._emptied_at, *(self._dropped_at.get(key, NEVER) for key in missing)])

    def _note(self, update: RankUpdate, known_s: float) -> None:
        for change in update.changes:
            match change:
                case GroupSpec(kind=GroupKind.FULL):
                    self._full_groups.add(change.group)
                    self.block_size = self.block_size or change.block_size
                case BlocksDropped() if change.group in self._full_groups:
                    self._held.difference_update(change.keys)
                    self._dropped_at.update(dict.fromkeys(change.keys, known_s))
                case BlocksHeld() if change.group in self._full_groups:
                    self._held.update(change.keys)
                case AllDropped():
                    self._empty(known_s)
                case _:
                    pass

    def _empty(self, known_s: float) -> None:
        self._held.clear()
        self._dropped_at.clear()
        self._emptied_at = known_s


def forecast_rank(
    rank: RankId, model: str, batches: Sequence[TimedBatch], asked: Sequence[Sent]
) -> dict[int, Forecast]:
    """Forecasts by position in the capture, for the requests `asked` of one rank."""
    return asyncio.run(_RankTimeline(rank, model, asked).run(batches))


@dataclass(frozen=True, slots=True)
class _UnderWay:
    sent: Sent
    prompt: Prompt
    forecast: Forecast


class _RankTimeline:
    def __init__(self, rank: RankId, model: str, asked: Sequence[Sent]) -> None:
        self._asked = sorted(asked, key=lambda sent: sent.t0)
        self._reannouncing = [sent for sent in self._asked if reannounces(sent)]
        self._replay = RankReplay(rank, model)
        self._counted_once = RankReplay(rank, model) if self._reannouncing else self._replay
        self._under_way: list[_UnderWay] = []
        self._unheard: list[_UnderWay] = []
        """Nothing was heard of the rank since these were sent."""
        self._all: list[_UnderWay] = []
        self._epoch = 1
        self._has_lost = False
        self._heard_s = NEVER
        self._windows_unnamed = False

    async def run(self, batches: Iterable[TimedBatch]) -> dict[int, Forecast]:
        waiting = iter(self._asked)
        following = next(waiting, None)
        for timed in batches:
            while following is not None and following.t0 < timed.known_s:
                await self._send(following)
                following = next(waiting, None)
            await self._apply(timed)
        while following is not None:
            await self._send(following)
            following = next(waiting, None)
        self._finish()
        return {each.sent.position: each.forecast for each in self._all}

    async def _send(self, sent: Sent) -> None:
        prompt = Prompt(sent.namespace, sent.tokens)
        tokens = await self._replay.tokens(prompt)
        unsalted = Namespace(model=sent.namespace.model, lora=sent.namespace.lora)
        forecast = Forecast(
            tokens=tokens,
            missing_since=self._replay.missing_since(prompt, tokens),
            unsalted_tokens=await self._replay.tokens(Prompt(unsalted, sent.tokens)),
            counted_once_tokens=await self._counted_once.tokens(prompt),
            events_lost=self._has_lost,
        )
        under_way = _UnderWay(sent, prompt, forecast)
        self._under_way.append(under_way)
        self._unheard.append(under_way)
        self._all.append(under_way)

    async def _apply(self, timed: TimedBatch) -> None:
        opens_epoch = timed.epoch != self._epoch
        self._epoch = timed.epoch
        if self._counted_once is not self._replay:
            await self._counted_once.apply(timed, await self._first_announcements(timed))
        await self._replay.apply(timed)
        self._windows_unnamed |= any(_masks_unnamed(event) for event in timed.batch.events)
        clears = any(isinstance(event, AllBlocksCleared) for event in timed.batch.events)
        self._note_loss(timed, begins_anew=opens_epoch or clears)
        self._under_way = [
            each for each in self._under_way if timed.known_s <= each.sent.t1 + GRACE_S
        ]
        for each in self._under_way:
            forecast = each.forecast
            before_answer = timed.stamped_s <= each.sent.t1
            forecast.cleared |= clears and before_answer
            tokens = await self._replay.tokens(each.prompt)
            forecast.steps.append(Step(timed.stamped_s, tokens))
        # A new process's first batches may be lost; then it was heard of only with a later request.
        for each in self._unheard:
            each.forecast.restarted = opens_epoch and (
                timed.seq > 0 or timed.stamped_s <= each.sent.t1
            )
        self._unheard.clear()

    def _note_loss(self, timed: TimedBatch, *, begins_anew: bool) -> None:
        if timed.follows_loss:
            for each in (*self._under_way, *self._unheard):
                each.forecast.events_lost |= each.sent.t1 >= self._heard_s
        self._heard_s = timed.stamped_s
        self._has_lost = (self._has_lost or timed.follows_loss) and not begins_anew

    async def _first_announcements(self, timed: TimedBatch) -> list[Event]:
        """The batch without what a request in report mode `full` announced again."""
        events = timed.batch.events
        for sent in self._reannouncing:
            if sent.t0 <= timed.stamped_s <= sent.t1:
                held = await self._counted_once.tokens(Prompt(sent.namespace, sent.tokens))
                events = [event for event in events if not _repeats(event, sent, held)]
        return events

    def _finish(self) -> None:
        block_size = self._replay.block_size
        for each in self._all:
            each.forecast.block_size = block_size
            each.forecast.windows_unnamed = self._windows_unnamed
            if block_size:
                blocks = each.prompt.hit_limit_blocks(block_size)
                each.forecast.limit_tokens = blocks * block_size


def reannounces(sent: Sent) -> bool:
    """Whether the request makes the engine announce once more what it reuses."""
    extra = sent.body.get("vllm_xargs")
    return isinstance(extra, dict) and extra.get("kv_cache_report_mode") == "full"


def _repeats(event: Event, sent: Sent, held_tokens: int) -> bool:
    if not isinstance(event, BlockStored) or event.parent is not None or not held_tokens:
        return False
    announced = event.token_ids
    return len(announced) <= held_tokens and tuple(announced) == sent.tokens[: len(announced)]


def _masks_unnamed(event: Event) -> bool:
    if not isinstance(event, BlockStored) or event.kind is not None or not event.block_size:
        return False
    return len(event.token_ids) > len(event.hashes) * event.block_size
