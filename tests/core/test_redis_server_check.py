"""What is said of a server that isn't set up for an index."""

import pytest

from indexer.redis_index.server_check import advice


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param(
            {"maxmemory-policy": "noeviction", "lazyfree-lazy-expire": "yes"}, [], id="ok"
        ),
        pytest.param({}, [], id="older-than-the-setting"),
        pytest.param({"maxmemory-policy": "allkeys-lru"}, ["noeviction"], id="evicting"),
        pytest.param({"lazyfree-lazy-expire": "no"}, ["lazyfree-lazy-expire"], id="eager"),
    ],
)
def test_advice_names_the_setting_to_change(settings: dict[str, str], words: list[str]) -> None:
    """And nothing that is as it should be."""
    found = advice(settings)

    assert len(found) == len(words)
    assert all(word in each for word, each in zip(words, found, strict=True))
