"""Seeded workloads that no trace has: chats in a tight cache, and bursts of agents.

Whoever sends a call waits for the answer before it, and then for a while; the answer is part of
the next prompt. A speed makes conversations begin faster; pauses stay as they are.
"""

import random
from dataclasses import dataclass

from indexer.core.types import BlockKey
from kvlb.bench.calls import Call, KeyedPrompt

_LINE_BITS = 24
_FIRST_HELPER = 1 << 20


class _Line:
    """One thread of conversation: which key each of its blocks has."""

    def __init__(self, number: int, block_size: int, begin: "list[BlockKey]", tokens: int) -> None:
        """It goes on where `tokens` tokens with the full blocks `begin` end."""
        self._number = number
        self._block_size = block_size
        self._begin = begin
        self.tokens = tokens

    def keys(self, tokens: int) -> list[BlockKey]:
        """Of the full blocks of its first `tokens`."""
        own = range(len(self._begin), tokens // self._block_size)
        first = self._number << _LINE_BITS
        return [*self._begin, *(BlockKey(first + block) for block in own)]

    def ask(self, tokens: int, output_tokens: int) -> tuple[int, list[BlockKey]]:
        """Add a message and its answer; the prompt's length, and keys of all of it."""
        self.tokens += tokens
        prompt_tokens = self.tokens
        self.tokens += output_tokens
        return prompt_tokens, self.keys(self.tokens)

    def branch(self, number: int) -> "_Line":
        """Another line with the same past."""
        keys = self.keys(self.tokens)
        return _Line(number, self._block_size, keys, self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    """Users who talk to an assistant that has one system prompt."""

    conversations: int
    block_size: int = 16
    turns: int = 8
    system_tokens: int = 600
    first_tokens: tuple[int, int] = (200, 1_200)
    next_tokens: tuple[int, int] = (60, 360)
    output_tokens: tuple[int, int] = (40, 160)
    pause_s: float = 1.0
    begin_per_s: float = 1.0

    def calls(self, *, speed: float, seed: int) -> list[Call]:
        """The conversations of a seed."""
        chance = random.Random(seed)  # noqa: S311 - a benchmark's workload
        system = _Line(1, self.block_size, [], self.system_tokens)
        calls: list[Call] = []
        now_s = 0.0
        for conversation in range(self.conversations):
            now_s += chance.expovariate(self.begin_per_s * speed)
            line = system.branch(conversation + 2)
            for turn in range(self.turns):
                asked = self.next_tokens if turn else self.first_tokens
                output_tokens = chance.randint(*self.output_tokens)
                tokens, keys = line.ask(chance.randint(*asked), output_tokens)
                calls.append(
                    Call(
                        at_s=chance.expovariate(1 / self.pause_s) if turn else now_s,
                        prompt=_prompt(tokens, keys, self.block_size),
                        keys=keys,
                        output_tokens=output_tokens,
                        session=f"c{conversation}",
                        after=len(calls) - 1 if turn else None,
                    )
                )
        return calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """Agents that start in bursts, read long tool results, and ask helpers side by side."""

    sessions: int
    block_size: int = 64
    projects: int = 3
    """Each has its own system prompt and tools, which its sessions share."""
    system_tokens: int = 4_000
    steps: tuple[int, int] = (4, 9)
    tool_tokens: tuple[int, int] = (100, 2_000)
    output_tokens: tuple[int, int] = (30, 300)
    helpers: tuple[int, int] = (2, 6)
    helper_share: float = 0.2
    """Of the steps, those after which helpers are asked."""
    burst: tuple[int, int] = (1, 8)
    pause_s: float = 1.5
    begin_per_s: float = 1.0

    def calls(self, *, speed: float, seed: int) -> list[Call]:
        """The sessions of a seed."""
        chance = random.Random(seed)  # noqa: S311 - a benchmark's workload
        lines = iter(range(1, 10**6))
        systems = [
            _Line(next(lines), self.block_size, [], self.system_tokens)
            for _ in range(self.projects)
        ]
        calls: list[Call] = []
        now_s, in_burst = 0.0, 0
        for session in range(self.sessions):
            if not in_burst:
                in_burst = chance.randint(*self.burst)
                now_s += chance.expovariate(self.begin_per_s * speed / in_burst)
            in_burst -= 1
            line = chance.choice(systems).branch(next(lines))
            self._session(calls, line, chance, f"a{session}", now_s)
        return calls

    def _session(
        self, calls: list[Call], line: _Line, chance: random.Random, name: str, begin_s: float
    ) -> None:
        previous = None
        for _ in range(chance.randint(*self.steps)):
            pause_s = chance.expovariate(1 / self.pause_s)
            at_s = begin_s if previous is None else pause_s
            calls.append(self._call(line, chance, name, at_s, previous))
            previous = len(calls) - 1
            if chance.random() < self.helper_share:
                for _ in range(chance.randint(*self.helpers)):
                    helper = line.branch(len(calls) + _FIRST_HELPER)
                    calls.append(self._call(helper, chance, name, 0.05, previous))

    def _call(
        self, line: _Line, chance: random.Random, name: str, at_s: float, after: int | None
    ) -> Call:
        output_tokens = chance.randint(*self.output_tokens)
        tokens, keys = line.ask(chance.randint(*self.tool_tokens), output_tokens)
        return Call(
            at_s=at_s,
            prompt=_prompt(tokens, keys, self.block_size),
            keys=keys,
            output_tokens=output_tokens,
            session=name,
            after=after,
        )


def _prompt(tokens: int, keys: list[BlockKey], block_size: int) -> KeyedPrompt:
    return KeyedPrompt(tokens, keys[: tokens // block_size], block_size)
