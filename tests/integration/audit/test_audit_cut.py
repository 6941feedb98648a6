"""The audit of files that end too early: what is whole counts, and where they end is told."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvlb.audit.command import audit_files
from kvlb.audit.compare import audit
from kvlb.audit.lines import CaptureError, Cut, read_lines

Files = Callable[[str], tuple[Path, Path]]

ROWS = [b'{"row": "one"}', b'{"row": "two"}', b'{"row": "three"}']
PLAIN = b"".join(row + b"\n" for row in ROWS)


def lines_of(path: Path, content: bytes) -> tuple[list[bytes], Cut | None]:
    path.write_bytes(content)
    lines = read_lines(path)
    return [line for _, line in lines.rows], lines.cut


def test_packed_file_is_read_up_to_wherever_it_is_cut(tmp_path: Path, files: Files) -> None:
    """At any byte: the lines are the first ones of the whole file, and the cut is told."""
    packed = files("h-lora")[0].read_bytes()
    whole, cut = lines_of(tmp_path / "whole", packed)
    assert cut is None

    most = 0
    for size in range(1, len(packed)):
        read, cut = lines_of(tmp_path / "cut", packed[:size])
        assert read == whole[: len(read)]
        assert cut is not None
        assert cut.after_line == len(read) >= most
        most = len(read)
    assert most == len(whole)


@pytest.mark.parametrize(
    ("content", "rows", "cut"),
    [
        pytest.param(PLAIN, 3, None, id="whole"),
        pytest.param(PLAIN[:-1], 3, None, id="no-newline-at-the-end"),
        pytest.param(PLAIN[:-3], 2, (2, 1), id="plain"),
        pytest.param(PLAIN[:31], 2, (2, 1), id="one-byte-of-a-line"),
        pytest.param(PLAIN[:-3].replace(b"three", "drei\xdf".encode()[:-1]), 2, (2, 1), id="utf8"),
        pytest.param(gzip.compress(PLAIN[:-3]), 2, (2, 1), id="cut-before-it-was-packed"),
        pytest.param(gzip.compress(PLAIN)[:-1], 3, (3, 0), id="checksum-alone"),
        pytest.param(gzip.compress(PLAIN)[:1], 0, (0, 0), id="one-byte"),
        pytest.param(gzip.compress(PLAIN[:30]) + gzip.compress(PLAIN[30:]), 3, None, id="two"),
        pytest.param(gzip.compress(PLAIN) + bytes(9), 3, None, id="padded"),
    ],
)
def test_where_a_file_is_cut_is_told(
    content: bytes, rows: int, cut: tuple[int, int] | None, tmp_path: Path
) -> None:
    """After which line, and whether one more had begun; a line without a newline may be whole."""
    path = tmp_path / "file"

    read, told = lines_of(path, content)

    assert read == ROWS[:rows]
    expected = cut and Cut(file=str(path), after_line=cut[0], dropped_lines=cut[1])
    assert told == expected


def damaged(packed: bytes) -> bytes:
    middle = len(packed) // 2
    return packed[:middle] + bytes([packed[middle] ^ 0x10]) + packed[middle + 1 :]


def test_damage_is_no_cut(tmp_path: Path, files: Files) -> None:
    """In the middle, at the beginning, behind the end: an error that names the file."""
    events, requests = files("m2")
    packed = events.read_bytes()
    bad = tmp_path / "bad"
    for content, says in (
        (damaged(packed), "bad: broken gzip"),
        (packed[9:], "bad:1: "),
        (b"\x1f\x8b" + packed[12:], "bad: broken gzip"),
        (packed + b"more", "bad: broken gzip"),
        (b"hello", "bad:1: "),
        (b'{"t": 1.0, "sr', "bad:1: "),
        (gzip.decompress(packed).replace(b"\n", b"x\n", 1), "bad:1: "),
        (gzip.decompress(packed) + b"hello", "bad:110: "),
    ):
        bad.write_bytes(content)
        with pytest.raises(CaptureError, match=says):
            audit(bad, requests)


@pytest.fixture
def cut_events(tmp_path: Path, files: Files) -> tuple[Path, Path]:
    """A recording whose events are cut in the middle, under a name that could be markup."""
    events, requests = files("m2")
    cut = tmp_path / "[red]cut"
    packed = events.read_bytes()
    cut.write_bytes(packed[: len(packed) // 2])
    return cut, requests


def test_requests_after_the_cut_miss_events_that_are_lost(cut_events: tuple[Path, Path]) -> None:
    """What came before is held to be exact; what came later is explained, not blamed."""
    report = audit(*cut_events)

    lost = [row for row in report.rows if row.rule == "events_lost"]
    assert lost
    assert report.unexplained == 0
    assert report.exact + len(lost) == report.requests
    first = report.rows.index(lost[0])
    assert first > 5
    assert {row.verdict for row in report.rows[:first]} == {"exact"}


def test_the_command_says_where_a_file_is_cut(
    cut_events: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """In the table and in the JSON; what is there decides about the exit code."""
    name = str(cut_events[0])

    assert audit_files(*cut_events, as_json=False) == 0
    table = "".join(capsys.readouterr().out.split())
    assert audit_files(*cut_events, as_json=True) == 0
    (cut,) = json.loads(capsys.readouterr().out)["cuts"]

    assert cut["file"] == name
    assert cut["dropped_lines"] == 1
    assert "".join(f"Cut: {name} ends after line {cut['after_line']};".split()) in table
