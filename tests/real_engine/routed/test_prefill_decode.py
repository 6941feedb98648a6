"""A prefill and a decode engine: which legs run, what the texts are, and P killed.

Over the connectors that move KV cache between CPUs: NIXL both ways round, and shared files.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SEED = 20261130
COUNT = 6
BLOCK_TOKENS = 32
NIXL_CORES = 4
LOADED = "vllm:external_prefix_cache_hits_total"
CONNECTORS = {
    "example": "ExampleConnector",
    "nixl": "NixlConnector",
    "nixl_push": "NixlPushConnector",
}
ROLES = {"p0": "prefill", "d0": "decode"}
SETTINGS: dict[str, Any] = {
    "pd": {"decide": "threshold", "local_prefill_max_tokens": 64},
    "tokens": {"deadline_s": 5},
    "routing": {"lookup_timeout_s": 1},
    # NIXL's threads spin: on two cores an engine may answer nobody for some time.
    "probes": {"timeout_s": 60},
}


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module", params=list(CONNECTORS))
def connector(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    cores = len(os.sched_getaffinity(0))
    if name != "example" and cores < NIXL_CORES and not os.environ.get("KVLB_ENGINE_NIXL"):
        pytest.skip(
            f"NIXL's threads spin: {NIXL_CORES} cores are wanted, here are {cores}; "
            "KVLB_ENGINE_NIXL=1 tries all the same"
        )
    return name


@pytest.fixture(scope="module")
def engines(
    connector: str, start_engines: Callable[..., Any], storage: Path
) -> Iterator[dict[str, Any]]:
    transfer: dict[str, Any] = {"kv_connector": CONNECTORS[connector], "kv_role": "kv_both"}
    if connector == "example":
        transfer["kv_connector_extra_config"] = {"shared_storage_path": str(storage)}
    else:
        transfer["kv_buffer_device"] = "cpu"
    flags = ("--kv-transfer-config", json.dumps(transfer))
    with start_engines(*ROLES, flags=flags) as running:
        yield running


@pytest.fixture
def instances(connector: str) -> dict[str, dict[str, str]]:
    return {name: {"role": role, "connector": connector} for name, role in ROLES.items()}


@pytest.fixture
def cold(engines: dict[str, Any], storage: Path) -> dict[str, Any]:
    """All engines with nothing cached, and an empty shared directory."""
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
    for name in ROLES:
        kvlb.catch_up(name)
    return turn


def prefill_legs(kvlb: Any) -> list[dict[str, Any]]:
    """What the prefill engine was expected to hold, and what it reported, leg by leg."""
    records = kvlb.get("/explain/recent?limit=100").json()["decisions"]
    return [leg for record in records for leg in record["legs"] if leg["leg"] == "prefill"]


def test_the_first_turn_is_prefilled_elsewhere_and_a_later_one_is_not(
    cold: dict[str, Any],
    connector: str,
    instances: dict[str, dict[str, str]],
    start_kvlb: Callable[..., Any],
    conversations: Callable[..., Any],
    record_figures: Callable[..., None],
) -> None:
    """Turn 1 is loaded from the prefill engine; a short turn 2 isn't; a long turn 3 is again.

    The client reads what was cached where its prompt was computed (`dataplane.usage_of_prefill`), which
    is what was predicted; what the decode engine has loaded is its own metric's to tell.
    """
    chats = conversations(SEED, COUNT)
    decode = Decode(cold["d0"])
    rounds = []
    with start_kvlb(cold, instances=instances, settings=SETTINGS) as kvlb:
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
            connector=connector,
            turn=name,
            prefill=sorted({turn.prefill for turn, _ in turns}),
            prompt_overlap_cached_loaded=[
                (turn.prompt_tokens, turn.overlap_tokens, turn.cached_tokens, loaded)
                for turn, loaded in turns
            ],
        )

    assert {turn.prefill for turn, _ in first} == {"p0"}
    assert {turn.reason for turn, _ in first} == {"remote_prefill"}
    assert all(loaded > 0 for _, loaded in first)
    assert {(turn.prefill, turn.reason) for turn, _ in second} == {("skipped", "decode_has_cache")}
    assert all(loaded == 0 for _, loaded in second)
    for turns in rounds:
        assert [each.overlap_tokens for each, _ in turns] == [
            each.cached_tokens for each, _ in turns
        ]
    assert {turn.reason for turn, _ in third} == {"remote_prefill"}
    assert all(loaded > 0 for _, loaded in third)
    assert len(legs) == len(first) + len(third)
    assert [leg["overlap_tokens"] for leg in legs] == [leg["cached_tokens"] for leg in legs]


def test_texts_are_those_of_one_engine_asked_directly(
    cold: dict[str, Any],
    storage: Path,
    instances: dict[str, dict[str, str]],
    start_kvlb: Callable[..., Any],
    conversations: Callable[..., Any],
) -> None:
    """With a prefill leg or without one, the same words."""
    chats = conversations(SEED, COUNT)
    with start_kvlb(cold, instances=instances, settings=SETTINGS) as kvlb:
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


def test_a_prefill_engine_killed_during_its_leg_is_missed_by_nobody(
    cold: dict[str, Any],
    instances: dict[str, dict[str, str]],
    start_kvlb: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    """The client gets the words of an undisturbed engine, from D alone; P comes back and is used."""
    prefill, decode = cold["p0"], cold["d0"]
    alone = [complete(decode, number) for number in (1, 2)]
    decode.reset_cache()
    settings = SETTINGS | {"pd": SETTINGS["pd"] | {"allow_local_on_failure": True}}
    with (
        start_kvlb(cold, instances=instances, settings=settings) as kvlb,
        ThreadPoolExecutor(1) as pool,
    ):
        prefill.process.pause()
        asked = pool.submit(complete, kvlb, 1)
        wait_until(lambda: has_leg(kvlb, "p0"), 10, "a prefill leg")
        prefill.process.end()
        answer = asked.result(timeout=60)
        wait_until(lambda: is_idle(decode), 30, "the decode engine to have nothing to do")
        wait_until(lambda: not kvlb.is_warm(), 30, "p0's loss to be noticed")
        prefill.process.start()
        wait_until(kvlb.is_warm, 240, "p0 to come back")
        after = complete(kvlb, 2)

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvlb-instance"] == "d0"
    assert after.headers["x-kvlb-prefill"] == "p0"
    assert [text_of(answer), text_of(after)] == [text_of(each) for each in alone]


def complete(server: Any, number: int) -> Any:
    """Ask kvlb or an engine for a completion of token ids: nobody has to be asked for tokens."""
    chance = Random(SEED + number)  # noqa: S311 - no secret
    prompt = [chance.randrange(100, 400) for _ in range(11 * BLOCK_TOKENS + 7)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return server.http.post(f"{server.url}/v1/completions", json=body)


def text_of(answer: Any) -> str:
    text: str = answer.json()["choices"][0]["text"]
    return text


def has_leg(kvlb: Any, alias: str) -> bool:
    instances = kvlb.get("/status").json()["instances"]
    (ranks,) = [each["ranks"] for each in instances if each["alias"] == alias]
    return any(rank["load"]["requests"] for rank in ranks)


def is_idle(engine: Any) -> bool:
    running = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return not any(engine.metric(name) for name in running)
