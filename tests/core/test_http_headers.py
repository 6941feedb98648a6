"""Headers pass end to end, and request ids are plain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.http.headers import (
    clean_request_id,
    drop_header,
    find_header,
    pass_answer_headers,
    pass_request_headers,
)

HOP_BY_HOP = [
    b"connection",
    b"keep-alive",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
]


@pytest.mark.parametrize("name", HOP_BY_HOP)
def test_hop_by_hop_headers_end_here(name: bytes) -> None:
    """In both directions."""
    assert pass_request_headers([(name, b"x")]) == ()
    assert pass_answer_headers([(name, b"x")]) == ()


def test_headers_that_connection_names_end_here() -> None:
    """However they are written."""
    headers = [(b"connection", b"Close, X-Private ,x-b"), (b"x-private", b"1"), (b"x-b", b"2")]

    assert pass_request_headers([*headers, (b"x-c", b"3")]) == ((b"x-c", b"3"),)


@pytest.mark.parametrize(
    "name", [b"host", b"content-length", b"expect", b"x-data-parallel-rank", b"x-request-id"]
)
def test_what_is_ours_to_say_is_not_the_clients(name: bytes) -> None:
    """A client can neither pin a rank nor name a transfer."""
    assert pass_request_headers([(name, b"1")]) == ()


def test_engine_cannot_speak_for_us() -> None:
    """Neither our headers nor the request id come from an engine."""
    headers = [(b"x-kvlb-instance", b"x"), (b"x-request-id", b"1"), (b"retry-after", b"3")]

    assert pass_answer_headers(headers) == ((b"retry-after", b"3"),)


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"set-cookie"]), st.binary(max_size=4))))
def test_everything_else_passes_in_order(headers: list[tuple[bytes, bytes]]) -> None:
    """Repeated headers stay repeated."""
    assert pass_request_headers(headers) == tuple(headers)
    assert pass_answer_headers(headers) == tuple(headers)


def test_find_and_drop() -> None:
    """The first of a name; all of a name."""
    headers = ((b"a", b"1"), (b"b", b"2"), (b"a", b"3"))

    assert find_header(headers, b"a") == b"1"
    assert find_header(headers, b"c") is None
    assert drop_header(headers, b"a") == ((b"b", b"2"),)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(b"abc-1.2:3", "abc-1.2:3", id="plain"),
        pytest.param("from-a-body", "from-a-body", id="text"),
        pytest.param(b"a" * 128, "a" * 128, id="longest"),
        pytest.param(b"a" * 129, None, id="too-long"),
        pytest.param(b"", None, id="empty"),
        pytest.param(None, None, id="absent"),
        pytest.param(7, None, id="number"),
        pytest.param(b"a b", None, id="space"),
        pytest.param(b"a\nb", None, id="newline"),
        pytest.param(b"a\n", None, id="trailing-newline"),
        pytest.param("é".encode(), None, id="not-ascii"),
        pytest.param(b"___prefill_addr_1.2.3.4:1_x", None, id="prefill-address"),
        pytest.param(b"x___decode_addr_1.2.3.4:1", None, id="decode-address"),
    ],
)
def test_clean_request_id(raw: object, expected: str | None) -> None:
    """Only what is harmless in a log, a header and a connector is kept."""
    assert clean_request_id(raw) == expected
