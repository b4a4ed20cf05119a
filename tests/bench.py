"""Everything that is timed: python tests/bench.py NAME [--key=value …], where NAME is a function below.

Each benchmark prints its numbers and ends with one line of JSON. What is compared takes turns in one run, as a machine is not equally fast
all the time."""
import importlib.util
import inspect
import json
import os
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# ---------------------------------------------------------------------------------------------------------------------------------
# sample.py


# ---------------------------------------------------------------------------------------------------------------------------------
# grpo.py


# ---------------------------------------------------------------------------------------------------------------------------------
# workers.py


# ---------------------------------------------------------------------------------------------------------------------------------
# eval.py


def sandbox(solutions="60", tests="100", against=""):
    """How many small solutions a second the sandbox takes, with one at a time on each core, and how much CPU time a test costs in a solution
    of many tests. against=FILE compares with another edition of eval.py, turn by turn."""
    import eval as evaluation

    editions = {"here": evaluation}
    if against:
        editions["there"] = load_edition(against)
    program = """
def count(words):
    seen = {}
    for word in words:
        seen[word] = seen.get(word, 0) + 1
    return [list(pair) for pair in sorted(seen.items())]
"""
    words = [[], ["a"], ["a", "b", "a"], ["x"] * 50, [*"abracadabra"], [*"mississippi"], ["", " "]]
    few = [[json.dumps(w), json.dumps(sorted(map(list, Counter(w).items())))] for w in words]
    many = [[f"{i}\n", f"{i + 1}\n"] for i in range(int(tests))]
    cores = len(os.sched_getaffinity(0))
    numbers = {name: {"per_second": [], "cpu_ms_per_test": []} for name in editions}
    turns = 3
    for _ in range(turns):
        for name, edition in editions.items():
            begun = time.perf_counter()
            with ThreadPoolExecutor(cores) as threads:
                passed = list(threads.map(lambda _: edition.passes_livecodebench(program, few, "count"), range(int(solutions) // turns)))
            numbers[name]["per_second"].append(len(passed) / (time.perf_counter() - begun))
            before = os.times()
            passed.append(edition.passes_livecodebench("print(int(input()) + 1)", many))
            after = os.times()
            used = sum(after[:4]) - sum(before[:4])
            numbers[name]["cpu_ms_per_test"].append(1000 * used / len(many))
            assert all(passed), "a right solution did not pass"
    found = {"cores": cores}
    for name, measured in numbers.items():
        found[name] = {what: round(statistics.median(values), 2) for what, values in measured.items()}
        print(f"{name}: {found[name]['per_second']} solutions a second, {found[name]['cpu_ms_per_test']} ms of CPU a test")
    print(json.dumps(found))


def load_edition(path):
    """Another eval.py as a module beside this one."""
    spec = importlib.util.spec_from_file_location("other_eval", path)
    module = sys.modules["other_eval"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    here = {name: f for name, f in vars(sys.modules["__main__"]).items() if inspect.isfunction(f) and f.__module__ == "__main__"}
    if sys.argv[1:2] == [] or sys.argv[1] not in here:
        raise SystemExit(f"usage: python tests/bench.py NAME [--key=value …], with NAME one of {', '.join(here) or '(none yet)'}")
    here[sys.argv[1]](**dict(flag.removeprefix("--").split("=", 1) for flag in sys.argv[2:]))
