"""Commands that hold what we believe against what engines do: `doctor`, `record`, `audit`."""

# ruff: noqa: PLC0415, PLR0913 - see `kvlb.cli`; and an option is an argument

from pathlib import Path
from typing import Annotated

import typer

from kvlb.cli.options import ConfigOption, Format, FormatOption, InstanceOption, TableFormat

DEFAULT_RECORDED_REQUESTS = 64


def audit(
    recording: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECORDING",
            help="Name given to `kvlb record --out`, or its `*.events.jsonl.gz`.",
        ),
    ] = None,
    requests_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="REQUESTS", help="Recorded requests, if the first is a file of events."
        ),
    ] = None,
    *,
    live: Annotated[
        bool, typer.Option("--live", help="Watch a running balancer, or engines, instead.")
    ] = False,
    url: Annotated[
        str, typer.Option(envvar="KVLB_URL", help="With --live: the balancer.")
    ] = "http://127.0.0.1:8080",
    indexer: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="With --live: the status of `kvlb indexer`, if the balancer is apart from it. "
            "Only it knows why predictions differ.",
        ),
    ] = None,
    instance: InstanceOption = None,
    config: ConfigOption = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="With --live: for how long.")] = 1,
    format: Annotated[  # noqa: A002 - the option's name
        TableFormat, typer.Option("--format", help="For people or for programs.")
    ] = TableFormat.TABLE,
) -> None:
    """Compare our predictions with what engines reported: of a recording, or live.

    A recording is replayed through the decoder and the index. With --live each request that a
    running balancer finishes is sampled, with what may explain a difference; nothing is sent. With
    --live and engines (--instance, --config) it sends them requests of its own, without a balancer.
    Files that are cut, since the recorder was killed, are read as far as they go, and named.

    Exits 1 if a request sent alone (phase `serial`) or seen live was mispredicted and nothing
    explains it: `unexplained`, or `wrong`, which is a cause that lies in the index. Exits 1, too,
    if nothing could be compared.

    For example:

    - `kvlb audit run1` after `kvlb record --out run1 …`
    - `kvlb audit --live --url http://127.0.0.1:8080 --minutes 5`
    - `kvlb audit --live --instance http://127.0.0.1:8000`
    """
    from kvlb.audit.command import audit_balancer, audit_engines, audit_files

    as_json = format is TableFormat.JSON
    if live == (recording is not None):
        raise typer.BadParameter("name a recording, or say --live")
    if recording is not None:
        code = audit_files(recording, requests_file, as_json)
    elif instance or config:
        code = audit_engines(instance or (), config, minutes, as_json)
    else:
        code = audit_balancer(url, indexer, minutes, as_json)
    raise typer.Exit(code)


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
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Record what clients send there, instead of conversations of its own.",
        ),
    ] = None,
) -> None:
    """Record an engine's events beside requests and answers, for `kvlb audit`.

    It sends conversations of its own, so engines that serve nobody else give the cleanest record.
    With --listen it passes on and records the completions and chats that clients send it.
    The files hold prompts and answers in full; killed, it leaves all but the last second.

    For example:

    - `kvlb record --instance http://127.0.0.1:8000 --out run1`
    - `kvlb record --config kvlb.yaml --minutes 5 --concurrency 8 --out load`
    - `kvlb record --instance http://127.0.0.1:8000 --listen 8090 --out clients`
    """
    from kvlb.record.command import new_nonce
    from kvlb.record.command import record as run
    from kvlb.record.session import RecordOptions

    if requests is None and minutes is None and listen is None:
        requests = DEFAULT_RECORDED_REQUESTS
    options = RecordOptions(
        out=out,
        requests=requests,
        minutes=minutes,
        concurrency=concurrency,
        seed=seed,
        nonce=new_nonce(),
    )
    run(instances=tuple(instance or ()), config=config, options=options, listen=listen)


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
