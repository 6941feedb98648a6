"""LMCache's notices: what is counted, and what is of no use."""

import msgspec
import pytest

from balancer.core.fleet.transfer_notices import Expected, NoticeBook, NoticeRefusedError


def told(name: str, type_: str = "ProxyNotif") -> bytes:
    """As LMCache's `ProxyNotif` is on the wire: a tagged msgspec struct."""
    return msgspec.msgpack.encode({"type": type_, "req_id": name})


@pytest.fixture
def all_came() -> list[str]:
    return []


@pytest.fixture
def expected(all_came: list[str]) -> Expected:
    return Expected("a", 2, lambda: all_came.append("a"))


def test_every_rank_has_to_say_so(expected: Expected, all_came: list[str]) -> None:
    """With two tensor-parallel ranks one notice is half of the blocks."""
    book = NoticeBook()
    book.expect(expected)
    book.on_message(told("a"))
    after_one = list(all_came)
    book.on_message(told("a"))
    book.on_message(told("a"))

    assert after_one == []
    assert all_came == ["a"]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\xc1", "malformed"),
        (b"\x81\xa1x" + b"\x91" * 100_000, "malformed"),
        (msgspec.msgpack.encode(["a"]), "malformed"),
        (told("a", "AllocRequest"), "other_type"),
        (told("b"), "unexpected"),
    ],
)
def test_what_is_of_no_use_is_refused(expected: Expected, payload: bytes, reason: str) -> None:
    """And named; nothing of it is kept."""
    book = NoticeBook()
    book.expect(expected)

    with pytest.raises(NoticeRefusedError) as refused:
        book.on_message(payload)

    assert refused.value.reason == reason
    assert expected.outstanding == 2


def test_who_is_forgotten_expects_nothing(expected: Expected) -> None:
    """The request has ended; forgetting twice changes nothing."""
    book = NoticeBook()
    book.expect(expected)
    book.forget(expected)
    book.forget(expected)

    with pytest.raises(NoticeRefusedError, match="unexpected"):
        book.on_message(told("a"))
