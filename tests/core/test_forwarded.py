"""What is read of a forwarded body."""

from typing import Any

import msgspec
import pytest

from balancer.core.errors import BadRequestError
from balancer.core.http.body import PiecedBody, size_bytes, whole
from balancer.core.http.forwarded import read_body

FORM = b"multipart/form-data; boundary=b"
JSON = b"application/json"


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
        pytest.param(b"application/json", '{"model":"m"}'.encode("utf-16"), "m", id="utf-16"),
        pytest.param(b"application/json", b"[" * 100_000, None, id="too-deep"),
        pytest.param(b"application/octet-stream", b'{"model":"m"}', None, id="binary"),
        pytest.param(b"", b"", None, id="nothing"),
        pytest.param(FORM, form(FILE, MODEL), "whisper", id="form"),
        pytest.param(FORM, form(TYPED, FILE), "whisper", id="form-typed"),
        pytest.param(FORM, form(FILE), "", id="form-without"),
    ],
)
def test_model_is_read_where_a_body_can_name_one(
    content_type: bytes, body: bytes, expected: Any
) -> None:
    """Nothing if it doesn't, None if it can't."""
    read = read_body(content_type, PiecedBody((body,)), generates=False)

    assert read.model == expected
    assert whole(read.body) == body


def test_form_is_never_joined() -> None:
    """A large upload is handed on in the pieces it came in."""
    body = PiecedBody((form(MODEL)[:20], form(MODEL)[20:]))

    read = read_body(FORM, body, generates=False)

    assert read.body is body
    assert read.model == "whisper"
    assert size_bytes(read.body) == len(form(MODEL))


@pytest.mark.parametrize(
    ("value", "expected"),
    [("resp_1", "resp_1"), ("", None), (None, None), (1, None)],
)
def test_previous_response_is_read(value: Any, expected: str | None) -> None:
    """Of another type it is the engine's to refuse."""
    raw = msgspec.json.encode({"previous_response_id": value, "stream": True})

    read = read_body(JSON, PiecedBody((raw,)), generates=True)

    assert (read.previous_response, read.stream) == (expected, True)


@pytest.mark.parametrize(
    "added",
    [
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"kv_transfer_params": None},
        {"ec_transfer_params": {}},
        {"vllm_xargs": {"kv_cache_report_mode": "full"}},
        {"vllm_xargs": {"kv_transfer_params": "abc"}},
        {"sampling_params": {"extra_args": {"kv_transfer_params": {"do_remote_prefill": True}}}},
        {"request_id": "___prefill_addr_1.2.3.4:5___decode_addr_1.2.3.4:6_x"},
    ],
    ids=str,
)
def test_what_a_client_must_not_set_is_taken_out_of_generations(added: dict[str, Any]) -> None:
    """A transfer is ours to order, on every path that runs a prompt."""
    raw = msgspec.json.encode({"model": "m", "input": "x", **added})

    cleaned = msgspec.json.decode(whole(read_body(JSON, PiecedBody((raw,)), generates=True).body))
    untouched = read_body(JSON, PiecedBody((raw,)), generates=False)

    assert cleaned["input"] == "x"
    assert cleaned != msgspec.json.decode(raw)
    assert whole(untouched.body) is raw


@pytest.mark.parametrize(
    "added", [{}, {"session_id": "s"}, {"request_id": "r"}, {"vllm_xargs": {"a": 1}}], ids=str
)
def test_harmless_bodies_keep_their_bytes(added: dict[str, Any]) -> None:
    """Nothing is written anew for its own sake."""
    raw = b" " + msgspec.json.encode({"model": "m", **added})

    assert whole(read_body(JSON, PiecedBody((raw,)), generates=True).body) is raw


def test_generation_nested_too_deep_for_us_is_refused() -> None:
    """An engine might read on, up to a field that it must not see."""
    raw = b'{"input":' + b"[" * 100_000 + b"]" * 100_000 + b',"kv_transfer_params":{}}'

    with pytest.raises(BadRequestError):
        read_body(JSON, PiecedBody((raw,)), generates=True)
    assert whole(read_body(JSON, PiecedBody((raw,)), generates=False).body) is raw


def xargs_form(*values: str) -> tuple[bytes, PiecedBody]:
    """With one field `vllm_xargs` for each value."""
    parts = ['--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n']
    parts += [
        f'--b\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n\r\n{value}\r\n'
        for value in values
    ]
    return b"multipart/form-data; boundary=b", PiecedBody(("".join([*parts, "--b--"]).encode(),))


@pytest.mark.parametrize(
    "values",
    [
        ['{"kv_transfer_params": "abc"}'],
        ['{"a": 1}', '{"kv_cache_\\u0072eport_mode": "full"}'],
        ['{"ec_transfer_params": NaN}'],
        ['{"session_id": "kvlb-full-report"}'],
        ["[" * 60_000],
        ["x" * 70_000],
    ],
    ids=["plain", "second", "not_strict", "session", "deep", "long"],
)
def test_form_that_sets_what_a_client_must_not_is_refused(values: list[str]) -> None:
    """It can't be rewritten without a copy of its files."""
    kind, body = xargs_form(*values)

    with pytest.raises(BadRequestError, match="vllm_xargs"):
        read_body(kind, body, generates=True)
    assert read_body(kind, body, generates=False).body is body


@pytest.mark.parametrize("value", ['{"top_k": 3}', "[1]", "{", "\x80"], ids=str)
def test_form_with_other_arguments_passes(value: str) -> None:
    """So does what is no JSON: the engine says so."""
    kind, body = xargs_form(value)

    assert read_body(kind, body, generates=True).body is body
