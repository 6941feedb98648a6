"""NIXL pull: what each leg carries, and which prefill answers are failures."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.connectors.contract import LegContext, NoTransferError
from balancer.connectors.nixl import NixlConnector
from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.http.prefill_rewrite import prefill_body
from indexer.core.types import InstanceId

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "engine-7",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "a_field_of_a_later_release": {"kept": "as it is"},
}


def context(body: Mapping[str, Any]) -> LegContext:
    return LegContext(
        request_id="abc",
        path="/v1/chat/completions",
        body=body,
        prefill=Instance(id=InstanceId("http://p:1"), alias="p", role=Role.PREFILL),
        prefill_rank=0,
        decode=Instance(id=InstanceId("http://d:1"), alias="d", role=Role.DECODE),
        decode_rank=0,
    )


def prefill_answer(**fields: Any) -> Mapping[str, Any]:
    return {
        "choices": [{"index": 0, "finish_reason": "length"}],
        "kv_transfer_params": PARAMS,
        **fields,
    }


def test_the_prefill_engine_is_asked_to_keep_its_blocks() -> None:
    """Exactly the fields that vLLM's own proxy sends."""
    leg = NixlConnector().prefill_leg(context({"messages": []}))

    assert leg.body["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


def test_the_decode_engine_gets_the_answer_verbatim() -> None:
    """Fields of later releases included; the rest is the client's body (F40)."""
    body = {"prompt": [1, 2, 3], "max_tokens": 500, "min_tokens": 100, "stream": True, "n": 4}

    leg = NixlConnector().decode_leg(context(body), prefill_answer())

    assert leg.body == {**body, "kv_transfer_params": PARAMS}


@pytest.mark.parametrize("finish", ["stop", "length", None])
def test_a_prefill_leg_may_end_by_stop_or_length(finish: str | None) -> None:
    """Either leaves its blocks behind."""
    answer = prefill_answer(choices=[{"finish_reason": finish}])

    assert NixlConnector().decode_leg(context({}), answer).body["kv_transfer_params"] == PARAMS


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(None, id="no-answer"),
        pytest.param({}, id="empty"),
        pytest.param(prefill_answer(kv_transfer_params=None), id="null-params"),
        pytest.param(prefill_answer(kv_transfer_params=[]), id="params-not-an-object"),
        pytest.param(prefill_answer(kv_transfer_params={}), id="empty-params"),
        pytest.param(
            prefill_answer(kv_transfer_params={**PARAMS, "do_remote_prefill": False}),
            id="nothing-to-read",
        ),
    ],
)
def test_an_answer_without_blocks_is_a_failed_prefill(answer: Any) -> None:
    """Decode never starts with missing parameters (F37)."""
    with pytest.raises(NoTransferError):
        NixlConnector().decode_leg(context({}), answer)


def test_choices_of_an_unknown_shape_are_left_to_the_params() -> None:
    """Only what clearly failed counts as failed."""
    answer = prefill_answer(choices=["?"])

    for odd in (answer, prefill_answer(choices=None)):
        assert NixlConnector().decode_leg(context({}), odd).body["kv_transfer_params"] == PARAMS


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(
            {"max_tokens": 500, "min_tokens": 100, "stream": True},
            {"max_tokens": 1, "min_tokens": 1, "stream": False, "n": 1},
            id="min-tokens-F31",
        ),
        pytest.param(
            {}, {"max_tokens": 1, "min_tokens": 1, "stream": False, "n": 1}, id="no-limit-F32"
        ),
        pytest.param(
            {"max_completion_tokens": 9},
            {
                "max_completion_tokens": 1,
                "max_tokens": 1,
                "min_tokens": 1,
                "stream": False,
                "n": 1,
            },
            id="the-limit-that-wins",
        ),
        pytest.param(
            {"stream": True, "stream_options": {"include_usage": True}},
            {"max_tokens": 1, "min_tokens": 1, "stream": False, "n": 1},
            id="stream-F33",
        ),
        pytest.param(
            {"n": 4, "best_of": 8, "use_beam_search": True, "logprobs": True, "top_logprobs": 5},
            {"max_tokens": 1, "min_tokens": 1, "stream": False, "n": 1},
            id="one-cheap-token-X2",
        ),
        pytest.param(
            {"echo": True, "prompt_logprobs": 2, "min_completion_tokens": 3},
            {"max_tokens": 1, "min_tokens": 1, "stream": False, "n": 1},
            id="prompt-logprobs-F34",
        ),
    ],
)
def test_the_prefill_rewrite(body: dict[str, Any], expected: dict[str, Any]) -> None:
    """One token, no stream, nothing an engine would refuse."""
    assert prefill_body(body) == expected


def test_what_shapes_the_prompt_or_its_one_token_stays() -> None:
    """Tools stay in the prompt; a forced shape of the output stays legal (X3)."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function"}],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"enable_thinking": False},
        "documents": [{}],
        "truncate_prompt_tokens": 100,
        "cache_salt": "s",
        "stop": ["x"],
        "seed": 4,
        "ignore_eos": True,
        "logit_bias": {"5": -100},
        "priority": 3,
        "mm_processor_kwargs": {},
        "something_new": 1,
    }

    assert body.items() <= prefill_body(body).items()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
names = st.sampled_from(
    [
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "n",
        "stream",
        "stream_options",
        "logprobs",
        "echo",
        "prompt",
        "messages",
        "temperature",
        "use_beam_search",
    ]
)


@given(body=st.dictionaries(names | st.text(), json_values))
def test_a_prefill_leg_is_legal_whatever_the_client_sent(body: dict[str, Any]) -> None:
    """One token at least and at most, not a stream, and the client's body as it was."""
    before = dict(body)
    leg = prefill_body(body)

    assert body == before
    assert (leg["max_tokens"], leg["min_tokens"], leg["n"], leg["stream"]) == (1, 1, 1, False)
    assert leg.get("max_completion_tokens", 1) == 1
    assert not leg.keys() & {"stream_options", "logprobs", "echo", "use_beam_search"}
    assert leg.get("prompt") == body.get("prompt")
    assert prefill_body(leg) == leg
