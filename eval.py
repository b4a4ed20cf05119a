"""Problems, graders, systems and tables (§4).

    python eval.py --checkpoint=DIR     the Conductor beside every single worker and random workflows
    python eval.py --benchmarks=A,B --systems=C,D        other problems, other systems: see SYSTEMS
    python eval.py prepare [--pool=P]   fetch 1.3 GB of training data, write data/{paper,recursion}.jsonl
    python eval.py average FILE FILE …  means and 95 % intervals of what evaluations wrote with --out

A problem has a question, an answer and a grader. A system turns problems into traces; the Conductor's is
`run_conductor`. It stands in the appendix, as do the graders, the sandbox, the laptop world, other systems,
public benchmarks, `load` (problems by name), `accuracies` and `measure` (what traces come to). Read train.py
next.
"""
import ast
import atexit
import base64
import contextlib
import ctypes
import difflib
import errno
import functools
import gc
import glob
import inspect
import io
import itertools
import json
import marshal
import math
import operator
import os
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
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from multiprocessing.pool import ThreadPool

import numpy as np
import requests
import torch
from requests.adapters import HTTPAdapter, Retry
from tqdm import tqdm

from model import checkpoint_file, configure, read_json, write_json
from workers import (ARITHMETIC, FACTS, LIMITS, LOCAL, ORDERS, SKILL, SPANISH, SPELLING, WorkerError,
                     load_pool, silent, unset_in, warn)
from workflow import (SOLVE_IT, Prompting, Step, Task, Trace, Workflow, as_lists, conduct, execute,
                      load_conductor, model_conductor, pool_of, printable, shape, subset, warn_of_others,
                      worker_conductor)

# -----------------------------------------------------------------------------------------------------------
# Problems


@dataclass
class Problem:
    id: str
    question: str
    answer: str
    kind: str  # what tables group by
    grader: str = "exact"  # see `grade`
    level: int = 0  # the larger, the harder; 0: unknown
    extra: dict = field(default_factory=dict)  # what its grader needs besides: EXTRA


def grade(problem: Problem, response: str) -> bool:
    """Whether a response answers the problem, by the problem's grader. An unreadable response is wrong."""
    gold = problem.answer
    extra = problem.extra
    if problem.grader == "code":
        return passes_livecodebench(extract_code(response), tests_of(problem), extra["function"])
    if problem.grader == "unittest":
        code = extract_code(response)
        return passes_bigcodebench(code, extra["test"], extra["entry_point"], extra["code_prompt"])
    if problem.grader == "letter":
        return pick_letter(response, extra["choices"]) == gold
    if problem.grader in ("math", "short"):
        answer = final_answer(response)
        is_same = same_math if problem.grader == "math" else same_short
        # To copy the question's formula is no answer, and shall not pay.
        return is_same(answer, gold) and not copied(answer, problem.question, gold)
    if problem.grader == "exact":
        return tagged(response) == gold  # the last <answer> tag's content, or all of a response without one
    raise ValueError(f"grade has no case for the grader {problem.grader!r}")


# -----------------------------------------------------------------------------------------------------------
# Appendix: graders of text, the sandbox, the laptop world, more systems, public benchmarks and the training
# mixes, tables, the command line

# -----------------------------------------------------------------------------------------------------------
# Graders of text: mathematics, letters, short answers. What they read was written by a model that is paid for
# being judged right. None of it is run; what the reader does not know ends the reading, and then only equal
# text is equal.

LETTERS = "ABCDEFGHIJ"  # of the choices
LONGEST = 1000  # characters of an answer: a longer one is wrong
MOST = 100      # parts of a list
DEEPEST = 20    # brackets in brackets
BITS = 4000     # half of those of a fraction's two numbers together
FINE = 10 ** 9  # a fraction of larger size is not mixed with floats
ENOUGH = 3      # points at which two expressions must both have a value


class Unreadable(Exception):
    """A text is no mathematics that the reader knows, or it has no value, or too large a one."""


# What a response commits to

BETWEEN = re.compile(r"(?:[\s$,;]|(?<!\*)\*{2,3}(?!\*)|\\[(),; ]"
                     r"|\\q?quad\b|\b(?:and|or)\b|\\text\{\s*(?:and|or)\s*\}|\b[A-Za-z](?:_\d)?\s*=)*")
BEFORE = re.compile(r"""  # where no box stands: behind
    (?: (?<!\\)[-+−–/^_±√<≤≥≠|{(\[¬~] | (?<![\w)])!= | [\w})\]]\s*\*+          # a sign, a bracket, a factor
      | \b(?:not|never|minus|negative) | n't                                    # a denial
      | \\(?!(?:q?quad|displaystyle|[Ll]arge|therefore|implies|to|(?:[Ll]ong)?(?:[Ll]eft)?[Rr]ightarrow|iff
            |approx|equiv|in)\b)[A-Za-z]+                                       # a command: \neq, \sqrt
    ) (?:[\s$}]|\\[,;:!\ ])* \Z
    | (?: (?<!\\)[)\]}] | (?<![A-Za-z\\])[A-Za-z] | \d ) [ ]? (?:\\[,;:!\ ])? \Z  # a factor without a sign
    | (?<![A-Za-z\\])[A-Za-z]+ \Z | \d[.,:$] \Z                              # a word, a digit""", re.VERBOSE)
# Bold or italic text, with the bullet of a list before it
BOLD = re.compile(r"(?m:^ *- +(?=\*))?(?<![\w)\]}*])(\*{1,3})(?![\s*])([^*\n]+)\1 ?")
MARKUP = re.compile(r"\\(?:(?:text|math|tag)\w*|begin|end)\*?\{(?![^}]*(?:not|minus|negative))[^{}]*\}"
                    r"|(?m:^ *-{3,} *$)")  # a line across the page
AFTER = re.compile(r"""  # and before
    \s*[!\d] | [A-Za-z(\[{'|]                                                  # a digit, a letter, a bracket
    | (?:[\s$]|\\[,;:!\ ])* (?:
        [/+=}≠≤≥±×·÷>] | \^(?!\{?\\circ) | <(?![/|]) | _[\w{] | [*.]\d | \{,         # an operator
        | :\s*\d | \*[\ (\\A-Za-z]
        | [-−–]\s*(?:[\d\\$(.]|[A-Za-z]\b) | \((?![^()]*(?:[a-z]{2}|≈))          # - 3, (x+1)
        | (?<!\$)(?<!\$[ ])[A-Za-z]\b(?![ ][a-z]{2})                            # i, but not "a new line"
        | (?:\\(?:text|math)\w*\{\s*)?
          (?:\w+llion|thousand|hundred|dozen|times(?=[\s$]*[\d\\])|plus|minus|squared)\b
        | \\(?!text|math|mbox|q?quad|end|tag|approx|pmod|[hv]space|blacksquare|square|Box|checkmark
              |[^A-Za-z${|])
    )
    | [\s$]* (?:[,;]|(?:\\text\{\s*)?(?:or|and)\b) [\s$}]* [-\\\d]               # "or 6"
    """, re.VERBOSE)
SAID = re.compile(r"(?i)\banswer\*{0,2}\s*(?:is\b|:)[\s:*]*|\bfinal answer\*{0,2} *\n\s*")
DENIED = re.compile(r"(?i)(?:\b(?:not|never|if|whether|unless|wrong|false|doubt|unlikely)\b|n't\b)[^.!?\n]*$")
HEDGED = re.compile(r"(?i)(?:^|[.!?,;\n])[\s*]*(?:but|or|and|however|wait|no|not|actually|alternatively"
                    r"|perhaps|maybe|it (?:could|may|might))\b")
TAKEN_BACK = re.compile(r"(?i)(?:^|[.!?]\s)[\s*]*(?:no|wait|actually|however|alternatively)\s*,")
REASON = re.compile(r"(?i)[,;.]?\s(?:because|since)\b")
NOTHING = re.compile(r"(?<![\d.})])(?:0|(?<![-+])(?<![-+] )1(?![.0]* ?[-+]))(?:\.0*)?(?![\d.])"  # + 0, 1 *
                     r"|units?\s*$|\\frac(?![A-Za-z])|[-+*/^{}()]")


def closing(text: str, start: int) -> int:
    """Where the brace that stands before `start` closes; -1 if it does not."""
    depth = 1
    for m in re.compile(r"(?s)\\.|[{}]").finditer(text, start):  # \{ is no brace
        depth += {"{": 1, "}": -1}.get(m[0], 0)
        if depth == 0:
            return m.start()
    return -1


def committed(response: str) -> str | None:
    """What stands in the last <answer>, or in the last \\boxed{} (as in MATH) if that opens behind it; None
    without either. Boxes with nothing but commas, "and", "or" and "x =" between them are one list. "" if it
    does not close, or if an alternative follows."""
    response = re.sub(r"\\[bf]?box(?:ed)?[^\S\n]{0,9}(?:\{|(\d+))",  # \boxed 2, as MATH has it too
                      lambda m: rf"\boxed{{{m[1]}}}" if m[1] else r"\boxed{", response[-200 * LONGEST:])
    response = re.sub("(?i)<(/?)answer>", r"<\1answer>", response)
    before, tag, response = response.rpartition("<answer>")
    inside, closed, later = response.partition("</answer>")
    if tag and r"\boxed{" not in later:
        return inside.replace(r"\boxed{", "{").strip() if closed else ""
    parts = []  # of the list that ends with the box
    end = -1  # of the box
    for m in re.finditer(r"\\boxed\{", response):
        if m.start() < end:  # inside of another box
            continue
        between = response[end + 1:m.start()]
        if not parts or len(between) > LONGEST or not BETWEEN.fullmatch(between):
            parts = []
            start = m.start()
        end = closing(response, m.end())
        if end < 0:
            return ""
        parts.append(response[m.end():end].replace(r"\boxed{", "{").strip())
    if not parts:
        return None
    paragraph = re.split(r"\n\s*\n", response[end + 1:][:LONGEST])[0]
    # The box itself may be bold: its stars stand on both sides.
    around = BOLD.sub(r"\2 ", response[:start][-200:] + r"\boxed{}" + paragraph)
    before, _, after = around.rpartition(r"\boxed{}")
    outside = BEFORE.search(MARKUP.sub(" ", before)) or AFTER.match(after)
    return "" if outside else ", ".join(dict.fromkeys(parts))


def final_answer(response: str) -> str:
    """What a response commits to: its last \\boxed{} or <answer>, else what follows its last "answer is" or
    "answer:"; else, or where that is denied or taken back, all of it, which is nobody's answer."""
    found = committed(response)
    response = response[-200 * LONGEST:] if found is None else found
    said = list(SAID.finditer(response))
    if not said:
        return response.strip("* \n")
    start, end = said[-1].span()
    line, _, later = response[end:].partition("\n")
    line, *reason = REASON.split(line, maxsplit=1)
    sentences = re.sub(r"(?<=[^.])\.([*$]*)\s+(?=[A-Z])", r"\1\n", line, count=1)
    line, _, rest = sentences.partition("\n")
    hedged = HEDGED.search(f"{rest}\n{later}"[:LONGEST]) or reason and TAKEN_BACK.search(reason[0])
    if hedged or DENIED.search(response[:start][-200:]):
        return response.strip()
    return re.sub(r"(?<!\.)\.$", "", line.strip("* ")).strip("* ")


def tagged(response: str) -> str:
    """What stands in the last <answer> tag, or else the whole response, without blanks around it."""
    _, tag, inside = response.rpartition("</answer>")[0].rpartition("<answer>")
    return (inside if tag else response).strip()


def copied(answer: str, question: str, gold: str) -> bool:
    """Whether an answer is a formula as it stands in the question, and not as in the gold answer: "Simplify
    $\\sqrt{192}$" is not answered by \\sqrt{192}, nor by x = (\\sqrt{192}) / 1. What is compared with the
    question are the operands but for 0 and 1, of all the answer and of what it says behind its last "="."""
    answer = one_spelling(answer)
    value = answer.rpartition("=")[2]
    if as_text(value) == as_text(one_spelling(gold).rpartition("=")[2]):
        return False
    asked = operands_of(one_spelling(question))
    for text in (answer, value):
        operands = operands_of(text)
        is_formula = len(re.sub(r"\s", "", text)) > 4 and re.search(r"[-+*/^\\]", text) and " " in operands
        if is_formula and re.search(rf"(?<![\d.]){re.escape(operands)}(?!\w)", asked):
            return True
    return False


def operands_of(text: str) -> str:
    """A formula without its signs, brackets, 0 and 1, a blank between its operands."""
    text = re.sub(r"(\\[A-Za-z]+)(?=[\dα-ωΔℓ])|(?<=\S)(?=\\[a-z])", r"\1 ", text)  # \sqrt7, \sinθ\cosθ
    return " ".join(NOTHING.sub(" ", text).split())


# One spelling for LaTeX and plain text

SIGNS = dict(pair.split("=", 1) for pair in (
    r"cdot=* times=* ast=* div=/ pi=π infty=∞ infinity=∞ cup=∪ pm=± le=≤ leq=≤ ge=≥ geq=≥ lt=< gt=> in=∈ "
    r"approx=≈ emptyset=∅ varnothing=∅ langle=⟨ rangle=⟩ degree=° lvert=| rvert=| vert=| "
    r"dfrac=\frac tfrac=\frac cfrac=\frac ne=≠ neq=≠ %=% {=⦃ }=⦄ $=＄ \=⏎ alpha=α beta=β gamma=γ delta=δ "
    r"varepsilon=ε epsilon=ε zeta=ζ eta=η theta=θ kappa=κ lambda=λ mu=μ nu=ν xi=ξ rho=ρ sigma=σ tau=τ "
    r"varphi=φ phi=φ psi=ψ omega=ω Delta=Δ Omega=Ω ell=ℓ").split())
SPELLED = {sign: name for name, sign in SIGNS.items()}
SIGNS |= dict.fromkeys([*"!,;: ()[]", "quad", "qquad", "displaystyle"], " ")
CHARACTERS = str.maketrans("·⋅∗−–—÷\u00a0\u202fµΩ’", "***---/  μΩ'")
RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻₀₁₂₃₄₅₆₇₈₉", "0123456789+-0123456789")
SMALL = "zero one two three four five six seven eight nine ten eleven twelve".split()
RULES = (  # a pattern and what becomes of it, in this order
    (r"[⁰¹²³⁴-⁻]+", lambda m: "^{" + m[0].translate(RAISED) + "}"),
    (r"[₀-₉]+", lambda m: "_{" + m[0].translate(RAISED) + "}"),
    (r"^\s*\$(?=\d[\d,. ]*[a-z ]*$)", "＄"),                               # $5 is money, $5$ is not
    (r"(?<!\\)\$|(?<=[\w.,;)}])~|(?<=rm\{)~", " "),                       # mathematics' dollars, 5~cm
    (r"(?<![\d.,}])[1-9]\d{0,2}(?:(?:\{,\}|,\s*\\!|\\,)\s*\d{3})+(?!\d)",
     lambda m: re.sub(r"\D", "", m[0])),                                   # 1{,}000
    (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\s*\.?", " "),            # sizes of brackets
    (r"\^\s*(\{)?\s*(?:\\circ(?![A-Za-z])|°)(?(1)\s*\})", "°"),            # degrees
    (r"\\overline\s*\{\s*([A-Z]{2})\s*\}", r"\1"),                         # a segment
    (r"\\\\\s*\[\s*[\d.]+\s*(?:pt|ex|em|mm|cm)\s*\]", r"\\\\ "),            # a gap between rows
    (r"\\begin\{(?:[pb]?matrix|array)\}(?:\{[clr|\s]*\})?", "⟦"),
    (r"\\end\{(?:[pb]?matrix|array)\}", "⟧"),
    (r"\\(?:text|mathrm)\{([A-Z]\w*)\}(?=_)|(?<=_\d)\\(?:text|mathrm)\{([A-Z]\w*)\}", r"\1\2"),  # \text{H}_2
    (r"\\(?:(?:text|math)(?:rm|bf|it|sf)?(?![A-Za-z])|mbox|boldsymbol|operatorname)\s*"
     r"\{((?:[^{}]|\{[^{}]*\})*)\}", r" \1 "),
    (r"^[\s$]*[A-Za-z](?:\s*(?:\\times(?![A-Za-z])|×)\s*[A-Za-z])+[\s$]*$",
     lambda m: re.sub(r"\\times|×", r"\\cross ", m[0])),                   # of vectors
    (r"(?<![\\A-Za-z])(sqrt|pi|infinity|(?:arc)?(?:sin|cos|tan)|exp|ln|log)(?![A-Za-z])", r"\\\1"),
    (r"√", r"\\sqrt "),
    (r"\\([A-Za-z]+|.)", lambda m: SIGNS.get(m[1], m[0])),                 # \cdot, \le, \,
    (r"(?<=\d)[eE]([-+]?\d+)", r"*10^{\1}"),                               # 3e8
    (r"(?<=\d)\s*[xX]\s*(?=10\^)", "*"),                                   # 3 x 10^8
    (r"<=", "≤"), (r">=", "≥"), (r"×", "*"),
    (r"(?:\bdegrees? |\bDegrees? |°\s*)(?:([CF])\b|([Cc])elsius\b|([Ff])ahrenheit\b)",
     lambda m: " °" + (m[1] or m[2] or m[3]).upper()),
    (r"\\(sin|cos|tan)\s*(\()?\s*(\d+)\s*°\s*(?(2)\))", r"\\\1{\3°}"),
    (r"(?<=[\d}])\s*(million|billion)\b", lambda m: {"million": "*1000000", "billion": "*1000000000"}[m[1]]),
    (r"(?<=\bsecond) squared\b", "^2"),                                    # meters per second squared
    (r"＄\s*(\d[\d.,]*(?:\*\d+)?)", r" \1 ＄"),
    (r",?\s*(?<!\\)\bor\b\s*", "∨"),                                       # separators of lists
    (r",?\s*(?<!\\)\band\b\s*|;", ", "),
    (rf"(?i)^\s*({'|'.join(SMALL)})\s*\.?$", lambda m: str(SMALL.index(m[1].lower()))),
    (r"\|([^|]*)\|", r"\\abs{\1}"),                                        # |x|
    (r"(?<=\d)\s+(\d+)/(\d+)(?![\d/])", r"\\frac{\1}{\2}"),                # 2 1/3
    (r"\\frac\s*(\d)", r"\\frac{\1}"),                                     # \frac12
    (r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}"),
    (r"(?<![\d.^_}/])(\d+)\s*\\frac\s*\{(\d+)\}\s*\{(\d+)\}", r"(\1+\2/\3)"),
    (r"(?<=[a-zα-ω])(?<![A-Z][a-z])(_\d+(?=[A-Za-zα-ω])|_\{\w+\}(?=\w))", r"\1 "),  # x_1x_2, not Na_2O
    (r"(_(?:\d+|[A-Za-zα-ωΔℓ]|\{\w+\}))(?=[α-ωΔℓ])", r"\1 "),              # k_B\theta
    (r"_\{\s*(\w*)\s*\}", r"_\1"),                                         # x_{12}
    (r"\^(-\d+)", r"^{\1}"),                                               # 10^-3
    (r"\s+", " "),
    (r"(?:(?<!\.)\.|\\) ?$", ""),                                          # a full stop
)


def one_spelling(text: str) -> str:
    """A text in one spelling: one character a sign, no markup of text, ⟦a&b⏎c&d⟧ for a matrix, ⦃...⦄ for a
    set, ∨ for "or"."""
    text = " ".join(text.split()).translate(CHARACTERS)
    for pattern, new in RULES:
        text = re.sub(pattern, new, text)
    if not re.search(r"[(\[{⦃⟨⟦]", text):  # commas of thousands
        text = re.sub(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)", lambda m: m[0].replace(",", ""), text)
    return text.strip()


CAPITAL = re.compile(  # of a word, where its case means nothing: not of CO, Co, Aabb, Mmol
    r"\b(?!(?i:(?:([a-z])\1)+\b)|M(?![aeiouy])|.(?:mol|ohm|amp|bar|bit|cal))"
    r"(?:[A-Z](?=[a-z]{2})|(?:No|In|Of|On|To|Is|At|By|It)\b)")


def as_text(text: str) -> str:
    """What is compared where two texts in one spelling are compared as texts."""
    text = re.sub(r"(?<=[A-Z])([a-z]?) ?_(\d)", r"\1\2", text)  # CO_2
    text = re.sub(r"^\(([A-Z])\)$", r"\1", text)                # (D)
    text = re.sub(r"\^\{([-+\w])\}(?!\d)", r"^\1 ", text)       # x^{2}
    text = re.sub(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])", "", text)
    return CAPITAL.sub(lambda m: m[0].lower(), text)


# Numbers: a rational one is a Fraction and exact, any other is a float; what floats would hide has no value

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "^": math.pow}
FUNCTIONS = {r"\sin": math.sin, r"\cos": math.cos, r"\tan": math.tan, r"\arcsin": math.asin,
             r"\arccos": math.acos, r"\arctan": math.atan, r"\exp": math.exp, r"\ln": math.log,
             r"\log": math.log10, r"\abs": abs}


def size(x) -> int:
    """The product of a fraction's two numbers, at least 1; of a float 0."""
    return max(abs(x.numerator), 1) * x.denominator if isinstance(x, Fraction) else 0


def operate(name: str, x, y=None):
    """An operator or a function, as TeX has it, of one number or two; Arithmetic-, Type- or ValueError."""
    exact = size(x) > 0 and size(y) > 0 and (name != "^" or y.denominator == 1)
    if name == r"\abs":
        return abs(x)
    if name == "!":
        if x > 400 or x != int(x):
            raise ArithmeticError("too large, or no natural number")
        return Fraction(math.factorial(int(x)))
    if name in FUNCTIONS:
        if 0 < abs(x) < 1e-3 or abs(x) > (1e6 if name in (r"\ln", r"\log") else 25):
            raise ArithmeticError("out of range")
        result = FUNCTIONS[name](x)
        return Fraction(0) if abs(result) < 1e-13 else result
    if exact and name == "^":
        if max(abs(x.numerator), x.denominator).bit_length() * abs(y) > 2 * BITS:
            raise ArithmeticError("too large")
        return x ** int(y)
    if exact:
        return OPERATORS[name](x, y)
    if name == "^" and size(y) and y.denominator > 3 and x not in CONSTANTS.values():
        if (size(x) or FINE) > FINE / y.denominator ** 4:  # What is no fraction may itself be a root.
            raise ArithmeticError("a high root of a large number comes close to anything")
    result = OPERATORS[name](float(x), float(y))
    if name in "+-":
        low, high = sorted((abs(x), abs(y)))
        left = abs(result) / high
        if left < 1e-12:
            return Fraction(0)
        if 0 < low < 1e-7 * high or left < 1e-6:
            raise ArithmeticError("one would drown, or too few digits are left")
    return result


def pointwise(name: str, *arguments: list) -> list:
    """An operation on values at every point; None where it has no value. Constants have one value."""
    count = max(map(len, arguments))
    results = []
    for k in range(count):
        numbers = [values[k % len(values)] for values in arguments]
        try:
            result = operate(name, *numbers)
        except (ArithmeticError, TypeError, ValueError):  # also of None
            result = None
        if isinstance(result, float):
            long = max(map(size, numbers)) > FINE  # 1.4142135623730951 times pi
            if long or not 1e-9 < abs(result) < 1e12:
                result = None
        results.append(None if size(result) >> 2 * BITS else result)
    if results.count(None) == count:
        raise Unreadable("no value")
    return results


@functools.lru_cache(1000)
def at_points(name: str) -> list:
    """The values of a variable: 12 positive ones, all halves and thirds from -8 to 8, and large ones."""
    rng = random.Random(name)
    values = [Fraction(rng.randint(6, 40), rng.choice([1, 1, 30])) for _ in range(12)]
    grid = sorted({Fraction(n, d) for d in (2, 3) for n in range(-8 * d, 8 * d + 1)})
    values += rng.sample(grid, len(grid))
    return values + [Fraction(rng.randint(1, 40) * 1000 ** (k // 4 + 1) * (-1) ** k) for k in range(12)]


def equal(pairs: list) -> bool:
    """Whether enough pairs of numbers have values and these are equal, irrational ones but for rounding."""
    both = []
    for x, y in pairs:
        if x is None or y is None:
            continue
        exact = size(x) and size(y)
        if abs(x - y) > (0 if exact else 1e-10 * abs(x)):
            return False
        if exact or max(size(x), size(y)) <= FINE / 1000:  # a long decimal is no irrational number
            both.append(x)
    return len(both) >= min(ENOUGH, len(pairs))


# Expressions: a recursive descent over tokens

TOKEN = re.compile(r"\s*((?:\d+(?:\.\d*)?|\.\d+)(?:_\d+)?|\\[A-Za-z]+|[A-Za-zα-ωΔℓ](?:_\w+)?'*|\S)")
WORD = re.compile(r"(?<![\\A-Za-z_])(?!(?:[abcf-z][a-z]|abc|xyz)(?![A-Za-z]))[A-Za-z]{2,}")  # ab is a product
GREEK = "α-λν-ορ-ωΔℓ"  # but for π and μ, which are numbers
POWER = r"\s*(?:\^\s*(?:\w|\{[^{}]*\})\s*)?"
APPLIED = re.compile(  # f^2(3), g[x+1], T(n/4), but not x(x+1) and \sin(x)
    rf"(?<![\\A-Za-z])[fg](?:_\w+)?'*{POWER}[(\[]"
    rf"|(?:(?<![\\A-Za-z_])[A-Za-z]|[{GREEK}])(?:_\w+)?'*\s*\(-?[^-+()]*\)")
ORDERED = re.compile(  # Q^{-1} A Q, A B, A-C-B, \sigma\tau
    rf"^\s*[A-Z{GREEK}](?:[\s*-]*[A-Z{GREEK}])+\s*$"
    r"|[A-Z]\s*\^\s*\{?\s*(?:-\s*\d|T).*[A-Z]|[A-Z].*[A-Z]\s*\^\s*\{?\s*(?:-\s*\d|T)")
CONSTANTS = {"π": math.pi, "e": math.e}
ROOT = re.compile(r"\\(?:abs|arc|(?:sqrt|ln|log)(?!\s*(?:\d|[({]\s*\d+\s*[)}])))"  # none of i
                  r"|\^\{?\(?(?:\d*[./]\d|\\frac\s*\{?\d+\}?\s*\{?\d)")
CLOSING = {"(": ")", "[": "]", "{": "}"}
FIRST = re.compile(r"[^\W\d]|[(\[\\]")  # of a factor that needs no sign before it


class Expression:
    """Reads an expression. `values` are its values at the points (just one if it is a constant), `names` its
    variables, `work` the number of its operations. It takes no more where two readings are usual (1/2x,
    a/b/c, 2^3^2), and what is left at the end raises Unreadable."""
    def __init__(self, text: str, unit: tuple | None = None):
        self.has_unit = unit is not None
        self.factor, self.bases = unit or (Fraction(1), {})
        self.literal = re.fullmatch(r"[-+\d.*^{} ]+", text) is not None  # in digits: 20, 1.5, 3.0*10^{8}
        self.decimal = self.literal and "." in text
        self.absolute = r"\abs" in text  # |x| is x at too many points
        self.names = set()
        self.work = -1  # every operation adds a number, a variable or a function
        self.tokens = ["", *reversed(TOKEN.findall(text))]  # the next one is the last
        if len(self.tokens) > 4 * MOST or WORD.search(text) or APPLIED.search(text) or ORDERED.search(text):
            raise Unreadable("too long, a word, a function, or letters whose order may count")
        if re.fullmatch(r"[\d.]+(?:\s*-\s*[\d.]+)+\s*", text):
            raise Unreadable("a range, a date or a score")
        if "i" in self.tokens and ROOT.search(text):
            raise Unreadable("of a complex number")
        self.values = self.sum()
        if self.tokens != [""]:
            raise Unreadable(f"what is {self.tokens[-1]}?")

    def skip(self, token: str) -> bool:
        """Takes the next token if it is this one."""
        found = self.tokens[-1] == token
        if found:
            self.tokens.pop()
        return found

    def sum(self) -> list:
        values = [Fraction(0)] if self.tokens[-1] in ("+", "-") else self.product()
        while self.tokens[-1] in ("+", "-"):
            values = pointwise(self.tokens.pop(), values, self.product())
        return values

    def product(self) -> list:
        before = self.tokens[-1]
        values = self.power()
        while self.skip("*") or FIRST.match(self.tokens[-1]) and before not in ("{", "["):  # {1}{2} prints 12
            before = self.tokens[-1]
            values = pointwise("*", values, self.power())
        if self.skip("/"):
            values = pointwise("/", values, self.power())
        return values

    def power(self) -> list:
        values = self.atom()
        if self.skip("!"):
            values = pointwise("!", values)
        if self.skip("°"):
            values = pointwise("*", values, [math.pi / 180])
        if self.skip("^"):
            values = pointwise("^", values, self.atom())
        return values

    def atom(self) -> list:
        token = self.tokens.pop()
        if token in CLOSING:
            values = self.sum()
            if not self.skip(CLOSING[token]):
                raise Unreadable("a bracket is missing")
            return values
        if token == r"\frac":
            return pointwise("/", self.atom(), self.atom())
        self.work += 1
        if re.fullmatch(r"\d+\.?\d{0,9}|\.\d{1,9}", token):  # longer ones are made to look like others
            return [Fraction(token)]
        if token in CONSTANTS:
            return [CONSTANTS[token]]
        if token == r"\sqrt":
            inverse = [Fraction(1, 2)]
            if self.tokens[-1] == "[":
                inverse = pointwise("/", [Fraction(1)], self.atom())
            return pointwise("^", self.atom(), inverse)
        if token in FUNCTIONS:
            return self.function(token)
        if not re.fullmatch(r"\w.*", token):
            raise Unreadable(f"what is {token}?")
        if token != "i":  # of which we only know that i is i
            self.names.add(token)
        return at_points(token)

    def function(self, name: str) -> list:
        """\\log_2 x; \\sin^2 x, which is (\\sin x)^2; \\sin 2x, which is \\sin(2x)."""
        base = self.atom() if name == r"\log" and self.skip("_") else None
        exponent = self.atom() if self.skip("^") else [Fraction(1)]
        if exponent == [Fraction(-1)]:
            raise Unreadable("which inverse?")
        if self.tokens[-1] in CLOSING:
            argument = self.atom()
        else:
            argument = self.power()
            while re.match(r"[^\W\d]|\\(?:frac|sqrt)", self.tokens[-1]):
                argument = pointwise("*", argument, self.power())
            if self.tokens[-1] in ("*", "/", *CLOSING):
                raise Unreadable("sin x/2")
        values = pointwise(name, argument)
        if base:
            values = pointwise("/", pointwise(r"\ln", argument), pointwise(r"\ln", base))
        return pointwise("^", values, exponent)


# Units: symbols with their case, names in the singular or plural

METRIC = """m meter metre; g gram; s second; A ampere; K kelvin; mol mole; B byte; bit;
    L l liter litre = 1/1000 m^3; M molar = 1 mol/L; N newton = 1000 g m/s^2; Pa pascal = 1 N/m^2;
    J joule = 1 N m; bar = 100000 Pa; cal calorie = 4.184 J; W watt = 1 J/s; Hz hertz = 1 s^-1;
    C coulomb = 1 A s; V volt = 1 J/C; Ω ohm = 1 V/A; F farad = 1 C/V; T tesla = 1 N/A/m;
    Wb weber = 1 V s; H henry = 1 V s/A; eV electronvolt = 0.0000000000000000001602176634 J"""
OTHERS = """＄ dollar; ¢ cent = 1/100 ＄; € euro; £; % percent = 1/100; ° deg degree; °C; °F; rad radian;
    amp = 1 A; sec = 1 s; min minute = 60 s; h hr hrs hour = 60 min; day = 24 h; week = 7 day; yr year;
    month = 1/12 yr;
    in inch = 0.0254 m; ft foot feet = 12 in; yd yard = 3 ft; mi mile = 1760 yd; mph = 1 mi/h; kph = 1 km/h;
    acre = 4840 yd^2; hectare = 10000 m^2; gal gallon; lb lbs pound = 453.59237 g; oz ounce = 1/16 lb; ton;
    tonne = 1000000 g; kWh = 3600000 J; atm = 101325 Pa; mmHg; revolution rev; rpm = 1 rev/min;
    people person; student; child children; apple; book; car; unit; way; outcome; solution;
    total = 1; different = 1"""
PREFIXES = {"k": 3, "c": -2, "m": -3, "μ": -6, "n": -9, "p": -12, "M": 6, "G": 9, "kilo": 3, "centi": -2,
            "milli": -3, "micro": -6, "nano": -9, "mega": 6, "giga": 9}
FACTOR = re.compile(r"\s*(?P<sign>\*|/|per )?\s*(?P<words>square |sq |cubic )?(?:(?P<mark>°[CF]?|[%¢€£＄])"
                    r"|(?P<name>[A-Za-zμΩ]+)(?:(?:\s*\^\s*\{?)?(?P<power>-?\d)\}?)?)\s*")
POWERS = {None: 1, "square ": 2, "sq ": 2, "cubic ": 3}
BEHIND = re.compile(r"(?<=[\d)}π])(\s*)(?=([%°¢€£＄A-Za-zμΩ].{0,60})$)")  # what may be a number's unit
SURE = re.compile(r"[A-Za-z]{3}|[%°¢€£＄]|\b(?:mm|cm|km|in|ft|mi|kg|mg|ml|mL|hr)\b")  # not two variables


@functools.cache
def units() -> dict:
    """Symbol or name -> its factor and the exponents of its base units."""
    known = {}
    for definition in f"{METRIC};{OTHERS}".split(";"):
        names, _, text = definition.partition("=")
        names = names.split()
        number, _, base = text.strip().partition(" ")
        factor, bases = read_unit(base, known) if text else (1, Counter(names[:1]))
        factor *= Fraction(number or 1)
        known |= dict.fromkeys(names, (factor, bases))
        for prefix, exponent in PREFIXES.items() if definition in METRIC else ():
            for name in names:  # km, kilometer
                if (len(prefix) > 1) == (len(name) > 3):
                    known[prefix + name] = (factor * Fraction(10) ** exponent, bases)
    return known


def read_unit(text: str, known: dict) -> tuple:
    """Factor and exponents of base units of "kg m^2/s^2", "miles per hour", "J/mol K"; or Unreadable."""
    text = re.sub(r"/ ?\(([^()/]+)\)$", r"/\1", text)  # J/(mol K)
    total = Fraction(1)
    exponents = Counter()
    end = 0
    while end < len(text):
        m = FACTOR.match(text, end)
        if not m or end and len(m["mark"] or "") == 1 or m["words"] and m["power"]:
            raise Unreadable(f"the unit {text}")
        names = [m["mark"] or m["name"]]
        if len(names[0]) > 3 and names[0][1:].lower().removesuffix("s") not in known:  # Mohms are no mohms
            names += [names[0].lower().removesuffix(plural) for plural in ("", "s", "es")]
        found = [known[name] for name in names if name in known]
        if not found:
            raise Unreadable(f"the unit {names[0]}")
        factor, bases = found[0]
        power = int(m["power"] or POWERS[m["words"]])
        if re.search("/|per ", text[:m.end()]):  # K too is below in J/mol K
            power = -power
        total *= factor ** power
        for base in bases:
            exponents[base] += bases[base] * power
        end = m.end()
    return total, exponents


# Answers: numbers with units, words, lists, tuples and intervals, matrices, equations, inequalities

@dataclass
class Meaning:
    """What a text means. kind: number, text, list (in any order), ∪, row, "⟦⟧", "()", "[)" ..., equation."""
    kind: str
    parts: list = field(default_factory=list)
    text: str = ""                     # of a word, an infinity; "∨" between words
    name: str = ""                     # what it is the value of, or what lies in it
    curve: list | None = None          # of an equation in several variables: left side less right side
    number: Expression | None = None


DENIAL = r"(?i:no|n[ae]|[lg][te]|if|or)(?![A-Za-z])"
LETTER = rf"(?:[α-ωΔℓ]|(?!{DENIAL})[A-Za-z]{{1,2}})(?:_(?!no|wrong|false)\w+)?(?!\w)"
NAME = re.compile(  # x, \angle ABC, f^{-1}(x), P(A|B), (x, y)
    rf"m?\\(?:angle|triangle)\s*[A-Z]{{1,4}}"
    rf"|{LETTER}(?:\^\{{?-1\}}?|'+)?(?:\((?:[^()=A-Za-z\\]|[A-Za-z](?![A-Za-z])|[{GREEK}]|\\cap)*\))?"
    rf"|\(\s*{LETTER}(?:\s*,\s*{LETTER})+\s*\)")
BOUNDS = {"<<": "()", "<≤": "(]", "≤<": "[)", "≤≤": "[]"}
OPEN = "([{⦃⟨⟦"
CLOSE = ")]}⦄⟩⟧"


def split(text: str, marks: str) -> tuple:
    """The parts of a text between marks that stand outside of all brackets, and these marks."""
    parts = [""]
    found = []
    depth = 0
    for character in text:
        depth += (character in OPEN) - (character in CLOSE)
        if depth > DEEPEST:
            raise Unreadable("too many brackets")
        if depth == 0 and character in marks:
            parts.append("")
            found.append(character)
        else:
            parts[-1] += character
    return [part.strip() for part in parts], found


def meaning(text: str) -> Meaning:
    """The meaning of a text in one spelling. Raises Unreadable."""
    parts, marks = split(text, ",∨")
    if len(parts) > MOST or re.search(r"\d,0\d", text):
        raise Unreadable("too long, or a comma of thousands")
    found = []
    for part in parts:
        count = part.count("±") if "⦃" not in part else 0  # a set reads its own
        if count > 1:
            raise Unreadable("which sign goes with which?")
        for sign in ("+", "-1*")[:count + 1]:  # 3±1 is not the range 3-1
            found.append(clause(part.replace("±", sign) if count else part))
    if len(found) == 1:
        return found[0]
    either = "∨" in marks
    if either and "," not in marks and all(m.name and m.kind in BOUNDS.values() for m in found):
        return Meaning("∪", found)  # x < 1 or x > 2
    words_too = any(m.kind == "text" for m in found)
    return Meaning("list", found, "∨" if either and words_too else "")


def clause(text: str) -> Meaning:
    """One part of a list: an equation, an inequality, or a term."""
    sides, marks = split(text, "=<>≤≥∈≈")
    if not marks:
        return term(text)
    if marks[-1] == "≈":  # 12/7 ≈ 1.71 is 12/7, if it is about that
        found = clause(text.rpartition("≈")[0])
        decimals = len(sides[-1].partition(".")[2])
        values = pointwise("-", found.number.values, Expression(sides[-1]).values) if found.number else [1]
        if len(values) > 1 or abs(values[0]) >= 0.1 ** decimals:
            raise Unreadable("not even about")
        return found
    if marks == ["="]:
        return equation(*sides)
    if marks == ["∈"] and NAME.fullmatch(sides[0]) and re.match(r"[\[({⦃∅].*[,⦄}∅]", sides[1]):
        return replace(term(sides[1]), name=sides[0])
    marks = "".join(marks)
    if marks[0] in ">≥":
        sides = sides[::-1]
        marks = marks[::-1].translate(str.maketrans(">≥<≤", "<≤>≥"))
    if len(sides) == 2 and NAME.fullmatch(sides[0]):
        sides = ["-∞", *sides]
        marks = "<" + marks
    kind = BOUNDS.get(marks if len(sides) == 3 else marks + "<")
    low, name, high = [*sides, "∞"][:3]
    if not kind or not NAME.fullmatch(name):
        raise Unreadable("not solved")
    return Meaning(kind, [term(low), term(high)], name=name)


def equation(left: str, right: str) -> Meaning:
    """x = 5 is a value with a name, x + y = 5 is a curve, y = 2x is both."""
    if NAME.fullmatch(right):
        left, right = right, left
    letters = re.findall(LETTER, left)
    found = Meaning("equation")
    if re.match(r"\w+\(", left) and left.partition("(")[0] + "(" in right:
        raise Unreadable("a function of itself")
    if NAME.fullmatch(left):
        found = replace(term(right), name=re.sub(r"\s", "", left))
        in_order = letters == sorted(letters, key=lambda name: SPELLED.get(name[0], name[0]) + name[1:])
        if left[0] == "(" and not (in_order and len(letters) == len(found.parts)):
            raise Unreadable("names in an order of their own, or not one for each")
    if "(" not in found.name:
        with contextlib.suppress(Unreadable):
            curve = Expression(f"({left})-({right})")
            found.curve = curve.values if len(curve.names) > 1 else None
    return found


def term(text: str) -> Meaning:
    """A union, a set, a tuple or an interval, a matrix, a word, or a number."""
    parts, marks = split(text, "∪")
    if marks:
        return Meaning("∪", [term(part) for part in parts])
    if text in ("∅", "⦃⦄"):
        return Meaning("list")
    if text.strip("+- ") == "∞":
        return Meaning("text", text=text.strip("+ "))
    closed = split(text, CLOSE)[0]
    if text.startswith(tuple(OPEN)) and len(closed) == 2 and closed[1] == "":
        brackets = text[0] + text[-1]
        inner = text[1:-1].strip()
        parts, marks = split(inner, ",")
        if brackets == "⟦⟧":
            rows = [row.split("&") for row in inner.strip("⏎ ").split("⏎")]
            return Meaning(brackets, [Meaning("row", [meaning(cell) for cell in row]) for row in rows])
        if marks and brackets not in ("⦃⦄", "{}"):
            return Meaning(brackets, [meaning(part) for part in parts])
        if brackets in ("⦃⦄", "{}", "()", "[]") and not re.match("⦃.*[⦃∅]", text):  # a set of sets
            return meaning(inner)
    if re.fullmatch("[A-Za-z' ]*[A-Za-z]{2}[A-Za-z' ]*", text) and re.search("[aeiouA-Z ]", text):
        return Meaning("text", text=as_text(text))
    unit = None
    for m in BEHIND.finditer(text):
        sure = m[1] or SURE.search(m[2])  # 5 m is five metres, 5m is not
        if sure and not re.search(r"\\(?!frac|sqrt)", text):  # \arctan(2)° is in radians
            with contextlib.suppress(Unreadable):
                unit = read_unit(m[2], units())
                if "°" in unit[1] and "π" in text:
                    raise Unreadable("degrees or radians?")
                text = text[:m.start()]
                break
    return Meaning("number", number=Expression(text, unit))


# Whether two answers mean the same

def same(x: Meaning, y: Meaning, tolerance: float = 0.0) -> bool:
    """Whether an answer x means what the gold one y means; a number that y has measured may differ by the
    tolerance. Names of several variables must be on both sides."""
    if x.curve and y.curve:  # equations are the same up to a factor
        ratios = pointwise("/", x.curve, y.curve)
        known = [ratio for ratio in ratios if ratio is not None]
        if 0 not in known and equal([(ratio, known[0]) for ratio in ratios]):
            return True
    other_name = x.name and y.name and x.name != y.name and {x.name, y.name} != {"y", "f(x)"}
    if other_name or x.kind != y.kind or x.kind == "equation":
        return False
    if x.kind == "number":
        return same_quantity(x.number, y.number, tolerance)
    if x.text != y.text or len(x.parts) != len(y.parts):
        return False
    mine, theirs = ({part.name for part in side.parts} for side in (x, y))
    ordered = x.kind not in ("list", "∪")
    if mine != theirs and (ordered or len(mine.union(theirs) - {""}) > 1):
        return False
    if ordered:
        return all(map(same, x.parts, y.parts))
    rest = list(y.parts)
    for part in x.parts:
        match = next((i for i, other in enumerate(rest) if same(part, other)), None)
        if match is None:
            return False
        del rest[match]
    return True


def same_quantity(x: Expression, y: Expression, tolerance: float) -> bool:
    """Of two numbers or expressions. A unit may be missing on one side. 20% is 0.2, or 20 if it was asked
    what percentage. An answer that is still to be worked out is not equal to a number: the question often
    holds one (in 37 of 500 of MATH's; with this rule in 11)."""
    spare = 1 if size(y.values[0]) else 3
    worked_out = not x.names and x.work <= max(2, y.work + spare)
    if not y.names and not worked_out or x.names and x.absolute != y.absolute:
        return False
    scales = [x.factor / y.factor] if x.bases == y.bases else []
    percentage = x.literal and x.work == 0 and abs(x.values[0]) >= 1
    if x.has_unit != y.has_unit and not (x.has_unit and x.names) and (percentage or not scales):
        scales.append(Fraction(1))
    return any(same_values(pointwise("*", x.values, [scale]), y, tolerance) for scale in scales)


def same_values(mine: list, y: Expression, tolerance: float) -> bool:
    """Whether values are y's, at every point at which both have some."""
    if tolerance and y.decimal and len(mine) == 1:
        return abs(mine[0] - y.values[0]) <= tolerance * abs(y.values[0])
    count = max(len(mine), len(y.values))
    return equal([(mine[k % len(mine)], y.values[k % len(y.values)]) for k in range(count)])


def same_math(answer: str, gold: str, tolerance: float = 0.0) -> bool:
    """Whether two answers in LaTeX or plain text mean the same: lists and sets in any order; tuples,
    intervals and matrices in theirs; "x =" and a unit may be missing on one side. Numbers are equal, or
    within the tolerance where the gold one has a decimal point."""
    if max(len(answer), len(gold)) > LONGEST:
        return answer.strip() == gold.strip() != ""
    answer = one_spelling(answer)
    gold = one_spelling(gold)
    if as_text(answer) == as_text(gold):
        return as_text(answer) != ""
    try:
        return same(meaning(answer), meaning(gold), tolerance)
    except (Unreadable, RecursionError, ArithmeticError):
        return False


ABOUT = re.compile(r"^[\s$]*(?:[A-Za-z]\w*\s*(?=[≈\\~]))?(?:≈|\\approx\b|~|about\b|approximately\b)")  # v ≈


def same_short(answer: str, gold: str) -> bool:
    """Whether a short free-form answer is the gold one (RLPR, from WebInstruct-verified): the same words but
    for case, articles and punctuation, or the same mathematics; within 1% of a gold number with a decimal
    point, as that was measured or rounded. RLPR's own rules (github.com/OpenBMB/RLPR) allow 0.01%, and ask a
    judge model besides, as WebInstruct-verified does (arXiv 2505.14652)."""
    if len(answer) > LONGEST:
        return False
    if "." in gold:
        answer = ABOUT.sub("", answer)
    if re.sub(r"[-\s,.;:'\"“”]", "", gold).isalpha() and re.search(r"[^\W\d_]{2}", gold):
        return words(answer) == words(gold) != []
    return same_math(answer, gold, 0.01)


def words(text: str) -> list:
    """The words of a text, without articles (a is one only before all others), punctuation and case."""
    text = re.sub("[*\"“”]|(?<=[a-z]{2})-(?=[a-z]{2})", " ", one_spelling(text))
    text = re.sub(r"(?i)^\s*an?\s(?=\s*\w)", "", text)
    found = [as_text(word).strip(".,;:'") for word in text.split()]
    return [word for word in found if word not in ("an", "the", "")]


CLAIM = re.compile(r"(?i)\b(?:answer\b[^\n.:]{0,40}?(?:\bis\b|\b(?:must|should|would) be\b|:)[\s:*]*"
                   r"|(?:option|choice)\b(?!\s*\(?[A-J]\b)[^\n.:]{0,40}?"
                   r"(?:\bis\b(?! (?:correct|right|best|wrong|incorrect))|:)[ :*]*)(?=([^\n]{0,300}))")
INTRODUCTION = re.compile(
    r"(?i)^(?:(?:the|correct|final|best|answer|option|choice|is|so|thus|hence|therefore)\b[\s:,]*)+")
CORRECT = re.compile(r"is (?:the )?(?:correct|right|best)(?: (?:answer|option|choice|one))?")
ARTICLE = re.compile(r"^(\(?)(?:an?|the)\s")


def pick_letter(response: str, choices: list) -> str | None:
    """The letter that a response commits to: in its last \\boxed{} or <answer>, else wherever it says "answer
    is" or "Answer:", and in its last line or sentence; as the letter, as the text of exactly one choice, or
    as both. None if there is none, or more than one."""
    texts = [plain_choice(choice) for choice in choices]
    found = committed(response)
    if found is not None:
        letter = letter_of(found[:LONGEST], texts)
        return None if letter == "?" else letter
    lines = response[-10 * LONGEST:].strip().split("\n")
    line = lines[-1]
    last = line if re.match(r"\W*[A-J][.):]", line) else re.split(r"[.!?]\s", line)[-1]
    picked = {letter_of(text, texts) for text in (line, last) if not CLAIM.search(text)}
    if len(line) > 5:  # it may be the last of the options, told again
        picked |= {letter_of(text, texts) for text in lines[-12:-1]} - {"?"}
    if len(picked) > 1:
        picked -= {"?"}  # the line has other sentences
    response = "\n".join(lines)
    for m in CLAIM.finditer(response):
        sentence, _, later = m[1].partition(". ")
        letter = letter_of(m[1], texts)
        if letter in (None, "?"):
            letter = "?" if HEDGED.match(later) else letter_of(sentence, texts)
        elif REASON.search(sentence) and TAKEN_BACK.match(later):
            letter = "?"
        if DENIED.search(response[:m.start()][-200:]):
            letter = "?"
        picked.add(letter)
    picked -= {None}
    if len(picked) != 1 or "?" in picked:
        return None
    return picked.pop()


def plain_choice(text: str) -> str:
    """A choice or an answer without capitals, markup and words that only introduce it; all signs count."""
    text = re.sub(r"\\(?:text|math)(?:rm|bf|it|sf|tt)?\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r"\1", text)
    text = re.sub(r"\\[()\[\]]|\*\*|[`$]", " ", text)
    text = INTRODUCTION.sub("", " ".join(text.split()).rstrip(".; "))
    return CAPITAL.sub(lambda m: m[0].lower(), text)


def letter_of(text: str, texts: list) -> str | None:
    """The letter that a text is: "B", "(B)", "B. its own text", or the text of just one choice; a reason may
    follow. "?" if it speaks of a letter in another way, None if it does not."""
    letters = LETTERS[:len(texts)]
    plain = plain_choice(text)
    for said in (plain, REASON.split(plain)[0]):
        m = re.fullmatch(rf"(?i)[(\[{{\"'“*_]*([{letters}])(?![^\W_])[)\]}}\"'”*_]*"
                         r"(?:[\s):,.;]|[-–—](?=\s))*(.*)", said)
        bare = not said or m and len(said) == 1
        if texts.count(said) == 1 and not bare:
            return letters[texts.index(said)]
        if m:
            letter = m[1].upper()
            own = ARTICLE.sub(r"\1", texts[letters.index(letter)])
            rest = ARTICLE.sub(r"\1", m[2])
            in_brackets = re.sub(r"[.; ]+\)$", ")", rest) == f"({own})" and rest not in texts
            if rest in ("", own) or in_brackets or CORRECT.fullmatch(rest):
                return letter
    return "?" if re.search(rf"\b[{letters}]\b", text) else None


# -----------------------------------------------------------------------------------------------------------
# Code: a generated program runs in a sandbox; what it prints or returns leaves it as data, and is graded here
#
# Nobody has read the program, and a policy in training finds whatever pays. So an interpreter of its own, the
# supervisor, forks a process for each test and takes from it, layer by layer, what a program does not need:
#   namespaces   no other process, network or shared memory is in reach. The root is a tree of Python and the
#                system's libraries alone, read-only, and a small empty folder for each test
#   descriptors  input and output alone stay open; no expected output, nor its length, was ever in the process
#   limits       of time, files, processes, and of the memory of all processes of a test together; one core
#   user         another one than root, who owns nothing; no capability, and none to be gained
#   Landlock     the same files once more, or alone where there are no namespaces; no signal leaves a test
#   seccomp      no system call that reaches other processes or memory that nobody counts, and few of those
#                that attacks on the kernel begin with
# Where one layer has a hole, another stands. At the end of a test's first process all its others are killed.
# A system that lacks a layer (Docker as it comes denies namespaces) runs the rest; sandbox_lacks says so.

# What LiveCodeBench puts before a program: import_string in its lcb_runner/evaluation/testing_util.py
MODULES = ("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random",
           "statistics", "itertools", "functools", "operator", "io", "sys", "json")
STARS = [f"from {module} import *" for module in (*MODULES, "builtins", "typing")]
PRELUDE = "\n".join([*STARS, f"import {', '.join(MODULES)}", "sys.setrecursionlimit(50_000)"])
MAX_OUTPUT = 32 << 20  # bytes that a test may print or return
MAX_DIGITS = 50_000    # of an integer, as in LiveCodeBench's grader

# Numbers of the kernel's interface by their names in its headers (linux/prctl.h, sched.h, capability.h,
# mount.h, fcntl.h, sockios.h, if.h, mman.h, landlock.h, seccomp.h, bpf_common.h, audit.h). Of system calls
# tables have the name, the number on x86_64 (asm/unistd_64.h), and on aarch64 (asm-generic/unistd.h; or "-").
Linux = types.SimpleNamespace(
    PR_SET_PDEATHSIG=1, PR_SET_DUMPABLE=4, PR_SET_KEEPCAPS=8, PR_SET_SECCOMP=22, PR_SET_CHILD_SUBREAPER=36,
    PR_SET_NO_NEW_PRIVS=38, CAPABILITY_VERSION_3=0x20080522, CAP_DAC_OVERRIDE=1,
    SPACES=0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000,  # CLONE_ NEWNS, UTS, IPC, PID, NET
    NEWUSER=0x10000000, NEWCGROUP=0x2000000, SIOCSIFFLAGS=0x8914, IFF_UP=1, MAP_SHARED=1, MAP_ANONYMOUS=0x20,
    MS_RDONLY=1, MS_NOSUID=2, MS_NODEV=4, MS_NOEXEC=8, MS_BIND=0x1000, MS_REC=0x4000, MS_PRIVATE=0x40000,
    MNT_DETACH=2, AT_FDCWD=-100, AT_RECURSIVE=0x8000, RULESET_VERSION=1, PATH_BENEATH=1,
    READ_TREE=1 | 4 | 8, USE_FILE=1 | 2 | 4,  # execute, read file, folder; execute, write, read
    SCOPES=1 | 2,                             # abstract sockets, signals
    SECCOMP_MODE_FILTER=2, RET_ALLOW=0x7fff0000, RET_ERRNO=0x50000, RET_KILL_PROCESS=0x80000000,
    LOAD=0x20, AND=0x54, IF_EQUAL=0x15, IF_GREATER=0x25, RETURN=0x06,
    AUDIT_ARCH={"x86_64": 0xc000003e, "aarch64": 0xc00000b7},
    MOUNT_SETATTR=442, CREATE_RULESET=444, ADD_RULE=445, RESTRICT_SELF=446,  # system calls everywhere
    NEWEST=462,  # mseal; of later system calls nothing is known here

    UNKNOWN="clone3 435 435",  # its flags cannot be checked; where it is unknown, libraries call clone
    CHECKED="""socket 41 198, socketpair 53 199, setsockopt 54 208, clone 56 220, mmap 9 222,
        prlimit64 302 261, prctl 157 167, fcntl 72 25""",  # an argument
    # Denied is what reaches other processes, their processor, disk and memory; makes namespaces, in which it
    # would have capabilities; opens files without a path; fills memory that belongs to no process, or limits
    # that are the whole machine's; and what attacks on the kernel begin with. What needs a capability is not
    # listed, as a test has none
    DENIED="""ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272,
        pidfd_getfd 438 438, process_madvise 440 440, process_mrelease 448 448, perf_event_open 298 241,
        sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118, sched_setattr 314 274,
        setpriority 141 140, ioprio_set 251 30, migrate_pages 256 238, move_pages 279 239, mbind 237 235,
        set_mempolicy 238 237, set_mempolicy_home_node 450 450,
        unshare 272 97, setns 308 268,
        name_to_handle_at 303 264, open_by_handle_at 304 265, open_tree 428 428, inotify_init 253 -,
        inotify_init1 294 26, fanotify_init 300 262,
        shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190, semop 65 193, semtimedop 220 192,
        semctl 66 191, msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, mq_open 240 180,
        mq_unlink 241 181, memfd_create 319 279, memfd_secret 447 447, add_key 248 217, request_key 249 218,
        keyctl 250 219, io_setup 206 0, sync 162 81, syncfs 306 267, seccomp 317 277,
        io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, userfaultfd 323 282,
        bpf 321 280, personality 135 92, modify_ldt 154 -, vmsplice 278 75""",
    # Without namespaces also files, where Landlock does not ask; leaving the process group, which is the
    # test; and all signals, with ioctl's way to have the kernel send one when input comes
    DENIED_WITHOUT_NAMESPACES="""truncate 76 45, chmod 90 -, fchmod 91 52, fchmodat 268 53,
        fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, setxattr 188 5,
        lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16,
        utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, setsid 112 157, setpgid 109 154,
        kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240,
        pidfd_send_signal 424 424, ioctl 16 29""",
)
LIBC = ctypes.CDLL(None, use_errno=True)


def supervise(job: dict, start: int):
    """The supervisor. Descriptor 0 is a file in which the tests' inputs stand one after another, from `start`
    on. It writes to descriptor 1 what the system lacks (a line of JSON) and then each test's output, its size
    first, up to the first test that fails. Where it cannot build the sandbox it ends with a traceback."""
    box = types.SimpleNamespace(**job, namespaces=False, folder="/tmp", uid=os.getuid(), gid=os.getgid())
    box.module = types.ModuleType("solution" if box.name else "__main__")
    exec(compile(box.prelude, "prelude", "exec"), vars(box.module))  # each test inherits what this imports
    users = int(open("/proc/self/uid_map").read().split()[-1])
    box.switches_user = box.uid == 0 and users > 65535  # root, and not one that is alone in its namespace
    if box.switches_user:
        box.uid = box.gid = 61184 + os.getpid() % 4336  # of the users that systemd keeps for passing services
    os.chown(".", box.uid, box.gid)
    write_file("/proc/self/oom_score_adj", "1000")  # when memory runs out, the kernel ends this first
    with contextlib.suppress(OSError):  # unless the core was taken from this process meanwhile
        os.sched_setaffinity(0, [box.core])  # many busy processes slow this core alone
    prctl(Linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the parent; a change of user takes this back
    signal.signal(signal.SIGINT, signal.SIG_IGN)   # the one signal that Python would let a test send to it
    box.trouble = os.memfd_create("trouble")  # where a child says why it could not build the sandbox
    lacks = enter_namespaces(box)
    gc.freeze()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # so that `passes` can wait for it
    prctl(Linux.PR_SET_DUMPABLE, 0)         # no test looks into this process
    prctl(Linux.PR_SET_CHILD_SUBREAPER, 1)  # orphans of a test become its children
    box.landlock = LIBC.syscall(Linux.CREATE_RULESET, None, ctypes.c_size_t(0), Linux.RULESET_VERSION)
    if box.landlock < 1 and not box.namespaces:
        lacks.append("no Landlock: it reads, changes and deletes your files, and reads your keys")
    box.watched = os.path.exists("/proc/thread-self/children")
    if not box.watched:
        lacks.append("no view of /proc: memory is limited for each of its processes alone")
    os.write(1, json.dumps(lacks).encode() + b"\n")
    for size in box.sizes:
        run_test(box, start, size)
        start += size
    os._exit(0)


def kernel(name: str, *arguments) -> int:
    """Call a function of the C library that must succeed; OSError says which did not, and why."""
    result = getattr(LIBC, name)(*[a.encode() if isinstance(a, str) else a for a in arguments])
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def prctl(option: int, value: int, pointer=0):
    kernel("prctl", option, value, pointer, 0, 0)


def write_file(path: str, text: str):
    with open(path, "w") as f:
        f.write(text)


def enter_namespaces(box) -> list[str]:
    """Go on as the first process of new namespaces, at whose end all others in them end, with a root of its
    own. A child tries, so that this process can go on where that fails. Returns what the system lacks."""
    child = os.fork()
    if child:
        failed = os.waitpid(child, 0)[1] != 0
        reason = os.pread(box.trouble, 4096, 0).decode()
        if not reason:
            os._exit(failed)
        os.truncate(box.trouble, 0)
        return [f"no namespaces ({reason}): it sees names and sizes of your files, and may fill the disk"]
    try:
        if not box.switches_user or LIBC.unshare(Linux.SPACES) < 0:
            # Others than root, and root in a container, make them in a namespace of users
            switch_user(box)
            os.stat(os.__file__)  # unless root alone can read this Python
            kernel("unshare", Linux.SPACES | Linux.NEWUSER)
            write_file("/proc/self/setgroups", "deny")
            write_file("/proc/self/uid_map", f"1000 {box.uid} 1")
            write_file("/proc/self/gid_map", f"1000 {box.gid} 1")
            box.uid = box.gid = 1000
            box.switches_user = False
        prctl(Linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        first = os.fork()
        if first:
            os._exit(os.waitpid(first, 0)[1] != 0)
        prctl(Linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        for name, value in (("core/somaxconn", "16"), ("ipv4/tcp_rmem", "4096 65536 65536"),
                            ("ipv4/tcp_wmem", "4096 65536 65536")):
            with contextlib.suppress(OSError):  # what waits in sockets is memory that nobody counts
                write_file(f"/proc/sys/net/{name}", value)
        enter_root(box, os.getcwd())
    except OSError as e:
        os.write(box.trouble, str(e).encode())
        os._exit(1)
    box.namespaces = True
    with contextlib.suppress(OSError), socket.socket() as s:  # a loopback of its own
        kernel("ioctl", s.fileno(), Linux.SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", Linux.IFF_UP))
    return []


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
    """Make a tree of what a test may see in the folder `here`, read-only, and go on with it as the root."""
    kernel("mount", None, "/", None, Linux.MS_REC | Linux.MS_PRIVATE, None)
    kernel("mount", "tmpfs", here, "tmpfs", Linux.MS_NODEV, "size=1m,nr_inodes=1000,mode=755")
    shown = shown_paths()
    if any(path.startswith("/tmp/") for path in shown):
        box.folder = "/scratch"  # Python stands in /tmp, which a test's own /tmp would hide
    for path in shown:
        target = here + path
        if os.path.exists(target):
            continue  # it stands in a folder that is shown
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.isdir(path):
            os.mkdir(target)
        else:
            write_file(target, "")
        kernel("mount", path, target, None, Linux.MS_BIND | Linux.MS_REC, None)
    write_file(f"{here}/etc/passwd", f"solver:x:{box.uid}:{box.gid}::{box.folder}:/bin/sh\n")
    write_file(f"{here}/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{here}/dev/{name}")
    os.symlink(box.folder, f"{here}/dev/shm")
    os.mkdir(f"{here}{box.folder}")
    os.mkdir(f"{here}/proc")
    with contextlib.suppress(PermissionError):  # where a container hides a part of /proc, nobody can show it
        flags = Linux.MS_RDONLY | Linux.MS_NOSUID | Linux.MS_NODEV | Linux.MS_NOEXEC
        kernel("mount", "proc", f"{here}/proc", "proc", flags, None)
    os.chdir(here)
    kernel("pivot_root", ".", ".")
    kernel("umount2", ".", Linux.MNT_DETACH)
    os.chdir("/")
    flags = struct.pack("4Q", Linux.MS_RDONLY | Linux.MS_NOSUID, 0, 0, 0)  # struct mount_attr
    size = ctypes.c_size_t(len(flags))
    kernel("syscall", Linux.MOUNT_SETATTR, Linux.AT_FDCWD, "/", Linux.AT_RECURSIVE, flags, size)


def run_test(box, start: int, size: int):
    """Run a test and report its output. Ends the supervisor if it fails, as all tests must pass."""
    folder = box.folder
    if box.namespaces:
        LIBC.umount2(folder.encode(), Linux.MNT_DETACH)  # that of the test before
        options = f"size=128m,nr_inodes=8192,mode=700,uid={box.uid},gid={box.gid}"
        kernel("mount", "tmpfs", folder, "tmpfs", Linux.MS_NOSUID | Linux.MS_NODEV, options)
    else:
        folder = os.path.abspath(os.urandom(8).hex())  # the tests before cannot have put something there
        os.mkdir(folder, 0o700)
        os.chown(folder, box.uid, box.gid)
    output = os.memfd_create("output")
    pid = os.fork()
    if pid == 0:
        become_test(box, folder, start, size, output)
    passed = passes(box, pid)
    with contextlib.suppress(ProcessLookupError):  # all at once, so that nothing forks meanwhile
        if box.namespaces:
            os.kill(-1, signal.SIGKILL)  # all but this one
        else:
            os.killpg(pid, signal.SIGKILL)  # the filter lets nothing leave the group
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    reason = os.pread(box.trouble, 4096, 0).decode()
    if reason:
        os.truncate(box.trouble, 0)  # else enter_namespaces would think that these failed
        raise OSError(reason)
    written = os.fstat(output).st_size
    if not passed or written > box.most:
        os._exit(0)
    os.write(1, b"%d\n" % written)
    if os.sendfile(1, output, 0, written) < written:  # not through this process's memory, which tests inherit
        raise OSError(errno.ENOSPC, "the output of a test")
    os.close(output)


def passes(box, pid: int) -> bool:
    """Whether a test's process ends by itself without an error, in time, and in its memory."""
    deadline = time.monotonic() + box.seconds
    while time.monotonic() < deadline:
        signal.sigtimedwait([signal.SIGCHLD], 0.02)  # seconds, in which one core can fill some 50 MB
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        if box.watched and takes_too_much(box):
            return False
    return False


def takes_too_much(box) -> bool:
    """Whether the processes that stem from this one take too much memory (what a fork shares with its parent
    counts for both) or are too many, as no limit binds whom the kernel takes for root."""
    found = [os.getpid()]
    used = 0
    for pid in found:  # grows underway
        filled = 0
        for thread in glob.glob(f"/proc/{pid}/task/*"):
            with contextlib.suppress(OSError):
                found += map(int, open(f"{thread}/children").read().split())
                status = open(f"{thread}/status").read()  # without sizes if it has ended, be it the first
                sizes = re.findall(r"(?:RssAnon|VmPTE|VmSwap|HugetlbPages):\s*(\d+)", status)
                filled = max(filled, 1024 * sum(map(int, sizes)))
        used += filled
    return len(found) > 65 or used > box.memory


def become_test(box, folder: str, start: int, size: int, output: int):
    """Become a test, whose input stands in descriptor 0 from `start` on, run the program and end."""
    try:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        given = os.memfd_create("input")
        if os.write(given, os.pread(0, size, start)) < size:
            raise OSError(errno.ENOSPC, "the input of a test")
        os.lseek(given, 0, os.SEEK_SET)
        os.chdir(folder)
        os.environ.update(HOME=folder, TMPDIR=folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        drop_privileges(box)
        prctl(Linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        restrict_files(box, folder)
        program = filter_program(box)
        array = ctypes.create_string_buffer(program)
        header = struct.pack("H6xQ", len(program) // 8, ctypes.addressof(array))  # struct sock_fprog
        prctl(Linux.PR_SET_SECCOMP, Linux.SECCOMP_MODE_FILTER, header)
    except BaseException as e:
        os.write(box.trouble, repr(e).encode())
        os._exit(1)
    # What is printed counts for a program, what a function returns (in 3) for a function; nobody reads errors
    for fd, source in enumerate([given, null, null, output] if box.name else [given, output, null, null]):
        os.dup2(source, fd, inheritable=fd < 3)
    os.closerange(4, 256)
    try:
        run_program(box)
        os._exit(0)
    finally:
        os._exit(1)


def switch_user(box):
    """Where this is root: become a user who owns nothing, with the capabilities until drop_privileges."""
    if box.switches_user:
        prctl(Linux.PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setgid(box.gid)
        os.setuid(box.uid)
        prctl(Linux.PR_SET_DUMPABLE, 1)  # or its files in /proc would stay root's


def drop_privileges(box):
    """Set limits, become the test's user, give up all capabilities, and never gain any. Where Landlock alone
    guards files, the test of a root keeps the right to any file, as its Python may stand in root's home."""
    limits = {"AS": box.addresses, "DATA": box.memory, "STACK": 64 << 20, "CPU": int(box.seconds) + 1,
              "NPROC": 64, "FSIZE": 32 << 20, "NOFILE": 64, "SIGPENDING": 256,
              "CORE": 1}  # byte: at 0 the kernel would still hand dumps to a program of the system's
    kept = 0
    if box.switches_user and box.landlock > 0 and not box.namespaces:
        kept = 1 << Linux.CAP_DAC_OVERRIDE
    if not box.switches_user and not box.namespaces:
        limits["NPROC"] += int(open("/proc/loadavg").read().split()[3].split("/")[1])  # others of this user
    for name, value in limits.items():
        with contextlib.suppress(ValueError):  # the hard limit is lower already
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    switch_user(box)
    prctl(Linux.PR_SET_NO_NEW_PRIVS, 1)
    sets = struct.pack("6I", kept, kept, 0, 0, 0, 0)  # effective, permitted, inheritable
    kernel("capset", struct.pack("Ii", Linux.CAPABILITY_VERSION_3, 0), sets)


def restrict_files(box, folder: str):
    """Landlock (docs.kernel.org/userspace-api/landlock.html): what is shown can be read, the folder written,
    and nothing else."""
    if box.landlock < 1:
        return
    known = [0, 13, 14, 15, 15, 16][min(box.landlock, 5)]  # rights to files that a version of Landlock knows
    rights = (1 << known) - 1
    scopes = Linux.SCOPES if box.landlock >= 6 else 0
    handled = struct.pack("3Q", rights, 0, scopes)  # 0: no rights to ports, as no socket is made
    rules = kernel("syscall", Linux.CREATE_RULESET, handled, ctypes.c_size_t(24), 0)
    allowed = {path: Linux.READ_TREE for path in (["/"] if box.namespaces else shown_paths())}
    for path, access in (allowed | {"/dev/null": Linux.USE_FILE, folder: rights}).items():
        fd = os.open(path, os.O_PATH)
        if not os.path.isdir(path):
            access &= Linux.USE_FILE
        kernel("syscall", Linux.ADD_RULE, rules, Linux.PATH_BENEATH, struct.pack("=Qi", access, fd), 0)
        os.close(fd)
    kernel("syscall", Linux.RESTRICT_SELF, rules, 0)


def filter_program(box) -> bytes:
    """Seccomp (docs.kernel.org/userspace-api/seccomp_filter.html): a program that the kernel runs at each
    call. A line is a struct sock_filter: operation, lines to skip if true, if false, operand. It reads struct
    seccomp_data: the call's number at byte 0, the architecture at 4, argument i's low half at 16 + 8 i."""
    allow = (Linux.RETURN, 0, 0, Linux.RET_ALLOW)
    kill = (Linux.RETURN, 0, 0, Linux.RET_KILL_PROCESS)
    refuse = (Linux.RETURN, 0, 0, Linux.RET_ERRNO | errno.EPERM)
    unknown = (Linux.RETURN, 0, 0, Linux.RET_ERRNO | errno.ENOSYS)
    families = [socket.AF_UNIX, socket.AF_INET] if box.loopback and box.namespaces else []
    kinds = [socket.SOCK_STREAM] + ([socket.SOCK_DGRAM] if box.namespaces else [])  # a datagram goes anywhere
    shared = [0, Linux.MAP_SHARED, Linux.MAP_ANONYMOUS]  # either, but not both
    spaces = Linux.SPACES | Linux.NEWUSER | Linux.NEWCGROUP
    whole = 0xffffffff
    checks = {  # name: argument, mask, values of the masked argument that are allowed (prlimit64: of itself)
        "socket": (0, whole, families), "socketpair": (1, 15, kinds), "prlimit64": (0, whole, [0]),
        "clone": (0, spaces, [0]), "mmap": (3, sum(shared), shared), "prctl": (0, whole, [15, 16]),  # a name
        # Neither sizes of buffers (7, 8) nor filters (26, 50 and on): their memory is the kernel's, and one
        # that freed a thousand filters at once stood still. IPv6, which has an option 26 too, is not there
        "setsockopt": (2, whole, [*range(1, 7), *range(9, 26)]),
        "fcntl": (1, whole, [*range(8), 1030, 1031, 1032]),  # F_DUPFD to F_SETLKW; on exec, sizes of pipes
        "ioctl": (1, whole, [0x5401, 0x5413, 0x541b, 0x5421, 0x5450, 0x5451])}  # isatty, FIONREAD, FIOCLEX
    machine = os.uname().machine
    if machine not in Linux.AUDIT_ARCH:
        raise OSError(f"{machine} has no table of system calls here: use x86_64 or aarch64")
    program = [(Linux.LOAD, 0, 0, 4), (Linux.IF_EQUAL, 1, 0, Linux.AUDIT_ARCH[machine]), kill,
               (Linux.LOAD, 0, 0, 0), (Linux.IF_GREATER, 0, 1, Linux.NEWEST), unknown]
    tables = [Linux.UNKNOWN, Linux.CHECKED, Linux.DENIED]
    if not box.namespaces:
        tables.append(Linux.DENIED_WITHOUT_NAMESPACES)
    for row in ",".join(tables).split(","):
        name, *numbers = row.split()
        number = numbers[machine == "aarch64"]
        if number == "-":
            continue
        argument, mask, allowed = checks.get(name, (0, 0, []))
        check = [(Linux.LOAD, 0, 0, 16 + 8 * argument), (Linux.AND, 0, 0, mask)]
        for i, value in enumerate(allowed):
            check.append((Linux.IF_EQUAL, len(allowed) - i, 0, value))  # skips to `allow`
        check += [unknown if row == Linux.UNKNOWN else refuse, allow]
        program += [(Linux.IF_EQUAL, 0, len(check), int(number)), *check]
    return b"".join(struct.pack("HBBI", *line) for line in [*program, allow])


def run_program(box):
    """Run the program as __main__, to its end as an interpreter would; or import it, call its function with
    the input's lines, and write the value to descriptor 3."""
    sys.modules[box.module.__name__] = box.module
    sys.argv = ["solution.py"]
    given = sys.stdin.buffer.read() if box.name else b""
    vars(box.module).pop(box.name, None)  # The prelude's own gcd, say, is no solution.
    with contextlib.suppress(SystemExit):  # whatever its code, as in LiveCodeBench
        exec(compile(box.program, "solution.py", "exec"), vars(box.module))
    if box.name:
        owner = box.module.Solution() if hasattr(box.module, "Solution") else box.module
        value = getattr(owner, box.name)(*map(json.loads, given.split(b"\n")))
        if isinstance(value, tuple):
            value = list(value)
        text = json.dumps(value, default=lambda v: v.item())  # item() is that of numpy's scalars
        if json.loads(text) != value:  # tuples inside, keys that are no strings: not equal in LiveCodeBench
            raise TypeError("JSON hides what this value is")
        write_file(3, text)
        return
    for step in (threading._shutdown, atexit._run_exitfuncs):
        with contextlib.suppress(BaseException):
            step()
    for thing in [*gc.get_objects(), sys.stdout, sys.__stdout__]:  # gc does not list these
        with contextlib.suppress(Exception):
            if isinstance(thing, io.IOBase):
                thing.flush()


START = """
import atexit, contextlib, ctypes, errno, gc, glob, io, json, marshal, os, re, resource, signal, socket
import struct, sys, threading, time, types
size = int(sys.argv[1])
functions, linux, job = marshal.loads(os.pread(0, size, 0))
Linux, LIBC = types.SimpleNamespace(**linux), ctypes.CDLL(None, use_errno=True)
exec(functions)
supervise(job, size)
"""


@functools.cache
def supervisor() -> types.CodeType:
    """The functions from supervise to here, for START. To compile them takes longer than a small test."""
    names = list(globals())
    names = names[names.index("supervise"):names.index("START")]
    return compile("\n".join(inspect.getsource(globals()[name]) for name in names), "supervisor", "exec")


def own_cores() -> list[int]:
    """The cores on which this rank runs solutions, one at a time on each: its share of those that it and the
    machine's other ranks may use."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else [0]
    rank = int(os.environ.get("LOCAL_RANK", 0))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return cores[rank::ranks] or [cores[rank % len(cores)]]


FREE_CORES = queue.SimpleQueue()  # whoever runs a solution takes one and puts it back
for free_core in own_cores():
    FREE_CORES.put(free_core)
LACKS = []  # what the system lacks for the whole sandbox, as the last run said


def run_code(program: str, name: str | None, tests: list[str], seconds: float, memory: int = 4,
             most: int = MAX_OUTPUT, loopback: bool = False) -> list:
    """Run a program that nobody has read in a sandbox. Without a name it is __main__ and reads a test from
    standard input; else its function (or Solution's method) of that name gets a test's lines, JSON arguments.
    Returns what each test printed or, as JSON, returned (bytes); None from the first test on that crashed,
    took over `seconds` of wall time or too much memory, or gave over `most` bytes. memory: GiB that each
    process may address; all processes of a test together may fill as much, and 4 at most. loopback: it may
    open sockets, on a network of its own.

    A warning says what the system lacks; OSError, why there is no sandbox at all."""
    if sys.platform != "linux":
        raise OSError("generated code runs in a sandbox that only Linux has: use Linux, a container or WSL")
    inputs = [test.encode(errors="surrogatepass") for test in tests]
    folder = tempfile.mkdtemp()
    core = FREE_CORES.get()
    job = dict(program=program, name=name, prelude=PRELUDE, sizes=list(map(len, inputs)), seconds=seconds,
               core=core, addresses=memory << 30, memory=min(memory, 4) << 30,
               most=most, loopback=loopback)
    header = marshal.dumps((supervisor(), vars(Linux), job))
    options = ["-I", "-X", "utf8", "-X", f"int_max_str_digits={MAX_DIGITS}", "-c", START, str(len(header))]
    environment = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "TZ": "UTC", "OMP_NUM_THREADS": "1"}
    child, trouble = None, "it did not start in time"
    try:
        with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as told:
            asked.writelines([header, *inputs])
            asked.flush()
            with contextlib.suppress(subprocess.TimeoutExpired):  # on a machine too busy to keep any time
                child = subprocess.run(
                    [sys.executable, *options], cwd=folder, start_new_session=True, env=environment,
                    stdin=asked, stdout=told, stderr=subprocess.PIPE, timeout=(seconds + 1) * len(tests) + 30)
                trouble = child.stderr.decode(errors="replace").strip()
            told.seek(0)
            lacks = told.readline()
            outputs = [told.read(int(size)) for size in iter(told.readline, b"")]
    finally:
        FREE_CORES.put(core)
        try:
            os.rmdir(folder)
        except OSError:  # without namespaces the tests' folders are in it, too deep for shutil, or locked
            subprocess.run(["chmod", "-R", "u+rwx", folder], stderr=subprocess.DEVNULL)
            subprocess.run(["rm", "-rf", folder])
    if not lacks or child and child.returncode and trouble:
        raise OSError(f"no sandbox with {sys.executable}: {trouble}")
    LACKS[:] = json.loads(lacks)
    if LACKS:
        text = f"the sandbox of generated code holds only in part here: {'; '.join(LACKS)}"
        warnings.warn(text, stacklevel=2)
    return outputs + [None] * (len(tests) - len(outputs))


@functools.cache
def sandbox_lacks() -> list[str]:
    """What this system lacks for the whole sandbox, and what is open to a program in it for that reason."""
    run_code("", None, [""], 60.0)
    return list(LACKS)


def check_sandbox(partial: bool):
    """Before training on generated code: RuntimeError where the sandbox holds in part, as a policy learns to
    use what is open. partial: the user has said that this will do (--sandbox=partial)."""
    if sandbox_lacks() and not partial:
        raise RuntimeError(
            f"the sandbox of generated code holds only in part here: {'; '.join(sandbox_lacks())}. A policy "
            "in training finds what is open. Allow namespaces (Docker: --security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined --security-opt systempaths=unconfined; Ubuntu: sysctl -w "
            "kernel.apparmor_restrict_unprivileged_userns=0), train on problems without code, or accept this "
            "with --sandbox=partial")


def extract_code(response: str) -> str:
    """The last fenced block of a response that says it is Python, or else the last; its end may be missing.
    Without a block what is in the last <answer> tag."""
    begin = r"```([\w+#.-]*)[ \t]*\r?\n"
    end = r"(?:^[ \t]*```(?!\w)|```[ \t]*(?:</answer>|\r?$)|\Z)"
    blocks = re.findall(begin + "(.*?)" + end, response, re.DOTALL | re.MULTILINE)
    _, tag, inside = response.rpartition("</answer>")[0].rpartition("<answer>")
    in_python = [code for language, code in blocks if re.fullmatch("(?i)py(thon)?3?", language)]
    in_any = [code for _, code in blocks]
    code = (in_python or in_any or [inside if tag else ""])[-1]
    return textwrap.dedent(code).strip("\n")


def longest(expected: str) -> int:
    """Bytes that a right output may have: it may write numbers with more digits, such as 0.500000 for 0.5."""
    return 1000 + 10 * len(expected.encode(errors="surrogatepass"))


def same_output(out: bytes | None, expected: str, returned: bool) -> bool:
    """The rules of LiveCodeBench's lcb_runner/evaluation/testing_util.py: a returned value (JSON) by value;
    what is printed line by line, stripped, as text or as Decimal tokens. A wrong output costs no more than a
    right one: lines and values are counted before any is made an object."""
    if out is None or len(out) > longest(expected):
        return False
    try:
        if returned:  # Python reads no int of more than 4,300 digits; a Decimal of it is as exact
            wanted = json.loads(expected, parse_int=Decimal)
            written = json.dumps(wanted, default=lambda integer: 0).encode()
            alike = all(out.count(mark) == written.count(mark) for mark in b"[{,\"")
            return alike and json.loads(out, parse_int=Decimal) == wanted
        printed = out.decode(errors="replace").strip()
        expected = expected.strip()
        if printed.count("\n") != expected.count("\n"):
            return False
        for mine, theirs in zip(printed.split("\n"), expected.split("\n")):
            tokens = theirs.split()
            given = mine.split(None, len(tokens))  # one more, if there are more
            if mine.strip() != theirs.strip() and [*map(Decimal, given)] != [*map(Decimal, tokens)]:
                return False
        return True
    except (ValueError, RecursionError, InvalidOperation):  # no JSON, too deep, no numbers
        return False


FIRST_TESTS = 8  # Who fails one of these is not run on the others, which may take hundreds of seconds.


def passes_livecodebench(code: str, tests: list[list[str]], fn_name: str | None = None,
                         seconds: float = 6.0) -> bool:
    """Whether a program passes all tests of a LiveCodeBench problem, [input, output] as in stored_tests;
    fn_name is metadata["func_name"]; seconds are a test's. A returned tuple stands for a list at the top
    alone. The outputs stay here: the sandbox gets inputs only."""
    if not tests:
        raise ValueError("a LiveCodeBench problem without tests: nothing can be graded by it, load it again")
    if not code.strip():
        return False
    # A program finds in its memory what is sent with it: only the magnitude of the longest output is
    most = 1 << max(20, max(longest(expected) for _, expected in tests).bit_length())
    for some in filter(None, (tests[:FIRST_TESTS], tests[FIRST_TESTS:])):
        outputs = run_code(code, fn_name, [test[0] for test in some], seconds, most=min(most, MAX_OUTPUT))
        if not all(same_output(out, test[1], fn_name is not None) for out, test in zip(outputs, some)):
            return False
    return True


# BigCodeBench's tests patch a solution's module and look into what it returns: they must share its process
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
    out, = run_code(UNITTESTS, "unittest_results", ["\n".join(map(json.dumps, arguments))], seconds, 32,
                    loopback=True)
    return same_output(out, json.dumps(sorted(set(names))), True)


# -----------------------------------------------------------------------------------------------------------
# The laptop world's problems

WORDS = (
    "planet river garden window market silver dragon castle forest bridge winter summer orange yellow purple "
    "candle basket rocket guitar violin doctor farmer sailor pirate monkey rabbit turtle spider butter "
    "cheese pepper ginger cotton velvet marble copper bronze tunnel harbor island desert valley meadow "
    "canyon glacier volcano thunder shadow mirror").split()
FRAMES = ("What is {}?", "Find {}.", "Tell me {}.", "Give me {}.")
NEEDS = {  # whom a kind of problem needs
    "arithmetic": ["calculator"],
    "fact": ["librarian"],
    "string": ["coder"],
    "number": ["translator"],
    "foreign": ["translator", "calculator"],
    "fact+arithmetic": ["librarian", "calculator"],
    "capital+string": ["librarian", "coder"],
    "element+string": ["librarian", "coder"],
    "foreign+fact+arithmetic": ["librarian", "translator", "calculator"],
}
LAPTOP = {"laptop": 3, "laptop:1": 1, "laptop:2": 2}  # the most workers that a question needs


def laptop_expressions() -> dict[str, list[tuple[str, str]]]:
    """Every (expression, value) of the laptop world by kind, in a fixed order."""
    def facts(about):
        return {name: value for name, value in FACTS.items() if name.startswith(about)}

    def sums(left, right):
        found = []
        for a, b, op in itertools.product(left, right, ARITHMETIC):
            value = ARITHMETIC[op](int(left[a]), int(right[b]))
            found.append((f"{a} {op} {b}", str(value)))
        return found

    def spelled(values):
        pairs = itertools.product(values.items(), SPELLING.items())
        return [(f"{name} {wish}", ORDERS[order](value)) for (name, value), (wish, order) in pairs]

    digits = {str(n): str(n) for n in range(2, 40)}
    atomic = facts("the atomic number of")
    return {
        # one specialist
        "arithmetic": sums(digits, digits),
        "fact": list(FACTS.items()),
        "string": spelled({word: word for word in WORDS}),
        "number": list(SPANISH.items()),
        # two, each seeing the one before
        "foreign": sums(SPANISH, SPANISH),
        "fact+arithmetic": sums(atomic, digits),
        "capital+string": spelled(facts("the capital of")),
        "element+string": spelled(facts("element number")),
        # three
        "foreign+fact+arithmetic": sums(atomic, SPANISH),
    }


def laptop_problems(split: str, most: int = 3) -> list[Problem]:
    """The kinds that need at most so many workers. A quarter of each kind's expressions is for "test", the
    others for "train", whatever the sentence around them."""
    problems = []
    for kind, pairs in laptop_expressions().items():
        if len(NEEDS[kind]) > most:
            continue
        for expression, value in pairs:
            held_out = zlib.crc32(expression.encode()) % 4 == 0
            if held_out == (split == "test"):
                for i, frame in enumerate(FRAMES):
                    question = frame.format(expression)
                    problems.append(Problem(f"{kind}/{expression}/{i}", question, str(value), kind))
    return problems


def best_chance(problem: Problem, pool: list) -> float:
    """How often the best workflow over these local specialists answers a laptop problem right: always, where
    each trade that it needs has one who never gives up."""
    chance = 1.0
    for trade in NEEDS[problem.kind]:
        able = [w.name.removesuffix(trade).strip() for w in pool if w.name.endswith(trade)]
        chance *= max((SKILL[kind] for kind in able), default=0.0)
    return chance


def draw_pool(problem: Problem, pool: list, k: int, rng: random.Random) -> list:
    """k of the local specialists by chance, in the pool's order, among which are some who can solve the
    problem."""
    able = [team for team in itertools.combinations(pool, min(k, len(pool))) if best_chance(problem, team)]
    if not able:
        raise ValueError(f"no {k} of {', '.join(w.name for w in pool)} can solve {problem.question!r}")
    return list(rng.choice(able))


def interleave(problems: list[Problem], rng: random.Random, again: bool = False) -> list[Problem]:
    """Shuffle, with the kinds taking turns. again: a small kind starts again until the largest is through,
    else it drops out."""
    kinds = {}
    for p in problems:
        kinds.setdefault(p.kind, []).append(p)
    for group in kinds.values():
        rng.shuffle(group)
    most = max(map(len, kinds.values()), default=0)
    turns = itertools.product(range(most), kinds.values())
    return [group[i % len(group)] for i, group in turns if again or i < len(group)]


# -----------------------------------------------------------------------------------------------------------
# Random workflows: a baseline, and what the warm start of a tiny Conductor is made of

PHRASES = ("Work it out.", "Find the value.", "Reverse it.", "Write it in capitals.", "Leave out the vowels.")
OTHER_PHRASES = (SOLVE_IT, "Plan how to solve it.", "Check the last response.", "Improve the last response.",
                 "Give the whole answer.")  # for problems that are not of the laptop world
# A pretrained Conductor writes its subtasks word by word: it starts from 384 sentences made of these.
ORDERS_TO = ("Work on {}", "Simplify {}", "Find {}", "Process {}", "Compute {}", "Translate {}", "Recall {}",
             "Answer {}", "Explain {}", "Reverse {}", "Write {} in capitals", "Leave the vowels out of {}")
OBJECTS = ("it", "the text", "the word", "the name", "the number", "the question", "what is asked",
           "what is left")
MANNERS = ("", "", "", " carefully", " step by step", " in one word")  # half of the sentences have none


def sentence(rng: random.Random) -> str:
    return rng.choice(ORDERS_TO).format(rng.choice(OBJECTS)) + rng.choice(MANNERS) + "."


def phrases_for(problem: Problem) -> tuple:
    """Those that random workflows for a problem say to its workers."""
    is_laptops = problem.kind in NEEDS and problem.id.startswith(f"{problem.kind}/")
    return PHRASES if is_laptops else OTHER_PHRASES


def random_workflow(rng: random.Random, n_workers: int, max_steps: int = 5, prose: bool = False,
                    phrases: tuple = PHRASES) -> Workflow:
    """1 to max_steps steps, short workflows more often; each a random worker, a random phrase (prose: a
    random sentence), and nine times in ten all that came before."""
    n_steps = min(rng.randint(1, max_steps), rng.randint(1, max_steps))
    steps = []
    for i in range(n_steps):
        worker = rng.randrange(n_workers)
        subtask = sentence(rng) if prose else rng.choice(phrases)
        everything = rng.random() < 0.9
        steps.append(Step(worker, subtask, list(range(i)) if everything else []))
    return Workflow(steps)


def random_completion(question: str, rng: random.Random, n_workers: int, max_steps: int = 5, names: str = "",
                      subtasks: bool = True, prose: bool = False, phrases: tuple = PHRASES) -> str:
    """A completion in the Conductor's format that says nothing about which workflow is good: its plan is the
    question, and the workers' names if they have some. subtasks=False leaves that list out (App. B.7). A
    pretrained model's (prose) has no plan.

    The number of steps stands behind the workers, where it can be counted, and helps to write two more lists
    of that length. In the plan commas say whether another name follows: sharpening the policy
    (train.warm_start) would else favour the list's end, one token, over the next name, one of many."""
    workflow = random_workflow(rng, n_workers, max_steps, prose, phrases)
    if prose:
        return as_lists(workflow, subtasks)
    workers, others = as_lists(workflow, subtasks).split("\n", 1)
    plan = question
    if names:
        plan += " " + ", ".join(f"{names[step.worker]} {step.worker}" for step in workflow.steps)
    return f"Plan: {plan}\n{workers} # {len(workflow.steps)} steps\n{others}"


# -----------------------------------------------------------------------------------------------------------
# More systems. Each is a function (problem, pool, k, name) -> Trace: k is the worker of the pool that plays
# the part, where one does, and `name` names the calls for the replay file and seeds whatever is random.

REFLECT = "Check the last response for mistakes, correct them, and give the whole answer in its final form."
AGGREGATE = "Compare the responses, decide which is right, and give the whole answer in its final form."


def alone(problem: Problem, pool: list, k: int, name: str = "", **overrides) -> Trace:
    """Worker k asked without a Conductor: one turn, the bare question. name: as in workflow.Task."""
    trace = Trace(problem.question, Workflow([Step(k, problem.question, [])]), [pool[k].name], [None])
    try:
        trace.replies[0] = pool[k].chat([{"role": "user", "content": problem.question}], name, **overrides)
        trace.seconds = trace.replies[0].seconds
    except WorkerError as e:
        trace.error = str(e)
    return trace


def context(problem: Problem, pool: list, k: int, name: str) -> Trace:
    longer = {key: 5 * value for key, value in pool[k].params.items() if key in LIMITS}
    return alone(problem, pool, k, name, **longer)


def moa(problem: Problem, pool: list, k: int, name: str) -> Trace:
    """A Mixture of Agents of one layer: every worker proposes, and a random one aggregates."""
    steps = [Step(i, SOLVE_IT, []) for i in range(len(pool))]
    aggregator = random.Random(name).randrange(len(pool))
    steps.append(Step(aggregator, AGGREGATE, list(range(len(pool)))))
    return execute(Workflow(steps), problem.question, pool, name=name)


def reflect(problem: Problem, pool: list, k: int, name: str) -> Trace:
    steps = [Step(k, SOLVE_IT, [])]
    steps += [Step(k, REFLECT, list(range(i))) for i in range(1, 5)]
    return execute(Workflow(steps), problem.question, pool, name=name)


def at_random(problem: Problem, pool: list, k: int, name: str) -> Trace:
    workflow = random_workflow(random.Random(name), len(pool), phrases=phrases_for(problem))
    return execute(workflow, problem.question, pool, name=name)


def consensus(problem: Problem, pool: list, k: int, name: str) -> Trace:
    return poll(problem, pool, [k] * 5, name, majority)


def smoothie(problem: Problem, pool: list, k: int, name: str) -> Trace:
    return poll(problem, pool, list(range(len(pool))), name, central)


def poll(problem: Problem, pool: list, chosen: list[int], name: str, choose) -> Trace:
    """Chosen workers asked alone. The response at choose(problem, responses) is the answer."""
    asked = [alone(problem, pool, k, f"{name}/{i}") for i, k in enumerate(chosen)]
    lost = any(t.error for t in asked)
    return as_one(asked, -1 if lost else choose(problem, [t.answer for t in asked]))


def as_one(traces: list[Trace], answer: int) -> Trace:
    """Traces of one step each as one; the response of that at `answer` is the answer, and stands last."""
    traces = [*traces]
    traces.append(traces.pop(answer))
    errors = [t.error for t in traces if t.error]
    workflow = Workflow([t.workflow.steps[0] for t in traces])
    names = [t.workers[0] for t in traces]
    replies = [t.replies[0] for t in traces]
    return Trace(traces[0].question, workflow, names, replies, error=errors[0] if errors else None)


def majority(problem: Problem, responses: list[str]) -> int:
    """Where the first answer stands with which most responses agree, as the problem's grader sees it."""
    votes = [sum(same_meaning(problem, answer, other) for other in responses) for answer in responses]
    return votes.index(max(votes))


def same_meaning(problem: Problem, answer: str, other: str) -> bool:
    """Whether two responses agree. One that gives no answer, say as it was cut off, agrees with none."""
    if problem.grader in ("code", "unittest"):
        code = extract_code(answer)
        return code != "" and code == extract_code(other)
    if problem.grader == "letter":
        gold = pick_letter(answer, problem.extra["choices"])
    elif problem.grader == "exact":
        gold = tagged(answer)
    else:
        gold = final_answer(answer)
    return bool(gold) and grade(replace(problem, answer=gold), other)


def central(problem: Problem, responses: list[str]) -> int:
    """Where the response stands that is most like the others: Smoothie (arXiv 2412.04692) judges likeness by
    sentence embeddings and over neighbouring questions too, this by the share of words in common."""
    words = [set(re.findall(r"\w+", response.casefold())) for response in responses]
    likeness = [sum(len(a & b) / max(len(a | b), 1) for b in words) for a in words]
    return likeness.index(max(likeness))


def run_system(system, problems: list[Problem], pool: list, k: int, name: str) -> list[Trace]:
    """The trace of every problem, 64 at a time, of a system(problem, pool, k, name) such as those above. k:
    the worker who plays, where one does. Ctrl-C does not wait for its threads, which are daemons."""
    def trace_of(i):
        return i, system(problems[i], pool, k, f"{name}/{problems[i].id}")

    with ThreadPool(64) as threads, progress(name, len(problems)) as bar:
        traces = {}
        for i, trace in threads.imap_unordered(trace_of, range(len(problems))):
            traces[i] = trace
            bar.update()
    return [traces[i] for i in range(len(problems))]


def everyone_alone(pool: list, problems: list[Problem], name: str) -> list[list[Trace]]:
    """Traces [worker][problem] of every single worker, all at a time."""
    def ask(k):
        return run_system(alone, problems, pool, k, f"{name}:{pool[k].name}")

    with ThreadPool(len(pool)) as threads:
        return threads.map(ask, range(len(pool)))


def baselines(problems: list[Problem], pool: list) -> dict[str, list[Trace]]:
    """Traces of every single worker and of random workflows."""
    traces = dict(zip([worker.name for worker in pool], everyone_alone(pool, problems, "workers")))
    return {**traces, "random workflows": run_system(at_random, problems, pool, 0, "random:/0")}


def best_single(problems: list[Problem], runs: dict[str, list], pool: list) -> dict[str, list]:
    scores = {w.name: measure(problems, runs[w.name])["accuracy"] or 0.0 for w in pool}
    best = max(scores, key=scores.get)
    return {f"best-single {best}": runs[best]}


def trigrams(question: str) -> torch.Tensor:
    """How often each trigram stands in a question, hashed: (4096)."""
    found = [question[i:i + 3].casefold() for i in range(len(question) - 2)]
    places = torch.tensor([zlib.crc32(trigram.encode()) % 4096 for trigram in found], dtype=torch.int64)
    counts = places.bincount(minlength=4096).float()
    return counts / counts.norm().clamp(min=1)


def train_router(pool: list, lessons: list[Problem], s) -> np.ndarray:
    """Weights (4096, W) of a logistic regression on who is right alone. RouterDC (NeurIPS 2024) learns from
    each worker's success too, but by a fine-tuned encoder and contrastive losses instead of trigrams."""
    right = [grades(lessons, traces) for traces in everyone_alone(pool, lessons, "router's lessons")]
    x = torch.stack([trigrams(p.question) for p in lessons])  # (P, 4096)
    y = torch.from_numpy(np.array(right, np.float32)).T  # (P, W): nan where a worker was lost
    known = ~y.isnan()
    if known.float().mean() < 0.5:  # What it learns from so little would be kept in --out.
        raise WorkerError("most of the router's lessons were lost: python workers.py says why")
    weights = torch.zeros(4096, len(pool), requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.1, weight_decay=1e-4)
    for _ in range(300):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(x @ weights, y.nan_to_num(), known).backward()
        optimizer.step()
    return weights.detach().numpy()


def router(weights: np.ndarray, s, problem: Problem, pool: list, k: int, name: str) -> Trace:
    """The worker who is likeliest right alone."""
    scores = trigrams(problem.question).numpy() @ weights  # (W)
    return alone(problem, pool, int(scores.argmax()), name)


# -----------------------------------------------------------------------------------------------------------
# Two controllers that learn on train problems whom to ask: MASRouter and TRINITY


class Remembers:
    """A worker while a controller learns: what it has answered once, it is not asked again."""
    def __init__(self, worker):
        self.name = worker.name
        self.ask = functools.cache(lambda chat: worker.chat(json.loads(chat), "a controller learns"))
        self.locks = {}  # so that two threads do not ask the same at once

    def chat(self, messages, call_id="", on_text=None):
        chat = json.dumps(messages)
        with self.locks.setdefault(chat, threading.Lock()):
            return self.ask(chat)


def rewards(system, pairs: list[tuple]) -> np.ndarray:
    """Of system(problem, choice) for each pair: 1 for a right answer, less the cost of its calls; nan where a
    worker was lost."""
    with ThreadPool(64) as threads:
        traces = threads.starmap(system, pairs)
    right = np.array(grades([problem for problem, _ in pairs], traces), float)
    return right - CALL_COST * np.array([t.calls for t in traces])


# MASRouter

MODES = ("alone", "chain", "reflection", "debate")
AGENTS = 5  # at most; in all modes but "alone" there are two or more
DESIGNS = 8  # that are tried at a time for each of 32 lessons
MASROUTER_STEPS = 500
CALL_COST, ENTROPY = 0.02, 0.02  # where a right answer is worth 1


def masrouter_heads(scores: torch.Tensor) -> list[torch.Tensor]:
    """Of scores (…, 8 + 5 W) those of the modes (…, 4), of 2 to 5 agents (…, 4), and 5 times of workers."""
    n_workers = (scores.shape[-1] - 8) // AGENTS
    return scores.split([len(MODES), AGENTS - 1] + [n_workers] * AGENTS, dim=-1)


def collaborate(problem: Problem, design: list[int], pool: list, name: str = "") -> Trace:
    """Run the workflow that a choice of each head makes."""
    mode = MODES[design[0]]
    n = 1 if mode == "alone" else design[1] + 2
    steps = [Step(worker, SOLVE_IT, []) for worker in design[2:2 + n]]
    for i in range(1, n):
        if mode == "chain":
            steps[i].access = [i - 1]
        elif mode == "reflection" or i == n - 1:
            steps[i].subtask = REFLECT if mode == "reflection" else AGGREGATE
            steps[i].access = list(range(i))
    return execute(Workflow(steps), problem.question, pool, name=name)


def train_masrouter(pool: list, lessons: list[Problem], s) -> np.ndarray:
    """MasRouter (arXiv 2502.11133) in small: weights (4096, 8 + 5 W) by policy gradient on the reward minus a
    cost. The original encodes the question with a language model, infers the mode through a latent variable,
    gives each agent a role, and makes each choice in view of those before. Here a choice is linear in the
    question's trigrams, the mode gives the roles, calls cost instead of tokens, and entropy is rewarded."""
    rng = random.Random(s.seed)
    torch.manual_seed(s.seed)
    run = functools.partial(collaborate, pool=[Remembers(worker) for worker in pool])
    weights = torch.zeros(4096, 8 + AGENTS * len(pool), requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.05)
    for _ in tqdm(range(MASROUTER_STEPS), "masrouter learns", disable=None):
        batch = rng.sample(lessons, min(32, len(lessons)))
        x = torch.stack([trigrams(p.question) for p in batch])  # (B, 4096)
        choices = [torch.distributions.Categorical(logits=scores) for scores in masrouter_heads(x @ weights)]
        designs = torch.stack([choice.sample([DESIGNS]) for choice in choices], -1)  # (G, B, 7)
        logp = torch.stack([c.log_prob(d) for c, d in zip(choices, designs.unbind(-1))], -1)  # (G, B, 7)
        found = rewards(run, [(p, d) for row in designs.tolist() for p, d in zip(batch, row)])
        value = torch.tensor(found).view(designs.shape[:2])  # (G, B)
        advantage = (value - value.nanmean(0)).nan_to_num()
        agents = torch.where(designs[..., 0] == 0, 1, designs[..., 1] + 2)  # (G, B)
        used = torch.stack([agents > 0, agents > 1, *(agents > i for i in range(AGENTS))], -1)  # (G, B, 7)
        entropy = torch.stack([choice.entropy() for choice in choices]).mean()
        optimizer.zero_grad()
        (-(advantage[..., None] * logp * used).mean() - ENTROPY * entropy).backward()
        optimizer.step()
    return weights.detach().numpy()


def masrouter(weights: np.ndarray, s, problem: Problem, pool: list, k: int, name: str) -> Trace:
    heads = masrouter_heads(trigrams(problem.question) @ torch.from_numpy(weights))
    return collaborate(problem, [int(scores.argmax()) for scores in heads], pool, name)


# TRINITY

TURNS = 5
POPULATION, GENERATIONS = 32, 120  # each generation on 32 lessons
COMPONENTS = 24  # principal ones of the hidden states
ROLES = {"thinker": "Solve what comes first, and say how to go on from there.", "worker": SOLVE_IT,
         "verifier": "Check the last response. Say ACCEPT if it is right and whole, else what is wrong."}
model_lock = threading.Lock()


@functools.lru_cache(100_000)
def hidden_state(folder: str, text: str) -> np.ndarray:
    """A model's last hidden state at the last token but one of a prompt, and a 1 for a bias: (C + 1)."""
    with model_lock, torch.no_grad():
        model, tokenizer, _ = cached_conductor(folder)
        chat = [{"role": "system", "content": ""}, {"role": "user", "content": text}]
        ids = tokenizer.chat(chat)[-model.config.max_position_embeddings:]
        hidden = model(torch.tensor([ids], device=model.device), head=lambda x: x[0, -2])  # (C)
    return np.append(hidden.float().cpu().numpy(), np.float32(1))


def trinity(weights: np.ndarray, s, problem: Problem, pool: list, k: int, name: str) -> Trace:
    """Up to five turns, each a round (§3.2) of one step, until a verifier says ACCEPT, or what a specialist
    says who has nothing left to do. The last response in the role worker is the answer."""
    trace, role = None, ""  # of the newest turn
    answer = -1  # the turn whose response it is
    for turn in range(TURNS):
        text = f"{problem.question}\n{role}: {trace.answer}" if trace else problem.question
        scores = hidden_state(s.trinity, text) @ weights  # (W + 3)
        role = [*ROLES][scores[len(pool):].argmax()]
        step = Step(int(scores[:len(pool)].argmax()), ROLES[role], [], wrote_all=True)
        trace = execute(Workflow([step]), problem.question, pool, trace, name)
        if trace.error:
            return trace
        if role == "worker":
            answer = turn
        elif role == "verifier" and re.search(r"\bACCEPT\b|nothing here to work on", trace.answer):
            break
    return as_one(trace.rounds(), answer)


def train_trinity(pool: list, lessons: list[Problem], s) -> np.ndarray:
    """TRINITY (arXiv 2512.04695) in small: weights (C + 1, W + 3) of a linear head on a small model's hidden
    states, evolved by a separable CMA-ES on the reward. In the original the model has 0.6 B parameters, some
    of its singular values evolve too, and all turns are read. Here the model is as it is, the head acts on
    principal components, the model and the workers read the newest turn alone, and calls cost."""
    rng = random.Random(s.seed)
    team = [Remembers(worker) for worker in pool]
    texts = [p.question for p in lessons]
    for traces in everyone_alone(team, lessons, "trinity's lessons"):
        texts += [f"{p.question}\n{rng.choice([*ROLES])}: {t.answer}" for p, t in zip(lessons, traces)]
    states = np.stack([hidden_state(s.trinity, text) for text in texts])  # (P + W P, C + 1)
    usual = states.mean(0)[:-1]  # (C)
    _, scale, axes = np.linalg.svd(states[:, :-1] - usual, full_matrices=False)
    axes = (axes.T / (scale + 1e-3 * scale[0]) * math.sqrt(len(states)))[:, :COMPONENTS]  # to variances of 1
    axes = np.vstack([axes, -usual @ axes])  # (C + 1, c): and to means of 0
    axes = np.column_stack([axes, np.eye(len(axes))[-1]])  # (C + 1, c + 1): and a bias
    shape = (axes.shape[1], len(pool) + len(ROLES))

    def fitness(population):
        pairs = list(itertools.product(rng.sample(lessons, min(32, len(lessons))), population))
        found = rewards(lambda p, x: trinity(axes @ x.reshape(shape), s, p, team, 0, ""), pairs)
        return np.nan_to_num(found).reshape(-1, len(population)).mean(0)

    return axes @ evolve(fitness, math.prod(shape), POPULATION, GENERATIONS, s.seed).reshape(shape)


def evolve(fitness, n: int, size: int, generations: int, seed: int) -> np.ndarray:
    """Maximise fitness(population (size, n)) -> (size) from 0 on, by CMA-ES with a diagonal covariance, which
    may learn (n + 2) / 3 times as fast (Ros & Hansen 2008); the step and the covariance share a path."""
    rng = np.random.default_rng(seed)
    w = math.log(size / 2 + 0.5) - np.log(np.arange(1, size // 2 + 1))
    w /= w.sum()
    mu = 1 / (w ** 2).sum()
    c_path = (mu + 2) / (n + mu + 3)
    c_one = (n + 2) / 3 * 2 / (n + 1.4) ** 2 / mu
    c_mu = min(1 - c_one, (n + 2) / 3 * (1 - 1 / mu) * (2 * mu - 1) / ((n + 2) ** 2 + mu))
    mean, path, deviations = np.zeros(n), np.zeros(n), np.ones(n)
    for _ in tqdm(range(generations), "trinity evolves", disable=None):
        z = rng.standard_normal((size, n))
        best = z[np.argsort(-fitness(mean + deviations * z))[:len(w)]]
        mean = mean + deviations * (w @ best)
        path = (1 - c_path) * path + math.sqrt(c_path * (2 - c_path) * mu) * (w @ best)
        deviations *= np.sqrt(1 + c_one * (path ** 2 - 1) + c_mu * (w @ best ** 2 - 1))
        deviations *= math.exp(c_path / (1 + c_path) * (np.linalg.norm(path) / math.sqrt(n) - 1))
    return mean


def run_conductor(conductor, problems: list[Problem], pools: list[list], name: str, rounds: int = 0,
                  prompting: Prompting = Prompting(), tries: int = 1, edit=None) -> list[Trace | None]:
    """The trace of every problem, None where what was written is no workflow. Problem i has the workers
    pools[i]. Text that does not parse is drawn again, `tries` times in all, and then wrong. The rest is as in
    workflow.conduct."""
    tasks = []
    for p, pool in zip(problems, pools, strict=True):
        tasks.append(Task(p.question, pool, problem=p, name=f"{name}/{p.id}"))
    with progress(name, len(tasks)) as bar:
        rollouts = conduct(conductor, tasks, rounds, prompting, tries, grade, edit, on_finish=first_of(bar))
    warn_of_invalid(name, rollouts)
    return [rollout.trace for rollout in rollouts]


def first_of(bar):
    """What moves a bar once a problem, not once a round."""
    def on_finish(rollout):
        if rollout.trace and not rollout.task.previous:
            bar.update()
    return on_finish


def warn_of_invalid(name: str, rollouts: list):
    """Say why there are problems without a workflow, but not on one of several ranks: it knows its share."""
    invalid = [rollout.invalid for rollout in rollouts if not rollout.trace]
    if invalid and os.environ.get("WORLD_SIZE", "1") == "1":
        warn(f"{name}: no workflow for {len(invalid)} of {len(rollouts)} problems; the first: {invalid[0]}")


# -----------------------------------------------------------------------------------------------------------
# What plays a system

CONDUCTORS = {  # that of --checkpoint, or NAME:DIR, asked as in its training but for this
    "conductor": {},
    "no-few-shot": {"style": "zero-shot"},  # Table 10
    "fine-grained": {"style": "fine-grained"},  # offered step numbers in access lists (Table 9)
    "no-subtasks": {"subtasks": False},  # App. B.7
    "shuffled": {},  # every worker has another's number
}
BY_WORKER = {  # each worker of the pool plays, or the one of NAME:WORKER
    "workers": alone,  # one call, the bare question
    "context": context,  # one call with five times the tokens
    "consensus": consensus,  # five calls, and the answer that most agree with
    "reflect": reflect,  # five turns of self-reflection
}
SEATS = [
    *BY_WORKER,
    "one-worker",  # the Conductor's workflows, but this worker does every step
    "seat",  # as the Conductor, with ten tries at the format (Table 11), which are not in its cost
]
BY_POOL = {
    "random": at_random,  # a random workflow
    "moa": moa,  # Mixture of Agents: all propose, a random one aggregates
    "smoothie": smoothie,  # all answer, and the response most like the others is taken
}
LEARNED = {  # how it is trained on train problems, and what it does then
    "router": (train_router, router),  # a classifier of questions asks one worker
    "masrouter": (train_masrouter, masrouter),  # picks a mode of collaboration, its size and its workers
    "trinity": (train_trinity, trinity),  # picks, turn by turn, a worker and its role
}
SYSTEMS = [*CONDUCTORS, *SEATS, *BY_POOL, "best-single", *LEARNED]  # best-single: of workers, in hindsight
cached_conductor = functools.lru_cache(2)(load_conductor)


def learned_system(s, data: str, name: str, pool: list):
    """A system with weights that are trained on the lessons, or were in an earlier run with this --out."""
    train, system = LEARNED[name]
    lessons = load(s.lessons or data, "train", LESSONS)
    file = f"{s.out}.{name}-{os.path.basename(s.lessons or data)}.npz"
    asked = zlib.crc32(json.dumps([asdict(p) for p in lessons]).encode())
    known_by = [f"--seed={s.seed}", f"--trinity={s.trinity}", f"lessons {asked}"]
    known_by += [f"{w.name} ({w.model} {w.params})" for w in pool]
    if s.out and os.path.exists(file):
        with np.load(file) as found:
            weights = found["weights"]
            was = list(found["known_by"])
        if was != known_by:
            raise ValueError(f"{file} is of other settings ({', '.join(was)}): remove it, or change --out")
    else:
        before = sum(worker.calls for worker in pool)
        weights = train(pool, lessons, s)
        print(f"{name}: trained with {counted(sum(worker.calls for worker in pool) - before, 'call')}")
        if s.out and not (pool[0].budget and pool[0].budget.refused):
            np.savez(file + ".tmp.npz", weights=weights, known_by=known_by)
            os.replace(file + ".tmp.npz", file)
    return functools.partial(system, weights, s)


def play(s, data: str, problems: list[Problem], pools: list[list], name: str, who: str) -> dict[str, list]:
    """Traces [repeat][problem] of a system, under the name that tables show; of one that takes further
    rounds (§3.2), under a name for each number of these. who: a Conductor's checkpoint, or the worker who
    plays."""
    pool = pools[0]
    k = next((i for i, worker in enumerate(pool) if worker.name == who), 0)
    system = (BY_WORKER | BY_POOL).get(name)
    if name in LEARNED:
        system = learned_system(s, data, name, pool)
    label = {"workers": who, "random": "random workflows"}.get(name, f"{name} {who}".strip())
    tags = [f"{name}:{who}/{repeat}" for repeat in range(s.repeats)]
    if system:
        return {label: [run_system(system, problems, pool, k, tag) for tag in tags]}
    repeats = [play_conductor(s, problems, pools, name, who, k, tag) for tag in tags]
    runs = {}
    for r in range(s.rounds + 1):  # where fewer rounds were written, the last counts
        latest = [[trace and trace.rounds()[:r + 1][-1] for trace in traces] for traces in repeats]
        runs[f"{label}, {r} more" if r else label] = latest
    return runs


def play_conductor(s, problems, pools, name: str, who: str, k: int, tag: str) -> list[Trace | None]:
    """The traces of a system in which a Conductor, or worker k in its seat, writes workflows."""
    examples = {"examples": s.examples} if s.examples else {}
    if name == "seat":  # where the format is wrong, the paper tries again without end
        conductor = worker_conductor(pools[0][k], f"{tag}/seat")
        return run_conductor(conductor, problems, pools, tag, s.rounds, Prompting(**examples), tries=10)
    model, tokenizer, prompting = cached_conductor(who if who and name in CONDUCTORS else s.checkpoint)
    warn_of_others(prompting, pools[0])
    prompting = replace(prompting, **examples, **CONDUCTORS.get(name, {}))
    if name == "shuffled":
        pools = [team[1:] + team[:1] for team in pools]

    def by_worker_k(workflow):
        return Workflow([replace(step, worker=k) for step in workflow.steps], workflow.written)

    conductor = model_conductor(model, tokenizer, prompting, 0.0)
    edit = by_worker_k if name == "one-worker" else None
    return run_conductor(conductor, problems, pools, tag, s.rounds, prompting, edit=edit)


# -----------------------------------------------------------------------------------------------------------
# Benchmarks: rows of public data sets on the Hugging Face hub, of which only those that are needed are
# fetched. The counts of App. A.2 stand in brackets. Where the paper does not say, the choice is ours.


@dataclass
class Source:
    repository: str  # a data set on the hub
    what: str  # config/split, fetched in slices, or a JSONL file of it
    rows: int
    drawn: bool = False  # True: its slices come in a random order, and no more of them than are needed


DATA = "data"  # in the current directory. Not to be passed on: RLPR's licence is CC BY-NC 4.0
MATH = Source("HuggingFaceH4/MATH-500", "default/test", 500)
RLPR = Source("openbmb/RLPR-Train-Dataset", "default/train", 77687, drawn=True)
SOURCES = {
    ("math500", "train"): MATH,  # 300 [300], by a hash of the question
    ("math500", "test"): MATH,  # 100 others [100]
    ("mmlu", "train"): Source("cais/mmlu", "all/auxiliary_train", 99842, drawn=True),  # other exams [99,842]
    ("mmlu", "test"): Source("cais/mmlu", "all/test", 14042),  # [14,042]
    ("rlpr", "train"): RLPR,  # three fifths, by such a hash [46,620 of 77,700]
    ("rlpr", "test"): RLPR,  # one fifth [15,540]
    # V1, up to March 2024 [V1], and what V6 added, of 2025 [V6]
    ("livecodebench", "train"): Source("livecodebench/code_generation_lite", "test.jsonl", 400),
    ("livecodebench", "test"): Source("livecodebench/code_generation_lite", "test6.jsonl", 175),
    ("aime25", "test"): Source("yentinglin/aime_2025", "default/train", 30),  # as in Lighteval [30]
    ("bigcodebench", "test"): Source("bigcode/bigcodebench-hard", "default/v0.1.4", 148),  # [148]
    ("gpqa", "test"): Source("Idavidrein/gpqa", "gpqa_diamond/train", 198),  # as in Lighteval; gated [198]
}
# The hardest of the candidates where levels are known, else the first [960, by "difficulty and diversity"];
# "recursion" is drawn from "paper" by chance [the same].
MIXES = {
    "paper": {"math500": 240, "mmlu": 240, "rlpr": 240, "livecodebench": 240},
    "recursion": {"livecodebench": 175, "rlpr": 175},
}
CANDIDATES = 600  # problems of each benchmark, at most, among which `prepare` chooses
GRADER_OF = {"math500": "math", "aime25": "math", "rlpr": "short", "mmlu": "letter", "gpqa": "letter",
             "livecodebench": "code", "bigcodebench": "unittest"}
BLOCK = "Put all of it, imports included, in one ```python block."
ASK = {  # the graders, and what a question asks for; in a file's questions it has to stand already
    "exact": "",
    "math": "Put the final answer in \\boxed{}.",
    "letter": "Put the letter of the right option in <answer> tags.",
    "short": "Put the final answer, as short as possible, in <answer> tags.",
    "code": f"Write a Python program that reads from standard input and writes to standard output. {BLOCK}",
    "unittest": f"Complete the code above. {BLOCK}",
}
EXTRA = {  # what a grader needs in Problem.extra
    "letter": ["choices"],
    "code": ["function", "tests"],
    "unittest": ["test", "entry_point", "code_prompt"],
}
TESTS_MAX = 1 << 29  # bytes of one problem's hidden tests, unpacked


def benchmark(name: str, split: str, limit: int | None = None) -> list[Problem]:
    """The first `limit` problems of a benchmark in a fixed random order; rows not here are fetched."""
    source = SOURCES[name, split]
    page = f"https://huggingface.co/datasets/{source.repository}"
    place = os.path.join(DATA, source.repository, source.what)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    rows = rows_of_file if place.endswith(".jsonl") else rows_in_slices
    problems = []
    try:
        for n, at, row in rows(source, place):
            problem = problem_from(name, n, row, {"file": place, "at": at})
            fifth = hashed(problem) % 5
            # RLPR has one split for all: a fifth is for testing, three for training, one for nobody.
            if name != "rlpr" or (fifth == 0 if split == "test" else fifth > 1):
                problems.append(problem)
            if source.drawn and len(problems) == limit:
                break
    except OSError as e:
        by_hand = f", or put {page}/resolve/main/{source.what} there" if rows is rows_of_file else ""
        raise OSError(f"{place} lacks rows of {page} ({source.rows:,}): {e}\n"
                      f"Try again to go on where it stopped{by_hand}. If the page asks to accept terms, do "
                      "that and set HF_TOKEN.") from e
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as e:
        raise ValueError(f"{place} has not the {source.rows:,} rows that {page} had ({type(e).__name__}: "
                         f"{e}): remove it, try again") from e
    if name == "math500":
        problems.sort(key=hashed)
        problems = problems[:300] if split == "train" else problems[-100:]
    if not source.drawn:
        random.Random(0).shuffle(problems)
    return problems[:limit]


def hashed(problem: Problem) -> int:
    """A number that is equal for equal questions, whatever the order of the rows."""
    return zlib.crc32(problem.question.encode())


def has_split(name: str, split: str) -> bool:
    """Whether `load` knows these problems; they need not have been fetched."""
    anywhere = name in LAPTOP or name in MIXES or name.endswith(".jsonl")
    return split in ("train", "test") and (anywhere or (name, split) in SOURCES)


def problem_from(name: str, n: int, row: dict, place: dict) -> Problem:
    """The n-th row, which stands at `place`, as a problem. Columns are as the data sets' cards tell, for RLPR
    as the card of CohleM/rlpr_exp, which keeps them."""
    problem = Problem(f"{name}/{n}", "", "", name, GRADER_OF[name])
    ask = ASK[problem.grader]
    code = ""
    if problem.grader == "math":
        problem.question = row["problem"]
        problem.answer = str(row["answer"])
        problem.level = row.get("level", 0)
    elif name == "rlpr":
        problem.question = row["prompt"][1]["content"]
        problem.answer = row["reward_model"]["ground_truth"]
        problem.level = row["extra_info"]["reasoning_score"] or 0
    elif name == "mmlu":
        problem.question = row["question"]
        problem.answer = "ABCD"[row["answer"]]
        problem.extra = {"choices": row["choices"]}
    elif name == "gpqa":  # its right answer is the first of four, which are shuffled by a fixed seed
        options = [row["Correct Answer"], *(row[f"Incorrect Answer {i}"] for i in (1, 2, 3))]
        order = random.Random(n).sample(range(4), 4)
        problem.question = row["Question"]
        problem.answer = "ABCD"[order.index(0)]
        problem.extra = {"choices": [options[i].strip() for i in order]}
    elif name == "bigcodebench":
        problem.id = f"{name}/{row['task_id']}"
        problem.extra = {column: row[column] for column in EXTRA["unittest"]}
        code = row["complete_prompt"].strip()
    elif name == "livecodebench":
        problem.id = f"{name}/{row['question_id']}"
        problem.question = row["question_content"]
        problem.level = ["easy", "medium", "hard"].index(row["difficulty"]) + 1
        problem.extra = {"function": json.loads(row["metadata"]).get("func_name"), "tests": place}
        code = row["starter_code"].strip()
    else:
        raise NotImplementedError(f"problem_from has no case for {name}")
    if code:
        code = f"```python\n{code}\n```"
        ask = ASK["unittest"]
    choices = zip("ABCD", problem.extra.get("choices", []))
    options = "\n".join(f"{letter}. {choice}" for letter, choice in choices)
    problem.question = "\n\n".join(filter(None, [problem.question.strip(), options, code, ask]))
    return problem


def session() -> requests.Session:
    """It bears $HF_TOKEN, which requests drops where a redirect leaves the host. A rate limit of the hub is
    over in five minutes (huggingface.co/docs/hub/rate-limits), and so long it tries again."""
    hub = requests.Session()
    token = os.environ.get("HF_TOKEN", "").strip()
    if not re.fullmatch("[!-~]*", token):  # what a header can hold; requests would print it
        raise OSError("HF_TOKEN is no token: it has blanks or characters beyond ASCII")
    if token:
        hub.headers["Authorization"] = f"Bearer {token}"
    hub.headers["Accept-Encoding"] = "identity"  # a part of a compressed body is of no use
    patience = Retry(8, connect=2, backoff_factor=2, status_forcelist=(429, 500, 502, 503, 504))
    hub.mount("https://", HTTPAdapter(max_retries=patience))
    hub.mount("http://", HTTPAdapter(max_retries=patience))
    return hub


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def rows_in_slices(source: Source, folder: str):
    """Yield (number, None, row) of a data set's rows. Each slice is a file, which is fetched when its turn
    comes."""
    size = 50 if source.drawn else 100  # 100 is the most there is
    starts = list(range(0, source.rows, size))
    if source.drawn:
        random.Random(0).shuffle(starts)
    os.makedirs(folder, exist_ok=True)
    with session() as hub, tqdm(desc=folder, unit=" slices", disable=None) as bar:
        for start in starts:
            file = os.path.join(folder, f"{start}.json")
            if not os.path.exists(file):
                write_json(file, {"rows": fetch_slice(hub, source, start, min(size, source.rows - start))})
                bar.update()
            for n, row in enumerate(read_json(file)["rows"], start):
                yield n, None, row


def fetch_slice(hub: requests.Session, source: Source, start: int, n: int) -> list[dict]:
    """GET /rows?dataset=&config=&split=&offset=&length= (huggingface.co/docs/dataset-viewer/rows) gives
    {"rows": [{"row_idx", "row", "truncated_cells"}], "num_rows_total", …}, or {"error"} with a status."""
    config, split = source.what.split("/")
    viewer = endpoint().replace("https://", "https://datasets-server.")
    asked = {"dataset": source.repository, "config": config, "split": split, "offset": start, "length": n}
    answer = hub.get(f"{viewer}/rows", params=asked, timeout=60)
    if not answer.ok:
        raise OSError(f"{answer.url}: HTTP {answer.status_code} {answer.text[:300]}")
    try:
        page = answer.json()
        numbers = [row["row_idx"] for row in page["rows"]]
        cut_off = any(row["truncated_cells"] for row in page["rows"])
        if page["num_rows_total"] != source.rows or numbers != [*range(start, start + n)] or cut_off:
            raise ValueError(f"other rows than asked for, or not of {source.rows:,}")
        return [row["row"] for row in page["rows"]]
    except (KeyError, TypeError, ValueError) as e:
        raise OSError(f"{answer.url}: {type(e).__name__}: {e}") from e


def rows_of_file(source: Source, file: str):
    """Yield (number, place in the file, row) of a data set that is one JSONL file, which is fetched first:
    FILE.part grows over runs, until there is nothing left to ask for, which is status 416. (huggingface_hub
    from 1.18 on begins at 0 again when it was interrupted: its issue 4196.)"""
    if not os.path.exists(file):
        url = f"{endpoint()}/datasets/{source.repository}/resolve/main/{source.what}"
        bar = tqdm(desc=file, unit="B", unit_scale=True)
        with open(file + ".part", "ab") as f, session() as hub, bar:
            while True:
                asked = {"Range": f"bytes={f.tell()}-"}
                with hub.get(url, headers=asked, stream=True, timeout=60) as answer:
                    if answer.status_code == 416:
                        break
                    if answer.status_code != 206:
                        raise OSError(f"{url}: HTTP {answer.status_code} {answer.reason}")
                    for chunk in answer.iter_content(1 << 16):
                        bar.update(f.write(chunk))
        os.replace(file + ".part", file)
    n, at = -1, 0
    with open(file, "rb") as f:
        for n, line in enumerate(f):
            yield n, at, json.loads(line)
            at += len(line)
    if n + 1 != source.rows:
        raise ValueError(f"{n + 1:,} rows")


def tests_of(problem: Problem) -> list[list[str]]:
    """A program's hidden tests. The problem may have only the place in a file where they stand."""
    tests = problem.extra["tests"]
    return stored_tests(problem.id, **tests) if isinstance(tests, dict) else tests


@functools.lru_cache(2)
def stored_tests(id: str, file: str, at: int) -> list[list[str]]:
    """[input, output] of each test of a LiveCodeBench problem, read from its row when they are needed: those
    of one problem can take hundreds of MB. A function's input is its arguments, each a line of JSON. The
    hidden ones are JSON in a pickle in zlib in base64 (lcb_runner/benchmarks/code_generation.py of
    LiveCodeBench). The pickle is never run: the JSON is cut out of it."""
    try:
        with open(file, "rb") as f:
            f.seek(at)
            row = json.loads(f.readline())
        if id != f"livecodebench/{row['question_id']}":
            raise ValueError(f"there stands {row['question_id']}")
        hidden = row["private_test_cases"].encode()
        if not hidden.startswith(b"["):
            unzip = zlib.decompressobj()
            hidden = unzip.decompress(base64.b64decode(hidden, validate=True), TESTS_MAX)
            if not unzip.eof:
                raise ValueError(f"cut off, or more than {TESTS_MAX:,} bytes")
            hidden = hidden[hidden.index(b"[{"):hidden.rindex(b"}]") + 2]
        tests = json.loads(row["public_test_cases"]) + json.loads(hidden)
        return [[test["input"], test["output"]] for test in tests]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, zlib.error) as e:
        raise ValueError(f"{file}, byte {at}: no tests of {id} ({type(e).__name__}: {e}); remove {DATA}/ and "
                         "fetch it again") from e


# -----------------------------------------------------------------------------------------------------------
# Problems by name, in files, and the training mixes


def load(name: str, split: str, limit: int | None = None) -> list[Problem]:
    """At most `limit` problems; split is "train" or "test". The name is in LAPTOP, SOURCES or MIXES, whose
    "train" is the file that `prepare` wrote and "test" all tests of its parts, or a file *.jsonl, which has
    one split. A file keeps its order. All else is in a random but fixed order, with the kinds taking turns.
    OSError tells what was not fetched and how to bring it, ValueError what is wrong where."""
    if not has_split(name, split):
        known = [*LAPTOP, *MIXES, *(f"{n} ({s})" for n, s in SOURCES), "files *.jsonl"]
        raise ValueError(f"no problems {name!r}, split {split!r}: there are {', '.join(known)}")
    if name.endswith(".jsonl"):
        return read_problems(name)[:limit]
    if name in MIXES and split == "train":
        return read_problems(os.path.join(DATA, name + ".jsonl"))[:limit]
    if (name, split) in SOURCES:
        return benchmark(name, split, limit)
    if name in LAPTOP:
        problems = laptop_problems(split, LAPTOP[name])
    else:
        problems = [p for part in MIXES[name] for p in load(part, split, limit)]
    return interleave(problems, random.Random(0), again=name in LAPTOP)[:limit]


def read_problems(file: str) -> list[Problem]:
    """A line is a JSON object with the strings question, answer, kind, and if wanted Problem's other fields;
    a kind named like a grader is graded by it. Code needs tests, and a function's name or null:

        {"question": "…", "answer": "", "kind": "code", "extra": {"function": "f", "tests": [["1\\n2", "3"]]}}
    """
    if not os.path.exists(file):
        made = 'write it: a line is {"question": "…", "answer": "…", "kind": "math"}'
        if os.path.abspath(file) in [os.path.abspath(f"{DATA}/{name}.jsonl") for name in MIXES]:
            made = "python eval.py prepare writes it"
        raise FileNotFoundError(f"{file} is missing; {made}")
    problems = []
    with open(file, "rb") as f:
        for n, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                problems.append(checked({"id": f"{os.path.basename(file)}/{n}", **json.loads(line)}))
            except (ValueError, TypeError, RecursionError) as e:
                raise ValueError(f"{file}, line {n}: {e}") from None
    if not problems:
        raise ValueError(f"{file} is empty")
    return problems


def checked(row: dict) -> Problem:
    """The problem that a line describes. ValueError or TypeError says what is wrong with it."""
    def must(holds, told):
        if not holds:
            raise ValueError(told)

    wrong = [key for key in ("id", "question", "answer", "kind") if not isinstance(row.get(key), str)]
    must(not wrong, f"{', '.join(wrong)} missing or not a string")
    must(row["kind"] not in ("all", "calls"), f"the kind {row['kind']!r} is a column in tables: rename it")
    near = difflib.get_close_matches(row["kind"], ASK, n=1, cutoff=0.75)
    known = row["kind"] in ASK or "grader" in row
    must(known or not near, f'kind {row["kind"]!r}: did you mean {near}? Else say "grader": "exact"')
    (row["question"] + row["answer"]).encode()  # JSON can spell half an emoji, which nobody could read.
    problem = Problem(**{"grader": row["kind"] if row["kind"] in ASK else "exact", **row})
    grader = problem.grader
    extra = problem.extra
    must(grader in [*ASK], f"no grader {grader!r}, there are {', '.join(ASK)}")
    must(isinstance(extra, dict), "extra is not an object")
    must(grader == "letter" or "choices" not in extra, 'choices need "grader": "letter"')
    problem.answer = problem.answer.strip()
    must(is_bare(problem), f"no response could be {problem.answer!r}: give the bare answer")
    lacks = [key for key in EXTRA.get(grader, []) if key not in extra]
    needed = ", ".join(f'"{key}": …' for key in lacks)
    must(not lacks, f'the grader {grader} needs "extra": {{{needed}}}')
    if grader == "letter":
        choices = extra["choices"]
        must(texts(choices) and 2 <= len(choices) <= len(LETTERS), f"choices are 2 to {len(LETTERS)} texts")
        letters = [*LETTERS[:len(choices)]]
        must(problem.answer in letters, f"the answer {problem.answer!r} is none of {', '.join(letters)}")
    tests = extra.get("tests")
    must(grader == "code" or "tests" not in extra, 'tests need "grader": "code"')
    if grader == "code" and not isinstance(tests, dict):
        must_be_tests(tests, extra["function"], must)
    if isinstance(tests, dict):  # the place of tests that were fetched, which no file of others may choose
        place = os.path.realpath(str(tests.get("file")))
        ours = place.startswith(os.path.realpath(DATA) + os.sep) and type(tests.get("at")) is int
        must({*tests} == {"file", "at"} and ours, f"tests stand in a file of {DATA}/")
    return problem


def must_be_tests(tests, function, must):
    """What no program could pass, or every one, is refused. A function's input is a line of JSON for each of
    its arguments, its output JSON."""
    pairs = isinstance(tests, list) and all(texts(test) and len(test) == 2 for test in tests)
    must(tests and pairs, "tests are a list of pairs of texts, [input, output]")
    if function is None:
        must(any(expected.strip() for _, expected in tests), "the tests expect no output: any program passes")
        return
    must(isinstance(function, str) and function.isidentifier(), "function is a name, or null for a program")
    for test in tests:
        test[0] = test[0].rstrip("\n")
        for text in [*test[0].split("\n"), test[1]]:
            try:
                json.loads(text, parse_int=str)  # There may be thousands of digits.
            except ValueError:
                must(False, f"a function's arguments, a line each, and its result are JSON, not {text!r:.60}")


def is_bare(problem: Problem) -> bool:
    """Whether a response could match the answer, where the grader is one that compares texts."""
    compares = problem.grader in ("exact", "math", "short")
    return not compares or problem.answer.strip() != "" and "\\boxed" not in problem.answer


def texts(value) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def write_problems(file: str, problems: list[Problem]):
    """Write what read_problems reads, whole or not at all."""
    os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
    with open(file + ".tmp", "w") as f:
        f.writelines(json.dumps(asdict(problem)) + "\n" for problem in problems)
    os.replace(file + ".tmp", file)


def prepare(pool: list):
    """Write the files of MIXES. With a pool, what gives no gradient is left out. No split has what another
    has."""
    candidates = {name: [*filter(is_bare, load(name, "train", CANDIDATES))] for name in MIXES["paper"]}
    mix = []
    for name, n in MIXES["paper"].items():
        found = with_spread(name, candidates[name], pool) if pool else candidates[name]
        found = sorted(found, key=lambda problem: -problem.level)  # equals keep their order
        print(f"{name}: {counted(min(n, len(found)), 'problem')} taken of {len(found)}, {n} wanted")
        mix += found[:n]
    if not mix:
        raise ValueError("no candidate is left: was every worker lost?")
    rng = random.Random(0)
    second = []
    for name, n in MIXES["recursion"].items():
        ours = [problem for problem in mix if problem.kind == name]
        second += rng.sample(ours, min(n, len(ours)))
    for name, problems in (("paper", mix), ("recursion", second)):
        file = os.path.join(DATA, name + ".jsonl")
        write_problems(file, interleave(problems, rng))
        print(f"{file}: {counted(len(problems), 'problem')}")


def with_spread(name: str, candidates: list[Problem], pool: list) -> list[Problem]:
    """The candidates that some of the workers solve alone and others do not: where all agree, no workflow's
    reward differs from another's by whom it asks. What a worker was lost on is left out too. ValueError once
    the budget is spent: nothing is written then, and what was answered is in the replay file."""
    asked = everyone_alone(pool, candidates, "prepare")
    right = [grades(candidates, traces) for traces in asked]  # [worker][problem]
    if pool[0].budget and pool[0].budget.refused:
        raise ValueError("the budget is spent; with a larger --budget prepare goes on where it stopped")
    for worker, answers in zip(pool, right):
        print(f"{name}: {worker.name} solves {answers.count(True)} of {len(candidates)} candidates")
    kept = []
    left_out = Counter()
    for problem, answers in zip(candidates, zip(*right)):
        if None in answers:
            left_out["a worker was lost"] += 1
        elif all(answers):
            left_out["all solve it"] += 1
        elif not any(answers):
            left_out["none solves it"] += 1
        else:
            kept.append(problem)
    why = ", ".join(f"{n} as {reason}" for reason, n in left_out.items())
    calls = counted(sum(worker.calls for worker in pool), "call")
    spent = sum(worker.spent for worker in pool)
    unpriced = sum(worker.unpriced for worker in pool)
    unknown = f", {unpriced:,} of them at an unknown price" if unpriced else ""
    print(f"{name}: left out {why or 'none'}; so far {calls} for ${spent:.2f}{unknown}")
    return kept


# -----------------------------------------------------------------------------------------------------------
# Tables

MEASURED = {"accuracy": 2, "std. dev.": 2, "std. error": 2, "95 % ±": 2, "calls": 2, "steps": 2, "tokens": 0,
            "cents": 4, "points/cent": 1}  # columns, and how many digits each has behind the point


def grades(problems: list[Problem], traces: list[Trace | None]) -> list[bool | None]:
    """Whether each trace is right; None if a call of it was lost. A trace is graded once, however many tables
    ask."""
    def is_right(p, t):
        if t is None:
            return False
        if t.right is None and not t.error:
            t.right = grade(p, t.answer)
        return t.right

    with ThreadPool(os.cpu_count()) as threads:  # A program can take minutes to grade.
        return threads.starmap(is_right, zip(problems, traces, strict=True), chunksize=1)


def accuracies(problems: list[Problem], traces: list[Trace | None]) -> dict[str, float]:
    """Share of right answers, over all and by kind, without the problems of which a call was lost."""
    found = {}
    for p, right in zip(problems, grades(problems, traces)):
        if right is not None:
            found.setdefault("all", []).append(right)
            found.setdefault(p.kind, []).append(right)
    return {key: mean(values) for key, values in found.items()}


def measure(problems: list[Problem], repeats: list[list[Trace | None]]) -> dict:
    """What a system's traces [repeat][problem] come to: accuracy in %, with its spread over repeats; per
    question the mean calls, steps of the last round, tokens and cents (None: unknown); accuracy divided by
    cents ("cost-adjusted performance", Tables 5 and 6). Questions of which a call was lost are in none of
    these, but counted. What it took to write the workflows, for which some are paid, is not in them."""
    shares = [accuracies(problems, traces) for traces in repeats]
    values = [100 * share["all"] for share in shares if share]
    everything = list(itertools.chain(*repeats))
    lost = [t for t in everything if t and t.error]
    ran = [t for t in everything if t and not t.error]
    n = len(everything) - len(lost)
    row = {"accuracy": mean(values), **spread(values)}
    row |= dict.fromkeys(("calls", "steps", "tokens", "cents", "points/cent"))
    if n:
        row["calls"] = sum(t.calls for t in ran) / n
        row["steps"] = sum(len(t.workflow.steps) for t in ran) / n
        row["tokens"] = sum(t.tokens for t in ran) / n
    if n and all(t.cost is not None for t in ran):
        row["cents"] = 100 * sum(t.cost for t in ran) / n
    if row["cents"] and values:
        row["points/cent"] = row["accuracy"] / row["cents"]
    row["lost"] = len(lost)
    kinds = dict.fromkeys(p.kind for p in problems)
    row["by kind"] = {kind: mean([100 * share[kind] for share in shares if kind in share]) for kind in kinds}
    return row


def progress(what: str, total: int) -> tqdm:
    """A bar, on a terminal only (disable=None), and of rank 0 only. what: before a colon, what it is of."""
    hidden = os.environ.get("RANK", "0") != "0" or None
    return tqdm(desc=what.partition(":")[0], total=total, disable=hidden, leave=False)


def spread(values: list[float]) -> dict:
    """Of repeats or seeds: standard deviation, standard error of the mean, and the mean's 95 % interval, as ±
    around it, by Student's t. None where there are fewer than two."""
    if len(values) < 2:
        return {"std. dev.": None, "std. error": None, "95 % ±": None}
    deviation = statistics.stdev(values)
    error = deviation / math.sqrt(len(values))
    return {"std. dev.": deviation, "std. error": error, "95 % ±": students_t(len(values) - 1) * error}


def mean(values: list) -> float | None:
    return statistics.fmean(values) if values else None


def students_t(freedom: int) -> float:
    """95 % of Student's t distribution lie within ± this. Where t = sqrt(freedom) tan(angle), the angle's
    density is cos(angle) ^ (freedom - 1), which is summed here."""
    width = math.pi / 2 / 200_000
    angles = (np.arange(200_000) + 0.5) * width
    mass = np.cumsum(np.cos(angles) ** (freedom - 1))
    angle = np.interp(0.95, mass / mass[-1], angles + width / 2)
    return math.sqrt(freedom) * math.tan(angle)


def columns(rows: dict[str, dict], heads: dict[str, int], title: str = "") -> str:
    """Rows of numbers under their heads, each with so many digits behind the point: "?" for None, and blank
    where a row does not have it."""
    wide = max(30, len(title), *map(len, rows))
    lines = [f"{name:<{wide}}" for name in [title, *rows]]
    for head, digits in heads.items():
        cells = [head]
        for row in rows.values():
            cell = f"{row[head]:.{digits}f}" if row.get(head) is not None else "?"
            cells.append(cell if head in row else "")
        width = 2 + max(map(len, cells))
        lines = [line + f"{cell:>{width}}" for line, cell in zip(lines, cells)]
    return printable("\n".join(line.rstrip() for line in lines))


def table(problems: list[Problem], systems: dict[str, list[Trace | None]]) -> str:
    """A row for each system: the share of right answers over all and by kind, and mean calls."""
    heads = {"all": 3, "calls": 2} | {p.kind: 2 for p in problems}
    rows = {}
    for name, traces in systems.items():
        calls = measure(problems, [traces])["calls"]
        rows[name] = {**dict.fromkeys(heads), **accuracies(problems, traces), "calls": calls}
    return columns(rows, heads, f"accuracy, {counted(len(problems), 'problem')}")


def counted(n: int, thing: str) -> str:
    return f"{n:,} {thing}" if n == 1 else f"{n:,} {thing}s"


def learned(problems: list[Problem], traces: list[Trace | None]) -> str:
    """For each kind the workflow most often written (who, seeing what), its share, and one example."""
    lines = []
    for kind in dict.fromkeys(p.kind for p in problems):
        asked = [t for p, t in zip(problems, traces) if p.kind == kind]
        written = [t for t in asked if t]
        if not written:
            continue
        outlines = [str((t.workers, [step.access for step in t.workflow.steps])) for t in written]
        commonest = statistics.mode(outlines)
        share = outlines.count(commonest) / len(asked)
        t = written[outlines.index(commonest)]
        lines.append(f"{kind}: {counted(len(t.workers), 'step')}, written for {share:.0%}.  {t.question}")
        for step, worker, response in zip(t.workflow.steps, t.workers, t.responses):
            seen = " and ".join(str(i) for i in step.access)
            sees = f", seeing step{'s' if len(step.access) > 1 else ''} {seen}" if seen else ""
            lines.append(f"    {worker}, told {step.subtask!r}{sees}: {response}")
    return printable("\n".join(lines))


def habits(traces: list[Trace | None]) -> dict:
    """Of a Conductor's workflows: the shares of their lengths and shapes in the first round (Fig. 8), and
    each worker's share of the steps by round (Figs. 7 and 10)."""
    rounds = [t.rounds() for t in traces if t]
    firsts = [found[0].workflow for found in rounds]
    numbers = {"lengths": shares_of([counted(len(workflow.steps), "step") for workflow in firsts]),
               "shapes": shares_of([shape(workflow) for workflow in firsts])}
    for r in range(max(map(len, rounds), default=0)):
        played = [found[r] for found in rounds if len(found) > r]
        names = itertools.chain(*(t.workers for t in played))
        numbers[f"workers, round {r + 1}"] = shares_of(names)
        if r == 1:  # how often three empty lists kept an answer
            numbers["kept"] = {}
            for was, told in ((True, "right"), (False, "wrong")):
                empty = [not t.replies for t in played if t.previous.right is was]
                if empty:
                    numbers["kept"][told] = mean(empty)
    return numbers


def shares_of(items) -> dict:
    counts = Counter(items)
    return {item: n / counts.total() for item, n in sorted(counts.items())}


def report(data: str, problems: list[Problem], runs: dict[str, list], beside: dict) -> dict[str, dict]:
    """Print what a benchmark's runs come to, above rows to compare with. Returns name -> numbers."""
    rows = {name: measure(problems, repeats) for name, repeats in runs.items()}
    first_repeat = {name: repeats[0] for name, repeats in runs.items()}
    print(table(problems, first_repeat), end="\n\n")
    text = columns(rows | beside, MEASURED, data)
    legend = "\n?: unknown, or undefined: a spread needs --repeats, points per cent need a cost"
    print(text + (legend if "?" in text else ""), end="\n\n")
    for name, repeats in runs.items():
        lost = [t.error for traces in repeats for t in traces if t and t.error]
        if lost:
            print(f"{name}: {len(lost)} not counted, as their workers were lost: {lost[0]}")
    most_rounds = {re.sub(r", \d+ more$", "", name): traces for name, traces in first_repeat.items()}
    for name, traces in most_rounds.items():
        if name.partition(" ")[0] in (*CONDUCTORS, "seat"):
            found = habits(traces)
            rows[name] |= found
            for key, shares in found.items():
                told = [f"{item} {share:.0%}" for item, share in shares.items()]
                print(f"{name}, {key}: {', '.join(told)}")
    if "conductor" in runs:
        print(learned(problems, first_repeat["conductor"]), end="\n\n")
    return rows


def average_of_four(numbers: dict[str, dict], names) -> dict[str, dict]:
    """Print and return the rows of Table 7: the mean accuracy of each system that has all four benchmarks."""
    four = list(MIXES["paper"])
    numbers = {re.sub("best-single .*", "best-single", key): row for key, row in numbers.items()}
    rows = {}
    for name in dict.fromkeys(re.sub("best-single .*", "best-single", name) for name in names):
        found = [numbers.get(f"{data}, {name}", {}).get("accuracy") for data in four]
        if None not in found:
            rows[name] = {"accuracy": mean(found)}
    if rows:
        print(columns(rows | in_the_paper("average"), {"accuracy": 2}, f"average of {', '.join(four)}"))
    return {f"average, {name}": row for name, row in rows.items()}


# Accuracy in %. Table 1: workers without limits; 2 and 7: workers of 4,096 tokens and least reasoning.
# average: of the first four.
PAPER = """
                               math500  mmlu   rlpr  livecodebench  aime25  bigcodebench  gpqa  average
Table 1: gemma-3-27b-it           39.8   81.3  16.67         13.14    20.7         14.86  38.4        -
Table 1: Qwen3-32B                73.5   83.5  31.00         21.21    20.0         30.41  64.1        -
Table 1: Qwen3-32B thinking       80.7   84.1  37.25         25.86    72.9         28.38  66.8        -
Table 1: R1-Distill-Qwen-32B      82.5   84.4  33.50         26.86    63.0         33.07  58.1        -
Table 1: Claude Sonnet 4          96.0   91.4  36.70         46.54    74.3         37.16  77.7        -
Table 1: Gemini 2.5 Pro           96.0   92.4  40.55         67.24    78.3         37.51  84.8        -
Table 1: GPT-5                    99.0   93.5  42.20         82.90    90.8         32.75  82.3        -
Table 1: Conductor                99.4   94.1  44.75         83.93    93.3         37.86  87.5        -
Table 2: best single worker          -      -      -             -   46.67         35.8  75.25        -
Table 2: Conductor                   -      -      -             -   66.67         37.8  81.31        -
Table 2: Conductor, recursive        -      -      -             -   66.67         40.0  82.32        -
Table 7: RouterDC                    -      -      -             -       -            -      -    52.41
Table 7: Smoothie                    -      -      -             -       -            -      -    56.48
Table 7: MASRouter                   -      -      -             -       -            -      -    56.89
Table 7: MoA                         -      -      -             -       -            -      -    62.13
Table 7: Gemini 2.5 Pro              -      -      -             -       -            -      -    64.14
Table 7: GPT-5, 5 reflections        -      -      -             -       -            -      -    64.52
Table 7: Conductor               89.33  93.14  42.63         64.29       -            -      -    72.35
"""


def in_the_paper(benchmark: str) -> dict[str, dict]:
    """The paper's rows about a benchmark, for `columns`."""
    head, *lines = PAPER.strip("\n").splitlines()
    names = head.split()
    rows = {}
    for line in lines:
        cells = dict(zip(names, line[30:].split()))
        if cells.get(benchmark, "-") != "-":
            rows[line[:30].strip()] = {"accuracy": float(cells[benchmark])}
    return rows


def average(files: list[str]) -> str:
    """A table of all numbers that several evaluations wrote with --out: mean, 95 % interval, file by file."""
    if len(files) < 2:
        raise ValueError("an average takes two files or more: python eval.py average FILE FILE …")
    runs = [dict(flat(read_json(file))) for file in files]
    rows = {}
    for key in runs[0]:
        if all(key in run for run in runs):
            values = [run[key] for run in runs]
            rows[key] = {"mean": mean(values), "95 % ±": spread(values)["95 % ±"], **dict(zip(files, values))}
    if not rows:
        raise ValueError(f"no number is in all of {', '.join(files)}: were these other systems or problems?")
    return columns(rows, dict.fromkeys(["mean", "95 % ±", *files], 3), f"{len(files)} files, by Student's t")


def flat(numbers: dict, before: str = ""):
    """Yield (path, number) of every number in a dict of dicts; what is unknown is none."""
    for key, value in numbers.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{key}: ")
        elif isinstance(value, (int, float)):
            yield before + key, value


# -----------------------------------------------------------------------------------------------------------
# The command line

LESSONS = 256  # train problems that a learned system learns from


@dataclass
class Settings:
    checkpoint: str = "out/laptop/checkpoint"
    benchmarks: str = "laptop"  # or files, with commas between
    test: int = 225  # problems of each, or all that there are
    systems: str = "conductor,workers,random"  # of SYSTEMS; NAME:WORKER or conductor:DIR for one only
    repeats: int = 1
    pool: str = ""  # "": that of the Conductor's training, or local; and `prepare` asks nobody
    only: str = ""  # some of its workers, by name, with commas between
    subset: int = 0  # each problem has its own workers, so many who can solve it (laptop world)
    examples: str = ""  # few-shot examples: ood, in, mixed (Table 4); "": as the Conductor was trained
    lessons: str = ""  # whose train problems a learned system learns from; "": those of the benchmark itself
    rounds: int = 0  # of recursion, after the first workflow
    trinity: str = "out/laptop/reference"  # a model's folder, whose hidden states the system trinity reads
    seed: int = 1  # of what masrouter and trinity draw
    budget: float = 0.0  # dollars that the workers may cost; 0: no limit
    replay: str = ""  # a file that keeps the replies, so that nobody pays twice for what is started again
    out: str = ""  # a file for the numbers, as JSON


def check(s: Settings, names: list[str]) -> list[tuple[str, str]]:
    """What would fail late fails here, before any worker is asked. names: the workers'. Returns the systems
    that are wanted, as (name, who)."""
    if min(s.test, s.repeats) < 1 or min(s.rounds, s.subset, s.budget) < 0:
        raise ValueError("--test and --repeats are from 1 on, --rounds, --subset and --budget from 0 on")
    os.makedirs(os.path.dirname(s.out) or ".", exist_ok=True)
    if os.path.exists(s.out) and not os.path.isfile(s.out):  # To replace /dev/null would break the system.
        raise ValueError(f"--out={s.out}: a folder or a device, where a file's name is wanted")
    try:
        if os.path.exists(s.out) and os.path.getsize(s.out):
            read_json(s.out)
    except ValueError as e:
        raise ValueError(f"--out={s.out} would be replaced, and {e}: name another file") from None
    if s.examples not in ("", "ood", "in", "mixed"):
        raise ValueError(f"--examples={s.examples}: there are ood, in, mixed")
    if s.subset and (s.benchmarks not in LAPTOP or s.pool not in LOCAL):
        raise ValueError("--subset is for --benchmarks=laptop and local pools, whose skills are known")
    if s.subset > len(names):
        raise ValueError(f"--subset={s.subset}: the pool has {len(names)} workers")
    taken = {*names} & {*SYSTEMS, "random workflows"}
    if taken:
        raise ValueError(f"a worker of the pool has a system's name, {taken.pop()}: rename it")
    s.benchmarks = ",".join(data.strip() for data in s.benchmarks.split(","))
    for data in s.benchmarks.split(","):
        if not has_split(data, "test"):
            load(data, "test")  # which says what there is
    wanted = []
    for word in s.systems.split(","):
        name, _, who = word.strip().partition(":")
        if name not in SYSTEMS:
            near = difflib.get_close_matches(name, SYSTEMS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"--systems={word}: {hint}there are {', '.join(SYSTEMS)}")
        if who and name not in CONDUCTORS and not (name in SEATS and who in names):
            raise ValueError(f"--systems={word}: the pool has {', '.join(names)}")
        if s.subset and name not in CONDUCTORS:
            raise ValueError(f"--subset is for the Conductor (--systems=conductor), not for {name}")
        for data in (s.lessons or s.benchmarks).split(","):
            is_test = data.endswith(".jsonl") and not s.lessons
            if name in LEARNED and (is_test or not has_split(data, "train")):
                raise ValueError(f"{name} learns from train problems, and {data} has none: name others, say "
                                 "--lessons=mmlu or --lessons=FILE.jsonl")
        if name == "best-single":
            wanted += [("workers", worker) for worker in names]
        players = names if name in SEATS and not who else [who]
        wanted += [(name, player) for player in players]
    folders = [who or s.checkpoint for name, who in wanted if name in CONDUCTORS]
    folders += [s.checkpoint for name, _ in wanted if name == "one-worker"]
    folders += [s.trinity for name, _ in wanted if name == "trinity"]
    for folder in folders:
        checkpoint_file(folder, "config.json")
    return list(dict.fromkeys(wanted))


def load_tests(s: Settings, wanted: list[tuple[str, str]]) -> dict[str, list[Problem]]:
    """Each benchmark's problems. The lessons are fetched here too, before any worker is asked."""
    tests = {}
    for data in s.benchmarks.split(","):
        tests[data] = load(data, "test", s.test)
        if any(name in LEARNED for name, _ in wanted):
            load(s.lessons or data, "train", LESSONS)
        if len(tests[data]) < s.test:
            print(f"{data}: {counted(len(tests[data]), 'problem')} are all there are (--test={s.test})")
    if any(p.grader in ("code", "unittest") for p in itertools.chain(*tests.values())):
        for lack in sandbox_lacks():
            print(f"the sandbox holds only in part here: {lack}")
    return tests


def evaluate(s, pool: list):
    """Measure every wanted system on every benchmark, and print the tables. s: Settings, at the end."""
    wanted = check(s, [worker.name for worker in pool])
    tests = load_tests(s, wanted)
    lacks = [] if s.replay and pool[0].replay.lines else silent(pool)  # A replay may need nobody.
    if lacks:
        raise ValueError(f"--pool={s.pool} lacks {', '.join(lacks)}")
    numbers = {}
    for data, problems in tests.items():
        rng = random.Random(0)
        pools = [draw_pool(p, pool, s.subset, rng) if s.subset else pool for p in problems]
        runs = {}  # traces [repeat][problem] under the names that tables show
        for name, who in wanted:
            if name == "best-single":
                runs |= best_single(problems, runs, pool)
            else:
                began = time.monotonic()
                runs |= play(s, data, problems, pools, name, who)
                took = time.monotonic() - began
                print(f"{data}, {' '.join(filter(None, (name, who)))}: {took:.0f} s", file=sys.stderr)
            if s.out:  # what is known so far
                so_far = {f"{data}, {label}": measure(problems, repeats) for label, repeats in runs.items()}
                write_json(s.out, numbers | so_far)
        beside = in_the_paper(data)
        if data in LAPTOP and s.pool in LOCAL:
            best = statistics.fmean(map(best_chance, problems, pools))
            beside = {"best workflows": {"accuracy": 100 * best}}
        rows = report(data, problems, runs, beside)
        numbers |= {f"{data}, {name}": row for name, row in {**rows, **beside}.items()}
    numbers |= average_of_four(numbers, rows)
    if s.out:
        write_json(s.out, numbers)
    lost = [name for name, row in numbers.items() if row["accuracy"] is None]
    if lost and not (pool[0].budget and pool[0].budget.refused):
        raise ValueError(f"calls were lost for every problem of {', '.join(lost)}")


def main(argv):
    s = Settings()
    words = configure(s, argv)
    pool = []
    try:
        if words[:1] == ["average"]:
            return print(average(words[1:]))
        if words not in ([], ["prepare"]):
            raise SystemExit(f"there is no command {' '.join(words)!r}\n\n{__doc__}")
        preparing = words == ["prepare"]
        s.pool = s.pool or ("" if preparing else pool_of(s.checkpoint))
        if preparing and s.pool:
            os.makedirs(DATA, exist_ok=True)
            s.replay = s.replay or os.path.join(DATA, "replies")
        if s.pool:
            pool = subset(load_pool(s.pool, replay=s.replay, budget=s.budget), s.only)
        lacks = unset_in(pool)
        if lacks:
            raise ValueError(f"--pool={s.pool}: set in the environment {'; '.join(lacks)}")
        if preparing:
            prepare(pool)
        else:
            evaluate(s, pool)
        if pool and pool[0].budget and pool[0].budget.refused:
            raise SystemExit(f"the budget of ${s.budget:g} is spent, and what came after is not counted: "
                             "give a larger --budget, and --replay=FILE so that nothing is paid twice")
    except (OSError, ValueError, WorkerError) as e:
        raise SystemExit(f"{type(e).__name__}: {e}") from None
    except KeyboardInterrupt:
        kept = ""
        if any(worker.calls for worker in pool):
            kept = "; --replay=FILE would have kept the replies"
        if s.replay:
            kept = f"; the same command goes on with the replies in {s.replay}"
        raise SystemExit("interrupted" + kept) from None


if __name__ == "__main__":
    main(sys.argv[1:])
