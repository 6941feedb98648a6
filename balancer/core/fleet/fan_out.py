"""Which commands go to several engines at once, and what an engine's answers to them mean.

Rules:

1. Only what is listed here is passed on, and only to engines of the fleet.
2. A command whose effect on caches is known says so, so that credit can end at once.
3. The whole is well if every engine did it, partly well if some did.

Facts about the paths: docs/fleet.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_SHOWN_BYTES = 500
"""Of each engine's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A path that every engine understands, or none."""

    path: str
    drops_cache: bool = False
    """The engine's blocks are gone afterwards."""
    sleeps: bool = False
    wakes: bool = False
    changes_models: bool = False


COMMANDS = {
    command.path: command
    for command in (
        Command(path="/start_profile"),
        Command(path="/stop_profile"),
        Command(path="/reset_prefix_cache", drops_cache=True),
        Command(path="/reset_mm_cache"),
        Command(path="/reset_encoder_cache"),
        Command(path="/sleep", drops_cache=True, sleeps=True),
        Command(path="/wake_up", wakes=True),
        Command(path="/v1/load_lora_adapter", changes_models=True),
        Command(path="/v1/unload_lora_adapter", changes_models=True),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What one engine said."""

    alias: str
    status: int | None
    """None if it couldn't be asked."""
    body: str

    @property
    def is_ok(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    def shown(self) -> dict[str, Any]:
        return {
            "instance": self.alias,
            "ok": self.is_ok,
            "status": self.status,
            "body": self.body,
        }


def overall_status(results: Sequence[CommandResult]) -> int:
    """200 if all did it, 207 if some did, 502 if none."""
    well = sum(result.is_ok for result in results)
    if well == len(results):
        return 200
    return 207 if well else 502


def shown_body(raw: bytes) -> str:
    """The beginning of an answer, as text."""
    text = raw[: MAX_SHOWN_BYTES + 1].decode(errors="replace")
    return f"{text[:MAX_SHOWN_BYTES]}…" if len(raw) > MAX_SHOWN_BYTES else text
