"""The model a forwarded body names."""

from typing import Any

import pytest

from balancer.core.forwarded import named_model

FORM = b"multipart/form-data; boundary=b"


def form(*parts: bytes) -> bytes:
    return b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + b"--b--\r\n"


FILE = (
    b'content-disposition: form-data; name="file"; filename="a"\r\n'
    b"content-type: audio/wav\r\n\r\n\x00\r\n\r\n\xff"
)
MODEL = b'content-disposition: form-data; name="model"\r\n\r\nwhisper'
TYPED = b"Content-Disposition: form-data; name=model\r\nContent-Type: text/plain\r\n\r\nwhisper"


@pytest.mark.parametrize(
    ("content_type", "body", "expected"),
    [
        pytest.param(b"application/json", b'{"input":[1],"model":"m"}', "m", id="json"),
        pytest.param(b"application/json; charset=utf-8", b'{"model":"m"}', "m", id="charset"),
        pytest.param(b"application/json", b"{}", "", id="json-without"),
        pytest.param(b"application/json", b'{"model":null}', "", id="json-null"),
        pytest.param(b"application/json", b'{"model":42}', 42, id="json-number"),
        pytest.param(b"application/json", b'\xef\xbb\xbf{"model":"m"}', "m", id="byte-order-mark"),
        pytest.param(b"application/json", b'{"model":"m","input":"\\ud800"}', "m", id="surrogate"),
        pytest.param(b"application/json", b"{", None, id="malformed"),
        pytest.param(b"application/json", b"[]", None, id="no-object"),
        pytest.param(b"application/octet-stream", b'{"model":"m"}', None, id="binary"),
        pytest.param(b"", b"", None, id="nothing"),
        pytest.param(FORM, form(FILE, MODEL), "whisper", id="form"),
        pytest.param(FORM, form(TYPED, FILE), "whisper", id="form-typed"),
        pytest.param(FORM, form(FILE), "", id="form-without"),
    ],
)
def test_named_model(content_type: bytes, body: bytes, expected: Any) -> None:
    """Read where a body can name one; "" if it doesn't, None if it can't."""
    assert named_model(content_type, body) == expected
