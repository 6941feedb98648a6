"""Token ids in a body's text, read once: who sends a prompt again, or goes on with one, pays for what is new.

Rules:

1. A text is cut at the first comma after every `CHUNK_BYTES`. So texts that begin alike have their first
   chunks in common, and a chunk's ids depend on nothing but its bytes.
2. Chunks and whole prompts are found by a digest of 128 bits and kept packed, never as text, least recently used
   out first.
3. What isn't ids alone, as an engine takes them, is nobody's business here: None, and whoever asked reads the
   body as any other.
4. A whole prompt keeps the keys of its blocks, for as many namespaces as ask.

Cost: a prompt that comes again is a digest of its text (0.5 µs for 4,000 ids), a new one about what decoding
takes (30 ns per id). Memory: 4 bytes per id for chunks, 11 for whole prompts.
"""

from array import array
from collections import OrderedDict

import msgspec
from xxhash import xxh3_128_digest

from balancer.core.prompt.token_cache import TokenCache
from indexer.core.hashing import Namespace
from indexer.core.index import Prompt

CHUNK_BYTES = 4096
"""About 700 ids: new ones are read anew from the beginning of the last chunk that changed."""
KEPT_BYTES_PER_TOKEN = 11
"""Packed, packed in a prompt, and as keys of blocks of 16."""
ENTRY_BYTES = 512
NAMESPACES = 4
"""So many of one text keep their keys: adapters, tenants."""

_decode = msgspec.json.Decoder(list[int]).decode


class KnownIds:
    """The ids of one text, and what they are to the index."""

    __slots__ = ("_prompts", "ids")

    def __init__(self, ids: "array[int]") -> None:
        self.ids = ids
        self._prompts: dict[tuple[str, str | None, str | None], Prompt] = {}

    def prompt(self, model: str, lora: str | None, cache_salt: str | None) -> Prompt:
        """The prompt in that namespace; the same one whenever asked."""
        key = (model, lora, cache_salt)
        found = self._prompts.get(key)
        if found is None:
            if len(self._prompts) == NAMESPACES:
                self._prompts.clear()
            namespace = Namespace(model=model, lora=lora, cache_salt=cache_salt)
            found = self._prompts[key] = Prompt(namespace, self.ids)
        return found


class IdTexts:
    """Texts that were read. One per process; each half of `limit_bytes` is for one of both kinds."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes // 2
        self._held_bytes = 0
        self._whole: OrderedDict[bytes, KnownIds] = OrderedDict()
        self._chunks = TokenCache(limit_bytes=limit_bytes // 2)

    def read(self, text: bytes) -> KnownIds | None:
        """What stands between the brackets of a list of ids; None if it is anything else."""
        digest = xxh3_128_digest(text)
        known = self._whole.get(digest)
        if known is not None:
            self._whole.move_to_end(digest)
            return known
        try:
            known = KnownIds(self._read_chunks(text))
        except (msgspec.MsgspecError, OverflowError, UnicodeDecodeError):
            return None
        self._keep(digest, known)
        return known

    def _read_chunks(self, text: bytes) -> "array[int]":
        ids = array("I")
        at, end = 0, len(text)
        while at <= end:
            comma = text.find(b",", at + CHUNK_BYTES)
            until = end if comma < 0 else comma
            ids += self._read_chunk(text[at:until])
            at = until + 1
        return ids

    def _read_chunk(self, text: bytes) -> "array[int]":
        digest = xxh3_128_digest(text)
        known = self._chunks.get(digest)
        if known is not None:
            return known[0]
        read = _decode(b"[%b]" % text)
        if not read:
            raise msgspec.DecodeError("nothing between two commas")
        ids = array("I", read)
        self._chunks.put(digest, [ids])
        return ids

    def _keep(self, digest: bytes, known: KnownIds) -> None:
        self._whole[digest] = known
        self._held_bytes += _kept_bytes(known)
        while self._held_bytes > self._limit_bytes:
            _, evicted = self._whole.popitem(last=False)
            self._held_bytes -= _kept_bytes(evicted)


def _kept_bytes(known: KnownIds) -> int:
    return ENTRY_BYTES + KEPT_BYTES_PER_TOKEN * len(known.ids)
