"""A prompt as the index sees it, and what a group needs for a hit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.hashing import (
    MediumPlace,
    Namespace,
    block_keys,
    pack_extras,
    pack_tokens,
    root_key,
)
from indexer.core.index import GroupKind, GroupSpec, PrefixMatch, Prompt
from indexer.core.types import Tier, Trust

NAMESPACE = Namespace(model="tiny")


@pytest.mark.parametrize(
    ("tokens", "block_size", "limit"),
    [
        pytest.param(0, 4, 0, id="empty"),
        pytest.param(1, 4, 0, id="one"),
        pytest.param(4, 4, 0, id="one-block-exactly"),
        pytest.param(5, 4, 1, id="one-block-and-one"),
        pytest.param(8, 4, 1, id="two-blocks-exactly"),
        pytest.param(9, 4, 2, id="two-blocks-and-one"),
        pytest.param(3, 1, 2, id="blocks-of-one"),
    ],
)
def test_last_token_is_always_computed_anew(tokens: int, block_size: int, limit: int) -> None:
    """A fully cached prompt still leaves one token to the engine."""
    assert Prompt(NAMESPACE, range(tokens)).hit_limit_blocks(block_size) == limit


@pytest.mark.parametrize(
    ("creditable", "blocks"), [(None, 2), (12, 2), (8, 2), (7, 1), (3, 0), (0, 0)]
)
def test_only_creditable_tokens_are_keyed(creditable: int | None, blocks: int) -> None:
    """Credit stops at the last full block before an image."""
    prompt = Prompt(NAMESPACE, range(11), creditable_tokens=creditable)

    assert prompt.hit_limit_blocks(4) == blocks
    assert len(prompt.keys(4)) == blocks


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_limit_never_exceeds_the_keys(tokens: int, creditable: int, block_size: int) -> None:
    """A backend may index the keys up to the limit."""
    prompt = Prompt(NAMESPACE, range(tokens), creditable_tokens=min(creditable, tokens))

    assert prompt.hit_limit_blocks(block_size) <= len(prompt.keys(block_size))


def test_keys_are_computed_once_per_block_size() -> None:
    """Several ranks of one block size cost one hashing."""
    prompt = Prompt(NAMESPACE, range(32))

    assert prompt.keys(4) is prompt.keys(4)
    assert len(prompt.keys(8)) == 4


@pytest.mark.parametrize(
    ("kind", "window_tokens", "blocks"),
    [
        pytest.param(GroupKind.FULL, None, 0, id="full"),
        pytest.param(GroupKind.STATE, None, 1, id="state"),
        pytest.param(GroupKind.WINDOW, None, 0, id="unknown-window"),
        pytest.param(GroupKind.WINDOW, 1, 0, id="window-of-the-token-itself"),
        pytest.param(GroupKind.WINDOW, 2, 1, id="one-token-back"),
        pytest.param(GroupKind.WINDOW, 33, 1, id="one-block-back"),
        pytest.param(GroupKind.WINDOW, 34, 2, id="one-token-more"),
        pytest.param(GroupKind.WINDOW, 128, 4, id="gemma"),
    ],
)
def test_group_needs_the_blocks_of_its_window(
    kind: GroupKind, window_tokens: int | None, blocks: int
) -> None:
    """ceil((window - 1) / block size) blocks before the end of a hit."""
    spec = GroupSpec(group=1, kind=kind, block_size=32, window_tokens=window_tokens)

    assert spec.boundary_blocks == blocks


def test_overlap_is_the_sum_of_the_tiers() -> None:
    """Each block counts at one tier only."""
    match = PrefixMatch(
        tokens_by_tier={Tier.GPU: 32, Tier.CPU: 16}, block_size=16, trust=Trust.EXACT, epoch=1
    )

    assert match.tokens == 48


@pytest.mark.parametrize(
    ("places", "extras"),
    [
        pytest.param([("a", 3, 2)], {0: [("a", 3)], 1: [("a", -1)]}, id="over-a-border"),
        pytest.param([("a", 4, 4)], {1: [("a", 0)]}, id="a-whole-block"),
        pytest.param([("a", 1, 1), ("b", 2, 1)], {0: [("a", 1), ("b", 2)]}, id="two-in-a-block"),
        pytest.param([("a", 9, 0)], {2: [("a", 1)]}, id="empty"),
    ],
)
def test_media_are_part_of_the_blocks_they_reach_into(
    places: list[tuple[str, int, int]], extras: dict[int, list[tuple[str, int]]]
) -> None:
    """As engines tell of them: identifier, and where it begins as seen from the block."""
    media = [
        MediumPlace(identifier=name, offset_tokens=offset, tokens=tokens)
        for name, offset, tokens in places
    ]
    told = {number: pack_extras(parts) for number, parts in extras.items()}

    keys = Prompt(NAMESPACE, range(12), media=media).keys(4)

    assert list(keys) == list(
        block_keys(root_key(NAMESPACE), pack_tokens(range(12)), 4, extras=told)
    )
    assert list(keys) != list(Prompt(NAMESPACE, range(12)).keys(4))
