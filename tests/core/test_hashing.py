"""Block keys: one key names a whole prefix within a namespace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.hashing import (
    Namespace,
    block_key,
    block_keys,
    pack_extras,
    pack_tokens,
    root_key,
)

BLOCK_SIZE = 4
ROOT = root_key(Namespace(model="tiny"))

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)
few_tokens = st.lists(st.integers(0, 1), max_size=40)
names = st.none() | st.text(max_size=3)


def common_prefix(left: list[int], right: list[int]) -> int:
    return next(
        (at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
        min(len(left), len(right)),
    )


@given(few_tokens, few_tokens)
def test_common_prefix_is_exactly_the_common_keys(left: list[int], right: list[int]) -> None:
    """Two prompts share as many keys as they share leading full blocks."""
    left_keys = list(block_keys(ROOT, pack_tokens(left), BLOCK_SIZE))
    right_keys = list(block_keys(ROOT, pack_tokens(right), BLOCK_SIZE))

    shared = len(set(left_keys) & set(right_keys))
    assert shared == common_prefix(left, right) // BLOCK_SIZE
    assert left_keys[:shared] == right_keys[:shared]


@given(st.integers(0, 70), st.booleans())
def test_each_key_hashes_its_block_under_the_one_before(blocks: int, has_extras: bool) -> None:
    """However many they are."""
    packed = pack_tokens(range(blocks * BLOCK_SIZE))
    extras = {blocks // 2: b"image"} if has_extras else {}

    above = ROOT
    for number, key in enumerate(block_keys(ROOT, packed, BLOCK_SIZE, extras)):
        block = packed[number * BLOCK_SIZE * 4 : (number + 1) * BLOCK_SIZE * 4]
        assert key == block_key(above, block, extras.get(number, b""))
        above = key


@given(token_lists, st.integers(0, 10))
def test_keys_of_a_continuation_hang_on_the_last_key(tokens: list[int], cut: int) -> None:
    """Hashing in two parts gives the keys of hashing at once."""
    packed = pack_tokens(tokens)
    whole = list(block_keys(ROOT, packed, BLOCK_SIZE))
    first = list(block_keys(ROOT, packed[: cut * BLOCK_SIZE * 4], BLOCK_SIZE))

    rest = block_keys(first[-1] if first else ROOT, packed[cut * BLOCK_SIZE * 4 :], BLOCK_SIZE)
    assert [*first, *rest] == whole


@given(st.tuples(names, names, names), st.tuples(names, names, names))
def test_roots_are_equal_only_for_equal_namespaces(
    left: tuple[str | None, ...], right: tuple[str | None, ...]
) -> None:
    """No two namespaces spell the same root."""
    roots = [
        root_key(Namespace(model=model or "", lora=lora, cache_salt=salt))
        for model, lora, salt in (left, right)
    ]

    assert (roots[0] == roots[1]) == ((left[0] or "", *left[1:]) == (right[0] or "", *right[1:]))


def test_root_tells_none_from_empty() -> None:
    """An empty salt is a salt."""
    assert root_key(Namespace(model="m", cache_salt="")) != root_key(Namespace(model="m"))


def test_keys_are_stable_between_processes_and_releases() -> None:
    """Redis holds keys that another process computed: the scheme may not drift."""
    keys = block_keys(ROOT, pack_tokens(range(8)), BLOCK_SIZE)

    assert ROOT == 0xD928520D1D215149
    assert list(keys) == [0x826CD41EE8B5A3B6, 0x4776DC356B628B1A]
    assert root_key(Namespace(model="tiny", lora="a", cache_salt="s")) == 0xEC0A72685C0FC5A4


def test_extras_belong_to_their_block_and_all_after_it() -> None:
    """Text before an image shares keys whatever the image."""
    packed = pack_tokens(range(12))
    plain = list(block_keys(ROOT, packed, BLOCK_SIZE))
    image = list(block_keys(ROOT, packed, BLOCK_SIZE, {1: b"image"}))

    assert image[0] == plain[0]
    assert set(image[1:]).isdisjoint(plain)
    assert image[1] == block_key(image[0], packed[16:32], b"image")


def test_partial_block_has_no_key() -> None:
    """Only full blocks are keyed."""
    assert len(block_keys(ROOT, pack_tokens(range(7)), BLOCK_SIZE)) == 1


def test_blocks_longer_than_any_prompt_have_no_keys() -> None:
    """Whatever size some event claims, lookups go on."""
    assert not block_keys(ROOT, pack_tokens(range(7)), 2**62)


@pytest.mark.parametrize(
    ("token_ids", "error"),
    [
        pytest.param([-1], OverflowError, id="negative"),
        pytest.param([2**32], OverflowError, id="too-large"),
        pytest.param([1.5], TypeError, id="float"),
        pytest.param(["1"], TypeError, id="text"),
    ],
)
def test_bad_token_is_refused(token_ids: list[int], error: type[Exception]) -> None:
    """A token id is an unsigned 32-bit int."""
    with pytest.raises(error):
        pack_tokens(token_ids)


extra_parts = st.lists(
    st.text(max_size=3)
    | st.binary(max_size=3)
    | st.tuples(st.text(max_size=3), st.integers(-3, 3))
    | st.none(),
    max_size=3,
)


@given(extra_parts, extra_parts)
def test_extras_are_equal_only_for_equal_parts(left: list[object], right: list[object]) -> None:
    """No two lists of parts spell the same bytes."""
    assert (pack_extras(left) == pack_extras(right)) == (left == right)


def test_pair_may_be_a_list_or_a_tuple() -> None:
    """Events bring pairs as lists, our own code as tuples."""
    assert pack_extras([["image", -3]]) == pack_extras([("image", -3)])


def test_salt_is_not_shown() -> None:
    """A namespace may be logged; its salt is a tenant's secret."""
    assert "s3cret" not in repr(Namespace(model="m", cache_salt="s3cret"))
