"""Completions bodies whose prompt is a long list of token ids."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.http.generate import read_generate
from balancer.core.http.ids_body import LEAST_BYTES, MOST_BYTES, read_ids_body
from balancer.core.http.rewrite import encode_body
from balancer.core.prompt.any_shape import shape_prompt
from balancer.core.prompt.known_ids import IdTexts
from balancer.core.prompt.shape import IdsShape
from balancer.core.request import Endpoint, GenerateRequest
from balancer.core.routing.candidates import guess_tokens
from indexer.core.model_cards import parse_model_list
from indexer.core.types import InstanceId

IDS = list(range(LEAST_BYTES))
MODELS = parse_model_list({"data": [{"id": "m"}]})
FLEET = Fleet(instances=(Instance(id=InstanceId("http://a:1"), alias="a", models=MODELS),))
MARK = -6046917352380213

extras = st.dictionaries(
    st.sampled_from(["n", "seed", "stop", "user", "logit_bias", "prompt_logprobs"]),
    st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
        max_leaves=5,
    ),
)


def understand(raw: bytes, endpoint: Endpoint = Endpoint.COMPLETIONS) -> GenerateRequest:
    texts = IdTexts(limit_bytes=1 << 24)
    return read_generate(endpoint, raw, FLEET, request_id="r", texts=texts)


@given(extras, extras, st.sampled_from([None, (",", ":")]))
def test_body_means_what_it_meant(
    before: dict[str, Any], after: dict[str, Any], separators: tuple[str, str] | None
) -> None:
    """With or without the cut, whatever stands beside the list."""
    body = {**before, "prompt": IDS, **after, "model": "m"}
    raw = json.dumps(body, separators=separators).encode()

    asked = understand(raw)
    shape = shape_prompt(asked)

    assert json.loads(encode_body(asked.body)) == json.loads(raw)
    assert isinstance(shape, IdsShape)
    assert [list(each) for each in shape.prompts] == [IDS]
    assert asked.raw_body is raw


def test_list_that_is_most_of_the_body_is_left_as_it_came() -> None:
    """No id becomes a Python int that stays."""
    asked = understand(json.dumps({"model": "m", "prompt": IDS}).encode())

    assert asked.ids is not None
    assert list(asked.ids.ids) == IDS
    assert isinstance(asked.body["prompt"], msgspec.Raw)


def test_list_left_as_it_came_has_its_length() -> None:
    """Policies that read no prompt go by it."""
    assert guess_tokens(understand(json.dumps({"model": "m", "prompt": IDS}).encode())) == len(IDS)


def _text(make: Callable[[str], str]) -> bytes:
    return make(json.dumps(IDS)).encode()


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b'{"prompt":[1,2,3]}', id="short"),
        pytest.param(
            _text(lambda ids: f'{{"prompt":{ids},"stop":"{"x" * 9999}"}}'), id="small-part"
        ),
        pytest.param(_text(lambda ids: f'{{"prompt":"{ids}"}}'), id="in-a-string"),
        pytest.param(_text(lambda ids: f'{{"other":{ids},"prompt":"x"}}'), id="another-field"),
        pytest.param(_text(lambda ids: f'{{"a":{{"prompt":{ids}}},"prompt":"x"}}'), id="deeper"),
        pytest.param(_text(lambda ids: f'{{"prompt":{ids},"prompt":"x"}}'), id="said-twice"),
        pytest.param(_text(lambda ids: f'{{"a":{ids},"prompt":{MARK}}}'), id="has-the-mark"),
        pytest.param(_text(lambda ids: f'{{"prompt":[{ids},[1]]}}'), id="two-prompts"),
        pytest.param(_text(lambda ids: f'{{"prompt":{ids[:-1]},"x"]}}'), id="no-ids"),
        pytest.param(_text(lambda ids: f'{{"prompt":{ids},}}'), id="no-json"),
        pytest.param(_text(lambda ids: f'{{"prompt":{ids[:-1]}}}'), id="no-end"),
        pytest.param(_text(lambda ids: f'{{"prompt":{ids},"a":{"[" * 1500}'), id="nested"),
        pytest.param(_text(lambda ids: ids), id="no-object"),
        pytest.param(
            _text(lambda ids: f'{{"prompt":{ids}}}').decode().encode("utf-16"), id="utf-16"
        ),
        pytest.param(b'{"prompt":"\xff",' + _text(lambda ids: f'"a":{ids}}}'), id="no-unicode"),
        pytest.param(b'{"prompt":[' + b" " * MOST_BYTES + b"1]}", id="more-than-is-scored"),
    ],
)
def test_any_other_body_is_read_as_ever(raw: bytes) -> None:
    """Also where it is wrong: the error is that of the whole body."""
    assert read_ids_body(raw, IdTexts(limit_bytes=1 << 24)) is None


def test_other_endpoints_are_read_as_ever() -> None:
    """A chat has no ids, whatever its body says."""
    asked = understand(
        json.dumps({"model": "m", "messages": [], "prompt": IDS}).encode(), Endpoint.CHAT
    )

    assert asked.ids is None
    assert asked.body["prompt"] == IDS
