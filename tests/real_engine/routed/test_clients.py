"""The `openai` and `anthropic` packages see real vLLM through kvlb as without it."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CLIENT_GROUPS = (
    "openai",
    "responses",
    "anthropic",
    "plain",
    "several",
    "scale-out",
    "unknown-model",
    "unknown-response",
)

FLAGS = (
    *("--served-model-name", "sim"),
    "--enable-scale-out",
    "--enable-tokenizer-info-endpoint",
)


@pytest.fixture(scope="module")
def engines(start_engines: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """One engine, so that both ways lead to the same cache; it keeps responses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
        with start_engines("m0", flags=FLAGS) as running:
            yield running


@pytest.fixture(scope="module")
def both(
    engines: dict[str, Any],
    start_process: Callable[..., Any],
    free_port: Callable[[], int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, str]]:
    """The engine's address, and kvlb's in front of it."""
    url = engines["m0"].url
    port = free_port()
    log = tmp_path_factory.mktemp("kvlb") / "kvlb.log"
    up = [sys.executable, "-m", "kvlb", "up", "--instance", url, "--port", str(port)]

    def is_ready() -> bool:
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False)
        except httpx.TransportError:
            return False
        return answer.status_code == 200

    with start_process(up, log, is_ready, 60):
        yield url, f"http://127.0.0.1:{port}"


def test_result_is_the_same_through_kvlb(
    both: tuple[str, str], client_calls: Any, client_call: tuple[str, str]
) -> None:
    """Field by field; of streams what is said and in which events, not how it is cut."""
    group, name = client_call
    call = client_calls.CALLS[group][name]
    with client_calls.opened(both[0]) as direct, client_calls.opened(both[1]) as through:
        client_calls.outcome(call, direct)  # from now on its blocks are cached for both
        expected = client_calls.gist(client_calls.outcome(call, direct))
        got = client_calls.gist(client_calls.outcome(call, through))

    if group.startswith("unknown"):
        expected, got = map(client_calls.without_own_words, (expected, got))
        message = expected["body"]["message"]
        # The newest engines tell which names they have; a fleet may have many.
        expected["body"]["message"] = message.removesuffix(" Valid aliases: sim.")
    assert got == expected
