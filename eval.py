"""Problems, graders, baselines and tables.

    python eval.py --checkpoint=DIR      the Conductor beside every single worker and random workflows, on held-out problems
    python eval.py --benchmarks=A --systems=B     other problems, other systems (README)
    python eval.py prepare               fetch the training data (1.6 GB), write data/paper.jsonl and data/recursion.jsonl
    python eval.py plot RUN              draw a run's learning into RUN/curve.png, of FILE.json cost and accuracy (needs matplotlib)
    python eval.py average FILE …        mean and 95 % interval of the numbers that several evaluations wrote with --out

The laptop world's problems are generated here: some need one of the local specialists (workers.py), some two, some three in the right
order and with the right access lists. Read train.py next.
"""
import ast
import atexit
import base64
import cmath
import contextlib
import ctypes
import errno
import fcntl
import functools
import gc
import hashlib
import inspect
import io
import itertools
import json
import marshal
import math
import operator
import os
import pickletools
import queue
import random
import re
import resource
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
import warnings
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from multiprocessing.pool import ThreadPool

import torch
from requests.adapters import HTTPAdapter, Retry
from tqdm import tqdm

from model import Qwen, Tokenizer, configure, download, hub_session, read_json, write_json
from sample import generate
from workers import ARITHMETIC, CAPITALS, ELEMENTS, FACTS, LOCAL, SKILL, SPANISH, SPELLING, WorkerError, load_pool
import workflow
from workflow import Step, Trace, Workflow, WorkflowError, ask, parse, submit, subset

# ---------------------------------------------------------------------------------------------------------------------------------
# Problems


@dataclass
class Problem:
    id: str
    question: str
    answer: str
    kind: str  # what tables group by
    grader: str = "exact"  # a key of ASK
    level: int = 0  # the larger, the harder; 0: unknown
    extra: dict = field(default_factory=dict)  # what its grader needs besides: EXTRA


def laptop_expressions() -> dict[str, list[tuple[str, str]]]:
    """Every (expression, value) of the laptop world by kind, in a fixed order."""
    words = ("planet river garden window market silver dragon castle forest bridge winter summer orange yellow purple candle basket "
             "rocket guitar violin doctor farmer sailor pirate monkey rabbit turtle spider butter cheese pepper ginger cotton velvet marble "
             "copper bronze tunnel harbor island desert valley meadow canyon glacier volcano thunder shadow mirror").split()
    number = {e: FACTS[f"the atomic number of {e}"] for e in ELEMENTS}

    def apply(a, op, b):
        return str(ARITHMETIC[op](int(a), int(b)))

    return {
        # one specialist
        "arithmetic": [(f"{a} {op} {b}", apply(a, op, b)) for a in range(2, 40) for b in range(2, 40) for op in ARITHMETIC],
        "fact": list(FACTS.items()),
        "string": [(f"{w} {op}", f(w)) for w in words for op, f in SPELLING.items()],
        "number": list(SPANISH.items()),
        # two, each seeing the one before
        "foreign": [(f"{a} {op} {b}", apply(SPANISH[a], op, SPANISH[b])) for a in SPANISH for b in SPANISH for op in ARITHMETIC],
        "fact+arithmetic": [(f"the atomic number of {e} {op} {b}", apply(number[e], op, b))
                            for e in ELEMENTS for b in range(2, 40) for op in ARITHMETIC],
        "fact+string": [(f"the capital of {c} {op}", f(CAPITALS[c])) for c in CAPITALS for op, f in SPELLING.items()],
        # three
        "foreign+fact+arithmetic": [(f"the atomic number of {e} {op} {b}", apply(number[e], op, SPANISH[b]))
                                    for e in ELEMENTS for b in SPANISH for op in ARITHMETIC],
    }


def laptop_problems(split: str) -> list[Problem]:
    """The laptop world: a quarter of each kind's expressions is for "test", the others for "train", whatever the sentence around them."""
    problems = []
    for kind, pairs in laptop_expressions().items():
        for expression, value in pairs:
            if (zlib.crc32(expression.encode()) % 4 == 0) == (split == "test"):
                problems += [Problem(f"{kind}/{expression}/{i}", frame.format(expression), value, kind)
                             for i, frame in enumerate(("What is {}?", "Find {}.", "Tell me {}.", "Give me {}."))]
    return problems


NEEDS = {"arithmetic": ["calculator"], "fact": ["librarian"], "string": ["coder"], "number": ["translator"],
         "foreign": ["translator", "calculator"], "fact+arithmetic": ["librarian", "calculator"], "fact+string": ["librarian", "coder"],
         "foreign+fact+arithmetic": ["librarian", "translator", "calculator"]}


def possible(problem: Problem, pool: list) -> float:
    """How often the best workflow over these local specialists answers a laptop problem right: where an apt one is there, always."""
    skill = {trade: max((SKILL[kind] for kind, _, name in (w.name.rpartition(" ") for w in pool) if name == trade), default=0.0)
             for trade in NEEDS[problem.kind]}
    return math.prod(skill.values())


def draw_pool(problem: Problem, pool: list, k: int, rng: random.Random) -> list:
    """k of the local specialists by chance, in the pool's order, among which are some who can solve the problem."""
    able = [team for team in itertools.combinations(pool, min(k, len(pool))) if possible(problem, team)]
    if not able:
        raise ValueError(f"no {k} of {', '.join(w.name for w in pool)} can solve {problem.question!r}")
    return [*rng.choice(able)]


def interleave(problems: list[Problem], rng: random.Random) -> list[Problem]:
    """Shuffle, with the kinds taking turns for as long as the smallest lasts; a small kind starts again until the largest is through."""
    kinds = {}
    for p in problems:
        kinds.setdefault(p.kind, []).append(p)
    for group in kinds.values():
        rng.shuffle(group)
    most = max(map(len, kinds.values()))
    return [group[i % len(group)] for i in range(most) for group in kinds.values()]


# Benchmarks: rows of public data sets, fetched once

DATA = "data"  # in the current directory: what is fetched, and what `prepare` writes. Not to be passed on: RLPR's licence is CC BY-NC 4.0
SOURCES = {  # (name, split): data set on the Hugging Face hub; config/split or a JSONL file of it; rows; MB to fetch
    ("math500", "train"): ("DigitalLearningGmbH/MATH-lighteval", "default/train", 7500, 8),  # MATH (Hendrycks et al. 2021)
    ("math500", "test"): ("HuggingFaceH4/MATH-500", "default/test", 500, 0.6),  # from MATH's test split
    ("mmlu", "train"): ("cais/mmlu", "all/validation", 1531, 1),  # the same 57 subjects; its auxiliary_train is other benchmarks'
    ("mmlu", "test"): ("cais/mmlu", "all/test", 14042, 9),
    ("rlpr", "train"): ("openbmb/RLPR-Train-Dataset", "default/train", 77687, 200),
    ("rlpr", "test"): ("openbmb/RLPR-Train-Dataset", "default/train", 77687, 200),
    ("livecodebench", "train"): ("livecodebench/code_generation_lite", "test.jsonl", 400, 1253),  # V1: May 2023 to March 2024
    ("livecodebench", "test"): ("livecodebench/code_generation_lite", "test6.jsonl", 175, 134),  # what V6 added, up to April 2025
    ("aime25", "test"): ("yentinglin/aime_2025", "default/train", 30, 0.1),  # as in Lighteval
    ("bigcodebench", "test"): ("bigcode/bigcodebench-hard", "default/v0.1.4", 148, 1.4),
    ("gpqa", "test"): ("Idavidrein/gpqa", "gpqa_diamond/train", 198, 1.4),  # as in Lighteval; gated
}
RLPR_TEST = 15540  # rows (App. A.2), a fifth; the paper does not tell which
MIXES = {"paper": {"math500": 240, "mmlu": 240, "rlpr": 240, "livecodebench": 240}, "recursion": {"livecodebench": 175, "rlpr": 175}}
BLOCK = "Put all of it, imports included, in one ```python block."
ASK = {  # what is asked for, by grader; files already in DATA keep the words they were made with
    "exact": "", "math": "Put the final answer in \\boxed{}.", "letter": "Put the letter of the right option in <answer> tags.",
    "short": "Put the final answer, as short as possible, in <answer> tags.", "unittest": f"Complete the code above. {BLOCK}",
    "code": f"Write a Python program that reads from standard input and writes to standard output. {BLOCK}"}
EXTRA = {"letter": ("choices",), "code": ("function", "tests"), "unittest": ("test", "entry_point", "code_prompt")}  # that a grader needs
TESTS_MAX = 1 << 29  # bytes of one problem's hidden tests, unpacked


def load(name: str, split: str, limit: int | None = None) -> list[Problem]:
    """Problems of "laptop", a benchmark in SOURCES, a mix in MIXES or a JSONL file (see read_problems); split is "train" or "test".

    They are shuffled by a fixed seed with the kinds taking turns, so that a slice of a multiple of the number of kinds holds each equally
    often; but a JSONL file keeps its order and has one split. A mix is what `prepare` wrote and is tested by its parts' tests.
    OSError tells what was not fetched and how to bring it by hand, ValueError what is wrong where."""
    if name.endswith(".jsonl") or name in MIXES and split == "train":
        return read_problems(os.path.join(DATA, name + ".jsonl") if name in MIXES else name)[:limit]
    if name == "laptop" and split in ("train", "test"):
        problems = laptop_problems(split)
    elif name in MIXES and split == "test":
        problems = [p for part in MIXES[name] for p in load(part, split)]
    elif (name, split) in SOURCES:
        file = os.path.join(DATA, f"{name}-{split}.jsonl")
        problems = read_problems(file) if os.path.exists(file) else write_problems(file, benchmark(name, split))
    else:
        known = "laptop", *MIXES, *(f"{n} ({s})" for n, s in SOURCES), "files *.jsonl"
        raise ValueError(f"no problems {name!r}, split {split!r}: there are {', '.join(known)}")
    return interleave(problems, random.Random(0))[:limit]


def read_problems(file: str) -> list[Problem]:
    """A line is a JSON object with the strings question, answer, kind, and if wanted Problem's other fields; a kind named like a grader is
    graded by it. FILE.sha256, if there is one, must agree."""
    if not os.path.exists(file):
        raise FileNotFoundError(f"{file} is missing" + "; python eval.py prepare writes it" * file.startswith(DATA + os.sep))
    with open(file, "rb") as f:
        data, problems = f.read(), []
    if os.path.exists(file + ".sha256"):
        with open(file + ".sha256") as f:
            if f.read(64) != hashlib.sha256(data).hexdigest():
                raise ValueError(f"{file} was damaged or edited, it is not what {file}.sha256 says: remove both, and it can be made again")
    for n, line in enumerate(data.splitlines(), 1):
        try:
            row = {"id": f"{os.path.basename(file)}/{n}", **json.loads(line)}
            if wrong := [key for key in ("id", "question", "answer", "kind") if not isinstance(row.get(key), str)]:
                raise ValueError(f"{', '.join(wrong)} missing or not a string")
            problems.append(Problem(**{"grader": row["kind"] if row["kind"] in ASK else "exact", **row}))
            if (grader := problems[-1].grader) not in list(ASK):
                raise ValueError(f"no grader {grader!r}, there are {', '.join(ASK)}")
            answer, extra = problems[-1].answer, problems[-1].extra
            if not isinstance(extra, dict):
                raise ValueError("extra is not an object")
            if lacks := [key for key in EXTRA.get(grader, ()) if key not in extra]:
                raise ValueError(f"the grader {grader} needs {', '.join(lacks)} in extra")
            choices, tests = extra.get("choices"), extra.get("tests")
            if grader == "letter":
                if not isinstance(choices, list) or {*map(type, choices)} != {str} or not 2 <= len(choices) <= len(LETTERS):
                    raise ValueError(f"choices are 2 to {len(LETTERS)} texts")
                if answer not in [*LETTERS[:len(choices)]]:
                    raise ValueError(f"the answer {answer!r} is none of the letters A to {LETTERS[len(choices) - 1]}")
            if grader == "code" and not isinstance(tests, dict) and not (
                    tests and isinstance(tests, list) and all(isinstance(test, list) and [*map(type, test)] == [str, str] for test in tests)):
                raise ValueError("tests are a list of pairs of texts, [input, output]")
        except (ValueError, TypeError, RecursionError) as e:
            raise ValueError(f"{file}, line {n}: {e}") from None
    if not problems:
        raise ValueError(f"{file} is empty")
    return problems


def write_problems(file: str, problems: list[Problem]) -> list[Problem]:
    """Write what read_problems reads, whole or not at all, and its sha256 beside it as sha256sum does."""
    data = "".join(json.dumps(asdict(p)) + "\n" for p in problems).encode()
    for path, content in ((file + ".sha256", f"{hashlib.sha256(data).hexdigest()}  {os.path.basename(file)}\n".encode()), (file, data)):
        with open(path + ".tmp", "wb") as f:
            f.write(content)
        os.replace(path + ".tmp", path)
    return problems


def benchmark(name: str, split: str) -> list[Problem]:
    """A benchmark from its data set's rows, which are fetched unless they are there."""
    repository, what, count, megabytes = SOURCES[name, split]
    file, page = os.path.join(DATA, repository, what.replace("/", "-")), f"https://huggingface.co/datasets/{repository}"
    file += ".jsonl" * ("/" in what)
    try:
        fetch_rows(repository, what, count, file)
    except (OSError, KeyError, TypeError, ValueError) as e:
        hand = f"the rows of its config/split {what} as lines of JSON" if "/" in what else f"{page}/resolve/main/{what}"
        raise OSError(f"{file} lacks rows of {page} ({count:,}, {megabytes} MB): {type(e).__name__}: {e}\nTry again to go on where it "
                      f"stopped, or put there {hand}. If the page asks to accept terms, do that and set HF_TOKEN.") from e
    try:
        with open(file, "rb") as f:
            problems = [problem(name, n, json.loads(line), {"file": file, "at": f.tell() - len(line)}) for n, line in enumerate(f)]
        if len(problems) != count:
            raise ValueError(f"{len(problems):,} rows")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as e:
        raise ValueError(f"{file} has not the {count:,} rows that {page} had ({type(e).__name__}: {e}): remove it, try again") from e
    if name == "rlpr":
        problems.sort(key=lambda p: zlib.crc32(p.question.encode()))  # whatever the order of the rows; equal questions stay together
        problems = problems[:RLPR_TEST] if split == "test" else problems[RLPR_TEST:]
    return problems


def fetch_rows(repository: str, what: str, count: int, file: str):
    """Bring a data set's rows into a JSONL file that grows over retries and runs: from its own JSONL file, or page by page.

    GET /rows?dataset=&config=&split=&offset=&length= gives at most 100 rows: {"features", "rows": [{"row_idx", "row", "truncated_cells"}],
    "num_rows_total", "num_rows_per_page", "partial"}, or {"error"} with a status (huggingface.co/docs/dataset-viewer/rows). A rate limit
    is over in five minutes (huggingface.co/docs/hub/rate-limits); so long it is tried."""
    server = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/").replace("https://", "https://datasets-server.")
    with hub_session() as hub:
        if "/" not in what:
            return download(hub, "datasets/" + repository, os.path.dirname(file), what)
        hub.mount(server, HTTPAdapter(max_retries=Retry(8, connect=2, backoff_factor=2, status_forcelist=(429, 500, 502, 503, 504))))
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(file, "a+b") as f, tqdm(total=count, desc=file, unit=" rows") as bar:
            f.seek(0)
            lines, newline, _ = f.read().rpartition(b"\n")
            f.truncate(len(lines + newline))  # a kill can tear the last line
            done = lines.count(b"\n") + len(newline)
            bar.update(done)
            while done < count:
                n = min(100, count - done)
                wanted = dict(zip(("dataset", "config", "split"), (repository, *what.split("/"))), offset=done, length=n)
                answer = hub.get(f"{server}/rows", params=wanted, timeout=60)
                if not answer.ok:
                    raise OSError(f"{answer.url}: HTTP {answer.status_code} {answer.text[:300]}")
                page = answer.json()
                if [page["num_rows_total"], *((row["row_idx"], row["truncated_cells"]) for row in page["rows"])] != [
                        count, *((done + i, []) for i in range(n))]:
                    raise ValueError(f"{answer.url} gives other rows than asked for, or not of {count:,}")
                f.write(b"".join(json.dumps(row["row"]).encode() + b"\n" for row in page["rows"]))
                done += n
                bar.update(n)


def problem(name: str, n: int, row: dict, place: dict) -> Problem:
    """The n-th row as a problem. Columns as told by the data sets' cards, for RLPR by that of CohleM/rlpr_exp, which keeps them."""
    key, answer, level, extra, code = n, "", 0, {}, ""
    if name in ("math500", "aime25"):
        grader, question, answer = "math", row["problem"], str(row["answer"] if "answer" in row else committed(row["solution"]) or "")
        if not answer:
            raise ValueError("a solution without \\boxed{}")
        level = int(str(row.get("level", 0)).removeprefix("Level ").replace("?", "0"))
    elif name == "rlpr":
        grader, question, answer = "short", row["prompt"][1]["content"], row["reward_model"]["ground_truth"]
        level = row["extra_info"]["reasoning_score"] or 0
    elif name == "mmlu":
        grader, question, answer, extra = "letter", row["question"], "ABCD"[row["answer"]], {"choices": row["choices"]}
    elif name == "gpqa":
        order, options = random.Random(n).sample(range(4), 4), [row["Correct Answer"], *(row[f"Incorrect Answer {i}"] for i in (1, 2, 3))]
        grader, question, answer = "letter", row["Question"], "ABCD"[order.index(0)]
        extra = {"choices": [options[i].strip() for i in order]}
    elif name == "bigcodebench":
        grader, key, question, code = "unittest", row["task_id"], "", row["complete_prompt"]
        extra = {column: row[column] for column in ("test", "entry_point", "code_prompt")}
    else:
        grader, key, question, code = "code", row["question_id"], row["question_content"], row["starter_code"]
        level = ["easy", "medium", "hard"].index(row["difficulty"]) + 1
        extra = {"function": json.loads(row["metadata"]).get("func_name"), "tests": place}
    options = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", extra.get("choices", "")))
    code, ask = (f"```python\n{code.strip()}\n```", ASK["unittest"]) if code.strip() else ("", ASK[grader])
    return Problem(f"{name}/{key}", "\n\n".join(filter(None, (question.strip(), options, code, ask))), answer, name, grader, level, extra)


@functools.lru_cache(2)
def stored_tests(id: str, file: str, at: int) -> list[list[str]]:
    """[input, output] of each test of a LiveCodeBench problem, from its row in the file as it is needed: those of one can take hundreds of
    MB. Where the problem has a function, input is its arguments, each a line of JSON, and output its result."""
    try:
        with open(file, "rb") as f:
            f.seek(at)
            row = json.loads(f.readline())
        if id != f"livecodebench/{row['question_id']}":
            raise ValueError(f"there stands {row['question_id']}")
        hidden = row["private_test_cases"]
        tests = json.loads(row["public_test_cases"]) + json.loads(hidden if hidden.startswith("[") else unpack(hidden))
        return [[test["input"], test["output"]] for test in tests]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, zlib.error) as e:
        raise ValueError(f"{file}, byte {at}: no tests of {id} ({type(e).__name__}: {e}); remove {DATA}/ and fetch it again") from e


def unpack(text: str) -> str:
    """The string in base64 of zlib of pickle (lcb_runner/benchmarks/code_generation.py of LiveCodeBench). The pickle is not run but taken
    apart: besides one string and the marks around it nothing is admitted."""
    unzip = zlib.decompressobj()
    data = unzip.decompress(base64.b64decode(text, validate=True), TESTS_MAX)
    if not unzip.eof:
        raise ValueError(f"cut off, or more than {TESTS_MAX:,} bytes")
    marks = {op.name: value for op, value, _ in itertools.islice(pickletools.genops(data), 8)}
    found = marks.keys() - {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"}
    if len(found) != 1 or not found < {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"} or "STOP" not in marks:
        raise ValueError(f"a pickle of {', '.join(marks)}, not of one string")
    return marks[found.pop()]


def prepare():
    """Write the mixes: of each part's train problems those whose question no test has, the hardest first where levels are known, by a fixed
    seed among equals."""
    for mix, shares in MIXES.items():
        rng, chosen = random.Random(mix), []
        for name, n in shares.items():
            tested = {p.question for p in load(name, "test")}
            pool = [p for p in load(name, "train") if p.question not in tested]
            chosen += sorted(rng.sample(pool, len(pool)), key=lambda p: -p.level)[:n]
        write_problems(os.path.join(DATA, mix + ".jsonl"), interleave(chosen, rng))
        levels = Counter(f"{p.kind}, level {p.level or 'unknown'}" for p in chosen)
        print(f"{DATA}/{mix}.jsonl: {len(chosen)} problems", *(f"{n:7} {level}" for level, n in sorted(levels.items())), sep="\n")


# ---------------------------------------------------------------------------------------------------------------------------------
# Grading


def grade(problem: Problem, response: str) -> bool:
    """Whether a response answers the problem, by the problem's grader."""
    gold, extra = problem.answer, problem.extra
    if problem.grader == "code":
        tests = extra["tests"] if isinstance(extra["tests"], list) else stored_tests(problem.id, **extra["tests"])
        return passes_livecodebench(extract_code(response), tests, extra["function"])
    if problem.grader == "unittest":
        return passes_bigcodebench(extract_code(response), extra["test"], extra["entry_point"], extra["code_prompt"])
    if problem.grader == "letter":
        return pick_letter(response, extra["choices"]) == gold
    if problem.grader in ("math", "short"):
        return {"math": same_math, "short": same_short}[problem.grader](final_answer(response), gold)
    head, end, _ = response.rpartition("</answer>")
    return (head.rpartition("<answer>")[2] if end and "<answer>" in head else response).strip() == gold


# ---------------------------------------------------------------------------------------------------------------------------------
# Graders of text: mathematics, letters, short answers. What they read was written by a model, and none of it is run.

LETTERS = "ABCDEFGHIJ"  # of the choices
LONGEST, BITS = 1000, 1000  # characters of an answer, bits of a number: beyond, only text is compared (sympy hangs at 5^{5^{5^5}})
LEVELS = {",": 0, "∪": 1, "=": 2, **dict.fromkeys("+-±∓", 3), "*": 4, "/": 4, "^": 5}  # of precedence
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
TOKEN = re.compile(r"(?:\d+(?:\.\d+)?|\.\d+)(?:_\w+)?|\\[A-Za-z]+|#[^#]*#|[A-Za-z]{4,}|[A-Za-z](?:_\w+)?'*|\S")  # 11_2 is a symbol
FUNCTIONS = {"\\" + f.__name__: f for f in (cmath.sin, cmath.cos, cmath.tan, cmath.sinh, cmath.cosh, cmath.tanh, cmath.exp, abs)} | {
    r"\ln": cmath.log, r"\log": cmath.log10, r"\arcsin": cmath.asin, r"\arccos": cmath.acos, r"\arctan": cmath.atan,
    r"\cot": lambda z: 1 / cmath.tan(z), r"\sec": lambda z: 1 / cmath.cos(z), r"\csc": lambda z: 1 / cmath.sin(z)}
CONSTANTS = {"e": math.e, "i": 1j, "π": math.pi, "∞": math.inf}
UNICODE = str.maketrans(dict(zip("×·÷−–²³√&~$#", ["*", "*", "/", "-", "-", "^2", "^3", r"\sqrt ", ",", " ", "", ""])))
SIGNS = {**dict.fromkeys("left right big Big displaystyle overline angle triangle ! ( ) [ ]".split(), ""),
         **dict.fromkeys([",", ";", ":", " ", "quad", "qquad"], " "), **dict.fromkeys(["dfrac", "tfrac", "cfrac"], r"\frac"),
         **dict(zip("\\ cdot times div pi infty infinity cup pm mp le leq ge geq lt gt in % { } emptyset varnothing".split(),
                    "),( * * / π ∞ ∞ ∪ ± ∓ ≤ ≤ ≥ ≥ < > ∈ % { } {} {}".split()))}
UNITS = dict(pair.split("=") for pair in (
    "foot=ft feet=ft inche=in inch=in mile=mi meter=m metre=m gram=g pound=lb lbs=lb second=s sec=s minute=min hour=h hr=h year=yr yrs=yr liter=L "
    "litre=L newton=N joule=J watt=W volt=V ampere=A amp=A ohm=Ω hertz=Hz pascal=Pa kelvin=K celsiu=C fahrenheit=F mole=mol percent=% dollar=$ "
    "cent=¢ square=2 sq=2 cubic=3 per= unit= degree= way= outcome= different= total=").split())  # without plural; what counts is no unit
PREFIXES = dict(kilo="k", centi="c", milli="m", micro="μ", nano="n", mega="M", giga="G")
COUNTS = {"dozen": 12, "hundred": 100, "thousand": 10 ** 3, "million": 10 ** 6, "billion": 10 ** 9, "trillion": 10 ** 12}


def committed(response: str) -> str | None:
    """What stands in the last \\boxed{} (as in MATH) or <answer>, whichever opens later; "" if it does not close, None without either."""
    response = re.sub(r"\\boxed\s+(\d+)", r"\\boxed{\1}", response)  # as two solutions of MATH have it
    tag, box = response.rfind("<answer>"), max((m.end() for m in re.finditer(r"\\(?:boxed|fbox)\s*\{", response)), default=-1)
    if tag >= box:
        found, end, _ = response[tag + 8:].partition("</answer>")
        return None if tag < 0 else found.strip() if end else ""
    depth = 1
    for m in re.finditer(r"(?s)\\.|[{}]", response[box:]):  # \{ is no brace
        depth += (m[0] == "{") - (m[0] == "}")
        if not depth:
            return response[box:box + m.start()].strip()
    return ""


def final_answer(response: str) -> str:
    """What a response commits to: its last \\boxed{} or <answer>, else what follows its last "answer is" or "answer:", else all of it."""
    found = committed(response)
    said = [response, *re.findall(r"(?i)\banswer\s*(?:is\b|:)[\s:*]*([^\n]*)", response)]
    return (said[-1] if found is None else found).strip("* \n")


def same_math(answer: str, gold: str, tolerance: float = 0.0) -> bool:
    """Whether two answers in LaTeX or plain text mean the same: lists and sets in any order; tuples, intervals and matrices in theirs;
    "x =" and a unit may be missing on one side. Numbers are equal, or real ones within a relative tolerance."""
    a, b = answer.strip(), gold.strip()
    if a == b or max(len(a), len(b)) > LONGEST:
        return a == b != ""
    a, b = tidy(a), tidy(b)
    if ("=" in a) != ("=" in b):
        a = a if "," in a or re.search(r"=\s*0$", a) else a.rpartition("=")[2]  # m + n = 10 + 7 = 17
        name = r"\\?[A-Za-z]+(?:_\w+)?"
        a, b = (re.sub(rf"(^|,)\s*(?:{name}(?:\^\{{-1\}}|'+)?(?:\([^()=]*\))?|\(\s*{name}(?:\s*,\s*{name})+\s*\))\s*=", r"\1", text)
                for text in (a, b))
    x, y = (re.sub(r"#|(?<!\d)\s+|\s+(?!\d)", "", text) for text in (a, b))
    if x == y or re.search(r"#|(?<![\\A-Za-z])[A-Za-z]{3}", a + b) and x.casefold() == y.casefold():
        return x != ""
    (a, u, more), (b, v, others) = quantity(a), quantity(b)
    pairs = [(a, b)]
    if not re.search(r"[(\[{]", a + b):  # commas between thousands, not in a list
        pairs.append([re.sub(r"(?<![\d.,])\d{1,3}(,\d{3})+(?!\d|,\d)", lambda m: m[0].replace(",", ""), text) for text in (a, b)])
    if ["%"] in (u, v) and u != v:  # 20% is 0.2, but the answer to "what percentage?" may be 20
        pairs += [(f"({x})/100", y) if u else (x, f"({y})/100") for x, y in pairs]
    alike = u == v and (more <= others or others <= more) or not (u or more) or not (v or others)
    return alike and any(agree(read(x), read(y), tolerance) for x, y in pairs)


def quantity(text: str) -> tuple[str, list[str], set[str]]:
    """A tidy text without what it counts, the unit of that, and its other words: "5 square miles north" is "5", ["2", "mi"] and {"north"}."""
    def symbol(word):
        prefix, base = re.fullmatch(rf"({'|'.join(PREFIXES)})?(.*)", word).groups()
        return PREFIXES[prefix] + UNITS[base] if prefix and base in UNITS else UNITS.get(word, word)

    word = r"(?:#[^#]*#|%|(?<![A-Za-z])(?:[A-Za-z]{4,}|mm|cm|km|in|ft|mi|kg|mg|sec|min|hr|mph|per)(?![A-Za-z]))"
    m = re.search(rf"(?<=[\w)}}\]])(?:\s*(?:[*/]\s*)?{word}(?:\^\{{?-?\d\}}?)?)+$", text)
    words = [w if len(w) < 4 else w.lower().rstrip("s") for w in re.findall(r"[^\W\d_]+|[%23]", m[0])] if m else []
    words = [*filter(None, map(symbol, words))]
    return text[:m.start()] if m else text, sorted(w for w in words if len(w) < 4), {w for w in words if len(w) > 3}


def tidy(text: str) -> str:
    """LaTeX and plain text in one spelling: one character a sign, #...# for \\text{...}, a matrix as [(row),(row)]."""
    text = text.rstrip(". ").replace(r"\$", "").translate(UNICODE)
    for pattern, new in (
            (r"\^\s*\{?\s*(?:\\circ|°)\s*\}?|\\degree|°", ""), (r"(?<=\d)(?:\{,\}|,\s*\\!)\s*(?=\d{3})", ""),  # thousands
            (r"\\begin\{[pb]matrix\}", "[("), (r"(\\\\)?\s*\\end\{[pb]matrix\}", ")]"),
            (r"\\(?:text\w*|mbox|math(?:rm|bf|it))\s*\{([^{}]*)\}",
             lambda m: m[1] if m[1] in ("e", "i") or not re.search("[A-Za-z]", m[1]) else f"#{m[1].strip()}#"),
            (r"\\([A-Za-z]+|.)", lambda m: SIGNS.get(m[1], m[0])),
            (r"(?<![\\A-Za-z])(sqrt|pi|infinity|(?:arc)?(?:sin|cos|tan)|(?:sin|cos|tan)h|exp|ln|log)(?![A-Za-z])",
             lambda m: SIGNS.get(m[1], "\\" + m[1])),
            (rf"(?<=[\d}}])\s*(#?)\s*({'|'.join(COUNTS)})\b\s*", lambda m: f"*{COUNTS[m[2]]}{m[1]}"), ("##", ""),
            (r",?\s*(?:#(?:and|or)#|\b(?:and|or)\b)|;", ","), (r"_\{(\w*)\}", r"_\1"), (r"^#?\(([A-Z])\)#?$", r"\1"),
            (r"^\s*\\?\w+\s*∈", ""), (r"\|([^|]*)\|", r"\\abs{\1}"), (r"(?<=\d) (?=\d{3}(?!\d))", ""),
            (r"(?<=\d)\s+(\d+)/(\d+)", r"\\frac{\1}{\2}"), (r"\\frac\s*(\d)", r"\\frac{\1}"), (r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}"),
            (r"(?<![\d.^_}])(\d+)\s*\\frac\s*\{(\d+)\}\s*\{(\d+)\}",  # a mixed number
             lambda m: f"({m[1]}+{m[2]}/{m[3]})" if int(m[2]) < int(m[3]) else m[0])):
        text = re.sub(pattern, new, text)
    return text.strip()


def read(text: str) -> Fraction | float | complex | list | None:
    """The value of a tidy text, exact while rational, its variables at a fixed complex point; or [kind, part, ...] of kind "," "{}" "±" "="
    "∪" (in any order) "()" "[)" ... None if it is no mathematics, has no value, or is too large. By precedence climbing."""
    tokens = TOKEN.findall(text)[::-1]

    def expression(level=0, ends=()):
        sign = tokens.pop() if tokens[-1] in ("+", "-", "±", "∓") else ""
        node = infix(sign, Fraction(0), expression(max(level, 4))) if sign else atom()
        while tokens and tokens[-1] not in (")", "]", "}"):
            op = tokens[-1] if tokens[-1] in LEVELS else "*"
            if LEVELS[op] < level or tokens[-1 - (op == tokens[-1])] in ends:
                break
            if op == tokens[-1]:
                tokens.pop()
            elif re.match(r"\d|#|[A-Za-z]{4}", tokens[-1]):
                raise ValueError("numbers or words side by side")
            node = infix(op, node, expression(LEVELS[op] + (op != "^")))
        return node

    def atom():
        token = tokens.pop()
        if token in ("(", "[", "{"):
            node, kind = expression(), token + tokens.pop()
            return [kind, *node[1:]] if isinstance(node, list) and node[0] == "," else node
        if token == r"\frac":
            return infix("/", atom(), atom())
        if token == r"\sqrt":
            n = atom() if tokens[-1] == "[" else 2
            return infix("^", atom(), 1 / Fraction(n))
        if token in FUNCTIONS:  # \sin 2x is \sin(2x), \sin^2 x is (\sin x)^2, \sin^{-1} x is \arcsin x
            power = atom() if tokens[-1] == "^" and tokens.pop() else None
            function = FUNCTIONS[token.replace("\\", r"\arc") if power == -1 else token]
            value = function(complex(atom() if tokens[-1] in ("(", "{") else expression(4, FUNCTIONS)))
            return value if power in (None, -1) else infix("^", value, power)
        if token[0] in ".0123456789" and "_" not in token:
            return infix("+", Fraction(0), Fraction(token))
        if token in CONSTANTS:
            return CONSTANTS[token]
        if token[0].isalnum() or token[0] in "#\\" and "binom" not in token:
            random = zlib.crc32((token.strip("#").casefold() if len(token) > 3 else token).encode()) / 2 ** 32
            return cmath.rect(2 + random, 0.1 + 0.2 * (random * 997 % 1))  # about a positive number: sqrt(xy) = sqrt(x) sqrt(y)
        raise ValueError("no mathematics")

    try:
        node = expression() if text.count("±") + text.count("∓") < 5 else None
        return None if tokens else node
    except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError):
        return None


def infix(op: str, x, y):
    """What an operator makes of two values or lists. ValueError or TypeError where it makes nothing, or too large a number."""
    xs, ys = (node[1:] if isinstance(node, list) and node[0] in "±" + op * (op in ",∪") else [node] for node in (x, y))
    if op in ",∪":
        return [op, *xs, *ys]
    if op in "±∓" or len(xs) * len(ys) > 1:
        return ["±", *(infix(sign, p, q) for sign in ("+-" if op in "±∓" else op) for p in xs for q in ys)]
    if isinstance(x, list) or isinstance(y, list):
        raise ValueError("no arithmetic on lists")
    if op == "=":
        return [op, infix("-", x, y), infix("-", y, x)]
    if op == "^" and not (isinstance(x, Fraction) and isinstance(y, Fraction) and y.denominator == 1):
        return complex(x) ** complex(y)
    if op == "^" and math.log2(max(abs(x.numerator), x.denominator)) * abs(y) > BITS:
        raise ValueError("too large")
    result = x ** int(y) if op == "^" else OPERATORS[op](x, y)
    if isinstance(result, Fraction) and max(abs(result.numerator), result.denominator) >> BITS:
        raise ValueError("too large")
    return result


def agree(x, y, tolerance: float) -> bool:
    """Whether what `read` made of two texts is the same."""
    if isinstance(x, list) and isinstance(y, list):
        if len(x) != len(y) or x[0] != y[0] and not {x[0], y[0]} <= {",", "{}", "±"}:
            return False
        if x[0] in ("()", "[]", "(]", "[)"):
            return all(agree(p, q, tolerance) for p, q in zip(x[1:], y[1:]))
        rest = y[1:]
        return all(any(agree(p, q, tolerance) and rest.remove(q) is None for q in rest) for p in x[1:])
    if x is None or y is None or isinstance(x, list) or isinstance(y, list):
        return False
    if isinstance(x, Fraction) and isinstance(y, Fraction) and not tolerance:
        return x == y
    real = complex(x).imag == complex(y).imag == 0
    return cmath.isclose(x, y, rel_tol=(tolerance or 1e-12) if real else 1e-9, abs_tol=1e-14 * (x == 0 or y == 0))


def pick_letter(response: str, choices: list[str]) -> str | None:
    """The letter that a response commits to: in its last \\boxed{} or <answer>, else wherever it says "answer is" or "Answer:", else in its
    last line or sentence; as the letter, as the text of exactly one choice, or both. None if there is none, or more than one."""
    def normal(text):
        text = " ".join(re.sub(r"\\(?:text|math)\w*|\\[()]|[*_`${}\"'“”;]|\[|\]", " ", text).split()).rstrip(".")
        return re.sub(r"(?i)^(?:(?:the|correct|final|best|answer|option|choice|is|so|therefore)\b[\s:,]*)+", "", text)

    def bare(text):
        return normal(text.strip("() ")).casefold()

    letters, texts, found = LETTERS[:len(choices)], [normal(choice).casefold() for choice in choices], committed(response)
    response, picked = response[-10 * LONGEST:].strip(), set()
    said = re.findall(r"(?i)\b(?:answer|option|choice)\b[^\n.:]{0,40}?(?:\bis\b|:)[\s:*]*(?=([^\n]{0,300}))", response)
    last = re.split(r"\n|[.!?]\s", response)[-1], response.rpartition("\n")[2]
    for i, text in enumerate(map(normal, [found[:LONGEST]] if found is not None else [*last, *said])):
        text, loose = text.upper() if len(text) < 4 else text, found is not None or i > 1
        # both: a letter, then perhaps its choice's text; m, stricter, since "A" may be a word: a capital, what sets it apart, the rest
        both = re.match(rf"(?i)\(?([{letters}])\b(?:[\s):,.]|[-–—](?=\s))*(.*)", text)
        m = re.match(rf"\(?([{letters}])\b(\s*[):,]|\s+[-–—](?=\s)|\.(?!\w)|)\s*(.*)", text)
        if texts.count(text.casefold()) == 1 and not (m and len(text) == 1):
            picked.add(letters[texts.index(text.casefold())])
        elif both and bare(both[2]) == bare(texts[letters.index(both[1].upper())]):
            picked.add(both[1].upper())
        elif m and not m[3]:
            picked.add(m[1])
        elif m and (loose and m[2] or re.match(r"because|since|as\b|is (?:the )?(?:correct|right|best|answer)", m[3])):
            rest = re.split(r"(?i)\b(?:because|since|as)\b|[.;]", m[3])[0].strip()
            other = re.search(rf"(?:^|\b(?:or|and)|[&/,])\s*(?:option )?\(?[{letters}]\b", rest) or normal(rest).casefold() in texts
            picked.add("?" if other else m[1])
    return picked.pop() if len(picked) == 1 and "?" not in picked else None


def same_short(answer: str, gold: str) -> bool:
    """Whether a short free-form answer is the gold one (RLPR, from WebInstruct-verified): the same words but for case, articles and
    punctuation, or mathematics within 1%; plain integers must be equal. RLPR's own rules (github.com/OpenBMB/RLPR) allow 0.01%, also of
    100 times or a 100th of it, and ask a judge model besides, as WebInstruct-verified does (arXiv 2505.14652)."""
    def words(text):
        return re.sub(r"(?<=\w)-(?=\w)|[\s_*`$\"',.;:!?()]+|\b(?:a|an|the)\s", " ", text.casefold()).split()

    def spelled(text):  # 3 x 10^8 m/s and 3e8 m/s as 3*10^8\text{m/s}
        text = re.sub(r"(?<=\d)[eE]([-+]?\d+)", r"*10^{\1}", text.strip().rstrip("."))
        text = re.sub(r"(?<=\d)\s*(?:[xX×]|\\times|\\cdot)\s*(?=10\b)", "*", text)
        unit = r"((?:[A-Za-zµμΩ°]{2}|[msghNJWVAKCFLTΩ](?![A-Za-z]))(?:[A-Za-zµμΩ°\s/^.·*-]|(?<=\S)\d)*)"
        return re.sub(rf"^([-+\d.,*^{{}}()\s]*[\d}}])\s*{unit}$", r"\1\\text{\2}", text)

    if len(answer) > LONGEST or not re.search(r"[\d\\=^+*/()<>]", gold):
        return words(answer[:LONGEST]) == words(gold) != []
    integers = all(re.fullmatch(r"\s*[-+]?[\d,]+\D*", text) for text in (answer, gold))
    return same_math(spelled(answer), spelled(gold), 0 if integers else 0.01)


# ---------------------------------------------------------------------------------------------------------------------------------
# Code: a generated program runs in a sandbox; what it prints or returns leaves it as data, and is graded here
#
# Nobody has read the program, and a policy in training finds whatever pays. So an interpreter of its own, the
# supervisor, forks a process for each test, and takes from it in this order what a program does not need.
# Where one layer has a hole, another stands.
#   1. namespaces   a test sees no other process, no network, no shared memory of others
#   2. a new root   a tree of Python and the system's libraries alone, read-only, and an empty folder for each
#                   test, with limits on bytes and files. What is not in the tree cannot be opened, listed,
#                   watched, changed or connected to
#   3. descriptors  input and output alone stay open; no expected output and no other test's input ever was in
#                   the process
#   4. limits       of time, files, memory and processes; one core. The supervisor adds up the memory of all
#                   processes of a test, as few users may make a control group, which could do the same
#   5. user         for root another one, who owns nothing; no capability, and none to be gained
#   6. Landlock     the same files as in 2 once more, or alone where 2 cannot be had; no signal leaves a test
#   7. seccomp      no system call that reaches other processes or memory that nobody counts, and few of those
#                   that attacks on the kernel begin with
# At the end of a test's first process all its others are killed, before the next test begins. A system that
# lacks a layer (Docker as it comes denies 1 and 2) runs the rest, and sandbox_lacks says what is open there.
# The kernel's own flaws stay open.

# What LiveCodeBench puts before a program: import_string in its lcb_runner/evaluation/testing_util.py
MODULES = ("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random",
           "statistics", "itertools", "functools", "operator", "io", "sys", "json")
STARS = [f"from {module} import *" for module in (*MODULES, "builtins", "typing")]
PRELUDE = "\n".join([*STARS, f"import {', '.join(MODULES)}", "sys.setrecursionlimit(50_000)"])
MAX_OUTPUT = 32 << 20  # bytes that all tests of a program together may print or return
MAX_DIGITS = 50_000    # of an integer, as in LiveCodeBench's grader


# Numbers of the kernel's interface by their names in its headers. They are the same on every architecture, but
# for those of system calls, of which a table has three columns: name, number on x86_64 (asm/unistd_64.h),
# number on aarch64 (asm-generic/unistd.h; "-" where there is none).
Linux = types.SimpleNamespace(
    # linux/prctl.h, linux/capability.h
    PR_SET_PDEATHSIG=1, PR_SET_DUMPABLE=4, PR_SET_KEEPCAPS=8, PR_SET_SECCOMP=22, PR_SET_CHILD_SUBREAPER=36,
    PR_SET_NO_NEW_PRIVS=38, CAPABILITY_VERSION_3=0x20080522, CAP_DAC_OVERRIDE=1, CAP_DAC_READ_SEARCH=2,
    # linux/sched.h
    CLONE_NEWNS=0x20000, CLONE_NEWCGROUP=0x2000000, CLONE_NEWUTS=0x4000000, CLONE_NEWIPC=0x8000000,
    CLONE_NEWUSER=0x10000000, CLONE_NEWPID=0x20000000, CLONE_NEWNET=0x40000000,
    # linux/mount.h, linux/fcntl.h, asm/unistd.h
    MS_RDONLY=1, MS_NOSUID=2, MS_NODEV=4, MS_NOEXEC=8, MS_BIND=0x1000, MS_REC=0x4000, MS_PRIVATE=0x40000,
    MNT_DETACH=2, AT_FDCWD=-100, AT_RECURSIVE=0x8000, MOUNT_SETATTR=442,
    # linux/sockios.h, linux/if.h, linux/mman.h
    SIOCSIFFLAGS=0x8914, IFF_UP=1, MAP_SHARED=1, MAP_ANONYMOUS=0x20,
    # linux/landlock.h, asm/unistd.h
    CREATE_RULESET=444, ADD_RULE=445, RESTRICT_SELF=446, CREATE_RULESET_VERSION=1, RULE_PATH_BENEATH=1,
    READ_TREE=1 | 4 | 8,  # ACCESS_FS_ EXECUTE, READ_FILE, READ_DIR
    USE_FILE=1 | 2 | 4,   # ACCESS_FS_ EXECUTE, WRITE_FILE, READ_FILE: a file has no other rights
    PORTS=1 | 2,          # ACCESS_NET_ BIND_TCP, CONNECT_TCP
    SCOPES=1 | 2,         # SCOPE_ ABSTRACT_UNIX_SOCKET, SIGNAL
    # linux/seccomp.h, linux/bpf_common.h, linux/audit.h
    SECCOMP_MODE_FILTER=2, RET_ALLOW=0x7fff0000, RET_ERRNO=0x50000, RET_KILL_PROCESS=0x80000000,
    LOAD=0x20, AND=0x54, IF_EQUAL=0x15, IF_GREATER=0x25, RETURN=0x06,
    AUDIT_ARCH={"x86_64": 0xc000003e, "aarch64": 0xc00000b7},

    NEWEST=462,  # mseal; of later system calls nothing is known here
    # What no test may call. What needs a capability is not listed, as a test has none.
    DENIED={
        "other processes": """
            ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272,
            pidfd_getfd 438 438, process_madvise 440 440, process_mrelease 448 448,
            perf_event_open 298 241""",
        "their processor and memory": """
            sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118,
            sched_setattr 314 274, setpriority 141 140, ioprio_set 251 30, migrate_pages 256 238,
            move_pages 279 239, mbind 237 235, set_mempolicy 238 237, set_mempolicy_home_node 450 450""",
        "namespaces, in which it would have capabilities": "unshare 272 97, setns 308 268",
        "files without a path": """
            name_to_handle_at 303 264, open_by_handle_at 304 265, open_tree 428 428, inotify_init 253 -,
            inotify_init1 294 26, fanotify_init 300 262""",
        "memory that belongs to no process": """
            shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190, semop 65 193, semtimedop 220 192,
            semctl 66 191, msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, mq_open 240 180,
            mq_unlink 241 181, memfd_create 319 279, memfd_secret 447 447, add_key 248 217,
            request_key 249 218, keyctl 250 219""",
        "where attacks on the kernel begin": """
            io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427,
            userfaultfd 323 282, bpf 321 280, personality 135 92, modify_ldt 154 -, vmsplice 278 75""",
    },
    UNKNOWN="clone3 435 435",  # its flags cannot be checked; where it is unknown, libraries call clone
    # Landlock does not ask about these, so they go where the system's tree is in view
    DENIED_WITHOUT_ROOT="""
        chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55,
        lchown 94 -, fchownat 260 54, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7,
        removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, utime 132 -, utimes 235 -,
        futimesat 261 -, utimensat 280 88""",
    # There a test is its process group, which nothing leaves
    DENIED_WITHOUT_NAMESPACES="setsid 112 157, setpgid 109 154",
    DENIED_WITHOUT_SCOPES="""
        tkill 200 130, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, pidfd_send_signal 424 424""",
    # Of these one argument decides
    CHECKED="socket 41 198, clone 56 220, mmap 9 222, prlimit64 302 261, kill 62 129, tgkill 234 131",
)

SUPERVISOR_IMPORTS = """
import atexit, contextlib, ctypes, errno, fcntl, gc, io, json, os, resource
import signal, socket, struct, sys, threading, time, types
LIBC = ctypes.CDLL(None, use_errno=True)
UNSUITED = 100
"""
LIBC = ctypes.CDLL(None, use_errno=True)
UNSUITED = 100  # an exit code of UNSUITED + errno says that a layer is not to be had here


def supervise(job_start: int, job_size: int):
    """The supervisor. From descriptor 0 it reads a job (JSON of that size, then the tests' inputs one after
    another); on descriptor 1 it reports what the system lacks (a line of JSON) and then, test by test, the
    size and the bytes of its output. It ends with the first test that fails. Where it cannot build the
    sandbox it ends with a traceback."""
    box = types.SimpleNamespace(**json.loads(os.pread(0, job_size, job_start)))
    box.module = types.ModuleType("solution" if box.name else "__main__")
    exec(compile(box.prelude, "prelude", "exec"), vars(box.module))  # each test inherits what this imports
    box.root = box.namespaces = box.proc = False
    box.uid, box.gid = os.getuid(), os.getgid()
    with open("/proc/self/uid_map") as f:
        users = int(f.read().split()[-1])
    box.switches_user = box.uid == 0 and users > 65535  # root, and not one that is alone in its namespace
    if box.switches_user:
        box.uid = box.gid = 61184 + os.getpid() % 4336  # of the users that systemd keeps for passing services
    for folder in ("root", "work"):
        os.mkdir(folder)
    for folder in (".", "root", "work"):
        os.chown(folder, box.uid, box.gid)
    with open("/proc/loadavg") as f:  # a user's limit of processes counts the others too: no more than all
        box.others = int(f.read().split("/")[1].split()[0])
    write_file("/proc/self/oom_score_adj", "1000")  # when memory runs out, the kernel ends this first
    with contextlib.suppress(OSError):  # unless it was taken from this process meanwhile
        os.sched_setaffinity(0, [box.core])  # many busy processes slow this core alone
    die_with_parent()
    box.lacks = build_namespaces(box)
    prepare_tests(box)
    run_tests(box, job_start + job_size)
    os._exit(0)


def kernel(name: str, *arguments) -> int:
    """Call a function of the C library that must succeed; OSError says which did not, and why."""
    result = getattr(LIBC, name)(*[a.encode() if isinstance(a, str) else a for a in arguments])
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def die_with_parent():
    """End this process with the one that made it. A change of user takes this back."""
    kernel("prctl", Linux.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def write_file(path: str, text: str):
    with open(path, "w") as f:
        f.write(text)


def build_namespaces(box) -> list[str]:
    """Go on in new namespaces with a new root, else in the namespaces alone, else in neither. Returns what is
    missing. A child tries, so that this process stays as it was where that fails."""
    missing = []
    for layer in ("root of its own", "namespaces"):  # the second try is for namespaces alone
        child = os.fork()
        if child == 0:
            try:
                enter_namespaces(box)
                if layer == "root of its own":
                    enter_root(box, "root")
                return missing
            except OSError as e:
                os._exit(UNSUITED + min(e.errno, 99))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < UNSUITED:
            os._exit(abs(code))
        missing.append(f"no {layer} ({os.strerror(code - UNSUITED)})")
    return missing


def enter_namespaces(box):
    """Go on as the first process of new namespaces, at whose end all others in them end. The process that
    came here waits for it."""
    spaces = Linux.CLONE_NEWNS | Linux.CLONE_NEWPID | Linux.CLONE_NEWNET
    spaces |= Linux.CLONE_NEWIPC | Linux.CLONE_NEWUTS
    die_with_parent()
    if not box.switches_user or LIBC.unshare(spaces) < 0:
        # Others than root, and root in a container, make them in a namespace of users, where all may do this
        switch_user(box)
        os.stat(os.__file__)  # unless root alone can read this Python
        box.switches_user = False
        maps = {"setgroups": "deny", "uid_map": f"1000 {box.uid} 1", "gid_map": f"1000 {box.gid} 1"}
        kernel("unshare", spaces | Linux.CLONE_NEWUSER)
        for file, text in maps.items():
            write_file(f"/proc/self/{file}", text)
        box.uid = box.gid = 1000
    first = os.fork()
    if first:
        os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])))
    die_with_parent()
    box.namespaces = True
    with contextlib.suppress(OSError), socket.socket() as s:  # a loopback of its own
        kernel("ioctl", s.fileno(), Linux.SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", Linux.IFF_UP))


def shown_paths() -> list[str]:
    """What a test sees of the system, parents first: Python, libraries and programs, and none of the folders
    beside them."""
    paths = ["/dev/null", "/dev/random", "/dev/urandom", "/bin", "/lib", "/lib64",
             "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives"]
    python = os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))
    for prefix in ("/usr", "/usr/local", sys.prefix, sys.base_prefix, python):
        paths += [f"{prefix}/{name}" for name in ("bin", "lib", "lib64", "libexec", "share", "pyvenv.cfg")]
    return sorted(path for path in set(paths) if os.path.exists(path))


def enter_root(box, here: str):
    """Make a tree of what a test may see in the folder `here`, read-only, and go on in it, with nothing else
    in reach."""
    guard = Linux.MS_NOSUID | Linux.MS_NODEV
    kernel("mount", None, "/", None, Linux.MS_REC | Linux.MS_PRIVATE, None)
    kernel("mount", "tmpfs", here, "tmpfs", guard, "size=1m,nr_inodes=1000,mode=755")
    for path in shown_paths():
        target = here + path
        if os.path.exists(target):
            continue  # it stands in a folder that is shown
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.isdir(path):
            os.mkdir(target)
        else:
            write_file(target, "")
        kernel("mount", path, target, None, Linux.MS_BIND | Linux.MS_REC, None)
        flags = Linux.MS_NOSUID if path.startswith("/dev/") else guard
        lock_mount(target, Linux.MS_RDONLY | flags, Linux.AT_RECURSIVE)
    write_file(f"{here}/etc/passwd", f"root:x:0:0::/:/bin/sh\nsolver:x:{box.uid}:{box.gid}::/tmp:/bin/sh\n")
    write_file(f"{here}/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{here}/dev/{name}")
    os.symlink("/tmp", f"{here}/dev/shm")
    os.mkdir(f"{here}/tmp")
    os.mkdir(f"{here}/proc")
    with contextlib.suppress(PermissionError):  # where a container hides a part of /proc, nobody can show it
        kernel("mount", "proc", f"{here}/proc", "proc", Linux.MS_RDONLY | Linux.MS_NOEXEC | guard, None)
        box.proc = True
    os.chdir(here)
    kernel("pivot_root", ".", ".")
    kernel("umount2", ".", Linux.MNT_DETACH)
    os.chdir("/")
    lock_mount("/", Linux.MS_RDONLY | guard, 0)
    box.root = True


def lock_mount(path: str, flags: int, recursive: int):
    """Set flags of a mount, with AT_RECURSIVE of all below it (struct mount_attr, whose first flags are those
    of mount)."""
    attributes = struct.pack("4Q", flags, 0, 0, 0)
    size = ctypes.c_size_t(len(attributes))
    kernel("syscall", Linux.MOUNT_SETATTR, Linux.AT_FDCWD, path, recursive, attributes, size)


def prepare_tests(box):
    """Find out which of the other layers there are, and report what lacks."""
    gc.freeze()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # so that `passes` can wait for it
    kernel("prctl", Linux.PR_SET_DUMPABLE, 0, 0, 0, 0)          # no test looks into this process
    kernel("prctl", Linux.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)   # orphans of a test become its children
    version = LIBC.syscall(Linux.CREATE_RULESET, None, ctypes.c_size_t(0), Linux.CREATE_RULESET_VERSION)
    box.landlock = max(version, 0)
    box.scoped = box.namespaces or box.landlock >= 6            # no test signals a process outside
    # Asked to install a filter at no address, a kernel that has filters calls the address bad
    LIBC.prctl(Linux.PR_SET_SECCOMP, Linux.SECCOMP_MODE_FILTER, None, 0, 0)
    known = os.uname().machine in Linux.AUDIT_ARCH and sys.maxsize > 1 << 32
    box.filtered = known and ctypes.get_errno() == errno.EFAULT
    box.filter = filter_program(box) if box.filtered else b""  # unscoped, each test needs another
    children = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    box.watched = (box.proc or not box.namespaces) and os.path.exists(children)
    lacks = {
        "no /proc: programs that open /dev/stdin fail": box.root and not box.proc,
        "it sees names and sizes of your files, and may fill the disk": not box.root,
        "no Landlock: it reads your files and your keys": not box.root and not box.landlock,
        "no filter of system calls: all of the kernel is open to it": not box.filtered,
        "the network is open to it, and what it starts may live on": not box.filtered and not box.namespaces,
        "it may signal your processes": not box.filtered and not box.scoped,
        "memory is limited for each of its processes alone": not box.watched,
    }
    box.lacks += [text for text, lacking in lacks.items() if lacking]
    os.write(1, json.dumps(box.lacks).encode() + b"\n")


def run_tests(box, start: int):
    """Run the tests one after another and report their outputs. The first one's input stands at `start`."""
    left = box.max_output
    folder = f"size=128m,nr_inodes=8192,mode=700,uid={box.uid},gid={box.gid}"
    for number, size in enumerate(box.sizes):
        if box.root:
            if number > 0:
                kernel("umount2", "/tmp", Linux.MNT_DETACH)
            kernel("mount", "tmpfs", "/tmp", "tmpfs", Linux.MS_NOSUID | Linux.MS_NODEV, folder)
        output = os.memfd_create("output")
        trouble, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            enter_test(box, number, start, size, output, told)
        os.close(told)
        passed = passes(box, pid)
        end_processes(box, pid)
        reason = os.read(trouble, 4096)
        os.close(trouble)
        if reason:
            raise OSError(reason.decode(errors="replace"))
        written = min(os.fstat(output).st_size, left)
        left -= written
        if not passed or left == 0:
            break  # all tests must pass: the others do not matter
        os.write(1, b"%d\n" % written)
        append_bytes(output, 0, written, 1)
        os.close(output)
        start += size


def append_bytes(source: int, start: int, size: int, target: int):
    """Append `size` bytes of a file, from `start` on, to another; they do not pass through this process's
    memory."""
    while size:
        sent = os.sendfile(target, source, start, size)
        start += sent
        size -= sent


def passes(box, pid: int) -> bool:
    """Whether a test's process ends by itself without an error, in time, and with no more memory than all of
    a test may take."""
    pause = 0.02  # seconds between two looks at its memory; meanwhile one core can fill some 50 MB
    begun = time.monotonic()
    next_look = begun + pause
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        now = time.monotonic()
        if now >= begun + box.seconds:
            return False
        if now >= next_look:
            next_look = now + pause
            if box.watched and takes_too_much(box):
                return False
        signal.sigtimedwait([signal.SIGCHLD], pause)


def takes_too_much(box) -> bool:
    """Whether the processes that stem from this one are too many, as no limit binds whom the kernel takes for
    root, or take too much memory. What a fork shares with its parent counts for both."""
    found = [os.getpid()]
    used = 0
    for pid in found:  # grows underway
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as f:
                    found += map(int, f.read().split())
            with open(f"/proc/{pid}/statm") as f:
                _, resident, of_files = map(int, f.read().split()[:3])  # pages
            used += (resident - of_files) * resource.getpagesize()
    return len(found) > box.processes + 1 or used > box.memory


def end_processes(box, pid: int):
    """Kill all that a test has left: everything in the namespace but this process, or the process group,
    which the filter lets nothing leave. Either kills all at once, so that nothing forks meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        if box.namespaces:
            os.kill(-1, signal.SIGKILL)
        else:
            os.killpg(pid, signal.SIGKILL)
    flags = 0 if box.namespaces or box.filtered else os.WNOHANG
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, flags)[0]:
            pass


def enter_test(box, number: int, start: int, size: int, output: int, told: int):
    """Become a test, whose input stands in descriptor 0 from `start` on, run the program and end. `told` is
    where to say why the sandbox cannot be built."""
    try:
        os.setsid()
        given = arrange_descriptors(box, start, size, output, told)
        folder = "/tmp" if box.root else os.path.abspath(f"work/{number}")
        if not box.root:
            os.mkdir(folder, 0o700)
            os.chown(folder, box.uid, box.gid)
        os.chdir(folder)
        os.environ.update(HOME=folder, TMPDIR=folder)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        set_limits(box)
        switch_user(box)
        drop_privileges(box)
        restrict_files(box, folder)
        filter_calls(box)
    except BaseException as e:
        os.write(4, repr(e).encode())
        os._exit(1)
    os.close(4)
    status = 1
    try:
        run_program(box, given)
        status = 0
    finally:
        os._exit(status)


def arrange_descriptors(box, start: int, size: int, output: int, told: int) -> bytes:
    """Leave open alone, as 0 to 4: the input, what is printed, errors (which nobody reads), what a function
    returns, and `told`. A function's input is no file but is returned."""
    given = b""
    null = os.open("/dev/null", os.O_RDWR)
    if box.name:
        given = os.pread(0, size, start)
        order = [null, null, null, output, told]
    else:
        source = os.memfd_create("input")
        append_bytes(0, start, size, source)
        os.lseek(source, 0, os.SEEK_SET)
        order = [source, output, null, null, told]
    order = [fcntl.fcntl(fd, fcntl.F_DUPFD, 5) for fd in order]  # out of the way of one another
    for fd, moved in enumerate(order):
        os.dup2(moved, fd, inheritable=fd < 3)
    os.closerange(5, 1 << 20)
    return given


def set_limits(box):
    processes = box.processes if box.watched else box.processes // 8
    if not box.namespaces and not box.switches_user:
        processes += box.others
    limits = {"AS": box.addresses, "DATA": box.memory, "STACK": 64 << 20, "CPU": int(box.seconds) + 1,
              "NPROC": processes, "FSIZE": 32 << 20, "NOFILE": 256, "SIGPENDING": 256,
              "CORE": 1}  # byte: at 0 the kernel would still hand dumps to a program of the system's
    for name, value in limits.items():
        limit = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(limit)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(limit, (value, value))


def switch_user(box):
    """Where this is root: become a user who owns nothing, with the capabilities until drop_privileges."""
    if box.switches_user:
        kernel("prctl", Linux.PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.setgid(box.gid)
        os.setuid(box.uid)
        kernel("prctl", Linux.PR_SET_DUMPABLE, 1, 0, 0, 0)  # or its files in /proc would stay root's
        die_with_parent()


def drop_privileges(box):
    """Give up all capabilities, and never gain any. Where files are guarded by Landlock alone, the test of a
    root keeps the right to read, as its Python may stand in root's home."""
    kernel("prctl", Linux.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    kept = [0]
    if box.switches_user and box.landlock and not box.root:
        kept = [1 << Linux.CAP_DAC_READ_SEARCH, 1 << Linux.CAP_DAC_OVERRIDE, 0]  # the first one there is
    for capability in kept:
        with contextlib.suppress(PermissionError):
            sets = struct.pack("6I", capability, capability, 0, 0, 0, 0)  # effective, permitted, inheritable
            kernel("capset", struct.pack("Ii", Linux.CAPABILITY_VERSION_3, 0), sets)
            break
    die_with_parent()


def restrict_files(box, folder: str):
    """Landlock (docs.kernel.org/userspace-api/landlock.html): what is shown can be read, the folder written,
    and nothing else."""
    if not box.landlock:
        return
    known = [0, 13, 14, 15, 15, 16][min(box.landlock, 5)]  # rights to files that a version of Landlock knows
    rights = (1 << known) - 1
    ports = Linux.PORTS if box.landlock >= 4 and not box.namespaces else 0
    scopes = Linux.SCOPES if box.landlock >= 6 else 0
    handled = struct.pack("3Q", rights, ports, scopes)
    rules = kernel("syscall", Linux.CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    shown = ["/"] if box.root else shown_paths()
    allowed = [(path, Linux.READ_TREE) for path in shown]
    for path, access in [*allowed, ("/dev/null", Linux.USE_FILE), (folder, rights)]:
        fd = os.open(path, os.O_PATH)
        if not os.path.isdir(path):
            access &= Linux.USE_FILE
        kernel("syscall", Linux.ADD_RULE, rules, Linux.RULE_PATH_BENEATH, struct.pack("=Qi", access, fd), 0)
        os.close(fd)
    kernel("syscall", Linux.RESTRICT_SELF, rules, 0)
    os.close(rules)


def filter_calls(box):
    """Seccomp (docs.kernel.org/userspace-api/seccomp_filter.html): a small program that the kernel runs at
    each system call."""
    if not box.filtered:
        return
    code = box.filter if box.scoped else filter_program(box)
    array = ctypes.create_string_buffer(code)
    header = struct.pack("H6xQ", len(code) // 8, ctypes.addressof(array))  # struct sock_fprog
    kernel("prctl", Linux.PR_SET_SECCOMP, Linux.SECCOMP_MODE_FILTER, header, 0, 0)


def filter_program(box) -> bytes:
    """Its lines (operation, lines to skip if true, if false, operand) as struct sock_filter. It reads struct seccomp_data: the
    number of the call at byte 0, the architecture at 4, the low half of argument i at 16 + 8 i."""
    allow = (Linux.RETURN, 0, 0, Linux.RET_ALLOW)
    refuse = (Linux.RETURN, 0, 0, Linux.RET_ERRNO | errno.EPERM)
    unknown = (Linux.RETURN, 0, 0, Linux.RET_ERRNO | errno.ENOSYS)
    kill = (Linux.RETURN, 0, 0, Linux.RET_KILL_PROCESS)
    machine = os.uname().machine

    def numbers(table: str) -> dict[str, int]:
        rows = [row.split() for row in table.split(",")]
        column = 1 if machine == "x86_64" else 2
        return {row[0]: int(row[column]) for row in rows if row[column] != "-"}

    program = [(Linux.LOAD, 0, 0, 4), (Linux.IF_EQUAL, 1, 0, Linux.AUDIT_ARCH[machine]), kill,
               (Linux.LOAD, 0, 0, 0), (Linux.IF_GREATER, 0, 1, Linux.NEWEST), unknown]
    for number in numbers(Linux.UNKNOWN).values():
        program += [(Linux.IF_EQUAL, 0, 1, number), unknown]
    denied = list(Linux.DENIED.values())
    if not box.root:
        denied.append(Linux.DENIED_WITHOUT_ROOT)
    if not box.namespaces:
        denied.append(Linux.DENIED_WITHOUT_NAMESPACES)
    if not box.scoped:
        denied.append(Linux.DENIED_WITHOUT_SCOPES)
    for number in numbers(",".join(denied)).values():
        program += [(Linux.IF_EQUAL, 0, 1, number), refuse]

    spaces = Linux.CLONE_NEWNS | Linux.CLONE_NEWUTS | Linux.CLONE_NEWIPC | Linux.CLONE_NEWUSER
    spaces |= Linux.CLONE_NEWPID | Linux.CLONE_NEWNET | Linux.CLONE_NEWCGROUP
    families = [socket.AF_UNIX, socket.AF_INET, socket.AF_INET6] if box.namespaces else []
    whole = 0xffffffff
    checks = [  # name, argument, mask, values of the masked argument that are allowed
        ("socket", 0, whole, families),
        ("clone", 0, spaces, [0]),
        ("prlimit64", 0, whole, [0]),  # of the calling process
        ("mmap", 3, Linux.MAP_SHARED | Linux.MAP_ANONYMOUS, [0, Linux.MAP_SHARED, Linux.MAP_ANONYMOUS]),
    ]
    if not box.scoped:
        checks += [("kill", 0, whole, [os.getpid()]), ("tgkill", 0, whole, [os.getpid()])]
    for name, argument, mask, values in checks:
        check = [(Linux.LOAD, 0, 0, 16 + 8 * argument), (Linux.AND, 0, 0, mask)]
        check += [(Linux.IF_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]  # to `allow`
        check += [refuse, allow]
        program += [(Linux.IF_EQUAL, 0, len(check), numbers(Linux.CHECKED)[name]), *check]
    return b"".join(struct.pack("HBBI", *line) for line in [*program, allow])


def run_program(box, given: bytes):
    """Run the program as __main__; or import it and call its function with the input's lines, whose value
    goes to descriptor 3."""
    sys.modules[box.module.__name__] = box.module
    sys.argv = ["solution.py"]
    with contextlib.suppress(SystemExit):  # whatever its code, as in LiveCodeBench
        exec(compile(box.program, "solution.py", "exec"), vars(box.module))
    if not box.name:
        end_program()
        return
    owner = box.module.Solution() if hasattr(box.module, "Solution") else box.module
    value = getattr(owner, box.name)(*[json.loads(line) for line in given.decode().split("\n")])
    if isinstance(value, tuple):
        value = list(value)
    text = json.dumps(plain_value(value), default=lambda v: v.item())  # item() is that of numpy's scalars
    with open(3, "wb") as f:
        f.write(text.encode())


def plain_value(value):
    """A value of which JSON hides nothing: TypeError for a tuple, which is no list, and for keys other than
    strings, as LiveCodeBench's grader finds neither equal to what was expected."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("keys that are no strings")
        return {key: plain_value(v) for key, v in value.items()}
    if isinstance(value, tuple):
        raise TypeError("a tuple inside a value")
    if isinstance(value, list):
        return [plain_value(v) for v in value]
    return value


def end_program():
    """What an interpreter does for a program at its end: wait for its threads, call what it registered, write
    what stands in open files. To take all its objects apart, which lasts longer than most programs, is left
    out."""
    with contextlib.suppress(BaseException):
        threading._shutdown()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for thing in gc.get_objects():
        with contextlib.suppress(Exception):
            if isinstance(thing, io.IOBase):
                thing.flush()
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None and not stream.closed:
            stream.flush()


@functools.cache
def supervisor_source() -> str:
    """The functions above, which run in the supervisor and its tests, as the text of a program."""
    parts = (supervise, kernel, die_with_parent, write_file, build_namespaces, enter_namespaces,
             shown_paths, enter_root, lock_mount, prepare_tests, run_tests, append_bytes, passes,
             takes_too_much, end_processes, enter_test, arrange_descriptors, set_limits, switch_user,
             drop_privileges, restrict_files, filter_calls, filter_program, run_program, plain_value,
             end_program)
    numbers = f"Linux = types.SimpleNamespace(**{vars(Linux)!r})"
    functions = map(inspect.getsource, parts)
    return "\n".join([SUPERVISOR_IMPORTS, numbers, *functions, "supervise(int(sys.argv[1]), int(sys.argv[2]))"])


@functools.cache
def compiled(source: str) -> bytes:
    """A program for START, as to compile the supervisor takes longer than to run a small test."""
    return marshal.dumps(compile(source, "supervisor", "exec"))


START = "import marshal, os, sys; exec(marshal.loads(os.pread(0, int(sys.argv[1]), 0)))"


def own_cores() -> list[int]:
    """The cores on which this rank runs solutions, one at a time on each: its share of those that it and the
    machine's other ranks may use."""
    if sys.platform != "linux":
        return [0]
    cores = sorted(os.sched_getaffinity(0))
    rank = int(os.environ.get("LOCAL_RANK", 0))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return cores[rank::ranks] or [cores[rank % len(cores)]]


FREE_CORES = queue.SimpleQueue()  # whoever runs a solution takes one and puts it back
for free_core in own_cores():
    FREE_CORES.put(free_core)


def run_code(program: str, name: str | None, tests: list[str], seconds: float, memory: int = 4,
             most: list[int] | None = None) -> list:
    """Run a program that nobody has read in a sandbox. Without a name it is __main__ and reads a test from
    its standard input; else its function (or Solution's method) of that name gets a test's lines as JSON
    arguments. Returns what each test printed or, as JSON, returned (bytes); None for one of more than most[i]
    bytes, and from the first test on that crashed, took over `seconds` of wall time or too much memory, or
    with which all wrote MAX_OUTPUT. memory: GiB that each process may address; all processes of a test
    together may fill as much, and 4 at most.

    A warning says what the system lacks; OSError, why there is no sandbox at all."""
    lacks, outputs = in_sandbox(program, name, tests, seconds, memory, most or [MAX_OUTPUT] * len(tests))
    if lacks:
        warnings.warn("the sandbox of generated code holds only in part here: " + "; ".join(lacks))
    return outputs


def in_sandbox(program: str, name: str | None, tests: list[str], seconds: float, memory: int,
               most: list[int]) -> tuple[list[str], list]:
    """What the system lacks, and the outputs of run_code."""
    if sys.platform != "linux":
        raise OSError("generated code runs in a sandbox that only Linux has: use Linux, a container or WSL")
    inputs = [test.encode(errors="surrogatepass") for test in tests]
    core = FREE_CORES.get()
    job = dict(program=program, name=name, sizes=[len(i) for i in inputs], seconds=seconds, core=core,
               processes=64, prelude=PRELUDE, addresses=memory << 30, memory=min(memory, 4) << 30,
               max_output=MAX_OUTPUT)
    header = json.dumps(job).encode()
    options = ["-I", "-X", "utf8", "-X", f"int_max_str_digits={MAX_DIGITS}"]
    supervisor = compiled(supervisor_source())
    command = [sys.executable, *options, "-c", START, str(len(supervisor)), str(len(header))]
    folder = tempfile.mkdtemp()
    environment = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "TZ": "UTC", "OMP_NUM_THREADS": "1"}
    child, trouble = None, "it did not start in time"
    outputs = []
    try:
        with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as told:
            asked.writelines([supervisor, header, *inputs])
            asked.flush()
            with contextlib.suppress(subprocess.TimeoutExpired):  # on a machine too busy to keep any time
                child = subprocess.run(
                    command, cwd=folder, start_new_session=True, env=environment, stdin=asked, stdout=told,
                    stderr=subprocess.PIPE, timeout=(seconds + 1) * len(tests) + 30)
                trouble = child.stderr.decode(errors="replace").strip()
            told.seek(0)
            lacks = told.readline()
            for size in iter(told.readline, b""):
                if int(size) <= most[len(outputs)]:
                    outputs.append(told.read(int(size)))
                else:
                    outputs.append(None)
                    told.seek(int(size), os.SEEK_CUR)
    finally:
        FREE_CORES.put(core)
        remove_folder(folder)
    if not lacks or child and child.returncode and trouble:
        raise OSError(f"no sandbox with {sys.executable}: {trouble}")
    return json.loads(lacks), outputs + [None] * (len(tests) - len(outputs))


def remove_folder(folder: str):
    """Remove a sandbox's folder, in which nothing stands if the sandbox had a root of its own."""
    try:
        for name in os.listdir(folder):
            os.rmdir(os.path.join(folder, name))
        os.rmdir(folder)
    except OSError:  # trees too deep for shutil, and folders that their owner may not list
        subprocess.run(["chmod", "-R", "u+rwx", folder], stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", folder])


@functools.cache
def sandbox_lacks() -> list[str]:
    """What this system lacks for the whole sandbox, and so what is open to a program in it. Empty where it
    holds."""
    return in_sandbox("", None, [""], 60.0, 4, [0])[0]


def check_sandbox(partial: bool):
    """Before training on generated code: RuntimeError where the sandbox holds only in part and the user has
    not said that this will do (--sandbox=partial), as a policy learns to use what is open."""
    if sandbox_lacks() and not partial:
        raise RuntimeError(
            f"the sandbox of generated code holds only in part here: {'; '.join(sandbox_lacks())}. A policy "
            "in training finds what is open. Allow namespaces (Docker: --security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined --security-opt systempaths=unconfined; Ubuntu: sysctl -w "
            "kernel.apparmor_restrict_unprivileged_userns=0), train on problems without code, or accept this "
            "with --sandbox=partial")


def extract_code(response: str) -> str:
    """The last fenced block of a response, though its end is missing; else what stands in its last <answer>
    tag; else nothing."""
    begin = r"```[\w+#.-]*[ \t]*\r?\n"
    end = r"(?:^[ \t]*```(?!\w)|```[ \t]*(?:</answer>|\r?$)|\Z)"
    blocks = re.findall(begin + "(.*?)" + end, response, re.DOTALL | re.MULTILINE)
    before, tag, inside = response.rpartition("</answer>")[0].rpartition("<answer>")
    code = ""
    if tag:
        code = inside
    if blocks:
        code = blocks[-1]
    return textwrap.dedent(code).strip("\n")


def longest(expected: str) -> int:
    """Bytes that a right output may have: it may write its numbers with more digits, such as 0.500000000000
    for 0.5."""
    return 1000 + 10 * len(expected.encode(errors="surrogatepass"))


def same_output(out: bytes | None, expected: str, returned: bool) -> bool:
    """The rules of LiveCodeBench's lcb_runner/evaluation/testing_util.py: a returned value (JSON) by value;
    what is printed line by line, stripped, as text or as Decimal tokens. A wrong output costs no more than a
    right one: lines, tokens and values are counted before any is made an object."""
    if out is None or len(out) > longest(expected):
        return False
    try:
        if returned:
            return same_value(out, expected)
        return same_lines(out.decode(errors="replace"), expected)
    except (ValueError, RecursionError, InvalidOperation):  # no JSON, too deep, no numbers
        return False


def same_value(out: bytes, expected: str) -> bool:
    wanted = json.loads(expected, parse_int=exact_integer)
    written = json.dumps(wanted, default=lambda integer: 0).encode()
    for mark in b"[{,\"":
        if out.count(mark) != written.count(mark):
            return False
    return json.loads(out, parse_int=exact_integer) == wanted


def exact_integer(digits: str) -> int | Decimal:
    """Python reads no integer of more than 4,300 digits as an int, to save time; a Decimal of it is as
    exact."""
    if len(digits) <= 4300:
        return int(digits)
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return Decimal(digits)


def same_lines(printed: str, wanted: str) -> bool:
    printed, wanted = printed.strip(), wanted.strip()
    if printed.count("\n") != wanted.count("\n"):
        return False
    for a, b in zip(printed.split("\n"), wanted.split("\n")):
        if a.strip() != b.strip() and not same_numbers(a, b):
            return False
    return True


def same_numbers(a: str, b: str) -> bool:
    """Whether two lines hold the same numbers. InvalidOperation if one holds anything else."""
    wanted = b.split()
    given = a.split(None, len(wanted))  # one more, if there are more
    return len(given) == len(wanted) and [Decimal(x) for x in given] == [Decimal(x) for x in wanted]


def passes_livecodebench(code: str, tests: list[list[str]], fn_name: str | None = None,
                         seconds: float = 6.0) -> bool:
    """Whether a program passes all tests of a LiveCodeBench problem, [input, output] as in stored_tests;
    fn_name is metadata["func_name"]; seconds are a test's. A returned tuple stands for a list at the top
    alone. The outputs stay here: the sandbox gets inputs only."""
    if not tests:
        raise ValueError("a LiveCodeBench problem without tests: nothing can be graded by it, load it again")
    inputs = [given for given, _ in tests]
    expected = [wanted for _, wanted in tests]
    outputs = run_code(code, fn_name, inputs, seconds, most=[longest(wanted) for wanted in expected])
    return all(same_output(out, wanted, fn_name is not None) for out, wanted in zip(outputs, expected))


# BigCodeBench's tests patch a solution's module and look into what it returns: they must share its process.
# So this is for evaluation, where nobody learns from it; a solution that is written to cheat can, by patching
# unittest while it runs.
UNITTESTS = """
import os, sys, types, unittest

def unittest_results(code, tests):
    module = sys.modules["__test__"] = types.ModuleType("__test__")
    vars(module).update(sys=sys, os=os, environ=os.environ, __file__="__test__.py")
    exec(compile(code, "__test__.py", "exec"), vars(module))
    exec(compile(tests, "__test__.py", "exec"), vars(module))
    passed = []
    result = unittest.TestResult()
    result.addSuccess = lambda case: passed.append(case.id().split(".")[-1])
    unittest.defaultTestLoader.loadTestsFromTestCase(module.TestCases).run(result)
    return sorted(passed)
"""


def passes_bigcodebench(code: str, test: str, entry_point: str, code_prompt: str,
                        seconds: float = 240.0) -> bool:
    """Whether a solution passes every method of the class TestCases of a BigCodeBench problem's `test`. It is
    "calibrated" as in bigcodebench/evaluate.py: code_prompt and `pass` stand before it. seconds are the whole
    class's. Without the libraries of BigCodeBench's Requirements/requirements-eval.txt honest solutions fail.

    For evaluation, not as a reward: a solution can cheat, as it shares a process with its tests. Exiting,
    printing and skipping do not pass; patching unittest or a result that equals everything may."""
    names = []
    for node in ast.parse(test).body:
        if isinstance(node, ast.ClassDef) and node.name == "TestCases":
            functions = [f for f in node.body if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))]
            names += [f.name for f in functions if f.name.startswith("test")]
    if not names:
        raise ValueError("a BigCodeBench problem whose TestCases has no tests: load it again")
    arguments = [f"{code_prompt}\n    pass\n{code}", test]
    out, = run_code(UNITTESTS, "unittest_results", ["\n".join(map(json.dumps, arguments))], seconds, 32)
    return same_output(out, json.dumps(sorted(set(names))), True)


# ---------------------------------------------------------------------------------------------------------------------------------
# Random workflows: a baseline, and what the warm start of a tiny Conductor is made of

PHRASES = ("Work it out.", "Simplify it.", "Find the value.", "Rewrite the question.", "Process the text.", "Name the word.")


def random_workflow(rng: random.Random, n_workers: int, max_steps: int = 5) -> Workflow:
    """1 to max_steps steps, short ones more often; each a random worker, a random phrase, and nine times in ten all that came before."""
    steps = min(rng.randint(1, max_steps), rng.randint(1, max_steps))
    return Workflow([Step(rng.randrange(n_workers), rng.choice(PHRASES), list(range(i)) if rng.random() < 0.9 else [])
                     for i in range(steps)])


def random_completion(question: str, rng: random.Random, n_workers: int, max_steps: int = 5, names: str = "") -> str:
    """A completion in the Conductor's format that says nothing about which workflow is good: its plan is to answer the question. Where the
    workers have names, the plan names those of the workflow.

    The number of steps stands behind the workers, where it follows from them and helps to write two more lists of that length. Whether
    another step is needed is thus decided worker by worker. In the plan a comma says so: if the next name did, sharpening the policy
    (train.warm_start) would favour the end, which is one token, over the names, which are many."""
    workflow = random_workflow(rng, n_workers, max_steps)
    workers, others = workflow.text().split("\n", 1)
    plan = f"{question} " + ", ".join(f"{names[step.worker]} {step.worker}" for step in workflow.steps) if names else question
    return f"Plan: {plan}\n{workers} # {len(workflow.steps)} steps\n{others}"


# ---------------------------------------------------------------------------------------------------------------------------------
# Systems: everything that answers gives one trace a problem, or None where what it wrote is no workflow


def conduct(model: Qwen, tokenizer: Tokenizer, problems: list[Problem], pools: list[list], plan: dict, rounds: int = 0,
            change=lambda workflow: workflow, nonce: str | None = None) -> list[Trace | None]:
    """The Conductor's greedy workflow for each problem, run over the problem's own pool, and up to `rounds` times planned again in view of
    the answer (§3.2). plan: see load_conductor. `change` may rewrite a workflow before it runs (ablations)."""
    traces = [None] * len(problems)
    for turn in range(rounds + 1):  # whoever kept its answer is through, and so is whose workers were lost
        open_ = [i for i, t in enumerate(traces) if turn == 0 or t and t.workflow.steps and not t.error and len(t.rounds()) == turn]
        running = {}

        def start(i, completion):
            with contextlib.suppress(WorkflowError):
                workflow = parse(tokenizer.decode(completion.tokens), len(pools[i]), plan["max_steps"], allow_empty=turn > 0)
                name = nonce and f"{nonce}/{problems[i].id}/{turn}"
                running[i] = submit(change(workflow), problems[i].question, pools[i], traces[i], name)

        for first in tqdm(range(0, len(open_), 64), "the Conductor", disable=None, leave=False):
            part = open_[first:first + 64]
            prompts = [tokenizer.chat(ask(problems[i].question, pools[i], plan, traces[i])) for i in part]
            generate(model, prompts, 1, plan["max_new_tokens"], 0.0, eos_id=tokenizer.end_ids, n_ids=len(tokenizer),
                     on_finish=lambda k, _, completion: start(part[k], completion))
        for i, future in running.items():
            traces[i] = future.result()
    return traces


def alone(worker, problem: Problem, nonce: str | None = None, **overrides) -> Trace:
    """The trace of a worker asked without a Conductor: one turn, the bare question."""
    trace = Trace(problem.question, Workflow([Step(0, problem.question, [])]), [worker.name], [None])
    try:
        trace.replies[0] = worker.chat([{"role": "user", "content": problem.question}], nonce, **overrides)
        trace.seconds = trace.replies[0].seconds
    except WorkerError as e:
        trace.error = str(e)
    return trace


def poll(workers: list, problem: Problem, choose, nonce: str | None = None) -> Trace:
    """Every worker asked alone; the response at choose(responses) is the answer, and stands last in the trace."""
    asked = [alone(w, problem, nonce and f"{nonce}/{i}") for i, w in enumerate(workers)]
    error = next((t.error for t in asked if t.error), None)
    asked.append(asked.pop(0 if error else choose([t.answer for t in asked])))
    steps = [Step(i, problem.question, []) for i in range(len(asked))]
    names, replies, seconds = zip(*((t.workers[0], t.replies[0], t.seconds) for t in asked))
    return Trace(problem.question, Workflow(steps), [*names], [*replies], sum(seconds), error)


def majority(responses: list[str]) -> int:
    """Where an answer stands that is given most often."""
    answers = [final_answer(r).casefold() for r in responses]
    return max(range(len(answers)), key=lambda i: answers.count(answers[i]))


def central(responses: list[str]) -> int:
    """Where the response stands that is most like the others: Smoothie (arXiv 2412.04692) judges likeness by sentence embeddings and
    over neighbouring questions too, this by the words that two responses share."""
    words = [set(re.findall(r"\w+", r.casefold())) for r in responses]
    likeness = [sum(len(a & b) / max(len(a | b), 1) for b in words) for a in words]
    return likeness.index(max(likeness))


def spelling(question: str):
    """How often each trigram stands in a question, hashed: (4096)."""
    counts = torch.zeros(4096)
    for i in range(len(question) - 2):
        counts[zlib.crc32(question[i:i + 3].casefold().encode()) % 4096] += 1
    return counts / counts.norm().clamp(min=1)


def router(pool: list, problems: list[Problem], asked: list[list[Trace]]):
    """question -> worker: who is likeliest right alone, by a logistic regression on traces [worker][problem] of train problems. Like RouterDC
    (NeurIPS 2024) it learns from each worker's success, but with these features instead of a fine-tuned encoder and contrastive losses."""
    x = torch.stack([spelling(p.question) for p in problems])  # (P, 4096)
    right = [grades(problems, traces) for traces in asked]
    y, known = (torch.tensor([[float(true(r)) for r in row] for row in right]).T for true in (bool, lambda r: r is not None))  # (P, W)
    weights = torch.zeros(4096, len(pool), requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.1, weight_decay=1e-4)
    for _ in range(300):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(x @ weights, y, known).backward()
        optimizer.step()
    return lambda question: pool[int((spelling(question) @ weights).argmax())]


SOLVE = "Find the answer: work it out, simplify, rewrite or process whatever that takes."
REFLECT = "Find what may be wrong with the last response, work it out again, and give the whole answer in its final form."
AGGREGATE = "Find out which of the responses is right, work it out again where they differ, and give the whole answer in its final form."
FORMS = {"no-few-shot": "zero-shot", "fine-grained": "fine-grained"}  # ablations that ask the Conductor in another style (Tables 9, 10)
CONDUCTORS = ("conductor", "shuffled", "no-subtasks", "one-worker", *FORMS)
WORKERS = ("workers", "reflect", "consensus", "context", "seat")  # played by one worker, each in turn
SYSTEMS = (*CONDUCTORS, *WORKERS, "best-single", "random", "moa", "smoothie", "router")


conductor = functools.lru_cache(1)(workflow.load_conductor)


def run(name: str, who: str, problems: list[Problem], pools: list[list], s, repeat: int) -> list[Trace | None]:
    """A system's traces. who: the checkpoint of a Conductor, else the worker that plays the part. A repeat is another draw of whatever is random.

    Five calls a question: reflect (five turns of self-reflection), consensus (majority of five); context is one call of five times the
    tokens; moa asks every worker and lets a random one aggregate. The calls by which a seated worker plans are in no trace."""
    pool, tag = pools[0], f"{name}:{who}/{repeat}"
    if name in CONDUCTORS:
        model, tokenizer, plan = conductor(who or s.checkpoint)

        def change(workflow):
            for step in workflow.steps:
                step.subtask = "Solve the question." if name == "no-subtasks" else step.subtask
                step.worker = [w.name for w in pool].index(s.one_worker or pool[0].name) if name == "one-worker" else step.worker
            return workflow
        pools = [team[1:] + team[:1] for team in pools] if name == "shuffled" else pools
        return conduct(model, tokenizer, problems, pools, plan | ({"style": FORMS[name]} if name in FORMS else {}), s.rounds, change,
                       tag)
    k = next((i for i, w in enumerate(pool) if w.name == who), 0)
    worker = pool[k]

    def answer(p: Problem) -> Trace | None:
        rng, nonce = random.Random(f"{tag} {p.id}"), f"{tag}/{p.id}"
        if name == "workers":
            return alone(worker, p, nonce)
        if name == "context":
            limits = {key: 5 * worker.params[key] for key in ("max_tokens", "max_completion_tokens") if key in worker.params}
            return alone(worker, p, nonce, **limits)
        if name == "consensus":
            return poll([worker] * 5, p, majority, nonce)
        if name == "smoothie":
            return poll(pool, p, central, nonce)
        if name == "router":
            return alone(route(p.question), p, nonce)
        if name == "seat":
            try:
                return workflow.conduct(p.question, pool, workflow.seat(worker, f"{nonce}/seat"), s.rounds, nonce=nonce)
            except WorkflowError:
                return None
            except WorkerError as e:
                return Trace(p.question, Workflow([]), [], [], error=str(e))
        if name == "reflect":
            steps = [Step(k, REFLECT if i else SOLVE, [*range(i)]) for i in range(5)]
        elif name == "moa":
            steps = [*(Step(i, SOLVE, []) for i in range(len(pool))), Step(rng.randrange(len(pool)), AGGREGATE, [*range(len(pool))])]
        else:
            steps = random_workflow(rng, len(pool)).steps
        return submit(Workflow(steps), p.question, pool, nonce=nonce).result()

    with ThreadPool(64) as threads:  # of daemons: Ctrl-C shall neither wait nor pay for what they are at
        if name == "router":
            lessons = load(s.benchmarks, "train", 256)
            route = router(pool, lessons, [threads.map(lambda p: alone(w, p, f"{tag}/{p.id}"), lessons) for w in pool])
        return list(tqdm(threads.imap(answer, problems), f"{name} {who}", total=len(problems), disable=None, leave=False))


def baselines(problems: list[Problem], pool) -> dict[str, list[Trace]]:
    """Traces of every single worker and of random workflows."""
    return {w.name: run("workers", w.name, problems, [pool], None, 0) for w in pool} | {
        "random workflows": run("random", "", problems, [pool], None, 0)}


def grades(problems: list[Problem], traces: list[Trace | None]) -> list[bool | None]:
    """Whether each trace is right; None where its workers were lost. As programs take minutes to grade, there are as many at a time as
    cores, and a trace is graded once, however many tables ask."""
    def graded(p, t):
        if t and not t.error and t.right is None:
            t.right = grade(p, t.answer)
        return t.right if t else False
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(graded, problems, traces))


def accuracies(problems: list[Problem], traces: list[Trace | None]) -> dict[str, float]:
    """Share of right answers, over all and by kind. A problem whose workers were lost counts for nobody."""
    found = {}
    for p, right in zip(problems, grades(problems, traces)):
        for key in ("all", p.kind) if right is not None else ():
            found.setdefault(key, []).append(right)
    return {key: sum(values) / len(values) for key, values in found.items()}


def costs(problems: list[Problem], runs: dict[str, list[list[Trace | None]]]) -> tuple[str, dict]:
    """A row for each system, as text and as numbers: accuracy in % with its standard error over repeats, and means a question of calls, steps
    of the last round, tokens, cents (None: unknown), and points of accuracy a cent ("cost-adjusted performance", Tables 5 and 6). Questions
    that were lost to their workers are in none of them."""
    wide, numbers = max(30, *map(len, runs)), {}
    lines = [f"{'':<{wide}}{'accuracy':>9}{'±':>7}{'calls':>8}{'steps':>8}{'tokens':>8}{'cents':>9}{'points/cent':>13}"]
    for name, repeats in runs.items():
        shares, traces = [accuracies(problems, traces) for traces in repeats], [t for traces in repeats for t in traces if t and not t.error]
        lost = [t.error for traces in repeats for t in traces if t and t.error]
        values, asked = [100 * share["all"] for share in shares if share], max(len(repeats) * len(problems) - len(lost), 1)
        mean = statistics.fmean(values) if values else None
        cents = None if any(t.cost is None for t in traces) else 100 * sum(t.cost for t in traces) / asked
        error = statistics.stdev(values) / math.sqrt(len(values)) if values[1:] else None
        row = {"accuracy": mean, "error": error, "calls": sum(t.calls for t in traces) / asked,
               "steps": sum(len(t.workflow.steps) for t in traces) / asked, "tokens": sum(t.tokens for t in traces) / asked, "cents": cents,
               "points_per_cent": mean / cents if cents and values else None, "lost": len(lost)}
        cells = zip(row.values(), (9, 7, 8, 8, 8, 9, 13), (2, 2, 2, 2, 0, 4, 1))
        lines.append(f"{name:<{wide}}" + "".join(f"{'?':>{width}}" if x is None else f"{x:{width}.{digits}f}" for x, width, digits in cells)
                     + (f"   {len(lost)} not counted: {lost[0]}" if lost else ""))
        for kind in dict.fromkeys(kind for share in shares for kind in share if kind != "all"):
            known = [100 * share[kind] for share in shares if kind in share]
            row[kind] = sum(known) / len(known)
        numbers[name] = row
    return "\n".join(lines), numbers


def table(problems: list[Problem], systems: dict[str, list[Trace | None]]) -> str:
    """A text table: accuracy over all and by kind, and mean calls, a row for each system."""
    kinds, wide = list(dict.fromkeys(p.kind for p in problems)), max(24, *map(len, systems))
    lines = [f"{f'accuracy, {len(problems)} problems':<{wide}}{'all':>6}{'calls':>7}  " + "  ".join(kinds)]
    for name, traces in systems.items():
        share, counted = accuracies(problems, traces), [t.calls if t else 0 for t in traces if not t or not t.error]
        cells = [f"{share[k]:{len(k)}.2f}" if k in share else f"{'?':>{len(k)}}" for k in kinds]  # ?: all its calls were lost
        lines.append(f"{name:<{wide}}{share['all'] if share else math.nan:6.3f}{sum(counted) / max(len(counted), 1):7.2f}  " + "  ".join(cells))
    return "\n".join(lines)


def kept(problems: list[Problem], traces: list[Trace | None]) -> dict[str, float]:
    """How often a second round wrote three empty lists, where the answer so far was right and where it was wrong (None: it never was)."""
    firsts = grades(problems, [t and t.rounds()[0] for t in traces])
    second = [(right, not t.rounds()[1].workflow.steps) for right, t in zip(firsts, traces) if t and t.previous]
    shares = {name: [empty for right, empty in second if right == value] for name, value in (("kept_right", True), ("kept_wrong", False))}
    return {name: sum(values) / len(values) if values else None for name, values in shares.items()}


def read_numbers(file: str) -> dict[str, dict]:
    """What an evaluation wrote with --out: name -> numbers."""
    numbers = read_json(file)
    if not all(isinstance(row, dict) for row in numbers.values()):
        raise ValueError(f"{file} is not what eval.py writes with --out")
    return numbers


def average(files: list[str]) -> str:
    """The numbers of several --out files, line by line: mean and 95 % interval (Student's t) over the files."""
    t = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}.get(len(files), 2.262)
    runs, lines = [read_numbers(file) for file in files], []
    for system in runs[0]:
        for key in runs[0][system]:
            values = [run.get(system, {}).get(key) for run in runs]
            if None in values:  # unknown, or not in every file
                continue
            error = t * statistics.stdev(values) / math.sqrt(len(values))
            lines.append(f"{system:<40}{key:<26}{statistics.fmean(values):6.3f} ± {error:.3f}   {'  '.join(f'{v:.3f}' for v in values)}")
    return "\n".join(lines)


def learned(problems: list[Problem], traces: list[Trace | None]) -> str:
    """For each kind the workflow shape most often written (who, seeing what), its share, and one example."""
    lines, shapes = [], {}
    for p, t in zip(problems, traces):
        if t:
            shape = tuple(t.workers), tuple(tuple(step.access) for step in t.workflow.steps)
            shapes.setdefault(p.kind, {}).setdefault(shape, []).append(t)
    for kind, found in shapes.items():
        t, *others = max(found.values(), key=len)
        share = (1 + len(others)) / sum(p.kind == kind for p in problems)
        lines.append(f"{kind}: {len(t.workers)} step{'s'[:len(t.workers) > 1]}, written for {share:.0%}.  {t.question}")
        for step, worker, response in zip(t.workflow.steps, t.workers, t.responses):
            sees = f", seeing step{'s'[:len(step.access) > 1]} {' and '.join(str(i + 1) for i in step.access)}" if step.access else ""
            lines.append(f"    {worker}, told {step.subtask!r}{sees}: {response}")
    return "\n".join(lines)


def plot(path: str):
    """Of a training run: accuracy by kind with the level of the best worker alone (Fig. 3), the workers' shares of the steps (Fig. 7) and the
    steps by kind (Fig. 8) over iterations, into RUN/curve.png. Of the numbers of an evaluation: cost against accuracy (Fig. 5), beside it."""
    if path.endswith(".json"):
        rows = {name: row for name, row in read_numbers(path).items() if row.get("accuracy") is not None and "tokens" in row}
    else:
        with open(os.path.join(path, "metrics.jsonl")) as f:
            lines = [json.loads(line) for line in f]
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise SystemExit("drawing needs matplotlib: pip install matplotlib") from None
    plt.switch_backend("Agg")

    def smooth(values, span=10):  # mean of the last `span`
        return [sum(values[max(0, i - span + 1):i + 1]) / len(values[max(0, i - span + 1):i + 1]) for i in range(len(values))]

    if path.endswith(".json"):
        priced, file = all(row["cents"] for row in rows.values()), path.removesuffix(".json") + ".png"
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        for name, row in rows.items():
            x = row["cents" if priced else "tokens"]
            axes.errorbar(x, row["accuracy"], row["error"], fmt="o")
            axes.annotate(name, (x, row["accuracy"]), xytext=(4, 4), textcoords="offset points", fontsize=8)
        axes.set(xlabel="cents a question" if priced else "workers' tokens a question", ylabel="accuracy, %")
    else:
        if not lines:
            raise ValueError(f"{path}/metrics.jsonl is empty: the run has not finished an iteration")
        figure, (top, shares, steps) = plt.subplots(3, figsize=(8, 11), layout="constrained", sharex=True)
        for axes, key in ((top, "by_kind"), (shares, "workers"), (steps, "steps_by_kind")):
            for name in dict.fromkeys(name for line in lines for name in line[key]):
                axes.plot(smooth([line[key].get(name, 0.0) for line in lines]), linewidth=1.2, label=name)
        top.plot(smooth([line["accuracy"] for line in lines]), color="black", linewidth=2.4, label="all")
        if os.path.exists(test := os.path.join(path, "test.json")):
            best, level = max(((name, row["all"]) for name, row in read_json(test).items() if name != "Conductor"), key=lambda item: item[1])
            top.axhline(level, color="grey", linestyle="--", label=f"{best} alone")
        top.set(ylabel="accuracy of sampled workflows", ylim=(0, 1))
        shares.set(ylabel="share of the steps")
        steps.set(ylabel="steps of a workflow", xlabel="iteration (mean of the last 10)")
        for axes in (top, shares, steps):
            axes.legend(fontsize=8)
        file = os.path.join(path, "curve.png")
    figure.savefig(file, dpi=120)
    print(file)


@dataclass
class Settings:
    checkpoint: str = "out/laptop/checkpoint"
    benchmarks: str = "laptop"  # or files, with commas between
    test: int = 224  # problems of each
    systems: str = "conductor,workers,random"  # of SYSTEMS; NAME:WORKER or conductor:DIR for one only
    repeats: int = 1
    pool: str = "local"
    only: str = ""  # some of its workers, by name, with commas between
    subset: int = 0  # each problem has its own workers: this many, drawn among those subsets that can solve it (laptop world)
    one_worker: str = ""  # who does every step in the system one-worker; "" is the first
    rounds: int = 0  # of recursion, after the first workflow
    budget: float = 0.0  # dollars that the workers may cost; 0: no limit
    replay: str = ""  # a file that keeps the workers' replies, so that an evaluation started again does not pay for them again
    out: str = ""  # a file for the numbers, as JSON


def main(argv):
    s = Settings()
    words = configure(s, argv)
    try:
        if words[:1] == ["plot"] and len(words) == 2:
            return plot(words[1])
        if words == ["prepare"]:
            return prepare()
        if words[:1] == ["average"] and len(words) > 2:
            return print(average(words[1:]))
        if words:
            raise SystemExit(__doc__)
        if min(s.test, s.repeats) < 1 or min(s.rounds, s.subset, s.budget) < 0:
            raise ValueError("--test and --repeats are numbers from 1 on, --rounds, --subset and --budget from 0 on")
        if os.path.isdir(s.out):
            raise ValueError(f"--out={s.out}: a folder, where a file's name is wanted")
        os.makedirs(os.path.dirname(s.out) or ".", exist_ok=True)
        pool = subset(load_pool(s.pool, replay=s.replay, budget=s.budget), s.only)
        names, numbers, wanted = [w.name for w in pool], {}, []
        if taken := {*names} & {*SYSTEMS, "random workflows"}:
            raise ValueError(f"a worker of the pool has a system's name, {taken.pop()}: rename it")
        for word in s.systems.split(","):
            name, _, who = word.strip().partition(":")
            if name not in SYSTEMS:
                raise ValueError(f"--systems={word}: there are {', '.join(SYSTEMS)}")
            if name not in (*CONDUCTORS, *WORKERS) and who or name in WORKERS and who and who not in names or s.one_worker not in ("", *names):
                raise ValueError(f"{word}, --one_worker={s.one_worker}: the pool has {', '.join(names)}, and {', '.join(WORKERS)} take one of them")
            if s.subset and (name not in CONDUCTORS or name == "one-worker"):
                raise ValueError(f"--subset is for the Conductor (--systems=conductor), not for {name}")
            wanted += [(name, n) for n in names] if name in WORKERS and not who else [(name, who)]
        if ("best-single", "") in wanted and not {("workers", w.name) for w in pool} <= {*wanted[:wanted.index(("best-single", ""))]}:
            raise ValueError("best-single is the best of workers, which must have answered before: --systems=workers,best-single")
        if s.subset and s.benchmarks != "laptop":
            raise ValueError("--subset knows for --benchmarks=laptop only who can solve a problem")
        tests = {data: load(data, "test", s.test) for data in s.benchmarks.split(",")}
        for name, who in wanted:
            if name in CONDUCTORS and not os.path.exists(os.path.join(who or s.checkpoint, "config.json")):
                raise FileNotFoundError(f"no checkpoint in {who or s.checkpoint}: train.py makes one, --checkpoint=DIR names another")
            if name == "router" and (files := [data for data in tests if data not in ("laptop", *MIXES) and (data, "train") not in SOURCES]):
                raise ValueError(f"router learns from a train split, which {files[0]} does not have")
        if any(p.grader in ("code", "unittest") for problems in tests.values() for p in problems):
            run_code("pass", None, [""], 60)  # says what the sandbox lacks
        for data, problems in tests.items():
            rng, runs, notes = random.Random(0), {}, {}
            pools = [draw_pool(p, pool, s.subset, rng) if s.subset else pool for p in problems]
            for name, who in wanted:
                if name == "best-single":  # in hindsight, of those that have answered
                    best = max((w.name for w in pool), key=lambda n: sum(accuracies(problems, traces).get("all", 0.0) for traces in runs[n]))
                    runs[f"best-single {best}"] = runs[best]
                    continue
                repeats = [run(name, who, problems, pools, replace(s, benchmarks=data), i) for i in range(s.repeats)]
                label = who if name == "workers" else {"random": "random workflows"}.get(name, f"{name} {who}".strip())
                for r in range(s.rounds + 1) if name in (*CONDUCTORS, "seat") else [0]:
                    runs[f"{label}{f', {r} more' * (r > 0)}"] = [[t and t.rounds()[:r + 1][-1] for t in ts] for ts in repeats]
                if s.rounds and name in CONDUCTORS:
                    notes[f"{data}, {label}, second rounds"] = kept(problems, repeats[0])
            text, rows = costs(problems, runs)
            if data == "laptop" and s.pool in LOCAL:
                notes["laptop, best workflows"] = {"accuracy": 100 * sum(map(possible, problems, pools)) / len(problems)}
            print(f"{table(problems, {name: repeats[0] for name, repeats in runs.items()})}\n\n{text}\n")
            for name, row in notes.items():
                print(f"{name}: " + ", ".join(f"{key} {value if value is None else round(value, 3)}" for key, value in row.items()))
            numbers |= {f"{data}, {name}": row for name, row in rows.items()} | notes
            if "conductor" in runs:
                print("\n" + learned(problems, runs["conductor"][0]))
            if s.out:
                write_json(s.out, numbers)
        if pool[0].budget and pool[0].budget.refused:
            raise SystemExit(f"the budget of ${s.budget:g} is spent: what came after is not counted above")
    except (OSError, ValueError, WorkerError) as e:
        raise SystemExit(f"{type(e).__name__}: {e}") from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None


if __name__ == "__main__":
    main(sys.argv[1:])
