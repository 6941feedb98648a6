"""docs/fleet.md and docs/extending.md: what they show works, what they list is all there is."""

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from balancer.core.fleet.fan_out import COMMANDS
from balancer.core.fleet.roster import MAX_RUNTIME_MEMBERS, Origin
from balancer.core.handlers import Amend, Refuse, Reply, SeenRequest
from balancer.core.settings.errors import decode_settings
from balancer.fleet.admin import REFUSED
from balancer.own_code import load_handler
from kvlb.settings import KvlbSettings

DOCS = Path(__file__).parents[3] / "docs"
FLEET = (DOCS / "fleet.md").read_text("utf-8")
EXTENDING = (DOCS / "extending.md").read_text("utf-8")
IDS = {"model": "tiny", "prompt": [1, 2, 3]}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's examples as modules of the operator's: `page_1`, `page_2`."""
    for number, text in enumerate(re.findall(r"```python\n(.*?)```", EXTENDING, re.DOTALL), 1):
        (tmp_path / f"page_{number}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "page"


async def test_example_of_a_policy_works(engine: Any, balancer_factory: Any, modules: str) -> None:
    """As it stands on the page, and it doesn't fail on the way."""
    config = {
        "instances": [{"url": engine.url}],
        "routing": {"policy": f"{modules}_1:CheapestFirst"},
    }
    async with balancer_factory(config) as balancer:
        await balancer.available()
        answer = await balancer.http.post("/v1/completions", json=IDS)
        metrics = (await balancer.http.get("/metrics")).text

    assert answer.status_code == 200
    assert "kvlb_own_code_failures_total{" not in metrics


async def test_example_of_a_handler_works(modules: str) -> None:
    """Each of its verdicts."""
    handler = load_handler(f"{modules}_2:gate", "handlers.completion")
    assert handler is not None

    def request(body: dict[str, Any], **headers: str) -> SeenRequest:
        return SeenRequest(
            request_id="r",
            path="/v1/completions",
            model="m",
            base_model="m",
            adapter=None,
            stream=False,
            body=body,
            headers=headers,
        )

    tenant = {"x-tenant": "t"}
    assert isinstance(await handler(request({})), Refuse)
    assert isinstance(await handler(request({"user": "health-check"}, **tenant)), Reply)
    amended = await handler(request({"prompt": "x"}, **tenant))
    assert amended == Amend(body={"prompt": "x", "max_tokens": 256})
    assert await handler(request({"max_tokens": 1}, **tenant)) is None


def test_configuration_on_the_page_is_valid() -> None:
    """Operators copy it."""
    shown = re.findall(r"```yaml\n(.*?)```", FLEET, re.DOTALL)

    assert len(shown) == 2
    for text in shown:
        decode_settings(yaml.safe_load(text), KvlbSettings, where="").check_fleet()


def test_page_names_all_commands_origins_and_refusals() -> None:
    """What isn't there can't be found."""
    words = set(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", FLEET, flags=re.DOTALL)))

    assert {path for path in COMMANDS if not any(word.startswith(path) for word in words)} == set()
    assert {origin.value for origin in Origin} <= words
    assert set(REFUSED) <= words
    assert str(MAX_RUNTIME_MEMBERS) in FLEET
