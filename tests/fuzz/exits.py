"""The end of the interpreter while threads call ops: ``python -m tests.fuzz.exits SEED``.

The main thread ends at once. The process must end when the others have, with status 0 and without an error. Daemon
threads are another matter: with those, plain torch aborts ("terminate called without an active exception", torch 2.13,
Python 3.11), whatever they run.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import warnings

from tests.fuzz.machine import SMALL, prepare, targets

THREADS = 6
CALLS = 100  # of each thread


def main(seed: int) -> None:
    """Start the threads, and end while they run."""
    prepare()
    warnings.simplefilter("ignore")
    import fusedops
    from tests.fuzz.pool import Known, known_calls

    dice = random.Random(seed)
    # not on a stand-in, which is Python that the interpreter takes down, and not by an interpreter
    aims = [aim for aim in targets() if aim.device == "cpu" and aim.elements > SMALL]
    first = dice.randrange(len(aims))
    calls = known_calls([*aims[first:], *aims[:first]][:THREADS], (), dice, 1)
    running = threading.Barrier(THREADS + 1)

    def work(number: int) -> None:
        known: Known = calls[number % len(calls)]
        running.wait()
        with fusedops.use(known.target.backend):
            for _ in range(CALLS):
                if known.run() != known.bits[known.target.backend]:
                    raise AssertionError(f"got other bits for {known.target}")

    for number in range(THREADS):
        threading.Thread(target=work, args=(number,)).start()
    running.wait()
    time.sleep(dice.choice((0.0, 0.001, 0.01, 0.1)) * dice.random())


if __name__ == "__main__":
    main(int(sys.argv[1]))
