"""Shared storage: the legs carry no transfer, but decode waits for the prefill answer."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.connectors.contract import HandOver, LegContext, NoTransferError
from balancer.connectors.example import ExampleConnector
from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.http.prefill_rewrite import prefill_body
from indexer.core.types import InstanceId

BODY = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 500, "stream": True, "n": 2}
ANSWER = {"choices": [{"finish_reason": "length"}], "kv_transfer_params": None}


def context(body: dict[str, Any]) -> LegContext:
    return LegContext(
        request_id="abc",
        path="/v1/completions",
        body=body,
        prefill=Instance(id=InstanceId("http://p:1"), alias="p", role=Role.PREFILL),
        prefill_rank=0,
        decode=Instance(id=InstanceId("http://d:1"), alias="d", role=Role.DECODE),
        decode_rank=0,
    )


@given(body=st.dictionaries(st.text(), st.integers() | st.text() | st.booleans()))
def test_legs_carry_the_prefill_rewrite_and_the_clients_own_body(body: dict[str, Any]) -> None:
    """Nothing is added to either leg, whatever the client sent."""
    prefill = ExampleConnector().prefill_leg(context(body))
    decode = ExampleConnector().decode_leg(context(body), ANSWER)

    assert (prefill.body, prefill.headers) == (prefill_body(body), ())
    assert decode.body is body
    assert decode.headers == ()


def test_without_a_prefill_answer_there_are_no_files_to_look_for() -> None:
    """Decode doesn't start: the whole prompt would be computed there, against the plan."""
    with pytest.raises(NoTransferError, match="no files"):
        ExampleConnector().decode_leg(context(BODY), None)


@pytest.mark.parametrize(
    ("request_", "carried"),
    [
        pytest.param(HandOver(prompt_tokens=64, block_sizes=frozenset({32})), True, id="plain"),
        pytest.param(HandOver(prompt_tokens=66, block_sizes=frozenset({32})), True, id="two-over"),
        pytest.param(HandOver(prompt_tokens=65, block_sizes=frozenset({32})), False, id="fatal"),
        pytest.param(
            HandOver(prompt_tokens=65, block_sizes=frozenset({48, 32})), False, id="fatal-for-one"
        ),
        pytest.param(
            HandOver(prompt_tokens=65, block_sizes=frozenset({1})), True, id="blocks-of-one"
        ),
        pytest.param(
            HandOver(prompt_tokens=None, block_sizes=frozenset({32})), False, id="unknown-length"
        ),
        pytest.param(
            HandOver(prompt_tokens=64, block_sizes=frozenset({32}), has_adapter=True),
            False,
            id="adapter",
        ),
        pytest.param(
            HandOver(prompt_tokens=64, block_sizes=frozenset({32}), has_salt=True), False, id="salt"
        ),
    ],
)
def test_what_its_file_names_cant_tell_apart_is_not_split(
    request_: HandOver, carried: bool
) -> None:
    """Another adapter's or tenant's cache would be loaded, or the engine would die."""
    target = Instance(id=InstanceId("http://d:1"), alias="d", role=Role.DECODE)

    assert ExampleConnector().carries(request_, target) is carried
