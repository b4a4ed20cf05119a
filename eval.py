"""Problems, graders, baselines and tables.

    python eval.py --checkpoint=DIR      the Conductor beside every single worker and random workflows, on held-out problems
    python eval.py --benchmarks=A --systems=B     other problems, other systems (README)
    python eval.py prepare               fetch the training data (1.6 GB), write data/paper.jsonl and data/recursion.jsonl
    python eval.py plot RUN              draw a run's learning into RUN/curve.png, of FILE.json cost and accuracy (needs matplotlib)
    python eval.py --bench               how many solutions a second the sandbox takes
    python eval.py average FILE …        mean and 95 % interval of the numbers that several evaluations wrote with --out

The laptop world's problems are generated here: some need one of the local specialists (workers.py), some two, some three in the right
order and with the right access lists. Read train.py next.
"""
import ast
import base64
import cmath
import contextlib
import functools
import hashlib
import itertools
import json
import math
import operator
import os
import pickletools
import random
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
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
from workers import ARITHMETIC, CAPITALS, ELEMENTS, FACTS, LOCAL, SKILL, SPANISH, SPELLING, WorkerError, load_pool
import workflow
from workflow import Prompting, Step, Task, Trace, Workflow, execute, subset

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
# Code: a generated program runs in a sandbox; what it prints or returns leaves it as data, and this process compares

# What LiveCodeBench puts before a program, in its order (import_string in lcb_runner/evaluation/testing_util.py)
MODULES = "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json".split()
PRELUDE = "\n".join([*(f"from {m} import *" for m in [*MODULES, "builtins", "typing"]), f"import {', '.join(MODULES)}",
                     "sys.setrecursionlimit(50_000)"])
SANDBOXES = threading.Semaphore(os.cpu_count() or 1)  # no more at a time than there are cores, as their time is limited
MAX_OUTPUT = 32 << 20  # bytes that all tests of a program together may print or return

# The supervisor: it builds the prison, forks a process for each test and reports. It is given the tests' inputs, never their outputs.
# Its numbers are those of linux/{sched,mount,sockios,prctl,capability,landlock}.h and of Landlock's calls, on every architecture the same.
SUPERVISOR = r'''
import contextlib, ctypes, gc, json, os, resource, signal, struct, sys, tempfile, types

job, report, folder = json.load(open(0, closefd=False)), os.fdopen(os.dup(1), "wb", 0), os.getcwd()
linux, libc, gid = sys.platform == "linux", ctypes.CDLL(None), os.getgid()
root = os.getuid() == 0 and not (linux and int(open("/proc/self/uid_map").read().split()[-1]) < 65536)  # one with other users beside it
uid = 61184 + os.getpid() % 4336 if root else os.getuid()  # limits do not bind root: one of systemd's users for passing services
if linux:
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it ends with who asked
    open("/proc/self/oom_score_adj", "wb", 0).write(b"1000")  # when memory runs out, the kernel takes this first
spaces = linux and libc.unshare(0x68020000 | (0x10000000, 0)[root]) == 0  # mounts, IPC, processes, network; users too, without root
if spaces:
    for file, text in () if root else (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        open(f"/proc/self/{file}", "wb", 0).write(text.encode())
    if os.fork():
        os.wait()
        os._exit(0)
    libc.mount(b"none", b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
    libc.mount(b"proc", b"/proc", b"proc", 14, None)
    libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 6, b"size=128m,mode=700,uid=%d" % uid)
    libc.ioctl(libc.socket(2, 1, 0), 0x8914, struct.pack("16sH22x", b"lo", 1))  # a loopback of its own
os.chdir(folder)
abi = libc.syscall(444, None, 0, 1) if linux else 0
if abi > 0:  # Landlock, for the tests: Python and the system's libraries to read, the folder to write, no signal to the outside
    rights = (1 << (16 if abi > 4 else min(12 + abi, 15))) - 1
    rules = libc.syscall(444, struct.pack("QQQ", rights, 3 * (abi > 3 and not spaces), 3 * (abi > 5)), 24, 0)
    read = {sys.prefix, sys.base_prefix, *"/lib /lib64 /bin /proc /dev/zero /dev/random /dev/urandom /sys/devices/system/cpu /etc/ld.so.cache "
            "/etc/localtime /etc/passwd /usr/bin /usr/lib /usr/lib64 /usr/libexec /usr/local /usr/share".split()} - {"/usr"}  # /usr/src/app is a project
    for path, access in [(folder, rights), ("/dev/null", 6), *((p, 13) for p in read if os.path.exists(p))]:
        beneath = struct.pack("=Qi", access if os.path.isdir(path) else access & 7, os.open(path, os.O_PATH))
        libc.syscall(445, rules, 1, beneath, 0)
if root:
    os.chown(folder, uid, uid)
    linux and libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS, to read a Python that stands in /root
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
if linux:
    keep = (4 * root, 2 * (root and abi > 0), 0)  # CAP_DAC_READ_SEARCH, else CAP_DAC_OVERRIDE, else nothing
    any(libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", k, k, 0, 0, 0, 0)) == 0 for k in keep)
    # PR_SET_: PDEATHSIG again; DUMPABLE, no test looks into this process; CHILD_SUBREAPER, orphans become its children; NO_NEW_PRIVS
    for option, value in ((1, signal.SIGKILL), (4, 0), (36, 1), (38, 1)):
        libc.prctl(option, value, 0, 0, 0)
others = 0  # processes count by user, since Linux 5.14 apart in each namespace
for process in filter(str.isdigit, os.listdir("/proc") if linux and not (root or spaces and abi > 1) else ()):
    with contextlib.suppress(OSError):
        others += len(os.listdir(f"/proc/{process}/task")) if os.stat(f"/proc/{process}").st_uid == uid else 0
prelude = compile(job["prelude"], "prelude", "exec")
exec(prelude, {})  # imports once what every test imports again
gc.freeze()
report.write(json.dumps([text for holds, text in (
    (spaces, "no namespaces: the network is cut for TCP alone" if abi > 3 else "no namespaces: the network is open to it"),
    (abi > 0, "no Landlock: files are open to it as they are to you"),
    (spaces or root or abi > 5, "no Landlock of Linux 6.12: it may signal your processes" + " and read their environment" * (abi < 1)),
    (linux, "not Linux: no limit on memory and processes, and a daemon survives")) if not holds]).encode() + b"\n")

def send(pids, number):
    for p in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(p, number)

signal.signal(signal.SIGALRM, lambda *_: send([pid], signal.SIGKILL))
for test in job["tests"]:
    source, out = tempfile.TemporaryFile(), tempfile.TemporaryFile(buffering=0)
    source.write(b"" if job["name"] else test.encode())
    source.seek(0)
    pid = os.fork()
    if pid == 0:
        break
    signal.setitimer(signal.ITIMER_REAL, job["seconds"])
    status = os.waitpid(pid, 0)[1]
    signal.setitimer(signal.ITIMER_REAL, 0)
    data = os.pread(out.fileno(), job["max_output"], 0)
    job["max_output"] -= len(data)
    if status or job["max_output"] == 0:
        break  # all tests must pass: the others do not matter
    report.write(b"%d\n" % len(data) + data)
if pid:  # in a namespace all end with this process; elsewhere all are stopped before any is killed, or forks would fill the gaps
    below, before = [], None
    while linux and not spaces and below != before:
        before, below = below, [os.getpid()]
        for parent in below:  # grows underway
            with contextlib.suppress(OSError):
                for thread in os.listdir(f"/proc/{parent}/task"):
                    below += map(int, open(f"/proc/{parent}/task/{thread}/children").read().split())
        send(below[1:], signal.SIGSTOP)
    send(below[1:], signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while linux and not spaces:
            os.wait()
    os._exit(0)

# From here on a test's process
os.setsid()
signal.signal(signal.SIGALRM, signal.SIG_DFL)
report.close()
null = os.open("/dev/null", os.O_RDWR)
for fd, to in ((source.fileno(), 0), (null if job["name"] else out.fileno(), 1), (null, 2)):
    os.dup2(fd, to)
limits = {"CPU": int(job["seconds"]) + 1, "FSIZE": 32 << 20, "NOFILE": 256, "CORE": 0}
if linux:
    limits |= {"NPROC": 64 + others, "AS": job["memory"] << 30, "DATA": 4 << 30, "STACK": 64 << 20}
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
for name, value in limits.items():
    what, hard = getattr(resource, "RLIMIT_" + name), resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1]
    resource.setrlimit(what, (value if hard < 0 else min(value, hard),) * 2)
if abi > 0 and libc.syscall(446, rules, 0):
    os._exit(1)
sys.argv, main = ["solution.py"], types.ModuleType("solution" if job["name"] else "__main__")
sys.modules[main.__name__] = main
exec(prelude, vars(main))
with contextlib.suppress(SystemExit):  # whatever its code, as in LiveCodeBench
    exec(compile(job["program"], "solution.py", "exec"), vars(main))
if job["name"]:
    def plain(v):
        return [*map(plain, v)] if isinstance(v, list) else {"tuple": [*map(plain, v)]} if isinstance(v, tuple) else v
    value = getattr(main.Solution() if hasattr(main, "Solution") else main, job["name"])(*map(json.loads, test.split("\n")))
    value = plain(list(value) if isinstance(value, tuple) else value)
    out.write(json.dumps(value, default=lambda v: v.item()).encode())  # item(): numpy's scalars
    os._exit(0)
'''


def run_code(program: str, name: str | None, tests: list[str], seconds: float, memory: int = 4) -> list:
    """Run a program that nobody has read in a sandbox. Without a name it is __main__ and reads a test from its standard input; else its
    function (or Solution's method) of that name gets a test's lines as JSON arguments. Returns what each test printed or, as JSON, returned
    (bytes); None from the first test on that crashed, took over `seconds` of wall time or with which all wrote MAX_OUTPUT.

    The child has a session, folder and environment of its own, limits on CPU, memory (`memory` GiB of addresses for each of 64 processes),
    files and cores, and as far as the kernel allows: namespaces (no network; all that it started ends with it) and Landlock
    (docs.kernel.org/userspace-api/landlock.html: it reads Python's and the system's libraries alone, and writes in its folder alone). For
    root it is another user. A warning says what the system lacks, OSError that it allows nothing. The kernel's own flaws stay open."""
    job = dict(program=program, name=name, tests=tests, seconds=seconds, memory=memory, prelude=PRELUDE, max_output=MAX_OUTPUT)
    folder, child = tempfile.mkdtemp(), None
    try:
        with SANDBOXES, tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as told:
            asked.write(json.dumps(job).encode())
            asked.seek(0)
            with contextlib.suppress(subprocess.TimeoutExpired):  # only where a test can stop its supervisor
                child = subprocess.run(
                    [sys.executable, "-I", "-X", "utf8", "-X", "int_max_str_digits=50000", "-c", SUPERVISOR], cwd=folder, start_new_session=True,
                    env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "TZ": "UTC", "OMP_NUM_THREADS": "1"},
                    stdin=asked, stdout=told, stderr=subprocess.PIPE, timeout=(seconds + 1) * len(tests) + 30)
            told.seek(0)
            lost, outputs = told.readline(), []
            while size := told.readline():
                outputs.append(told.read(int(size)))
    finally:
        subprocess.run(["rm", "-rf", folder])  # trees too deep for shutil
    if not lost:
        why = child.stderr.decode(errors="replace").strip() if child else "it did not start in time"
        raise OSError(f"no sandbox with {sys.executable}: {why}")
    if json.loads(lost):
        warnings.warn("the sandbox of generated code holds only in part here; " + "; ".join(json.loads(lost)))
    return outputs + [None] * (len(tests) - len(outputs))


def extract_code(response: str) -> str:
    """The last fenced block of a response, though its end is missing; else what stands in its last <answer> tag; else nothing."""
    blocks = re.findall(r"```[\w+#.-]*[ \t]*\r?\n(.*?)(?:^[ \t]*```(?!\w)|```[ \t]*(?:</answer>|\r?$)|\Z)", response, re.DOTALL | re.MULTILINE)
    tagged = response.rpartition("</answer>")[0].rpartition("<answer>")
    return textwrap.dedent(blocks[-1] if blocks else tagged[2] if tagged[1] else "").strip("\n")


def same_output(out: bytes | None, expected: str, returned: bool) -> bool:
    """The rules of LiveCodeBench's lcb_runner/evaluation/testing_util.py: a returned value (JSON) by value; what is printed line by line,
    stripped, as text or as Decimal tokens. Something a hundred times as long as expected is not read."""
    if out is None or len(out) > 1000 + 100 * len(expected):
        return False
    try:
        if returned:
            return json.loads(out) == json.loads(expected)
        printed, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (out.decode(errors="replace"), expected))
        return len(printed) == len(wanted) and all(
            a == b or [*map(Decimal, a.split())] == [*map(Decimal, b.split())] for a, b in zip(printed, wanted))
    except (ValueError, RecursionError, InvalidOperation):  # no JSON, too deep, no numbers
        return False


def passes_livecodebench(code: str, tests: list[list[str]], fn_name: str | None = None, seconds: float = 6.0) -> bool:
    """Whether a program passes all tests of a LiveCodeBench problem, [input, output] as in stored_tests; fn_name is metadata["func_name"];
    seconds are a test's. A returned tuple stands for a list at the top alone."""
    if not tests:
        raise ValueError("a LiveCodeBench problem without tests: nothing can be graded by it, load it again")
    outputs = run_code(code, fn_name, [given for given, _ in tests], seconds)
    return all(same_output(out, wanted, fn_name is not None) for out, (_, wanted) in zip(outputs, tests))


def bench(n: int = 100):
    """Small solutions a second through the sandbox, with as many at a time as there are cores. The last line is JSON."""
    program = ("def count(words):\n    seen = {}\n    for w in words:\n        seen[w] = seen.get(w, 0) + 1\n"
               "    return [list(pair) for pair in sorted(seen.items())]\n")
    tests = [[json.dumps(words), json.dumps(sorted(map(list, Counter(words).items())))]
             for words in ([], ["a"], ["a", "b", "a"], ["x"] * 50, [*"abracadabra"], [*"mississippi"], ["", " "])]
    begun = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        passed = sum(threads.map(lambda _: passes_livecodebench(program, tests, "count"), range(n)))
    seconds = time.perf_counter() - begun
    print(json.dumps({"solutions": n, "tests_of_each": len(tests), "passed": passed, "cores": os.cpu_count(),
                      "per_second": round(n / seconds, 1)}))


# BigCodeBench's tests patch a solution's module and look into what it returns: they must share its process. So tests that nothing can pass
# are mixed in: who switches off the judge passes those too.
IMPOSSIBLE = ("fail()", "assertEqual(0, 1)", "assertEqual([0], [1])", "assertTrue(0)", "assertFalse(1)", "assertIn(0, ())",
              "assertIsNone(0)", "assertIsInstance(0, str)", "assertAlmostEqual(0, 1)", "assertGreater(0, 1)", "assertRaises(OSError, int)")
UNITTESTS = r'''
import contextlib, functools, os, sys, types, unittest

def run(code, tests, name):
    module = sys.modules["__test__"] = types.ModuleType("__test__")
    vars(module).update(sys=sys, os=os, environ=os.environ, __file__="__test__.py")
    exec(compile(code, "__test__.py", "exec"), vars(module))
    solve = getattr(module, name)
    @functools.wraps(solve)
    def honest(*args, **kwargs):
        value = solve(*args, **kwargs)
        for v in [value, *(value if isinstance(value, (list, tuple)) else ())]:
            with contextlib.suppress(TypeError, ValueError):  # numpy and pandas compare by element
                if v == object():
                    raise AssertionError("a result that equals everything")
        return value
    setattr(module, name, honest)
    exec(compile(tests, "__test__.py", "exec"), vars(module))
    passed, result = [], unittest.TestResult()
    result.addSuccess = lambda case: passed.append(case.id().split(".")[-1])
    unittest.defaultTestLoader.loadTestsFromTestCase(module.TestCases).run(result)
    return [sorted(passed), sorted({case.id().split(".")[-1] for case, _ in result.failures + result.errors})]
'''


def passes_bigcodebench(code: str, test: str, entry_point: str, code_prompt: str, seconds: float = 240.0) -> bool:
    """Whether a solution passes every method of the class TestCases of a BigCodeBench problem's `test`. It is "calibrated" as in
    bigcodebench/evaluate.py: code_prompt and `pass` stand before it. seconds are the whole class's. Without the libraries of
    BigCodeBench's Requirements/requirements-eval.txt honest solutions fail.

    Exiting, printing, patching unittest, skipping, results that equal everything, and what frames or gc show do not make a solution pass.
    One written against this very scheme could: it shares a process with the tests and can read them there."""
    names = sorted({f.name for c in ast.parse(test).body if isinstance(c, ast.ClassDef) and c.name == "TestCases" for f in c.body
                    if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) and f.name.startswith("test")})
    if not names:
        raise ValueError("a BigCodeBench problem whose TestCases has no tests: nothing can be graded by it, load it again")
    traps = {f"test_zz_{os.urandom(8).hex()}": f"self.{names[i % len(names)]}(), self.{wrong}" for i, wrong in enumerate(IMPOSSIBLE)}
    test = "\n".join([test, *(f"TestCases.{name} = lambda self: ({body})" for name, body in traps.items())])
    arguments = "\n".join(map(json.dumps, (f"{code_prompt}\n    pass\n{code}", test, entry_point)))
    out, = run_code(UNITTESTS, "run", [arguments], seconds, 32)
    return same_output(out, json.dumps([names, sorted(traps)]), True)


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


def conduct(model: Qwen, tokenizer: Tokenizer, problems: list[Problem], pools: list[list], prompting: Prompting, rounds: int = 0,
            change=None, nonce: str | None = None) -> list[Trace | None]:
    """The Conductor's greedy workflow for each problem, run over the problem's own pool, and up to `rounds` times planned again in view of
    the answer (§3.2). `change` may rewrite a workflow before it runs (ablations)."""
    tasks = [Task(p.question, pool, name=f"{nonce}/{p.id}" if nonce else "") for p, pool in zip(problems, pools)]
    write = workflow.sampled(model, tokenizer, prompting, 0.0)
    return [rollout.trace for rollout in workflow.conduct(write, tasks, rounds, prompting, tries=1, edit=change)]


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
        return conduct(model, tokenizer, problems, pools, replace(plan, style=FORMS.get(name, plan.style)), s.rounds, change,
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
            task = Task(p.question, pool, name=nonce)
            return workflow.conduct(workflow.seated(worker, f"{nonce}/seat"), [task], s.rounds)[0].trace
        if name == "reflect":
            steps = [Step(k, REFLECT if i else SOLVE, [*range(i)]) for i in range(5)]
        elif name == "moa":
            steps = [*(Step(i, SOLVE, []) for i in range(len(pool))), Step(rng.randrange(len(pool)), AGGREGATE, [*range(len(pool))])]
        else:
            steps = random_workflow(rng, len(pool)).steps
        return execute(Workflow(steps), p.question, pool, name=nonce)

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
    bench: bool = False  # time the sandbox instead


def main(argv):
    s = Settings()
    words = configure(s, argv)
    try:
        if words[:1] == ["plot"] and len(words) == 2:
            return plot(words[1])
        if s.bench:
            return bench()
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
