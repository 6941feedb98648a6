"""Commands that look at engines, at a balancer or at a recording, and change nothing."""

# ruff: noqa: PLC0415 - see `kvlb.cli`

from pathlib import Path
from typing import Annotated

import typer

from kvlb.cli.options import ConfigOption, Format, FormatOption, InstanceOption, TableFormat

DEFAULT_RECORDED_REQUESTS = 64


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
    - `kvlb events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:6557 --from 0`
    """
    from kvlb.events_view import EventsOptions, watch

    watch(
        EventsOptions(
            engine=engine, replay=replay, start=start, limit=limit, as_json=format is Format.JSON
        )
    )


def explain(
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="JSON, a file that holds it, or `-` for stdin.")
    ],
    *,
    url: Annotated[
        str, typer.Option(envvar="KVLB_URL", help="The balancer.")
    ] = "http://127.0.0.1:8080",
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
    """
    from kvlb.explain import explain as run

    run(request, url=url, path=path, as_json=format is Format.JSON)


def audit(
    recording: Annotated[
        Path,
        typer.Argument(
            metavar="RECORDING",
            help="Name given to `kvlb record --out`, or its `*.events.jsonl.gz`.",
        ),
    ],
    requests_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="REQUESTS", help="Recorded requests, if the first is a file of events."
        ),
    ] = None,
    *,
    format: Annotated[  # noqa: A002 - the option's name
        TableFormat, typer.Option("--format", help="For people or for programs.")
    ] = TableFormat.TABLE,
) -> None:
    """Replay recorded traffic and compare our predictions with what the engines reported.

    Exits 1 if a request sent alone (phase `serial`) was mispredicted without an explanation, or if
    nothing could be compared.

    For example:

    - `kvlb audit run1` after `kvlb record --out run1 …`
    - `kvlb audit m2.events.jsonl.gz m2.requests.jsonl.gz`
    """
    from kvlb.audit.command import audit_files

    raise typer.Exit(audit_files(recording, requests_file, format is TableFormat.JSON))


def record(
    *,
    out: Annotated[
        Path,
        typer.Option(metavar="NAME", help="Writes NAME.events.jsonl.gz, NAME.requests.jsonl.gz."),
    ],
    instance: InstanceOption = None,
    config: ConfigOption = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many; 64 if nothing else is said.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Stop after so long, whatever was sent.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, max=256, help="Requests under way at once.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Same seed, same conversations.")] = 1,
) -> None:
    """Record an engine's events beside requests and answers, for `kvlb audit`.

    It sends conversations of its own, so engines that serve nobody else give the cleanest record.
    The files hold prompts and answers in full.

    For example:

    - `kvlb record --instance http://127.0.0.1:8000 --out run1`
    - `kvlb record --config kvlb.yaml --minutes 5 --concurrency 8 --out load`
    """
    from kvlb.record.command import new_nonce
    from kvlb.record.command import record as run
    from kvlb.record.session import RecordOptions

    if requests is None and minutes is None:
        requests = DEFAULT_RECORDED_REQUESTS
    options = RecordOptions(
        out=out,
        requests=requests,
        minutes=minutes,
        concurrency=concurrency,
        seed=seed,
        nonce=new_nonce(),
    )
    run(instances=tuple(instance or ()), config=config, options=options)


def doctor(
    *,
    config: ConfigOption = None,
    instance: InstanceOption = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe",
            help="Send each rank a short prompt twice, one token each, and each prefill instance "
            "one transfer. Without it events, usage and transfers can't be judged.",
        ),
    ] = True,
    format: FormatOption = Format.TEXT,  # noqa: A002 - the option's name
) -> None:
    """Hold a configuration against the running engines: what is wrong, and what to change.

    It sends a few requests of one token, unless told not to. Exits 1 if there is an error; warnings
    and notes leave it at 0.

    For example:

    - `kvlb doctor --config kvlb.yaml`
    - `kvlb doctor --instance http://127.0.0.1:8000 --format json`
    """
    from kvlb.doctor.command import doctor as run

    raise typer.Exit(
        run(
            instances=tuple(instance or ()),
            config=config,
            sends_requests=probe,
            as_json=format is Format.JSON,
        )
    )
