"""Load and predictions behind one port: what is in flight on each rank, and what it will hold.

Rules:

1. What is counted up is counted down by the same guard, however the leg ends. What lasts (arrivals,
   work, what a cache holds) lasts of legs that were computed.
2. Blocks of a routed prompt count as held by its rank until their time is over or the leg
   fails, so that siblings and the next turn find them before events tell. Where none ever come
   they are guessed to be held for longer, until the engine reports otherwise.
3. Nothing here waits or reads a clock: process-local now, shared between balancers later.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from types import TracebackType
from typing import Protocol, Self

import msgspec

from indexer.core.types import BlockKey, RankId


class RankRates(msgspec.Struct, frozen=True, kw_only=True):
    """How fast one rank is, as learned from legs. The defaults hold until anything is learned."""

    prefill_s_per_token: float = 1e-4
    """Seconds per uncached prompt token."""
    fixed_s: float = 0.02
    """What a first token costs however short the prompt is."""
    step_s: float = 0.02
    """One decode step, alone on the rank."""
    step_s_per_request: float = 1e-4
    """What each further decoding request adds to a step."""
    output_tokens: float = 128.0
    """Mean length of an answer, over the fleet."""
    decode_s: float = 0.0
    """Mean seconds from first to last token; 0: not known."""
    stalled_share: float = 0.0
    """Of the time of the rank's answers lately: what the fleet's fastest would not have taken."""


class TransferRates(msgspec.Struct, frozen=True, kw_only=True):
    """How long one rank's blocks take to another. The defaults hold until anything is learned."""

    fixed_s: float = 0.005
    """What a hand-over takes however little is handed over, beyond the first step."""
    s_per_token: float = 1e-5
    """Seconds per prompt token that the receiving rank lacks."""

    def seconds(self, tokens: int) -> float:
        """Of a hand-over of `tokens` tokens."""
        return self.fixed_s + self.s_per_token * tokens


class Learning(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What has been seen of prefills and hand-overs, while it is too little to go by."""

    prefills: int
    hand_overs: int
    needed: int
    """Of either."""


class RankLoad(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One rank's load as this balancer knows it."""

    requests: int = 0
    """Legs in flight."""
    queued_tokens: int = 0
    """Uncached prompt tokens of legs without a first token."""
    decoding: int = 0
    """Legs past their first token."""
    oldest_queued_s: float | None = None
    """When the oldest leg without a first token was sent."""
    head_tokens: int = 0
    """Uncached prompt tokens of that oldest leg."""
    head_progress_s: float = 0.0
    """How long the rank has been able to work on that oldest leg."""
    arrivals_per_s: float = 0.0
    work_share: float = 0.0
    """Prefill seconds sent per second, lately (rho); if rates are right."""
    recent_work_s: float = 0.0
    """Prefill seconds that new prompt tokens took, or would have taken, over the last minutes."""
    active_blocks: int = 0
    """Different blocks of the prompts in flight."""
    output_tokens: float = 0.0
    """Tokens the legs that decode now have generated, as far as their pace tells."""
    reuse_chance: float = 0.0
    """That what the rank would evict next is ever asked for again."""
    free_tokens: float = 0.0
    """KV memory in which nothing lies that could be asked for again; 0 if its size isn't known."""
    seats: int = 0
    """Requests that it runs at once, as far as waits have shown; 0: none has."""
    rates: RankRates = RankRates()


class LegWork(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a leg will cost its rank, booked when it is decided."""

    rank: RankId
    kind: str
    """`prefill`, `decode` (after a transfer) or `whole` (prefill and decode on one rank)."""
    prompt_tokens: int
    uncached_tokens: int
    """Prompt tokens new to this rank: computed there, or received by a `decode` leg."""
    work_s: float
    """Expected prefill seconds on this rank; 0 for a `decode` leg."""
    keys: Sequence[BlockKey] = ()
    """Block keys the rank will hold once the prompt is computed; of several prompts, one after the
    other."""
    chain_ends: tuple[int, ...] = ()
    """Of several prompts: where the keys of each end."""
    streamed: bool = True
    """The first token can be seen (a stream, or a prefill leg). Only then rates are learned."""
    believed_s: float = 30.0
    """How long after the first token `keys` count as held without an event that says so."""
    believed_tokens: int = 0
    """So many tokens new to the rank, sent there after the first token, end that belief, too: they
    may have pushed `keys` out. 0: not known."""
    remembered_s: float = 0.0
    """No events come from this rank: so long after a leg that used them blocks are guessed to be
    held. 0: events tell."""
    block_size: int = 0
    """Tokens per key; 0: `keys` are of several prompts."""
    cache_tokens: int = 0
    """What fits the rank's KV cache; 0: not known."""

    @property
    def chains(self) -> Sequence[Sequence[BlockKey]]:
        """`keys`, prompt by prompt."""
        if not self.chain_ends:
            return (self.keys,)
        return [self.keys[start:end] for start, end in pairwise((0, *self.chain_ends))]


class LegGuard(Protocol):
    """Counts a leg until the `with` block ends. A second end changes nothing."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End of the leg; an exception withdraws its predicted blocks.

        Before its first token it withdraws all that was booked, but for the work that may be done.
        """
        ...

    def first_token(self) -> None:
        """The prompt is computed: from now on the leg decodes. Later calls change nothing."""
        ...

    def handed_over(self, source: RankId) -> None:
        """Of a `decode` leg: `source` has computed the prompt, the transfer may begin."""
        ...

    def generated(self, tokens: int) -> None:
        """Completion tokens as the engine reported them; call before the leg ends, if known."""
        ...

    def cached(self, tokens: int) -> None:
        """Cached tokens as the engine reported them; likewise."""
        ...


class LoadLedger(Protocol):
    """Every implementation passes tests/conformance/load_ledger/."""

    @property
    def knows_prefill(self) -> bool:
        """Whether prefill has been seen often enough for its rate to be more than a prior."""
        ...

    def load(self, rank: RankId) -> RankLoad: ...

    def busy(self, rank: RankId) -> tuple[int, int]:
        """Of what `load` tells its requests and queued tokens, for who needs no more."""
        ...

    def prefill_rates(self, rank: RankId) -> RankRates:
        """How fast the rank computes prompts, as far as it was learned; nothing else of it counts."""
        ...

    def predicted_blocks(self, rank: RankId, keys: Sequence[BlockKey], start: int) -> int:
        """How many blocks from `start` on, without a gap, are predicted on `rank`."""
        ...

    def has_guesses(self, rank: RankId) -> bool:
        """Whether blocks of earlier legs are guessed to be held by a rank without events."""
        ...

    def promised_blocks(
        self, rank: RankId, keys: Sequence[BlockKey], start: int
    ) -> tuple[int, int]:
        """Predicted as of the last `load` of the rank; of the first `keys`, what is in use there.

        Both without a gap. In use: by requests in flight.
        """
        ...

    def transfer(self, source: RankId, target: RankId) -> TransferRates:
        """What a hand-over from `source` to `target` takes."""
        ...

    @property
    def learning(self) -> Learning | None:
        """None: prefill and transfer have been seen often enough to compare their times."""
        ...

    def hold(self, work: LegWork) -> LegGuard:
        """Book `work` at once; use as a context manager that lives as long as the leg."""
        ...

    def forget(self, rank: RankId) -> None:
        """The rank restarted or left: its predictions are void. Legs in flight stay counted."""
        ...

    def empty(self, rank: RankId) -> None:
        """The rank's cache was emptied: of what is predicted only that counts which has yet to come."""
        ...

    def retain(self, ranks: AbstractSet[RankId]) -> None:
        """These are the fleet from now on: of others only legs in flight are kept, by whoever's."""
        ...
