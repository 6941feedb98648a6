"""The workloads of `kvlb bench routing`, and the engines that serve them.

Every workload has too little cache for all of it, as fleets in use have. Engines are otherwise
alike: 20,000 prompt tokens a second (chats have a slower one), steps of 10 ms, 8,192 tokens a step,
64 seats. Workloads made of sessions are long enough that at most a quarter of those are under way
at once near saturation; with fewer, a load would be over before queues tell that it is too much.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvlb.bench.calls import MODEL, Call
from kvlb.bench.synthetic import Agents, Chats
from kvlb.bench.traces import DATA, Row, as_calls, as_sessions, copied, read_chats, read_ids
from simulator.core.settings import EngineSettings

CONVERSATION_ROWS = 1_500
PART_ENGINES, PART_GROWTH = 4, 0.8
"""Four engines get one part of a workload made of sessions, 8 two, 16 three: the table's time."""
SWE_COPIES = 10
CHATS = 180
AGENTS = 120
"""All three in one part."""

Calls = Callable[[int, float, int], Sequence[Call]]
"""Of a number of engines, a speed and a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is sent, and what the engines have to serve it with."""

    name: str
    about: str
    block_size: int
    cache_tokens: int
    """Of one engine."""
    calls: Calls
    prefill_tokens_per_s: float = 20_000.0

    @property
    def engine(self) -> EngineSettings:
        """One engine of its fleet."""
        return EngineSettings(
            model=MODEL,
            block_size=self.block_size,
            num_blocks=self.cache_tokens // self.block_size + 1,
            max_model_len=self.cache_tokens,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
        )


def _parts(engines: int) -> int:
    return max(1, round(float((engines / PART_ENGINES) ** PART_GROWTH)))


@cache
def _weka(copies: int) -> Sequence[Row]:
    path = DATA / "weka_agentic_flat_small.jsonl.gz"
    return copied(read_ids(path, trace_block=64, block_size=64, limit=None), copies)


@cache
def _mooncake(path: Path, limit: int | None) -> Sequence[Row]:
    return read_ids(path, trace_block=512, block_size=64, limit=limit)


@cache
def _swe(copies: int) -> Sequence[Row]:
    return copied(read_chats(DATA / "swe_agent_chats.jsonl.gz", block_size=16), copies)


def _weka_calls(engines: int, speed: float, seed: int) -> Sequence[Call]:
    return as_calls(_weka(_parts(engines)), block_size=64, speed=speed, shift_s=30.0, seed=seed)


def _arxiv_calls(_engines: int, speed: float, seed: int) -> Sequence[Call]:
    rows = _mooncake(DATA / "mooncake_arxiv_first1000.jsonl.gz", None)
    return as_calls(rows, block_size=64, speed=speed, shift_s=3.0, seed=seed)


def _conversation_calls(_engines: int, speed: float, seed: int) -> Sequence[Call]:
    rows = _mooncake(DATA / "mooncake_conversation_first2000.jsonl.gz", CONVERSATION_ROWS)
    return as_calls(rows, block_size=64, speed=speed, shift_s=3.0, seed=seed)


def _swe_calls(engines: int, speed: float, seed: int) -> Sequence[Call]:
    return as_sessions(_swe(SWE_COPIES * _parts(engines)), block_size=16, speed=speed, seed=seed)


def _chat_calls(engines: int, speed: float, seed: int) -> Sequence[Call]:
    return Chats(conversations=CHATS * _parts(engines)).calls(speed=speed, seed=seed)


def _agent_calls(engines: int, speed: float, seed: int) -> Sequence[Call]:
    return Agents(sessions=AGENTS * _parts(engines)).calls(speed=speed, seed=seed)


WORKLOADS: Mapping[str, Workload] = {
    each.name: each
    for each in (
        Workload(
            name="conversation",
            about=f"Mooncake's conversations, the first {CONVERSATION_ROWS:,} of 12,031 calls",
            block_size=64,
            cache_tokens=524_288,
            calls=_conversation_calls,
        ),
        Workload(
            name="arxiv",
            about="the first 1,000 calls of Mooncake's arXiv trace",
            block_size=64,
            cache_tokens=262_144,
            calls=_arxiv_calls,
        ),
        Workload(
            name="weka",
            about="40 sessions of a coding agent, 583 calls; copied for larger fleets",
            block_size=64,
            cache_tokens=196_608,
            calls=_weka_calls,
        ),
        Workload(
            name="swe",
            about=f"13 chats of SWE-agent, 126 calls, {SWE_COPIES} copies; more for larger fleets",
            block_size=16,
            cache_tokens=32_768,
            calls=_swe_calls,
        ),
        Workload(
            name="chat",
            about=f"synthetic: {CHATS} chats of 8 turns, one system prompt; more for larger fleets",
            block_size=16,
            cache_tokens=16_384,
            prefill_tokens_per_s=8_000.0,
            calls=_chat_calls,
        ),
        Workload(
            name="agents",
            about=f"synthetic: {AGENTS} agents in bursts, with helpers; more for larger fleets",
            block_size=64,
            cache_tokens=65_536,
            calls=_agent_calls,
        ),
    )
}
