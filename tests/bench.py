"""Everything that is timed: python tests/bench.py NAME [--key=value …], where NAME is a function below.

Each benchmark prints its numbers and ends with one line of JSON. What is compared takes turns in one run, as a machine is not equally fast
all the time."""
import inspect
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# ---------------------------------------------------------------------------------------------------------------------------------
# sample.py


# ---------------------------------------------------------------------------------------------------------------------------------
# grpo.py


# ---------------------------------------------------------------------------------------------------------------------------------
# workers.py


# ---------------------------------------------------------------------------------------------------------------------------------
# eval.py


# ---------------------------------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    here = {name: f for name, f in vars(sys.modules["__main__"]).items() if inspect.isfunction(f) and f.__module__ == "__main__"}
    if sys.argv[1:2] == [] or sys.argv[1] not in here:
        raise SystemExit(f"usage: python tests/bench.py NAME [--key=value …], with NAME one of {', '.join(here) or '(none yet)'}")
    here[sys.argv[1]](**dict(flag.removeprefix("--").split("=", 1) for flag in sys.argv[2:]))
