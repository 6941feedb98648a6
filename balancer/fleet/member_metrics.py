"""Prometheus metrics of the fleet's membership, read when scraped."""

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from balancer.config import BalancerConfig
from balancer.core.fleet.roster import Origin
from balancer.fleet.members import Members
from balancer.fleet.registration import RegistrationService
from balancer.fleet.transfer_notices import TransferNotices


class MembershipCollector(Collector):
    """Who named the members, and what came in at the registration service."""

    def __init__(
        self, members: Members[BalancerConfig], registration: RegistrationService | None
    ) -> None:
        self._members = members
        self._registration = registration

    def describe(self) -> Iterable[Metric]:
        """Name them without a scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Read everything."""
        members = GaugeMetricFamily(
            "kvlb_fleet_members",
            "Instances of the fleet by who named them: file, added, registered, discovered.",
            labels=("origin",),
        )
        count = Counter(each.origin for each in self._members.present.members)
        for origin in Origin:
            members.add_metric((origin.value,), count[origin])
        refused = CounterMetricFamily(
            "kvlb_registrations_refused_total",
            "Messages to the registration service that were of no use, by reason.",
            labels=("reason",),
        )
        service = self._registration
        for reason, times in sorted(service.refused.items()) if service else ():
            refused.add_metric((reason,), times)
        yield members
        yield refused
        yield CounterMetricFamily(
            "kvlb_registration_messages_total",
            "Messages to the registration service, of use or not.",
            service.heard if service else 0,
        )


class NoticeCollector(Collector):
    """What LMCache's senders said."""

    def __init__(self, notices: TransferNotices | None) -> None:
        self._notices = notices

    def describe(self) -> Iterable[Metric]:
        """Name them without a scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Read everything."""
        notices = self._notices
        refused = CounterMetricFamily(
            "kvlb_transfer_notices_refused_total",
            "Messages of LMCache's senders that were of no use, by reason.",
            labels=("reason",),
        )
        for reason, times in sorted(notices.refused.items()) if notices else ():
            refused.add_metric((reason,), times)
        yield refused
        yield CounterMetricFamily(
            "kvlb_transfer_notices_total",
            "Messages of LMCache's senders, of use or not.",
            notices.heard if notices else 0,
        )
        yield CounterMetricFamily(
            "kvlb_transfer_notices_missed_total",
            "Decode legs that went out without the notice they had waited for.",
            notices.missed if notices else 0,
        )
