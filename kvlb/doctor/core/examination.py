"""Every check there is, and how they are run over the facts of a fleet. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from balancer.core.fleet.snapshot import Role
from kvlb.doctor.core import engine_checks, event_checks, fleet_checks, port_checks
from kvlb.doctor.core.facts import FleetFacts, InstanceFacts
from kvlb.doctor.core.findings import Finding, by_severity

InstanceCheck = Callable[[InstanceFacts], Iterable[Finding]]
FleetCheck = Callable[[FleetFacts], Iterable[Finding]]

INSTANCE_CHECKS: Sequence[InstanceCheck] = (
    engine_checks.instance_fault,
    engine_checks.unhealthy,
    engine_checks.release_too_old,
    engine_checks.release_untested,
    engine_checks.wrong_model,
    engine_checks.prefix_caching_off,
    engine_checks.token_details_off,
    engine_checks.request_failed,
    engine_checks.tokenizer_differs,
    event_checks.events_off,
    event_checks.events_unknown,
    event_checks.no_replay,
    event_checks.replay_silent,
    event_checks.publisher_connects,
    event_checks.events_unconnected,
    event_checks.events_unseen,
    event_checks.events_silent,
    event_checks.wrong_rank,
    event_checks.ranks_differ,
    event_checks.ipc_with_ranks,
    fleet_checks.no_transfer,
    fleet_checks.nixl_unreachable,
    fleet_checks.transfer_failed,
)

ENCODER_CHECKS: Sequence[InstanceCheck] = (
    engine_checks.instance_fault,
    engine_checks.unhealthy,
    engine_checks.release_too_old,
    engine_checks.release_untested,
    engine_checks.wrong_model,
)
"""Of an encode instance, which has no KV cache."""

FLEET_CHECKS: Sequence[FleetCheck] = (
    engine_checks.keep_alive_too_short,
    engine_checks.not_probed,
    port_checks.ports_clash,
    port_checks.topic_shared,
    fleet_checks.block_sizes_differ,
    fleet_checks.hash_seed_differs,
    fleet_checks.connectors_differ,
    fleet_checks.encoders_differ,
    fleet_checks.role_alone,
    fleet_checks.releases_differ,
)


def examine(fleet: FleetFacts) -> list[Finding]:
    """Run every check; worst findings first."""
    return by_severity(_findings(fleet))


def _findings(fleet: FleetFacts) -> Iterator[Finding]:
    for facts in fleet.instances:
        is_encoder = facts.told.role is Role.ENCODE
        for check in ENCODER_CHECKS if is_encoder else INSTANCE_CHECKS:
            yield from check(facts)
    for fleet_check in FLEET_CHECKS:
        yield from fleet_check(fleet)
