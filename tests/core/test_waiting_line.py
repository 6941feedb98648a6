"""The line for room: who goes first, who is refused, and when."""

import gc
from collections import Counter
from types import FunctionType, ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.errors import OverloadedError
from balancer.core.routing.client_classes import Client
from balancer.core.routing.waiting_line import Ticket, WaitingLine
from balancer.core.settings.admission import AdmissionSettings


class Crowd:
    """A line, and who was woken."""

    def __init__(self, *, paced_s: float = 0.0, **settings: float) -> None:
        known = AdmissionSettings(**settings)  # type: ignore[arg-type]
        self.line = WaitingLine(known, paced_s=lambda: paced_s)
        self.woken: list[str] = []
        self.names: dict[int, str] = {}

    def enter(
        self,
        name: str,
        *,
        client: str | Client = "",
        priority: int = 0,
        cached_share: float = 0.0,
        tokens: int = 100,
        now_s: float = 0,
    ) -> Ticket:
        ticket = self.line.enter(
            client=Client(key=client) if isinstance(client, str) else client,
            priority=priority,
            cached_share=cached_share,
            tokens=tokens,
            now_s=now_s,
            wake=lambda: self.woken.append(name),
        )
        self.names[ticket.number] = name
        return ticket

    def serve(self) -> str:
        """Let the first one in and have it book."""
        first = self.line.first
        assert first is not None
        self.line.take(first)
        self.line.end_turn()
        return self.names[first.number]

    def serve_all(self) -> list[str]:
        return [self.serve() for _ in range(len(self.line))]


def test_first_come_first_served() -> None:
    """Of one client and priority."""
    crowd = Crowd()
    for name in "abc":
        crowd.enter(name, tokens=1)

    assert crowd.serve_all() == ["a", "b", "c"]
    assert crowd.line.first is None
    assert crowd.line.is_idle


def test_smaller_priority_goes_first() -> None:
    """As in vLLM, whoever came when."""
    crowd = Crowd()
    for name, priority in (("late", 5), ("usual", 0), ("urgent", -1)):
        crowd.enter(name, priority=priority)

    assert crowd.serve_all() == ["urgent", "usual", "late"]


def test_a_busy_client_does_not_keep_another_waiting() -> None:
    """Who asks for one thing isn't behind the ten that somebody else asked for before."""
    crowd = Crowd()
    for number in range(10):
        crowd.enter(f"busy{number}", client="busy")
    crowd.enter("modest", client="modest")

    assert crowd.serve_all().index("modest") <= 1


def test_a_clients_class_goes_before_what_its_requests_ask_for() -> None:
    """Nobody overtakes a better class by a field of the body."""
    crowd = Crowd()
    crowd.enter("pushy", client="anybody", priority=-99)
    crowd.enter("late", client=Client(key="vip", priority=-1), priority=5)
    crowd.enter("soon", client=Client(key="vip", priority=-1))

    assert crowd.serve_all() == ["soon", "late", "pushy"]


def test_a_clients_weight_is_its_share() -> None:
    """Three times the weight, three times the tokens, while both wait."""
    crowd = Crowd()
    heavy, light = Client(key="heavy", weight=3), Client(key="light")
    for number in range(40):
        crowd.enter(f"h{number}", client=heavy)
        crowd.enter(f"l{number}", client=light)

    assert Counter(crowd.serve()[0] for _ in range(40)) == {"h": 30, "l": 10}


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 500)), min_size=30, max_size=60),
)
def test_shares_are_equal_in_tokens(asked: list[tuple[str, int]]) -> None:
    """While both wait neither gets more than the other by over one request of each."""
    crowd = Crowd()
    tokens = {}
    for number, (client, size) in enumerate(asked):
        tokens[crowd.enter(f"{client}{number}", client=client, tokens=size).number] = size
    got: Counter[str] = Counter()
    sizes = {crowd.names[number]: size for number, size in tokens.items()}
    left = Counter(client for client, _ in asked)
    while all(left[client] for client in "ab"):
        name = crowd.serve()
        got[name[0]] += sizes[name]
        left[name[0]] -= 1
        assert abs(got["a"] - got["b"]) <= 2 * 500


def test_an_idle_client_saves_nothing_up() -> None:
    """Who comes after others were served for long starts where they are."""
    crowd = Crowd()
    for number in range(20):
        crowd.enter(f"a{number}", client="a")
    for _ in range(10):
        crowd.serve()
    for number in range(10):
        crowd.enter(f"b{number}", client="b")

    assert Counter(crowd.serve()[0] for _ in range(10)) == {"a": 5, "b": 5}


def test_a_full_line_refuses_the_newcomer() -> None:
    """With the time that the first one has waited as a hint."""
    crowd = Crowd(max_waiting=2)
    for name in "ab":
        crowd.enter(name)

    with pytest.raises(OverloadedError) as refused:
        crowd.enter("c", now_s=4.2)

    assert refused.value.retry_after_s == 5
    assert crowd.serve_all() == ["a", "b"]


def test_a_full_line_makes_room_for_who_is_more_urgent() -> None:
    """The last of those that wait is refused instead, and told."""
    crowd = Crowd(max_waiting=2)
    tickets = [crowd.enter(name) for name in "ab"]
    crowd.enter("urgent", priority=-1)

    assert [each.is_refused for each in tickets] == [False, True]
    assert "admission.max_waiting" in crowd.line.refusal(tickets[1], 0).message
    assert "b" in crowd.woken
    assert crowd.serve_all() == ["urgent", "a"]


def test_nobody_may_wait_where_none_is_allowed() -> None:
    """`max_waiting: 0` refuses at once."""
    with pytest.raises(OverloadedError) as refused:
        Crowd(max_waiting=0).enter("a")

    assert refused.value.retry_after_s == 1


def test_who_waits_too_long_is_refused() -> None:
    """The longest wait counts for each by itself."""
    crowd = Crowd(max_wait_s=5, standing_s=100)
    first = crowd.enter("a", now_s=0)
    second = crowd.enter("b", now_s=3)
    crowd.line.refuse_overdue(4.9)
    early = first.is_refused
    crowd.line.refuse_overdue(5)

    assert (early, first.is_refused, second.is_refused) == (False, True, False)
    assert crowd.line.refusal(first, 6).retry_after_s == 3


def test_in_a_standing_line_the_limit_is_short() -> None:
    """More comes than can be served: waiting long would only make everybody late."""
    crowd = Crowd(max_wait_s=60, standing_s=10, promise_s=4)
    tickets = [crowd.enter(str(at_s), now_s=at_s) for at_s in (0, 7.5, 9)]
    crowd.line.refuse_overdue(9.9)
    before = [each.is_refused for each in tickets]
    crowd.line.refuse_overdue(10)

    assert before == [False, False, False]
    assert [each.is_refused for each in tickets] == [True, True, False]


def test_a_line_that_only_the_pace_holds_does_not_stand() -> None:
    """There is room: whoever waits for their turn isn't too many for the fleet."""
    crowd = Crowd(max_wait_s=60, standing_s=10, promise_s=4)
    patient = crowd.enter("a", now_s=0)
    crowd.line.hold_back(20, by_pace=True)
    crowd.line.refuse_overdue(20)
    served = not patient.is_refused
    crowd.line.refuse_overdue(60)

    assert served
    assert patient.is_refused
    assert "admission.requests_per_s" in crowd.line.refusal(patient, 60).message


def test_a_line_stands_from_when_room_was_missing() -> None:
    """What the pace held back before doesn't count."""
    crowd = Crowd(max_wait_s=60, standing_s=10, promise_s=4)
    ticket = crowd.enter("a", now_s=0)
    crowd.line.hold_back(20, by_pace=True)
    crowd.line.hold_back(21, by_pace=False)
    crowd.line.refuse_overdue(29.9)
    early = ticket.is_refused
    crowd.line.refuse_overdue(30)

    assert (early, ticket.is_refused) == (False, True)
    assert "admission.promise_s" in crowd.line.refusal(ticket, 30).message


def test_an_empty_line_forgets_the_pace() -> None:
    """Whoever comes next may find no room."""
    crowd = Crowd(max_wait_s=60, standing_s=10, promise_s=4)
    crowd.enter("a", now_s=0)
    crowd.line.hold_back(0, by_pace=True)
    held = crowd.line.is_paced
    crowd.serve()
    assert (held, crowd.line.is_paced) == (True, False)
    late = crowd.enter("b", now_s=20)
    crowd.line.refuse_overdue(30)

    assert late.is_refused


def test_retry_after_is_what_the_pace_takes() -> None:
    """A line that filled just now has nobody who waited for long."""
    crowd = Crowd(max_waiting=1, paced_s=12.5)
    crowd.enter("a", now_s=0)
    crowd.line.hold_back(0, by_pace=True)

    with pytest.raises(OverloadedError) as refused:
        crowd.enter("b", now_s=0)

    assert refused.value.retry_after_s == 13
    assert "admission.requests_per_s" in refused.value.message
    assert "admission.max_waiting" in refused.value.message


def test_without_a_promise_a_standing_line_waits_as_any() -> None:
    """There is nothing to be late for."""
    crowd = Crowd(max_wait_s=60, standing_s=1, promise_s=0)
    ticket = crowd.enter("a", now_s=0)
    crowd.line.refuse_overdue(59)

    assert not ticket.is_refused


def test_an_empty_line_begins_anew() -> None:
    """A burst after a quiet moment may wait for the long time again."""
    crowd = Crowd(max_wait_s=60, standing_s=10, promise_s=4)
    crowd.enter("a", now_s=0)
    crowd.serve()
    late = crowd.enter("b", now_s=20)
    crowd.line.refuse_overdue(25)

    assert not late.is_refused


def test_overdue_tickets_may_be_all() -> None:
    """Then nobody is first."""
    crowd = Crowd(max_wait_s=1)
    ticket = crowd.enter("a", now_s=0)
    crowd.line.refuse_overdue(2)

    assert len(crowd.line) == 0
    assert crowd.line.first is None
    assert crowd.line.refusal(ticket, 2).retry_after_s == 1


def test_one_turn_at_a_time() -> None:
    """The next is woken when who was let in has booked."""
    crowd = Crowd()
    first = crowd.enter("a")
    crowd.enter("b")
    crowd.line.take(first)
    crowd.woken.clear()
    taken = (crowd.line.is_taken, crowd.line.is_idle)
    crowd.line.end_turn()

    assert taken == (True, False)
    assert crowd.woken == ["b"]
    assert not crowd.line.is_taken


def test_who_leaves_wakes_the_next_if_it_was_first() -> None:
    """Others that leave change nothing; leaving twice neither."""
    crowd = Crowd()
    first, second, _ = (crowd.enter(name) for name in "abc")
    crowd.line.leave(second)
    crowd.line.leave(second)
    unheard = list(crowd.woken)
    crowd.line.leave(first)

    assert unheard == []
    assert crowd.woken == ["c"]
    assert crowd.serve_all() == ["c"]


def kept_objects(line: WaitingLine) -> int:
    """How many objects it holds, whatever they are."""
    seen: dict[int, object] = {}
    ahead: list[object] = [line]
    while ahead:
        each = ahead.pop()
        if id(each) not in seen and not isinstance(each, type | FunctionType | ModuleType):
            seen[id(each)] = each
            ahead += gc.get_referents(each)
    return len(seen)


def test_line_that_is_never_empty_keeps_nothing_of_who_left() -> None:
    """Neither of who gave up, however unimportant, nor of who was served."""
    crowd = Crowd(max_waiting=10)
    crowd.enter("first", client="steady")
    after: list[int] = []
    for round_ in range(3):
        for each in range(500):
            name = f"{round_}-{each}"
            crowd.line.leave(crowd.enter(name, client="gone " + name, priority=9))
            crowd.enter(name, client="served " + name)
            crowd.serve()
        after.append(kept_objects(crowd.line))

    assert len(crowd.line) == 1
    assert after[2] < after[0] + 100
    assert crowd.serve_all() == ["2-499"]
