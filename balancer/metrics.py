"""Prometheus metrics of the read path: what each answers is in its help text.

Rules:

1. Hit rates are three pairs of token counters, never a gauge: a dashboard divides rates.
2. Labels are bounded: models the fleet doesn't know, unknown paths and reasons share one value;
   series of an instance that left the fleet disappear with it, those of a model or an adapter once nobody
   serves it.
3. Everything is written from a finished `RequestRecord`, so a probe or an explain counts nothing.

Cost: per count a lookup by its labels and an addition, both without a call of Python code.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from balancer.core.fleet.snapshot import Fleet
from balancer.core.record import EncodeRecord, LegRecord, RequestRecord
from balancer.labelled import Labelled
from balancer.routing.pd_metrics import PdMetrics
from balancer.series import Counter, CounterSeries, Histogram
from balancer.usual_series import Kind, PaceSeries, UsualSeries, usual_kind

OTHER = "other"
"""Label of everything that isn't known."""

SHORT_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1)
LONG_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Paths with a label of their own; other engine paths share one."""


class _Names:
    """Label values that one fleet snapshot allows."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.aliases = frozenset(each.alias for each in fleet.instances) | {OTHER}
        self.models: dict[str, str] = {}
        for instance in fleet.instances:
            if instance.models is not None:
                self.models |= dict.fromkeys(instance.models.aliases, instance.models.base)
                self.models |= {name: name for name in instance.models.adapters}


class BalancerMetrics:
    """Every metric of the balancer, in the registry it is given."""

    def __init__(self, registry: CollectorRegistry, fleet: Callable[[], Fleet]) -> None:
        self._fleet = fleet
        self._known = _Names(fleet())
        self._usual: dict[Kind, UsualSeries] = {}
        self._define(registry)
        self._pd = PdMetrics(registry)
        self._define_tokens(registry)

    def _define(self, registry: CollectorRegistry) -> None:
        self._requests = Labelled(
            Counter(
                "kvlb_requests_total",
                "Requests answered, by status class and outcome (ok, or the code of the error).",
                ("model", "path", "status", "outcome"),
                registry=registry,
            )
        )
        self._duration = Labelled(
            Histogram(
                "kvlb_request_duration_seconds",
                "From arrival to last byte.",
                ("model", "path"),
                buckets=LONG_BUCKETS,
                registry=registry,
            )
        )
        self._request_first_byte = Labelled(
            Histogram(
                "kvlb_request_time_to_first_token_seconds",
                "From a streamed request's arrival to the first byte of its answer: both legs.",
                ("model",),
                buckets=LONG_BUCKETS,
                registry=registry,
            )
        )
        self._first_byte = Labelled(
            Histogram(
                "kvlb_time_to_first_token_seconds",
                "From sending a leg to its first token, where it can be seen (streams, prefill legs).",
                ("leg", "instance"),
                buckets=LONG_BUCKETS,
                registry=registry,
            )
        )
        self._inter_token = Labelled(
            Histogram(
                "kvlb_inter_token_seconds",
                "Of a streamed leg, mean time between two of its tokens.",
                ("leg", "instance"),
                buckets=TOKEN_BUCKETS,
                registry=registry,
            )
        )
        self._legs = Labelled(
            Counter(
                "kvlb_legs_total",
                "Attempts at a leg, by how they ended (ok, or the code of the error).",
                ("leg", "instance", "outcome"),
                registry=registry,
            )
        )
        self._encode_seconds = Labelled(
            Histogram(
                "kvlb_encode_seconds",
                "From sending an encode leg to its answer.",
                ("instance",),
                buckets=LONG_BUCKETS,
                registry=registry,
            )
        )
        self._encode_items = Labelled(
            Counter(
                "kvlb_encode_items_total",
                "Images, audio and video of fleets with encode instances: encoded, reused, or local "
                "(left to the engine that computes the prompt).",
                ("outcome",),
                registry=registry,
            )
        )
        self._prefill_legs = Labelled(
            Counter(
                "kvlb_prefill_legs_total",
                "Decisions about the prefill leg: run, skipped or failed, and why.",
                ("outcome", "reason"),
                registry=registry,
            )
        )
        self._own_failures = Labelled(
            Counter(
                "kvlb_own_code_failures_total",
                "Failures of the operator's own policy or handlers, by the exception's type.",
                ("kind", "error"),
                registry=registry,
            )
        )
        self._lookups = Labelled(
            Counter(
                "kvlb_index_lookups_total",
                "Lookups in the index: ok, timeout, failed, skipped.",
                ("outcome",),
                registry=registry,
            )
        )
        self._lookup_seconds = Histogram(
            "kvlb_index_lookup_seconds",
            "Time a request waited for the index.",
            buckets=SHORT_BUCKETS,
            registry=registry,
        ).labels()

    def _define_tokens(self, registry: CollectorRegistry) -> None:
        def tokens(name: str, help_: str, *labels: str) -> Labelled[CounterSeries]:
            return Labelled(Counter(name, help_, labels, registry=registry))

        self._prompt = tokens("kvlb_prompt_tokens_total", "Tokens of scored prompts.", "model")
        self._available = tokens(
            "kvlb_overlap_available_tokens_total",
            "Of scored prompts, tokens that the best candidate held.",
            "model",
        )
        self._chosen = tokens(
            "kvlb_overlap_chosen_tokens_total",
            "Of scored prompts, tokens that the chosen rank held.",
            "model",
        )
        self._cached = tokens(
            "kvlb_cached_tokens_total",
            "Prompt tokens that engines reported as cached, where they reported it.",
            "model",
            "leg",
        )
        self._cached_of = tokens(
            "kvlb_cached_tokens_known_prompt_tokens_total",
            "Prompt tokens of the legs whose cached tokens are known: the ratio's denominator.",
            "model",
            "leg",
        )
        self._delivered = tokens(
            "kvlb_delivered_tokens_total",
            "Of prompts with a known figure, tokens whose computation the cache really saved.",
            "model",
        )
        self._delivered_of = tokens(
            "kvlb_delivered_known_prompt_tokens_total",
            "Prompt tokens of those prompts: the ratio's denominator.",
            "model",
        )
        self._predicted = tokens(
            "kvlb_leg_predicted_tokens_total",
            "Predicted overlap of legs whose cached tokens are known.",
            "leg",
            "instance",
        )
        self._overpredicted = tokens(
            "kvlb_leg_overpredicted_tokens_total",
            "Of the predicted overlap, tokens that the engine did not take from its cache.",
            "leg",
            "instance",
        )
        self._predictions = tokens(
            "kvlb_predictions_total",
            "Finished legs, by how the index's prediction compares with the engine's cached tokens: "
            "exact, over, under, or why they can't be compared.",
            "leg",
            "instance",
            "outcome",
        )
        self._completion = tokens(
            "kvlb_completion_tokens_total", "Tokens generated, as engines reported.", "model"
        )
        self._tokenize = tokens(
            "kvlb_tokenize_total",
            "Where the tokens of prompts came from, or why there are none.",
            "source",
            "outcome",
        )

    def observe(self, record: RequestRecord) -> None:
        """Count one finished request."""
        names = self._names()
        kind = usual_kind(record)
        if kind is not None:
            usual = self._usual.get(kind)
            if usual is None:
                usual = self._usual[kind] = self._usual_series(names, record, kind)
            usual.observe(record)
            return
        model = names.models.get(record.model, OTHER)  # clients can send any name
        path = record.path if record.path in PATHS else OTHER
        status = f"{record.status // 100}xx" if record.status else "none"
        self._requests[model, path, status, record.error or "ok"].value += 1
        if record.ended_s is not None:
            self._duration[model, path].observe(record.ended_s - record.arrived_s)
        if record.stream and record.first_byte_s is not None:
            self._request_first_byte[model,].observe(record.first_byte_s - record.arrived_s)
        if record.prompt_source != "none" or record.unscorable is not None:
            self._tokenize[record.prompt_source, record.unscorable or "ok"].value += 1
        self._observe_decision(record, model)
        if record.encode is not None:
            self._observe_encode(record, record.encode)
        for leg in record.legs:
            alias = leg.alias if leg.alias in names.aliases else OTHER  # it left meanwhile
            self._observe_leg(leg, alias, model, stream=record.stream)

    def on_lookup(self, outcome: str, seconds: float) -> None:
        """Count one lookup in the index."""
        self._lookups[outcome,].value += 1
        if outcome != "skipped":
            self._lookup_seconds.observe(seconds)

    def own_code_failed(self, kind: str, error: BaseException) -> None:
        """Count a failure of the operator's own code: `policy` or `handler`."""
        self._own_failures[kind, type(error).__name__].value += 1

    def on_prediction(self, leg: LegRecord, outcome: str) -> None:
        """Count what a finished leg has shown of the index."""
        alias = leg.alias if leg.alias in self._names().aliases else OTHER
        self._predictions[leg.kind, alias, outcome].value += 1

    def forget_absent(self, fleet: Fleet) -> None:
        """Drop the series of instances, models and adapters that are not in `fleet` any more."""
        names = _Names(fleet)
        models = names.models.keys() | {OTHER}
        self._usual.clear()
        for each in vars(self).values():
            if isinstance(each, Labelled):
                each.forget("instance", names.aliases)
                each.forget("model", models)

    def _names(self) -> _Names:
        fleet = self._fleet()
        if fleet is not self._known.fleet:
            self._known = _Names(fleet)
            self._usual.clear()
        return self._known

    def _usual_series(self, names: _Names, record: RequestRecord, kind: Kind) -> UsualSeries:
        model = names.models.get(record.model, OTHER)
        path = record.path if record.path in PATHS else OTHER
        alias = self._alias(record.legs[0])
        _, _, status, _, source, unscorable, reason, _ = kind
        return UsualSeries(
            requests=self._requests[model, path, f"{status // 100}xx", "ok"],
            duration=self._duration[model, path],
            tokenize=self._tokenize[source, unscorable],
            skipped=self._prefill_legs["skipped", str(reason)],
            legs=self._legs["decode", alias, "ok"],
            cached=self._cached[model, "decode"],
            cached_of=self._cached_of[model, "decode"],
            completion=self._completion[model,],
            delivered=self._delivered[model,],
            delivered_of=self._delivered_of[model,],
            pace=PaceSeries(
                first_byte=self._request_first_byte[model,],
                leg_first_byte=self._first_byte["decode", alias],
                inter_token=self._inter_token["decode", alias],
            )
            if record.stream
            else None,
        )

    def _observe_decision(self, record: RequestRecord, model: str) -> None:
        """What was decided, what it was based on, and what the cache really saved."""
        plan, legs = record.plan, record.legs
        prefilled = record.prefill_leg
        if plan is not None:
            if prefilled is not None:
                outcome = "run"
            else:
                outcome = "skipped"
                for each in legs:
                    if each.kind == "prefill":
                        outcome = "failed"
            self._prefill_legs[outcome, str(plan.reason)].value += 1
            self._pd.observe(record, plan)
        if record.prompt_tokens is not None and record.chosen_tokens is not None:
            self._prompt[model,].value += record.prompt_tokens
            self._available[model,].value += record.available_tokens or 0
            self._chosen[model,].value += record.chosen_tokens
        # After a transfer the decode leg counts what it was sent: only the first leg tells.
        leg = prefilled or (legs[-1] if legs else None)
        if leg is not None and leg.cached_tokens is not None and leg.prompt_tokens is not None:
            self._delivered[model,].value += leg.cached_tokens
            self._delivered_of[model,].value += leg.prompt_tokens

    def _observe_encode(self, record: RequestRecord, encode: EncodeRecord) -> None:
        for outcome in ("encoded", "reused", "local"):
            self._encode_items[outcome,].value += getattr(encode, outcome)
        for leg in record.legs:
            if leg.kind == "encode" and leg.first_byte_s is not None:
                seconds = leg.first_byte_s - leg.started_s
                self._encode_seconds[self._alias(leg),].observe(seconds)

    def _observe_leg(self, leg: LegRecord, alias: str, model: str, *, stream: bool) -> None:
        kind, cached = leg.kind, leg.cached_tokens
        self._legs[kind, alias, leg.error or "ok"].value += 1
        if cached is not None and leg.prompt_tokens is not None:
            self._cached[model, kind].value += cached
            self._cached_of[model, kind].value += leg.prompt_tokens
        if kind == "decode" and leg.completion_tokens is not None:
            self._completion[model,].value += leg.completion_tokens
        if cached is not None and leg.overlap_tokens is not None:
            missing = max(0, leg.overlap_tokens - cached)
            self._predicted[kind, alias].value += leg.overlap_tokens
            self._overpredicted[kind, alias].value += missing
        # Only a stream, or a prefill leg, shows when the first token was there.
        if kind == "prefill" or (stream and kind != "encode"):
            self._observe_pace(leg, alias, stream=stream)

    def _observe_pace(self, leg: LegRecord, alias: str, *, stream: bool) -> None:
        computed_s = leg.computed_s
        if computed_s is not None:
            self._first_byte[leg.kind, alias].observe(computed_s - leg.started_s)
        seconds = leg.inter_token_s if stream else None
        if seconds is not None:
            self._inter_token[leg.kind, alias].observe(seconds)

    def _alias(self, leg: LegRecord) -> str:
        """An alias that isn't known left while the leg ran."""
        return leg.alias if leg.alias in self._names().aliases else OTHER
