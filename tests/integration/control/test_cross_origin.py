"""CORS through the whole balancer, as a browser sees it."""

from typing import Any

import pytest

from balancer.config import BalancerConfig
from balancer.core.settings.errors import ConfigError, decode_settings

APP = "https://app.example.org"
PREFLIGHT = {
    "origin": APP,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
IDS = {"model": "tiny", "prompt": [1, 2, 3]}


@pytest.fixture
def config(engine: Any) -> dict[str, Any]:
    return {"instances": [{"url": engine.url}], "dataplane": {"cors_origins": [APP]}}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/responses/a"])
async def test_preflight_is_answered_here(
    balancer_factory: Any, config: Any, engine: Any, path: str
) -> None:
    """No engine is asked."""
    async with balancer_factory(config) as balancer:
        answer = await balancer.http.options(path, headers=PREFLIGHT)

    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == APP
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert engine.calls(path) == 0


async def test_answers_and_errors_can_be_read_by_the_page(
    balancer_factory: Any, config: Any
) -> None:
    """An error without the header is "network error" to a script."""
    async with balancer_factory(config) as balancer:
        await balancer.available()
        good = await balancer.http.post("/v1/completions", json=IDS, headers={"origin": APP})
        bad = await balancer.http.post(
            "/v1/completions", json={"model": "nope"}, headers={"origin": APP}
        )
        models = await balancer.http.get("/v1/models", headers={"origin": APP})
        stranger = await balancer.http.get("/v1/models", headers={"origin": "https://evil.example"})

    assert [each.status_code for each in (good, bad, models, stranger)] == [200, 400, 200, 200]
    for answer in (good, bad, models):
        assert answer.headers.get_list("access-control-allow-origin") == [APP]
    assert "access-control-allow-origin" not in stranger.headers


@pytest.mark.parametrize("path", ["/status", "/instances", "/health", "/pause", "/v1/nonsense"])
async def test_what_is_for_operators_is_for_no_page(
    balancer_factory: Any, config: Any, path: str
) -> None:
    """A page in an operator's browser must not read the fleet."""
    async with balancer_factory(config) as balancer:
        preflight = await balancer.http.options(path, headers=PREFLIGHT)
        answer = await balancer.http.get(path, headers={"origin": APP})

    for each in (preflight, answer):
        assert "access-control-allow-origin" not in each.headers


@pytest.mark.parametrize(
    ("path", "more", "status"),
    [
        ("/v1/completions", {"x-long": "a" * 9_000}, 431),
        ("/v1/completions?" + "a" * 9_000, {}, 414),
    ],
)
async def test_what_is_refused_before_it_is_read_can_be_read_by_the_page(
    balancer_factory: Any, config: Any, path: str, more: dict[str, str], status: int
) -> None:
    """A connection's last answer tells of origins like any other."""
    config["dataplane"]["max_head_bytes"] = 8192
    async with balancer_factory(config) as balancer:
        own = await balancer.http.post(path, json=IDS, headers={"origin": APP, **more})
        other = await balancer.http.post(
            path, json=IDS, headers={"origin": "https://evil.example", **more}
        )

    assert (own.status_code, other.status_code) == (status, status)
    assert own.headers.get_list("access-control-allow-origin") == [APP]
    assert "access-control-allow-origin" not in other.headers


async def test_it_is_off_by_default(balancer: Any) -> None:
    """A preflight is a method that the path doesn't take."""
    answer = await balancer.http.options("/v1/completions", headers=PREFLIGHT)

    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["app.example.org", "https://a.example/path", "", "null", "**"])
def test_what_is_no_origin_is_refused_at_start(origin: str) -> None:
    """It would never match, which nobody would see."""
    with pytest.raises(ConfigError, match=r"dataplane\.cors_origins"):
        decode_settings({"dataplane": {"cors_origins": [origin]}}, BalancerConfig, where="")
