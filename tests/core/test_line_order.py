"""Who of those that wait goes first, and who last."""

from hypothesis import given
from hypothesis import strategies as st

from balancer.core.routing.client_classes import Client
from balancer.core.routing.line_order import LineOrder, Place


class Line:
    """An order, and the places in it."""

    def __init__(self) -> None:
        self.order = LineOrder(100)
        self.places: dict[int, Place] = {}

    def add(
        self, client: str = "", *, priority: int = 0, cached_share: float = 0.0, tokens: int = 100
    ) -> int:
        number = max(self.places, default=-1) + 1
        self.places[number] = self.order.add(
            number, Client(key=client), priority, cached_share=cached_share, tokens=tokens
        )
        return number

    def serve(self) -> int:
        first = self.order.first()
        assert first is not None
        self.order.remove(self.places[first], is_served=True)
        return first

    def serve_all(self) -> list[int]:
        served = []
        while self.order.first() is not None:
            served.append(self.serve())
        return served


def test_what_is_cached_goes_first() -> None:
    """A conversation's next turn, before prompts of which nothing was computed."""
    line = Line()
    for cached_share in (0.0, 0.5, 0.95, 0.2):
        line.add(cached_share=cached_share)

    assert line.serve_all() == [2, 1, 3, 0]


def test_about_as_much_is_equal() -> None:
    """Then it is first come, first served: a system prompt is a larger part of short prompts."""
    line = Line()
    for cached_share in (0.81, 0.89, 0.85):
        line.add(cached_share=cached_share)

    assert line.serve_all() == [0, 1, 2]


def test_no_client_goes_first_by_what_is_cached() -> None:
    """Shares are shares: one whose prompts are all new gets as many tokens as one who repeats his."""
    line = Line()
    for _ in range(10):
        line.add("repeats", cached_share=0.9)
        line.add("new")

    assert sum(number % 2 for number in (line.serve() for _ in range(10))) == 5


def test_an_urgent_prompt_goes_before_a_cached_one() -> None:
    """Priorities are somebody's will."""
    line = Line()
    line.add(cached_share=0.9)
    line.add(priority=-1)

    assert line.serve_all() == [1, 0]


def test_a_client_of_two_priorities_has_one_share() -> None:
    """What it was served as urgent counts for the rest of it, too."""
    line = Line()
    line.add("a", priority=-1, tokens=500)
    line.add("a", tokens=100)
    line.add("b", tokens=100)

    assert line.serve_all() == [0, 2, 1]


def test_the_last_one_is_the_least_cached_of_who_asks_most() -> None:
    """It is refused if somebody has to be."""
    line = Line()
    for cached_share in (0.5, 0.0, 0.9):
        line.add("busy", cached_share=cached_share)
    line.add("modest")

    assert line.order.last() == 1


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.integers(-1, 1),
            st.sampled_from([0.0, 0.5, 1.0]),
            st.integers(0, 300),
            st.booleans(),
        ),
        min_size=1,
        max_size=60,
    )
)
def test_everybody_is_served_once_whoever_leaves(
    asked: list[tuple[str, int, float, int, bool]],
) -> None:
    """No place is lost or kept by others that give up, and the most urgent are served first."""
    line = Line()
    gone = set()
    for client, priority, cached_share, tokens, leaves in asked:
        number = line.add(client, priority=priority, cached_share=cached_share, tokens=tokens)
        if leaves:
            gone.add(number)
    for number in gone:
        line.order.remove(line.places[number], is_served=False)
    served = line.serve_all()

    assert sorted(served) == sorted(line.places.keys() - gone)
    assert [asked[number][1] for number in served] == sorted(asked[number][1] for number in served)


def test_who_left_leaves_nothing_behind() -> None:
    """However many, while one of them or another waits for long."""
    line = Line()
    line.add("steady", priority=-1)
    for each in range(200):
        line.order.remove(
            line.places[line.add("steady", priority=-1, cached_share=0.5)], is_served=False
        )
        line.order.remove(line.places[line.add(f"gone{each}")], is_served=False)

    assert line.serve_all() == [0]
