"""What is changed in a body: as little as possible, and never the meaning."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.errors import BadRequestError
from balancer.core.http.forbidden import without_forbidden
from balancer.core.http.rewrite import (
    check_generate_body,
    decode_body,
    encode_body,
    splice_field,
    splice_usage,
    wants_usage,
    with_usage,
)
from balancer.core.request import Endpoint

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = ["model", "prompt", "kv_transfer_params", "ec_transfer_params", "request_id", "seed"]
bodies = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), values, max_size=6)


@given(bodies)
def test_removal_takes_the_forbidden_and_nothing_else(body: dict[str, Any]) -> None:
    """Whatever a client sends, the rest stays as it is; an innocent body is the very object."""
    before = json.dumps(body)

    clean = without_forbidden(body)

    assert json.dumps(body) == before
    assert not {"kv_transfer_params", "ec_transfer_params"} & clean.keys()
    kept = {key: value for key, value in body.items() if key in clean}
    assert clean == kept
    assert (clean is body) == (len(clean) == len(body))


def test_report_mode_goes_and_its_neighbours_stay() -> None:
    """`vllm_xargs` has other uses."""
    body = {"vllm_xargs": {"kv_cache_report_mode": "full", "a": 1}, "b": 2}

    assert without_forbidden(body) == {"vllm_xargs": {"a": 1}, "b": 2}
    assert without_forbidden({"vllm_xargs": [1]}) == {"vllm_xargs": [1]}


def test_arguments_of_sampling_parameters_are_cleaned_alike() -> None:
    """Engines read both as one."""
    args = {"kv_transfer_params": {}, "ec_transfer_params": {}, "kv_cache_report_mode": "full"}
    body = {"sampling_params": {"extra_args": {**args, "a": 1}, "n": 1}, "b": 2}
    innocent = {"sampling_params": {"extra_args": {"a": 1}}}

    assert without_forbidden(body) == {"sampling_params": {"extra_args": {"a": 1}, "n": 1}, "b": 2}
    assert without_forbidden(innocent) is innocent


@given(st.dictionaries(st.text(max_size=8), values, max_size=5), st.sampled_from(["", " \n", "\t"]))
def test_spliced_bytes_say_the_same_with_usage(body: dict[str, Any], space: str) -> None:
    """Decoding what is sent gives the client's body and the option, in any formatting."""
    body = {**body, "stream": True}
    body.pop("stream_options", None)
    raw = (space + json.dumps(body, indent=1 if space else None)).encode()

    sent = json.loads(splice_usage(body, raw))

    assert sent == with_usage(json.loads(raw))


def test_a_field_is_spliced_in_and_the_rest_stays() -> None:
    """Megabytes of a picture aren't encoded anew for it; what is no UTF-8 has to be."""
    raw = b' {"messages": [1.0], "x": 7}'
    sent = splice_field(raw, "ec_transfer_params", {"a": 1})

    assert sent == b' {"ec_transfer_params":{"a":1},"messages": [1.0], "x": 7}'
    assert splice_field(raw.decode().encode("utf-16"), "ec_transfer_params", {}) is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(None, {"include_usage": True}, id="null"),
        pytest.param({}, {"include_usage": True}, id="empty"),
        pytest.param({"include_usage": False, "x": 1}, {"include_usage": True, "x": 1}, id="false"),
        pytest.param({"continuous_usage_stats": True}, {"include_usage": True}, id="continuous"),
    ],
)
def test_present_options_are_completed(options: object, expected: dict[str, Any]) -> None:
    """What else was asked stays, but for what include_usage would wake."""
    body = {"stream": True, "stream_options": options}

    assert json.loads(splice_usage(body, b"unused")) == {"stream": True, "stream_options": expected}


@pytest.mark.parametrize(
    ("body", "wants"),
    [
        ({"stream_options": {"include_usage": True}}, True),
        ({"stream_options": {"include_usage": "true"}}, True),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": 0}}, False),
        ({"stream_options": None}, False),
        ({}, False),
    ],
)
def test_wants_usage(body: dict[str, Any], wants: bool) -> None:
    """Only an explicit yes counts."""
    assert wants_usage(body) is wants


@given(bodies)
def test_encoding_keeps_values(body: dict[str, Any]) -> None:
    """A body that had to change still says what it said."""
    assert json.loads(encode_body(body)) == json.loads(json.dumps(body))


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b'"x"', b'{"a":"\xff"}', b"[" * 5000, b"\xef\xbb\xbf{"]
)
def test_what_is_no_object_is_refused_without_quoting_it(raw: bytes) -> None:
    """The message says where, never what."""
    with pytest.raises(BadRequestError) as caught:
        decode_body(raw)

    assert "\\xff" not in caught.value.message


OK_BODIES = [
    (Endpoint.CHAT, {"messages": []}),
    (Endpoint.CHAT, {"messages": [{}], "stream": None, "model": "m"}),
    (Endpoint.COMPLETIONS, {"prompt": ""}),
    (Endpoint.COMPLETIONS, {"prompt": [[1]], "stream": True, "stream_options": {}}),
    (Endpoint.COMPLETIONS, {"prompt_embeds": "x", "stream_options": None}),
    (Endpoint.COMPLETIONS, {"prompt": "p", "stream": 1}),
    (
        Endpoint.COMPLETIONS,
        {"prompt": "p", "stream": "On", "stream_options": {"include_usage": "yes"}},
    ),
]


@pytest.mark.parametrize(("endpoint", "body"), OK_BODIES)
def test_values_are_the_engines_business(endpoint: Endpoint, body: dict[str, Any]) -> None:
    """Nothing is refused that an engine may take or wants to refuse itself."""
    check_generate_body(endpoint, body)


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (Endpoint.CHAT, {}, "messages"),
        (Endpoint.CHAT, {"messages": None}, "messages"),
        (Endpoint.CHAT, {"messages": {}}, "messages"),
        (Endpoint.CHAT, {"messages": [], "model": ["m"]}, "model"),
        (Endpoint.COMPLETIONS, {}, "prompt"),
        (Endpoint.COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
        (Endpoint.COMPLETIONS, {"prompt": "p", "stream": 2}, "stream"),
        (Endpoint.COMPLETIONS, {"prompt": "p", "stream_options": []}, "stream_options"),
        (
            Endpoint.COMPLETIONS,
            {"prompt": "p", "stream_options": {"include_usage": "oui"}},
            "stream_options.include_usage",
        ),
    ],
)
def test_wrong_types_are_refused_by_name(
    endpoint: Endpoint, body: dict[str, Any], param: str
) -> None:
    """The field at fault is told."""
    with pytest.raises(BadRequestError) as caught:
        check_generate_body(endpoint, body)

    assert caught.value.param == param
    assert param in caught.value.message


def test_request_id_that_names_engines_goes() -> None:
    """Connectors that read addresses from ids would follow it."""
    assert without_forbidden({"request_id": "___decode_addr_1:2", "a": 1}) == {"a": 1}
    assert without_forbidden({"request_id": "abc"}) == {"request_id": "abc"}


@given(bodies)
def test_an_object_is_decoded_as_it_is(body: dict[str, Any]) -> None:
    """Every JSON object is a body."""
    decoded = decode_body(json.dumps(body, allow_nan=False).encode())

    assert decoded.value == json.loads(json.dumps(body))


PLAIN = '{"prompt":"\u00e9","stream":true}'


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-32-be"])
def test_what_engines_read_as_json_is_read(encoding: str) -> None:
    """Python's parser, and so an engine, takes more than UTF-8."""
    decoded = decode_body(PLAIN.encode(encoding))

    assert decoded.value == {"prompt": "\u00e9", "stream": True}
    assert decoded.is_unicode


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-be"])
def test_usage_is_asked_for_in_every_encoding(encoding: str) -> None:
    """What is sent can be read by the engine, too."""
    body = decode_body(PLAIN.encode(encoding)).value

    sent = splice_usage(body, PLAIN.encode(encoding))

    assert json.loads(sent) == {**body, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("raw", [b'{"a":"x\\ud800"}', b'{"a":"x\xed\xa0\x80"}'])
def test_lone_surrogate_is_kept_and_told(raw: bytes) -> None:
    """Engines take it; a body that has to be written anew holds it as an escape."""
    decoded = decode_body(raw)

    assert not decoded.is_unicode
    assert json.loads(encode_body(decoded.value)) == {"a": "x\ud800"}


def test_numbers_that_are_none_are_read() -> None:
    """Written anew they are null, the nearest that JSON has."""
    decoded = decode_body(b'{"a":NaN,"b":-Infinity,"c":1e999}')

    assert decoded.is_unicode
    assert json.loads(encode_body(decoded.value)) == {"a": None, "b": None, "c": None}


def test_deep_nesting_is_refused() -> None:
    """By either parser."""
    deep = b"[" * 100_000

    with pytest.raises(BadRequestError, match="not valid JSON"):
        decode_body(deep)
    with pytest.raises(BadRequestError, match="not valid JSON"):
        decode_body(b"\xef\xbb\xbf" + deep)


def test_options_of_a_stream_may_say_what_they_like() -> None:
    """Of the right type they are the engine's business."""
    check_generate_body(
        Endpoint.COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}
    )


@pytest.mark.parametrize("text", ["a", "\ud800"], ids=["plain", "surrogate"])
def test_a_body_too_deep_to_be_written_is_refused(text: str) -> None:
    """It could be read just so, higher up the stack."""
    nested: list[Any] = []
    for _ in range(10_000):
        nested = [nested]

    with pytest.raises(BadRequestError, match="nested too deep"):
        encode_body({"text": text, "nested": nested})
