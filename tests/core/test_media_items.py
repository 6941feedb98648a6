"""Images, audio and video of a chat, and the names under which they are known."""

from typing import Any

from balancer.core.prompt.media_items import media_items
from balancer.core.request import Endpoint, GenerateRequest

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
OTHER = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
TEXT = {"type": "text", "text": "what is this?"}


def request(*parts: Any, endpoint: Endpoint = Endpoint.CHAT, **fields: Any) -> GenerateRequest:
    model = fields.pop("model", "m")
    messages = [{"role": "user", "content": list(parts)}]
    return GenerateRequest(
        request_id="r",
        endpoint=endpoint,
        body={"messages": messages, **fields},
        raw_body=b"",
        headers=(),
        model=model,
        base_model="m",
        lora=None,
    )


def keys(*parts: Any, **fields: Any) -> list[bytes]:
    return [each.key for each in media_items(request(*parts, **fields))]


def test_items_come_in_the_order_of_the_chat() -> None:
    """Engines number their features so."""
    items = media_items(request(TEXT, SOUND, IMAGE, TEXT))

    assert [each.part for each in items] == [SOUND, IMAGE]


def test_text_has_no_items() -> None:
    """Whatever a client writes into its messages."""
    assert keys(TEXT) == []
    assert keys("a plain string", None, 7, {"type": "image_embeds"}) == []
    assert media_items(request(IMAGE, endpoint=Endpoint.COMPLETIONS)) == ()


def test_messages_without_parts_are_passed_over() -> None:
    """A string, or nothing, or no message at all."""
    asked = request(IMAGE)
    messages = [{"role": "system", "content": "be kind"}, "what?", *asked.body["messages"]]

    assert len(media_items(_with(asked, messages))) == 1


def _with(asked: GenerateRequest, messages: list[Any]) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        endpoint=asked.endpoint,
        body={"messages": messages},
        raw_body=b"",
        headers=(),
        model="m",
        base_model="m",
        lora=None,
    )


def test_equal_content_has_one_key() -> None:
    """From request to request, and within one."""
    assert keys(IMAGE) == keys(TEXT, dict(IMAGE))
    assert len(set(keys(IMAGE, OTHER, IMAGE))) == 2


def test_the_clients_uuid_counts_instead_of_the_content() -> None:
    """Engines take it for the item's hash; then the content may even be missing."""
    named = {**IMAGE, "uuid": "cat"}
    empty = {"type": "image_url", "image_url": None, "uuid": "cat"}

    assert keys(named) == keys(empty) == keys({**OTHER, "uuid": "cat"})
    assert keys(named) != keys(IMAGE)
    assert keys({**IMAGE, "uuid": ""}) != keys(named)


def test_what_decides_the_encoding_is_in_the_key() -> None:
    """Processing options and the model: another adapter may have another encoder."""
    plain = keys(IMAGE)

    assert keys(IMAGE, mm_processor_kwargs={"max_pixels": 1}) != plain
    assert keys(IMAGE, media_io_kwargs={"image": {"mode": "RGBA"}}) != plain
    assert keys(IMAGE, model="adapter") != plain
    assert keys(IMAGE, temperature=0) == plain
