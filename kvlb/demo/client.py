"""One chat turn through the `openai` package, timed and read as its user would.

The only module that imports `openai`, which is an optional extra.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import openai
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from kvlb.errors import PeerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back for one turn."""

    text: str
    ttft_s: float
    headers: Mapping[str, str]
    prompt_tokens: int | None
    cached_tokens: int | None


def open_client(base_url: str) -> AsyncOpenAI:
    """Connect to a balancer. Never retries: a failed request is a failed demo."""
    return AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none-needed", max_retries=0, timeout=60)


async def ask(
    client: AsyncOpenAI,
    *,
    model: str,
    messages: list[dict[str, str]],
    max_tokens: int,
    clock: Callable[[], float],
) -> Answer:
    """Stream one answer. Raises PeerError if it fails or ends without text."""
    started_s = clock()
    pieces: list[str] = []
    ttft_s = 0.0
    usage: Any = None
    try:
        raw = await client.chat.completions.with_raw_response.create(
            model=model,
            messages=cast("list[ChatCompletionMessageParam]", messages),
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in raw.parse():
            usage = chunk.usage or usage
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                ttft_s = ttft_s if pieces else clock() - started_s
                pieces.append(piece)
    except openai.OpenAIError as error:
        raise PeerError(f"a request of the demo failed: {error}") from error
    if not pieces:
        raise PeerError("a request of the demo was answered without text")
    details = usage.prompt_tokens_details if usage else None
    return Answer(
        text="".join(pieces),
        ttft_s=ttft_s,
        headers=raw.headers,
        prompt_tokens=usage.prompt_tokens if usage else None,
        cached_tokens=details.cached_tokens if details else None,
    )
