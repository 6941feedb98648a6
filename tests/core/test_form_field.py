"""A field of a form, found between files, however the body is cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.http.form_field import find_field

TYPE = b"multipart/form-data; boundary=----b1"


def part(headers: bytes, value: bytes) -> bytes:
    return b"------b1\r\n" + headers + b"\r\n\r\n" + value + b"\r\n"


END = b"------b1--\r\n"
FIELD = b'Content-Disposition: form-data; name="model"'
UPLOAD = b'Content-Disposition: form-data; name="file"; filename="a.wav"'
DISGUISED = b'\r\n--other\r\nContent-Disposition: form-data; name="model"\r\n\r\nevil\r\n'


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(part(FIELD, b"m") + END, b"m", id="alone"),
        pytest.param(part(UPLOAD, b"\0" * 99) + part(FIELD, b"m") + END, b"m", id="after-a-file"),
        pytest.param(part(FIELD, b"m") + part(FIELD, b"n") + END, b"m", id="first-of-two"),
        pytest.param(part(FIELD, b"") + END, b"", id="empty"),
        pytest.param(part(UPLOAD, DISGUISED) + END, None, id="inside-a-file"),
        pytest.param(part(FIELD + b'; filename="x"', b"m") + END, None, id="a-file-of-that-name"),
        pytest.param(part(FIELD + b"; filename*=utf-8''x", b"m") + END, None, id="encoded-name"),
        pytest.param(part(b"X-Other: 1", b"m") + END, None, id="no-disposition"),
        pytest.param(part(b"Content-Disposition: form-data", b"m") + END, None, id="no-name"),
        pytest.param(
            part(b"content-type: text/plain\r\ncontent-disposition: form-data; name=model", b"m")
            + END,
            b"m",
            id="unquoted-second-line",
        ),
        pytest.param(
            part(b'Content-Disposition: form-data; x-name="model"', b"m") + END, None, id="like"
        ),
        pytest.param(part(FIELD, b"m" * 1024) + END, b"m" * 1024, id="longest"),
        pytest.param(part(FIELD, b"m" * 1025) + END, None, id="too-long"),
        pytest.param(part(b"a: " + b"x" * 9000, b"") + part(FIELD, b"m") + END, b"m", id="headers"),
        pytest.param(b"------b1\r\n" + FIELD, None, id="cut-in-headers"),
        pytest.param(b"------b1\r\n" + FIELD + b"\r\n\r\nm", None, id="cut-in-value"),
        pytest.param(b"", None, id="nothing"),
        pytest.param(b"preamble", None, id="no-boundary"),
    ],
)
def test_field_is_found_between_parts(body: bytes, expected: bytes | None) -> None:
    """In one piece and byte by byte."""
    assert find_field(TYPE, (body,), b"model") == expected
    assert find_field(TYPE, [bytes((each,)) for each in body], b"model") == expected


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        (b'multipart/form-data; boundary="----b1"', b"m"),
        (b"multipart/form-data; charset=utf-8; Boundary=----b1", b"m"),
        (b"multipart/form-data", None),
        (b"multipart/form-data; boundary=", None),
    ],
)
def test_boundary_is_read_as_written(content_type: bytes, expected: bytes | None) -> None:
    """Quoted or not, in any place."""
    assert find_field(content_type, (part(FIELD, b"m") + END,), b"model") == expected


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

    assert find_field(TYPE, pieces, b"model") == value
