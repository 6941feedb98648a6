"""Settings of the control plane: instances, probes, tokens, administration.

Frozen values; every number has its unit in its name and is checked when it is decoded.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from xxhash import xxh32_hexdigest

from balancer.core.fleet.snapshot import NO_CONNECTOR, Instance, Role
from balancer.core.settings.errors import ConfigError, Secret
from balancer.core.settings.transfer import read_transfer
from indexer.core.addresses import parse_instance_id
from indexer.core.limits import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from indexer.core.types import InstanceId

HostName = Annotated[str, msgspec.Meta(min_length=1, pattern=r"^[a-z0-9._-]+$")]
"""In lower case, without a port."""
ZmqAddress = Annotated[str, msgspec.Meta(pattern=r"^tcp://[^/]+:[0-9]+$")]
_USUAL = {Role.MIXED: NO_CONNECTOR, Role.ENCODE: "ec_example"}
"""Connectors of those that don't hand over a KV cache."""
Alias = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._:\[\]-]+$")]


class InstanceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine address, as the operator describes it."""

    url: str
    """Scheme, host and port of the engine: `http://10.0.0.1:8000`, `http://[fd00::1]:8000`. No
    path."""
    alias: Alias | None = None
    """Name shown to clients (`x-kvlb-instance`) and in metrics instead of the address: up to 64
    letters, digits and `.` `_` `-` `:` `[` `]`. Default: role and number: `p0`, `d0`, `m0`."""
    role: Role = Role.MIXED
    """`prefill` fills caches only, `decode` answers clients, `mixed` does both; `encode` runs the
    encoder of a multimodal model for the others."""
    connector: str | None = None
    """How the KV cache is handed from one leg to the other, or of an `encode` instance what it has
    encoded (docs/connectors.md). Default: `nixl` for prefill and decode, `none` for mixed,
    `ec_example` for encode."""
    transfer: dict[str, Any] = {}
    """Settings of that connector for this instance, where it has any: below."""
    ranks: PositiveInt | None = None
    """Data-parallel ranks behind this address. Default: what the engine's `/kv_event_sources`
    lists (0.31 and later), else 1."""
    rank_base: NonNegativeInt = 0
    """Global number of its first rank, where several addresses share one data-parallel group and
    the engine doesn't list its ranks."""
    ec_zmq_addrs: tuple[ZmqAddress, ...] = ()
    """Of an engine with vLLM's `ECMooncakeConnector` that isn't `encode`: where encode instances push to,
    one address for each rank, `tcp://host:14579` (its `ec_ip` and `ec_port`)."""
    api_key: Secret | None = None
    """The engine's `--api-key`."""
    api_key_env: str | None = None
    """Environment variable that holds it."""
    enabled: bool = True
    """`false`: watched, but gets no requests."""

    def __post_init__(self) -> None:
        """Raise ValueError for an address or connector settings that can't be used."""
        try:
            parse_instance_id(self.url)
        except ValueError as error:
            raise ValueError(f"url: {error}") from error
        self._check_addresses()
        if not self.transfer and self.connector_name != "multi":
            return
        try:
            read_transfer(self.connector_name, self.transfer)
        except ConfigError as error:
            raise ValueError(f"transfer: {error}") from error

    def _check_addresses(self) -> None:
        if not self.ec_zmq_addrs:
            return
        if self.role is Role.ENCODE:
            raise ValueError("ec_zmq_addrs: belongs to those who receive, not to encode instances")
        if self.ranks is not None and len(self.ec_zmq_addrs) != self.ranks:
            raise ValueError(f"ec_zmq_addrs: {self.ranks} ranks need {self.ranks} addresses")

    @property
    def id(self) -> InstanceId:
        return parse_instance_id(self.url)

    @property
    def name(self) -> str:
        """Its alias. One made of the address would tell clients the address."""
        return self.alias or f"{self.role.value}-{xxh32_hexdigest(self.id.encode())}"

    @property
    def connector_name(self) -> str:
        """As configured, else what instances of its role usually have."""
        return self.connector or _USUAL.get(self.role, "nixl")

    def instance(self) -> Instance:
        """The instance before anything was seen of it."""
        return Instance(
            id=self.id,
            alias=self.name,
            role=self.role,
            ranks=tuple(range(self.rank_base, self.rank_base + (self.ranks or 1))),
            rank_base=self.rank_base,
            connector=self.connector_name,
            transfer=read_transfer(self.connector_name, self.transfer),
            ec_zmq_addrs=self.ec_zmq_addrs,
            enabled=self.enabled,
            unhealthy_reason="not_probed",
        )


def name_instances(instances: Iterable[InstanceSettings]) -> tuple[InstanceSettings, ...]:
    """Give those without an alias one of their role and number: `p0`, `d0`, `d1`, `m0`."""
    named = list(instances)
    taken = {each.alias for each in named}
    for number, each in enumerate(named):
        if each.alias is None:
            made = (f"{each.role.value[0]}{count}" for count in range(len(named) + len(taken)))
            alias = next(name for name in made if name not in taken)
            taken.add(alias)
            named[number] = msgspec.structs.replace(each, alias=alias)
    return tuple(named)


class ProbeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is healthy.

    Every instance is asked for `/health` and `/v1/models`, in development mode for `/is_sleeping`
    too: an engine that sleeps gets nothing. A refused connection counts at once, 503 on `/health`
    means draining: no new requests, running ones finish. Nothing bans an instance for good.
    """

    interval_s: PositiveFloat = 2.0
    """Pause between probes of one instance; adapters loaded at run time show within it."""
    timeout_s: PositiveFloat = 5.0
    """For one probe: an engine that reads a long prompt answers late."""
    unhealthy_after: PositiveInt = 3
    """Bad probes in a row. Failed legs are counted by `reliability`."""
    healthy_after: PositiveInt = 1
    """Good probes in a row after a failure."""


class EngineFlags(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a model's engines were started with, as far as it shapes prompts, under vLLM's own names."""

    chat_template: str | None = None
    """File with the template, as the balancer finds it."""
    chat_template_content_format: Literal["string", "openai"] | None = None
    default_chat_template_kwargs: dict[str, Any] = {}
    exclude_tools_when_tool_choice_none: bool = False
    trust_request_chat_template: bool = False
    """Clients may bring templates, which are then rendered here, too."""


class TokensSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where tokens come from (docs/tokens.md).

    Token-id prompts are used as they are. For text and chats the model's own tokenizer is the
    quickest and exact; without one the engines' `/tokenize` is asked. Whatever fails here costs a
    request its overlap, never its answer.
    """

    models: dict[str, str] = {}
    """Base model → directory with its `tokenizer.json`, `tokenizer_config.json` and, if it has
    one, `chat_template.jinja`."""
    engine_flags: dict[str, EngineFlags] = {}
    """Base model → what its engines were started with, where that shapes prompts: any of
    `chat_template` (a file), `chat_template_content_format`, `default_chat_template_kwargs`,
    `exclude_tools_when_tool_choice_none` and `trust_request_chat_template`."""
    deadline_s: PositiveFloat = 0.1
    """After this the request is routed by load. The prompt is still remembered, so its repeat is
    scored."""
    workers: PositiveInt = 2
    """Threads that render and tokenise; long texts that are new have one more for themselves."""
    cache_bytes: NonNegativeInt = 64 * 1024 * 1024
    """Memory for the tokens of known texts: 4 bytes a token, 256 a piece. Prompts that come as token
    ids may take as much again: 15 bytes a token."""
    parity_interval_s: NonNegativeFloat = 10.0
    """Pause between two comparisons of a model's local tokens with its engine's own. One difference
    switches the model to the engine's tokens until the balancer is restarted, and raises an alarm.
    0: they are never compared."""
    engine_fallback: bool = True
    """Ask an engine (its render endpoint if it has one, else `/tokenize`) where there is no local
    tokenizer, or where it gave other tokens."""
    engine_concurrency: PositiveInt = 32
    """Such calls under way at once; what comes on top is routed by load."""
    breaker_failures: PositiveInt = 3
    """Failed calls in a row after which an instance's `/tokenize` is left alone."""
    breaker_cool_down_s: PositiveFloat = 5.0
    """For how long, until one trial."""
    max_prompts: PositiveInt = 64
    """A request with more prompts is routed by load (`too_many_prompts`)."""
    max_prompt_tokens: PositiveInt = 1_000_000
    """So is one with more tokens over all its prompts, or with a prompt over the model's
    `max_model_len` (`too_long`)."""


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may look, and who may change something.

    `/status`, `/explain`, `/explain/recent` and `GET /instances` tell addresses and what others
    asked. They are open to clients on this machine; to others only with the header `X-API-Key`. A
    client behind a proxy on this machine (`X-Forwarded-For`) counts as another machine's; so does
    one that asked for another name than `localhost` or a loopback address: it may be a web page
    whose name was made to mean 127.0.0.1 (DNS rebinding). What changes the fleet or its engines
    (docs/fleet.md) needs the key from everywhere.
    """

    api_key: Secret | None = None
    """Without one nobody else may look, and nobody may change anything."""
    api_key_env: str | None = None
    """Environment variable that holds it."""
    local_hosts: tuple[HostName, ...] = ()
    """Further names of this machine, under which its own clients may look without the key."""
    command_timeout_s: PositiveFloat = 120.0
    """For one engine to carry out what it is told: sleeping or loading an adapter takes a while."""
