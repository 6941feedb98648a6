"""Audits one capture: what we would have predicted, request by request, against what was reported."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from indexer.core.events import BlockStored
from indexer.core.types import RankId
from kvlb.audit.capture import Capture, Message, RequestRow, read_capture
from kvlb.audit.engines import read_engines
from kvlb.audit.forecast import Forecast, forecast_rank
from kvlb.audit.publishers import Publishers
from kvlb.audit.report import AuditReport, Row, Verdict, build_report
from kvlb.audit.rules import Evidence, explain
from kvlb.audit.sent import Sent, find_rank, incomparable_reason, known_tokens, reported_tokens
from kvlb.audit.streams import RankRecord, order_messages


def audit(events: Path, requests: Path) -> AuditReport:
    """Audit one capture. Raises KvlbError naming file and line if it can't be read."""
    return audit_capture(read_capture(events, requests))


def audit_capture(capture: Capture) -> AuditReport:
    """Audit one capture that was read already."""
    return _Audit(capture).report()


@dataclass(frozen=True, slots=True)
class _Placed:
    """A request row, what was sent if all of that is known, else why not."""

    row: RequestRow
    rank: RankId | None
    sent: Sent | None
    reason: str | None


class _Audit:
    def __init__(self, capture: Capture) -> None:
        self._heard_until_s = capture.heard_until_s
        self._cuts = [cut for cut in (capture.events_cut, capture.requests_cut) if cut is not None]
        publishers = Publishers(capture)
        live = publishers.ranks(capture.messages)
        replayed = publishers.ranks(capture.replayed)
        self._unowned = len(live.pop(None, []))
        self._records = {
            rank: order_messages(messages, replayed.get(rank, []))
            for rank, messages in live.items()
            if rank is not None
        }
        self._engines = read_engines(capture, _first_payloads(live))
        self._loras = _event_loras(self._records)
        self._placed = [self._place(position, row) for position, row in enumerate(capture.requests)]
        self._sent = [placed.sent for placed in self._placed if placed.sent is not None]

    def report(self) -> AuditReport:
        forecasts: dict[int, Forecast] = {}
        for rank, asked in _by_rank(self._sent).items():
            record = self._records.get(rank)
            batches = record.batches if record else ()
            forecasts |= forecast_rank(rank, self._engines[rank.instance].model, batches, asked)
        for sent in self._sent:
            forecasts[sent.position].events_lost |= sent.t1 >= self._heard_until_s
        rows = [self._judge(placed, forecasts) for placed in self._placed]
        return build_report(rows, self._event_counts(), self._cuts)

    def _place(self, position: int, row: RequestRow) -> _Placed:
        engine = self._engines[row.src]
        ranks = {rank.rank for rank in self._records if rank.instance == row.src}
        if not ranks:
            return _Placed(row, None, None, incomparable_reason(row) or "unknown_publisher")
        rank = find_rank(row, sorted(ranks.union(engine.ranks)))
        tokens = known_tokens(row) if row.status == 200 else None
        if rank is None or tokens is None:
            reason = "unknown_rank" if rank is None else "unknown_tokens"
            return _Placed(row, rank, None, incomparable_reason(row) or reason)
        body = row.body or {}
        sent = Sent(
            position=position,
            rank=rank,
            path=row.path,
            body=body,
            namespace=engine.namespace(
                body.get("model"), body.get("cache_salt"), self._loras.get(row.src, frozenset())
            ),
            tokens=tokens,
            t0=row.t0,
            t1=row.t0 if row.t1 is None else row.t1,
        )
        # Kept although its answer may say nothing: it may be what others find in the cache.
        return _Placed(row, rank, sent, incomparable_reason(row))

    def _judge(self, placed: _Placed, forecasts: Mapping[int, Forecast]) -> Row:
        row, sent = placed.row, placed.sent
        verdict, rule = Verdict.NOT_COMPARABLE, None
        forecast = None if sent is None else forecasts[sent.position]
        reported = reported_tokens(row)
        if placed.reason is None and sent and forecast and reported is not None:
            verdict, rule = self._compare(sent, forecast, reported)
        return Row(
            i=row.i,
            phase=row.phase,
            label=row.label,
            src=row.src,
            rank=None if placed.rank is None else placed.rank.rank,
            prompt_tokens=None if sent is None else len(sent.tokens),
            predicted=None if forecast is None else forecast.tokens,
            reported=reported if row.usage else None,
            verdict=verdict,
            rule=rule,
            reason=placed.reason,
        )

    def _compare(self, sent: Sent, forecast: Forecast, reported: int) -> tuple[Verdict, str | None]:
        if forecast.tokens == reported:
            return Verdict.EXACT, None
        rule = explain(self._evidence(sent, forecast), reported)
        return (Verdict.UNEXPLAINED if rule is None else Verdict.EXPLAINED), rule

    def _evidence(self, sent: Sent, forecast: Forecast) -> Evidence:
        engine = self._engines[sent.rank.instance]
        return Evidence(
            sent=sent,
            forecast=forecast,
            version=engine.version,
            loads_remote=engine.loads_remote,
            saves_remote=engine.saves_remote,
            drafts=engine.drafts,
            neighbours=[
                o for o in self._sent if o.rank == sent.rank and o.position != sent.position
            ],
            producers=[o for o in self._sent if self._saves_for(o, sent)],
        )

    def _saves_for(self, other: Sent, sent: Sent) -> bool:
        is_elsewhere = other.rank.instance != sent.rank.instance
        return is_elsewhere and self._engines[other.rank.instance].saves_remote

    def _event_counts(self) -> Mapping[str, int]:
        counts: Counter[str] = Counter(batches=0)
        for record in self._records.values():
            counts["batches"] += len(record.batches)
            counts += record.counts
        if self._unowned:
            counts["unknown_publisher"] = self._unowned
        return counts


def _by_rank(sent: Sequence[Sent]) -> dict[RankId, list[Sent]]:
    by_rank: dict[RankId, list[Sent]] = {}
    for each in sent:
        by_rank.setdefault(each.rank, []).append(each)
    return by_rank


def _first_payloads(live: Mapping[RankId | None, Sequence[Message]]) -> dict[str, bytes]:
    return {rank.instance: messages[0].payload for rank, messages in live.items() if rank}


def _event_loras(records: Mapping[RankId, RankRecord]) -> dict[str, frozenset[str]]:
    """Adapters that each instance's events name."""
    named: dict[str, set[str]] = {}
    for rank, record in records.items():
        for timed in record.batches:
            for event in timed.batch.events:
                if isinstance(event, BlockStored) and event.lora is not None:
                    named.setdefault(rank.instance, set()).add(event.lora)
    return {instance: frozenset(loras) for instance, loras in named.items()}
