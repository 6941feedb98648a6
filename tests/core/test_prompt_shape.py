"""What a request asks the engine to feed the model."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.prompt.any_shape import shape_prompt
from balancer.core.prompt.shape import (
    ChatShape,
    IdsShape,
    PromptShape,
    TextShape,
    Truncation,
    Unscorable,
    UnscorableError,
    check_text_length,
    shape_digest,
    truncate_ids,
)
from balancer.core.request import Endpoint, GenerateRequest

HI = [{"role": "user", "content": "hi"}]


def shape(endpoint: Endpoint, body: Mapping[str, Any]) -> PromptShape:
    """Shape of a body sent to `endpoint`."""
    return shape_prompt(
        GenerateRequest(
            request_id="r",
            endpoint=endpoint,
            body=body,
            raw_body=b"",
            headers=(),
            model="m",
            base_model="m",
            lora=None,
        )
    )


def complete(**body: Any) -> PromptShape:
    """Shape of a completion."""
    return shape(Endpoint.COMPLETIONS, body)


def chat(messages: Any = HI, **body: Any) -> ChatShape:
    """Shape of a chat."""
    found = shape(Endpoint.CHAT, {"messages": messages, **body})
    assert isinstance(found, ChatShape)
    return found


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        pytest.param("hi", TextShape(texts=("hi",)), id="text"),
        pytest.param(["a", "b"], TextShape(texts=("a", "b")), id="texts"),
        pytest.param([1, 2], IdsShape(prompts=([1, 2],)), id="ids"),
        pytest.param([[1], [2, 3]], IdsShape(prompts=([1], [2, 3])), id="lists-of-ids"),
    ],
)
def test_completion_prompts_have_four_forms(prompt: Any, expected: PromptShape) -> None:
    """Each is recognised by its types."""
    assert complete(prompt=prompt) == expected


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param({}, Unscorable.BAD_PROMPT, id="missing"),
        pytest.param({"prompt": ""}, Unscorable.BAD_PROMPT, id="empty"),
        pytest.param({"prompt": []}, Unscorable.BAD_PROMPT, id="empty-list"),
        pytest.param({"prompt": {"a": 1}}, Unscorable.BAD_PROMPT, id="object"),
        pytest.param({"prompt": ["a", 1]}, Unscorable.BAD_PROMPT, id="mixed"),
        pytest.param({"prompt": ["a", ""]}, Unscorable.BAD_PROMPT, id="one-empty"),
        pytest.param({"prompt": [[1], "a"]}, Unscorable.BAD_PROMPT, id="mixed-lists"),
        pytest.param({"prompt": [[1], []]}, Unscorable.BAD_PROMPT, id="empty-inner-list"),
        pytest.param({"prompt": [1.5]}, Unscorable.BAD_PROMPT, id="float"),
        pytest.param({"prompt_embeds": "x"}, Unscorable.PROMPT_EMBEDS, id="embeds"),
        pytest.param(
            {"prompt": "a", "add_special_tokens": 1}, Unscorable.BAD_PROMPT, id="flag-of-wrong-type"
        ),
        pytest.param(
            {"prompt": "a", "truncate_prompt_tokens": -1}, Unscorable.TRUNCATED, id="model-limit"
        ),
        pytest.param(
            {"prompt": "a", "truncate_prompt_tokens": True}, Unscorable.TRUNCATED, id="bad-limit"
        ),
    ],
)
def test_completion_that_cannot_be_scored(body: dict[str, Any], reason: Unscorable) -> None:
    """Each has its reason; none raises anything else."""
    with pytest.raises(UnscorableError) as raised:
        complete(**body)

    assert raised.value.reason is reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param({"messages": None}, Unscorable.BAD_PROMPT, id="missing"),
        pytest.param({"messages": []}, Unscorable.BAD_PROMPT, id="empty"),
        pytest.param({"messages": ["x"]}, Unscorable.BAD_PROMPT, id="message-is-text"),
        pytest.param({"messages": [{"content": "x"}]}, Unscorable.BAD_PROMPT, id="no-role"),
        pytest.param(
            {"messages": [{"role": "user", "content": 1}]}, Unscorable.BAD_PROMPT, id="content-int"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [1]}]}, Unscorable.BAD_PROMPT, id="part-int"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            Unscorable.BAD_PROMPT,
            id="text-int",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
            Unscorable.MULTIMODAL,
            id="unknown-medium",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "prompt_embeds"}]}]},
            Unscorable.PROMPT_EMBEDS,
            id="embeds",
        ),
        pytest.param({"tools": {}}, Unscorable.BAD_PROMPT, id="tools-object"),
        pytest.param({"tools": [1]}, Unscorable.BAD_PROMPT, id="tool-int"),
        pytest.param({"chat_template_kwargs": []}, Unscorable.BAD_PROMPT, id="kwargs-list"),
        pytest.param(
            {"mm_processor_kwargs": {"a": 1}}, Unscorable.UNSUPPORTED_FIELD, id="media-kwargs"
        ),
        pytest.param(
            {"chat_template_kwargs": {"chat_template": "t"}},
            Unscorable.UNSUPPORTED_FIELD,
            id="template-among-kwargs",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
            Unscorable.BAD_PROMPT,
            id="part-without-a-kind",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": 1}]}]},
            Unscorable.BAD_PROMPT,
            id="kind-int",
        ),
    ],
)
def test_chat_that_cannot_be_scored(body: dict[str, Any], reason: Unscorable) -> None:
    """Media are never fetched, odd bodies are left to the engine's 400."""
    with pytest.raises(UnscorableError) as raised:
        shape(Endpoint.CHAT, {"messages": HI, **body})

    assert raised.value.reason is reason


def test_media_parts_lose_everything_but_their_kind() -> None:
    """Pictures are neither fetched nor kept; two that differ are one shape."""
    text = {"type": "text", "text": "look"}
    url = {"type": "image_url", "image_url": {"url": "http://secret/1.png"}}
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA"}}
    chat = shape(
        Endpoint.CHAT, {"messages": [*HI, {"role": "user", "content": [text, url, sound]}]}
    )

    assert isinstance(chat, ChatShape)
    assert chat.has_media
    assert chat.messages[-1]["content"] == [text, {"type": "image"}, {"type": "audio"}]
    assert not shape(Endpoint.CHAT, {"messages": HI}).has_media  # type: ignore[union-attr]


def test_chat_fields_have_the_engines_defaults() -> None:
    """Absent fields mean what they mean in vLLM."""
    assert chat(tools=[]) == ChatShape(messages=HI)


def test_chat_fields_are_read() -> None:
    """Everything that shapes the prompt is in the shape."""
    found = chat(
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
        chat_template="t",
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
        documents=[{"text": "d"}],
        truncate_prompt_tokens=5,
        truncation_side="right",
    )

    assert found == ChatShape(
        messages=HI,
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
        chat_template="t",
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
        documents=[{"text": "d"}],
        truncation=Truncation(limit_tokens=5, keeps_start=True),
    )


def test_empty_list_of_documents_is_one() -> None:
    """Templates tell it from none at all."""
    assert chat(documents=[]).documents == []
    assert chat(documents=None).documents is None


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [
        pytest.param(None, [1, 2, 3], id="none"),
        pytest.param(Truncation(limit_tokens=3), [1, 2, 3], id="just-fits"),
        pytest.param(Truncation(limit_tokens=2), [2, 3], id="end-stays"),
        pytest.param(Truncation(limit_tokens=2, keeps_start=True), [1, 2], id="start-stays"),
    ],
)
def test_ids_are_cut_as_the_engine_cuts(truncation: Truncation | None, expected: list[int]) -> None:
    """The end of a prompt stays, unless the client says otherwise."""
    assert truncate_ids([1, 2, 3], truncation) == expected


def test_text_that_would_be_cut_is_unscorable() -> None:
    """Where special tokens go when text is cut is the tokenizer's secret."""
    check_text_length(3, None)
    check_text_length(3, Truncation(limit_tokens=3))
    with pytest.raises(UnscorableError):
        check_text_length(4, Truncation(limit_tokens=3))


def test_digest_depends_on_all_that_shapes_the_prompt() -> None:
    """Same text, other model, endpoint or flag: other ids."""
    texts = TextShape(texts=("a",))
    digests = {
        shape_digest(texts, "m"),
        shape_digest(texts, "n"),
        shape_digest(TextShape(texts=("a",), add_special_tokens=False), "m"),
        shape_digest(chat(), "m"),
        shape_digest(chat(continue_final_message=True), "m"),
    }

    assert len(digests) == 5


def test_text_that_has_no_utf8_is_unscorable() -> None:
    """A lone surrogate can't be hashed, and no engine takes it."""
    with pytest.raises(UnscorableError):
        shape_digest(TextShape(texts=("\ud800",)), "m")


@given(st.text(min_size=1), st.text(min_size=1))
def test_digests_are_equal_for_equal_prompts_only(left: str, right: str) -> None:
    """Law: digests tell prompts apart."""
    same = shape_digest(TextShape(texts=(left,)), "m") == shape_digest(
        TextShape(texts=(right,)), "m"
    )

    assert same == (left == right)


def test_reasoning_has_one_name() -> None:
    """The old one is read, and loses against the new one."""
    said = {"role": "assistant", "content": "x"}
    shaped = chat(
        [{**said, "reasoning_content": "a"}, {**said, "reasoning_content": "a", "reasoning": "b"}]
    )

    assert shaped.messages == [{**said, "reasoning": "a"}, {**said, "reasoning": "b"}]


@pytest.mark.parametrize(
    "part",
    [
        pytest.param({"image_url": "http://secret"}, id="no-type"),
        pytest.param({"type": "image_url", "uuid": "u", "image_url": None}, id="uuid"),
    ],
)
def test_kind_of_a_part_may_be_its_field(part: dict[str, Any]) -> None:
    """So clients name a picture without saying that it is one."""
    assert chat([{"role": "user", "content": [part]}]).has_media


def test_suffix_is_not_followed() -> None:
    """How it is written is the model's secret, if it has a way."""
    with pytest.raises(UnscorableError) as raised:
        complete(prompt="a", suffix="b")

    assert raised.value.reason is Unscorable.UNSUPPORTED_FIELD


def test_text_that_is_no_unicode_is_not_read() -> None:
    """Only the engine can say what then."""
    request = GenerateRequest(
        request_id="r",
        endpoint=Endpoint.CHAT,
        body={"messages": HI},
        raw_body=b"",
        headers=(),
        model="m",
        base_model="m",
        lora=None,
        is_unicode=False,
    )
    with pytest.raises(UnscorableError) as raised:
        shape_prompt(request)

    assert raised.value.reason is Unscorable.NOT_UNICODE


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param({"token_ids": []}, Unscorable.BAD_PROMPT, id="empty"),
        pytest.param({"token_ids": "x"}, Unscorable.BAD_PROMPT, id="text"),
        pytest.param({"token_ids": [1], "features": {"a": 1}}, Unscorable.MULTIMODAL, id="media"),
    ],
)
def test_token_ids_that_cannot_be_scored(body: dict[str, Any], reason: Unscorable) -> None:
    """Media are where only the engine knows."""
    with pytest.raises(UnscorableError) as raised:
        shape(Endpoint.TOKENS, body)

    assert raised.value.reason is reason


def test_token_ids_are_the_prompt() -> None:
    """Of `/inference/v1/generate`."""
    assert shape(Endpoint.TOKENS, {"token_ids": [1, 2]}) == IdsShape(prompts=([1, 2],))
