"""Which conversation a request belongs to: a hint, for where nothing is known of its tokens.

Rules:

1. What a client says counts first: a header, `session_id`, `user` or `prompt_cache_key`.
2. Else conversations are told apart by how they begin: the first block of the prompt, and without
   tokens the messages up to the first of the user, or the beginning of the text. What follows in
   later turns changes none of these.
3. Names are compared and hashed, never logged.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from balancer.core.request import GenerateRequest
from indexer.core.types import RankId

OPENING_MESSAGES = 8
OPENING_CHARACTERS = 2048


def named_session(request: GenerateRequest, header: bytes) -> str | None:
    """What the client calls it; `header` in lower case."""
    for each, value in request.headers:
        if each == header and value:
            return value.decode("latin-1")
    for name in ("session_id", "user", "prompt_cache_key"):
        named = request.body.get(name)
        if isinstance(named, str) and named:
            return named
    return None


def opening(body: Mapping[str, Any]) -> str | None:
    """A hash of how a request without tokens begins; None if it has neither messages nor text."""
    prompt, messages = body.get("prompt"), body.get("messages")
    if isinstance(prompt, str) and prompt:
        return _digest(prompt[:OPENING_CHARACTERS])
    if isinstance(messages, list) and messages:
        return _digest(_opening_messages(messages))
    return None


def affinity(session: str, rank: RankId) -> int:
    """Rendezvous hash: of all ranks the one with the largest is the session's home."""
    # errors="surrogatepass": JSON may carry lone surrogates, and a session name is only hashed.
    name = f"{rank.rank} {rank.instance} {session}".encode(errors="surrogatepass")
    return xxh3_64_intdigest(name)


def _opening_messages(messages: Sequence[Any]) -> list[Any]:
    """Up to the first of the user: what comes before it, all conversations may share."""
    for number, message in enumerate(messages[:OPENING_MESSAGES]):
        if isinstance(message, Mapping) and message.get("role") == "user":
            return list(messages[: number + 1])
    return list(messages[:OPENING_MESSAGES])


def _digest(value: object) -> str:
    # `repr`, since JSON may carry what can't be encoded again.
    text = value if isinstance(value, str) else repr(value)
    return xxh3_64_hexdigest(text.encode(errors="surrogatepass"))
