"""From bytes to an understood request."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.errors import BadRequestError, ModelNotFoundError
from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.http.generate import read_generate
from balancer.core.request import Endpoint, GenerateRequest
from indexer.core.model_cards import parse_model_list
from indexer.core.types import InstanceId

CARDS = {"data": [{"id": "base"}, {"id": "ad", "parent": "base"}]}
FLEET = Fleet(
    instances=(Instance(id=InstanceId("http://a:1"), alias="a", models=parse_model_list(CARDS)),)
)


def read(body: Any) -> GenerateRequest:
    raw = json.dumps(body).encode()
    return read_generate(Endpoint.COMPLETIONS, raw, FLEET, request_id="r", headers=((b"a", b"b"),))


def test_adapter_is_told_from_its_base_model() -> None:
    """The client's name is kept beside ours."""
    asked = read({"model": "ad", "prompt": "x"})

    assert (asked.model, asked.base_model, asked.lora) == ("ad", "base", "ad")
    assert (asked.request_id, asked.headers) == ("r", ((b"a", b"b"),))


@given(st.dictionaries(st.sampled_from(["stream", "n", "seed"]), st.none()))
def test_body_without_forbidden_fields_stays_as_it_came(extra: dict[str, None]) -> None:
    """Byte for byte."""
    body = {"prompt": "x", **extra}

    assert read(body).raw_body == json.dumps(body).encode()


def test_what_a_client_must_not_set_is_gone_from_both_forms() -> None:
    """Legs are written from either."""
    asked = read({"prompt": "x", "kv_transfer_params": {"remote_host": "evil"}})

    assert asked.body == json.loads(asked.raw_body) == {"prompt": "x"}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        pytest.param([], BadRequestError, id="no-object"),
        pytest.param({"prompt": 1}, BadRequestError, id="wrong-type"),
        pytest.param({"prompt": "x", "model": "none"}, ModelNotFoundError, id="unknown-model"),
    ],
)
def test_what_is_wrong_is_told(body: Any, error: type[Exception]) -> None:
    """Before anything is sent."""
    with pytest.raises(error):
        read(body)
