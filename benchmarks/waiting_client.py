"""A client that waits for answers, in a process of its own: whatever keeps it waiting is in its times.

`python -m benchmarks.waiting_client SOCKET PAUSE QUESTION` asks over a socket (a descriptor, or a path)
again and again, about PAUSE seconds apart, until its standard input ends. Then it prints how long each
answer took.
"""

import asyncio
import json
import random
import select
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def waiting_client(
    where: str | int, pause_s: float, question: str
) -> AsyncIterator[list[float]]:
    """Seconds of each answer are in the list when the block has ended."""
    waits_s: list[float] = []
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.waiting_client", str(where), str(pause_s), question),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
        pass_fds=(where,) if isinstance(where, int) else (),
    )
    assert client.stdout is not None  # noqa: S101 - for the types
    await client.stdout.readline()
    yield waits_s
    printed, _ = await client.communicate(b"")  # which ends its input
    waits_s += json.loads(printed)


def main() -> None:
    """Ask until nobody wants to know any more."""
    where, pause_s, question = sys.argv[1], float(sys.argv[2]), sys.argv[3].encode()
    dice = random.Random(1)  # noqa: S311 - a workload, not a secret
    waits_s: list[float] = []
    with socket.socket(fileno=int(where)) if where.isdigit() else _connected(where) as asked:
        print("asking", flush=True)
        while not select.select([sys.stdin], [], [], dice.uniform(0.5, 1.5) * pause_s)[0]:
            start_s = time.perf_counter()
            asked.sendall(question)
            asked.recv(64)
            waits_s.append(time.perf_counter() - start_s)
    print(json.dumps(waits_s))


def _connected(path: str) -> socket.socket:
    asked = socket.socket(socket.AF_UNIX)
    asked.connect(path)
    return asked


if __name__ == "__main__":
    main()
