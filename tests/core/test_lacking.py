"""Instances that don't have a path, by what they said."""

import pytest

from balancer.core.fleet.lacking import BELIEVED_S, LackingPaths, may_lack, says_lacking
from indexer.core.types import InstanceId

ONE, TWO = InstanceId("http://one"), InstanceId("http://two")


def test_it_holds_for_a_minute_for_that_instance_and_path() -> None:
    """Engines restart with other flags."""
    lacking = LackingPaths()
    lacking.note(ONE, "/v1/messages", 10.0)

    assert lacking.lacks(ONE, "/v1/messages", 10.0 + BELIEVED_S - 0.1)
    assert not lacking.lacks(ONE, "/v1/messages", 10.0 + BELIEVED_S)
    assert not lacking.lacks(TWO, "/v1/messages", 10.0)
    assert not lacking.lacks(ONE, "/v1/responses", 10.0)


def test_memory_is_bounded() -> None:
    """What is over makes room; without any over, nothing more is learned."""
    lacking = LackingPaths()
    for number in range(4096):
        lacking.note(ONE, f"/{number}", 0.0)
    lacking.note(TWO, "/a", 1.0)
    assert not lacking.lacks(TWO, "/a", 1.0)

    lacking.note(TWO, "/a", BELIEVED_S)
    assert lacking.lacks(TWO, "/a", BELIEVED_S)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (404, b'{"error":{"message":"Not Found","type":"Not Found","code":404}}', True),
        (404, b'{"object":"error","message":"Not Found","type":"Not Found","code":404}', True),
        (404, b'{"object":"error","message":"no x","type":"NotFoundError","code":404}', False),
        (404, b'{"object":"error","message":"Not Found","type":["Not Found"]}', False),
        (404, b'{"type":"Not Found"}', False),
        (404, b'{"detail":"Not Found"}', True),
        (404, b"", True),
        (404, b'{"error":{"message":"The model x","type":"NotFoundError","code":404}}', False),
        (404, b"<html>", False),
        (404, b"[]", False),
        (501, b'{"error":{"type":"NotImplementedError"}}', True),
        (501, b'{"error":{"message":"no"}}', True),
        (501, b"no", True),
        (501, b"1", True),
        (403, b'{"error":{"type":"PermissionDeniedError"}}', True),
        (403, b'{"error":"Unauthorized"}', False),
        (403, b"[" * 100_000, False),
        (403, b"1", False),
    ],
)
def test_only_a_missing_path_counts(status: int, body: bytes, expected: bool) -> None:
    """An unknown model is no missing path."""
    assert may_lack(status)
    assert says_lacking(status, body) is expected
    assert not may_lack(400)
