"""What decode engines still hold of conversations: the last turn's blocks, for the next turn's prefill.

A client names its conversation (`conversation_id`, which engines never see). NIXL's bidirectional
mode lets the prefill engine read what the decode engine kept, and checks nothing: whatever is in
those blocks becomes the beginning of the prompt. So the check is here.

Rules:

1. A turn is used once, by the next one of its conversation, within the decode engine's time to live.
2. Only what is known to be this prompt's beginning is used, in full blocks: the last prompt as far
   as its block keys are this prompt's (they cover adapter and salt, too); what was generated behind
   it if the client sent it back word for word (reasoning is often stripped) *and* the decode rank's
   events say that it holds this prompt's tokens so far. Text alone could be cut into other tokens.
3. An answer that can't be read, or in which there is more than text, is remembered as a prompt only.
4. The number of turns is bounded, and that of their tokens; the one that was used longest ago leaves first. So do
   those whose time is over. Conversations are known by a digest of what clients call them.

Cost: one comparison per block of the last prompt; one decoding of the answer, for named
conversations only.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import msgspec
from xxhash import xxh3_128_digest

from indexer.core.index import Prompt
from indexer.core.types import BlockKey, RankId

MAX_TURNS = 10_000
MAX_TOKENS = 16_000_000
"""Of all turns together: each block is a key and an id, some 80 MB for blocks of 16 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What a decode engine's answer says of the blocks it keeps."""

    params: Mapping[str, Any]
    text: str | None
    """What was generated; None if it isn't text alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastTurn:
    """One turn, as it ended."""

    rank: RankId
    """Who holds its blocks."""
    params: Mapping[str, Any]
    block_size: int
    keys: Sequence[BlockKey]
    """Of its prompt's full blocks."""
    messages: int
    """Messages of its prompt; 0 for a completion, whose answer isn't sent back apart."""
    answer: bytes | None
    """Digest of the text that was generated."""
    expires_s: float

    @property
    def tokens(self) -> int:
        """In the full blocks of its prompt."""
        return len(self.keys) * self.block_size


def remember(
    answered: Answered, rank: RankId, prompt: Prompt, body: Mapping[str, Any], block_size: int
) -> LastTurn:
    """A turn that ends now; when it expires is for `Conversations.put` to say."""
    text, messages = answered.text, body.get("messages")
    return LastTurn(
        rank=rank,
        params=answered.params,
        block_size=block_size,
        keys=prompt.keys(block_size),
        messages=len(messages) if isinstance(messages, list) else 0,
        answer=None if text is None else xxh3_128_digest(text.encode("utf-8", "surrogatepass")),
        expires_s=0.0,
    )


class Conversations:
    """The last turn of each conversation. Keeps time by what it is told."""

    def __init__(self, limit: int = MAX_TURNS, *, max_tokens: int = MAX_TOKENS) -> None:
        self._turns: OrderedDict[bytes, LastTurn] = OrderedDict()
        self._limit = limit
        self._max_tokens = max_tokens
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._turns)

    def put(self, conversation: str, turn: LastTurn, *, now_s: float, expires_s: float) -> None:
        """Remember a turn in place of the one before."""
        name = _digest(conversation)
        self._pop(name)
        self._turns[name] = replace(turn, expires_s=expires_s)
        self._tokens += turn.tokens
        while self._turns and self._must_drop(next(iter(self._turns.values())), now_s):
            self._pop(next(iter(self._turns)))

    def take(self, conversation: str, now_s: float) -> LastTurn | None:
        """The last turn, for the only time; None if there is none, or it came too long ago."""
        turn = self._pop(_digest(conversation))
        return turn if turn is not None and now_s < turn.expires_s else None

    def _must_drop(self, oldest: LastTurn, now_s: float) -> bool:
        return (
            oldest.expires_s <= now_s
            or len(self._turns) > self._limit
            or self._tokens > self._max_tokens
        )

    def _pop(self, name: bytes) -> LastTurn | None:
        turn = self._turns.pop(name, None)
        if turn is not None:
            self._tokens -= turn.tokens
        return turn


def _digest(conversation: str) -> bytes:
    return sha256(conversation.encode("utf-8", "surrogatepass")).digest()


def usable_params(
    turn: LastTurn, prompt: Prompt, body: Mapping[str, Any], held_tokens: int
) -> Mapping[str, Any] | None:
    """What the prefill engine may read of `turn`, cut to what is surely this prompt's; None: nothing.

    `held_tokens` are the prompt's leading tokens that the turn's rank holds by exact events.
    """
    tokens = turn.params.get("remote_num_tokens")
    groups = turn.params.get("remote_block_ids")
    if not isinstance(tokens, int) or not isinstance(groups, list) or len(groups) != 1:
        return None  # before 0.21, or a hybrid model: its groups can't be cut alike
    size = turn.block_size
    known = _common(turn.keys, prompt.keys(size))
    if known == len(turn.keys) and _was_sent_back(turn, body):
        known = max(known, held_tokens // size)
    blocks = min(known, tokens // size, len(groups[0]))
    if blocks == 0:
        return None
    cut = {"remote_num_tokens": blocks * size, "remote_block_ids": [groups[0][:blocks]]}
    return {**turn.params, **cut}


def _common(left: Sequence[BlockKey], right: Sequence[BlockKey]) -> int:
    """Keys cover everything before them, so equal ones come first."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


def _was_sent_back(turn: LastTurn, body: Mapping[str, Any]) -> bool:
    """Whether the client's next message is what was generated, word for word."""
    messages = body.get("messages")
    if turn.answer is None or not turn.messages or not isinstance(messages, list):
        return False
    if len(messages) <= turn.messages:
        return False
    said = messages[turn.messages]
    if not isinstance(said, Mapping) or said.get("role") != "assistant":
        return False
    text = said.get("content")
    if not isinstance(text, str) or said.get("tool_calls"):
        return False
    return xxh3_128_digest(text.encode("utf-8", "surrogatepass")) == turn.answer


def read_answered(raw: bytes) -> Answered | None:
    """Read a complete answer, a JSON object or an event stream; None if it keeps no blocks."""
    chunks = list(_chunks(raw))
    found = [each.get("kv_transfer_params") for each in chunks]
    params = next((each for each in reversed(found) if isinstance(each, dict)), None)
    if params is None or params.get("do_remote_decode") is not True:
        return None
    return Answered(params=params, text=_text_of(chunks))


def _chunks(raw: bytes) -> Sequence[dict[str, Any]]:
    lines = [raw]
    if not raw.lstrip().startswith(b"{"):
        lines = [line[5:] for line in raw.splitlines() if line.startswith(b"data:")]
    chunks = []
    for line in lines:
        try:
            read = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue  # [DONE], or what we can't read
        if isinstance(read, dict):
            chunks.append(read)
    return chunks


def _text_of(chunks: Sequence[dict[str, Any]]) -> str | None:
    parts = []
    for chunk in chunks:
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            said = _said(choice)
            if said is None:
                return None
            parts.append(said)
    return "".join(parts)


def _said(choice: object) -> str | None:
    """The text of one choice or of one piece of it; None if there is anything else in it."""
    if not isinstance(choice, Mapping):
        return None
    said = choice.get("message") or choice.get("delta") or {}
    text = said.get("content") or ""
    is_more = any(said.get(name) for name in ("tool_calls", "reasoning", "reasoning_content"))
    return text if isinstance(text, str) and not is_more else None
