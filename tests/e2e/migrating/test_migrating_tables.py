"""docs/migrating.md names every flag, variable and path of the proxies, and a line for each of them."""

import re
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

PROXIES = {
    "disagg_proxy_demo.py": "-m -p -d --model --prefill --decode /instances/add /status",
    "toy_proxy_server.py": "--prefiller-hosts --prefiller-ports --decoder-hosts --decoder-ports "
    "/healthcheck",
    "disagg_proxy_pushconnector_demo.py": "--model --prefill --decode --prefill-engine-id "
    "--prefill-kv-host --prefill-side-channel-port --prefill-tp-size --prefill-pp-size /status",
    "disagg_proxy_multiturn.py": "--prefiller-host --prefiller-hosts --prefiller-port "
    "--prefiller-ports --decoder-host --decoder-hosts --decoder-port --decoder-ports "
    "conversation_id /health",
    "mooncake_connector_proxy.py": "--prefill --decode BOOTSTRAP_PORT /query",
    "moriio_toy_proxy_server.py": "--service-discovery-port PROXY_LISTEN_BACKLOG",
    "disagg_proxy_p2p_nccl_xpyd.py": "10001 30001",
    "disagg_prefill_proxy_server.py": "--timeout --max-concurrent --queue-size --rate-limit "
    "--prefill-url --decode-url --kv-host --prefill-kv-port --decode-kv-port X-KV-Target "
    "rate_limiter.py request_queue.py",
    "disagg_proxy_server.py": "--prefiller-host --prefiller-port --decoder-host --decoder-port "
    "--num-prefillers --num-decoders --decoder-init-port --decoder-alloc-port --proxy-host "
    "--proxy-port CLIENT_BOUND CLIENT_BOUND_KEY",
    "disagg_epd_proxy.py": "--encode-servers-urls --prefill-servers-urls --decode-servers-urls "
    "--decode-retries --ec-consumer-zmq-addrs --ec-consumer-dp-size --no-rewrite --log-requests "
    "--dynamic-registration --probe-interval --probe-timeout --fail-threshold --evicted-ttl "
    "ENCODER_MAX_BATCH_SIZE VLLM_HTTP_TIMEOUT_KEEP_ALIVE /instances /health /v1/models",
}
"""Each proxy's own flags, variables and paths."""
SHARED = (
    "--host --port OPENAI_API_KEY ADMIN_API_KEY /v1/completions /v1/chat/completions "
    "/health /healthcheck /status /start_profile /stop_profile"
)


@pytest.mark.parametrize(
    ("heading", "words"),
    [*PROXIES.items(), ("What is the same for all", SHARED)],
    ids=[*PROXIES, "shared"],
)
def test_every_flag_variable_and_path_has_its_row(heading: str, words: str, page: Any) -> None:
    """What isn't supported keeps a row that says so."""
    lines = page.section(heading).splitlines()
    rows = "\n".join(line for line in lines if line.startswith("| "))

    assert [word for word in words.split() if not re.search(rf"{word}(?![\w-])", rows)] == []


@pytest.mark.parametrize("proxy", PROXIES)
def test_every_proxy_has_a_line_that_replaces_it(proxy: str, page: Any) -> None:
    """The old one beside it."""
    section = page.section(proxy)

    assert "```sh old\n" in section
    assert any(each.proxy == proxy for each in page.lines)


def test_no_line_is_left_out(page: Any) -> None:
    """A line or a file that no test runs may be wrong."""
    assert [each for each in page.lines if not page.has_setup(each)] == []
    assert [each.line for each in page.lines if "kvlb up " not in each.line] == []
    assert [name for name in page.files if not any(name in each.line for each in page.lines)] == []
