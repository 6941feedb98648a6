"""`kvlb record` at the terminal."""

import logging
import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from balancer.server import ListenError
from kvlb.errors import SettingsError
from kvlb.event_loop import run_command, stop_event
from kvlb.logs import configure_logs
from kvlb.record.proxy import RecordingProxy, serve_proxy
from kvlb.record.session import Drive, RecordOptions
from kvlb.record.session import record as run_recording
from kvlb.record.stations import Station
from kvlb.record.writer import CaptureWriter
from kvlb.settings import KvlbSettings, Overrides, load_fleet


def wall_clock_s() -> float:
    """Seconds since 1970: events carry the engine's."""
    return datetime.now(UTC).timestamp()


def record(
    *,
    instances: Sequence[str],
    config: Path | None,
    options: RecordOptions,
    listen: str | None = None,
) -> None:
    """Record and say what is in the files; with `listen` the requests that come there."""
    configure_logs(logging.ERROR)
    settings = load_fleet(config, Overrides(instances=tuple(instances)), os.environ)
    drive = None if listen is None else _listening(options, *_split(listen))
    writer = run_command(record_settings(settings, options, drive))
    console = Console(soft_wrap=True)
    console.print(
        f"{writer.requests} requests, {writer.messages} event batches as they came, "
        f"{writer.replayed} in replays\n"
        f"{writer.events_path}\n{writer.requests_path}",
        markup=False,
        highlight=False,
    )


def _split(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not port.isdecimal() or int(port) > 65_535:
        raise SettingsError(f"--listen {listen}: write HOST:PORT or a port")
    return host or "127.0.0.1", int(port)


def _listening(options: RecordOptions, host: str, port: int) -> Drive:
    """Record what clients send to a port of ours, instead of requests of our own."""

    async def drive(stations: Sequence[Station], writer: CaptureWriter) -> None:
        proxy = RecordingProxy(stations, writer, requests=options.requests)

        def say(actual: int) -> None:
            Console(stderr=True, soft_wrap=True).print(
                f"recording what comes to http://{host}:{actual}", markup=False, highlight=False
            )

        try:
            await serve_proxy(proxy, host=host, port=port, on_listening=say)
        except ListenError as error:
            raise SettingsError(f"--listen: {error}") from error

    return drive


async def record_settings(
    settings: KvlbSettings, options: RecordOptions, drive: Drive | None = None
) -> CaptureWriter:
    """Record until the options say so, or a signal."""
    with stop_event() as stopped:
        return await run_recording(settings, options, wall_clock_s, stopped, drive)


def new_nonce() -> str:
    """Random words for prompts that must be new."""
    return secrets.token_hex(8)
