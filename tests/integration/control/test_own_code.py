"""Policies and handlers by import path: loaded, used, refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from balancer.config import BalancerConfig, check_config
from balancer.core.settings.errors import ConfigError, decode_settings

IDS = {"model": "tiny", "prompt": [1, 2, 3]}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}

MODULE = '''
import asyncio
from balancer.core.routing.cost import estimate_all
from balancer.core.handlers import Amend, Refuse, Reply

class Backwards:
    """Prefers the last of the fleet."""
    def choose(self, shape, candidates, draw):
        return estimate_all(shape, candidates)[::-1]
    def chosen(self, rank):
        pass

class Broken(Backwards):
    def choose(self, shape, candidates, draw):
        raise RuntimeError("a bug")

class NoChosen:
    def choose(self, shape, candidates, draw):
        return []

class FewArguments(NoChosen):
    def choose(self, shape):
        return []
    def chosen(self, rank):
        pass

class Waits(Backwards):
    async def choose(self, shape, candidates, draw):
        return []

class ToldAsync(Backwards):
    async def chosen(self, rank):
        pass

class Streams(Backwards):
    async def choose(self, shape, candidates, draw):
        yield

class Exits:
    def __init__(self):
        raise SystemExit(3)
    async def __call__(self, request):
        return None

class Needy(Backwards):
    def __init__(self, budget):
        pass

def plain(request):
    return None

async def two(request, more):
    return None

async def gate(request):
    what = request.headers.get("x-do")
    if what == "refuse":
        return Refuse(status=429, message="slow down", code="budget")
    if what == "reply":
        return Reply(body=b'{"cached": true}', headers={"x-cache": "hit"})
    if what == "amend":
        return Amend(body={**request.body, "user": "u1"}, headers={"x-tenant": "t1"})
    if what == "mark":
        return Amend(headers={"x-tenant": "t2"})
    if what == "other-model":
        return Amend(body={**request.body, "model": "nope"})
    if what == "fail":
        raise RuntimeError("prompt text that must not be told")
    if what == "odd":
        return "yes"
    if what == "bad-header":
        return Amend(headers={"x": "a\\r\\nb"})
    if what == "slow":
        await asyncio.sleep(60)
    return None

class Gate:
    def __init__(self):
        self.seen = 0
    async def __call__(self, request):
        self.seen += 1
        return Refuse(status=403, message=f"{request.path} {self.seen}")
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A module of the operator's; gives the path of a name in it."""
    name = f"own_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("raise RuntimeError('at import')")
    (tmp_path / f"{name}_exits.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda what: f"{name}{what}"


async def test_own_policy_decides(engine_factory: Any, balancer_factory: Any, own: Any) -> None:
    """Between candidates that `kvlb` would take in turn."""
    async with engine_factory() as first, engine_factory() as second:
        config = {
            "instances": [{"url": first.url}, {"url": second.url}],
            "routing": {"policy": own(":Backwards")},
        }
        async with balancer_factory(config) as balancer:
            await balancer.available(2)
            for _ in range(3):
                await balancer.http.post("/v1/completions", json=IDS)

    assert (first.calls("/v1/completions"), second.calls("/v1/completions")) == (0, 3)


async def test_own_policy_that_fails_costs_nothing(
    engine: Any, balancer_factory: Any, own: Any
) -> None:
    """It is counted."""
    config = {"instances": [{"url": engine.url}], "routing": {"policy": own(":Broken")}}
    async with balancer_factory(config) as balancer:
        await balancer.available()
        answer = await balancer.http.post("/v1/completions", json=IDS)
        metrics = (await balancer.http.get("/metrics")).text

    assert answer.status_code == 200
    assert 'kvlb_own_code_failures_total{error="RuntimeError",kind="policy"} 1.0' in metrics


def configured(**data: Any) -> BalancerConfig:
    return check_config(decode_settings(data, BalancerConfig, where=""), {})


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nope", "no policy `nope`.*valid here: .*`kvlb`.*package.module:Class"),
        ("least_loadd", "did you mean `least_loaded`"),
        (":Backwards", "no import path"),
        ("nobody.has.this:X", "can't import 'nobody.has.this' .ModuleNotFoundError.*PYTHONPATH"),
        ("{}_broken:X", "RuntimeError: at import"),
        ("{}:Nothing", "has no 'Nothing'"),
        ("{}:Backwards.Inner", "has no 'Backwards.Inner'"),
        ("{}:NoChosen", r"has no method chosen\(rank\)"),
        ("{}:FewArguments", r"choose can't be called as choose\(shape, candidates, draw\)"),
        ("{}:Needy", "made without arguments"),
        ("{}:plain", r"has no method choose\("),
        ("{}:Waits", "choose is async"),
        ("{}:ToldAsync", "chosen is async"),
        ("{}:Streams", "choose is async"),
        ("{}:Exits", r"\(\) fails \(SystemExit: 3\)"),
        ("{}_exits:X", "SystemExit: 3"),
    ],
)
def test_policy_that_cannot_be_is_refused_at_start(own: Any, path: str, says: str) -> None:
    """By its key, its path and what is missing."""
    with pytest.raises(ConfigError, match=f"`routing.policy`.*{says}"):
        configured(routing={"policy": path.format(own(""))})


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("gate", "no import path"),
        ("{}:Nothing", "has no 'Nothing'"),
        ("{}:plain", "not an async function"),
        ("{}:two", r"can't be called as __call__\(request\)"),
        ("{}:MODULE", "has no 'MODULE'"),
        ("{}:Backwards", r"has no method __call__\(request\)"),
        ("{}:Exits", r"\(\) fails \(SystemExit: 3\)"),
        ("{}_exits:X", "SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("key", ["completion", "chat_completion", "forwarded"])
def test_handler_that_cannot_be_is_refused_at_start(
    own: Any, key: str, path: str, says: str
) -> None:
    """Likewise."""
    with pytest.raises(ConfigError, match=f"`handlers.{key}`.*{says}"):
        configured(handlers={key: path.format(own(""))})


async def ask(balancer: Any, what: str, path: str = "/v1/completions", body: Any = IDS) -> Any:
    return await balancer.http.post(path, json=body, headers={"x-do": what})


async def test_handler_judges_requests(engine: Any, balancer_factory: Any, own: Any) -> None:
    """Refused, answered, changed, or left as they are; those of the other path aren't asked."""
    config = {"instances": [{"url": engine.url}], "handlers": {"completion": own(":gate")}}
    async with balancer_factory(config) as balancer:
        await balancer.available()
        passed = await ask(balancer, "nothing")
        refused = await ask(balancer, "refuse")
        replied = await ask(balancer, "reply")
        amended = await ask(balancer, "amend")
        marked = await ask(balancer, "mark")
        unknown = await ask(balancer, "other-model")
        chat = await ask(balancer, "refuse", "/v1/chat/completions", CHAT)
        got = [each for each in engine.received if each[0] == "/v1/completions"]

    assert [each.status_code for each in (passed, refused, replied, amended, marked, chat)] == [
        200,
        429,
        200,
        200,
        200,
        200,
    ]
    assert refused.json()["error"] == {
        "message": "slow down",
        "type": "RequestRefusedError",
        "param": None,
        "code": "budget",
    }
    assert (replied.json(), replied.headers["x-cache"]) == ({"cached": True}, "hit")
    assert unknown.status_code == 404
    bodies = [body for _, body, _ in got]
    assert [body.get("user") for body in bodies] == [None, "u1", None]
    assert [headers.get("x-tenant") for _, _, headers in got] == [None, "t1", "t2"]


@pytest.mark.parametrize("what", ["fail", "odd", "bad-header", "slow"])
async def test_handler_that_fails_lets_nothing_in(
    engine: Any, balancer_factory: Any, own: Any, what: str
) -> None:
    """It may be what keeps somebody out. Nothing of its error is told."""
    handlers = {"completion": own(":gate"), "timeout_s": 0.2}
    config = {"instances": [{"url": engine.url}], "handlers": handlers}
    async with balancer_factory(config) as balancer:
        await balancer.available()
        answer = await ask(balancer, what)
        metrics = (await balancer.http.get("/metrics")).text

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "handler_failed"
    assert "prompt text" not in answer.text
    assert engine.calls("/v1/completions") == 0
    assert 'kind="handler"} 1.0' in metrics


async def test_class_is_made_once(engine: Any, balancer_factory: Any, own: Any) -> None:
    """It may keep what it has seen."""
    config = {"instances": [{"url": engine.url}], "handlers": {"chat_completion": own(":Gate")}}
    async with balancer_factory(config) as balancer:
        await balancer.available()
        answers = [await ask(balancer, "", "/v1/chat/completions", CHAT) for _ in range(2)]

    messages = [each.json()["error"]["message"] for each in answers]
    assert messages == ["/v1/chat/completions 1", "/v1/chat/completions 2"]
    assert answers[0].status_code == 403


FORM = {"model": (None, "tiny"), "file": ("a.wav", b"sound")}
MESSAGE = {"model": "tiny", "max_tokens": 1, "messages": CHAT["messages"]}
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/messages": MESSAGE,
    "/v1/responses": {"model": "tiny", "input": "hi"},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {}},
    "/v1/embeddings": {"model": "tiny", "input": "hi"},
    "/detokenize": {"tokens": [1]},
}


@pytest.mark.parametrize("path", WHOLE)
async def test_handler_sees_what_is_handed_over_whole(
    engine: Any, balancer_factory: Any, own: Any, path: str
) -> None:
    """Refused, answered or changed, as what is split."""
    engine.answers = dict.fromkeys(WHOLE, (200, b"{}"))
    config = {"instances": [{"url": engine.url}], "handlers": {"forwarded": own(":gate")}}
    async with balancer_factory(config) as balancer:
        await balancer.available()
        calls = engine.calls(path)
        refused = await ask(balancer, "refuse", path, WHOLE[path])
        replied = await ask(balancer, "reply", path, WHOLE[path])
        failed = await ask(balancer, "fail", path, WHOLE[path])
        stopped = engine.calls(path) - calls
        amended = await ask(balancer, "amend", path, WHOLE[path])
        marked = await ask(balancer, "mark", path, WHOLE[path])
        passed = await ask(balancer, "nothing", path, WHOLE[path])
        chat = await ask(balancer, "refuse", "/v1/chat/completions", CHAT)
        bodies = [(body, headers) for at, body, headers in engine.received if at == path][calls:]

    asked = (refused, replied, failed, amended, marked, passed, chat)
    assert [each.status_code for each in asked] == [429, 200, 503, 200, 200, 200, 200]
    assert (replied.json(), replied.headers["x-cache"]) == ({"cached": True}, "hit")
    assert stopped == 0
    assert bodies[0][0] == {**WHOLE[path], "user": "u1"}
    assert [body for body, _ in bodies[1:]] == [WHOLE[path]] * 2
    assert [headers.get("x-tenant") for _, headers in bodies] == ["t1", "t2", None]


async def test_handler_sees_requests_that_are_no_json(
    engine: Any, balancer_factory: Any, own: Any
) -> None:
    """Forms and reads of kept responses can be refused; what is in a form can't be changed."""
    config = {"instances": [{"url": engine.url}], "handlers": {"forwarded": own(":gate")}}
    async with balancer_factory(config) as balancer:
        await balancer.available()
        http, audio = balancer.http, "/v1/audio/transcriptions"
        refused = await http.post(audio, files=FORM, headers={"x-do": "refuse"})
        changed = await http.post(audio, files=FORM, headers={"x-do": "amend"})
        unread = await http.get("/v1/responses/resp_1", headers={"x-do": "refuse"})
        broken = await http.post(
            "/v1/messages",
            content=b"{",
            headers={"x-do": "refuse", "content-type": "application/json"},
        )
        unknown = await ask(balancer, "refuse", "/v1/embeddings", {"model": "nope"})

    asked = (refused, changed, unread, broken, unknown)
    assert [each.status_code for each in asked] == [429, 503, 429, 429, 404]
    assert engine.calls(audio) == 0
