"""A client that waits for answers, in a process of its own: `python -m benchmarks.waiting_client FD SECONDS PAUSE`.

It asks over a socket, one byte each way, again and again after a pause, and prints how long each answer
took: everything that kept it waiting is in it.
"""

import json
import random
import socket
import sys
import time


def main() -> None:
    """Ask until the time is over."""
    descriptor, length_s, pause_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    dice = random.Random(1)  # noqa: S311 - a workload, not a secret
    waits_s: list[float] = []
    with socket.socket(fileno=descriptor) as asked:
        end_s = time.perf_counter() + length_s
        while time.perf_counter() < end_s:
            time.sleep(dice.uniform(0.5, 1.5) * pause_s)
            start_s = time.perf_counter()
            asked.send(b"?")
            asked.recv(1)
            waits_s.append(time.perf_counter() - start_s)
    print(json.dumps(waits_s))


if __name__ == "__main__":
    main()
