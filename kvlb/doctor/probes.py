"""Sends the few small requests a diagnosis needs: one token each, a prompt nobody has sent before.

Every rank gets the same prompt twice: the first announces blocks, the second finds them. A prefill
instance gets a prefill leg, and a decode instance the leg that belongs to it, so that no blocks
stay reserved.
"""

import asyncio
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from balancer.connectors.available import connectors
from balancer.connectors.contract import Connector, LegContext, NoTransferError
from balancer.core.fleet.snapshot import Instance, Role
from indexer.core.addresses import parse_instance_id
from indexer.core.model_cards import ServedModels
from kvlb.doctor.core.facts import Probed, Told, Transfer
from kvlb.engine_http import Answer, CallFailedError, EngineHttp

PATH = "/v1/completions"
WORDS = "the cache of an engine keeps what it has read and a balancer finds it there again"
LONGEST_PROMPT_TOKENS = 4096
DEFAULT_BLOCK_TOKENS = 128
DIAL_S = 3.0


async def make_prompt(
    engine: EngineHttp, models: ServedModels, block_size: int | None, nonce: str
) -> list[int] | None:
    """Token ids for two full blocks and one more; the same for every engine of a tokenizer."""
    wanted = 2 * (block_size or DEFAULT_BLOCK_TOKENS) + 1
    limits = [card.get("max_model_len") for card in models.cards]
    longest = min([LONGEST_PROMPT_TOKENS, *(limit - 2 for limit in limits if limit)])
    text = f"{nonce} " + f"{WORDS} " * (wanted // 8 + 1)
    tokens = await engine.tokenize({"model": models.base, "prompt": text})
    return None if not tokens else list(tokens[: min(wanted, longest)])


async def complete(
    engine: EngineHttp, model: str, prompt: Sequence[int], rank_header: str | None
) -> Answer:
    """One token of one prompt. Raises CallFailedError."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
    headers = {} if rank_header is None else {"X-data-parallel-rank": rank_header}
    return await engine.post(PATH, body, headers)


async def probe(
    engine: EngineHttp, model: str, prompt: Sequence[int], rank_header: str | None
) -> Probed:
    """The same prompt twice."""
    cached: list[int | None] = []
    for _ in range(2):
        try:
            answer = await complete(engine, model, prompt, rank_header)
        except CallFailedError as error:
            return Probed(prompt_tokens=len(prompt), problem=str(error))
        if not answer.is_ok:
            return Probed(prompt_tokens=len(prompt), problem=f"status {answer.status}")
        cached.append(_cached_tokens(answer.body))
    return Probed(
        prompt_tokens=len(prompt),
        tells_cached=any(each is not None for each in cached),
        cached_tokens=cached[-1] or 0,
    )


def _cached_tokens(body: Any) -> int | None:
    usage = body.get("usage") if isinstance(body, Mapping) else None
    details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
    figure = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return figure if isinstance(figure, int) else None


async def hand_over(
    prefill: tuple[Told, EngineHttp],
    decode: tuple[Told, EngineHttp] | None,
    model: str,
    prompt: Sequence[int],
) -> Transfer | None:
    """A prefill leg, and its decode leg if there is an instance for it."""
    told, engine = prefill
    connector = connectors().get(told.connector)
    if connector is None or connector.name == "none":
        return None
    body = {"model": model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
    target, other = decode if decode is not None else prefill
    context = LegContext(
        request_id="kvlb-doctor",
        attempt_id=uuid.uuid4().hex,
        path=PATH,
        body=body,
        prefill=_instance(told),
        prefill_rank=0,
        decode=_instance(target),
        decode_rank=0,
    )
    if connector.style(context) == "concurrent":
        return None
    try:
        leg = connector.prefill_leg(context)
        if leg.request_id is not None:
            return None  # such engines find each other by ids, which aren't sent from here
        answer = await engine.post(PATH, leg.body)
        decoded = _decode_body(connector, context, answer)
    except (CallFailedError, NoTransferError) as error:
        return Transfer(problem=str(error))
    host, port = _offered_at(decoded)
    return Transfer(
        host=host,
        port=port,
        dial_problem=None if host is None or port is None else await dial_problem(host, port),
        decode=None if decode is None else target.name,
        decode_host="" if decode is None else (urlsplit(target.url).hostname or ""),
        decode_problem=None if decode is None else await _decode_problem(other, decoded),
    )


def _decode_body(connector: Connector, context: LegContext, answer: Answer) -> Mapping[str, Any]:
    if not answer.is_ok or not isinstance(answer.body, Mapping):
        raise NoTransferError(f"status {answer.status}")
    return connector.decode_leg(context, answer.body).body


async def _decode_problem(engine: EngineHttp, body: Mapping[str, Any]) -> str | None:
    try:
        answer = await engine.post(PATH, body)
    except CallFailedError as error:
        return str(error)
    return None if answer.is_ok else f"status {answer.status}"


def _offered_at(body: Mapping[str, Any]) -> tuple[str | None, int | None]:
    params = body.get("kv_transfer_params")
    if not isinstance(params, Mapping):
        return None, None
    host, port = params.get("remote_host"), params.get("remote_port")
    return (host if isinstance(host, str) else None), (port if isinstance(port, int) else None)


async def dial_problem(host: str, port: int) -> str | None:
    """Why no TCP connection can be made; None if one can."""
    try:
        async with asyncio.timeout(DIAL_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), port)
    except TimeoutError:
        return "where nobody answers"
    except OSError as error:
        return f"where no connection can be made ({_reason(error)})"
    writer.close()
    return None


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "no such host"
    return os.strerror(error.errno) if error.errno else type(error).__name__


def _instance(told: Told) -> Instance:
    return Instance(
        id=parse_instance_id(told.url),
        alias=told.name,
        role=Role(told.role),
        connector=told.connector,
        transfer=told.transfer,
    )
