"""The command line: names, options and help of every command. What they do is elsewhere.

Each command imports what it runs when it is called: `kvlb --help` should not load a web server,
and `kvlb demo` alone needs the optional `openai` package.
"""

# ruff: noqa: PLC0415 - see above

from enum import StrEnum
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated

import typer

from balancer.core.routing_settings import PolicyName

app = typer.Typer(
    name="kvlb",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Format(StrEnum):
    """How a command prints its result."""

    TEXT = "text"
    JSON = "json"


class TableFormat(StrEnum):
    """How `audit` prints its result."""

    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="For people or for programs.")]
InstanceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL[,NAME=VALUE…]",
        help="An engine: `http://host:port`, then any of `events=tcp://…`, `replay=tcp://…`, "
        "`role=prefill|decode|mixed`, `alias=…`, `connector=NAME`, `ranks=N`, `rank_base=N`. "
        "Repeatable.",
    ),
]
ConfigOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A YAML file; see docs/configuration.md.")
]
PolicyOption = Annotated[
    PolicyName | None, typer.Option(help="How an instance is chosen; kvlb if not said.")
]
HostOption = Annotated[str | None, typer.Option(help="Address to listen on.")]
PortOption = Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on.")]
RedisOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Redis that holds the index: `redis://host:6379`, `rediss://…`, `unix:///path`. "
        "Its password goes into KVLB_REDIS_PASSWORD.",
    ),
]
SimulateArgument = Annotated[
    str,
    typer.Argument(
        metavar="FLEET",
        help="`2p2d`: two prefill and two decode instances; `4`: four mixed ones.",
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvlb {distribution_version('kvlb')}")
        raise typer.Exit


@app.callback()
def kvlb(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit."),
    ] = False,
) -> None:
    """Cache-aware load balancer for fleets of stock `vllm serve` engines.

    New here? `kvlb demo` shows what it does, on this machine, without a GPU.

    With engines: `kvlb up --instance http://gpu1:8000 --instance http://gpu2:8000`
    """


@app.command()
def up(
    *,
    instance: InstanceOption = None,
    config: ConfigOption = None,
    simulate: Annotated[
        str | None,
        typer.Option(metavar="FLEET", help="Start simulated engines with it, such as `2p2d`."),
    ] = None,
    policy: PolicyOption = None,
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """Follow the engines' KV events and balance OpenAI requests over them, in one process.

    For example:

    - `kvlb up --simulate 2p2d`
    - `kvlb up --instance http://127.0.0.1:8000,events=tcp://127.0.0.1:5557 --port 9000`
    - `kvlb up --config kvlb.yaml --policy round_robin`
    """
    from kvlb.settings import Overrides
    from kvlb.up import up as run

    run(
        Overrides(instances=tuple(instance or ()), policy=policy, host=host, port=port),
        config=config,
        simulate=simulate,
    )


@app.command()
def indexer(
    *,
    config: ConfigOption = None,
    instance: InstanceOption = None,
    redis: RedisOption = None,
    host: Annotated[str | None, typer.Option(help="Address of the status server.")] = None,
    status_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Its port; 8081 if not said.")
    ] = None,
) -> None:
    """Follow the engines' KV events and keep the index in Redis. One for a fleet.

    It takes no requests: `kvlb balancer` does, and reads the same Redis. Both are given the same
    file. Killed and started again, it goes on where it was. SIGHUP or a changed file changes the
    fleet while it runs.

    For example:

    - `kvlb indexer --config kvlb.yaml`
    - `kvlb indexer --redis redis://127.0.0.1:6379 --instance http://127.0.0.1:8000`
    """
    from kvlb.processes import indexer as run
    from kvlb.settings import Overrides

    run(
        Overrides(
            instances=tuple(instance or ()), redis_url=redis, host=host, status_port=status_port
        ),
        config=config,
    )


@app.command()
def balancer(
    *,
    config: ConfigOption = None,
    instance: InstanceOption = None,
    redis: RedisOption = None,
    policy: PolicyOption = None,
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """Balance OpenAI requests by the index that `kvlb indexer` keeps in Redis. As many as you like.

    Without Redis or indexer it goes on, by load alone. SIGTERM finishes what runs; SIGHUP or a
    changed file changes fleet and routing while it runs.

    For example:

    - `kvlb balancer --config kvlb.yaml`
    - `kvlb balancer --redis redis://127.0.0.1:6379 --instance http://127.0.0.1:8000`
    """
    from kvlb.processes import balancer as run
    from kvlb.settings import Overrides

    run(
        Overrides(
            instances=tuple(instance or ()), redis_url=redis, policy=policy, host=host, port=port
        ),
        config=config,
    )


@app.command()
def simulate(
    fleet: SimulateArgument = "2p2d",
    *,
    host: Annotated[
        str, typer.Option(help="IPv4 address to listen on; `0.0.0.0`: every interface.")
    ] = "127.0.0.1",
    base_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the first engine; 0: any free ones.")
    ] = 0,
    prefill_rate: Annotated[
        float, typer.Option(min=1, help="Prompt tokens an engine computes per second.")
    ] = 8000,
    inter_token_ms: Annotated[
        float, typer.Option(min=0.1, help="Time between two tokens of an answer.")
    ] = 10,
    drop_every: Annotated[
        int, typer.Option(min=0, help="Lose every n-th event batch on the wire, to see replay.")
    ] = 0,
) -> None:
    """Run vLLM engines without a GPU: OpenAI API, KV events, prefill/decode transfer.

    For example:

    - `kvlb simulate 2p2d`
    - `kvlb simulate 4 --base-port 8101 --prefill-rate 4000`
    """
    from kvlb.simulate import SimulationOptions
    from kvlb.simulate import simulate as run

    run(
        fleet,
        SimulationOptions(
            host=host,
            base_port=base_port,
            prefill_tokens_per_s=prefill_rate,
            inter_token_ms=inter_token_ms,
            drop_every=drop_every,
        ),
    )


@app.command()
def demo(
    *,
    seed: Annotated[int, typer.Option(help="Same seed, same conversations and arrivals.")] = 7,
    conversations: Annotated[int, typer.Option(min=8, max=32)] = 12,
    turns: Annotated[int, typer.Option(min=4, max=12)] = 6,
    format: FormatOption = Format.TEXT,  # noqa: A002 - the option's name
) -> None:
    """Watch cache-aware routing beside round robin on a simulated 2P2D fleet. Takes about 40 seconds.

    Exits 1 unless kvlb's cached ratio is at least 1.5 times and its median time to first token at
    most 0.7 times round robin's, answers are equal, and prefill legs were both run and skipped.

    Needs the `openai` package: `pip install 'kvlb[demo]'`.
    """
    from kvlb.demo.run import DemoOptions
    from kvlb.demo.run import demo as run

    options = DemoOptions(seed=seed, conversations=conversations, turns=turns)
    raise typer.Exit(run(options, as_json=format is Format.JSON))


@app.command()
def load(
    *,
    url: Annotated[
        str, typer.Option(envvar="KVLB_URL", help="The balancer, or any OpenAI endpoint.")
    ] = "http://127.0.0.1:8080",
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; by default the first one listed.")
    ] = None,
    rate: Annotated[
        float, typer.Option(min=0.01, max=1000, help="Conversations that begin per second.")
    ] = 2,
    seed: Annotated[int, typer.Option(help="Same seed, same conversations.")] = 1,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many requests; else at Ctrl-C.")
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait for the balancer to list a model.")
    ] = 60,
) -> None:
    """Send demo conversations to a balancer, to watch it in Grafana.

    For example:

    - `kvlb load --url http://127.0.0.1:8080 --rate 4`
    """
    from kvlb.load import LoadOptions
    from kvlb.load import load as run

    options = LoadOptions(
        url=url.rstrip("/"),
        model=model,
        conversations_per_s=rate,
        seed=seed,
        requests=requests,
        wait_s=wait,
    )
    run(options)


@app.command()
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


@app.command()
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


@app.command()
def audit(
    events_file: Annotated[
        Path, typer.Argument(metavar="EVENTS", help="Recorded events, `*.events.jsonl.gz`.")
    ],
    requests_file: Annotated[
        Path, typer.Argument(metavar="REQUESTS", help="Recorded requests, `*.requests.jsonl.gz`.")
    ],
    *,
    format: Annotated[  # noqa: A002 - the option's name
        TableFormat, typer.Option("--format", help="For people or for programs.")
    ] = TableFormat.TABLE,
) -> None:
    """Replay recorded traffic and compare our predictions with what the engines reported.

    Exits 1 if a request sent alone (phase `serial`) was mispredicted without an explanation, or if
    nothing could be compared.
    """
    from kvlb.audit.command import audit_files

    raise typer.Exit(audit_files(events_file, requests_file, format is TableFormat.JSON))
