"""`kvlb replay`: read the trace, send it, show and write what came of it."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import msgspec
from rich.console import Console

from kvlb.balancer_url import balancer_url
from kvlb.errors import PeerError, SettingsError
from kvlb.event_loop import run_command, stop_event
from kvlb.logs import configure_logs
from kvlb.openai_endpoint import CallFailedError, OpenAiEndpoint
from kvlb.replay.core.outcomes import Limits, Outcome, Report, summarize
from kvlb.replay.core.prompts import FIRST_TOKEN, PromptShape, PromptWriter
from kvlb.replay.core.report_rows import render_report
from kvlb.replay.core.schedule import Pace, Timed, plan_schedule
from kvlb.replay.core.trace_rows import TraceRequest, find_block_tokens
from kvlb.replay.plot import render_page
from kvlb.replay.progress import shown_progress
from kvlb.replay.sending import OpenLoop, Sender, SendOptions, Sent
from kvlb.replay.show import show_report
from kvlb.replay.trace_file import read_trace

KEY_VARIABLE = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """What the command line says."""

    trace: Path
    url: str
    model: str | None = None
    block_tokens: int | None = None
    """None: as the trace's rows tell."""
    seed: int = 0
    pace: Pace = field(default_factory=Pace)
    shape: PromptShape = field(default_factory=PromptShape)
    """Its model, blocks and seed are filled in."""
    sending: SendOptions = field(default_factory=SendOptions)
    limits: Limits = field(default_factory=Limits)
    out: Path | None = None
    plot: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Everything of one replay."""

    report: Report
    outcomes: Sequence[Outcome]
    reasons: Mapping[str, str]
    was_stopped: bool


def replay(options: ReplayOptions, *, as_json: bool) -> None:
    """Send the trace and report. Raises KvlbError, also if nothing at all was answered."""
    balancer_url(options.url)
    _check_files(options)
    configure_logs()
    requests = read_trace(options.trace)
    schedule = plan_schedule(requests, options.pace, Random(options.seed).random)  # noqa: S311 - no secret
    replayed = run_command(send_trace(options, requests, schedule))
    document = render_report(replayed.report, replayed.outcomes)
    if options.out is not None:
        options.out.write_bytes(
            msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
        )
    if options.plot is not None:
        page = render_page(replayed.report, replayed.outcomes, title=_title(options))
        options.plot.write_text(page, encoding="utf-8")
    if as_json:
        figures = {name: value for name, value in document.items() if name != "requests"}
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
        sys.stdout.flush()
    else:
        show_report(replayed.report, replayed.reasons, Console())
    if not replayed.report.answered and not replayed.was_stopped:
        raise PeerError(f"no request was answered by {options.url}: {_first_reason(replayed)}")


async def send_trace(
    options: ReplayOptions, requests: Sequence[TraceRequest], schedule: Sequence[Timed]
) -> Replayed:
    """Send the schedule until its end or a signal. Raises PeerError if no model is listed."""
    key = os.environ.get(KEY_VARIABLE)
    sent = Sent()
    with stop_event() as stopped:
        async with OpenAiEndpoint(
            options.url, key=key, silence_s=options.sending.timeout_s
        ) as endpoint:
            model = options.model or await _find_model(endpoint)
            shape = replace(
                options.shape,
                model=model,
                seed=options.seed,
                block_tokens=options.block_tokens or find_block_tokens(requests) or 512,
            )
            loop = OpenLoop(Sender(endpoint, options.sending, sent), PromptWriter(shape))
            async with shown_progress(sent, len(schedule), Console(stderr=True)):
                duration_s = await loop.run(schedule, stopped)
        was_stopped = stopped.is_set()
    report = summarize(
        sent.outcomes, planned=len(schedule), duration_s=duration_s, limits=options.limits
    )
    return Replayed(
        report=report, outcomes=sent.outcomes, reasons=sent.reasons, was_stopped=was_stopped
    )


async def _find_model(endpoint: OpenAiEndpoint) -> str:
    try:
        return await endpoint.first_model()
    except CallFailedError as error:
        raise PeerError(
            f"{endpoint.url} lists no model ({error}); name one with --model"
        ) from error


def _check_files(options: ReplayOptions) -> None:
    """Before an hour of requests, not after."""
    for name, path in (("--out", options.out), ("--plot", options.plot)):
        if path is not None and not path.parent.is_dir():
            raise SettingsError(f"{name}: there is no directory {path.parent}")
    if options.plot is not None and options.plot.suffix != ".html":
        raise SettingsError("--plot: a page is written, so name a file like report.html")
    if options.shape.vocabulary <= FIRST_TOKEN:
        raise SettingsError(f"--vocabulary: has to be over {FIRST_TOKEN}")


def _title(options: ReplayOptions) -> str:
    return f"{options.trace.name} at {options.pace.speed:g} x"


def _first_reason(replayed: Replayed) -> str:
    kind = max(replayed.report.errors, key=lambda each: replayed.report.errors[each])
    return replayed.reasons.get(kind, kind)
