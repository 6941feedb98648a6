"""What a job's legs are told: earlier turns as far as they are trusted, peers that hold more."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from balancer.core.fleet.snapshot import Fleet, Instance, Role
from balancer.core.record import RequestRecord
from balancer.core.request import Endpoint, GenerateRequest, PromptView
from balancer.core.routing.conversations import Answered, Conversations, LastTurn, remember
from balancer.core.routing.plan import Candidate, Choice, Reason, RoutePlan
from balancer.core.settings.transfer import NixlSettings
from balancer.dataplane.jobs import Job, earlier_blocks, ended_turn, fuller_peer, take_turn
from indexer.core.hashing import Namespace
from indexer.core.index import Prompt
from indexer.core.types import InstanceId, RankId, Trust

FIRST = [{"role": "user", "content": "hi"}]
TURN = [*FIRST, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "more"}]
KEPT = b'{"choices": [{"message": {"content": "hello"}}], "kv_transfer_params": {"do_remote_decode": true}}'


def instance(alias: str, role: Role, *, bidirectional: bool = True) -> Instance:
    return Instance(
        id=InstanceId(f"http://{alias}:1"),
        alias=alias,
        role=role,
        connector="nixl",
        transfer=NixlSettings(bidirectional=bidirectional),
    )


def choice(
    alias: str, role: Role, *, held_tokens: int = 0, trust: Trust = Trust.EXACT, **fields: Any
) -> Choice:
    one = instance(alias, role)
    candidate = Candidate(
        rank=RankId(one.id, 0), instance=one, overlap_tokens=held_tokens, trust=trust, **fields
    )
    return Choice(candidate=candidate, cost_s=0.0)


def plan(decode: Choice, *others: Choice, prefill: bool = True) -> RoutePlan:
    return RoutePlan(
        decode=decode,
        prefill=choice("p", Role.PREFILL) if prefill else None,
        reason=Reason.REMOTE_PREFILL,
        considered=(decode, *others),
    )


def prompt(tokens: int) -> Prompt:
    return Prompt(Namespace(model="m"), range(tokens))


def job(tokens: int = 500, conversation: str | None = "c", prompts: int = 1) -> Job:
    request = GenerateRequest(
        request_id="r",
        endpoint=Endpoint.CHAT,
        body={"messages": TURN},
        raw_body=b"{}",
        headers=(),
        model="m",
        base_model="m",
        lora=None,
        conversation=conversation,
    )
    return Job(
        fleet=Fleet(),
        request=request,
        prompt=PromptView(prompts=(prompt(tokens),) * prompts, source="ids"),
        record=RequestRecord(request_id="r", path="/v1/chat/completions", arrived_s=0.0),
        body=b"{}",
        asks_usage=False,
    )


def last_turn() -> LastTurn:
    params = {"remote_num_tokens": 200, "remote_block_ids": [list(range(13))]}
    answered = Answered(params=params, text="hello")
    rank = RankId(InstanceId("http://d:1"), 0)
    return remember(answered, rank, prompt(100), {"messages": FIRST}, 16)


@pytest.mark.parametrize(
    ("trust", "expected"),
    [
        pytest.param(Trust.EXACT, 12, id="exact"),
        pytest.param(Trust.DEGRADED, 6, id="degraded"),
    ],
)
def test_what_was_generated_is_used_on_exact_word_only(trust: Trust, expected: int) -> None:
    """A rank whose events aren't sure vouches for nothing; the last prompt needs no voucher."""
    planned = plan(choice("d", Role.DECODE, held_tokens=480, trust=trust))

    found = earlier_blocks(job(), planned, last_turn())

    assert found is not None
    assert len(found["remote_block_ids"][0]) == expected


def test_another_rank_vouches_for_nothing() -> None:
    """Its blocks are its own."""
    planned = plan(choice("d", Role.DECODE), choice("e", Role.DECODE, held_tokens=480))

    found = earlier_blocks(job(), planned, last_turn())

    assert found is not None
    assert len(found["remote_block_ids"][0]) == 6
    assert earlier_blocks(job(), planned, None) is None


def test_a_turn_is_taken_only_by_who_can_use_it() -> None:
    """A request of no conversation, without a prefill leg or of several prompts leaves it there."""
    turns = Conversations()
    turns.put("c", last_turn(), now_s=0, expires_s=10)
    pair = plan(choice("d", Role.DECODE))

    assert take_turn(job(conversation=None), pair, turns, 0) is None
    assert take_turn(job(), plan(choice("d", Role.DECODE), prefill=False), turns, 0) is None
    assert take_turn(job(prompts=2), pair, turns, 0) is None
    one_way = msgspec.structs.replace(pair, decode=plain_decode())
    assert take_turn(job(), one_way, turns, 0) is None
    assert take_turn(job(), pair, turns, 0) is not None


def plain_decode() -> Choice:
    one = instance("d", Role.DECODE, bidirectional=False)
    return Choice(candidate=Candidate(rank=RankId(one.id, 0), instance=one), cost_s=0.0)


def test_a_turn_is_remembered_once_its_block_size_is_known() -> None:
    """Without it nothing could be compared."""
    known = plan(choice("d", Role.DECODE, block_size=16))

    assert ended_turn(job(), known, KEPT) is not None
    assert ended_turn(job(), plan(choice("d", Role.DECODE)), KEPT) is None
    assert ended_turn(job(), known, b"{}") is None


def test_the_fuller_peer_is_who_holds_most_with_the_same_connector() -> None:
    """Not the rank itself, and nobody who holds no more."""
    target = choice("m0", Role.MIXED, held_tokens=100)
    other = choice("m3", Role.MIXED, held_tokens=900)
    strange = Choice(
        candidate=Candidate(
            rank=other.candidate.rank,
            instance=replace(other.candidate.instance, connector="none"),
            overlap_tokens=900,
        ),
        cost_s=0.0,
    )
    peers = (
        choice("m1", Role.MIXED, held_tokens=400),
        choice("m2", Role.MIXED, held_tokens=300),
        strange,
    )

    found = fuller_peer(plan(target, *peers))

    assert found is not None
    assert found.instance.alias == "m1"
    assert fuller_peer(plan(target, choice("m1", Role.MIXED, held_tokens=100))) is None
