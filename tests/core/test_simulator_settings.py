"""Settings of a simulated engine and what is refused."""

from typing import Any

import pytest

from simulator.core.errors import SettingsError
from simulator.core.settings import EngineSettings, parse_version


@pytest.mark.parametrize(
    ("text", "version"),
    [("0.33", (0, 33, 0)), ("0.10.2", (0, 10, 2)), ("0.32.0+cpu", (0, 32, 0))],
)
def test_releases_compare_as_numbers(text: str, version: tuple[int, int, int]) -> None:
    """A release is three numbers, whatever follows."""
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", "newest"),
        ("block_size", 0),
        ("num_blocks", 1),
        ("inter_token_ms", -1.0),
        ("max_model_len", 0),
        ("max_model_len", 10_000_000),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(field: str, value: object) -> None:
    """The message names the setting."""
    changes: dict[str, Any] = {field: value}

    with pytest.raises(SettingsError, match=field):
        EngineSettings(**changes)


def test_context_is_what_the_cache_holds() -> None:
    """Without a limit a prompt may fill the cache, up to the largest default."""
    assert EngineSettings(num_blocks=11, block_size=16).context_tokens == 160
    assert EngineSettings(num_blocks=100_000).context_tokens == 32_768
    assert EngineSettings(max_model_len=100).context_tokens == 100
