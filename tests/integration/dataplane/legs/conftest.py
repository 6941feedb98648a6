"""What prefill and decode engines say of a leg, pairs of them, and a client that asks."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from balancer.core.fleet.snapshot import Role

LONG_TOKENS = 1000
DONE = b"data: [DONE]\n\n"
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [1, 2], "field_of_a_later_release": "x"}


def _usage(prompt: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def prefill_ok(received: Any, wire: Any) -> None:
    await wire.json(
        {
            "choices": [{"finish_reason": "length"}],
            "kv_transfer_params": PARAMS,
            "usage": _usage(1000, 64),
        }
    )


async def answer_ok(received: Any, wire: Any) -> None:
    if received.json.get("stream"):
        await wire.events(b'data: {"choices":[{"text":"a"}]}\n\n', DONE)
    else:
        await wire.json({"choices": [{"text": "a"}], "usage": _usage(1000, 992)})


async def stay_silent(received: Any, wire: Any) -> None:
    await received.gone.wait()


async def decode_never(received: Any, wire: Any) -> None:
    raise AssertionError("decode must not start")


def refuse(status: int, **headers: str) -> Any:
    async def script(received: Any, wire: Any) -> None:
        await wire.json({"error": {"message": f"no {status}"}}, status, **headers)

    return script


async def close(received: Any, wire: Any) -> None:
    wire.close()


def answer_with(body: bytes) -> Any:
    async def script(received: Any, wire: Any) -> None:
        await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    return script


class Says:
    """Scripts of engines."""

    params = PARAMS
    done = DONE
    usage = staticmethod(_usage)
    prefill_ok = staticmethod(prefill_ok)
    answer_ok = staticmethod(answer_ok)
    stay_silent = staticmethod(stay_silent)
    decode_never = staticmethod(decode_never)
    refuse = staticmethod(refuse)
    close = staticmethod(close)
    answer_with = staticmethod(answer_with)

    def fault(self, name: str) -> Any:
        """A status that is refused with, or a connection that ends, or stays silent."""
        named = {
            "closed": self.close,
            "empty-200": self.answer_with(b""),
            "silent": self.stay_silent,
        }
        # Those who are to come back are told when.
        later = {"retry_after": "7"} if name in {"429", "503"} else {}
        return named.get(name) or self.refuse(int(name), **later)

    def failed_prefill(self, name: str) -> Any:
        """One of `FAILED_PREFILLS`."""
        body = FAILED_PREFILLS[name]
        return self.fault(name) if body is None else self.answer_with(body)


FAILED_PREFILLS: dict[str, bytes | None] = {
    "finish-error": json.dumps(
        {"choices": [{"finish_reason": "error"}], "kv_transfer_params": PARAMS}
    ).encode(),
    "finish-abort": b'{"choices":[{"finish_reason":"abort"}]}',
    "error": b'{"error":{"message":"x"}}',
    "no-params": b'{"choices":[{"finish_reason":"length"}]}',
    "empty": b"",
    "no-object": b"[]",
    "nested": b"[" * 100_000,
    "500": None,
    "503": None,
    "429": None,
    "closed": None,
}
"""What a prefill leg may come to; None: as `fault` has it."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`failed_prefill` is each of `FAILED_PREFILLS`."""
    if "failed_prefill" in metafunc.fixturenames:
        metafunc.parametrize("failed_prefill", FAILED_PREFILLS)


@pytest.fixture
def says() -> Says:
    """What engines are made to say."""
    return Says()


@pytest.fixture
def long_prompt() -> Callable[..., dict[str, Any]]:
    """A prompt that shares no prefix with one of another `number`."""

    def body(number: int = 0, **fields: Any) -> dict[str, Any]:
        first = number * LONG_TOKENS
        return {"model": "m", "prompt": list(range(first, first + LONG_TOKENS))} | fields

    return body


@pytest.fixture
def ask(
    client: httpx.AsyncClient, long_prompt: Callable[..., dict[str, Any]]
) -> Callable[..., Awaitable[httpx.Response]]:
    """Ask for a completion of a long prompt."""

    async def post(proxy: Any, number: int = 0, **fields: Any) -> httpx.Response:
        return await client.post(f"{proxy.url}/v1/completions", json=long_prompt(number, **fields))

    return post


@pytest.fixture
def pair(instance: Any) -> Any:
    """Describe prefill and decode engines to the fleet."""

    def describe(prefill: Any, decode: Any, connector: str = "nixl") -> list[Any]:
        sources = prefill if isinstance(prefill, list) else [prefill]
        return [
            *(
                instance(each, f"p{number}", role=Role.PREFILL, connector=connector)
                for number, each in enumerate(sources)
            ),
            instance(decode, "d0", role=Role.DECODE, connector=connector),
        ]

    return describe
