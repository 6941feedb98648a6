"""A real `kvlb up` in front of real engines, and the conversations that go through it."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import yaml

WORDS = (  # noqa: SIM905 - a list literal would take forty lines
    "train module state paris winter mountain question stream request number client madrid value "
    "error table server column item stored index lima import layer tokyo prefix garden cache "
    "doctor token engine session music report ticket user file hidden"
).split()


@dataclass(slots=True, kw_only=True)
class Kvlb:
    """A running `kvlb up` and the engines behind it."""

    http: httpx.Client
    url: str
    engines: Mapping[str, Any]
    wait_until: Callable[..., None]

    def get(self, path: str) -> httpx.Response:
        return self.http.get(f"{self.url}{path}")

    def is_warm(self) -> bool:
        """Every instance can be asked and every event stream is complete."""
        try:
            ready = self.get("/ready")
            return ready.status_code == 200 and not ready.json()["reasons"] and self._follows_all()
        except httpx.TransportError:
            return False

    def _follows_all(self) -> bool:
        return all(
            (index := self.index_of(name, rank)) is not None and index["trust"] == "exact"
            for name, engine in self.engines.items()
            for rank in range(engine.ranks)
        )

    def index_of(self, name: str, rank: int = 0) -> dict[str, Any] | None:
        """What the indexer says of one rank of an instance."""
        for instance in self.get("/status").json()["instances"]:
            if instance["alias"] == name and rank < len(instance["ranks"]):
                found: dict[str, Any] | None = instance["ranks"][rank]["index"]
                return found
        return None

    def applied_seq(self, name: str, rank: int = 0) -> int:
        index = self.index_of(name, rank)
        return -1 if index is None or index["last_seq"] is None else int(index["last_seq"])

    def catch_up(self, name: str) -> None:
        """Wait until the index has applied every batch that the engine has published."""
        engine = self.engines[name]
        for rank in range(engine.ranks):
            published = engine.newest_seq(self.applied_seq(name, rank), rank)
            self._await_batch(name, rank, published)

    def _await_batch(self, name: str, rank: int, published: int) -> None:
        self.wait_until(
            lambda: self.applied_seq(name, rank) >= published,
            10,
            f"batch {published} of {name}'s rank {rank}",
        )

    def ask(self, body: Mapping[str, Any]) -> httpx.Response:
        return self.http.post(f"{self.url}/v1/chat/completions", json=body)


StartKvlb = Callable[..., AbstractContextManager[Kvlb]]


@pytest.fixture
def start_kvlb(
    http: httpx.Client,
    tmp_path: Path,
    free_port: Callable[[], int],
    start_process: Callable[..., AbstractContextManager[Any]],
    wait_until: Callable[..., None],
) -> StartKvlb:
    """Starts `kvlb up` in front of engines; `settings` are further keys of its file."""

    @contextmanager
    def start(
        engines: Mapping[str, Any],
        *arguments: str,
        instances: Mapping[str, Mapping[str, str]] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Iterator[Kvlb]:
        port = free_port()
        described = [
            {"url": engine.url, "alias": name, **(instances or {}).get(name, {})}
            for name, engine in engines.items()
        ]
        config = tmp_path / f"kvlb-{port}.yaml"
        config.write_text(yaml.safe_dump({"instances": described, **(settings or {})}))
        up = [sys.executable, "-m", "kvlb", "up", "--config", str(config), "--port", str(port)]
        url = f"http://127.0.0.1:{port}"
        kvlb = Kvlb(http=http, url=url, engines=engines, wait_until=wait_until)
        log = tmp_path / f"kvlb-{port}.log"
        with start_process([*up, *arguments], log, kvlb.is_warm, 60):
            yield kvlb

    return start


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a conversation, and what came of it."""

    conversation: int
    instance: str
    prefill: str
    reason: str
    overlap_tokens: int | None
    prompt_tokens: int
    cached_tokens: int
    text: str


@dataclass(slots=True)
class Conversations:
    """Chats that share no system prompt, continued with the answers they got."""

    seed: int
    count: int
    first_words: int = 90
    next_words: int = 40
    _chance: Random = field(init=False)
    _messages: list[list[dict[str, str]]] = field(init=False)

    def __post_init__(self) -> None:
        self._chance = Random(self.seed)  # noqa: S311 - no secret
        self._messages = [[self._user(self.first_words)] for _ in range(self.count)]

    def _user(self, words: int) -> dict[str, str]:
        return {"role": "user", "content": " ".join(self._chance.choices(WORDS, k=words))}

    def body(self, number: int, max_tokens: int = 24) -> dict[str, Any]:
        """The next request of a conversation."""
        return {
            "model": "tiny",
            "messages": list(self._messages[number]),
            "max_tokens": max_tokens,
            "temperature": 0,
        }

    def answered(self, number: int, text: str, *, next_words: int | None = None) -> None:
        """Go on with this answer and a new question."""
        self._messages[number] += [
            {"role": "assistant", "content": text},
            self._user(self.next_words if next_words is None else next_words),
        ]

    def lengthen(self, number: int) -> None:
        """Add a word to the last question."""
        self._messages[number][-1]["content"] += f" {self._chance.choice(WORDS)}"

    def order(self, turns: int) -> list[int]:
        """Every conversation's turns, shuffled."""
        order = [number for number in range(self.count) for _ in range(turns)]
        Random(self.seed).shuffle(order)  # noqa: S311 - no secret
        return order

    @staticmethod
    def read(number: int, answer: httpx.Response) -> Turn:
        """What kvlb said beforehand and what the engine reported."""
        assert answer.status_code == 200, answer.text
        body, headers = answer.json(), answer.headers
        overlap = headers.get("x-kvlb-overlap-tokens")
        return Turn(
            conversation=number,
            instance=headers["x-kvlb-instance"],
            prefill=headers["x-kvlb-prefill"],
            reason=headers["x-kvlb-reason"],
            overlap_tokens=None if overlap is None else int(overlap),
            prompt_tokens=body["usage"]["prompt_tokens"],
            cached_tokens=body["usage"]["prompt_tokens_details"]["cached_tokens"],
            text=body["choices"][0]["message"]["content"],
        )


@pytest.fixture(scope="session")
def conversations() -> Callable[..., Conversations]:
    """A factory of conversations from a seed."""
    return Conversations


@pytest.fixture(scope="session")
def record_figures() -> Callable[..., None]:
    """Print figures for docs/real-engine.md; `pytest -rP` shows them of tests that passed."""

    def record(**figures: object) -> None:
        sys.stdout.write(json.dumps(figures) + "\n")

    return record
