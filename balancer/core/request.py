"""One client request, understood: what routing, rewriting and accounting need of it.

Both are msgspec structs, as everything that is made once per request: dataclasses take ten times as
long to make.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from balancer.core.http.lax_bool import is_true
from balancer.core.prompt.known_ids import KnownIds
from indexer.core.index import Prompt


class Endpoint(StrEnum):
    """Paths whose prompts are read: routed by cache."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    MESSAGES = "/v1/messages"
    RESPONSES = "/v1/responses"
    TOKENS = "/inference/v1/generate"

    @property
    def is_split(self) -> bool:
        """Whether it may run over two legs; else it is handed whole to one instance."""
        return self in SPLIT


SPLIT = (Endpoint.CHAT, Endpoint.COMPLETIONS)


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that generates text, after parsing and model lookup, before tokens are known."""

    request_id: str
    endpoint: Endpoint
    body: Mapping[str, Any]
    """The decoded JSON object. Never mutated: every leg is written from a copy."""
    raw_body: bytes
    """The client's bytes, forwarded as they are where nothing has to change."""
    headers: tuple[tuple[bytes, bytes], ...]
    """End-to-end headers of the client, names in lower case."""
    model: str
    """The name the client used: an adapter, an alias or the base model."""
    base_model: str
    lora: str | None
    """The adapter's name if `model` is one."""
    conversation: str | None = None
    """The client's name for the conversation this is a turn of."""
    is_unicode: bool = True
    """False: some string of `body` holds a lone surrogate. Only the engine can say what then."""
    ids: KnownIds | None = None
    """What `prompt` is, where `body` has it as it came: a `msgspec.Raw`."""

    @property
    def stream(self) -> bool:
        return is_true(self.body.get("stream"))

    @property
    def cache_salt(self) -> str | None:
        salt = self.body.get("cache_salt")
        return salt if isinstance(salt, str) else None


class PromptView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the tokens stage found out. Cache knowledge is advice: it may be nothing at all."""

    prompts: tuple[Prompt, ...] = ()
    """One per prompt of the request; empty if it can't be scored."""
    source: str = "none"
    """Where the tokens came from: `ids`, `local`, `cache`, `engine`, `with_media` (local ones with what
    their media become), `before_media` (local ones up to the first picture, sound or film; the rest is
    a guess), `opening` (no tokens: those that begin alike
    share a home) or `none`; a metric label."""
    unscorable: str | None = None
    """Why there are no tokens: `timeout`, `multimodal`, `no_tokenizer`, ...; a metric label."""

    @property
    def prompt_tokens(self) -> int | None:
        prompts = self.prompts
        if len(prompts) == 1:
            return prompts[0].tokens
        return sum(prompt.tokens for prompt in prompts) if prompts else None
