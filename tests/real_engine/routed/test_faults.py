"""What real engines go through, under serial traffic, and how soon predictions are exact again.

Every request is compared: `x-kvlb-overlap-tokens` against the engine's `cached_tokens`. Of those sent
after the first event that follows the fault, none may be credited with more than delivered.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SEED = 20261201
COUNT, TURNS = 12, 3
BLOCKS = 160
BLOCK_TOKENS = 32
EXACT_WITHIN_S = 5
ADAPTERS = ("adapter-a", "adapter-b")


@pytest.fixture(scope="module")
def engines(
    start_engines: Callable[..., Any], adapters: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Two engines with little cache and two adapters."""
    modules = [f"{name}={path}" for name, path in adapters.items()]
    lora = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", *modules)
    flags = ("--num-gpu-blocks-override", str(BLOCKS), *lora)
    with start_engines("m0", "m1", flags=flags) as running:
        yield running


@pytest.fixture(scope="module")
def settings(model: Any) -> dict[str, Any]:
    """The model's own tokenizer, and deadlines that a busy machine can keep."""
    return {
        "tokens": {"models": {"tiny": str(model)}, "deadline_s": 5},
        "routing": {"lookup_timeout_s": 1},
    }


@pytest.fixture
def kvlb(
    engines: dict[str, Any], start_kvlb: Callable[..., Any], settings: dict[str, Any]
) -> Iterator[Any]:
    """A balancer in front of both engines, which hold nothing."""
    for engine in engines.values():
        engine.reset_cache()
    with start_kvlb(engines, settings=settings) as running:
        yield running


def ask(kvlb: Any, chats: Any, number: int, **fields: Any) -> Any:
    """One turn of a conversation, and the events of it."""
    turn = chats.read(number, kvlb.ask({**chats.body(number), **fields}))
    chats.answered(number, turn.text)
    kvlb.catch_up(turn.instance)
    return turn


def play(kvlb: Any, chats: Any, **fields: Any) -> list[Any]:
    """Every conversation's turns, one request at a time."""
    return [ask(kvlb, chats, number, **fields) for number in chats.order(TURNS)]


class Figures:
    """How predictions of a number of requests came out."""

    def __init__(self, turns: Sequence[Any]) -> None:
        self.requests = len(turns)
        self.exact = sum(turn.overlap_tokens == turn.cached_tokens for turn in turns)
        self.over = sum(turn.overlap_tokens > turn.cached_tokens for turn in turns)
        self.cached_tokens = sum(turn.cached_tokens for turn in turns)
        self.misses = [turn for turn in turns if turn.overlap_tokens != turn.cached_tokens]

    def check(self, record: Callable[..., None], what: str, **more: object) -> None:
        """Nothing promised that wasn't there, and nearly all of it to the token."""
        record(
            what=what,
            requests=self.requests,
            exact=self.exact,
            over=self.over,
            cached_tokens=self.cached_tokens,
            **more,
        )
        assert self.over == 0, self.misses
        assert self.exact >= 0.95 * self.requests, self.misses
        assert self.cached_tokens > 0


def wait_until_exact(
    kvlb: Any, name: str, wait_until: Callable[..., None], first_event: Callable[[], bool]
) -> float:
    """Seconds from the first event after a fault until the rank is exact."""
    wait_until(first_event, 60, f"an event of {name}")
    began_s = time.monotonic()
    wait_until(
        lambda: (kvlb.index_of(name) or {})["trust"] == "exact",
        EXACT_WITHIN_S,
        f"{name} to be exact",
    )
    return time.monotonic() - began_s


def test_an_engine_that_evicts_is_credited_with_what_is_left(
    kvlb: Any, conversations: Callable[..., Any], record_figures: Callable[..., None]
) -> None:
    """Twice as many blocks as both caches hold go through; each eviction is known in time."""
    chats = conversations(SEED, 4 * COUNT)
    turns = play(kvlb, chats)

    last = {turn.conversation: turn.prompt_tokens for turn in turns}
    needed = sum(last.values()) // BLOCK_TOKENS
    held = [kvlb.index_of(name)["held_blocks"] for name in ("m0", "m1")]
    assert needed > 1.5 * 2 * BLOCKS, "the conversations fit into the caches"
    assert max(held) <= BLOCKS
    Figures(turns).check(record_figures, "eviction", needed_blocks=needed, held_blocks=held)


def test_a_reset_cache_is_believed_until_the_first_event(
    kvlb: Any,
    engines: dict[str, Any],
    conversations: Callable[..., Any],
    wait_until: Callable[..., None],
    record_figures: Callable[..., None],
) -> None:
    """The engine tells of a reset with its next step: one wrong guess, which does no harm."""
    chats = conversations(SEED + 1, COUNT)
    play(kvlb, chats)
    engines["m0"].http.post(f"{engines['m0'].url}/reset_prefix_cache").raise_for_status()
    before = kvlb.applied_seq("m0")
    unaware: list[Any] = []

    def has_event() -> bool:
        if len(unaware) < COUNT:
            unaware.append(ask(kvlb, chats, len(unaware)))
        return bool(kvlb.applied_seq("m0") > before)

    exact_s = wait_until_exact(kvlb, "m0", wait_until, has_event)
    assert sum(turn.overlap_tokens > turn.cached_tokens for turn in unaware) <= 1
    after = play(kvlb, conversations(SEED + 2, COUNT)) + play(kvlb, chats)
    Figures(after).check(record_figures, "reset", exact_s=round(exact_s, 2))


def test_a_killed_engine_starts_again_as_an_empty_one(
    kvlb: Any,
    engines: dict[str, Any],
    conversations: Callable[..., Any],
    wait_until: Callable[..., None],
    record_figures: Callable[..., None],
) -> None:
    """SIGKILL and a new process on the same ports, others being asked meanwhile."""
    chats, others = conversations(SEED + 3, COUNT), conversations(SEED + 4, 400)
    play(kvlb, chats)
    epoch = kvlb.index_of("m0")["epoch"]
    engines["m0"].restart()
    during: list[Any] = []

    def is_back() -> bool:
        number = len(during) % 400
        during.append(others.read(number, kvlb.ask(others.body(number, max_tokens=4))))
        return bool(engines["m0"].is_ready())

    def has_event() -> bool:
        is_back()
        index = kvlb.index_of("m0")
        return index["epoch"] != epoch and index["last_seq"] is not None

    wait_until(is_back, 240, "m0 to be back")
    exact_s = wait_until_exact(kvlb, "m0", wait_until, has_event)
    after = play(kvlb, chats)
    assert any(turn.instance == "m0" for turn in after)
    Figures(after).check(
        record_figures, "restart", exact_s=round(exact_s, 2), requests_meanwhile=len(during)
    )


def test_adapters_and_the_base_model_share_no_blocks(
    kvlb: Any, conversations: Callable[..., Any], record_figures: Callable[..., None]
) -> None:
    """The same conversations under three names: each finds only what it has computed itself."""
    turns = []
    for model in ("tiny", *ADAPTERS):
        played = play(kvlb, conversations(SEED + 5, 4), model=model)
        first = {turn.conversation: turn for turn in reversed(played)}
        assert [turn.cached_tokens for turn in first.values()] == [0] * 4, model
        turns += played
    Figures(turns).check(record_figures, "lora")


def test_tenants_with_a_salt_share_no_blocks(
    kvlb: Any, conversations: Callable[..., Any], record_figures: Callable[..., None]
) -> None:
    """The same conversations salted twice and unsalted: credit stays with the tenant."""
    turns = []
    for fields in ({}, {"cache_salt": "tenant-a"}, {"cache_salt": "tenant-b"}):
        played = play(kvlb, conversations(SEED + 6, 4), **fields)
        first = {turn.conversation: turn for turn in reversed(played)}
        assert [turn.cached_tokens for turn in first.values()] == [0] * 4, fields
        turns += played
    Figures(turns).check(record_figures, "salt")
