"""A prefill and a decode engine over the example connector: which legs run, what the texts are."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SEED = 20261130
COUNT = 6
BLOCK_TOKENS = 32
LOADED = "vllm:external_prefix_cache_hits_total"
INSTANCES = {
    "p0": {"role": "prefill", "connector": "example"},
    "d0": {"role": "decode", "connector": "example"},
}
SETTINGS = {
    "pd": {"decide": "threshold", "local_prefill_max_tokens": 64},
    "tokens": {"deadline_s": 5},
    "routing": {"lookup_timeout_s": 1},
}


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def engines(start_engines: Callable[..., Any], storage: Path) -> Iterator[dict[str, Any]]:
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }
    flags = ("--kv-transfer-config", json.dumps(transfer))
    with start_engines("p0", "d0", flags=flags) as running:
        yield running


@pytest.fixture
def cold(engines: dict[str, Any], storage: Path) -> dict[str, Any]:
    """Both engines with nothing cached, and an empty shared directory."""
    clear(engines, storage)
    return engines


def clear(engines: dict[str, Any], storage: Path) -> None:
    for folder in storage.iterdir():
        shutil.rmtree(folder)
    for engine in engines.values():
        engine.reset_cache()


class Decode:
    """The decode engine's own account of what it loaded."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._seen = engine.metric(LOADED)

    def loaded_tokens(self) -> int:
        """Since the last call."""
        before, self._seen = self._seen, self._engine.metric(LOADED)
        return int(self._seen - before)


def question(chats: Any, number: int, engine: Any) -> dict[str, Any]:
    """The next request of a conversation, of a length that the example connector can bear.

    With one token more than full blocks, vLLM 0.32's ExampleConnector looks for another folder than
    the one it writes; if an earlier turn left that one behind, the engine dies of it.
    """
    while engine.prompt_tokens(chats.body(number)) % BLOCK_TOKENS == 1:
        chats.lengthen(number)
    body: dict[str, Any] = chats.body(number, max_tokens=8)
    return body


def ask(kvlb: Any, chats: Any, number: int, *, next_words: int) -> Any:
    body = question(chats, number, kvlb.engines["p0"])
    turn = chats.read(number, kvlb.ask(body))
    chats.answered(number, turn.text, next_words=next_words)
    for name in INSTANCES:
        kvlb.catch_up(name)
    return turn


def prefill_legs(kvlb: Any) -> list[dict[str, Any]]:
    """What the prefill engine was expected to hold, and what it reported, leg by leg."""
    records = kvlb.get("/explain/recent?limit=100").json()["decisions"]
    return [leg for record in records for leg in record["legs"] if leg["leg"] == "prefill"]


def test_the_first_turn_is_prefilled_elsewhere_and_a_later_one_is_not(
    cold: dict[str, Any],
    start_kvlb: Callable[..., Any],
    conversations: Callable[..., Any],
    record_figures: Callable[..., None],
) -> None:
    """Turn 1 is loaded from the prefill engine; a short turn 2 isn't; a long turn 3 is again.

    What the decode engine reports as cached includes what it loaded. The prediction is for the
    engine that prefills: the prefill engine's own report, or the decode engine's without such a leg.
    """
    chats = conversations(SEED, COUNT)
    decode = Decode(cold["d0"])
    rounds = []
    with start_kvlb(cold, instances=INSTANCES, settings=SETTINGS) as kvlb:
        for next_words in (3, 90, 3):
            turns = []
            for number in range(COUNT):
                turn = ask(kvlb, chats, number, next_words=next_words)
                turns.append((turn, decode.loaded_tokens()))
            rounds.append(turns)
        legs = prefill_legs(kvlb)
    first, second, third = rounds
    for name, turns in zip(("first", "second", "third"), rounds, strict=True):
        record_figures(
            turn=name,
            prefill=sorted({turn.prefill for turn, _ in turns}),
            prompt_overlap_cached_loaded=[
                (turn.prompt_tokens, turn.overlap_tokens, turn.cached_tokens, loaded)
                for turn, loaded in turns
            ],
        )

    assert {(turn.prefill, turn.reason) for turn, _ in first} == {("p0", "remote_prefill")}
    assert all(turn.cached_tokens == loaded > 0 for turn, loaded in first)
    assert {(turn.prefill, turn.reason) for turn, _ in second} == {("skipped", "decode_has_cache")}
    assert all(loaded == 0 for _, loaded in second)
    assert [turn.overlap_tokens for turn, _ in second] == [turn.cached_tokens for turn, _ in second]
    assert {(turn.prefill, turn.reason) for turn, _ in third} == {("p0", "remote_prefill")}
    assert all(turn.cached_tokens > loaded > 0 for turn, loaded in third)
    assert len(legs) == len(first) + len(third)
    assert [leg["overlap_tokens"] for leg in legs] == [leg["cached_tokens"] for leg in legs]


def test_texts_are_those_of_one_engine_asked_directly(
    cold: dict[str, Any],
    storage: Path,
    start_kvlb: Callable[..., Any],
    conversations: Callable[..., Any],
) -> None:
    """With a prefill leg or without one, the same words."""
    chats = conversations(SEED, COUNT)
    with start_kvlb(cold, instances=INSTANCES, settings=SETTINGS) as kvlb:
        split = [
            ask(kvlb, chats, number, next_words=3) for _ in range(2) for number in range(COUNT)
        ]
    clear(cold, storage)
    alone, chats, direct = cold["p0"], conversations(SEED, COUNT), []
    for _ in range(2):
        for number in range(COUNT):
            text = alone.ask(question(chats, number, alone))["choices"][0]["message"]["content"]
            chats.answered(number, text, next_words=3)
            direct.append(text)

    assert {turn.prefill for turn in split} == {"p0", "skipped"}
    assert [turn.text for turn in split] == direct
