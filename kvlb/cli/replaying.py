"""The command that plays traces: `replay`."""

# ruff: noqa: PLC0415, PLR0913 - see `kvlb.cli`; and an option is an argument

from pathlib import Path
from typing import Annotated

import typer

from kvlb.cli.options import Format, FormatOption

_TRACE = "Trace"
_SENDING = "Sending"
_RESULT = "Result"


def replay(
    trace: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            metavar="TRACE",
            help="JSON rows, plain or .gz: Mooncake's (`hash_ids`), chats (`messages`, "
            "`request_points`) or text (`requests`).",
        ),
    ],
    *,
    url: Annotated[
        str, typer.Option(envvar="KVLB_URL", help="The balancer, or any OpenAI endpoint.")
    ] = "http://127.0.0.1:8080",
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; by default the first one listed.")
    ] = None,
    speed: Annotated[
        float, typer.Option(min=0.001, help="Pace, as a factor on the trace's own.")
    ] = 1.0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many requests of the trace.")
    ] = None,
    seed: Annotated[
        int,
        typer.Option(help="Another one writes other prompts of the same structure.", min=0),
    ] = 0,
    prompts: Annotated[
        str, typer.Option(help="What block ids become: `ids` or `text`.", metavar="ids|text")
    ] = "ids",
    block_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in a trace's block; by default told from its rows."),
    ] = None,
    chars_per_token: Annotated[
        float,
        typer.Option(min=0.1, help="With --prompts text.", rich_help_panel=_TRACE),
    ] = 4.0,
    vocabulary: Annotated[
        int,
        typer.Option(help="Token ids stay below this; 1000 are left out.", rich_help_panel=_TRACE),
    ] = 32_000,
    session_gap: Annotated[
        float,
        typer.Option(
            min=0.001,
            help="Chats: mean seconds from one conversation's beginning to the next one's.",
            rich_help_panel=_TRACE,
        ),
    ] = 2.0,
    turn_gap: Annotated[
        float,
        typer.Option(
            min=0.001,
            help="Chats: mean seconds between two requests of a conversation.",
            rich_help_panel=_TRACE,
        ),
    ] = 5.0,
    exact_output: Annotated[
        bool,
        typer.Option(
            "--exact-output/--natural-output",
            help="Ask for answers exactly as long as the trace says (`ignore_eos`, which vLLM knows).",
            rich_help_panel=_SENDING,
        ),
    ] = True,
    max_in_flight: Annotated[
        int,
        typer.Option(
            min=1,
            help="What is due above it isn't sent, and counts as failed.",
            rich_help_panel=_SENDING,
        ),
    ] = 1024,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for one request.", rich_help_panel=_SENDING)
    ] = 600.0,
    session_header: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Send the trace's session in this header.",
            rich_help_panel=_SENDING,
        ),
    ] = None,
    engine_header: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Header of answers that names the engine; by default x-kvlb-instance and what "
            "some others send.",
            rich_help_panel=_RESULT,
        ),
    ] = None,
    ttft_ms: Annotated[
        float | None,
        typer.Option(min=0, help="Goodput: longest time to first token.", rich_help_panel=_RESULT),
    ] = None,
    itl_ms: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Goodput: longest mean pause between an answer's tokens.",
            rich_help_panel=_RESULT,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write everything as JSON.", rich_help_panel=_RESULT),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write an HTML page with plots.", rich_help_panel=_RESULT
        ),
    ] = None,
    format: FormatOption = Format.TEXT,  # noqa: A002 - the option's name
) -> None:
    """Send a trace to an OpenAI endpoint at its own pace, and report what its clients would see.

    Open loop: requests are sent when they are due, whatever the answers do. Ctrl-C ends it with a
    report of what was done. A key for the endpoint goes into OPENAI_API_KEY.

    For example:

    - `kvlb replay trace.jsonl.gz --speed 2 --limit 500 --ttft-ms 500 --itl-ms 50`
    - `kvlb replay trace.jsonl --url http://gpu1:8000 --out report.json --plot report.html`
    """
    from kvlb.replay.command import ReplayOptions
    from kvlb.replay.command import replay as run
    from kvlb.replay.core.outcomes import Limits
    from kvlb.replay.core.prompts import PromptShape
    from kvlb.replay.core.schedule import Pace
    from kvlb.replay.sending import SendOptions

    if prompts not in {"ids", "text"}:
        raise typer.BadParameter("--prompts: write ids or text")
    options = ReplayOptions(
        trace=trace,
        url=url,
        model=model,
        block_tokens=block_tokens,
        seed=seed,
        pace=Pace(speed=speed, limit=limit, session_gap_s=session_gap, turn_gap_s=turn_gap),
        shape=PromptShape(
            vocabulary=vocabulary,
            chars_per_token=chars_per_token if prompts == "text" else None,
            exact_output=exact_output,
        ),
        sending=SendOptions(
            max_in_flight=max_in_flight,
            timeout_s=timeout,
            session_header=session_header,
            engine_header=engine_header,
        ),
        limits=Limits(
            ttft_s=None if ttft_ms is None else ttft_ms / 1000,
            itl_s=None if itl_ms is None else itl_ms / 1000,
        ),
        out=out,
        plot=plot,
    )
    run(options, as_json=format is Format.JSON)
