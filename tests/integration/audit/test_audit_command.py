"""The audit as a command: files that are no capture, what it prints, when it fails."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvlb.audit.command import audit_files
from kvlb.audit.compare import audit
from kvlb.errors import KvlbError

Files = Callable[[str], tuple[Path, Path]]

# Whole captures, many times over: seconds of work under coverage, more on a busy machine.
pytestmark = pytest.mark.timeout(180)


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
        pytest.param(gzip.compress(b"{}\n" * 1000) + b"more", "broken gzip", id="not-its-end"),
    ],
)
def test_a_bad_events_file_is_named_with_its_line(
    content: bytes, message: str, tmp_path: Path, files: Files
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
    content: bytes, message: str, tmp_path: Path, files: Files
) -> None:
    """The message says where and what was expected."""
    requests = tmp_path / "requests"
    requests.write_bytes(content)

    with pytest.raises(KvlbError, match=message):
        audit(files("m2")[0], requests)


def test_a_missing_file_is_named(tmp_path: Path, files: Files) -> None:
    """No traceback for a typing error."""
    with pytest.raises(KvlbError, match=r"nothing\.gz: cannot be read"):
        audit(tmp_path / "nothing.gz", files("m2")[1])


def test_plain_json_lines_do_too(tmp_path: Path, files: Files) -> None:
    """Files need not be compressed."""
    plain = []
    for path in files("h-lora"):
        plain.append(tmp_path / path.stem)
        plain[-1].write_bytes(gzip.decompress(path.read_bytes()))

    assert audit(*plain).exact == 11


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str], files: Files) -> None:
    """Machine-readable, exit code 0 if nothing serial stayed unexplained."""
    code = audit_files(*files("pd-example"), as_json=True)

    printed = json.loads(capsys.readouterr().out)
    assert code == 0
    assert printed["phases"]["serial"] == {
        "requests": 16,
        "exact": 10,
        "explained": {"remote_load": 6},
        "wrong": {},
        "unexplained": 0,
        "not_comparable": {},
    }
    assert printed["explained"] == {"remote_load": 6}
    assert len(printed["rows"]) == 16


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str], files: Files) -> None:
    """For people: phases, causes, and what the events were."""
    audit_files(*files("m2"), as_json=False)

    printed = capsys.readouterr().out
    assert "parallel" in printed
    assert "109 batches" in printed
    assert "without a known cause" not in printed


def test_the_command_lists_what_it_cannot_explain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: Files
) -> None:
    """Exit code 1, and the requests at fault."""
    events, requests = files("h-lora")
    lines = gzip.decompress(events.read_bytes()).splitlines(keepends=True)
    lossy = tmp_path / "lossy"
    lossy.write_bytes(b"".join(lines[1:]))

    assert audit_files(lossy, requests, as_json=False) == 1
    assert "without a known cause" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("events", "requests", "says"),
    [
        pytest.param(True, False, "the requests file holds no request", id="no-requests"),
        pytest.param(False, True, "the events file holds no event batch", id="no-events"),
        pytest.param(False, False, "the requests file holds no request", id="nothing"),
    ],
)
def test_an_audit_of_nothing_fails(
    events: bool,
    requests: bool,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    files: Files,
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: Files
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
