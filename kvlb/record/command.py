"""`kvlb record` at the terminal."""

import logging
import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from kvlb.event_loop import run_command, stop_event
from kvlb.logs import configure_logs
from kvlb.record.session import RecordOptions
from kvlb.record.session import record as run_recording
from kvlb.record.writer import CaptureWriter
from kvlb.settings import KvlbSettings, Overrides, load_fleet


def wall_clock_s() -> float:
    """Seconds since 1970: events carry the engine's."""
    return datetime.now(UTC).timestamp()


def record(*, instances: Sequence[str], config: Path | None, options: RecordOptions) -> None:
    """Record and say what is in the files."""
    configure_logs(logging.ERROR)
    settings = load_fleet(config, Overrides(instances=tuple(instances)), os.environ)
    writer = run_command(record_settings(settings, options))
    console = Console(soft_wrap=True)
    console.print(
        f"{writer.requests} requests, {writer.messages} event batches\n"
        f"{writer.events_path}\n{writer.requests_path}",
        markup=False,
        highlight=False,
    )


async def record_settings(settings: KvlbSettings, options: RecordOptions) -> CaptureWriter:
    """Record until the options say so, or a signal."""
    with stop_event() as stopped:
        return await run_recording(settings, options, wall_clock_s, stopped)


def new_nonce() -> str:
    """Random words for prompts that must be new."""
    return secrets.token_hex(8)
