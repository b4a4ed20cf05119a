"""Workers: LLMs behind raw HTTP, pools of them, and the local specialists.

    python workers.py [--pool=NAME]               # ask every worker for a word: status 1 if one fails
    python workers.py print --pool=NAME > my.json # the pool as a file, to edit: prices, models, limits
    python workers.py serve [--port=8765]         # the local specialists, for any OpenAI client

NAME is a JSON file, local, local:pairs, local:tired, paper, today or openrouter; the last three also with
:unconstrained added. `load_pool` makes the workers of a pool. `Worker.chat` turns messages into a Reply or
raises WorkerError: a Reply never holds an error's text. Read workflow.py next."""
import contextlib
import email.utils
import functools
import hashlib
import http.cookiejar
import io
import json
import math
import operator
import os
import random
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
import traceback
import urllib.parse
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.pool import ThreadPool
from typing import NamedTuple

import requests
from requests.adapters import HTTPAdapter
from requests.packages import urllib3  # which requests is made of
from tqdm import tqdm


class WorkerError(Exception):
    """A call failed, or was not made. That does not count as a wrong answer. The text holds no key.
    bad_request: the request is at fault."""

    def __init__(self, text: str, bad_request: bool = False):
        super().__init__(text)
        self.bad_request = bad_request


@dataclass
class Reply:
    text: str  # the model's own words; they may be empty or cut off
    prompt_tokens: int  # including cached ones; 0 if unknown
    completion_tokens: int  # including those of the reasoning; 0 if unknown
    cost: float | None  # dollars; None if the price or the usage is unknown
    seconds: float  # with retries, without waiting for a slot, rpm or the budget
    finish: str = "stop"  # why it ended, in the provider's word; "length" if it was cut off


@dataclass
class Worker:
    """One entry of a pool. `chat` may be called from any number of threads."""
    protocol: str  # one of PROTOCOLS
    base_url: str  # $VARIABLES are the environment's
    model: str
    name: str = ""  # the model's unless given
    api_key_env: str | None = None  # the variable that holds the key
    params: dict = field(default_factory=dict)
    price: list | None = None  # dollars per million tokens: input, output
    concurrency: int = 16  # calls at a time
    rpm: int | float | None = None  # requests per minute
    timeout: int | float = 600  # seconds for an attempt
    deadline: int | float | None = None  # seconds for all attempts and their waits; None: three timeouts
    attempts: int | None = None  # at most; None: see `chat`
    replay: object = field(default=None, repr=False)  # a Replay
    budget: object = field(default=None, repr=False)  # a Budget
    letter = ""  # A, B, … by load_pool; without annotation, so no field of a pool's file

    def __post_init__(self):
        make_ready(self)  # checks the fields; adds connections, slots and counters

    def chat(self, messages: list[dict], call_id: str = "", on_text=None, **overrides) -> Reply:
        """Ask the model. messages: [{"role": "system", "user" or "assistant", "content": str}, ...].

        overrides win over params; both have OpenAI's names, or the provider's own. on_text(piece) is called
        with the text as it comes if the protocol is OpenAI's, else once with all of it. call_id names this
        call within a run, such as seed/question/rollout/round/step: a rerun finds its reply in `replay`.

        A busy provider (HTTP 429, 503, 529) is asked again until the deadline, or `attempts`. Of other 5xx
        and lost connections the sixth ends the call; a timeout or a spent account ends it at once. What ends
        it is raised. `call` and `refusal`, in the appendix, have all cases."""
        reply = kept_or_new(self, messages, {**self.params, **overrides}, call_id, on_text)
        with self.lock:
            self.calls += 1
            self.spent += reply.cost or 0.0
            self.unpriced += reply.cost is None
        return reply


# ----------------------------------------------------------------------------------------------------------
# Appendix: the local specialists, tables of pools, wire formats, money, transport, servers, command line

def make_ready(worker: Worker):
    """Check a worker's fields, and give it what its calls need."""
    check_worker(worker)
    worker.name = worker.name or worker.model
    worker.deadline = worker.deadline or 3 * worker.timeout
    worker.url = os.path.expandvars(worker.base_url).rstrip("/")
    worker.session = new_session(worker.url, worker.concurrency)
    worker.slots = threading.Semaphore(worker.concurrency)
    worker.lock = threading.Lock()
    worker.next_turn = 0.0  # the time.monotonic() of the next request under rpm
    worker.usual_seconds = 0.0  # of an answer: a moving average
    worker.last_warned = -math.inf  # the time.monotonic() when a failure was last printed
    worker.calls = 0
    worker.spent = 0.0  # dollars
    worker.unpriced = 0  # calls of unknown cost


# The local specialists: honest little programs behind an OpenAI-compatible endpoint. They see what a worker
# sees, never the answer.

SPELLING = {"turned around": "reverse", "shouted": "capitals", "thinned out": "vowels"}  # what questions say

# What each understands in a text, and what it makes of a match of that, under one of the coder's ORDERS. The
# place in a pool is what a Conductor knows: another trade changes the numbers, so it is another world.
TRADES = {
    "calculator": (r"\b(\d{1,6}) ([-+*]) (\d{1,6})\b",
                   lambda m, _: str(ARITHMETIC[m[2]](int(m[1]), int(m[3])))),
    "translator": (r"\w+", lambda m, _: SPANISH.get(m[0], m[0])),
    "librarian": (r"the (atomic number|capital) of \w+|element number \d+",
                  lambda m, _: FACTS.get(m[0], m[0])),
    "coder": (rf"\b(\w+) ({'|'.join(SPELLING)})", lambda m, order: ORDERS[order](m[1])),
}
SKILL = {"": 1.0, "junior": 0.6, "tired": 0.7}  # how likely one of that kind is not to give up
LOST = "I have lost the thread."


def rewrite(text: str, trade: str, order: str) -> str:
    """What the trade does not understand stays, so that another can go on from there."""
    pattern, work = TRADES[trade]
    return re.sub(pattern, lambda match: work(match, order), text)


def answered(text: str) -> str:
    """`What is 7?` is as good as answered: 7."""
    return re.sub(r"^(?:What is|Find|Tell me|Give me) (\S+)[?.]\Z", r"\1", text)


def read_turns(messages: list[dict]) -> tuple[str, str | None, list[str]]:
    """(question, own subtask or None, visible responses) as workflow.py writes them."""
    first = re.fullmatch(r"Question:\n(.*?)(?:\n\nYour task:\n(.*))?", messages[0]["content"], re.DOTALL)
    if not first:
        return messages[0]["content"], None, []
    subtask = first[2] if len(messages) == 1 else messages[-1]["content"].removeprefix("Your task:\n")
    return first[1], subtask, [m["content"] for m in messages if m["role"] == "assistant"]


def luck(what: str, asked: list[dict] | str) -> float:
    """A number in [0, 1) that is a hash of what was asked, another for each `what`: asked the same, a local
    worker says the same."""
    digest = hashlib.sha256(json.dumps([what, asked]).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


def order_in(subtask: str | None, question: str) -> str:
    """What the coder does to a word: what the subtask orders, whatever the question wishes. The question's
    words for it are not the coder's: told none of its ORDERS, it guesses one, for a question always the same.
    """
    for order in ORDERS:
        if order in (subtask or "").lower():
            return order
    return list(ORDERS)[int(len(ORDERS) * luck("order", question))]


def specialist(kind: str, name: str, messages: list[dict]) -> str:
    """Does its trade on the newest text that it sees, the last response or else the question. Only the coder
    minds what the subtask says."""
    if luck(kind, messages) >= SKILL[kind]:  # It has a bad day.
        return LOST
    question, subtask, responses = read_turns(messages)
    text = [question, *responses][-1]
    rewritten = rewrite(text, name, order_in(subtask, question))
    return answered(rewritten) if rewritten != text else f"I am a {name}; I find nothing here to work on."


def generalist(messages: list[dict]) -> str:
    """Tries everything, whatever it is told, on one in eight of the questions; a coder's order it guesses."""
    question, _, _ = read_turns(messages)
    chance = luck("generalist", messages)
    order = order_in(None, question)
    for trade in TRADES:
        rewritten = rewrite(question, trade, order)
        if chance < 1 / 8 and rewritten != question:
            return answered(rewritten)
    return f"I think it is {chance * 100:.0f}."


SPECIALISTS = {f"{kind} {trade}".strip(): functools.partial(specialist, kind, trade)
               for kind in SKILL for trade in TRADES}
SPECIALISTS["generalist"] = generalist
LOCAL = {
    "local": [*TRADES, "generalist"],
    "local:pairs": [f"{kind}{trade}" for trade in TRADES for kind in ("", "junior ")],  # a weaker one too
    "local:tired": [f"{kind} {trade}" for trade in TRADES for kind in ("tired", "junior")],  # on a bad day
}

# What the specialists know

ELEMENTS = (
    "hydrogen helium lithium beryllium boron carbon nitrogen oxygen fluorine neon sodium magnesium aluminium "
    "silicon phosphorus sulfur chlorine argon potassium calcium scandium titanium vanadium chromium "
    "manganese iron cobalt nickel copper zinc").split()
CAPITALS = dict(pair.split("-") for pair in (
    "Austria-Vienna Belgium-Brussels Chile-Santiago Cuba-Havana Denmark-Copenhagen Egypt-Cairo "
    "Finland-Helsinki France-Paris Germany-Berlin Ghana-Accra Greece-Athens Hungary-Budapest "
    "Iceland-Reykjavik Iran-Tehran Iraq-Baghdad Ireland-Dublin Italy-Rome Japan-Tokyo Jordan-Amman "
    "Kenya-Nairobi Lebanon-Beirut Libya-Tripoli Nepal-Kathmandu Norway-Oslo Peru-Lima Poland-Warsaw "
    "Portugal-Lisbon Qatar-Doha Russia-Moscow Senegal-Dakar Spain-Madrid Sweden-Stockholm Syria-Damascus "
    "Thailand-Bangkok Tunisia-Tunis Uruguay-Montevideo").split())
FACTS = {f"the atomic number of {element}": str(i + 1) for i, element in enumerate(ELEMENTS)}
FACTS |= {f"the capital of {country}": city for country, city in CAPITALS.items()}
FACTS |= {f"element number {i + 1}": element for i, element in enumerate(ELEMENTS)}
SPANISH = {word: str(i + 1) for i, word in enumerate((
    "uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince dieciséis "
    "diecisiete dieciocho diecinueve veinte veintiuno veintidós veintitrés veinticuatro veinticinco "
    "veintiséis veintisiete veintiocho veintinueve treinta").split())}
ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul}
ORDERS = {  # Another also needs a word in SPELLING and a phrase in eval.py's PHRASES.
    "reverse": lambda word: word[::-1],
    "capitals": str.upper,
    "vowels": lambda word: re.sub("[aeiouAEIOU]", "", word),
}

# Pools. Parameters are named as in OpenAI's API; what is a provider's own has the provider's name.

SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "logprobs",
            "top_logprobs", "logit_bias")

# What the models of a generation take (the first row whose pattern fits a model's name holds): whether they
# take sampling parameters, which else are not sent; the least reasoning (App. A.1); the most (Table 3, but
# for its medium effort of GPT-5 on BigCodeBench).
# Read on 2026-11-22: developers.openai.com/api/docs (models/gpt-6.2-sol, guides/deployment-checklist),
# platform.claude.com/docs/en/models/sonnet-5-5/whats-new-sonnet-5-5, openrouter.ai/docs/use-cases/
# reasoning-tokens, docs.cloud.google.com/gemini-enterprise-agent-platform/models/thinking.
GENERATIONS = [
    (r"gpt-[6-9]", False, {"reasoning_effort": "low"}, {"reasoning_effort": "high"}),
    (r"o\d|gpt-5(?!-chat)", False, {"reasoning_effort": "minimal"}, {"reasoning_effort": "high"}),
    (r"openai/(o\d|gpt-5(?!-chat)|gpt-[6-9])|anthropic/claude-[a-z]+-([5-9]|4\.[7-9])|google/gemini-[3-9]",
     False, {"reasoning": {"effort": "low"}}, {"reasoning": {"effort": "high"}}),  # at OpenRouter
    (r"claude-sonnet-5-5", False, {"thinking": {"type": "between_tools"}, "output_config": {"effort": "low"}},
     {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}),
    (r"claude-[a-z]+-([5-9]|4-[7-9])\b", False,
     {"output_config": {"effort": "low"}}, {"output_config": {"effort": "high"}}),
    (r"claude-", True, {}, {"thinking": {"type": "enabled", "budget_tokens": 32768}}),
    (r"gemini-[3-9]", False,
     {"thinkingConfig": {"thinkingLevel": "low"}}, {"thinkingConfig": {"thinkingLevel": "high"}}),
    (r"gemini-2", True,
     {"thinkingConfig": {"thinkingBudget": 128}}, {"thinkingConfig": {"thinkingBudget": 32768}}),
    (r"", True, {}, {}),
]


def generation_of(model: str) -> tuple[bool, dict, dict]:
    return next(row[1:] for row in GENERATIONS if re.match(row[0], model))


GOOGLE = ("gemini", "https://generativelanguage.googleapis.com/v1beta", "GEMINI_API_KEY")
ANTHROPIC = ("anthropic", "https://api.anthropic.com/v1", "ANTHROPIC_API_KEY")
OPENAI = ("openai", "https://api.openai.com/v1", "OPENAI_API_KEY")
OPENROUTER = ("openai", "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY")
OWN = ("openai", "$OPEN_BASE_URL", None)  # say, vLLM; its --reasoning-parser keeps thoughts out of answers
COOL = {"temperature": 0.2}  # App. A.1, as is how Qwen is decoded
QWEN = {**COOL, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.0}
DIRECT = {"chat_template_kwargs": {"enable_thinking": False}}  # in vLLM's words
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
OFF = {"reasoning": {"enabled": False}}  # in OpenRouter's
ON = {"reasoning": {"enabled": True}}

# Provider, name, model, dollars per million tokens of prompts up to 200,000, most tokens, parameters.
# paper: §4.1, Table 3. The prices are the last before retirement: by their makers' notices Claude Sonnet 4
# went in June 2026 and Gemini 2.5 in October 2026, and GPT-5 goes in December 2026.
# today: read on 2026-11-22 at developers.openai.com/api/docs/models/gpt-6.2-sol and
# platform.claude.com/docs/en/models; Gemini 4's price, of 12 November, in copies of Google's page; the open
# models' in OpenRouter's catalogue of 2026-07-02 (github.com/anomalyco/models.dev). They move by the week, so
# hosts of up to twice the price are asked; the bill has what OpenRouter says. R1's window is 8,192 tokens.
OPEN_TODAY = [
    (OPENROUTER, "R1-Distill-Llama-70B", "deepseek/deepseek-r1-distill-llama-70b", [0.8, 0.8], 4096, COOL),
    (OPENROUTER, "Gemma 4 31B", "google/gemma-4-31b-it", [0.12, 0.35], 20480, {**COOL, **OFF}),
    (OPENROUTER, "Qwen3.6-27B", "qwen/qwen3.6-27b", [0.285, 2.4], 20480, {**QWEN, **OFF}),
    (OPENROUTER, "Qwen3.6-27B thinking", "qwen/qwen3.6-27b", [0.285, 2.4], 20480, {**QWEN, **ON}),
]
POOLS = {
    "paper": [
        (GOOGLE, "Gemini 2.5 Pro", "gemini-2.5-pro", [1.25, 10.0], 65535, COOL),
        (ANTHROPIC, "Claude Sonnet 4", "claude-sonnet-4-20250514", [3.0, 15.0], 64000, COOL),
        (OPENAI, "GPT-5", "gpt-5", [1.25, 10.0], 128000, {}),
        (OWN, "R1-Distill-Qwen-32B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", None, 20480, COOL),
        (OWN, "Gemma 3 27B", "google/gemma-3-27b-it", None, 20480, COOL),
        (OWN, "Qwen3-32B", "Qwen/Qwen3-32B", None, 20480, {**QWEN, **DIRECT}),
        (OWN, "Qwen3-32B thinking", "Qwen/Qwen3-32B", None, 20480, {**QWEN, **THINKS})],
    "today": [
        (GOOGLE, "Gemini 4 Hydrogen", "gemini-4-hydrogen", [1.5, 7.5], 32768, {}),
        (ANTHROPIC, "Claude Sonnet 5.5", "claude-sonnet-5-5", [2.0, 10.0], 128000, {}),
        (OPENAI, "GPT-6.2 Sol", "gpt-6.2-sol", [2.0, 10.0], 128000, {}), *OPEN_TODAY],
    "openrouter": [
        (OPENROUTER, "Gemini 4 Hydrogen", "google/gemini-4-hydrogen", [1.5, 7.5], 65536, {}),
        (OPENROUTER, "Claude Sonnet 5.5", "anthropic/claude-sonnet-5.5", [2.0, 10.0], 128000, {}),
        (OPENROUTER, "GPT-6.2 Sol", "openai/gpt-6.2-sol", [2.0, 10.0], 128000, {}), *OPEN_TODAY],
}


def load_pool(spec: str, local_url: str | None = None, replay: str = "", budget: float = 0.0,
              ranks: int = 1) -> list[Worker]:
    """The workers of a pool; a bad entry ends the program, naming entry and field.

    A local pool starts the specialists' server, once per process, unless local_url names a running one.
    replay: a file of replies. budget: dollars that the workers may spend together, 0 for no limit. ranks: how
    many processes share budget, rpm and concurrency."""
    try:
        kept = Replay(replay) if replay else None
    except OSError as e:
        sys.exit(f"--replay={replay}: {e}")
    if not 0 <= budget < math.inf:
        sys.exit(f"--budget={budget}: expected dollars, or 0 for no limit")
    limit = Budget(budget / ranks) if budget else None
    pool = []
    for i, entry in enumerate(read_pool(spec, local_url)):
        try:
            worker = Worker(**entry, replay=kept, budget=limit)
            if worker.name in [other.name for other in pool]:
                raise ValueError(f"another worker has the name {worker.name!r} already: give each its own")
        except (TypeError, ValueError) as e:
            sys.exit(f"{spec}: entry {i}: {e}\nThe fields are {', '.join([*Worker.__annotations__][:-2])}.")
        rpm = worker.rpm and worker.rpm / ranks
        pool.append(replace(worker, rpm=rpm, concurrency=max(1, worker.concurrency // ranks)))
        pool[-1].letter = chr(ord("A") + i)
    if budget:
        check_prices(pool, spec)
    return pool


def remote_pool(spec: str) -> list[dict]:
    """The entries of one of POOLS: 4096 tokens and the least reasoning, as in training, or unconstrained."""
    name, _, free = spec.partition(":")
    entries = []
    for (protocol, base_url, key), title, model, price, limit, own in POOLS[name]:
        _, least, most = generation_of(model)
        reasoning = most if free else least
        params = {"max_tokens": limit if free else 4096, **own, **reasoning}
        if "thinking" in reasoning:
            params.pop("temperature", None)  # which Claude refuses while it thinks
        if base_url == OPENROUTER[1]:  # to ask no host that is much dearer, or does not know a parameter
            params["provider"] = {"max_price": {"prompt": 2 * price[0], "completion": 2 * price[1]},
                                  "require_parameters": True}
        entries.append({"name": title, "protocol": protocol, "base_url": base_url, "model": model,
                        "api_key_env": key, "params": params, "price": price, "concurrency": 64,
                        "timeout": 3600 if free else 300})
    return entries


def read_pool(spec: str, local_url: str | None = None) -> list[dict]:
    """The entries of a pool, by its name or a JSON file, still unchecked."""
    remote = [name + free for name in POOLS for free in ("", ":unconstrained")]
    if spec in LOCAL:
        same = {"protocol": "openai", "base_url": local_url or local_server()[0], "price": [0, 0]}
        return [{**same, "model": name} for name in LOCAL[spec]]
    if spec in remote:
        return remote_pool(spec)
    try:
        with open(spec, encoding="utf-8") as file:
            entries = json.load(file)
    except (OSError, ValueError) as e:
        known = ", ".join([*LOCAL, *remote])
        sys.exit(f"--pool={spec}: {e}; expected {known} or a JSON file with a list of workers")
    if not isinstance(entries, list) or not entries:
        sys.exit(f"{spec}: expected a list of workers")
    return entries


def check_prices(pool: list[Worker], spec: str):
    """End the program where nobody knows the most that a worker's call can cost: a budget would not hold."""
    lacks = []
    for worker in pool:
        try:
            most_dollars(worker.price, worker.params, 0)
        except WorkerError as e:
            lacks.append(f"{worker.name}: {e}")
    if lacks:
        lacks.append(f"edit {spec}")
        if not os.path.exists(spec):
            lacks[-1] = f"edit a copy, python workers.py print --pool={spec} > pool.json"
        sys.exit("\n".join(lacks))


def check_worker(worker: Worker):
    """ValueError for a wrong field; without its value, which may be a misplaced API key."""
    for key, kind in Worker.__annotations__.items():
        value = getattr(worker, key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{key} must be {getattr(kind, '__name__', kind)}")
        if isinstance(value, int | float) and not 0 < value < 1e6:
            raise ValueError(f"{key} must be above 0 and below a million")
    if worker.protocol not in PROTOCOLS:
        raise ValueError(f"protocol must be one of {', '.join(PROTOCOLS)}")
    variable = re.match(r"\$\w+(?=/|$)", worker.base_url)  # In another place it could tell a host a secret.
    url = os.path.expandvars(worker.base_url) if variable else worker.base_url
    if "$" in worker.base_url[1:] or not re.fullmatch(r"(https?://[^/@?\s]+|\$\w+)(/[^?\s]*)?", url):
        raise ValueError("base_url must be http(s)://host/..., without a password or a query, or a $VARIABLE "
                         "that holds such")
    if worker.api_key_env is not None and not worker.api_key_env.isidentifier():
        raise ValueError("api_key_env must be the name of an environment variable, not the key")
    price = [0, 0] if worker.price is None else worker.price
    if len(price) != 2 or not all(type(dollars) in (int, float) and 0 <= dollars < 1e6 for dollars in price):
        raise ValueError("price must be [input, output] in dollars per million tokens")


# Wire formats

# A protocol's own name for a parameter of OpenAI's, None where it has none. Others are sent as they are.
NAMES = {
    "anthropic": {**dict.fromkeys((*SAMPLING[3:], "seed", "reasoning_effort", "verbosity")),
                  "max_completion_tokens": "max_tokens", "stop": "stop_sequences"},
    "gemini": {**dict.fromkeys(("logprobs", "top_logprobs", "logit_bias", "reasoning_effort", "verbosity")),
               "max_tokens": "maxOutputTokens", "max_completion_tokens": "maxOutputTokens",
               "presence_penalty": "presencePenalty", "frequency_penalty": "frequencyPenalty",
               "top_p": "topP", "top_k": "topK", "stop": "stopSequences"},
}
GEMINI_FIELDS = ("safetySettings", "tools", "toolConfig", "cachedContent", "labels", "serviceTier")


class Request(NamedTuple):
    url: str
    headers: dict
    body: bytes
    key: str  # which no error may show
    most: float  # dollars that it can cost, where there is a budget


def unset(worker: Worker) -> list[str]:
    """The variables that a worker needs and the environment lacks."""
    names = re.findall(r"^\$(\w+)", worker.url)
    key = os.environ.get(worker.api_key_env or "", "").strip()
    if worker.api_key_env and not re.fullmatch("[!-~]+", key):  # what a header can hold
        names.append(worker.api_key_env)
    return names


def unset_in(pool: list[Worker]) -> list[str]:
    """Each variable that the environment lacks, and who needs it: "$NAME for WORKER, WORKER"."""
    needed = {}
    for worker in pool:
        for name in unset(worker):
            needed.setdefault(name, []).append(worker.name)
    return [f"${name} for {', '.join(workers)}" for name, workers in needed.items()]


def first_words(pool: list[Worker]):
    """Yield a Reply or WorkerError of each worker, in their order. All are asked for a word at once, and once
    more if that may help."""
    def ask(worker):
        asked = replace(worker, attempts=2, timeout=min(worker.timeout, PATIENCE),
                        deadline=min(worker.deadline, PATIENCE))
        asked.last_warned = math.inf  # What fails is told by the caller.
        begun = time.monotonic()
        try:
            reply = asked.chat([{"role": "user", "content": "Say hello."}])
        except WorkerError as e:
            if time.monotonic() - begun > PATIENCE:
                return WorkerError(f"{e}: a first word has to come within {PATIENCE} s, whatever the timeout")
            return e
        if not reply.text.strip():
            why = "cut off" if reply.finish == "length" else f"ended by {reply.finish!r}"
            return WorkerError(f"{worker.name}: the answer to a hello is empty, {why}")
        return reply

    if pool and sys.stderr.isatty():
        print(f"asking for a word: {', '.join(worker.name for worker in pool)}", file=sys.stderr)
    with ThreadPool(len(pool) or 1) as threads:
        yield from threads.imap(ask, pool)


def silent(pool: list[Worker]) -> list[str]:
    """Who does not answer and why, of the workers whose variables are set, so that a run with a worker who is
    down ends before it begins."""
    ready = [worker for worker in pool if not unset(worker)]
    return [f"a worker ({told})" for told in first_words(ready) if isinstance(told, WorkerError)]


def build_request(worker, messages: list[dict], params: dict, stream: bool) -> Request:
    """WorkerError where the environment lacks something, or protocol or budget forbid a parameter."""
    lacks = unset(worker)
    if lacks:
        raise WorkerError(f"not set in the environment: {', '.join(lacks)}")
    key = os.environ.get(worker.api_key_env or "", "").strip()
    path, headers, write, _ = PROTOCOLS[worker.protocol]
    body = write(worker.model, messages, wire_params(worker.protocol, worker.model, params))
    if stream and worker.protocol == "openai":
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(body).encode()
    headers = {name: value.format(key) for name, value in headers.items() if key or "{}" not in value}
    headers |= {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    most = most_dollars(worker.price, params, len(body)) if worker.budget else 0.0
    return Request(worker.url + path.format(worker.model), headers, body, key, most)


def wire_params(protocol: str, model: str, params: dict) -> dict:
    """The parameters as this model takes them. WorkerError for what its protocol cannot say, but seeds."""
    takes_sampling, reasoning, _ = generation_of(model)
    sent = {}
    for name, value in params.items():
        own_name = NAMES.get(protocol, {}).get(name, name)
        if name == "seed" and own_name is None:
            continue  # OpenAI itself takes it for a wish, and some clients always send it.
        if own_name is None:
            raise WorkerError(f"{name} means nothing to the {protocol} protocol", bad_request=True)
        if name in ("n", "stream"):
            raise WorkerError(f"{name}: a call gives one reply, and streams it to on_text")
        reasons_at_openai = "reasoning_effort" in reasoning
        both = protocol == "openai" and "max_completion_tokens" in params  # The later one counts.
        if name == "max_tokens" and (reasons_at_openai or both):
            own_name = "max_completion_tokens"
        if name == "reasoning" and "reasoning_effort" in params:  # OpenRouter takes one of them.
            continue
        if name == "reasoning_effort" and "reasoning" in params:
            own_name = "reasoning"
            value = {"effort": value}
        if name == "stop" and isinstance(value, str):
            value = [value]
        if takes_sampling or name not in SAMPLING:
            sent[own_name] = value
    return sent


def openai_body(model: str, messages: list[dict], params: dict) -> dict:
    return {"model": model, "messages": [no_blank(m) for m in messages], **params}


def openai_reply(data: dict) -> tuple:
    choice = data["choices"][0]
    error = choice.get("error")
    failed = choice.get("finish_reason") == "error"  # OpenRouter's, when its provider fails
    if failed or error:  # It bills nothing then, unless it says so.
        billed = not failed or bool(at(data, "usage", "cost"))
        raise AttemptError(f"the provider failed midway: {error}", retry=True, billed=billed)
    text = text_of(choice["message"].get("content")) or text_of(choice["message"].get("refusal"))
    text = without_thoughts(text)
    n_in = tokens(data, "usage", "prompt_tokens")
    n_out = tokens(data, "usage", "completion_tokens")
    total = tokens(data, "usage", "total_tokens")
    if None not in (n_in, n_out, total):
        n_out = max(n_out, total - n_in)  # Some count the reasoning in the total only.
    written = tokens(data, "usage", "prompt_tokens_details", "cache_write_tokens") or 0
    return text, choice.get("finish_reason"), n_in, n_out, 0.25 * written


def without_thoughts(text: str) -> str:
    """A text without what some servers leave in it of a model's thoughts (Groq, LM Studio, and vLLM without a
    parser for them): the next worker would take them for the answer. A stream has told them already."""
    if re.match(r"\s*<think>", text) and "</think>" not in text:
        return ""  # It was cut off while it thought.
    _, thought, answer = text.rpartition("</think>")
    return answer.lstrip() if thought else text


def anthropic_body(model: str, messages: list[dict], params: dict) -> dict:
    """platform.claude.com/docs/en/api/messages, which needs max_tokens."""
    system, turns = system_and_turns(messages)
    body = {"model": model, "max_tokens": 4096, "messages": turns, **params}
    wish = body.pop("response_format", None)
    if at(wish, "type") == "json_object":
        raise WorkerError("response_format: the anthropic protocol needs a json_schema", bad_request=True)
    if at(wish, "type") == "json_schema":
        form = {"type": "json_schema", "schema": at(wish, "json_schema", "schema")}
        body["output_config"] = {**body.get("output_config", {}), "format": form}
    if system:
        body["system"] = system
    return body


def anthropic_reply(data: dict) -> tuple:
    n_in = tokens(data, "usage", "input_tokens")
    n_out = tokens(data, "usage", "output_tokens")
    written = tokens(data, "usage", "cache_creation_input_tokens") or 0
    for_an_hour = tokens(data, "usage", "cache_creation", "ephemeral_1h_input_tokens") or 0
    if n_in is not None:  # The other protocols count these in.
        n_in += written + (tokens(data, "usage", "cache_read_input_tokens") or 0)
    surcharge = 0.25 * written + 0.75 * for_an_hour  # 1.25 times the price, for an hour twice
    return text_of(data["content"]), data.get("stop_reason"), n_in, n_out, surcharge


def gemini_body(model: str, messages: list[dict], params: dict) -> dict:
    """ai.google.dev/api/generate-content; params are generationConfig's but for GEMINI_FIELDS."""
    system, turns = system_and_turns(messages)
    roles = {"user": "user", "assistant": "model"}
    contents = [{"role": roles[turn["role"]], "parts": [{"text": turn["content"]}]} for turn in turns]
    config = dict(params)
    body = {name: config.pop(name) for name in GEMINI_FIELDS if name in config}
    body |= {"contents": contents, "generationConfig": config}
    wish = config.pop("response_format", None)
    if at(wish, "type") in ("json_object", "json_schema"):
        config["responseMimeType"] = "application/json"
    if at(wish, "type") == "json_schema":
        config["responseJsonSchema"] = at(wish, "json_schema", "schema")
    if system:
        body["systemInstruction"] = {"parts": [{"text": system}]}
    return body


def gemini_reply(data: dict) -> tuple:
    n_in = tokens(data, "usageMetadata", "promptTokenCount")
    if n_in is not None:
        n_in += tokens(data, "usageMetadata", "toolUsePromptTokenCount") or 0
    n_out = tokens(data, "usageMetadata", "candidatesTokenCount") or 0  # none where thinking used up all
    n_out += tokens(data, "usageMetadata", "thoughtsTokenCount") or 0
    if not data.get("candidates") and at(data, "promptFeedback", "blockReason"):
        return "", "SAFETY", n_in, n_out, 0.0
    candidate = data["candidates"][0]
    parts = at(candidate, "content", "parts") or []
    text = "".join(part.get("text", "") for part in parts if not part.get("thought"))
    return text, candidate.get("finishReason"), n_in, n_out, 0.0


# Below base_url a path, where {} is the model; headers, where {} is the key (in Gemini's URL it would land in
# logs); the body of a request; a response's text, stop reason, tokens in and out, and what its cache costs as
# further tokens in. A parameter's other name stands in NAMES, the word for a cut-off answer in CUT_OFF.
# OpenAI's protocol (platform.openai.com/docs/api-reference/chat) is also that of vLLM, Ollama, llama.cpp,
# OpenRouter and Together.
PROTOCOLS = {
    "openai": ("/chat/completions", {"Authorization": "Bearer {}"}, openai_body, openai_reply),
    "anthropic": ("/messages", {"x-api-key": "{}", "anthropic-version": "2023-06-01"}, anthropic_body,
                  anthropic_reply),
    "gemini": ("/models/{}:generateContent", {"x-goog-api-key": "{}"}, gemini_body, gemini_reply),
}
# Gemini 4 may answer a request with 32,768 tokens at most, and the rest, "CONTINUATION", would be another's
# (ai.google.dev/gemini-api/docs/generate-content/long-decode): here the answer ends there.
CUT_OFF = ("max_tokens", "MAX_TOKENS", "CONTINUATION", "model_context_window_exceeded", "length")


def read_reply(protocol: str, data: dict, price: list | None) -> Reply:
    with defined_by(protocol):
        text, finish, n_in, n_out, surcharge = PROTOCOLS[protocol][-1](data)
        finish = "length" if finish in CUT_OFF else str(finish or "stop")
        text = text.encode(errors="replace").decode()  # Half of an emoji, as JSON can spell it, is no text.
    cost = None
    told = at(data, "usage", "cost")  # in dollars, by OpenRouter and by our own server
    told_nothing = any(price or ()) and not n_out and (text or not n_in)  # Some gateways fill in zeros.
    if price and n_in is not None and n_out is not None and not told_nothing:
        cost = ((n_in + surcharge) * price[0] + n_out * price[1]) / 1e6
    if type(told) in (int, float) and 0 < told < 1e6 and not at(data, "usage", "is_byok"):
        cost = float(told)
    return Reply(text, n_in or 0, n_out or 0, cost, 0.0, finish)


@contextlib.contextmanager
def defined_by(protocol: str):
    """AttemptError where a response turns out not to be as its protocol defines it."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as e:
        raise AttemptError(f"the response is not as {protocol} defines it: {type(e).__name__}: {e}") from None


def at(data, *path):
    """What stands at this path of names in nested objects; None where nothing does."""
    for name in path:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def tokens(data, *path) -> int | None:
    """A count of tokens as a provider reports it; None, unknown, where that is no sensible number."""
    value = at(data, *path)
    return value if type(value) is int and 0 <= value < 1e9 else None


def text_of(content) -> str:
    """A response's text: a string, null, or a list of parts, of which those of another type are left out."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    return "".join(part["text"] for part in parts if part["type"] == "text")


def system_and_turns(messages: list[dict]) -> tuple[str, list[dict]]:
    """The system's words, and the other messages: some want them apart."""
    system = [m["content"] for m in messages if m["role"] == "system"]
    return "\n\n".join(system), [no_blank(m) for m in messages if m["role"] != "system"]


def no_blank(message: dict) -> dict:
    """Some models refuse a blank turn, such as the answer of a worker who was cut off while it thought."""
    if message["role"] == "system" or message["content"].strip():
        return message
    return {**message, "content": "(empty)"}


# Money: replies that are kept, and the budget

class Replay:
    """Replies in one file, a line each, appended as they come: what a killed run has paid for is free when it
    is run again. Any number of processes may append; nothing is ever taken out. A line begins with its
    newline, so that one which a kill or a full disk has torn before it does no harm."""

    def __init__(self, path: str):
        self.path = path
        self.file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")
        if not all(re.match(rb"[0-9a-f]{64} |[0-9a-f]{0,64}$", line) for line in lines):
            raise OSError("the file is there, and is no file of replies")
        self.lines = dict(line.split(b" ", 1) for line in lines if line.endswith(b"}"))

    @staticmethod
    def key(asked: list) -> bytes:
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest().encode()

    def find(self, key: bytes) -> Reply | None:
        try:
            return Reply(**json.loads(self.lines[key]))
        except (KeyError, ValueError, TypeError, RecursionError):  # not there, or torn
            return None

    def keep(self, key: bytes, reply: Reply):
        line = b"\n%s %s" % (key, json.dumps(asdict(reply)).encode())
        try:
            if os.write(self.file, line) < len(line):  # One write: lines of several processes do not mix.
                raise OSError("no space left")
        except OSError as e:  # The reply is paid for, and the run can go on with it.
            warn(f"{self.path}: a reply could not be kept: {e}")


class Budget:
    """Dollars that a pool may spend. An attempt first takes what it can cost at most, and then gives back
    what it did not: what the providers report never passes the budget. What a broken attempt took stays
    taken, unless the provider said that it refused it or hung up at once."""

    def __init__(self, dollars: float):
        self.dollars = dollars
        self.left = dollars
        self.room = threading.Condition()
        self.running = 0  # attempts
        self.refused = False  # whether a call has been

    def take(self, most: float):
        """Set it apart, once it is there: those that run will give something back."""
        with self.room:
            self.room.wait_for(lambda: most <= self.left or not self.running)
            if most > self.left:
                self.refused = True
                raise WorkerError(f"the budget of ${self.dollars:g} is spent, but for ${self.left:.4f} "
                                  "(where a cost is unknown, the most that it can be counts)")
            self.left -= most
            self.running += 1

    def settle(self, back: float):
        with self.room:
            self.left += back
            self.running -= 1
            self.room.notify_all()


LIMITS = ("max_tokens", "max_completion_tokens", "maxOutputTokens")  # of an answer's tokens, by any name
COSTLY = ("best_of", "candidateCount", "models", "plugins", "prompt_cache_retention", "service_tier",
          "serviceTier", "speed", "tools", "web_search_options")  # They cost more than the call's tokens.
TEMPLATE = 512  # tokens that a chat template may add to a prompt


def most_dollars(price: list | None, params: dict, size: int) -> float:
    """Dollars that a call with a body of so many bytes can cost. WorkerError where nothing bounds it."""
    limits = [params[name] for name in LIMITS if name in params]
    costly = [name for name in COSTLY if name in params]
    if price == [0, 0]:
        return 0.0
    if costly:
        raise WorkerError(f'a budget forbids "{costly[0]}", which costs beside the tokens', bad_request=True)
    if not limits or not all(type(n) is int and n > 0 for n in limits):
        raise WorkerError('a budget needs "max_tokens" in "params", above 0 and whole', bad_request=True)
    if not price:
        raise WorkerError('a budget needs "price": [input, output], dollars per million tokens; your own: 0')
    n_in = 2 * (size + TEMPLATE)  # A token is at least a byte; a cache may write it at twice the price.
    dearest = [dollars for dollars in price]
    for i, kind in enumerate(("prompt", "completion")):  # OpenRouter may choose a host up to this price.
        highest = at(params, "provider", "max_price", kind)
        if type(highest) in (int, float):
            dearest[i] = max(highest, price[i])
    return (n_in * dearest[0] + max(limits) * dearest[1]) / 1e6


# The transport: a call is some attempts, and an attempt is one POST

CONNECT = 10.0  # seconds to reach a host
MAX_BODY = 32 << 20  # bytes of a request or a response; honest ones stay below 1 MB
KEEPALIVE = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
# A path that has gone dead is noticed in two minutes: seconds of silence before the first probe, and between
# probes, their number, and milliseconds in which what was sent has to arrive. Linux itself waits 15 minutes.
for option, value in {"KEEPIDLE": 60, "KEEPINTVL": 10, "KEEPCNT": 6, "USER_TIMEOUT": 120_000}.items():
    if hasattr(socket, f"TCP_{option}"):
        KEEPALIVE.append((socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value))


class AttemptError(WorkerError):
    """One attempt failed. retry: another may succeed. busy: the provider is, which is no failure. wait: the
    seconds that it asks for. billed: the attempt may have cost money."""

    def __init__(self, text: str, bad_request=False, retry=False, busy=False, wait=0.0, billed=True):
        super().__init__(text, bad_request)
        self.retry, self.busy = retry, busy
        self.wait = wait
        self.billed = billed
        self.told = False  # whether on_text got a part of the answer


BACKOFF, BACKOFF_MAX = 2.0, 30.0  # seconds: the longest wait after the first failed attempt, and after any
FAILURES = 6  # failed attempts that end a call; those that a busy provider refuses do not count
PATIENCE = 120  # seconds for a first word
QUIET = 60  # seconds after which a worker's next failure is printed
jitter = random.Random()  # The global generator's draws are the experiment's.


def kept_or_new(worker: Worker, messages: list[dict], params: dict, call_id: str, on_text) -> Reply:
    """The reply that worker.replay has for this call, which costs the budget nothing; else a new one."""
    key = None
    if worker.replay and call_id:
        key = worker.replay.key([worker.name, worker.protocol, worker.model, messages, params, call_id])
        if kept := worker.replay.find(key):
            if on_text:
                on_text(kept.text)
            return kept
    try:
        reply = call(worker, messages, params, on_text)
    except WorkerError as e:
        raise WorkerError(f"{worker.name}: {e}", e.bad_request) from None
    if key:
        worker.replay.keep(key, reply)
    return reply


def call(worker: Worker, messages: list[dict], params: dict, on_text) -> Reply:
    """One attempt after another until one succeeds, within worker.deadline. The waits between them double,
    but for jitter, and last at least as long as a busy provider asks (HTTP 429, 503, 529)."""
    stream = on_text is not None
    request = build_request(worker, messages, params, stream)
    with worker.slots:
        begun = time.monotonic()
        number = failures = 0
        while True:
            number += 1
            begun += take_turn(worker, request.most)  # The waits for rpm and budget count as no time.
            end = begun + worker.deadline
            seconds = max(0.001, min(worker.timeout, end - time.monotonic()))
            try:
                reply = attempt(worker, request, seconds, on_text)
                break
            except AttemptError as fault:
                if stream and fault.bad_request and not fault.told and "stream" in str(fault):
                    stream = False  # Mistral refuses an option of it, OpenAI an account that is not verified.
                    request = build_request(worker, messages, params, stream)
                    number -= 1
                    continue
                failures += not fault.busy
                pause = min(BACKOFF * 2 ** min(number - 1, 9), BACKOFF_MAX)
                wait = fault.wait + jitter.uniform(pause / 2, pause)  # Not all shall return at once.
                late = time.monotonic() + wait + worker.usual_seconds > end
                last = number >= (worker.attempts or math.inf) or failures == FAILURES
                text = redact(str(fault), request.key)
                if fault.wait and time.monotonic() + fault.wait > end:
                    text += "; it asks to wait beyond the deadline"
                if not fault.retry or late or last:
                    took = f"attempt {number}, after {time.monotonic() - begun:.1f} s"
                    raise WorkerError(f"{text} ({took})", fault.bad_request) from None
                if time.monotonic() > worker.last_warned + QUIET:
                    worker.last_warned = time.monotonic()
                    warn(f"{worker.name}: {text}; trying again")
            time.sleep(wait)
    worker.usual_seconds += (reply.seconds - worker.usual_seconds) * (0.2 if worker.usual_seconds else 1.0)
    reply.seconds = time.monotonic() - begun
    return reply


def warn(text: str):
    """Print to stderr, beside the bars."""
    with contextlib.suppress(OSError):  # Nobody may read it.
        tqdm.write(text, file=sys.stderr)


def take_turn(worker: Worker, most: float) -> float:
    """Wait for a turn under rpm and for `most` dollars of the budget. Returns the seconds it took."""
    begun = time.monotonic()
    if worker.rpm:
        with worker.lock:
            turn = max(worker.next_turn, begun)
            worker.next_turn = turn + 60 / worker.rpm
        time.sleep(max(0.0, turn - time.monotonic()))
    if worker.budget:
        worker.budget.take(most)
    return time.monotonic() - begun


def attempt(worker: Worker, request: Request, seconds: float, on_text) -> Reply:
    """One request and its reply, or AttemptError. What it does not cost of request.most goes back to the
    budget."""
    begun = time.monotonic()
    spent = request.most
    told = []

    def tell(piece):
        told.append(piece)
        on_text(piece)

    try:
        data = exchange(worker.session, request, seconds, tell if on_text else None)
        reply = read_reply(worker.protocol, data, worker.price)
        if reply.cost is not None:
            spent = reply.cost
    except AttemptError as fault:
        if not fault.billed:
            spent = 0.0
        if told:
            fault.told = True
            fault.retry = False  # Another attempt would tell the beginning again.
        raise
    finally:
        if worker.budget:
            worker.budget.settle(request.most - spent)
    if on_text and reply.text and not told:
        on_text(reply.text)
    reply.seconds = time.monotonic() - begun
    return reply


class Adapter(HTTPAdapter):
    """With TCP keep-alive a silent hour is not cut off on the way, and a dead host is noticed."""
    init_poolmanager = functools.partialmethod(HTTPAdapter.init_poolmanager, socket_options=KEEPALIVE)
    proxy_manager_for = functools.partialmethod(HTTPAdapter.proxy_manager_for, socket_options=KEEPALIVE)


def new_session(url: str, connections: int) -> requests.Session:
    """A session for a worker's calls, from many threads: it keeps connections, and nothing else."""
    session = requests.Session()
    session.mount("https://", Adapter(pool_maxsize=connections))
    session.mount("http://", session.adapters["https://"])
    session.trust_env = not re.match(r"https?://(127\.|localhost\b|\[::1\])", url)  # no proxy for loopback
    if not session.trust_env:  # which would also say whose certificates to trust
        session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or True
    session.auth = lambda request: request  # Without one, a netrc's password would take the key's place.
    session.cookies.set_policy(http.cookiejar.DefaultCookiePolicy(allowed_domains=[]))
    session.get_redirect_target = lambda response: None  # The key must not go elsewhere.
    return session


def exchange(session, request: Request, seconds: float, on_text=None) -> dict:
    """One POST within so many seconds: the response's JSON object, or AttemptError."""
    with contextlib.closing(received(session, request, seconds)) as pieces:
        response = next(pieces)
        streamed = response.headers.get("Content-Type", "").startswith("text/event-stream")
        if on_text and streamed and response.status_code == 200:
            return response_data(response, read_stream(pieces, on_text))
        body = []
        try:
            body.extend(pieces)
        except AttemptError:
            if response.status_code == 200:
                raise  # Else what counts is why it refused, not that it then hung up.
        return response_data(response, b"".join(body))


def received(session, request: Request, seconds: float):
    """The response to one POST when its head is there, and then the pieces of its body as they come."""
    begun = time.monotonic()
    billed = False
    body = io.BytesIO(request.body)  # Its position tells whether anything was sent.
    try:
        limits = (min(CONNECT, seconds), seconds)  # of the connect, and of each read
        response = session.post(request.url, body, headers=request.headers, stream=True, timeout=limits)
        billed = True
        with response:
            yield response
            size = 0
            piece = b"-"
            while piece:
                sock = getattr(response.raw.connection, "sock", None)
                if sock:  # None where the connection ends with the response
                    sock.settimeout(max(0.001, begun + seconds - time.monotonic()))
                piece = response.raw.read1(1 << 16, decode_content=True)
                if time.monotonic() > begun + seconds:
                    raise TimeoutError
                size += len(piece)
                if size > MAX_BODY:
                    raise AttemptError(f"the response is larger than {MAX_BODY >> 20} MiB")
                yield piece
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as e:  # all that it raises when they fail
        cause = getattr(e.args and e.args[0], "reason", None) or e  # of urllib3's, within that of requests
        text = f"the connection failed: {type(e).__name__}: {cause}"
        if body.tell() == 0:  # no address, no connection, no certificate, or no way through a proxy
            raise AttemptError(text, retry=True, billed=False) from None
        took = time.monotonic() - begun
        late = took > seconds - 0.001
        if late:  # It may still be at work: another attempt would stand in line behind this one.
            text = f"no complete response within {seconds:.3g} s; a slow worker needs a larger timeout"
        billed = billed or late or took > CONNECT  # Who hangs up at once has not begun to work.
        raise AttemptError(text, retry=not late, billed=billed) from None


def response_data(response, body: bytes | dict) -> dict:
    """The JSON object of a response, or AttemptError for what the provider reports or did not write."""
    try:
        data = body if isinstance(body, dict) else json.loads(body)
    except (ValueError, RecursionError):
        data = None
    status = response.status_code
    if status == 200 and at(data, "error"):  # openrouter.ai/docs/api/reference/errors: the model had begun
        code = at(data, "error", "code")
        status = code if code in range(400, 600) else 500
    if status != 200:
        raise refusal(response, status, data, body)
    if not isinstance(data, dict):  # To ask again would be to pay again, for the same. But blanks alone are
        blank = not body.strip()    # what OpenRouter sends while it waits for a host that then dies.
        start = body[:400].decode("utf-8", "replace")
        raise AttemptError(f"the response is no JSON object: {start!r}", retry=blank)
    return data


# The account is at fault, not the request, and nobody is just busy, where a 400 or 429 says one of these:
# OpenAI, Anthropic, Google and OpenRouter of a spent account or a day's quota, and Google of a wrong key.
ACCOUNT = ('"insufficient_quota"|"billing_not_active"|credit balance is too low|"API_KEY_INVALID"|PerDay'
           '|specified (?:workspace )?API usage limits|"enforced_spend_limit_reached"|free-models-per-day'
           '|"credit_balance_exhausted"|(?:spend|usage)_limit_exceeded"|monthly spending cap'
           '|credits are depleted')


def refusal(response, status: int, data, body: bytes) -> AttemptError:
    """What a provider says that does not answer, and whether to ask again. status: HTTP's, or, as HTTP's is
    200 once the model has begun, that in the error. data: what body is as JSON, if it is."""
    if isinstance(data, list) and data:  # Google wraps some errors so.
        data = data[0]
    error = at(data, "error")
    text = at(error, "message") or error or at(data, "message") or at(data, "detail")
    text = str(text or body.decode("utf-8", "replace"))
    for name in ("raw", "reasons", "failed_routing_step"):  # OpenRouter's message may say next to nothing.
        text += f": {at(error, 'metadata', name)}" if at(error, "metadata", name) else ""
    text = f"HTTP {status}: {' '.join(text.split())}"
    if status in (404, 405) and not at(error, "metadata"):
        text += f" (asked {response.url}, which is base_url and the protocol's path)"
    if response.is_redirect:
        text = f"redirected to {response.headers['Location']}, so change base_url: {text}"

    http = response.status_code
    refused = http != 200 and (http < 500 or http in (503, 529))  # 529 is Anthropic's "overloaded".
    wait = asked_wait(response.raw.headers, error)
    # With a time to come back, OpenRouter's 402 says that too many paid requests run at once.
    busy = refused and (status in (429, 503, 529) or (status == 402 and wait > 0))
    account = re.search(ACCOUNT, json.dumps(error))
    again = (busy or status in (408, 409, 429) or status >= 500) and not account
    if status in (504, 524) and response.elapsed.total_seconds() > CONNECT:
        again = False  # The worker behind it may still be at work.
        if not error:  # Anthropic and Google have a 504 of their own.
            text = f"a proxy did not wait long enough for the worker, raise its limit: {text}"
    return AttemptError(text, bad_request=status in (400, 422) and not account, busy=busy, wait=wait,
                        retry=again and response.headers.get("x-should-retry") != "false", billed=not refused)


def asked_wait(headers, error) -> float:
    """Seconds that a provider asks to wait, as a number or a date (RFC 9110, 10.2.3); of several the most."""
    waits = re.findall(r'"retryDelay": "(\d+(?:\.\d+)?)s"', json.dumps(error))  # google.rpc.RetryInfo
    waits += headers.getlist("Retry-After") + headers.getlist("llm_provider-retry-after")  # LiteLLM's name
    waits += [f"{ms}e-3" for ms in headers.getlist("retry-after-ms")]
    longest = 0.0
    for wait in waits:
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            if re.fullmatch(r"\s*\d+(\.\d+)?(e-3)?\s*", wait):
                longest = max(longest, float(wait))
            else:
                longest = max(longest, email.utils.parsedate_to_datetime(wait).timestamp() - time.time())
    return longest


def read_stream(pieces, on_text) -> dict:
    """An OpenAI stream as the same response without one. on_text gets each piece of its text."""
    texts, ending = [], {}  # ending: finish_reason, usage, error
    for event in events_of(pieces):
        with defined_by("openai"):
            texts.append(read_event(event, ending))
        if texts[-1]:
            on_text(texts[-1])
    if not ending.keys() & {"finish_reason", "error"}:
        raise AttemptError("the stream ended early", retry=True)
    choice = {"message": {"content": "".join(texts)}, "finish_reason": ending.get("finish_reason")}
    return {"choices": [choice], **ending}


def events_of(pieces):
    """Yield the data of a stream's events, also of a last one that lacks its newline, if it is whole."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and line[5:].strip():  # else blank, a comment, another field
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(rest[5:])
            yield rest[5:].strip()


def read_event(event: bytes, ending: dict) -> str:
    """The text of a stream's event. What ends a stream is put into `ending`."""
    data = {"choices": [{"finish_reason": "stop"}]} if event == b"[DONE]" else json.loads(event)
    ending |= {key: data[key] for key in ("error", "usage") if data.get(key)}
    text = ""
    for choice in data.get("choices") or []:
        text += text_of(at(choice, "delta", "content")) or text_of(at(choice, "delta", "refusal"))
        if choice.get("finish_reason"):
            ending.setdefault("finish_reason", choice["finish_reason"])
    return text


def redact(text: str, key: str) -> str:
    """The first 400 characters, without the key, URL-encoded or not, and without what commands a terminal.
    Cut first, half of the key would stay."""
    letters = "".join(f"(?:{re.escape(letter)}|%(?:25)*{ord(letter):02x})" for letter in key)
    if key:
        text = re.sub(f"(?i){letters}", "***", text)
    return "".join(letter if letter.isprintable() else " " for letter in text[:400])


# The servers

ROLES = ("system", "developer", "user", "assistant")
PATHS = "there are GET /health, GET /v1/models, GET /v1/models/NAME and POST /v1/chat/completions"
# What a client may ask of the answer; nobody here needs what else OpenAI's clients send.
WISHES = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed", "response_format",
          "presence_penalty", "frequency_penalty", "logit_bias", "reasoning_effort", "verbosity")
IGNORED = ("model", "messages", "stream", "stream_options", "n", "user", "metadata", "store", "service_tier",
           "safety_identifier", "prompt_cache_key", "tool_choice", "parallel_tool_calls")
RANGES = {"n": (1, 1), "max_tokens": (1, 10 ** 9), "max_completion_tokens": (1, 10 ** 9),
          "temperature": (0, 2), "top_p": (0, 1), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2)}


def plain_chat(body) -> dict:
    """A chat request as `Handler.complete` gets it; ValueError says what is wrong or not supported."""
    said = at(body, "messages")
    if not isinstance(said, list) or not said or not isinstance(body.get("model"), str):
        raise ValueError("expected an object with model, a name, and messages, a list of at least one")
    for key, value in body.items():
        if value and key not in WISHES + IGNORED:
            raise ValueError(f"{key} is not supported; there are {', '.join(WISHES)}")
    for key, (least, most) in RANGES.items():
        value = body.get(key)
        number = type(value) is int or type(value) is float and most <= 2
        if value is not None and not (number and least <= value <= most):
            raise ValueError(f"{key}: expected a number from {least} to {most}")
    chat = []
    for message in said:
        role, content = at(message, "role"), at(message, "content")
        texts = [at(part, "text") for part in content] if isinstance(content, list) else [content or ""]
        if role not in ROLES or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"expected messages of text alone whose role is one of {', '.join(ROLES)}")
        chat.append({"role": "system" if role == "developer" else role, "content": "\n".join(texts)})
    return {**body, "messages": chat}


class Handler(BaseHTTPRequestHandler):
    """OpenAI's chat completions on a loopback address. A subclass has `models`, names, and `complete`.

    complete(body) gets a checked request: body["model"] is one of `models`, and body["messages"] a list of
    {"role": "system", "user" or "assistant", "content": str}. It calls `reply` once, or `send_chunk` for each
    piece of a stream and then `end_stream`, or `fail`."""
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    models: list[str] = []
    streaming = False  # whether the head of a stream has been sent

    def answer(self, status: int, data: dict, **headers):
        """Send a whole response. headers: x_name="value"."""
        body = json.dumps(data).encode()
        self.send_head(status, Content_Type="application/json", Content_Length=len(body), **headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_head(self, status: int, **headers):
        if self.close_connection:
            headers["Connection"] = "close"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def fail(self, status: int, message: str, retry: bool = True, code: str | None = None):
        """Answer with an error as OpenAI writes it; within a stream it ends the stream.

        retry=False asks clients that read x-should-retry (OpenAI's own do) not to ask, and pay, again."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"error": {"message": message, "type": kind, "param": None, "code": code}}
        if self.streaming:
            self.send_piece(f"data: {json.dumps(error)}\n\n")
            return self.send_piece("")
        headers = {} if retry else {"x_should_retry": "false"}
        self.answer(status, error, **headers)

    def reply(self, text: str, finish: str = "stop", usage: dict | None = None):
        """Send a whole completion, as a stream of one piece where the request asks for a stream."""
        if self.chat.get("stream"):
            self.send_chunk({"content": text})
            return self.end_stream(finish, usage)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
        self.answer(200, {**self.card, "object": "chat.completion", "choices": [choice], "usage": usage})

    def send_chunk(self, delta: dict, finish: str | None = None, **more):
        """Send an event of a stream. delta: {"content": str}, or {} at the end."""
        choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
        event = {**self.card, "object": "chat.completion.chunk", "choices": choices, **more}
        self.send_piece(f"data: {json.dumps(event)}\n\n")

    def end_stream(self, finish: str = "stop", usage: dict | None = None):
        self.send_chunk({}, finish)
        if usage and at(self.chat, "stream_options", "include_usage"):
            self.send_chunk({}, choices=[], usage=usage)
        self.send_piece("data: [DONE]\n\n")
        self.send_piece("")

    def send_piece(self, text: str):
        """Send a chunk (RFC 9112, 7.1) of a stream: the first begins it, and an empty one ends it. HTTP/1.0,
        which nginx speaks unless told otherwise, knows no chunks: there the connection's end ends it."""
        chunked = self.request_version != "HTTP/1.0"
        if not self.streaming:
            self.streaming = True
            self.close_connection |= not chunked
            headers = {"Transfer_Encoding": "chunked"} if chunked else {}
            self.send_head(200, Content_Type="text/event-stream", Cache_Control="no-cache",
                           X_Accel_Buffering="no", **headers)
            self.send_chunk({"role": "assistant", "content": ""})
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)

    def hung_up(self) -> bool:
        """Whether the client has closed the connection: nobody waits for the answer any more."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:  # There is nothing to read: it waits.
            return False
        except OSError:
            return True

    def handle(self):
        with contextlib.suppress(ConnectionError):  # A client that has gone is no fault of the server.
            super().handle()

    def do_GET(self):
        if self.read_body() is None:
            return
        path = urllib.parse.unquote(self.path.partition("?")[0])
        cards = [{"id": name, "object": "model", "created": 0, "owned_by": "local"} for name in self.models]
        answers = {f"/v1/models/{card['id']}": card for card in cards}
        answers |= {"/health": {"status": "ok"}, "/v1/models": {"object": "list", "data": cards}}
        if path in answers:
            return self.answer(200, answers[path])
        self.fail(404, f"there is nothing at {path}; {PATHS}, and the models are {', '.join(self.models)}")

    do_HEAD = do_GET

    def parse_request(self) -> bool:
        self.streaming = False  # The request before on this connection may have had a stream.
        return super().parse_request()

    def do_POST(self):
        data = self.read_body()
        if data is None:
            return
        if self.path.partition("?")[0] != "/v1/chat/completions":
            return self.fail(404, f"there is nothing to post to at {self.path}; {PATHS}")
        if self.headers.get_content_type() != "application/json":  # Any web page can send the others here.
            return self.fail(415, "expected Content-Type: application/json")
        try:
            self.chat = plain_chat(json.loads(data))
        except (ValueError, RecursionError) as e:
            return self.fail(400, f"expected a chat request in JSON: {e}")
        model = self.chat["model"]
        if model not in self.models:
            text = f"there is no model {model!r}; there are {', '.join(self.models)}"
            return self.fail(404, text, code="model_not_found")
        self.card = {"id": f"chatcmpl-{time.time_ns()}", "created": int(time.time()), "model": model}
        try:
            self.complete(self.chat)
        except ConnectionError:
            raise
        except Exception as bug:  # The client must hear of it, and not ask for the same again.
            traceback.print_exc()
            self.fail(500, f"{type(bug).__name__}: {bug}", retry=False)

    def read_body(self) -> bytes | None:
        """The request's body; None where the request was refused without reading it."""
        length = self.headers.get("Content-Length", "0")
        if not re.fullmatch(r"(?i)(localhost|127\.[\d.]+|\[::1\])(:\d+)?", self.headers.get("Host", "")):
            # A web page whose host's name comes to mean 127.0.0.1 could otherwise use the server.
            return self.refuse(403, "expected a loopback address as Host: a proxy before this server has to "
                                    "send Host: localhost, and then to say itself who may use it")
        if "Transfer-Encoding" in self.headers:
            return self.refuse(411, "expected a Content-Length: an upload in chunks is not supported")
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > MAX_BODY:
            return self.refuse(413, f"expected a Content-Length of at most {MAX_BODY >> 20} MiB")
        return self.rfile.read(int(length))

    def refuse(self, status: int, message: str):
        """Answer without reading the body, and end the connection once the client can have read why."""
        self.close_connection = True
        self.fail(status, message)
        with contextlib.suppress(OSError):  # What is left unread at the end would reset the connection.
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(1)
            while self.connection.recv(1 << 16):
                pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None):
        """The base class's own errors (an unknown method, a bad request line), in JSON too."""
        self.close_connection = True
        self.request_version = self.protocol_version  # which a line that is no HTTP has not
        self.fail(code, message or "a bad request")

    def log_message(self, *args):
        pass


class SpecialistHandler(Handler):
    """The local specialists. A token is a word; sampling parameters mean nothing to them."""
    models = list(SPECIALISTS)

    def complete(self, body: dict):
        if (body.get("response_format") or {"type": "text"}) != {"type": "text"}:
            return self.fail(400, "response_format is not supported: the specialists write plain text")
        time.sleep(self.server.latency)
        text = SPECIALISTS[body["model"]](body["messages"])
        n_in = sum(len(message["content"].split()) for message in body["messages"])
        n_out = len(text.split())
        usage = {"prompt_tokens": n_in, "completion_tokens": n_out, "total_tokens": n_in + n_out}
        self.reply(text, usage=usage)


class Server(ThreadingHTTPServer):
    latency = 0.0  # seconds that a local specialist takes
    request_queue_size = 1024  # With 5, the default, clients that connect at once wait a second.
    server_bind = socketserver.TCPServer.server_bind  # HTTPServer's looks up the host's name, and can hang.


def loopback_server(port: int, handler) -> Server:
    """A server that is bound, not yet started. SystemExit says why it could not be."""
    try:
        return Server(("127.0.0.1", port), handler)
    except (OSError, OverflowError) as e:
        sys.exit(f"cannot serve on 127.0.0.1:{port}: {e}; choose another --port=N (0: any free one)")


def serve_specialists(port: int, child: bool = False, latency: float = 0.0):
    """The specialists on 127.0.0.1 until Ctrl-C, or as a child until stdin ends, however the parent dies."""
    server = loopback_server(port, SpecialistHandler)
    server.latency = latency
    print(f"http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
    if child:
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


@functools.cache
def local_server(latency: float = 0.0) -> tuple[str, subprocess.Popen]:
    """Start the specialists' server, once per process and latency: its URL and process. It gets no key."""
    keep = ("PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TMPDIR")
    process = subprocess.Popen(
        [sys.executable, "-c", f"import workers; workers.serve_specialists(0, True, {latency})"],
        cwd=os.path.dirname(os.path.abspath(__file__)), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={name: os.environ[name] for name in keep if name in os.environ}, text=True,
        start_new_session=True)  # Ctrl-C is the parent's affair.
    url = process.stdout.readline().strip()
    if not url:
        raise WorkerError(f"the local specialists' server ended at its start, with status {process.wait()}")
    return url, process


@dataclass
class Settings:
    pool: str = "local"
    port: int = 8765  # of serve


def main():
    from model import configure  # It brings torch, which the specialists' server does without.
    settings = Settings()
    words = configure(settings, sys.argv[1:])
    if words == ["serve"]:
        return serve_specialists(settings.port)
    if words == ["print"]:
        served = f"http://127.0.0.1:{settings.port}/v1"  # where `serve` has the local ones
        return print(json.dumps(read_pool(settings.pool, served), indent=2))
    if words:
        sys.exit(f"unknown command {' '.join(words)}; there are serve, print, and none to ask the workers")
    failed = False
    pool = load_pool(settings.pool)
    for worker, reply in zip(pool, first_words(pool)):
        told = worker.protocol if worker.model == worker.name else f"{worker.protocol}, {worker.model}"
        if not worker.api_key_env:
            told += "; no api_key_env"
        elif worker.api_key_env not in unset(worker):
            told += f"; {worker.api_key_env} is set"
        if isinstance(reply, Reply):
            told += f"; answers in {reply.seconds:.2f} s"
        else:
            failed = True
            told += str(reply).replace(worker.name + ":", ";", 1)
        print(f"{worker.name:<22}{told}", flush=True)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
