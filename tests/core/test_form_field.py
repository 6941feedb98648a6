"""A field of a form, found between files, however the body is cut."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.errors import BadRequestError
from balancer.core.http.form_field import read_fields

TYPE = b"multipart/form-data; boundary=----b1"


def part(headers: bytes, value: bytes) -> bytes:
    return b"------b1\r\n" + headers + b"\r\n\r\n" + value + b"\r\n"


END = b"------b1--\r\n"
FIELD = b'Content-Disposition: form-data; name="model"'
UPLOAD = b'Content-Disposition: form-data; name="file"; filename="a.wav"'
DISGUISED = b'\r\n--other\r\nContent-Disposition: form-data; name="model"\r\n\r\nevil\r\n'


ASKED = {b"model": 1024}


def in_pieces(body: bytes, size_bytes: int) -> list[bytes]:
    return [body[at : at + size_bytes] for at in range(0, len(body), size_bytes)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(part(FIELD, b"m") + END, b"m", id="alone"),
        pytest.param(part(UPLOAD, b"\0" * 99) + part(FIELD, b"m") + END, b"m", id="after-a-file"),
        pytest.param(part(FIELD, b"") + END, b"", id="empty"),
        pytest.param(part(UPLOAD, DISGUISED) + END, None, id="inside-a-file"),
        pytest.param(part(FIELD + b'; filename="x"', b"m") + END, None, id="a-file-of-that-name"),
        pytest.param(
            part(b"content-type: text/plain\r\ncontent-disposition: form-data; name=model", b"m")
            + END,
            b"m",
            id="unquoted-second-line",
        ),
        pytest.param(part(FIELD, b"m" * 1024) + END, b"m" * 1024, id="longest"),
        pytest.param(part(UPLOAD, b"\r\n" * 20_000) + part(FIELD, b"m") + END, b"m", id="long"),
        pytest.param(END, None, id="no-parts"),
        pytest.param(END + part(FIELD, b"m"), None, id="behind-the-end"),
    ],
)
def test_field_is_found_between_parts(body: bytes, expected: bytes | None) -> None:
    """In one piece and byte by byte."""
    for size_bytes in (len(body), 1, 17_000):
        found = read_fields(TYPE, in_pieces(body, size_bytes), ASKED)
        assert found.get(b"model") == expected


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param(part(FIELD, b"m") * 2 + END, "`model` is there twice", id="twice"),
        pytest.param(part(FIELD, b"m" * 1025) + END, "at most 1024 bytes", id="too-long"),
        pytest.param(part(b"a: " + b"x" * 9000, b"") + END, "8192", id="long-head"),
        pytest.param(b"------b1\r\n" + FIELD, "8192", id="cut-in-head"),
        pytest.param(b"------b1\r\n" + FIELD + b"\r\n\r\nm", "to be closed", id="cut-in-value"),
        pytest.param(part(UPLOAD, b"m"), "isn't closed", id="cut-in-file"),
        pytest.param(part(FIELD, b"m") + b"------b1", "isn't closed", id="cut-behind-boundary"),
        pytest.param(part(UPLOAD, b"\r\n------b1x") + END, "goes on", id="goes-on"),
        pytest.param(b"", "begin with its boundary", id="nothing"),
        pytest.param(b"preamble\r\n" + END, "begin with its boundary", id="preamble"),
        pytest.param(part(UPLOAD, b"") * 1001 + END, "more than 1000 parts", id="many"),
    ],
)
def test_form_over_its_limits_is_refused(body: bytes, words: str) -> None:
    """With what is wrong, in one piece and in many."""
    for size_bytes in (len(body) + 1, 1):
        with pytest.raises(BadRequestError, match=words):
            read_fields(TYPE, in_pieces(body, size_bytes), ASKED)


def test_boundary_is_found_where_two_large_pieces_meet() -> None:
    """Or a large one and what little is left."""
    body = part(UPLOAD, b"-" * 20_000) + part(FIELD, b"m") + END

    for cut in range(body.index(b"\r\n------b1") - 2, len(body)):
        assert read_fields(TYPE, (body[:cut], body[cut:]), ASKED) == {b"model": b"m"}
    filled = part(FIELD, b"m") + part(UPLOAD, b"-" * 40_000) + END
    for cut in range(20_000, 20_002):
        pieces = (filled[:cut], filled[cut:-5], filled[-5:])
        assert read_fields(TYPE, pieces, ASKED) == {b"model": b"m"}


def test_thousand_parts_pass() -> None:
    """As many as engines take."""
    body = part(UPLOAD, b"") * 999 + part(FIELD, b"m") + END

    assert read_fields(TYPE, (body,), ASKED) == {b"model": b"m"}


@pytest.mark.parametrize(
    "unit",
    [
        pytest.param(b"\r\n--b", id="boundaries"),
        pytest.param(b"\r\n--b\r\n" + FIELD[:-6] + b'x"\r\n\r\n', id="parts"),
        pytest.param(b"\r\n--bx", id="nearly-boundaries"),
    ],
)
def test_form_of_boundaries_alone_is_refused_at_once(unit: bytes) -> None:
    """Each began 8 KiB that were searched again: 1 MiB of them took seconds."""
    read = 0

    def pieces() -> Iterator[bytes]:
        nonlocal read
        yield b"--b"
        for _ in range(1000):
            read += 1
            yield unit * 1000

    with pytest.raises(BadRequestError):
        read_fields(b"multipart/form-data; boundary=b", pieces(), ASKED)
    assert read <= 8


@given(
    st.binary(max_size=300),
    st.binary(max_size=40).filter(lambda each: b"\r" not in each),
    st.lists(st.integers(min_value=0, max_value=600), max_size=8),
)
def test_cuts_change_nothing(file: bytes, value: bytes, cuts: list[int]) -> None:
    """The same field wherever the body was cut."""
    if b"------b1" in file:
        return
    body = part(UPLOAD, file) + part(FIELD, value) + END
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    pieces = [body[start:end] for start, end in pairwise(places)]

    assert read_fields(TYPE, pieces, ASKED) == {b"model": value}
