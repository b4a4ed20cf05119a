"""Everything that is timed: python tests/bench.py NAME [--key=value …], where NAME is a function below.

Each benchmark prints its numbers and ends with one line of JSON. What is compared takes turns in one run, as a machine is not equally fast
all the time."""
import inspect
import json
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# ---------------------------------------------------------------------------------------------------------------------------------
# sample.py


# ---------------------------------------------------------------------------------------------------------------------------------
# grpo.py


# ---------------------------------------------------------------------------------------------------------------------------------
# workers.py


def client(workflows=256, steps=3, latency=0.05):
    """Chains of calls, as workflows make them, all at once over five workers that take `latency` seconds: wall time beside the least
    possible, and this process's CPU time of a call."""
    from workers import load_pool, local_server
    workflows, steps, latency = int(workflows), int(steps), float(latency)
    pool = load_pool("local", local_server(latency)[0])

    def chain(k):
        for i in range(steps):
            pool[(k + i) % len(pool)].chat([{"role": "user", "content": "Question:\nWhat is 6 * 7?\n\nYour task:\nWork it out."}])

    with ThreadPoolExecutor(workflows) as threads:
        list(threads.map(chain, range(workflows)))  # opens the connections and starts the threads
        begun, before = time.monotonic(), os.times()
        list(threads.map(chain, range(workflows)))
        wall, cpu = time.monotonic() - begun, sum(os.times()[:2]) - sum(before[:2])
    calls, slots = workflows * steps, sum(worker.concurrency for worker in pool)
    print(json.dumps({"calls": calls, "at_a_time": slots, "latency_ms": 1000 * latency, "wall_seconds": round(wall, 4),
                      "times_the_least": round(wall / (math.ceil(calls / slots) * latency), 3),
                      "client_cpu_ms_per_call": round(1000 * cpu / calls, 3)}))


# ---------------------------------------------------------------------------------------------------------------------------------
# eval.py


# ---------------------------------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    here = {name: f for name, f in vars(sys.modules["__main__"]).items() if inspect.isfunction(f) and f.__module__ == "__main__"}
    if sys.argv[1:2] == [] or sys.argv[1] not in here:
        raise SystemExit(f"usage: python tests/bench.py NAME [--key=value …], with NAME one of {', '.join(here) or '(none yet)'}")
    here[sys.argv[1]](**dict(flag.removeprefix("--").split("=", 1) for flag in sys.argv[2:]))
