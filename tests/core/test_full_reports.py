"""When a request asks its engine to announce again what it reuses, and what nobody else may."""

from typing import Any

import pytest

from balancer.core.fleet.snapshot import Instance
from balancer.core.http.forbidden import without_forbidden
from balancer.core.http.headers import pass_request_headers
from balancer.core.request import Endpoint, GenerateRequest
from balancer.core.routing.full_reports import FullReports, with_full_report
from balancer.core.routing.plan import Candidate
from indexer.core.reports import FULL_REPORT_SESSION
from indexer.core.types import InstanceId, RankId, Trust

ENGINE = InstanceId("http://e0:8000")
INTERVAL_S = 10.0


def candidate(trust: Trust = Trust.DEGRADED, rank: int = 0) -> Candidate:
    instance = Instance(id=ENGINE, alias="a")
    return Candidate(rank=RankId(ENGINE, rank), instance=instance, trust=trust)


def request(*headers: tuple[bytes, bytes], **body: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        endpoint=Endpoint.CHAT,
        body=body,
        raw_body=b"",
        headers=headers,
        model="m",
        base_model="m",
        lora=None,
    )


@pytest.fixture
def reports() -> FullReports:
    """Of an engine that can do it."""
    reports = FullReports(INTERVAL_S)
    reports.learn(ENGINE, "0.33.0", 0.0)
    return reports


def test_rank_that_stays_degraded_is_asked_once_per_interval(reports: FullReports) -> None:
    """Not at once: a replay may help. Each rank for itself."""
    times_s = (0.0, 9.0, 10.0, 11.0, 20.0)
    asked = [reports.ask(candidate(), request(), now_s) for now_s in times_s]

    assert asked == [False, False, True, False, True]
    assert not reports.ask(candidate(rank=1), request(), 20.0)
    assert reports.ask(candidate(rank=1), request(), 30.0)
    assert reports.asked == 3


def test_rank_that_is_well_again_is_patient_anew(reports: FullReports) -> None:
    """Another fault is another chance for a replay."""
    reports.ask(candidate(), request(), 0.0)
    assert not reports.ask(candidate(Trust.EXACT), request(), 50.0)

    assert not reports.ask(candidate(), request(), 51.0)
    assert reports.ask(candidate(), request(), 61.0)


def test_rank_whose_indexer_has_stopped_is_not_asked(reports: FullReports) -> None:
    """Nobody would hear what it announces."""
    silent = Candidate(
        rank=RankId(ENGINE, 0),
        instance=Instance(id=ENGINE, alias="a"),
        trust=Trust.DEGRADED,
        trust_reason="indexer_silent",
    )

    assert not any(reports.ask(silent, request(), now_s) for now_s in (0.0, 50.0, 100.0))


def test_no_interval_means_never() -> None:
    """It can be switched off."""
    reports = FullReports(0)

    assert not reports.ask(candidate(), request(), 1e9)


@pytest.mark.parametrize(
    "named",
    [
        request((b"x-session-id", b"mine")),
        request(session_id="mine"),
        request(vllm_xargs={"session_id": "mine"}),
    ],
)
def test_request_with_a_session_of_its_own_is_left_alone(
    reports: FullReports, named: GenerateRequest
) -> None:
    """We need that field to tell the events."""
    reports.ask(candidate(), named, 0.0)

    assert not reports.ask(candidate(), named, 20.0)
    assert reports.ask(candidate(), request(vllm_xargs=[1]), 20.0)


@pytest.mark.parametrize(
    ("release", "is_able"),
    [("0.30.0", True), ("v1.0", True), ("0.29.1", False), ("0.9.2+cpu", False), ("dev", False)],
)
def test_only_releases_that_echo_the_session(release: str, is_able: bool) -> None:
    """Without it the blocks would count twice."""
    reports = FullReports(INTERVAL_S)
    reports.learn(ENGINE, release, 0.0)
    reports.ask(candidate(), request(), 0.0)

    assert reports.ask(candidate(), request(), 20.0) == is_able


def test_unknown_release_is_asked_for(reports: FullReports) -> None:
    """Once it is wanted, and again when it may have changed."""
    reports.ask(candidate(), request(), 0.0)
    assert reports.take_unknown() == []

    assert not reports.ask(candidate(), request(), 1000.0)

    assert reports.take_unknown() == [ENGINE]
    assert reports.take_unknown() == []


def test_body_asks_beside_what_it_asks_anyway() -> None:
    """`vllm_xargs` has other uses, and may be anything."""
    asked = {"kv_cache_report_mode": "full"}

    assert with_full_report({"a": 1}) == {"a": 1, "vllm_xargs": asked}
    assert with_full_report({"vllm_xargs": {"b": 2}}) == {"vllm_xargs": {"b": 2, **asked}}
    assert with_full_report({"vllm_xargs": [1]}) == {"vllm_xargs": asked}


def test_clients_cannot_pass_for_us() -> None:
    """Neither by header, nor by either field; other sessions pass."""
    ours, mine = FULL_REPORT_SESSION.encode(), (b"x-session-id", b"mine")

    assert pass_request_headers([(b"x-session-id", ours), mine, (b"x", ours)]) == (
        mine,
        (b"x", ours),
    )
    body = {"session_id": FULL_REPORT_SESSION, "a": 1}
    assert without_forbidden(body) == {"a": 1}
    xargs = {"session_id": FULL_REPORT_SESSION, "kv_cache_report_mode": "full", "b": 2}
    assert without_forbidden({"vllm_xargs": xargs}) == {"vllm_xargs": {"b": 2}}
    other = {"session_id": "mine", "vllm_xargs": {"session_id": "mine"}}
    assert without_forbidden(other) is other
