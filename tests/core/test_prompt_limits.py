"""How much of a request is scored."""

from typing import Any

import pytest

from balancer.core.fleet.snapshot import Fleet, Instance
from balancer.core.prompt.limits import PromptLimits, find_model_tokens
from balancer.core.prompt.shape import UnscorableError
from balancer.core.request import Endpoint, GenerateRequest
from indexer.core.model_cards import ServedModels, parse_model_list
from indexer.core.types import InstanceId

LIMITS = PromptLimits(max_prompts=2, max_tokens=10)


def request(prompt: Any, endpoint: Endpoint = Endpoint.COMPLETIONS) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        endpoint=endpoint,
        body={"prompt": prompt},
        raw_body=b"",
        headers=(),
        model="m",
        base_model="m",
        lora=None,
    )


@pytest.mark.parametrize("prompt", [[[1]] * 3, ["a"] * 3, [None] * 3], ids=repr)
def test_more_prompts_are_too_many(prompt: Any) -> None:
    """Ids, texts, or what is neither."""
    with pytest.raises(UnscorableError, match="too_many_prompts"):
        LIMITS.check_count(request(prompt))


@pytest.mark.parametrize("prompt", [None, "text", [], [1, 2, 3], ["a", "b"], [[1], [2]]], ids=repr)
def test_few_prompts_pass(prompt: Any) -> None:
    """One prompt of many ids is one prompt."""
    LIMITS.check_count(request(prompt))


def test_a_chat_has_no_prompts_to_count() -> None:
    """Engines ignore the field there."""
    LIMITS.check_count(request(["a"] * 3, Endpoint.CHAT))


@pytest.mark.parametrize(
    ("lengths", "model_tokens"), [([6, 5], None), ([11], None), ([4, 6], 5)], ids=repr
)
def test_too_many_tokens_are_too_long(lengths: list[int], model_tokens: int | None) -> None:
    """All together for us, or one of them for the model."""
    with pytest.raises(UnscorableError, match="too_long"):
        LIMITS.check_lengths(lengths, model_tokens)


@pytest.mark.parametrize(
    ("lengths", "model_tokens"), [([5, 5], None), ([5, 5], 5), ([], 5)], ids=repr
)
def test_tokens_up_to_the_limits_pass(lengths: list[int], model_tokens: int | None) -> None:
    """The model's limit is for each prompt by itself."""
    LIMITS.check_lengths(lengths, model_tokens)


def fleet(*lengths: object) -> Fleet:
    """One instance per length that its card tells."""
    return Fleet(
        instances=tuple(
            Instance(id=InstanceId(f"http://i{number}:1"), alias=f"i{number}", models=cards(each))
            for number, each in enumerate(lengths)
        )
    )


def cards(length: object) -> ServedModels:
    adapter = {"id": "lora", "parent": "m", "max_model_len": None}
    return parse_model_list({"data": [adapter, {"id": "m", "max_model_len": length}]})


@pytest.mark.parametrize(
    ("told", "expected"),
    [((), None), ((2048,), 2048), ((2048, 4096), 4096), ((2048, None), None), (("2048",), None)],
    ids=repr,
)
def test_longest_context_counts(told: tuple[object, ...], expected: int | None) -> None:
    """Only where every instance tells it: another one may take more."""
    assert find_model_tokens(fleet(*told), "m") == expected
    assert find_model_tokens(fleet(*told), "lora") == expected
