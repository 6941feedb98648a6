"""What a conversation's next turn costs: `python -m benchmarks.tokens` prints a markdown table.

From messages to ids with the tokenizer of `tests/tokenizer` and templates of `tests/chat_templates`:
shown to the template, rendered, cut, looked up, and the new pieces tokenised.
"""

import gc
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any

from balancer.core.prompt.shape import ChatShape
from balancer.core.prompt.token_cache import TokenCache, Tokens
from balancer.core.settings.control import EngineFlags
from balancer.tokens.directory import load_tokenizer
from balancer.tokens.local import LocalTokenizer

TESTS = Path(__file__).parents[1] / "tests"
ROUNDS = 9
MESSAGE_WORDS = 110
"""About 400 tokens of this tokenizer."""
MESSAGES = (10, 75, 300)
"""Before the new ones: about 5,000, 37,000 and 146,000 tokens."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": "Looks something up, and says what it has found. " * 5,
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
        },
    }
    for number in range(20)
]


class Known:
    """What has been read before."""

    def __init__(self) -> None:
        self._cache = TokenCache(limit_bytes=64 << 20)

    def recall(self, key: bytes, /) -> Tokens | None:
        return self._cache.get(key)

    def remember(self, key: bytes, tokens: Tokens, /) -> None:
        self._cache.put(key, tokens)


def words() -> Sequence[str]:
    """Code, as agents read it."""
    return (Path(__file__).parents[1] / "balancer/app.py").read_text("utf-8").split()


def conversation(messages: int, chance: random.Random) -> list[dict[str, Any]]:
    """User and assistant in turn, the user last."""
    found = words()
    return [
        {
            "role": ("user", "assistant")[(messages - 1 - number) % 2],
            "content": " ".join(chance.choices(found, k=MESSAGE_WORDS)),
        }
        for number in range(messages)
    ]


def measure_ms(
    tokenizer: LocalTokenizer, messages: int, tools: list[dict[str, Any]] | None
) -> tuple[int, float, float, float]:
    """Tokens, and the CPU of the first reading, of the next turn, and of the same turn once more."""
    cold, following, again = [], [], []
    ids: array[int] = array("I")
    for number in range(ROUNDS):
        chance = random.Random(number)  # noqa: S311 - a benchmark's workload
        said = conversation(messages + 3, chance)
        known = Known()
        for taken, spent in ((said[:-2], cold), (said, following), (said, again)):
            shape = ChatShape(messages=taken, tools=tools)
            started_s = process_time()
            (ids,) = tokenizer.encode(shape, known)
            spent.append(1e3 * (process_time() - started_s))
    return len(ids), min(cold), min(following), min(again)


def main() -> None:
    """Print the table."""
    gc.disable()  # what it costs is in the index's figures
    print("| template | tokens | first reading, ms | next turn, ms | same turn again, ms |")
    print("| --- | --- | --- | --- | --- |")
    for family, tools in (("chatml", None), ("qwen3", TOOLS), ("vicuna", None)):
        template = str(TESTS / f"chat_templates/families/{family}.jinja")
        flags = EngineFlags(chat_template=template)
        tokenizer = load_tokenizer(TESTS / "tokenizer", str, flags)
        name = family if tools is None else f"{family}, {len(tools)} tools"
        for messages in MESSAGES:
            found = measure_ms(tokenizer, messages, tools)
            tokens, *spent = found
            print(f"| {name} | {tokens:,} | {' | '.join(f'{each:.2f}' for each in spent)} |")


if __name__ == "__main__":
    main()
