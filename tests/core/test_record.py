"""`RequestRecord`: whose cached tokens count."""

from typing import Any

import msgspec
import pytest

from balancer.core.record import EncodeRecord, LegRecord, RequestRecord
from balancer.core.request_line import request_line


def leg(kind: str, cached_tokens: int | None, error: str | None = None) -> LegRecord:
    return LegRecord(
        kind=kind,
        alias="e0",
        overlap_tokens=0,
        started_s=0.0,
        cached_tokens=cached_tokens,
        error=error,
    )


def record(*legs: LegRecord) -> RequestRecord:
    return RequestRecord(request_id="r", path="/v1/completions", arrived_s=0.0, legs=list(legs))


def test_with_a_prefill_leg_its_figure_counts() -> None:
    """The decode engine reports what it was sent as cached (F35)."""
    assert record(leg("prefill", 0), leg("decode", 8192)).cached_tokens == 0


def test_without_a_prefill_leg_the_decode_figure_counts() -> None:
    """The leg was skipped because the cache was there."""
    assert record(leg("decode", 6144)).cached_tokens == 6144


def test_a_failed_prefill_leg_does_not_count() -> None:
    """The one that succeeded does; if none did, the decode leg."""
    failed = leg("prefill", 16, error="no_transfer")

    assert record(failed, leg("prefill", 32), leg("decode", 99)).cached_tokens == 32
    assert record(failed, leg("decode", 99)).cached_tokens == 99


def test_unknown_stays_unknown() -> None:
    """No leg, or an engine that doesn't tell: None, not 0."""
    assert record().cached_tokens is None
    assert record(leg("decode", None)).cached_tokens is None


def test_an_opening_is_not_the_first_token() -> None:
    """A stream's first byte may come before anything is computed; a prefill leg has only that."""
    first = leg("decode", None)
    first.first_byte_s = 1.0
    before = first.computed_s
    first.first_token_s = 2.0

    assert (before, first.computed_s) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ({"encoded": 1, "reused": 1}, "encoded"),
        ({"reused": 2}, "reused"),
        ({"encoded": 1, "local": 1}, "encode_failed"),
        ({"local": 2, "problem": "no_address"}, "no_address"),
    ],
)
def test_what_became_of_media_has_one_word(counts: dict[str, Any], reason: str) -> None:
    """What went wrong counts most."""
    assert EncodeRecord(items=2, **counts).reason == reason


def test_line_tells_of_waiting_only_where_there_was_any() -> None:
    """Most requests don't wait in line."""
    made = record()
    assert "waited_s" not in msgspec.to_builtins(request_line(made))

    made.waited_s = 0.25
    assert request_line(made).waited_s == 0.25


@pytest.mark.parametrize(
    ("fields", "pause_s"),
    [
        pytest.param({}, 0.5, id="ended-well"),
        pytest.param({"first_token_s": None}, 1.0, id="no-opening"),
        pytest.param({"first_token_s": None, "first_byte_s": None}, None, id="no-token"),
        pytest.param({"completion_tokens": 1}, None, id="one-token"),
        pytest.param({"completion_tokens": None}, None, id="no-usage"),
        pytest.param({"error": "stream_cut"}, None, id="cut"),
        pytest.param({"ended_s": None}, None, id="under-way"),
    ],
)
def test_pause_between_tokens_needs_two_and_an_end(
    fields: dict[str, Any], pause_s: float | None
) -> None:
    """From the first token to the end, over all tokens but the first."""
    known: dict[str, Any] = {"first_byte_s": 1.0, "first_token_s": 2.0, "ended_s": 3.0}
    known |= {"kind": "decode", "alias": "a", "overlap_tokens": None, "started_s": 0.0}

    leg = LegRecord(**(known | {"completion_tokens": 3} | fields))

    assert leg.inter_token_s == pause_s
