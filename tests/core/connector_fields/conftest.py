"""Both legs of one request, as a connector makes them of two instances."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from balancer.connectors.available import connectors
from balancer.connectors.contract import LegContext, LegRequest, PullContext
from balancer.core.fleet.snapshot import Instance, Role
from balancer.core.fleet.transfer_facts import NO_FACTS, TransferFacts
from balancer.core.settings.transfer import read_transfer
from indexer.core.types import InstanceId

ATTEMPT = "0123456789abcdef" * 2
BODY: dict[str, Any] = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 50, "stream": True}


@pytest.fixture(scope="session")
def attempt_id() -> str:
    """Names the one attempt."""
    return ATTEMPT


@pytest.fixture(scope="session")
def client_body() -> Mapping[str, Any]:
    """What the client sent: this very object, so that a leg can be seen to leave it alone."""
    return BODY


def _one(
    alias: str,
    connector: str,
    *,
    url: str = "http://10.0.0.1:8000",
    ranks: tuple[int, ...] = (0,),
    rank_base: int = 0,
    facts: TransferFacts = NO_FACTS,
    **transfer: Any,
) -> Instance:
    role = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}[alias[0]]
    return Instance(
        id=InstanceId(url),
        alias=alias,
        role=role,
        connector=connector,
        ranks=ranks,
        rank_base=rank_base,
        facts=facts,
        transfer=read_transfer(connector, transfer),
    )


@pytest.fixture(scope="session")
def one() -> Callable[..., Instance]:
    """An instance of a connector; the alias says its role, the rest is its `transfer`."""
    return _one


@pytest.fixture(scope="session")
def legs() -> Callable[..., tuple[LegRequest, LegRequest]]:
    """What prefill and decode are sent; `answer` is what prefill answered."""

    def make(
        prefill: Instance,
        decode: Instance,
        answer: Mapping[str, Any] | None = None,
        *,
        prefill_rank: int = 0,
        decode_rank: int = 0,
        earlier: Mapping[str, Any] | None = None,
    ) -> tuple[LegRequest, LegRequest]:
        connector = connectors()[prefill.connector]
        context = LegContext(
            request_id="abc",
            attempt_id=ATTEMPT,
            path="/v1/completions",
            body=BODY,
            prefill=prefill,
            prefill_rank=prefill_rank,
            decode=decode,
            decode_rank=decode_rank,
            earlier=earlier,
        )
        return connector.prefill_leg(context), connector.decode_leg(context, answer)

    return make


@pytest.fixture(scope="session")
def params() -> Callable[[LegRequest], Any]:
    """The transfer parameters of a leg."""
    return lambda leg: leg.body["kv_transfer_params"]


@pytest.fixture(scope="session")
def pulled() -> Callable[..., Any]:
    """What a mixed instance is sent that could fetch from another."""

    def make(
        *, more_tokens: int = 1000, connector: str = "offloading", **settings: Mapping[str, Any]
    ) -> Any:
        target = settings.get("target", {"p2p_host": "10.0.0.1", "pull_min_tokens": 512})
        source = settings.get("source", {"p2p_host": "10.0.0.2", "p2p_port": 6000})
        context = PullContext(
            attempt_id=ATTEMPT,
            body=BODY,
            target=_one("m0", connector, **target),
            source=_one("m1", connector, **source),
            source_rank=1,
            more_tokens=more_tokens,
        )
        return connectors()[connector].pull(context)

    return make
