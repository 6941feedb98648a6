"""What `extra_keys` of a stored event say: adapter, salt, and extras of single blocks.

Rules (vLLM publishes them untagged, in the order adapter, multimodal, salt, prompt embeds):

1. A bare string equal to the event's adapter, in first place, is the adapter. It is repeated on
   every block; it belongs to the root and is not hashed again.
2. In block 0 of a prompt the last other bare string is the cache salt. It belongs to the root too.
3. Everything else belongs to its block: `(identifier, offset)` pairs, bare identifiers (0.18
   and before), digests of prompt embeds, and whatever later releases add.
4. Before 0.17 there are no extra keys: salted and multimodal blocks look like plain text.

An old bare identifier in block 0 is taken for a salt. Both give a key no other prompt has.
"""

from collections.abc import Sequence

from indexer.core.events import BlockStored
from indexer.core.hashing import pack_extras


def split_extra_keys(event: BlockStored) -> tuple[str | None, dict[int, bytes]]:
    """Return the cache salt and, by number of the block in the event, its own extras."""
    entries = event.extra_keys
    # Text without adapter and salt: one nil per block.
    if not entries or not any(entries):
        return None, {}
    salt: str | None = None
    extras: dict[int, bytes] = {}
    for number, entry in enumerate(entries):
        parts = _parts_of(entry, event.lora)
        if number == 0 and event.parent is None:
            salt, parts = _take_salt(parts)
        if parts:
            extras[number] = pack_extras(parts)
    return salt, extras


def _parts_of(entry: object, lora: str | None) -> Sequence[object]:
    if entry is None:
        return ()
    parts = entry if isinstance(entry, list | tuple) else (entry,)
    return parts[1:] if parts and lora is not None and parts[0] == lora else parts


def _take_salt(parts: Sequence[object]) -> tuple[str | None, Sequence[object]]:
    for place in range(len(parts) - 1, -1, -1):
        part = parts[place]
        if isinstance(part, str):
            return part, (*parts[:place], *parts[place + 1 :])
    return None, parts
