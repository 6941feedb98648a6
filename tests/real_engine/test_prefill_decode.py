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
LOADED = "vllm:external_prefix_cache_hits_total"
INSTANCES = {
    "p0": {"role": "prefill", "connector": "example"},
    "d0": {"role": "decode", "connector": "example"},
}
SETTINGS = {
    "pd": {"local_prefill_max_tokens": 64},
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


def ask(kvlb: Any, chats: Any, number: int, *, next_words: int) -> Any:
    turn = chats.read(number, kvlb.ask(chats.body(number)))
    chats.answered(number, turn.text, next_words=next_words)
    for name in INSTANCES:
        kvlb.catch_up(name)
    return turn


def test_the_first_turn_is_prefilled_elsewhere_and_a_later_one_is_not(
    cold: dict[str, Any],
    start_kvlb: Callable[..., Any],
    conversations: Callable[..., Any],
    record_figures: Callable[..., None],
) -> None:
    """Turn 1 is loaded from the prefill engine; a short turn 2 isn't; a long turn 3 is again."""
    chats = conversations(SEED, COUNT)
    decode = Decode(cold["d0"])
    rows = []
    with start_kvlb(cold, instances=INSTANCES, settings=SETTINGS) as kvlb:
        for next_words in (8, 90, 8):
            for number in range(COUNT):
                turn = ask(kvlb, chats, number, next_words=next_words)
                rows.append((turn, decode.loaded_tokens()))
    first, second, third = rows[:COUNT], rows[COUNT : 2 * COUNT], rows[2 * COUNT :]
    record_figures(
        first=[(turn.prompt_tokens, turn.cached_tokens, loaded) for turn, loaded in first],
        second=[(turn.prompt_tokens, turn.cached_tokens, loaded) for turn, loaded in second],
        third=[(turn.prompt_tokens, turn.cached_tokens, loaded) for turn, loaded in third],
        second_exact=sum(turn.overlap_tokens == turn.cached_tokens for turn, _ in second),
        third_overlap=[turn.overlap_tokens for turn, _ in third],
    )

    assert {(turn.prefill, turn.reason) for turn, _ in first} == {("p0", "remote_prefill")}
    assert all(loaded > 0 for _, loaded in first)
    assert {(turn.prefill, turn.reason) for turn, _ in second} == {("skipped", "decode_has_cache")}
    assert all(loaded == 0 for _, loaded in second)
    assert [turn.overlap_tokens for turn, _ in second] == [turn.cached_tokens for turn, _ in second]
    assert {(turn.prefill, turn.reason) for turn, _ in third} == {("p0", "remote_prefill")}
    assert all(loaded > 0 for _, loaded in third)


def test_what_a_decode_engine_reports_as_cached_includes_what_it_loaded(
    cold: dict[str, Any], start_kvlb: Callable[..., Any], conversations: Callable[..., Any]
) -> None:
    """So it exceeds the prediction, which is of what the prefill engine will find."""
    chats = conversations(SEED + 1, 1)
    decode = Decode(cold["d0"])
    with start_kvlb(cold, instances=INSTANCES, settings=SETTINGS) as kvlb:
        turn = ask(kvlb, chats, 0, next_words=8)

    assert turn.overlap_tokens == 0
    assert turn.cached_tokens == decode.loaded_tokens() > 0


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
            ask(kvlb, chats, number, next_words=8) for _ in range(2) for number in range(COUNT)
        ]
    clear(cold, storage)
    alone, chats, direct = cold["p0"], conversations(SEED, COUNT), []
    for _ in range(2):
        for number in range(COUNT):
            text = alone.ask(chats.body(number))["choices"][0]["message"]["content"]
            chats.answered(number, text, next_words=8)
            direct.append(text)

    assert {turn.prefill for turn in split} == {"p0", "skipped"}
    assert [turn.text for turn in split] == direct
