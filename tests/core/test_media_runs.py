"""What media become in a prompt: read from an engine's answer, put into other prompts."""

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from balancer.core.prompt.media_runs import (
    MediumName,
    MediumRun,
    learn_runs,
    media_names,
    put_runs,
)
from balancer.core.prompt.rendered import Rendered, answer_shape, render_question
from balancer.core.request import Endpoint, GenerateRequest
from indexer.core.hashing import MediumPlace

PIC, SOUND = 900, 901
"""Tokens that templates write for media."""


def request_of(endpoint: Endpoint, body: dict[str, Any]) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        endpoint=endpoint,
        body=body,
        raw_body=b"",
        headers=(),
        model="m",
        base_model="m",
        lora=None,
    )


def place(identifier: str, offset: int, tokens: int) -> MediumPlace:
    return MediumPlace(identifier=identifier, offset_tokens=offset, tokens=tokens)


def run(stand_in: int, identifier: str, *ids: int) -> MediumRun:
    return MediumRun(stand_in=stand_in, ids=array("I", ids), identifier=identifier)


def test_runs_are_what_stands_where_the_template_wrote_one_token() -> None:
    """Two media, text around them."""
    told = Rendered(
        token_ids=[1, 2, 7, 7, 7, 3, 8, 8, 4], media=(place("a", 2, 3), place("b", 6, 2))
    )

    runs = learn_runs([1, 2, PIC, 3, SOUND, 4], told, 2)

    assert runs == [run(PIC, "a", 7, 7, 7), run(SOUND, "b", 8, 8)]


@pytest.mark.parametrize(
    ("own", "theirs", "places", "count"),
    [
        pytest.param([1, PIC, 3], [2, 7, 7, 3], [("a", 1, 2)], 1, id="text-before"),
        pytest.param([1, PIC, 3], [1, 7, 7, 4], [("a", 1, 2)], 1, id="text-after"),
        pytest.param([1, PIC, 3], [1, 7, 7], [("a", 1, 2)], 1, id="nothing-after"),
        pytest.param([1], [1, 7, 7], [("a", 1, 2)], 1, id="no-token-for-it"),
        pytest.param([1, PIC, 3], [1, 7, 7, 3], [("a", 1, 2)], 2, id="another-count"),
        pytest.param([1, PIC, 3], [1, PIC, 3], [], 1, id="no-media"),
        pytest.param([1, PIC], [1, 7], [("a", 1, 2)], 1, id="over-the-end"),
    ],
)
def test_answer_that_is_not_ours_but_for_the_runs_teaches_nothing(
    own: Sequence[int], theirs: Sequence[int], places: Sequence[tuple[str, int, int]], count: int
) -> None:
    """This model writes its prompts in another way."""
    told = Rendered(token_ids=theirs, media=tuple(place(*each) for each in places))

    assert learn_runs(own, told, count) is None


def test_runs_are_put_into_another_prompt() -> None:
    """Each where its token is, with its place told."""
    placed = put_runs([5, PIC, 6, SOUND], [run(PIC, "a", 7, 7, 7), run(SOUND, "b", 8, 8)])

    assert placed == (array("I", [5, 7, 7, 7, 6, 8, 8]), [place("a", 1, 3), place("b", 5, 2)])


@pytest.mark.parametrize(
    "own",
    [
        pytest.param([5, PIC, PIC, SOUND], id="said-by-a-text"),
        pytest.param([5, SOUND], id="missing"),
        pytest.param([5, SOUND, PIC], id="another-order"),
    ],
)
def test_prompt_whose_media_cannot_be_told_apart_is_not_made(own: Sequence[int]) -> None:
    """Wrong tokens are worse than none."""
    assert put_runs(own, [run(PIC, "a", 7), run(SOUND, "b", 8)]) is None


def picture(**fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "http://a/1.png"}, **fields}


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]}


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        pytest.param(
            [{"type": "text", "text": "t"}, picture(uuid="a"), {"input_audio": {}, "uuid": "b"}],
            [MediumName("image", "a"), MediumName("audio", "b")],
            id="named",
        ),
        pytest.param([picture(uuid="a"), picture()], (), id="one-without"),
        pytest.param([picture(uuid="")], (), id="empty"),
        pytest.param([picture(uuid=7)], (), id="number"),
    ],
)
def test_media_are_known_by_their_uuids(parts: list[Any], names: Sequence[MediumName]) -> None:
    """All of them, or the prompt can't be made."""
    body = chat()
    body["messages"][1]["content"] = parts

    assert list(media_names(request_of(Endpoint.CHAT, body))) == list(names)


def test_other_paths_name_no_media() -> None:
    """Anthropic's and the responses' have no field for it."""
    assert media_names(request_of(Endpoint.MESSAGES, chat(picture(uuid="a")))) == ()


def test_only_what_is_rendered_is_asked_about() -> None:
    """Ids are ids."""
    assert render_question(request_of(Endpoint.TOKENS, {"token_ids": [1]})) is None


def test_what_is_wanted_of_the_answer_is_told_apart() -> None:
    """Some models are told of it in their prompt."""
    body = {"messages": [], "tool_choice": "none", "seed": 1}

    assert answer_shape(request_of(Endpoint.CHAT, body)) == {"tool_choice": "none"}
