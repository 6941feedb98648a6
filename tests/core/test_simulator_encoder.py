"""The simulated encoder holds to what each encoder connector of vLLM does."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from simulator.core.errors import GenerationFailedError, RequestRefusedError
from simulator.core.media import placeholder
from simulator.core.settings import EngineSettings
from simulator.encoder import Encoder, EncoderDirectory, media_names

CAT = "cat"
AT = "10.0.0.5:5601"
INBOX = "tcp://10.0.0.1:14579"


def settings(connector: Any, **fields: Any) -> EngineSettings:
    return EngineSettings(ec_connector=connector, encode_ms=0.0, ec_push_wait_s=0.05, **fields)


class Pair:
    """An encode engine and a consumer."""

    def __init__(self, connector: Any, **fields: Any) -> None:
        self.directory = EncoderDirectory()
        known = settings(connector, **fields)
        self.source = Encoder(known, self.directory, encodes=True, address=AT, receives_at=())
        inboxes = (INBOX,) if connector == "mooncake" else ()
        self.target = Encoder(
            known, self.directory, encodes=False, address="10.0.0.1:1", receives_at=inboxes
        )

    async def hand_over(self, media: Sequence[str], **changed: Any) -> None:
        told = await self.source.encode(media, {"consumer_zmq": INBOX, "ec_items": ITEMS})
        await self.target.provide(media, {**(told or {}), "ec_items": ITEMS, **changed}, 0)


ITEMS = [{"transfer_id": "t-1"}, {"transfer_id": "t-2", "mm_hash": "dog"}]


@pytest.mark.parametrize("connector", ["example", "cpu", "mooncake"])
async def test_what_was_encoded_is_not_encoded_again(connector: str) -> None:
    """One run for the source, none for the consumer; a second request runs nothing."""
    pair = Pair(connector)

    await pair.hand_over([CAT, "dog"])
    await pair.hand_over([CAT, "dog"])

    assert (pair.source.counts.runs, pair.source.counts.hits) == (2, 2)
    assert (pair.target.counts.runs, pair.target.counts.loaded) == (0, 2)


@pytest.mark.parametrize("connector", ["example", "cpu", None])
async def test_what_is_not_found_is_encoded_where_it_is_needed(connector: Any) -> None:
    """A consumer without an entry, or without a connector."""
    pair = Pair(connector)

    await pair.target.provide([CAT], {}, 0)

    assert (pair.target.counts.runs, pair.target.counts.loaded) == (1, 0)


async def test_cpu_needs_the_announced_address_and_size() -> None:
    """What doesn't fit, or has been dropped since, is encoded by the consumer."""
    pair = Pair("cpu", ec_cpu_items=1, encoder_cache_items=1)
    told = await pair.source.encode([CAT, "dog"], {})
    assert told is not None

    await pair.target.provide([CAT], told, 0)
    await pair.target.provide(["dog"], {"dog": told["dog"] | {"size_bytes": 1}}, 0)
    await pair.target.provide(["bird"], {"bird": "no object"}, 0)

    assert (pair.target.counts.runs, pair.target.counts.lost) == (3, 2)


async def test_mooncake_waits_for_its_push_and_then_fails() -> None:
    """A consumer doesn't encode itself, also without any parameters."""
    pair = Pair("mooncake")

    with pytest.raises(GenerationFailedError):
        await pair.target.provide([CAT], {}, 0)

    assert (pair.target.counts.runs, pair.target.counts.lost) == (0, 1)


async def test_mooncake_uses_a_push_once() -> None:
    """The second request under the same name waits in vain, once the item is out of the cache."""
    pair = Pair("mooncake", encoder_cache_items=1)
    await pair.hand_over([CAT])
    await pair.hand_over(["other"])  # drops the cat from the consumer's cache

    with pytest.raises(GenerationFailedError):
        await pair.target.provide([CAT], {"ec_items": ITEMS}, 0)


async def test_mooncake_finds_by_name_what_stands_elsewhere() -> None:
    """The entry at the position names another item."""
    pair = Pair("mooncake")
    await pair.source.encode(["dog"], {"consumer_zmq": INBOX, "ec_items": [{"transfer_id": "t-2"}]})

    await pair.target.provide(["dog"], {"ec_items": ["x", {"mm_hash": "no"}, ITEMS[1]]}, 0)

    assert pair.target.counts.loaded == 1


@pytest.mark.parametrize("params", [{}, {"consumer_zmq": "tcp://nobody:1", "ec_items": ITEMS}])
async def test_mooncake_pushes_only_where_it_is_told(params: dict[str, Any]) -> None:
    """Without an address the leg is answered all the same."""
    pair = Pair("mooncake")

    assert await pair.source.encode([CAT], params) is not None
    assert pair.directory.pushes == {INBOX: {}}


async def test_an_encode_engine_takes_media_only() -> None:
    """It has no language model."""
    with pytest.raises(RequestRefusedError):
        await Pair("cpu").source.encode([], {})


async def test_old_releases_answer_without_parameters() -> None:
    """`ec_transfer_params` came with 0.26."""
    assert await Pair("example", version="0.25.0").source.encode([CAT], {}) is None


async def test_a_storage_outlives_its_engine_and_memory_does_not() -> None:
    """As a directory and a killed process do."""
    files, memory = Pair("example"), Pair("cpu")
    for pair in (files, memory):
        told = await pair.source.encode([CAT], {})
        pair.source.close()
        await pair.target.provide([CAT], told or {}, 0)

    assert (files.target.counts.runs, memory.target.counts.runs) == (0, 1)


async def test_a_run_that_nobody_waits_for_is_counted() -> None:
    """The client of the leg has gone."""
    slow = EngineSettings(ec_connector="example", encode_ms=60_000.0)
    encoder = Encoder(slow, EncoderDirectory(), encodes=True, address=AT, receives_at=())

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await encoder.encode([CAT], {})

    assert (encoder.counts.runs, encoder.counts.aborted) == (0, 1)


def test_names_follow_content_options_and_the_clients_own() -> None:
    """Equal on both engines, as vLLM's hashes are."""
    image = {"type": "image_url", "image_url": {"url": "data:,x"}}
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "text"},
        {"role": "user", "content": [image, "x"]},
    ]

    (name,) = media_names(chat, None)

    assert media_names(chat, {"max_pixels": 1}) != [name]
    assert media_names([{"content": [{**image, "uuid": CAT}]}], None) == [CAT]
    assert placeholder(image) != placeholder({**image, "uuid": CAT})
