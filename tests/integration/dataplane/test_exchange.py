"""The ASGI side of an exchange, message by message."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from balancer.core.errors import BadRequestError, BodyTooLargeError, ClientGoneError
from balancer.core.http.body import whole
from balancer.dataplane.exchange import AsgiExchange


def piece(body: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


GONE: dict[str, Any] = {"type": "http.disconnect"}


@pytest.fixture
def exchange() -> Callable[..., AsgiExchange]:
    """Factory of exchanges that receive the given messages."""

    def build(
        messages: Sequence[dict[str, Any]] = (),
        headers: Sequence[tuple[bytes, bytes]] = (),
        sent: list[Any] | None = None,
    ) -> AsgiExchange:
        left = list(messages)

        async def receive() -> Any:
            return left.pop(0)

        async def send(message: Any) -> None:
            if sent is None:
                raise BrokenPipeError
            sent.append(message)

        scope = {"method": "POST", "path": "/x", "query_string": b"", "headers": headers}
        return AsgiExchange(scope, receive, send)

    return build


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([piece(b"abcd", more=False)], id="whole"),
        pytest.param([piece(b"ab", more=True), piece(b"cd", more=False)], id="pieces"),
        pytest.param([piece(b"abcd", more=True), piece(b"", more=False)], id="late-end"),
    ],
)
async def test_body_is_put_together(exchange: Any, messages: Any) -> None:
    """However the server hands it over; the limit itself still passes."""
    assert whole(await exchange(messages).read_body(4)) == b"abcd"


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([piece(b"abcd", more=False)], id="whole"),
        pytest.param([piece(b"ab", more=True), piece(b"cd", more=False)], id="pieces"),
    ],
)
async def test_body_over_the_limit_is_refused(exchange: Any, messages: Any) -> None:
    """One byte too many is too many, declared or not."""
    with pytest.raises(BodyTooLargeError):
        await exchange(messages).read_body(3)
    with pytest.raises(BodyTooLargeError):
        await exchange([], headers=[(b"content-length", b"4")]).read_body(3)


async def test_odd_content_length_is_refused(exchange: Any) -> None:
    """Not every server checks it."""
    with pytest.raises(BadRequestError):
        await exchange([], headers=[(b"content-length", b"-1")]).read_body(3)


@pytest.mark.parametrize("messages", [[GONE], [piece(b"ab", more=True), GONE]])
async def test_client_that_leaves_while_sending(exchange: Any, messages: Any) -> None:
    """Half a body is no request."""
    with pytest.raises(ClientGoneError):
        await exchange(messages).read_body(10)


async def test_gone_waits_for_the_disconnect(exchange: Any) -> None:
    """Late pieces of a body are no disconnect."""
    each = exchange([piece(b"", more=False), piece(b"", more=False), GONE])

    await each.gone()


async def test_failing_send_means_that_the_client_left(exchange: Any) -> None:
    """Servers may say it by an OSError."""
    with pytest.raises(ClientGoneError):
        await exchange([]).start(200, ())


async def test_answer_is_sent_in_order(exchange: Any) -> None:
    """Start, pieces, end; an aborted answer has no end."""
    sent: list[Any] = []
    each = exchange([], sent=sent)

    await each.start(200, ((b"a", b"b"),))
    await each.write(b"x")
    await each.abort()
    await each.finish()

    assert [message["type"].rpartition(".")[2] for message in sent] == ["start", "body", "body"]
    assert [message.get("more_body") for message in sent] == [None, True, False]
