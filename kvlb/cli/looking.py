"""Commands that look at one engine or a balancer while it runs: `events`, `explain`."""

# ruff: noqa: PLC0415 - see `kvlb.cli`

from typing import Annotated

import typer

from kvlb.cli.options import Format, FormatOption


def events(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="An engine's `http://…`, or its event socket `tcp://…`."
        ),
    ],
    *,
    replay: Annotated[
        str | None, typer.Option(metavar="ENDPOINT", help="Replay socket `tcp://…`.")
    ] = None,
    start: Annotated[
        int | None,
        typer.Option("--from", min=0, help="First replay batches from this number on."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many event batches.")
    ] = None,
    format: FormatOption = Format.TEXT,  # noqa: A002 - the option's name
) -> None:
    """Print an engine's KV-cache events as they come: stored, removed, cleared; gaps and replays.

    For example:

    - `kvlb events http://127.0.0.1:8000`
    - `kvlb events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5657 --from 0`
    """
    from kvlb.events_view import EventsOptions, watch

    watch(
        EventsOptions(
            engine=engine, replay=replay, start=start, limit=limit, as_json=format is Format.JSON
        )
    )


def explain(
    request: Annotated[
        str | None,
        typer.Argument(metavar="REQUEST", help="JSON, a file that holds it, or `-` for stdin."),
    ] = None,
    *,
    url: Annotated[
        str, typer.Option(envvar="KVLB_URL", help="The balancer.")
    ] = "http://127.0.0.1:8080",
    request_id: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Instead: why a finished request (`x-request-id`) went where it went.",
        ),
    ] = None,
    path: Annotated[
        str | None, typer.Option(help="OpenAI path; by default told from the request.")
    ] = None,
    format: FormatOption = Format.TEXT,  # noqa: A002 - the option's name
) -> None:
    """Ask a running balancer where it would send a request, and why. Nothing is generated.

    If it has no tokenizer for the model, the balancer sends the text to an engine's /tokenize;
    nothing else goes to engines.

    From another machine set KVLB_ADMIN_API_KEY.

    For example:

    - `kvlb explain '{"model": "sim", "messages": [{"role": "user", "content": "hello"}]}'`
    - `kvlb explain --request-id 3f0c…`
    """
    from kvlb.explain import explain as run
    from kvlb.explain import explain_finished

    if (request is None) == (request_id is None):
        raise typer.BadParameter("write a request, or --request-id")
    if request_id is not None:
        explain_finished(request_id, url=url, as_json=format is Format.JSON)
    elif request is not None:
        run(request, url=url, path=path, as_json=format is Format.JSON)
