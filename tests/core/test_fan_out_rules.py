"""Commands to several engines: which there are, and how the whole went."""

import pytest

from balancer.core.fleet.fan_out import (
    COMMANDS,
    MAX_SHOWN_BYTES,
    CommandResult,
    overall_status,
    shown_body,
)
from balancer.core.http.engine_paths import belongs_to_engines


def result(status: int | None) -> CommandResult:
    return CommandResult(alias="a", status=status, body="")


@pytest.mark.parametrize("path", COMMANDS)
def test_command_is_no_clients_path(path: str) -> None:
    """It never goes to one engine by chance."""
    assert not belongs_to_engines(path)


@pytest.mark.parametrize(
    ("statuses", "overall"),
    [([200, 204], 200), ([], 200), ([200, 404], 207), ([None, 200], 207), ([None, 500], 502)],
)
def test_whole_is_well_if_every_engine_is(statuses: list[int | None], overall: int) -> None:
    """207 for some, 502 for none."""
    assert overall_status([result(each) for each in statuses]) == overall


def test_result_is_shown_by_alias() -> None:
    """No address, and no more of the answer than fits."""
    assert result(None).shown() == {"instance": "a", "ok": False, "status": None, "body": ""}
    assert shown_body(b"\xff") == "\ufffd"
    assert shown_body(b"x" * MAX_SHOWN_BYTES) == "x" * MAX_SHOWN_BYTES
    assert shown_body(b"x" * (MAX_SHOWN_BYTES + 1)) == "x" * MAX_SHOWN_BYTES + "…"
