"""16 threads that call ops under changing policies, while backends come and go: ``python -m tests.fuzz.threads SEED``.

Each result must be, bit for bit, what the backend gives that the thread's own policy names. Without a policy of the
thread it must be what one of the backends gives.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
import traceback
import warnings

from tests.fuzz.machine import SMALL, prepare, targets

THREADS = 16
ROUNDS = 5  # of each thread: each run of the program has other calls
_PASSING = ("passing_a", "passing_b", "passing_c")


def main(seed: int) -> int:
    """Run the threads; return the number of those that failed."""
    prepare()
    warnings.simplefilter("ignore")
    import loopback

    import fusedops
    from tests.fuzz.pool import Known, known_calls

    aims = targets()
    passing = [loopback.backend(name) for name in _PASSING]
    fusedops.register(passing[0])
    drawn = [random.Random(f"{seed}:{number}").choices(aims, k=ROUNDS) for number in range(THREADS)]
    wanted = [*dict.fromkeys(itertools.chain(*drawn))]
    calls = {known.target: known for known in known_calls(wanted, _PASSING[:1], random.Random(seed), 1)}
    fusedops.unregister(_PASSING[0])
    fast = [aim.backend for aim in aims if aim.elements > SMALL]
    done = threading.Event()
    failures: list[str] = []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def once(known: Known, dice: random.Random) -> None:
        name, way = known.target.backend, dice.randrange(6)
        gone = dice.choice(_PASSING)
        if way == 0:
            found, allowed = known.run(name), [known.bits[name]]
        elif way == 1:
            with fusedops.use(name, fallback=dice.choice(("raise", "silent"))):
                found, allowed = known.run(), [known.bits[name]]
        elif way == 2:
            with fusedops.use(f"{known.target.op}={name}"), fusedops.use(adapt="pad"):
                found, allowed = known.run(), [known.bits[name]]
        elif way == 3:
            other = dice.choice([each for each in known.bits if each in fast])
            with fusedops.use(other):
                first = known.run()
                with fusedops.use(fusedops.get_policy()):
                    found, allowed = known.run(name), [known.bits[name]]
                if first != known.bits[other]:
                    raise AssertionError(f"got other bits than {other}'s under use({other!r})")
        elif way == 4:
            found, allowed = known.run(), [*known.bits.values()]
        else:  # a backend that may be gone: before its name is read, or between the call and its backward
            try:
                found = known.run(gone)[: known.outputs]
            except (fusedops.PolicyError, fusedops.NoBackendError):
                return
            allowed = [bits[: known.outputs] for bits in known.bits.values()]
        if found not in allowed:
            raise AssertionError(f"got other bits than {name}'s for {known.target}, way {way}")

    def work(number: int) -> None:
        dice = random.Random(f"{seed}:{number}")
        try:
            for known in [calls[aim] for aim in drawn[number] if aim in calls]:
                if known.target.elements <= SMALL:  # an interpreter: a call takes long, and once may make three
                    with fusedops.use(known.target.backend):
                        if known.run() != known.bits[known.target.backend]:
                            raise AssertionError(f"got other bits for {known.target}")
                else:
                    once(known, dice)
        except BaseException:
            failures.append(traceback.format_exc())

    def change() -> None:
        dice, first = random.Random(seed), next(iter(calls.values()))
        try:
            while not done.is_set():
                plugin = dice.choice(passing)
                fusedops.register(plugin)
                fusedops.set_policy(dice.choice([None, *fast]), fallback=dice.choice(("silent", None)))
                fusedops.backends()
                fusedops.stats()
                first.decision()
                fusedops.unregister(plugin.name)
        except BaseException:
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    changing = threading.Thread(target=change)
    for thread in (changing, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    changing.join()
    sys.setswitchinterval(before)
    print("\n".join(dict.fromkeys(failures)), file=sys.stderr)
    return len(failures)


if __name__ == "__main__":
    sys.exit(min(main(int(sys.argv[1])), 100))
