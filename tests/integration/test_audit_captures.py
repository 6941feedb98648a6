"""The audit over captures of real engines, as they are and bent on purpose."""

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvlb.audit.command import audit_files
from kvlb.audit.compare import audit
from kvlb.audit.report import AuditReport, Tally, Verdict
from kvlb.errors import KvlbError

# Whole captures, many times over: seconds of work under coverage, more on a busy machine.
pytestmark = pytest.mark.timeout(180)

CAPTURES = Path(__file__).parents[1] / "captures"

Rows = list[dict[str, Any]]

# captures/README.md: comparable and exact serial requests, exact requests of the load phases.
SERIAL = {
    "a-bs32-sha256": (154, 149),
    "b-bs128-sha256cbor": (119, 115),
    "f-v016-bs16-sha256": (177, 170),
    "g-dp2": (58, 56),
    "h-lora": (11, 11),
    "i-hybrid-swa": (187, 183),
    "m2": (40, 40),
    "n-connect": (14, 13),
    "pd-example": (16, 10),
}
BUSY = {
    ("a-bs32-sha256", "load"): (96, 91),
    ("b-bs128-sha256cbor", "load"): (32, 26),
    ("f-v016-bs16-sha256", "load"): (32, 28),
    ("i-hybrid-swa", "load"): (32, 29),
    ("m2", "parallel"): (40, 40),
}


def files(name: str) -> tuple[Path, Path]:
    return CAPTURES / f"{name}.events.jsonl.gz", CAPTURES / f"{name}.requests.jsonl.gz"


def load(name: str) -> tuple[Rows, Rows]:
    events, requests = (
        [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        for path in files(name)
    )
    return events, requests


@pytest.fixture
def audit_rows(tmp_path: Path) -> Callable[[Rows, Rows], AuditReport]:
    """Audits rows by way of files."""

    def write(name: str, rows: Rows) -> Path:
        path = tmp_path / name
        path.write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows)))
        return path

    def run(events: Rows, requests: Rows) -> AuditReport:
        return audit(write("events.jsonl.gz", events), write("requests.jsonl.gz", requests))

    return run


AuditRows = Callable[[Rows, Rows], AuditReport]


def bend_payload(row: dict[str, Any], bend: Callable[[list[Any]], object]) -> dict[str, Any]:
    """The same message with its decoded batch passed through `bend`."""
    topic, seq, payload = row["frames"]
    batch = msgspec.msgpack.decode(bytes.fromhex(payload))
    return row | {"frames": [topic, seq, msgspec.msgpack.encode(bend(batch)).hex()]}


# --- as they are -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERIAL)
def test_every_serial_request_is_exact_or_explained(name: str) -> None:
    """As many exact ones as the capture's notes count, no more explained than missed, no rest."""
    comparable, exact = SERIAL[name]

    serial = audit(*files(name)).phases["serial"]

    assert serial.requests == comparable
    assert serial.exact >= exact
    assert serial.unexplained == 0
    assert sum(serial.explained.values()) <= comparable - exact


@pytest.mark.parametrize(("name", "phase"), BUSY)
def test_a_busy_phase_is_as_exact_as_events_allow(name: str, phase: str) -> None:
    """What was in flight is the only thing unknown."""
    comparable, exact = BUSY[name, phase]

    busy = audit(*files(name)).phases[phase]

    assert (busy.requests, busy.unexplained) == (comparable, 0)
    assert busy.exact >= exact
    assert set(busy.explained) <= {"concurrent", "late_event"}


@pytest.mark.parametrize("name", SERIAL)
def test_counts_add_up(name: str) -> None:
    """Requests are the exact, the explained and the unexplained; totals are the sum of phases."""
    report = audit(*files(name))
    tallies: list[Tally | AuditReport] = [*report.phases.values(), report]

    for tally in tallies:
        assert tally.requests == tally.exact + sum(tally.explained.values()) + tally.unexplained
    assert report.requests == sum(tally.requests for tally in report.phases.values())
    assert len(report.rows) == report.requests + sum(report.not_comparable.values())


def test_every_cause_the_notes_name_is_found() -> None:
    """Each rule of the captures' notes has a request that needs it."""
    named = {rule for name in SERIAL for rule in audit(*files(name)).phases["serial"].explained}

    assert named >= {
        "no_cache_read",
        "later_child",
        "reset_seen_late",
        "restart_seen_late",
        "report_mode_full",
        "salt_unpublished",
        "remote_load",
    }


def test_what_cannot_be_compared_says_why() -> None:
    """Refused, cut, batched and untokenised requests are no misses; nor are unpinned ones."""
    assert audit(*files("f-v016-bs16-sha256")).not_comparable == {
        "no_usage": 1,
        "several_prompts": 2,
        "status": 1,
        "no_cached_figure": 1,
        "unknown_tokens": 1,
    }
    assert audit(*files("g-dp2")).not_comparable == {"unknown_rank": 10, "status": 1}


def test_a_row_tells_the_whole_story() -> None:
    """Where it went, what we predict, what was reported, why they differ."""
    rows = {row.i: row for row in audit(*files("g-dp2")).rows}

    assert msgspec.to_builtins(rows[67]) == {
        "i": 67,
        "phase": "serial",
        "label": "after reset rank 0",
        "src": "w0",
        "rank": 0,
        "prompt_tokens": 171,
        "predicted": 160,
        "reported": 0,
        "verdict": "explained",
        "rule": "reset_seen_late",
        "reason": None,
    }


# --- the audit must be able to fail --------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SERIAL if name != "m2"])
def test_a_figure_that_is_off_by_a_block_is_not_excused(name: str, audit_rows: AuditRows) -> None:
    """Had the engine reported a block more or less, no rule would have explained it."""
    events, requests = load(name)
    exact = {
        row.i
        for row in audit(*files(name)).rows
        if row.verdict is Verdict.EXACT and row.phase == "serial"
    }
    size = next(row["block_size"] for row in requests if row["kind"] == "config")

    bent = [off_by(row, size) if row.get("i") in exact else row for row in requests]

    assert audit_rows(events, bent).phases["serial"].unexplained == len(exact)


def off_by(row: dict[str, Any], tokens: int) -> dict[str, Any]:
    details = row["usage"].get("prompt_tokens_details") or {}
    figure = (details.get("cached_tokens") or 0) + tokens
    return row | {"usage": row["usage"] | {"prompt_tokens_details": {"cached_tokens": figure}}}


def test_a_lost_batch_is_noticed(audit_rows: AuditRows) -> None:
    """Without the first batch what it stored is missed, and nothing excuses that."""
    events, requests = load("h-lora")

    report = audit_rows(events[1:], requests)

    assert report.phases["serial"].unexplained > 0
    assert not report.is_explained


# --- time ------------------------------------------------------------------------------------------


def delay_first(events: Rows, *, arrival_s: float, stamp_s: float = 0.0) -> Rows:
    def stamp(batch: list[Any]) -> list[Any]:
        return [batch[0] + stamp_s, *batch[1:]]

    late = bend_payload(events[0], stamp)
    return [late | {"t": late["t"] + arrival_s}, *events[1:]]


@pytest.fixture
def repetition() -> tuple[Rows, Rows]:
    """Events of two prompts; the first prompt's request, and its repetition one second later."""
    events, requests = load("h-lora")
    notes = [row for row in requests if row["kind"] != "request"]
    first, again = (row for row in requests if row.get("label") == "completion tiny")
    t0 = first["t1"] + 1.0
    return events[:2], [*notes, first, again | {"t0": t0, "t1": t0 + 0.1}]


def test_an_event_known_by_its_stamp_counts_although_it_arrived_late(
    repetition: tuple[Rows, Rows], audit_rows: AuditRows
) -> None:
    """A recorder that was busy for a second is no reason to call the prediction wrong."""
    events, requests = repetition

    report = audit_rows(delay_first(events, arrival_s=1.5), requests)

    assert report.rows[1].verdict is Verdict.EXACT


def test_an_event_stamped_late_is_late(
    repetition: tuple[Rows, Rows], audit_rows: AuditRows
) -> None:
    """Published only after the next request was sent: with it applied, the figure is right."""
    events, requests = repetition

    report = audit_rows(delay_first(events, arrival_s=1.5, stamp_s=1.5), requests)

    assert report.rows[1].rule == "late_event"


def test_an_event_later_than_two_seconds_after_the_answer_explains_nothing(
    repetition: tuple[Rows, Rows], audit_rows: AuditRows
) -> None:
    """So late it is a lost event."""
    events, requests = repetition

    report = audit_rows(delay_first(events, arrival_s=3.5), requests)

    assert report.rows[1].verdict is Verdict.UNEXPLAINED


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_an_engine_s_clock_may_be_wrong(ahead_s: float, audit_rows: AuditRows) -> None:
    """Stamps are read against arrivals, so another machine's clock changes nothing."""
    events, requests = load("i-hybrid-swa")

    def shift(batch: list[Any]) -> list[Any]:
        return [batch[0] + ahead_s, *batch[1:]]

    report = audit_rows([bend_payload(row, shift) for row in events], requests)

    assert (report.phases["serial"].exact, report.phases["serial"].unexplained) == (183, 0)


# --- the stream ------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames_from", [0, 1], ids=["with-topic", "without-topic"])
def test_recorded_replays_fill_gaps(frames_from: int, audit_rows: AuditRows) -> None:
    """Every tenth live message lost, all of them in a recorded replay: nothing changes."""
    events, requests = load("i-hybrid-swa")
    lost = events[5::10]
    end = ["", "", "f" * 16, ""]
    answers = [["", *row["frames"][frames_from:]] for row in lost]
    replay = {"kind": "replay", "src": "w0", "frames": [*answers, end]}

    report = audit_rows([row for row in events if row not in lost], [*requests, replay])

    assert report.events == {"batches": len(events)}
    assert (report.phases["serial"].exact, report.phases["serial"].unexplained) == (183, 0)


def test_gaps_that_no_replay_fills_are_counted(audit_rows: AuditRows) -> None:
    """What is lost is said, not hidden."""
    events, requests = load("m2")
    lossy = [row for number, row in enumerate(events) if number % 10 != 5]

    assert audit_rows(lossy, requests).events["lost"] == len(events) - len(lossy)


def test_duplicates_count_once(audit_rows: AuditRows) -> None:
    """The same message twice is one batch."""
    events, requests = load("m2")

    report = audit_rows([row for row in events for _ in range(2)], requests)

    assert report.events == {"batches": len(events), "dropped_duplicate": len(events)}
    assert report.exact == 80


def test_an_undecodable_batch_costs_itself(audit_rows: AuditRows) -> None:
    """It is counted, and the rest is audited."""
    events, requests = load("h-lora")
    topic, seq, _ = events[-1]["frames"]
    broken = events[-1] | {"frames": [topic, seq, "c1"]}

    report = audit_rows([*events[:-1], broken], requests)

    assert report.events == {"batches": 5, "undecodable_batches": 1}


# --- other releases ----------------------------------------------------------------------------------

FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")


def as_arrays(batch: list[Any], *, stored: int, removed: int, with_rank: bool = True) -> list[Any]:
    """A map-shaped batch as the releases up to 0.23 wrote it, with that many fields."""

    def array(event: Mapping[str, Any]) -> list[Any]:
        names = FIELDS[:stored] if event["type"] == "BlockStored" else REMOVED_FIELDS[:removed]
        if event["type"] == "AllBlocksCleared":
            names = ()
        return [event["type"], *(event.get(name) for name in names)]

    ts, events, *rank = batch
    return [ts, [array(event) for event in events], *(rank if with_rank else ())]


def signed(batch: list[Any]) -> list[Any]:
    """Hashes as signed 64-bit ints, as the builtin hash of 0.9 gave them."""

    def wrap(value: Any) -> Any:
        if isinstance(value, list):
            return [wrap(item) for item in value]
        return value - 2**64 if isinstance(value, int) and value >= 2**63 else value

    return [batch[0], wrap(batch[1]), *batch[2:]]


def as_bytes(batch: list[Any]) -> list[Any]:
    """Hashes as the 32 raw bytes of their digest."""

    def digest(value: int | None) -> bytes | None:
        return None if value is None else b"\7" * 24 + value.to_bytes(8, "big")

    events = [dict(event) for event in batch[1]]
    for event in events:
        if "block_hashes" in event:
            event["block_hashes"] = [digest(value) for value in event["block_hashes"]]
        if "parent_block_hash" in event:
            event["parent_block_hash"] = digest(event["parent_block_hash"])
    return [batch[0], events, *batch[2:]]


RELEASES = {
    "0.9.0": lambda batch: signed(as_arrays(batch, stored=5, removed=1, with_rank=False)),
    "0.10.1": lambda batch: signed(as_arrays(batch, stored=5, removed=1)),
    "0.13": lambda batch: as_arrays(batch, stored=6, removed=2),
    "0.16": lambda batch: as_arrays(batch, stored=7, removed=2),
    "0.19": lambda batch: as_arrays(batch, stored=8, removed=2),
    "0.21": lambda batch: as_arrays(batch, stored=9, removed=3),
    "0.23": lambda batch: as_arrays(batch, stored=11, removed=3),
    "0.32-bytes": as_bytes,
}


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_s_encoding_gives_the_same_audit(release: str, audit_rows: AuditRows) -> None:
    """Two engines' events, written as another release would have."""
    events, requests = load("m2")

    report = audit_rows([bend_payload(row, RELEASES[release]) for row in events], requests)

    assert (report.exact, report.requests) == (80, 80)


@pytest.mark.parametrize("release", ["0.23", "0.32-bytes"])
def test_hybrid_groups_survive_every_encoding_that_has_them(
    release: str, audit_rows: AuditRows
) -> None:
    """Window groups are counted by engine hash, whatever it is written as."""
    events, requests = load("i-hybrid-swa")

    report = audit_rows([bend_payload(row, RELEASES[release]) for row in events], requests)

    assert (report.phases["serial"].exact, report.phases["serial"].unexplained) == (183, 0)


@pytest.mark.parametrize("release", ["0.13", "0.16", "0.19", "0.21"])
def test_hybrid_groups_without_kinds_are_explained(release: str, audit_rows: AuditRows) -> None:
    """Before 0.22 the hit's end can't be checked against windows; nothing else may be off."""
    events, requests = load("i-hybrid-swa")
    version = json.dumps(requests).replace("vllm-0.32.", f"vllm-{release}.")

    report = audit_rows(
        [bend_payload(row, RELEASES[release]) for row in events], json.loads(version)
    )

    serial = report.phases["serial"]
    assert serial.unexplained == 0
    assert serial.exact >= 167
    assert all(
        row.predicted is not None and row.reported is not None and row.predicted > row.reported
        for row in report.rows
        if row.rule == "windows_unnamed"
    )


def test_adapters_known_by_their_number_alone_are_found(audit_rows: AuditRows) -> None:
    """Up to 0.13 an event has no adapter's name; the order of the model list numbers them."""
    events, requests = load("h-lora")
    salted = {row["i"] for row in requests if "cache_salt" in row.get("body", {})}
    bent = [bend_payload(row, RELEASES["0.13"]) for row in events]

    report = audit_rows(bent, [row for row in requests if row.get("i") not in salted])

    assert (report.exact, report.requests) == (9, 9)


# --- whose events are they ---------------------------------------------------------------------------


def test_topics_are_matched_by_the_engines_own_sources(audit_rows: AuditRows) -> None:
    """What `/kv_event_sources` answered beats the order of names: topics swapped, sources too."""
    events, requests = load("n-connect")
    started = next(row for row in requests if row["kind"] == "started")
    config = next(row for row in requests if row["kind"] == "config")
    config["topics"].reverse()
    started["sources"].reverse()
    for row in requests:
        if row.get("src") in {"w0", "w1"}:
            row["src"] = {"w0": "w1", "w1": "w0"}[row["src"]]

    assert audit_rows(events, requests).phases["serial"].exact == 13


@pytest.mark.parametrize("left", ["sources", "topics"])
def test_one_of_the_two_lists_of_topics_is_enough(left: str, audit_rows: AuditRows) -> None:
    """Without the engines' sources the configuration tells, and the other way round."""
    events, requests = load("n-connect")
    for row in requests:
        if row["kind"] in {"started", "config"}:
            row.pop({"sources": "topics", "topics": "sources"}[left], None)

    assert audit_rows(events, requests).phases["serial"].exact == 13


def test_as_many_topics_as_instances_are_paired_in_order(audit_rows: AuditRows) -> None:
    """Nothing tells but the port in the topic: ports rise with the instances."""
    events, requests = load("n-connect")
    requests = [row for row in requests if row["kind"] == "request"]

    assert audit_rows(events, requests).phases["serial"].exact == 13


def test_a_topic_that_is_nobody_s_is_counted_and_not_guessed(audit_rows: AuditRows) -> None:
    """One topic, two instances, no note: whose it is stays unknown."""
    events, requests = load("n-connect")
    events = [row for row in events if "8101" in bytes.fromhex(row["frames"][0]).decode()]
    requests = [row for row in requests if row["kind"] == "request"]

    report = audit_rows(events, requests)

    assert report.events == {"batches": 0, "unknown_publisher": len(events)}
    assert report.not_comparable == {"unknown_publisher": 14}


def test_ranks_may_share_one_label(audit_rows: AuditRows) -> None:
    """Without a rank in the label the batch names its rank."""
    events, requests = load("g-dp2")

    report = audit_rows([row | {"src": "w0"} for row in events], requests)

    assert report.phases["serial"].exact == 56


def test_an_instance_that_serves_higher_ranks_counts_them_from_zero(audit_rows: AuditRows) -> None:
    """The header is the server's own number, the events' is the fleet's."""
    events, requests = load("g-dp2")
    for row in requests:
        row.pop("sources", None)
    renamed = {"w0.0": "w0.4", "w0.1": "w0.5"}

    report = audit_rows([row | {"src": renamed[row["src"]]} for row in events], requests)

    assert report.phases["serial"].exact == 56


# --- files that are no capture -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"{", "events:1: ", id="no-json"),
        pytest.param(b'{"kind": "request"}', "events:1: .*is this the events file", id="requests"),
        pytest.param(
            b'\n{"t": 1, "src": "w0", "frames": ["", ""]}', "events:2: .*3 frames", id="2"
        ),
        pytest.param(b'{"t": 1, "src": "w0", "frames": ["", "0", ""]}', "hexadecimal", id="no-hex"),
        pytest.param(b"\x1f\x8bnothing", "broken gzip", id="broken-gzip"),
        pytest.param(gzip.compress(b"{}\n" * 1000)[:-20], "broken gzip", id="cut-gzip"),
    ],
)
def test_a_bad_events_file_is_named_with_its_line(
    content: bytes, message: str, tmp_path: Path
) -> None:
    """The message says where and what was expected."""
    events = tmp_path / "events"
    events.write_bytes(content)

    with pytest.raises(KvlbError, match=message):
        audit(events, files("m2")[1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"[1]", "requests:1: ", id="no-object"),
        pytest.param(b'{"t": 1.0}', "requests:1: .*is this the requests file", id="events"),
        pytest.param(b'{"kind": "request", "i": "x"}', "requests:1: .*i", id="wrong-type"),
        pytest.param(b'{"kind": "replay"}', "requests:1: .*src", id="replay-without-src"),
    ],
)
def test_a_bad_requests_file_is_named_with_its_line(
    content: bytes, message: str, tmp_path: Path
) -> None:
    """The message says where and what was expected."""
    requests = tmp_path / "requests"
    requests.write_bytes(content)

    with pytest.raises(KvlbError, match=message):
        audit(files("m2")[0], requests)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """No traceback for a typing error."""
    with pytest.raises(KvlbError, match=r"nothing\.gz: cannot be read"):
        audit(tmp_path / "nothing.gz", files("m2")[1])


def test_plain_json_lines_do_too(tmp_path: Path) -> None:
    """Files need not be compressed."""
    plain = []
    for path in files("h-lora"):
        plain.append(tmp_path / path.stem)
        plain[-1].write_bytes(gzip.decompress(path.read_bytes()))

    assert audit(*plain).exact == 11


# --- the command -------------------------------------------------------------------------------------


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Machine-readable, exit code 0 if nothing serial stayed unexplained."""
    code = audit_files(*files("pd-example"), as_json=True)

    printed = json.loads(capsys.readouterr().out)
    assert code == 0
    assert printed["phases"]["serial"] == {
        "requests": 16,
        "exact": 10,
        "explained": {"remote_load": 6},
        "unexplained": 0,
        "not_comparable": {},
    }
    assert printed["explained"] == {"remote_load": 6}
    assert len(printed["rows"]) == 16


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """For people: phases, causes, and what the events were."""
    audit_files(*files("m2"), as_json=False)

    printed = capsys.readouterr().out
    assert "parallel" in printed
    assert "109 batches" in printed
    assert "Without a known cause" not in printed


def test_the_command_lists_what_it_cannot_explain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, and the requests at fault."""
    events, requests = files("h-lora")
    lines = gzip.decompress(events.read_bytes()).splitlines(keepends=True)
    lossy = tmp_path / "lossy"
    lossy.write_bytes(b"".join(lines[1:]))

    assert audit_files(lossy, requests, as_json=False) == 1
    assert "Without a known cause" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("events", "requests", "says"),
    [
        pytest.param(True, False, "the requests file holds no request", id="no-requests"),
        pytest.param(False, True, "the events file holds no event batch", id="no-events"),
        pytest.param(False, False, "the requests file holds no request", id="nothing"),
    ],
)
def test_an_audit_of_nothing_fails(
    events: bool, requests: bool, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 and one line: a recording that went wrong must not look like a success."""
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    recorded = files("h-lora")

    code = audit_files(
        recorded[0] if events else empty, recorded[1] if requests else empty, as_json=True
    )

    assert code == 1
    assert capsys.readouterr().err == f"kvlb audit: nothing was compared: {says}\n"


def test_an_audit_without_comparable_requests_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reasons, counted."""
    events, requests = files("h-lora")
    refused = tmp_path / "refused"
    rows = [json.loads(line) for line in gzip.decompress(requests.read_bytes()).splitlines()]
    refused.write_text(
        "".join(
            json.dumps(row | {"status": 500} if row["kind"] == "request" else row) + "\n"
            for row in rows
        )
    )

    assert audit_files(events, refused, as_json=False) == 1
    assert "not one request is comparable (" in (said := capsys.readouterr().err)
    assert "status" in said


@pytest.mark.parametrize("figure", ["48", 48.5, True], ids=repr)
def test_a_cached_figure_that_is_no_count_is_not_compared(
    figure: object, audit_rows: AuditRows
) -> None:
    """Nor taken for a missing one, which would mean 0."""
    events, requests = load("h-lora")
    bent = [
        row | {"usage": row["usage"] | {"prompt_tokens_details": {"cached_tokens": figure}}}
        if row["kind"] == "request" and row.get("usage")
        else row
        for row in requests
    ]

    report = audit_rows(events, bent)

    assert report.requests == 0
    assert report.not_comparable["no_cached_figure"] >= 11


def test_rows_with_one_number_are_told_apart(audit_rows: AuditRows) -> None:
    """Two recordings in one file begin to count anew."""
    events, requests = load("h-lora")

    report = audit_rows(
        events, [row | {"i": 0} if row["kind"] == "request" else row for row in requests]
    )

    assert report.exact == audit(*files("h-lora")).exact
