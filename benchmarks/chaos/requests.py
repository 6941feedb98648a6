"""What clients ask, drawn from a seed, and what any engine answers that does its work. Pure.

The answer is the simulator's own: its chat template, its tokenizer, its sampler. Prompts share
prefixes, and some come twice, so that caches matter.

`ExampleConnector` engines die of a prompt of one token more than full blocks, if an earlier one left
a folder of that name (docs/connectors.md): before them no prompt has that length.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from simulator.core import tokenizer
from simulator.core.chat_template import render_chat
from simulator.core.generation import seed_answer

_BLOCK_TOKENS = 16
_PREFIXES = 12
_PREFIX_TOKENS = (200, 1200)
_OWN_TOKENS = (10, 300)
_ANSWER_TOKENS = (4, 20)
_LONG_ANSWER_TOKENS = (50, 120)
_LONG_SHARE = 0.12
_REPEAT_SHARE = 0.1
_STREAM_SHARE = 0.6
_LEAVING_SHARE = 0.04
_LEAVES_WITHIN_S = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of one client, and its right answer."""

    id: str
    at_s: float
    path: str
    body: dict[str, Any]
    text: str
    tokens: int
    leaves_after_s: float | None = None
    """The client goes away, whatever it has by then."""

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def is_chat(self) -> bool:
        return "messages" in self.body


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    path: str
    body: dict[str, Any]
    token_ids: Sequence[int]


def draw_requests(
    chance: random.Random, seed: int, count: int, rate_per_s: float, *, spares_storage: bool = False
) -> list[Ask]:
    """Draw the requests of one run, in the order in which they are sent."""
    prefixes = [_write(chance, _PREFIX_TOKENS) for _ in range(_PREFIXES)]
    prompts: list[_Prompt] = []
    asks: list[Ask] = []
    at_s = 0.0
    for number in range(count):
        at_s += chance.expovariate(rate_per_s)
        if prompts and chance.random() < _REPEAT_SHARE:
            prompt = chance.choice(prompts)
        else:
            prompt = _draw_prompt(chance, prefixes, spares_storage=spares_storage)
            prompts.append(prompt)
        asks.append(_ask(chance, f"chaos-{seed}-{number:05}", at_s, prompt))
    return asks


def _draw_prompt(
    chance: random.Random, prefixes: Sequence[str], *, spares_storage: bool
) -> _Prompt:
    """One prompt as token ids, as text or as a chat."""
    kind = chance.choice(("ids", "text", "chat"))
    prefix, own = chance.choice(prefixes), _write(chance, _OWN_TOKENS)
    prompt = _write_prompt(kind, prefix, own)
    if spares_storage and len(prompt.token_ids) % _BLOCK_TOKENS == 1:
        return _write_prompt(kind, prefix, own + "x")
    return prompt


def _write_prompt(kind: str, prefix: str, own: str) -> _Prompt:
    if kind == "chat":
        messages = [{"role": "system", "content": prefix}, {"role": "user", "content": own}]
        token_ids = tokenizer.encode(render_chat(messages), add_special_tokens=False)
        return _Prompt(
            path="/v1/chat/completions", body={"messages": messages}, token_ids=token_ids
        )
    token_ids = tokenizer.encode(prefix + own, add_special_tokens=kind == "text")
    prompt: Any = prefix + own if kind == "text" else token_ids
    return _Prompt(path="/v1/completions", body={"prompt": prompt}, token_ids=token_ids)


def _ask(chance: random.Random, name: str, at_s: float, prompt: _Prompt) -> Ask:
    is_long = chance.random() < _LONG_SHARE
    tokens = chance.randint(*(_LONG_ANSWER_TOKENS if is_long else _ANSWER_TOKENS))
    body = {"model": "sim", "max_tokens": tokens, "ignore_eos": True, **prompt.body}
    if chance.random() < _STREAM_SHARE:
        body["stream"] = True
        if chance.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
    sampler = seed_answer(prompt.token_ids)
    said = [sampler.token_at(index, may_end=False) for index in range(tokens)]
    leaves = chance.random() < _LEAVING_SHARE
    return Ask(
        id=name,
        at_s=at_s,
        path=prompt.path,
        body=body,
        text=tokenizer.decode(said),
        tokens=tokens,
        leaves_after_s=chance.uniform(0.0, _LEAVES_WITHIN_S) if leaves else None,
    )


def _write(chance: random.Random, tokens: tuple[int, int]) -> str:
    """Return a text of so many tokens: a letter is one."""
    return "".join(chance.choices("abcdefghijklmnopqrstuvwxyz ", k=chance.randint(*tokens)))
