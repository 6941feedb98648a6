"""The engine core against recordings of real vLLM: the same requests, the same cache.

The serial phase of a recording is played through the core with the recorded tokens. Compared are
the cached tokens of every request and the stream of events: which blocks are stored and removed,
in which order. Not compared: how events are cut into batches (vLLM 0.32 schedules ahead), and
whatever happened concurrently, because arrival order inside the engine was not recorded.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from simulator.core.engine import EngineCore
from simulator.core.generation import FixedTokens
from simulator.core.settings import EngineSettings
from simulator.core.transfer import SideChannel, TransferDirectory
from simulator.core.types import BlockRemoved, BlockStored, EngineRequest, KvEvent

CAPTURES = Path(__file__).parent.parent / "captures"
UNKNOWN_TOKEN = 5
LONGEST_EVENT_DELAY_S = 2.0

Chain = tuple[int, ...]
"""All tokens from the start of a prompt to the end of a block: what the block is, whoever hashes."""

Event = tuple[str, tuple[Chain, ...]]


@dataclass
class Announced:
    """One recorded event and when the engine published it."""

    kind: str
    chains: tuple[Chain, ...]
    published_s: float


@dataclass
class Recording:
    """One capture: what was asked and what was announced."""

    block_size: int
    settings: EngineSettings
    requests: list[dict[str, Any]]
    announced: list[Announced] = field(default_factory=list)


def read_lines(name: str, kind: str) -> Iterator[dict[str, Any]]:
    with gzip.open(CAPTURES / f"{name}.{kind}.jsonl.gz", "rt") as lines:
        yield from map(json.loads, lines)


def load(name: str, version: str) -> Recording:
    rows = list(read_lines(name, "requests"))
    config = rows[0]
    settings = EngineSettings(
        version=version,
        block_size=config["block_size"],
        num_blocks=config["num_blocks"],
        max_model_len=config["maxlen"],
        max_num_batched_tokens=2048,
        max_num_seqs=16,
    )
    requests = [row for row in rows if row["kind"] == "request"]
    recording = Recording(config["block_size"], settings, requests)
    chain_of: dict[object, Chain] = {None: ()}
    for line in read_lines(name, "events"):
        payload = msgspec.msgpack.decode(bytes.fromhex(line["frames"][2]))
        for event in payload[1]:
            recording.announced.append(
                read_event(event, payload[0], chain_of, config["block_size"])
            )
    return recording


def read_event(
    event: Any, published_s: float, chain_of: dict[object, Chain], block_size: int
) -> Announced:
    """Read the two wire formats the recordings have."""
    if isinstance(event, dict):
        kind, hashes = event["type"], event.get("block_hashes", [])
        parent, tokens = event.get("parent_block_hash"), event.get("token_ids", [])
    else:
        kind, hashes = event[0], event[1] if len(event) > 1 else []
        parent, tokens = (event[2], event[3]) if len(event) > 3 else (None, [])
    if kind == "BlockStored":
        chain = chain_of[parent]
        for index, block_hash in enumerate(hashes):
            chain += tuple(tokens[index * block_size : (index + 1) * block_size])
            chain_of[block_hash] = chain
    return Announced(kind, tuple(chain_of[block_hash] for block_hash in hashes), published_s)


class Player:
    """Plays requests through an engine core and writes down what it announces."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.events: list[Event] = []
        self._now_s = 0.0
        self._chain_of: dict[bytes | None, Chain] = {None: ()}
        self.core = EngineCore(
            recording.settings,
            none_hash=b"seed",
            channel=SideChannel(engine_id="e", host="h", port=1),
            directory=TransferDirectory(),
        )

    def play(self, requests: list[EngineRequest], *, first_alone: bool = False) -> dict[str, int]:
        """Run requests to their end and return their cached tokens by id."""
        cached: dict[str, int] = {}
        for index, request in enumerate(requests):
            self.core.add(request, self._now_s)
            if first_alone and index == 0:
                self._step(cached)
        while self.core.has_work:
            self._step(cached)
        return cached

    def _step(self, cached: dict[str, int]) -> None:
        result = self.core.step(self._now_s)
        self._now_s += result.duration_s
        cached.update((output.request_id, output.cached_tokens) for output in result.outputs)
        self.events.extend(map(self._read, result.events))

    def _read(self, event: KvEvent) -> Event:
        if isinstance(event, BlockStored):
            size, chain = self.recording.block_size, self._chain_of[event.parent]
            for index, block_hash in enumerate(event.hashes):
                chain += tuple(event.token_ids[index * size : (index + 1) * size])
                self._chain_of[block_hash] = chain
            return "BlockStored", tuple(self._chain_of[block_hash] for block_hash in event.hashes)
        if isinstance(event, BlockRemoved):
            return "BlockRemoved", (self._chain_of[event.hash],)
        return "AllBlocksCleared", ()


def stored_between(recording: Recording, start_s: float, end_s: float) -> list[Chain]:
    return [
        chain
        for event in recording.announced
        if event.kind == "BlockStored" and start_s <= event.published_s <= end_s
        for chain in event.chains
    ]


def longest(chains: list[Chain], prompt: Chain) -> Chain:
    """Return the longest chain that begins with the prompt."""
    matching = [chain for chain in chains if chain[: len(prompt)] == prompt]
    return max(matching, key=len, default=prompt)


def sequences_of(
    recording: Recording, row: dict[str, Any], end_s: float
) -> list[tuple[Chain, Chain]]:
    """Return (prompt, generated tokens) for each sequence of a recorded request.

    Answers recorded as text don't tell their tokens, but the blocks they filled do; tokens after
    the last full block never matter.
    """
    choices = row["response"].get("choices") if isinstance(row["response"], dict) else None
    if choices and choices[0].get("token_ids"):
        prompts = [choice.get("prompt_token_ids") or row["tokenize"] for choice in choices]
        return [
            (tuple(prompt), tuple(choice["token_ids"]))
            for prompt, choice in zip(prompts, choices, strict=True)
        ]
    stored = stored_between(recording, row["t0"], end_s)
    if row["tokenize"]:
        prompt = tuple(row["tokenize"])
        filled = longest(stored, prompt)
        generated = (row["usage"] or {}).get("completion_tokens")
        if generated is None:  # cut by the client: it got some chunks, the engine went further
            generated = max(row["cut"], len(filled) - len(prompt) + 1)
    else:  # /v1/responses and /v1/messages: only the blocks tell the prompt
        usage = row["response"]["usage"]
        read_tokens = usage.get("cache_read_input_tokens", 0)
        # A prompt that was read from the cache stored nothing: it is the one asked just before.
        start_s = row["t0"] - 1 if read_tokens else row["t0"]
        prompt_tokens = usage["input_tokens"] + read_tokens
        stored = [
            chain
            for chain in stored_between(recording, start_s, end_s)
            if not read_tokens or len(chain) == read_tokens
        ]
        known = (stored[-1] if read_tokens else max(stored, key=len))[:prompt_tokens]
        prompt = known + (UNKNOWN_TOKEN,) * (prompt_tokens - len(known))
        filled, generated = prompt, usage["output_tokens"]
    tokens = filled[len(prompt) :] + (UNKNOWN_TOKEN,) * generated
    return [(prompt, tokens[:generated])]


def requests_of(recording: Recording, row: dict[str, Any], end_s: float) -> list[EngineRequest]:
    body = row["body"]
    skips_cache = body.get("prompt_logprobs") or (body.get("echo") and body.get("logprobs"))
    xargs = body.get("vllm_xargs") or {}
    return [
        EngineRequest(
            request_id=f"{row['i']}-{index}",
            prompt_token_ids=prompt,
            sampler=FixedTokens(generated),
            max_tokens=max(1, len(generated)),
            ignore_eos=True,
            cache_salt=body.get("cache_salt"),
            reads_cache=not skips_cache,
            reports_full=xargs.get("kv_cache_report_mode") == "full",
        )
        for index, (prompt, generated) in enumerate(sequences_of(recording, row, end_s))
    ]


def reported_cached_tokens(row: dict[str, Any]) -> int | None:
    """What the engine said; None if the recording doesn't tell or the paths count differently."""
    if not row["path"].endswith("completions") or not row["usage"]:
        return None
    details = row["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens", 0))


def play_serial(recording: Recording) -> tuple[Player, list[tuple[str, int, int]]]:
    """Play everything before the load phase; return what each request cached, ours and theirs."""
    player = Player(recording)
    compared: list[tuple[str, int, int]] = []
    rows = [row for row in recording.requests if row["status"] == 200]
    before_load = rows[: next(i for i, row in enumerate(rows) if row["phase"] == "load")]
    parallel: list[EngineRequest] = []
    for row, following in zip(before_load, rows[1:], strict=False):
        end_s = max(row["t1"], min(row["t1"] + LONGEST_EVENT_DELAY_S, following["t0"]))
        requests = requests_of(recording, row, end_s)
        if row["phase"] == "parallel":
            # The one that found nothing in the cache was the first inside the engine.
            first = not reported_cached_tokens(row)
            parallel = requests + parallel if first else parallel + requests
            if following["phase"] != "parallel":
                player.play(parallel, first_alone=True)
            continue
        cached = player.play(requests)
        reported = reported_cached_tokens(row)
        if reported is not None:
            compared.append((row["label"], cached[requests[-1].request_id], reported))
    return player, compared


@pytest.mark.parametrize(
    ("name", "version", "least_compared"),
    [
        pytest.param("a-bs32-sha256", "0.32.0", 146, id="0.32-blocks-of-32"),
        pytest.param("b-bs128-sha256cbor", "0.32.0", 111, id="0.32-blocks-of-128"),
        pytest.param("f-v016-bs16-sha256", "0.16.0", 169, id="0.16-blocks-of-16"),
    ],
)
def test_serial_requests_find_in_the_cache_what_they_found_in_vllm(
    name: str, version: str, least_compared: int
) -> None:
    """Every serial request has exactly the cached tokens that real vLLM reported."""
    _player, compared = play_serial(load(name, version))

    assert [row for row in compared if row[1] != row[2]] == []
    assert len(compared) >= least_compared


@pytest.mark.parametrize(
    ("name", "version", "events"),
    [
        # To the load phase, parallel phase included: every event.
        pytest.param("a-bs32-sha256", "0.32.0", 1011, id="0.32-blocks-of-32"),
        # To the parallel phase, whose interleaving wasn't recorded.
        pytest.param("b-bs128-sha256cbor", "0.32.0", 127, id="0.32-blocks-of-128"),
        pytest.param("f-v016-bs16-sha256", "0.16.0", 178, id="0.16-blocks-of-16"),
    ],
)
def test_blocks_are_stored_and_removed_in_the_order_of_vllm(
    name: str, version: str, events: int
) -> None:
    """The same blocks are announced and evicted in the same order, duplicates included."""
    recording = load(name, version)
    player, _compared = play_serial(recording)

    theirs = [(event.kind, event.chains) for event in recording.announced[:events]]
    assert player.events[:events] == theirs
    assert len(player.events) >= events
