"""ZMQ frames of the event protocol: live messages, replay requests, replay answers.

Rules:

1. A live message is `[topic, seq, payload]`, in every release.
2. A replay answer has one empty delimiter, then `[seq, payload]` (up to 0.25) or
   `[topic, seq, payload]` (since 0.26). It is read from its end, so both are the same.
3. `seq` is 8 bytes, big-endian, unsigned. All ones with an empty payload ends a replay; it is
   never a batch.
4. No engine gets to 2**40: a thousand batches a second take 35 years. Such a number is nonsense;
   believed, it would open a gap to nowhere, and make the engine's next batch look like a restart.
5. The topic is reported, not trusted: who sent a message is known from the connection.

Cost: constant per message; payloads are not looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass

SEQ_BYTES = 8
_END_SEQ = 2 ** (8 * SEQ_BYTES) - 1
_MOST_SEQ = 2**40


class FrameError(Exception):
    """A message that isn't of this protocol. `reason` is constant, fit for a metric label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class NumberedBatch:
    """One batch of events, still encoded, with the number its publisher gave it."""

    topic: bytes
    seq: int
    payload: bytes


def parse_live(frames: Sequence[bytes]) -> NumberedBatch:
    """Read one message of the live socket, or raise FrameError."""
    if len(frames) != 3:
        raise FrameError("frame_count")
    topic, seq_frame, payload = frames
    if len(seq_frame) != SEQ_BYTES:
        raise FrameError("seq_frame")
    seq = int.from_bytes(seq_frame, "big")
    if seq >= _MOST_SEQ:
        raise FrameError("seq_frame" if seq == _END_SEQ else "impossible_seq")
    return NumberedBatch(topic, seq, payload)


def parse_replay(frames: Sequence[bytes]) -> NumberedBatch | None:
    """Read one message of the replay socket: a batch, or None at the end. Raises FrameError."""
    parts = frames[1:] if frames and not frames[0] else frames
    if not 2 <= len(parts) <= 3:
        raise FrameError("replay_frame_count")
    *topic, seq_frame, payload = parts
    if len(seq_frame) != SEQ_BYTES:
        raise FrameError("replay_seq_frame")
    seq = int.from_bytes(seq_frame, "big")
    if seq == _END_SEQ:
        if payload:
            raise FrameError("replay_seq_frame")
        return None
    if seq >= _MOST_SEQ:
        raise FrameError("replay_impossible_seq")
    return NumberedBatch(topic[0] if topic else b"", seq, payload)


def replay_request(from_seq: int) -> list[bytes]:
    """Frames a DEALER sends to be given every buffered batch from `from_seq` on."""
    return [b"", from_seq.to_bytes(SEQ_BYTES, "big")]
