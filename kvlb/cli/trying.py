"""Commands to try kvlb without GPUs: `simulate`, `demo`, `load`."""

# ruff: noqa: PLC0415 - see `kvlb.cli`

from typing import Annotated

import typer

from kvlb.cli.options import (
    Format,
    FormatOption,
    SimulateArgument,
    SimulatedConnector,
    SimulatedEncoderConnector,
)


def simulate(  # noqa: PLR0913 - an argument is an option
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
    ranks: Annotated[
        int, typer.Option(min=1, max=64, help="Data-parallel ranks of each engine.")
    ] = 1,
    block_size: Annotated[
        int, typer.Option(min=1, max=4096, help="Tokens in a block of the KV cache.")
    ] = 16,
    cache_blocks: Annotated[
        int, typer.Option(min=2, help="Blocks in the cache of each rank; the oldest are evicted.")
    ] = 4096,
    release: Annotated[
        str, typer.Option(metavar="VERSION", help="vLLM release that is imitated.")
    ] = "0.33.0",
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A LoRA adapter that every engine serves. Repeatable."),
    ] = None,
    connector: Annotated[
        SimulatedConnector | None,
        typer.Option(
            help="How KV cache is handed over, by mixed engines, too; `nixl` between prefill and "
            "decode engines if not said."
        ),
    ] = None,
    ec_connector: Annotated[
        SimulatedEncoderConnector | None,
        typer.Option(
            help="How encode engines hand over images, audio and video; `example` if not said."
        ),
    ] = None,
) -> None:
    """Run vLLM engines without a GPU: OpenAI API, KV events, prefill/decode transfer.

    For example:

    - `kvlb simulate 2p2d`
    - `kvlb simulate 4 --base-port 8101 --prefill-rate 4000`
    - `kvlb simulate 1e2m --ec-connector cpu`
    - `kvlb simulate 2 --ranks 4 --cache-blocks 512 --adapter lora-a --release 0.23.0`
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
            ranks=ranks,
            block_size=block_size,
            cache_blocks=cache_blocks,
            release=release,
            adapters=tuple(adapter or ()),
            connector=connector.value if connector is not None else None,
            ec_connector=ec_connector.value if ec_connector is not None else None,
        ),
    )


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
