"""Opens a trace: plain or gzip, one JSON row per line."""

import gzip
import io
import zlib
from collections.abc import Sequence
from pathlib import Path

from kvlb.errors import SettingsError
from kvlb.replay.core.trace_rows import RowReader, TraceRequest, TraceRowError

_GZIP_MAGIC = b"\x1f\x8b"


def read_trace(path: Path) -> Sequence[TraceRequest]:
    """Every request of the trace. Raises SettingsError, naming the line at fault."""
    reader = RowReader()
    requests: list[TraceRequest] = []
    try:
        with path.open("rb") as file:
            is_packed = file.peek(2)[:2] == _GZIP_MAGIC
            lines: io.BufferedIOBase = gzip.GzipFile(fileobj=file) if is_packed else file
            for number, row in enumerate(lines, start=1):
                requests += reader.read(number, row)
    except (OSError, EOFError, zlib.error) as error:
        raise SettingsError(f"{path} can't be read: {error}") from error
    except TraceRowError as error:
        raise SettingsError(f"{path}, {error}") from error
    if not requests:
        raise SettingsError(f"{path} holds no request")
    return requests
