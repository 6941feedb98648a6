"""What a capture says about each engine: version, models, part in P/D, ranks.

Everything is read from the recorded rows: answers carry the version in `system_fingerprint` since
0.21, `started` rows the answer of `/version`, `/v1/models` and `/kv_event_sources`, `config` rows the
settings. The shape of the events bounds the version where nothing else does.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from indexer.core.hashing import Namespace
from indexer.core.model_cards import parse_model_list
from indexer.core.types import InstanceId
from kvlb.audit.capture import Capture, RequestRow

Version = tuple[int, int]

_VERSION = re.compile(r"(\d+)\.(\d+)")
_FINGERPRINT = re.compile(r'"?system_fingerprint"?\W+vllm-(\d+)\.(\d+)')
_DRAFTS = re.compile(r"speculative.*(eagle|mtp)", re.IGNORECASE)
# Fields of an array-shaped BlockStored, its tag counted, and the first release that wrote them.
_ARRAY_LENGTHS: Mapping[int, Version] = {
    6: (0, 9),
    7: (0, 10),
    8: (0, 14),
    9: (0, 17),
    10: (0, 20),
    12: (0, 22),
}
_FIRST_MAPS: Version = (0, 24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One instance, as far as its capture describes it."""

    instance: InstanceId
    version: Version | None
    model: str
    """Base model."""
    adapters: tuple[str, ...]
    """In the order of the engine's model list, which is the order of their numbers."""
    loads_remote: bool
    """It may take cache blocks from elsewhere: the decode side of P/D, shared storage."""
    saves_remote: bool
    drafts: bool
    """Speculative decoding by a head that reads the model's states (EAGLE, MTP)."""
    ranks: tuple[int, ...]
    """Ranks that the engine itself declared; may be empty."""

    def namespace(self, model: object, cache_salt: object, event_loras: Iterable[str]) -> Namespace:
        """Namespace of a request for `model`. `event_loras` are the adapters its events name."""
        lora = model if isinstance(model, str) and self._is_adapter(model, event_loras) else None
        if lora in self.adapters and lora not in event_loras:
            # Up to 0.13 events know an adapter by its number alone.
            number = f"#{self.adapters.index(lora) + 1}"
            lora = number if number in event_loras else lora
        salt = cache_salt if isinstance(cache_salt, str) else None
        return Namespace(model=self.model, lora=lora, cache_salt=salt)

    def _is_adapter(self, model: str, event_loras: Iterable[str]) -> bool:
        return model in self.adapters or model in event_loras


def read_engines(capture: Capture, first_payloads: Mapping[str, bytes]) -> dict[str, Engine]:
    """Every instance that was asked. `first_payloads`: a batch of each, to judge the format by."""
    instances = sorted({row.src for row in capture.requests})
    rows = {name: [row for row in capture.requests if row.src == name] for name in instances}
    return {
        name: _read_engine(name, number, rows[name], capture.notes, first_payloads.get(name))
        for number, name in enumerate(instances)
    }


def _read_engine(
    name: str,
    number: int,
    rows: Sequence[RequestRow],
    notes: Sequence[Mapping[str, Any]],
    payload: bytes | None,
) -> Engine:
    base, adapters = _read_models(rows, notes)
    role = _read_role(name, notes)
    return Engine(
        instance=InstanceId(name),
        version=_answered_version(rows)
        or _noted_version(number, notes)
        or _format_version(payload),
        model=base,
        adapters=adapters,
        loads_remote=role in {"kv_consumer", "kv_both"},
        saves_remote=role in {"kv_producer", "kv_both"},
        drafts=any(_DRAFTS.search(str(note.get("extra", ""))) for note in notes),
        ranks=_read_ranks(number, notes),
    )


def _answered_version(rows: Iterable[RequestRow]) -> Version | None:
    for row in rows:
        found = _FINGERPRINT.search(str(row.response).replace("'", '"'))
        if found:
            return int(found[1]), int(found[2])
    return None


def _noted_version(number: int, notes: Iterable[Mapping[str, Any]]) -> Version | None:
    for note in notes:
        version = note.get("version")
        if isinstance(version, list) and number < len(version):
            version = version[number]
        text = version.get("version") if isinstance(version, Mapping) else version
        found = _VERSION.match(text) if isinstance(text, str) else None
        if found:
            return int(found[1]), int(found[2])
    return None


def _format_version(payload: bytes | None) -> Version | None:
    """The first release that published events like these."""
    if payload is None:
        return None
    try:
        events = list(msgspec.msgpack.decode(payload)[1])
    except (msgspec.DecodeError, IndexError, TypeError):
        return None
    if any(isinstance(event, Mapping) for event in events):
        return _FIRST_MAPS
    arrays = [event for event in events if isinstance(event, list) and event[:1] == ["BlockStored"]]
    return _ARRAY_LENGTHS.get(max(map(len, arrays), default=0))


def _read_models(
    rows: Iterable[RequestRow], notes: Iterable[Mapping[str, Any]]
) -> tuple[str, tuple[str, ...]]:
    for note in notes:
        if isinstance(note.get("models"), Mapping):
            served = parse_model_list(note["models"])
            adapters = [card["id"] for card in served.cards if card["id"] in served.adapters]
            return served.base, tuple(adapters)
    return next((row.body["model"] for row in rows if row.body and row.body.get("model")), ""), ()


def _read_role(name: str, notes: Iterable[Mapping[str, Any]]) -> str | None:
    """The instance's `kv_role`; by convention `p` prefills and `d` decodes if nothing is noted."""
    for note in notes:
        settings = note.get(name)
        for holder in (settings, note.get("kv_transfer_config")):
            if isinstance(holder, Mapping) and isinstance(holder.get("kv_role"), str):
                return str(holder["kv_role"])
    return {"p": "kv_producer", "d": "kv_consumer"}.get(name.rstrip("0123456789"))


def _read_ranks(number: int, notes: Iterable[Mapping[str, Any]]) -> tuple[int, ...]:
    for note in notes:
        sources = note.get("sources")
        if isinstance(sources, list) and number < len(sources):
            sources = sources[number]
        if isinstance(sources, Mapping) and all(str(rank).isdigit() for rank in sources):
            return tuple(sorted(int(rank) for rank in sources))
    return ()
