"""The cache of known tokens is bounded in bytes."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from balancer.core.prompt.token_cache import ENTRY_BYTES, TokenCache


def tokens(count: int) -> tuple["array[int]", ...]:
    """One prompt of `count` tokens."""
    return (array("I", range(count)),)


def test_known_prompt_is_found() -> None:
    """What was put is got, as it was."""
    cache = TokenCache(limit_bytes=10_000)
    cache.put(b"a", tokens(3))

    assert cache.get(b"a") == tokens(3)
    assert cache.get(b"b") is None


def test_least_recently_used_leaves_first() -> None:
    """A read counts as use."""
    cache = TokenCache(limit_bytes=2 * (ENTRY_BYTES + 4))
    cache.put(b"a", tokens(1))
    cache.put(b"b", tokens(1))
    cache.get(b"a")
    cache.put(b"c", tokens(1))

    assert cache.get(b"a") is not None
    assert cache.get(b"b") is None


def test_entry_over_the_limit_is_not_kept() -> None:
    """One huge prompt must not empty the cache."""
    cache = TokenCache(limit_bytes=ENTRY_BYTES + 4)
    cache.put(b"a", tokens(1))
    cache.put(b"b", tokens(100))

    assert cache.get(b"a") is not None
    assert cache.get(b"b") is None


def test_everything_can_be_forgotten() -> None:
    """Some of it was wrong."""
    cache = TokenCache(limit_bytes=4_000)
    cache.put(b"a", tokens(1))
    cache.clear()

    assert cache.get(b"a") is None
    assert cache._held_bytes == 0


@given(st.lists(st.tuples(st.binary(max_size=1), st.integers(0, 300))))
def test_never_over_the_limit(puts: list[tuple[bytes, int]]) -> None:
    """Law: the bytes held are those of the entries, at most the limit."""
    cache = TokenCache(limit_bytes=4_000)
    for key, count in puts:
        cache.put(key, tokens(count))

    held = {key for key, _ in puts if cache.get(key) is not None}
    expected = sum(ENTRY_BYTES + 4 * len(found[0]) for key in held if (found := cache.get(key)))
    assert cache._held_bytes == expected <= 4_000
