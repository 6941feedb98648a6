"""The side reader: bytes pass whatever their cuts, usage and end are known."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.http.sse import SseReader

DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
OPENING = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'


def read(*chunks: bytes, withhold: bool = True) -> tuple[bytes, SseReader]:
    reader = SseReader(withhold_usage=withhold)
    passed = b"".join(reader.feed(chunk) for chunk in chunks)
    return passed + reader.finish(), reader


line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
payloads = st.sampled_from(
    [
        b'{"choices":[{"text":"\xf0\x9f\x98\x80"}]}',
        b'{"choices":[{"text":"\\"usage\\""}],"usage":{"prompt_tokens":1}}',
        b'{"choices":[],"usage":null}',
        b'{"choices":[{"text":"[DONE]"}]}',
        b'{"error":null,"text":"\\ud800"}',
        b"not json",
        b"",
    ]
)


@st.composite
def events(draw: st.DrawFn) -> bytes:
    """One event: a comment or a name, perhaps data; its own kind of line ends."""
    lines = draw(st.lists(st.sampled_from([b": ping", b"event: x"]), min_size=1, max_size=2))
    lines += [b"data: " + payload for payload in draw(st.lists(payloads, max_size=2))]
    end = draw(line_ends)
    return b"".join(line + end for line in [*lines, b""])


@st.composite
def cut_streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A whole stream, and the same in arbitrary pieces."""
    stream = b"".join(draw(st.lists(events(), max_size=6))) + DONE
    cuts = sorted(draw(st.sets(st.integers(1, len(stream)), max_size=12)))
    edges = [0, *cuts, len(stream)]
    return stream, [stream[a:b] for a, b in pairwise(edges)]


@given(cut_streams(), st.booleans())
def test_a_complete_stream_passes_byte_for_byte(
    stream: tuple[bytes, list[bytes]], withhold: bool
) -> None:
    """Without a trailing usage chunk nothing is changed, wherever the network cuts."""
    whole, pieces = stream

    passed, reader = read(*pieces, withhold=withhold)

    assert passed == whole
    assert reader.is_done


@given(st.sets(st.integers(1, len(TOKEN + USAGE + DONE)), max_size=20))
def test_trailing_usage_is_withheld_and_read_whatever_the_cuts(cuts: set[int]) -> None:
    """The chunk we asked for doesn't show; its numbers are known."""
    stream = TOKEN + USAGE + DONE
    edges = [0, *sorted(cuts), len(stream)]

    passed, reader = read(*(stream[a:b] for a, b in pairwise(edges)))

    assert passed == TOKEN + DONE
    assert reader.usage is not None
    assert (reader.usage.prompt_tokens, reader.usage.completion_tokens) == (3, 2)


def test_usage_that_the_client_asked_for_passes() -> None:
    """It is read all the same."""
    passed, reader = read(TOKEN, TOKEN, USAGE + DONE, withhold=False)

    assert passed == TOKEN + TOKEN + USAGE + DONE
    assert reader.usage is not None


def test_usage_chunk_before_tokens_is_the_engines_own() -> None:
    """Only what stands just before the end was ours."""
    assert read(USAGE, TOKEN, DONE)[0] == USAGE + TOKEN + DONE


def test_comments_around_a_withheld_chunk_pass_in_order() -> None:
    """Keep-alives between usage and the end are the client's; order holds if usage returns."""
    ping = b": ping\n\n"

    assert read(TOKEN, USAGE, ping, DONE)[0] == TOKEN + ping + DONE
    assert read(TOKEN, USAGE, ping, TOKEN, DONE)[0] == TOKEN + USAGE + ping + TOKEN + DONE


def test_usage_with_choices_is_not_withheld() -> None:
    """A token that carries usage is a token."""
    both = b'data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":5}}\n\n'

    passed, reader = read(both, DONE)

    assert passed == both + DONE
    assert reader.usage is not None
    assert reader.usage.prompt_tokens == 5


def test_usage_that_engines_tell_unasked_passes() -> None:
    """Those with `--enable-force-include-usage` tell it on every event; nobody asks for that."""
    each = b'data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'

    passed, reader = read(each, each, USAGE, DONE)

    assert passed == each + each + USAGE + DONE
    assert reader.usage is not None
    assert reader.usage.completion_tokens == 2


def test_last_usage_counts() -> None:
    """Usage on every chunk is a running total."""
    running = b'data: {"choices":[{}],"usage":{"completion_tokens":1}}\n\n'

    assert read(running, USAGE, DONE)[1].usage == read(USAGE, DONE)[1].usage


def test_withheld_chunk_of_a_cut_stream_is_dropped() -> None:
    """There was no end, but there is the number."""
    passed, reader = read(TOKEN, USAGE)

    assert (passed, reader.is_done) == (TOKEN, False)
    assert reader.usage is not None


def test_half_an_event_of_a_cut_stream_is_dropped() -> None:
    """The client never reads a broken event."""
    assert read(TOKEN, b'data: {"cho')[0] == TOKEN


def test_unterminated_done_is_an_end() -> None:
    """An engine may close right after the line."""
    passed, reader = read(TOKEN, b"data: [DONE]\n")

    assert passed == TOKEN + b"data: [DONE]\n"
    assert reader.is_done


def test_bytes_after_done_pass() -> None:
    """What an engine adds is not ours to judge."""
    assert read(DONE, b": bye\n\n", b"tail")[0] == DONE + b": bye\n\ntail"


@pytest.mark.parametrize("text", [b'"[DONE]"', b'"usage" "error"'])
def test_words_in_a_text_mean_nothing(text: bytes) -> None:
    """Only the event's own fields count."""
    event = b"data: " + json.dumps({"choices": [{"text": text.decode()}]}).encode() + b"\n\n"

    passed, reader = read(event)

    assert (passed, reader.is_done, reader.has_error, reader.usage) == (event, False, False, None)


def test_error_event_is_noticed() -> None:
    """An error inside a stream of status 200."""
    passed, reader = read(b'data: {"error":{"message":"x"}}\n\n', DONE)

    assert reader.has_error
    assert passed.endswith(DONE)


@pytest.mark.parametrize(
    ("chunk", "has_data"),
    [
        pytest.param(TOKEN, True, id="event"),
        pytest.param(b": ping\n\n", False, id="comment"),
        pytest.param(b": data:\n\n", False, id="data-in-comment"),
        pytest.param(b"event: x\ndata: y\n\n", True, id="named"),
        pytest.param(b"data: half", False, id="half"),
        pytest.param(OPENING, False, id="opening"),
        pytest.param(OPENING + OPENING, False, id="two-openings"),
        pytest.param(OPENING + TOKEN, True, id="opening-and-token"),
        pytest.param(OPENING.replace(b'""', b'"Hi"'), True, id="role-and-text"),
        pytest.param(OPENING.replace(b"delta", b"other"), True, id="unknown-shape"),
        pytest.param(OPENING.replace(b"}]", b"}"), True, id="no-json"),
        pytest.param(b'data: {"choices":[],"role":""}\n\n', True, id="no-choices"),
        pytest.param(OPENING.replace(b'""', b'"' + b"x" * 5000 + b'"'), True, id="long"),
    ],
)
@pytest.mark.parametrize("width", [1, 7, 10_000], ids=["bytewise", "sevens", "whole"])
def test_first_token_is_the_first_data_that_says_something(
    chunk: bytes, has_data: bool, width: int
) -> None:
    """A keep-alive comment is no token, nor is a role: engines may send both before they compute."""
    reader = SseReader(withhold_usage=True)
    for start in range(0, len(chunk), width):
        reader.feed(chunk[start : start + width])

    assert reader.has_data is has_data


def test_token_that_was_seen_before_is_not_looked_for() -> None:
    """Whoever looked at the first bytes knows."""
    assert SseReader(withhold_usage=True, has_data=True).has_data


@pytest.mark.parametrize(
    ("chunk", "usage", "has_error"),
    [
        pytest.param({"usage": {"input_tokens": 3}}, 3, False, id="other-words"),
        pytest.param({"usage": {"prompt_tokens": 3}, "error": {"code": 500}}, 3, True, id="error"),
    ],
)
def test_unusual_chunk_of_usage_is_read_all_the_same(
    chunk: dict[str, object], usage: int, has_error: bool
) -> None:
    """It has no choices either."""
    data = json.dumps({"choices": [], **chunk}, separators=(",", ":")).encode()
    _, reader = read(TOKEN, b"data: " + data + b"\n\n", DONE)

    assert reader.usage is not None
    assert (reader.usage.prompt_tokens, reader.has_error) == (usage, has_error)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
@pytest.mark.parametrize("step", [1, 3, 70_000], ids=["bytewise", "threes", "large"])
def test_large_event_passes_without_being_kept(end: bytes, step: int) -> None:
    """Memory stays bounded; what follows is read again."""
    large = b"data: " + b"x" * 70_000 + end
    stream = large + TOKEN + USAGE + DONE
    reader = SseReader(withhold_usage=True)
    passed = [reader.feed(large[:69_000])]
    was_inside = reader.is_inside_event
    passed += [reader.feed(stream[at : at + step]) for at in range(69_000, len(stream), step)]

    assert b"".join(passed) + reader.finish() == large + TOKEN + DONE
    assert was_inside
    assert not reader.is_inside_event
    assert reader.usage is not None


def test_usage_event_held_before_a_large_one_is_released() -> None:
    """It was not the last."""
    large = b"data: " + b"x" * 70_000

    assert read(USAGE, large, b"\n\n", DONE)[0] == USAGE + large + b"\n\n" + DONE


def test_last_line_end_may_come_later() -> None:
    """A CR at the end of a chunk may be half a CRLF; the event waits for it."""
    reader = SseReader(withhold_usage=True)

    assert reader.feed(b"data: a\r\n\r") == b""
    assert reader.feed(b"\ndata: b\n\n") == b"data: a\r\n\r\ndata: b\n\n"


def test_unreadable_usage_is_no_usage() -> None:
    """Odd shapes pass and count nothing."""
    for odd in (b'{"usage":[]}', b'{"usage":}', b'["usage"]'):
        passed, reader = read(b"data: " + odd + b"\n\n", DONE)

        assert passed == b"data: " + odd + b"\n\n" + DONE
        assert reader.usage is None
