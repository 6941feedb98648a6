"""Every check of `kvlb doctor`: the fault it names, and the nearest case it must leave alone."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from balancer.core.fleet.snapshot import Role
from balancer.core.settings.transfer import ChildSettings, OffloadingSettings
from indexer.core.model_cards import ServedModels
from kvlb.doctor.core import engine_checks, event_checks, fleet_checks
from kvlb.doctor.core.examination import FLEET_CHECKS, INSTANCE_CHECKS, examine
from kvlb.doctor.core.exposition import EngineMetrics, read_metrics
from kvlb.doctor.core.facts import (
    Declared,
    FleetFacts,
    InstanceFacts,
    Probed,
    Stream,
    Tokenized,
    Told,
    Transfer,
)
from kvlb.doctor.core.findings import Finding, Level, by_severity

ENDPOINT, REPLAY = "tcp://*:5557", "tcp://*:5657"
PROBED = Probed(prompt_tokens=33, tells_cached=True, cached_tokens=32)
WELL = Stream(
    rank=0,
    endpoint="tcp://10.0.0.1:5557",
    is_connected=True,
    answers_replay=True,
    probed=PROBED,
    batches=2,
    named_ranks=frozenset({0}),
    block_size=16,
    first_hash=7,
    tiers=frozenset({"gpu"}),
)


def models(base: str = "tiny", *more: str) -> ServedModels:
    return ServedModels(
        base=base, aliases=frozenset({base, *more}), adapters=frozenset(), cards=({"id": base},)
    )


def told(name: str = "m0", **changes: Any) -> Told:
    return Told(**{"name": name, "url": "http://10.0.0.1:8000", **changes})


def engine(name: str = "m0", told: Told | None = None, **changes: Any) -> InstanceFacts:
    """One that is well, but for `changes`."""
    well: dict[str, Any] = {
        "told": told or globals()["told"](name),
        "health_status": 200,
        "version": (0, 33),
        "models": models(),
        "declared": {0: Declared(endpoint=ENDPOINT, replay=REPLAY)},
        "metrics": EngineMetrics(block_size=16, has_prefix_caching=True, hash_algorithm="sha256"),
        "streams": [WELL],
    }
    return InstanceFacts(**{**well, **changes})


def fleet(*instances: InstanceFacts, **changes: Any) -> FleetFacts:
    return FleetFacts(instances=instances, **changes)


def names(findings: Iterable[Finding]) -> list[str]:
    return [each.name for each in findings]


def second(url: str = "http://10.0.0.2:8000", **changes: Any) -> InstanceFacts:
    """A well engine on another machine."""
    return engine(told=told("m1", url=url), **changes)


def pair(transfer: Transfer | None = None, **decode: Any) -> tuple[InstanceFacts, InstanceFacts]:
    """A prefill and a decode engine."""
    prefill = engine(told=told("p0", role=Role.PREFILL, connector="nixl"), transfer=transfer)
    wanted = {"role": Role.DECODE, "connector": "nixl", "url": "http://10.0.0.2:8000", **decode}
    return prefill, engine(told=told("d0", **wanted))


def test_nothing_is_found_of_engines_that_are_well() -> None:
    """Two mixed engines, a pair, and a transfer that went through."""
    done = Transfer(host="10.0.0.1", port=5600, decode="d0", decode_host="10.0.0.2")

    assert examine(fleet(engine(), second())) == []
    assert examine(fleet(*pair(done))) == []


def test_nothing_is_made_of_what_is_not_known() -> None:
    """Facts that could not be gathered are no faults."""
    unknown = InstanceFacts(told=told(events="tcp://10.0.0.1:5557"))

    assert examine(fleet(unknown)) == []


def stream(**changes: Any) -> dict[str, Any]:
    return {"streams": [replace(WELL, **changes)]}


INSTANCE_FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("unreachable", {"fault": "unreachable", "detail": "x"}, "start the engine"),
    ("unauthorized", {"fault": "unauthorized", "detail": "x"}, "KVLB_ENGINE_API_KEY"),
    ("not_vllm", {"fault": "not_vllm", "detail": "x"}, "vllm serve"),
    ("unhealthy", {"health_status": 503}, "engine's log"),
    ("release_too_old", {"version": (0, 8)}, "upgrade to vLLM 0.9"),
    ("release_untested", {"version": (0, 34)}, "newer kvlb"),
    ("wrong_model", {"told": told(model="other")}, "`model: tiny`"),
    (
        "prefix_caching_off",
        {"metrics": EngineMetrics(has_prefix_caching=False), "declared": None},
        "--enable-prefix-caching",
    ),
    (
        "token_details_off",
        stream(probed=Probed(prompt_tokens=33)),
        "--enable-prompt-tokens-details",
    ),
    ("request_failed", stream(probed=Probed(prompt_tokens=3, problem="status 500")), "by hand"),
    (
        "tokenizer_differs",
        {"tokenized": Tokenized(directory="/t", differs_at="a chat", ours=3, theirs=4)},
        "`tokens.models`",
    ),
    ("events_off", {"declared": {}, "streams": []}, "enable_kv_cache_events"),
    ("events_unknown", {"declared": None, "streams": []}, "`events: tcp://10.0.0.1:5557`"),
    ("no_replay", stream(answers_replay=None), '"replay_endpoint"'),
    ("replay_silent", stream(answers_replay=False), "`replay`"),
    (
        "publisher_connects",
        {"declared": {1: Declared(endpoint="tcp://0.0.0.0:5558")}},
        '"endpoint": "tcp://*:5557"',
    ),
    ("events_unconnected", stream(is_connected=False, batches=0), "`events`"),
    ("events_unseen", stream(problem="port in use", batches=0), "/status"),
    ("events_silent", stream(batches=0), "prefix caching on"),
    ("wrong_rank", stream(named_ranks=frozenset({0, 3, 4})), "`rank_base`"),
    ("ranks_differ", {"told": told(ranks=2)}, "`ranks: 1`"),
    (
        "ipc_with_ranks",
        {"told": told(events="ipc:///run/e", ranks=2), "declared": None},
        "TCP endpoint",
    ),
    ("no_transfer", {"transfer": Transfer(problem="names no blocks")}, "--kv-transfer-config"),
]


@pytest.mark.parametrize(
    ("name", "facts", "change"), INSTANCE_FAULTS, ids=lambda each: str(each)[:24]
)
def test_fault_of_one_engine_is_named_with_its_remedy(
    name: str, facts: dict[str, Any], change: str
) -> None:
    """That finding and no other, and what it says to change."""
    (finding,) = examine(fleet(engine(**facts)))

    assert finding.name == name
    assert finding.instance == "m0"
    assert finding.seen
    assert change in finding.change


def test_every_check_of_an_engine_is_played() -> None:
    """A new check needs a row in the table above, or a test below."""
    below = {"nixl_unreachable", "transfer_failed"}
    played = {name for name, _, _ in INSTANCE_FAULTS} - set(engine_checks.FAULTS)

    assert {check.__name__ for check in INSTANCE_CHECKS} == played | below | {"instance_fault"}
    assert len(FLEET_CHECKS) == 9


def test_alias_of_the_base_model_is_the_wrong_model() -> None:
    """Namespaces of keys go by the first served name."""
    facts = engine(told=told(model="short"), models=models("tiny", "short"))

    assert names(engine_checks.wrong_model(facts)) == ["wrong_model"]


def test_answers_of_old_releases_without_caching_tell_nothing() -> None:
    """Before 0.26 an answer with nothing cached has no details, flag or not."""
    metrics = EngineMetrics(has_prefix_caching=False)
    facts = engine(version=(0, 20), metrics=metrics, **stream(probed=Probed(prompt_tokens=33)))

    assert names(engine_checks.token_details_off(facts)) == []
    assert names(engine_checks.token_details_off(replace(facts, version=(0, 33)))) == [
        "token_details_off"
    ]


def test_answers_are_judged_without_a_stream() -> None:
    """An engine that publishes nothing still has usage."""
    facts = engine(streams=[], probed=Probed(prompt_tokens=33))

    assert names(engine_checks.token_details_off(facts)) == ["token_details_off"]


def test_publisher_that_dials_another_machine_is_meant_to() -> None:
    """There we bind, and it connects to us."""
    facts = engine(declared={0: Declared(endpoint="tcp://10.0.0.9:5557")})

    assert names(event_checks.publisher_connects(facts)) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost", "10.0.0.1"])  # noqa: S104 - a fault
def test_publisher_that_dials_itself_is_found_and_not_called_silent(host: str) -> None:
    """One fault, one finding."""
    facts = engine(
        declared={0: Declared(endpoint=f"tcp://{host}:5557", replay=REPLAY)},
        **stream(is_connected=False, batches=0),
    )

    assert names(examine(fleet(facts))) == ["publisher_connects"]


def test_bound_port_needs_no_connection() -> None:
    """Whether a publisher that dials us has done so is told by its events."""
    facts = engine(**stream(is_connected=False, binds=True, batches=0))

    assert names(examine(fleet(facts))) == ["events_silent"]


def test_slow_connection_pool_is_a_fault_only_below_ours() -> None:
    """VLLM's 5 s are above our 4 s."""
    early, late = engine(idle_closed_s=1.0), engine(idle_closed_s=5.0)

    assert names(examine(fleet(early))) == ["keep_alive_too_short"]
    assert examine(fleet(late)) == []


def test_that_nothing_was_sent_is_said() -> None:
    """No finding must not look like no fault."""
    (finding,) = examine(fleet(engine(), is_probed=False))

    assert (finding.name, finding.level) == ("not_probed", Level.INFO)


def ranked(events: int, replay: int, **changes: Any) -> dict[str, Any]:
    """An engine of two ranks that declares its ports."""
    return {
        "declared": {
            rank: Declared(endpoint=f"tcp://*:{events + rank}", replay=f"tcp://*:{replay + rank}")
            for rank in range(2)
        },
        **changes,
    }


def test_replay_port_of_one_rank_is_the_event_port_of_the_next() -> None:
    """VLLM's own example ports, 5557 and 5558, with two ranks."""
    (finding,) = examine(fleet(engine(**ranked(5557, 5558))))

    assert finding.name == "ports_clash"
    assert "replay of rank 0 and events of rank 1" in finding.seen
    assert "at least 2 away" in finding.change


def test_clash_is_found_in_the_configuration_of_an_engine_that_does_not_start() -> None:
    """VLLM ends at once; only the file says why."""
    asked = told(events="tcp://10.0.0.1:5557", replay="tcp://10.0.0.1:5558", ranks=2)
    facts = InstanceFacts(told=asked, fault="unreachable", detail="x")

    assert names(examine(fleet(facts))) == ["ports_clash", "unreachable"]


def test_engines_of_one_machine_need_ports_of_their_own() -> None:
    """Two servers started with the default event port."""
    one, other = engine(), second("http://10.0.0.1:8001")
    (finding,) = fleet_checks.ports_clash(fleet(one, other))

    assert (finding.name, finding.instance) == ("ports_clash", "m1")
    assert "of m0 and m1" in finding.seen


def test_ports_that_nobody_listens_on_do_not_clash() -> None:
    """An engine that dials us has no event port; an ipc path is no port; another host neither."""
    dials: dict[str, Any] = {"declared": {0: Declared(endpoint="tcp://10.0.0.9:5557")}}
    ipc: dict[str, Any] = {"declared": {0: Declared(endpoint="ipc:///run/e")}}
    told_ipc = told(events="ipc:///run/e", ranks=2)

    assert examine(fleet(engine(**dials), second("http://10.0.0.1:8001", **dials))) == []
    assert names(fleet_checks.ports_clash(fleet(engine(**ipc), second()))) == []
    assert list(fleet_checks.ports_clash(fleet(InstanceFacts(told=told_ipc)))) == []
    no_replay = InstanceFacts(told=told(events="tcp://10.0.0.1:5557", ranks=2))
    assert list(fleet_checks.ports_clash(fleet(no_replay))) == []


def test_block_sizes_of_one_model_are_compared() -> None:
    """By events, else by metrics; engines that say neither, and other models, are left out."""
    small = engine(streams=[])
    large = second(**stream(block_size=32))
    silent = engine(
        told=told("m2", url="http://10.0.0.3:8000"), streams=[], metrics=EngineMetrics()
    )
    (finding,) = examine(fleet(small, large, silent))

    assert finding.name == "block_sizes_differ"
    assert "16: m0; 32: m1" in finding.seen
    assert examine(fleet(small, replace(large, models=models("other")))) == []


def hashed(value: int, **metrics: Any) -> dict[str, Any]:
    known = {"block_size": 16, "has_prefix_caching": True, "hash_algorithm": "xxhash"}
    return {**stream(first_hash=value), "metrics": EngineMetrics(**{**known, **metrics})}


def test_unseeded_hashes_matter_where_blocks_are_shared() -> None:
    """Another hash for the same block: nothing to us, everything to a shared tier."""
    one, other = engine(**hashed(1)), second(**hashed(2))
    shared = engine(**hashed(1, offload="kv_offloading_size=4.0"))
    (finding,) = examine(fleet(shared, other))

    assert finding.name == "hash_seed_differs"
    assert "PYTHONHASHSEED" in finding.change
    assert "xxhash" in finding.change
    assert examine(fleet(one, other)) == []
    assert examine(fleet(shared, second(**hashed(1)))) == []


def test_shared_tier_is_seen_by_its_events() -> None:
    """Blocks on the CPU say so."""
    one = engine(**hashed(1))
    tiered = second(streams=[replace(WELL, first_hash=2, tiers=frozenset({"gpu", "cpu"}))])
    (finding,) = fleet_checks.hash_seed_differs(fleet(one, tiered))

    assert "events of tier cpu" in finding.seen
    assert "same --prefix-caching-hash-algo" in finding.change


PEERS = OffloadingSettings(p2p_host="10.0.0.1")


@pytest.mark.parametrize(
    ("connector", "transfer", "seen"),
    [
        ("offloading", None, "`connector: offloading`"),
        ("offloading", PEERS, "transfer.p2p_host: 10.0.0.1"),
        ("multi", ChildSettings(children={"offloading": None}), "child `offloading`"),
        (
            "multi",
            ChildSettings(children={"nixl": None, "offloading": PEERS}),
            "transfer.children.offloading.p2p_host: 10.0.0.1",
        ),
    ],
    ids=["storage", "peers", "child-storage", "child-peers"],
)
def test_shared_tier_is_told_by_the_connector(
    connector: str, transfer: OffloadingSettings | ChildSettings | None, seen: str
) -> None:
    """Peers read each other's blocks by name, or meet in a storage: no metric need say so."""
    one, other = engine(**hashed(1)), second(**hashed(2))
    told = replace(one.told, connector=connector, transfer=transfer)
    (finding,) = fleet_checks.hash_seed_differs(fleet(replace(one, told=told), other))

    assert seen in finding.seen


def test_children_without_a_tier_share_nothing() -> None:
    """They hand over what a request names."""
    one, other = engine(**hashed(1)), second(**hashed(2))
    told = replace(one.told, connector="multi", transfer=ChildSettings(children={"nixl": None}))

    assert list(fleet_checks.hash_seed_differs(fleet(replace(one, told=told), other))) == []


def test_old_sha256_is_told_of_its_seed() -> None:
    """Up to 0.28 it was random, too."""
    one = engine(**hashed(1, hash_algorithm="sha256", offload="x"))
    other = second(**hashed(2, hash_algorithm="sha256"))
    (finding,) = fleet_checks.hash_seed_differs(fleet(one, other))

    assert "sha256 up to vLLM 0.28" in finding.change


def test_connectors_of_a_pair_are_compared() -> None:
    """They can't hand over to each other."""
    (finding,) = fleet_checks.connectors_differ(fleet(*pair(connector="example")))

    assert (finding.name, finding.instance) == ("connectors_differ", "p0")
    assert "'example'" in finding.seen


def test_encode_instances_need_no_events_and_no_cache() -> None:
    """They are asked how they are, and nothing else."""
    described = told("e0", role=Role.ENCODE, connector="ec_cpu", url="http://10.0.0.9:8000")
    encode = engine(told=described, declared={}, streams=())
    broken = replace(encode, health_status=503)

    assert examine(fleet(engine(), encode)) == []
    assert names(examine(fleet(engine(), broken))) == ["unhealthy"]


def test_a_consumer_without_an_address_is_found() -> None:
    """Encode instances would push to nobody."""
    encode = engine(
        told=told("e0", role=Role.ENCODE, connector="ec_mooncake", url="http://10.0.0.9:8000")
    )
    (finding,) = fleet_checks.encoders_differ(fleet(engine(), encode))

    assert (finding.name, finding.instance) == ("encoders_differ", "m0")
    assert "`ec_ip`" in finding.change


def test_prefill_without_decode_is_an_error_and_the_other_way_a_warning() -> None:
    """A decode instance alone still answers."""
    prefill, decode = pair()

    assert [each.level for each in fleet_checks.role_alone(fleet(prefill))] == [Level.ERROR]
    assert [each.level for each in fleet_checks.role_alone(fleet(decode))] == [Level.WARNING]
    assert list(fleet_checks.role_alone(fleet(engine()))) == []


def test_releases_of_a_pair_are_compared() -> None:
    """NIXL refuses another release."""
    prefill, decode = pair()
    old = replace(decode, version=(0, 32))
    (finding,) = examine(fleet(prefill, old))

    assert finding.name == "releases_differ"
    assert "p0: 0.33, d0: 0.32" in finding.seen
    unknown = fleet(prefill, old, replace(decode, version=None))
    assert "unknown" in next(iter(fleet_checks.releases_differ(unknown))).seen


FAR: dict[str, Any] = {"port": 5600, "decode": "d0", "decode_host": "10.0.0.2"}


@pytest.mark.parametrize(
    ("transfer", "found"),
    [
        pytest.param(
            Transfer(
                host="10.9.9.9", dial_problem="where nobody answers", decode_problem="x", **FAR
            ),
            ["nixl_unreachable"],
            id="nobody-there",
        ),
        pytest.param(
            Transfer(host="localhost", decode_problem="status 500", **FAR),
            ["nixl_unreachable"],
            id="the-decode-engine-dials-itself",
        ),
        pytest.param(
            Transfer(host="127.0.0.1", decode_problem="status 500", **FAR),
            ["nixl_unreachable"],
            id="loopback",
        ),
        pytest.param(
            Transfer(host="10.9.9.9", dial_problem="where nobody answers", port=5600),
            ["nixl_unreachable"],
            id="nobody-to-try",
        ),
        pytest.param(
            Transfer(host="10.9.9.9", dial_problem="where nobody answers", **FAR),
            [],
            id="only-from-here",
        ),
        pytest.param(
            Transfer(host="p0.example", decode_problem="status 500", **FAR),
            ["transfer_failed"],
            id="named-host",
        ),
        pytest.param(
            Transfer(decode="d0", decode_problem="status 500"), ["transfer_failed"], id="no-address"
        ),
    ],
)
def test_transfer_is_judged_by_what_the_decode_engine_did(
    transfer: Transfer, found: list[str]
) -> None:
    """A side channel out of reach, another failure, or none."""
    assert names(examine(fleet(*pair(transfer)))) == found


def test_findings_come_worst_first() -> None:
    """Errors, warnings, notes; then by instance."""
    found = [
        Finding(name="c", level=Level.INFO, instance="a", seen="", change=""),
        Finding(name="b", level=Level.ERROR, instance="b", seen="", change=""),
        Finding(name="a", level=Level.ERROR, instance="a", seen="", change=""),
    ]

    assert names(by_severity(found)) == ["a", "b", "c"]


CONFIG_LINE = (
    'vllm:cache_config_info{block_size="32",enable_prefix_caching="False",'
    'kv_offloading_size="None",prefix_caching_hash_algo="sha256"} 1.0\n'
)


def test_metrics_page_tells_the_cache_settings() -> None:
    """Labels of vLLM's own gauge."""
    read = read_metrics("# TYPE vllm:cache_config_info gauge\n" + CONFIG_LINE)

    assert read == EngineMetrics(
        block_size=32, has_prefix_caching=False, hash_algorithm="sha256", offload=None
    )


@pytest.mark.parametrize(
    ("page", "seen"),
    [
        ('vllm:cache_config_info{kv_offloading_size="4.0"} 1.0\n', "kv_offloading_size=4.0"),
        ("vllm:kv_offload_load_bytes_total 0.0\n", "vllm:kv_offload_load_bytes_total"),
        (
            'vllm:prompt_tokens_cached_by_source_total{source="p2p"} 5.0\n',
            "tokens cached from a peer",
        ),
        (
            'vllm:prompt_tokens_cached_by_source_total{source="p2p"} 0.0\n',
            None,
        ),
    ],
)
def test_metrics_page_tells_of_shared_tiers(page: str, seen: str | None) -> None:
    """By a setting, by a connector's metrics, by what came from a peer."""
    assert read_metrics(page).offload == seen


@pytest.mark.parametrize(
    "page",
    [
        "",
        "no metrics {",
        'other{block_size="x"} 1\n',
        'vllm:cache_config_info{block_size="None"} 1\n',
    ],
)
def test_page_that_says_nothing_leaves_all_unknown(page: str) -> None:
    """Another program's page, or a broken one."""
    assert read_metrics(page) == EngineMetrics()
