"""Takes what has come in on a socket, a bounded number at a time."""

import zmq

BURST_MESSAGES = 256


def drain(socket: "zmq.Socket[bytes]") -> list[list[bytes]]:
    """Messages that are there, frames of each. More than a burst stay for the next turn."""
    messages: list[list[bytes]] = []
    try:
        while len(messages) < BURST_MESSAGES:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        pass
    return messages
