"""`kvlb events`: what each event and incident of a stream looks like on the terminal."""

from typing import get_args

import pytest

from indexer.core.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
)
from indexer.core.stream_effects import (
    ApplyBatch,
    Dropped,
    Effect,
    GapLost,
    GapOpened,
    GapRepaired,
    OpenEpoch,
    ReplayEnded,
    RequestReplay,
    TrustChanged,
)
from indexer.core.types import EngineHash, Tier, Trust
from kvlb.event_lines import EFFECTS, EventLines, render_line

STORED = BlockStored(
    hashes=[EngineHash(1), EngineHash(2)],
    parent=None,
    token_ids=list(range(32)),
    block_size=16,
)


def lines(*events: Event, replayed: bool = False) -> list[str]:
    batch = EventBatch(ts=0.0, rank=0, events=list(events))
    described = EventLines().describe_batch(0, 41, batch, replayed=replayed)
    return [" ".join(render_line(line).split()) for line in described]


def test_stored_shows_sequence_rank_tokens_and_blocks() -> None:
    """A store at the beginning of a prompt is marked as a root."""
    assert lines(STORED) == ["seq 41 rank 0 stored 32 tokens 2 blocks gpu root"]


def test_replayed_events_say_so() -> None:
    """What came by replay is told from what came live."""
    assert lines(STORED, replayed=True)[0].endswith("root replayed")


def test_adapter_is_a_flag_and_salt_is_nothing() -> None:
    """Names and salts stay with the engine."""
    event = BlockStored(
        hashes=[EngineHash(1)],
        parent=EngineHash(7),
        token_ids=[1] * 16,
        block_size=16,
        tier=Tier.CPU,
        lora="secret-adapter",
        extra_keys=[["secret-salt"]],
        group=1,
    )

    assert lines(event) == ["seq 41 rank 0 stored 16 tokens 1 block cpu group 1 lora"]


def test_removed_counts_tokens_once_the_block_size_is_known() -> None:
    """Removals name hashes only; stores of the same group tell how much each is."""
    removed = BlockRemoved(hashes=[EngineHash(1)])

    assert lines(removed) == ["seq 41 rank 0 removed ? tokens 1 block gpu"]
    assert lines(STORED, removed)[1] == "seq 41 rank 0 removed 16 tokens 1 block gpu"


def test_placeholder_store_teaches_no_block_size() -> None:
    """Offload tiers announce blocks without tokens and with block size 0."""
    placeholder = BlockStored(
        hashes=[EngineHash(1)], parent=None, token_ids=[], block_size=0, tier=Tier.CPU
    )

    assert lines(STORED, placeholder, BlockRemoved(hashes=[EngineHash(1)]))[2].startswith(
        "seq 41 rank 0 removed 16 tokens"
    )


def test_cleared_needs_no_numbers() -> None:
    """A reset drops everything."""
    assert lines(AllBlocksCleared()) == ["seq 41 rank 0 cleared"]


def test_undecodable_event_has_a_line() -> None:
    """Nothing is dropped in silence."""
    batch = EventBatch(ts=0.0, rank=0, events=[], rejected=["unknown_tag"])

    (line,) = EventLines().describe_batch(0, 3, batch, replayed=False)

    assert render_line(line).split() == ["seq", "3", "rank", "0", "rejected", "unknown_tag"]


@pytest.mark.parametrize(
    ("effect", "expected"),
    [
        pytest.param(GapOpened(41, 43), "--- rank 0 gap 41..43", id="gap"),
        pytest.param(RequestReplay(41, 1), "--- rank 0 replay 41..", id="replay"),
        pytest.param(GapRepaired(41, 43), "--- rank 0 repaired 41..43", id="repaired"),
        pytest.param(GapLost(41, 43), "--- rank 0 lost 41..43", id="lost"),
        pytest.param(OpenEpoch("restarted"), "--- rank 0 epoch restarted", id="restart"),
        pytest.param(
            TrustChanged(Trust.DEGRADED, "gap_lost"),
            "--- rank 0 trust degraded gap_lost",
            id="trust",
        ),
        pytest.param(Dropped(7, "duplicate"), "seq 7 rank 0 dropped duplicate", id="dropped"),
        pytest.param(ReplayEnded("silent"), "--- rank 0 replay_ended silent", id="no-answer"),
    ],
)
def test_incident_has_a_line(effect: Effect, expected: str) -> None:
    """Gaps and their repair are visible, as is everything that changes what can be believed."""
    line = EventLines().describe_effect(0, effect)

    assert line is not None
    assert " ".join(render_line(line).split()) == expected


def test_every_kind_of_effect_has_a_name_or_none_on_purpose() -> None:
    """An effect the stream learns later doesn't fail here first."""
    assert set(EFFECTS) == set(get_args(Effect))


@pytest.mark.parametrize(
    "effect", [ApplyBatch(1, b""), ReplayEnded("answered")], ids=["batch", "replay"]
)
def test_what_has_its_own_lines_gives_none(effect: Effect) -> None:
    """An applied batch is shown event by event, an answered replay by what it brought."""
    assert EventLines().describe_effect(0, effect) is None
