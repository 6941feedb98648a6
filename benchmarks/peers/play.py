"""Sends the calls of a workload in real time.

Rules:

1. A call without a predecessor is sent at its time; one with a predecessor so long after that one's
   end. A call whose predecessor failed is sent all the same: every router gets every call.
2. Bodies are written before the first call is sent.
3. Everything is `slowdown` times as slow as the workload says: pauses here, engines elsewhere.
4. After `LIMIT_S` (times the slowdown) it ends: a router that sends everything to one engine would take
   an hour. What is under way then counts as `stopped`, what wasn't sent as `not_sent`.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.peers.routers import SESSION_HEADER
from kvlb.bench.calls import Call
from kvlb.openai_endpoint import OpenAiEndpoint
from kvlb.replay.core.outcomes import Outcome
from kvlb.replay.core.prompts import PromptShape, PromptWriter, WrittenRequest
from kvlb.replay.core.schedule import Timed
from kvlb.replay.core.trace_rows import BlockPrompt, TraceRequest
from kvlb.replay.sending import Sender, SendOptions, Sent

TIMEOUT_S = 300.0
LIMIT_S = 180.0
VOCABULARY = 10_000
MANY = 100_000
NOT_SENT = "not_sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What is sent, ready to be sent."""

    calls: Sequence[Call]
    written: Sequence[WrittenRequest]
    slowdown: float


def write_script(
    calls: Sequence[Call],
    *,
    model: str,
    block_size: int,
    takes_ids: bool,
    seed: int,
    slowdown: float,
) -> Script:
    """Prompts of the calls' block keys; what is behind the last full block is each call's own."""
    writer = PromptWriter(
        PromptShape(
            model=model,
            block_tokens=block_size,
            seed=seed,
            vocabulary=VOCABULARY,
            chars_per_token=None if takes_ids else 1.0,
        )
    )
    requests = [_request(number, call, block_size) for number, call in enumerate(calls)]
    return Script(calls=calls, written=[writer.write(each) for each in requests], slowdown=slowdown)


def _request(number: int, call: Call, block_size: int) -> TraceRequest:
    keys = [*call.prompt.keys(block_size), -1 - number]
    return TraceRequest(
        line=number,
        at_s=call.at_s,
        prompt=BlockPrompt(hash_ids=keys, input_tokens=call.prompt.tokens),
        output_tokens=call.output_tokens,
        session=call.session,
    )


async def play(url: str, script: Script, *, limit_s: float = LIMIT_S) -> Sequence[Outcome]:
    """What became of each call, in the order of the script."""
    sent = Sent()
    async with OpenAiEndpoint(url, silence_s=TIMEOUT_S) as endpoint:
        options = SendOptions(
            max_in_flight=MANY, timeout_s=TIMEOUT_S, session_header=SESSION_HEADER
        )
        sender = Sender(endpoint, options, sent)
        ended = [asyncio.Event() for _ in script.calls]
        begun_s = time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s * script.slowdown), asyncio.TaskGroup() as group:
                for number in range(len(script.calls)):
                    group.create_task(_play_call(sender, script, number, ended, begun_s))
    known = {each.line: each for each in sent.outcomes}
    return [
        known.get(number) or Outcome(line=number, session=call.session, at_s=0.0, error=NOT_SENT)
        for number, call in enumerate(script.calls)
    ]


async def _play_call(
    sender: Sender, script: Script, number: int, ended: Sequence[asyncio.Event], begun_s: float
) -> None:
    call, written = script.calls[number], script.written[number]
    due_s = begun_s
    if call.after is not None:
        await ended[call.after].wait()
        due_s = time.monotonic()
    due_s += call.at_s * script.slowdown
    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    request = TraceRequest(
        line=number,
        at_s=None,
        prompt=BlockPrompt(hash_ids=(), input_tokens=0),
        output_tokens=call.output_tokens,
        session=call.session,
    )
    timed = Timed(at_s=due_s - begun_s, request=request)
    try:
        await sender.ask(timed, written, due_s)
    finally:
        ended[number].set()
