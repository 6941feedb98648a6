"""What `/v1/models` of one engine says."""

import pytest

from indexer.core.model_cards import parse_model_list

BASE = {"id": "org/base", "object": "model", "max_model_len": 4096, "parent": None}
ALIAS = {"id": "base", "object": "model"}
ADAPTER = {"id": "sql", "object": "model", "parent": "org/base", "root": "/adapters/sql"}


def test_base_aliases_and_adapters_are_told_apart() -> None:
    """The first card without a parent is the base model; every field is kept."""
    served = parse_model_list({"object": "list", "data": [ADAPTER, BASE, ALIAS]})

    assert served.base == "org/base"
    assert served.aliases == {"org/base", "base"}
    assert served.adapters == {"sql"}
    assert served.cards == (ADAPTER, BASE, ALIAS)


@pytest.mark.parametrize(
    ("name", "is_served"), [("org/base", True), ("base", True), ("sql", True), ("nope", False)]
)
def test_every_name_is_served(name: str, is_served: bool) -> None:
    """An engine answers to its names and its adapters, to nothing else."""
    assert parse_model_list({"data": [BASE, ALIAS, ADAPTER]}).serves(name) is is_served


def test_cards_that_are_none_are_skipped() -> None:
    """Junk beside good cards does no harm."""
    served = parse_model_list({"data": [3, {"id": 4}, {}, BASE]})

    assert served.cards == (BASE,)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param(None, "a list `data`", id="nothing"),
        pytest.param({"data": "org/base"}, "a list `data`", id="text"),
        pytest.param({"data": {}}, "a list `data`", id="map"),
        pytest.param({"error": "x"}, "a list `data`", id="error-body"),
        pytest.param({"data": []}, "no base model", id="empty"),
        pytest.param({"data": [ADAPTER]}, "no base model", id="adapters-only"),
    ],
)
def test_unusable_answer_says_what_is_wrong(body: object, says: str) -> None:
    """The reader of the log sees which part of the answer is missing."""
    with pytest.raises(ValueError, match=says):
        parse_model_list(body)
