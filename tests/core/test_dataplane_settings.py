"""Settings of the data plane are typed, and refused where they can't work."""

from typing import Any

import msgspec
import pytest

from balancer.core.settings.dataplane import DataPlaneSettings


def test_defaults_stay_below_the_engines_keep_alive() -> None:
    """A connection is retired by us, not by vLLM's 5 s (F50)."""
    assert DataPlaneSettings().keep_alive_s < 5


@pytest.mark.parametrize(
    "value",
    [
        {"connect_timeout_s": 0},
        {"idle_timeout_s": -1},
        {"max_body_bytes": 0},
        {"headers": "some"},
        {"retries": -1},
        {"total_timeout_s": 300},
    ],
)
def test_what_cannot_work_is_refused(value: dict[str, Any]) -> None:
    """Wrong values and unknown keys, among them the total limit that isn't (F49)."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(value, DataPlaneSettings)
