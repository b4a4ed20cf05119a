"""Workers: language models over HTTP or Python functions, pools of them, and the laptop world.

    python workers.py [--pool=NAME]         # ask each for a word: seconds, tokens, dollars, or what is wrong
    python workers.py serve [--port=8765]   # serve the laptop world's specialists to any OpenAI client

NAME is local, local:pairs or local:tired (the laptop world), a name in assets/pools/, or a JSON file: a list
of objects whose keys are Worker's fields. Read workflow.py next."""

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import os
import random
import re
import runpy
import socket
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import asdict, dataclass, field, replace
from email.utils import parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.pool import ThreadPool

import requests
from requests.packages.urllib3 import connection, exceptions  # of which requests is made

FOLDER = os.path.dirname(os.path.abspath(__file__))
LOOPBACK = r"(?i)https?://(127\.[\d.]+|localhost|\[::1\])(:\d+)?(/|$)"
LIMITS = ("max_tokens", "max_completion_tokens")  # the parameters that limit an answer
jitter = (
    random.Random()
)  # Not all calls shall come back at once; the global draws are the experiment's.
connection.HTTPConnection.default_socket_options += [  # A probe a minute keeps a silent line open.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", 0x10), 60),
]  # 0x10: on macOS


def once(function):
    """functools.cache for threads: simultaneous first callers get one and the same result."""
    lock, cached = threading.Lock(), functools.cache(function)

    @functools.wraps(function)
    def locked():
        with lock:
            return cached()

    return locked


class WorkerError(Exception):
    """A call failed or was not made, which is no wrong answer. The text holds no key."""


@dataclass
class Reply:
    text: str  # the model's own words; they may be empty, or cut off
    prompt_tokens: int  # with cached ones; 0 if unknown
    completion_tokens: int  # with those of the reasoning; 0 if unknown
    cost: float | None  # dollars; None: unknown
    seconds: float = 0.0  # of the attempt that was answered
    finish: str = "stop"  # why it ended, in the provider's word; "length": cut off


@dataclass
class Worker:
    """One member of a pool. Any number of threads may call `chat`."""

    protocol: str  # openai, anthropic or python
    base_url: str = ""  # what stands before the protocol's path: https://api.openai.com/v1
    model: str = ""
    name: str = ""  # the model's, or the function's, unless given
    api_key_env: str | None = None  # the environment variable that holds the key
    params: dict = field(
        default_factory=dict
    )  # sent as they are, beside the model and the messages
    headers: dict = field(default_factory=dict, repr=False)  # sent as they are
    price: list | None = None  # dollars per million tokens, [input, output]; None: unknown
    concurrency: int = 16  # calls at a time
    timeout: int | float = (
        600  # seconds that an answer may take; after three times as many no attempt begins
    )
    attempts: int | None = None  # at most; None: as many as `chat` says
    function: str = (
        ""  # FILE.py:NAME of protocol python: it gets the messages, and returns text or a Reply
    )
    replay: object = field(default=None, repr=False)  # a Replay
    budget: object = field(default=None, repr=False)  # a Budget

    def __post_init__(self):
        self.name = self.name or self.model or self.function.rpartition(":")[2]
        self.run_function = load_function(self.function) if self.protocol == "python" else None
        self.session = requests.Session()
        self.session.adapters = {
            "http": requests.adapters.HTTPAdapter(pool_maxsize=self.concurrency)
        }
        self.session.trust_env = not re.match(
            LOOPBACK, self.base_url
        )  # no proxy before one's own machine
        self.session.auth = lambda request: (
            request
        )  # Else a netrc's password would take the key's place.
        self.slots, self.lock = threading.Semaphore(self.concurrency), threading.Lock()
        self.calls = self.unpriced = self.spent = (
            0  # calls, those of unknown cost, dollars, all with replays
        )

    def chat(self, messages: list[dict], call_id: str = "", **overrides) -> Reply:
        """Ask for the next turn of a chat: [{"role": "system", "user" or "assistant", "content": text}, …].
        overrides win over params. call_id names the call within a run: a rerun finds its reply in `replay`;
        `spent` counts it, the budget does not. A busy provider (429, 503, 529) is asked again when it says,
        for three timeouts; after another 5xx, a 408, a 409 or a lost line six times. Raises WorkerError then,
        and at once after a timeout, another 4xx, for a spent account or an unknown host."""
        params = {**self.params, **overrides}
        key = self.replay.key(self, messages, params, call_id) if self.replay and call_id else None
        with (
            self.replay.locks.setdefault(key, threading.Lock()) if key else contextlib.nullcontext()
        ):
            reply = (
                self.replay.replies.get(key) if key else None
            )  # What is asked twice at once is paid once.
            if reply is None:
                with self.slots:
                    reply = self.send(messages, params)
                if key:
                    self.replay.keep(key, reply)
        with self.lock:
            self.calls += 1
            self.spent += reply.cost or 0.0
            self.unpriced += reply.cost is None
        return reply

    def send(self, messages: list[dict], params: dict) -> Reply:
        """Make one attempt after another, as `chat` says."""
        api_key = os.environ.get(self.api_key_env or "", "").strip()
        turns = [m if m["content"].strip() else {**m, "content": "(empty)"} for m in messages]
        path, headers, body = PROTOCOLS[self.protocol][0](self.model, turns, params, api_key)
        most = most_dollars(vars(self), params, body) if self.budget else 0.0
        purse = self.budget or Budget(float("inf"))
        first_sent, failures = time.monotonic(), 0
        for number in itertools.count(1):
            purse.reserve(most)
            started = time.monotonic()
            try:
                if self.run_function:
                    answer = self.run_function(messages)
                    cost = None if any(self.price or []) else 0.0
                    outcome = (
                        answer if isinstance(answer, Reply) else Reply("" + answer, 0, 0, cost)
                    )
                else:
                    with self.session.post(
                        self.base_url.rstrip("/") + path,
                        json=body,
                        stream=True,
                        headers={**headers, **self.headers},
                        allow_redirects=False,
                        timeout=(10, self.timeout),
                    ) as response:
                        outcome = read_response(self, response, started + self.timeout)
            except Exception as e:
                outcome = e if isinstance(e, Failure) else broken(e, time.monotonic() - started)
            purse.settle(most, outcome.cost)
            now = time.monotonic()
            if isinstance(outcome, Reply):
                outcome.seconds = now - started
                return outcome
            failures += not outcome.busy
            pause = min(
                30, self.timeout / 300 * 2 ** min(number - 1, 9)
            )  # 2, 4, 8 … s at a timeout of 600
            pause = max(0.0, outcome.wait or 0.0) + pause * jitter.uniform(0.5, 1)
            late = now + pause > first_sent + 3 * self.timeout
            if late or outcome.wait is None or failures == 6 or number == self.attempts:
                why = "".join(filter(str.isprintable, " ".join(outcome.text.split())))
                for secret in filter(None, [api_key, *self.headers.values()]):
                    why = why.replace(secret, "***")
                raise WorkerError(
                    f"{self.name}: {why[:400]} (attempt {number}, after {now - first_sent:.1f} s)"
                )
            time.sleep(pause)


@dataclass
class Failure(Exception):
    """An attempt without a reply."""

    text: str
    wait: float | None = None  # seconds, at least, to another attempt; None: none would help
    busy: bool = False  # whether the provider is: it may be asked often
    cost: float | None = None  # 0.0 where nothing is billed for sure; None: it may have cost money


# No wait helps where one of these is said of an account, by OpenAI, Anthropic, Google or OpenRouter.
SPENT = (
    "insufficient_quota|billing_not_active|credit balance is too low|credits are depleted|PerDay|per-day"
    "|API usage limits|(spend|usage)_limit_|monthly spending cap|credit_balance_exhausted"
)


def read_response(worker: Worker, response: requests.Response, end: float) -> Reply:
    """The Reply in a response whose body is there by time.monotonic() == end; Failure where there is none."""
    body = bytearray()
    for piece in iter(lambda: response.raw.read1(1 << 16, decode_content=True), b""):
        body += piece
        if len(body) > 32 << 20:
            raise Failure("the response is larger than 32 MiB")
        if time.monotonic() > end:
            raise TimeoutError
    text, data = body.decode("utf-8", "replace").strip(), None
    with contextlib.suppress(ValueError, RecursionError):
        data = json.loads(text)
    if response.status_code != 200 or find(data, "error"):
        raise refusal(response, find(data, "error", "code"), text)
    try:
        text, finish, n_in, n_out = PROTOCOLS[worker.protocol][1](data)
        text = text.encode(
            errors="replace"
        ).decode()  # Half of an emoji, as JSON can spell it, is no text.
    except (LookupError, TypeError, AttributeError, ValueError):
        # OpenRouter sends blanks while it waits, and nothing more if its host dies: only these are unpaid.
        raise Failure(
            f"no reply as {worker.protocol} defines it: {text[:300]!r}", None if text else 0.0
        )
    known = all(type(n) is int and 0 <= n < 1e9 for n in (n_in, n_out))
    cost = find(data, "usage", "cost")  # dollars, by OpenRouter and by our own server
    if type(cost) not in (int, float) or cost <= 0 or find(data, "usage", "is_byok"):
        zeros = text and not n_out and any(worker.price or [])  # as some gateways fill in
        priced = worker.price and known and not zeros
        cost = (n_in * worker.price[0] + n_out * worker.price[1]) / 1e6 if priced else None
    return Reply(
        text, n_in if known else 0, n_out if known else 0, cost, finish=str(finish or "stop")
    )


def refusal(response: requests.Response, code, text: str) -> Failure:
    """What a provider says that does not answer. code: OpenRouter's within a 200, once a model began."""
    status = response.status_code
    if status == 200:
        status = code if code in range(400, 600) else 500
    busy, broke = status in (429, 503, 529), status in (408, 409) or status >= 500
    wait, asked = 0.0, response.headers.get("Retry-After", "")
    with contextlib.suppress(ValueError):  # It is a number of seconds, a date, or nothing of use.
        is_number = re.fullmatch(r"\d+(\.\d+)?", asked)
        wait = float(asked) if is_number else parsedate_to_datetime(asked).timestamp() - time.time()
    if (
        re.search(SPENT, text)
        or response.headers.get("x-should-retry") == "false"
        or not (busy or broke)
    ):
        wait = None
    cost = 0.0 if response.status_code != 200 and (busy or not broke) else None
    return Failure(f"HTTP {status} of {response.url}: {text}", wait, busy, cost)


def broken(error: Exception, seconds: float) -> Failure:
    """Why no whole response came within so many seconds, or what a function raised."""
    if isinstance(error, (requests.ReadTimeout, exceptions.ReadTimeoutError, TimeoutError)):
        return Failure(
            f"no whole answer within {seconds:.3g} s; a slow worker needs a larger timeout"
        )
    cause = (
        getattr(error.args[0] if error.args else None, "reason", None) or error
    )  # urllib3's, in requests'
    lost = isinstance(error, (requests.ConnectionError, exceptions.HTTPError, ConnectionError))
    final = not lost or isinstance(cause, exceptions.NameResolutionError)
    unsent = isinstance(cause, (exceptions.NewConnectionError, exceptions.ConnectTimeoutError))
    return Failure(
        f"{type(cause).__name__}: {cause}", None if final else 0.0, cost=0.0 if unsent else None
    )


def find(data, *path):
    """What stands at this path of names in nested objects; None where nothing does."""
    for name in path:
        data = data.get(name) if isinstance(data, dict) else None
    return data


# ---- Protocols: one function writes path, headers, body; one reads text, why it ended, tokens in and out ---


def openai_request(
    model: str, messages: list[dict], params: dict, api_key: str
) -> tuple[str, dict, dict]:
    """platform.openai.com/docs/api-reference/chat, which OpenRouter, vLLM, Ollama and llama.cpp speak."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return "/chat/completions", headers, {"model": model, "messages": messages, **params}


def openai_reply(data: dict) -> tuple:
    choice, usage = data["choices"][0], data.get("usage") or {}
    if choice.get("finish_reason") == "error" or choice.get(
        "error"
    ):  # OpenRouter's, which it does not bill
        raise Failure(f"the provider failed midway: {choice.get('error')}", wait=0.0, cost=0.0)
    text = choice["message"].get("content") or choice["message"].get("refusal") or ""
    if isinstance(text, list):  # of parts, as Mistral's thinking models answer
        text = "".join(part["text"] for part in text if part["type"] == "text")
    # Some servers leave thoughts in, whole or cut off, which the next worker would read.
    text = re.sub(r"\A(.*</think>\s*|\s*<think>.*)", "", text, flags=re.DOTALL)
    n_in, n_out, total = (usage.get(f"{part}_tokens") for part in ("prompt", "completion", "total"))
    if None not in (n_in, n_out, total):
        n_out = max(n_out, total - n_in)  # Some count the reasoning in the total only.
    return text, choice.get("finish_reason"), n_in, n_out


def anthropic_request(
    model: str, messages: list[dict], params: dict, api_key: str
) -> tuple[str, dict, dict]:
    """platform.claude.com/docs/en/api/messages, which needs max_tokens and takes the system's words apart."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    turns = [message for message in messages if message["role"] != "system"]
    body = {
        "model": model,
        "max_tokens": 4096,
        "messages": turns,
        **({"system": system} if system else {}),
    }
    return (
        "/messages",
        {"x-api-key": api_key, "anthropic-version": "2023-06-01"},
        {**body, **params},
    )


def anthropic_reply(data: dict) -> tuple:
    usage = data.get("usage") or {}
    cached = [usage.get(f"cache_{part}_input_tokens") or 0 for part in ("creation", "read")]
    n_in = (
        usage["input_tokens"] + sum(cached) if "input_tokens" in usage else None
    )  # as the others count
    text = "".join(part["text"] for part in data["content"] if part["type"] == "text")
    cut_off = data.get("stop_reason") in ("max_tokens", "model_context_window_exceeded")
    return text, "length" if cut_off else data.get("stop_reason"), n_in, usage.get("output_tokens")


PROTOCOLS = {
    "openai": (openai_request, openai_reply),
    "anthropic": (anthropic_request, anthropic_reply),
    "python": (openai_request, None),  # It is not sent; its length bounds what it may cost.
}


@functools.cache
def load_name(spec: str):
    """Run FILE.py and return what NAME stands for in it, or None. spec is FILE.py:NAME."""
    path, _, name = spec.rpartition(":")
    if not os.path.isfile(path):
        raise ValueError(f"{spec}: no file {path!r}; expected FILE.py:NAME")
    try:
        return runpy.run_path(path).get(name)
    except Exception as e:
        raise ValueError(f"{path} cannot be imported: {type(e).__name__}: {e}") from e


def load_function(spec: str):
    """Run FILE.py and return its function NAME. spec is FILE.py:NAME."""
    function = load_name(spec)
    if not callable(function):
        path, _, name = spec.rpartition(":")
        raise ValueError(f"{path} has no function {name}")
    return function


# ---- Pools, and what they cost -----------------------------------------------------------------------------

FIELDS = {  # of a worker in a file: a pattern for its value as JSON, and the same in words
    "protocol": ('"(openai|anthropic|python)"', "openai, anthropic or python"),
    "base_url": (
        r'"https?://[^"/@?#\s]+(/[^"?#\s]*)?"',
        "http(s)://HOST/…, without a password or a query",
    ),
    "model": ('".+"', "its name at the provider"),
    "name": ('".+"', "a text"),
    "api_key_env": ('"[A-Z][A-Z0-9_]*"', "the name of a variable, in capitals, not the key"),
    "params": (
        r'\{(?!.*"(n|stream)":).*\}',
        "an object without n and stream: a call gives one whole reply",
    ),
    "headers": (r'\{("[^"]*": "[^"]*"(, )?)*\}', "an object of texts"),
    "price": (r"\[\d[\d.e-]*, \d[\d.e-]*\]", "[input, output], dollars per million tokens"),
    "concurrency": (r"[1-9]\d{0,5}", "a whole number above 0"),
    "attempts": (r"[1-9]\d{0,5}", "a whole number above 0"),
    "timeout": (r"(?=.*[1-9])\d{1,6}(\.\d+)?", "seconds, above 0"),
    "function": (r'".+:\w+"', "FILE.py:NAME, the file beside the pool's"),
}


def read_pool(spec: str, local_url: str | None = None) -> list[dict]:
    """The entries of a pool, by name or JSON file, unchecked; ValueError says what there is. A local pool
    starts the specialists' server, unless local_url names a running one."""
    if spec in LOCAL:
        same = {"protocol": "openai", "base_url": local_url or local_server()[0], "price": [0, 0]}
        return [{**same, "model": name} for name in LOCAL[spec]]
    if not spec:
        raise ValueError("no workers are named: say --pool=NAME or --pool=FILE.json")
    pools = os.path.join(FOLDER, "assets", "pools")
    named = sorted(file.removesuffix(".json") for file in os.listdir(pools))
    path = os.path.join(pools, f"{spec}.json") if spec in named else os.path.abspath(spec)
    try:
        with open(path, encoding="utf-8") as file:
            rows = json.load(file)
        entries = [{key: value for key, value in row.items() if value is not None} for row in rows]
        if not entries:
            raise ValueError("no workers")
    except (OSError, ValueError, TypeError, AttributeError) as e:
        known = f"there are {', '.join([*LOCAL, *named])}, or a JSON list of objects of {', '.join(FIELDS)}"
        raise ValueError(f"--pool={spec}: {e}; {known}") from None
    for entry in entries:
        if "function" in entry:  # Its file stands beside the pool's.
            entry["function"] = os.path.join(os.path.dirname(path), str(entry["function"]))
    return entries


def name_of(entry: dict) -> str:
    return (
        entry.get("name") or entry.get("model") or str(entry.get("function", "")).rpartition(":")[2]
    )


def check_pool(entries: list[dict], budget: float = 0.0) -> list[str]:
    """All that is missing or odd, by worker and field, without its value, which may be a misplaced key."""
    sentences, names = [], []
    for number, entry in enumerate(entries):
        needed = (
            ["function"] if entry.get("protocol") == "python" else ["protocol", "base_url", "model"]
        )
        wrong = {}
        for key in [*entry, *needed]:
            pattern, expected = FIELDS.get(key, ("", f"one of {', '.join(FIELDS)}"))
            if not re.fullmatch(pattern, json.dumps(entry.get(key))):
                wrong[key] = f"expected {expected}"
        variable = entry.get("api_key_env")
        if variable and "api_key_env" not in wrong and not os.environ.get(variable):
            wrong["api_key_env"] = f"${variable} is not set"
        file = str(entry.get("function", "")).rpartition(":")[0]
        if file and not os.path.isfile(file):
            wrong["function"] = f"there is no file {file}"
        if budget and not wrong.keys() & {"protocol", "price", "params"}:
            if most_dollars(entry, entry.get("params", {}), {}) == float("inf"):
                wrong["price, params"] = (
                    "a budget needs a price (of your own: [0, 0]) and max_tokens"
                )
        names.append(name_of(entry) or f"worker {number}")
        if names[-1] in names[:-1]:
            wrong["name"] = "another worker has it, too"
        sentences += [f"{names[-1]}: {key}: {sentence}" for key, sentence in wrong.items()]
    return sentences


def load_pool(
    spec: str, local_url: str | None = None, replay: str = "", budget: float = 0.0, ranks: int = 1
) -> list[Worker]:
    """The workers of a pool. replay: a file of replies. budget: dollars that they may spend together; 0: no
    limit. ranks: how many processes share budget and concurrency. ValueError says all that is wrong."""
    entries = read_pool(spec, local_url)
    problems = check_pool(entries, budget)
    if problems:
        raise ValueError("\n".join([f"--pool={spec}:", *problems]))
    kept, purse = Replay(replay) if replay else None, Budget(budget / ranks) if budget else None
    pool = [Worker(**entry, replay=kept, budget=purse) for entry in entries]
    return [replace(worker, concurrency=max(1, worker.concurrency // ranks)) for worker in pool]


def ping_workers(pool: list[Worker]) -> list[Reply | WorkerError]:
    """Ask each worker for a word, all at once; an empty one is an error."""

    def ask(worker):
        try:
            hurried = replace(worker, timeout=min(worker.timeout, 120), attempts=2)
            reply = hurried.chat([{"role": "user", "content": "Say hello."}])
        except WorkerError as e:
            return e
        return (
            reply
            if reply.text.strip()
            else WorkerError(f"{worker.name}: an empty answer to a hello")
        )

    with ThreadPool(len(pool)) as threads:
        return threads.map(ask, pool)


class Replay:
    """Replies in a file, a JSON line each: what a killed run has paid for is free when it is run again. As
    processes share the file, a line is one write, and begins with its newline: a torn one harms no other."""

    def __init__(self, path: str):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.replies, self.locks = {}, {}  # by key
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                with contextlib.suppress(ValueError, TypeError, KeyError):  # a torn line
                    row = json.loads(line)
                    self.replies[row["key"]] = Reply(**row["reply"])

    def key(self, worker: Worker, messages: list[dict], params: dict, call_id: str) -> str:
        url = "" if re.match(LOOPBACK, worker.base_url) else worker.base_url  # Ports change.
        asked = [
            worker.name,
            worker.protocol,
            url,
            worker.model + worker.function,
            messages,
            params,
            call_id,
        ]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    def keep(self, key: str, reply: Reply):
        self.replies[key] = reply
        os.write(self.file, f"\n{json.dumps({'key': key, 'reply': asdict(reply)})}".encode())


class Budget:
    """Dollars that a pool may spend. An attempt reserves the most that it can cost, and returns what it did
    not: so the budget is never passed. One of unknown cost counts whole."""

    def __init__(self, dollars: float):
        self.dollars = self.left = dollars
        self.room = threading.Condition()
        self.running = 0  # attempts
        self.refused = False  # whether a call has been, for want of money

    def reserve(self, most: float):
        with self.room:
            self.room.wait_for(
                lambda: most <= self.left or not self.running
            )  # Others may give some back.
            if most > self.left:
                self.refused = True
                raise WorkerError(
                    f"the budget of ${self.dollars:g} is spent, but for ${self.left:.4f}"
                )
            self.left -= most
            self.running += 1

    def settle(self, most: float, cost: float | None):
        with self.room:
            self.left += 0.0 if cost is None else most - cost
            self.running -= 1
            self.room.notify_all()


def most_dollars(entry: dict, params: dict, body: dict) -> float:
    """Dollars that a call can cost: infinitely many where nobody knows the price or the most tokens."""
    price = entry.get("price") or ([0, 0] if entry["protocol"] == "python" else None)
    limits = [params[name] for name in LIMITS if name in params]
    if price and not any(price):
        return 0.0
    if price is None or not limits or not all(type(limit) is int and limit > 0 for limit in limits):
        return float("inf")
    dearest = (
        find(params, "provider", "max_price") or {}
    )  # OpenRouter may choose a host up to this price.
    n_in = len(json.dumps(body)) + 512  # A token is at least a byte, and a chat template adds some.
    dollars_in = max(price[0], dearest.get("prompt", 0)) * n_in
    return (dollars_in + max(price[1], dearest.get("completion", 0)) * max(limits)) / 1e6


def probable_cost(pool: list[Worker] | list[dict], calls: int) -> float | None:
    """Dollars for evenly spread calls of 1,000 tokens in and 700 out; None where a price is unknown.
    A function and a server on loopback are free unless they have a price."""
    entries = [worker if isinstance(worker, dict) else vars(worker) for worker in pool]
    own = [
        e.get("protocol") == "python" or re.match(LOOPBACK, str(e.get("base_url"))) for e in entries
    ]
    prices = [
        entry.get("price") or ([0, 0] if is_own else None) for entry, is_own in zip(entries, own)
    ]
    if not all(re.fullmatch(FIELDS["price"][0], json.dumps(price)) for price in prices):
        return None
    return sum(1000 * price[0] + 700 * price[1] for price in prices) / 1e6 * calls / len(pool)


def demand_budget(pool: list[Worker] | list[dict], budget: float, calls: int, what: str):
    """Print what `what` probably costs. ValueError where it costs money and has no budget."""
    cost = probable_cost(pool, calls)
    if cost != 0.0:
        cost = "nobody knows how much" if cost is None else f"probably ${cost:,.2f}"
        sentence = f"{what} costs money, {cost} for {calls:,} calls"
        if not budget:
            raise ValueError(f"{sentence}: say --budget=DOLLARS")
        print(sentence, flush=True)


# ---- The laptop world: small honest programs that see what a worker sees, never the answer; their questions
# Another trade is a row of TRADES, what it knows, and rows of KINDS that need it.

QUESTION, TASK = "Question:\n", "Your task:\n"  # how workflow.py words a turn
SKILL = {"": 1.0, "junior": 0.6, "tired": 0.7}  # how likely one of that sort is not to give up
FRAMES = (
    "What is {}?",
    "Find {}.",
    "Tell me {}.",
    "Give me {}.",
)  # the sentences around an expression
SIGNS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
SPELLINGS = {  # what a question says -> the coder's instruction, and what it does to a word
    "turned around": ("Reverse it.", lambda word: word[::-1]),
    "shouted": ("Write it in capitals.", str.upper),
    "thinned out": ("Leave out the vowels.", lambda word: re.sub("[aeiouAEIOU]", "", word)),
}

# A worker obeys an instruction of its own trade. Of the messages with a vague instruction, or with
# none, it works on this share; of those with an instruction of another trade, on that one.
VAGUE_WORKS, OTHERS_WORK = 0.7, 0.3
VAGUE = ("Work it out.", "Find the value.")
SOLVE_IT = "Solve the question."  # vague, too: what systems without subtasks tell every worker

NUMERALS, ELEMENTS, COUNTRIES, WORDS = (
    words.split()
    for words in """
uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince dieciséis diecisiete
dieciocho diecinueve veinte veintiuno veintidós veintitrés veinticuatro veinticinco veintiséis veintisiete
veintiocho veintinueve treinta;
hydrogen helium lithium beryllium boron carbon nitrogen oxygen fluorine neon sodium magnesium aluminium
silicon phosphorus sulfur chlorine argon potassium calcium scandium titanium vanadium chromium manganese iron
cobalt nickel copper zinc;
Austria-Vienna Belgium-Brussels Chile-Santiago Cuba-Havana Denmark-Copenhagen Egypt-Cairo Finland-Helsinki
France-Paris Germany-Berlin Ghana-Accra Greece-Athens Hungary-Budapest Iceland-Reykjavik Iran-Tehran
Iraq-Baghdad Ireland-Dublin Italy-Rome Japan-Tokyo Jordan-Amman Kenya-Nairobi Lebanon-Beirut Libya-Tripoli
Nepal-Kathmandu Norway-Oslo Peru-Lima Poland-Warsaw Portugal-Lisbon Qatar-Doha Russia-Moscow Senegal-Dakar
Spain-Madrid Sweden-Stockholm Syria-Damascus Thailand-Bangkok Tunisia-Tunis Uruguay-Montevideo;
planet river garden window market silver dragon castle forest bridge winter summer orange yellow purple candle
basket rocket guitar violin doctor farmer sailor pirate monkey rabbit turtle spider butter cheese pepper
ginger cotton velvet marble copper bronze tunnel harbor island desert valley meadow canyon glacier volcano
thunder shadow mirror""".split(";")
)
DIGITS = {str(n): str(n) for n in range(2, 40)}
SPANISH = {word: str(n) for n, word in enumerate(NUMERALS, 1)}
NUMBERS = {f"the atomic number of {element}": str(n) for n, element in enumerate(ELEMENTS, 1)}
NAMES = {f"element number {n}": element for n, element in enumerate(ELEMENTS, 1)}
CITIES = dict(f"the capital of {pair}".split("-") for pair in COUNTRIES)
FACTS = {**NUMBERS, **CITIES, **NAMES}

TRADES = {  # name -> a pattern of what it understands, and what each instruction makes of a match
    "calculator": (
        r"\b(\d{1,6}) ([-+*]) (\d{1,6})\b",
        {"Calculate it.": lambda m: str(SIGNS[m[2]](int(m[1]), int(m[3])))},
    ),
    "translator": (r"\w+", {"Translate it.": lambda m: SPANISH.get(m[0], m[0])}),
    "librarian": (
        r"the (atomic number|capital) of \w+|element number \d+",
        {"Look it up.": lambda m: FACTS.get(m[0], m[0])},
    ),
    "coder": (
        rf"\b(\w+) ({'|'.join(SPELLINGS)})",
        {
            instruction: lambda m, spell=spell: spell(m[1])
            for instruction, spell in SPELLINGS.values()
        },
    ),
}
# The subtasks of random workflows.
PHRASES = (*VAGUE, *itertools.chain(*(instructions for _, instructions in TRADES.values())))
LOCAL = {
    "local": [*TRADES, "generalist"],
    "local:pairs": [
        f"{sort}{trade}" for trade in TRADES for sort in ("", "junior ")
    ],  # a weaker one too
    "local:tired": [
        f"{sort}{trade}" for trade in TRADES for sort in ("tired ", "junior ")
    ],  # on a bad day
}


def sums(left: dict, right: dict) -> dict:
    """Every sum, difference and product of two expressions, with its value."""
    triples = itertools.product(left, right, SIGNS)
    return {
        f"{a} {sign} {b}": str(SIGNS[sign](int(left[a]), int(right[b]))) for a, b, sign in triples
    }


def spelled(values: dict) -> dict:
    """Return every expression with every wish of how to spell its value."""
    pairs = itertools.product(values.items(), SPELLINGS.items())
    return {f"{name} {wish}": spell(value) for (name, value), (wish, (_, spell)) in pairs}


KINDS = {  # of question: whom it needs, and its expressions with their values
    "arithmetic": (["calculator"], sums(DIGITS, DIGITS)),
    "fact": (["librarian"], FACTS),
    "string": (["coder"], spelled({word: word for word in WORDS})),
    "number": (["translator"], SPANISH),
    "foreign": (["translator", "calculator"], sums(SPANISH, SPANISH)),
    "fact+arithmetic": (["librarian", "calculator"], sums(NUMBERS, DIGITS)),
    "capital+string": (["librarian", "coder"], spelled(CITIES)),
    "element+string": (["librarian", "coder"], spelled(NAMES)),
    "foreign+fact+arithmetic": (["librarian", "translator", "calculator"], sums(NUMBERS, SPANISH)),
}


def laptop_questions(split: str) -> list[tuple[str, str, str]]:
    """(kind, question, answer) of all kinds. A quarter of each kind's expressions is for "test", the others
    for "train", whatever the sentence around them."""
    return [
        (kind, frame.format(name), answer)
        for kind, (_, values) in KINDS.items()
        for name, answer in values.items()
        if (zlib.crc32(name.encode()) % 4 == 0) == (split == "test")
        for frame in FRAMES
    ]


def hashed(what: str, asked) -> float:
    """A number in [0, 1) that is a hash of what was asked: asked the same, a specialist says the same."""
    digest = hashlib.sha256(json.dumps([what, asked]).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


def rewrite(text: str, trade: str, instruction: str) -> str:
    """Return the text with a trade's work done in it, or "" where there is nothing to do.

    The rest of the text stays, so that another worker can continue:
    rewrite("Find dos + 3.", "translator", "Translate it.") is "Find 2 + 3.".
    """
    pattern, works = TRADES[trade]
    rewritten = re.sub(pattern, works[instruction], text)
    # "What is 7?" becomes "7".
    answer = re.sub(r"^(?:What is|Find|Tell me|Give me) (\S+)[?.]\Z", r"\1", rewritten)
    return answer if rewritten != text else ""


def guess(trade: str, question: str) -> str:
    """Return one of a trade's instructions, always the same for a question."""
    own = list(TRADES[trade][1])
    return own[int(len(own) * hashed("order", question))]


def instruction_heard(trade: str, subtask: str, question: str, messages: list[dict]) -> str:
    """Return the instruction that a worker of this trade follows, or "" if it does not know what to do."""

    def is_told(instruction):
        words = re.escape(instruction.rstrip("."))
        return re.search(rf"\b{words}\b", subtask, re.IGNORECASE)

    own = list(filter(is_told, TRADES[trade][1]))
    if own:
        return own[0]
    if any(is_told(instruction) for instruction in PHRASES if instruction not in VAGUE):
        share = OTHERS_WORK
    elif not subtask or any(map(is_told, (*VAGUE, SOLVE_IT))):
        share = VAGUE_WORKS
    else:
        share = 0.0
    works = hashed(f"{trade} listens", messages) < share
    return guess(trade, question) if works else ""


def specialist(name: str, messages: list[dict]) -> str:
    """Return what a local worker says.

    A worker of a trade works on the last response that it is shown, otherwise on the question. The
    question is in the last user turn that begins with QUESTION; an earlier conversation may precede
    it. The generalist tries every trade on one prompt in eight.
    """
    # Find the question, the responses after it, and the subtask.
    users = [i for i, message in enumerate(messages) if message["role"] == "user"] or [0]
    asking = [i for i in users if messages[i]["content"].startswith(QUESTION)] or users
    asked, *later = messages[asking[-1] :]
    question = asked["content"].removeprefix(QUESTION).partition("\n\n" + TASK)[0]
    responses = [message["content"] for message in later if message["role"] == "assistant"]
    subtask = messages[-1]["content"].partition(TASK)[2].strip()

    # Answer in the worker's manner.
    if name == "generalist":
        chance = hashed(name, messages)
        if chance >= 1 / 8:
            return f"I think it is {chance * 100:.0f}."
        answers = [rewrite(question, trade, guess(trade, question)) for trade in TRADES]
        return next(filter(None, answers), f"I think it is {chance * 100:.0f}.")
    sort, _, trade = name.rpartition(" ")
    if hashed(sort, messages) >= SKILL[sort]:
        return "I have lost the thread."
    instruction = instruction_heard(trade, subtask, question, messages)
    if not instruction:
        return f"I am a {trade}; I do not know what to do."
    text = [question, *responses][-1]
    return rewrite(text, trade, instruction) or f"I am a {trade}; I find nothing here to work on."


# ---- The server: OpenAI's chat completions on loopback, for the specialists and for workflow.py ------------


class Handler(BaseHTTPRequestHandler):
    """A subclass has `models`, names, and `complete`, which gets a request's body; body["messages"] is a list
    of {"role": "system", "user" or "assistant", "content": text}. It calls `reply` or `fail` once, and before
    that `send_comment` as often as it likes, where body["stream"] is true."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    roles = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
    models: list[str] = []
    streaming = False  # whether a stream has first_sent: the connection ends with it

    def answer(self):
        """Answer one request, by its path, or say what is wrong with it."""
        asked = f"{self.command} {self.path}".partition("?")[0]
        length = re.fullmatch(r"\d{1,8}", self.headers.get("Content-Length", ""))
        data = self.rfile.read(int(length[0])) if length else b""
        cards = [
            {"id": name, "object": "model", "created": 0, "owned_by": "us"} for name in self.models
        ]
        pages = {
            "GET /health": {"status": "ok"},
            "GET /v1/models": {"object": "list", "data": cards},
        }
        if asked in pages:
            return self.send(200, pages[asked])
        if asked != "POST /v1/chat/completions":
            return self.fail(
                404, f"no {asked}; there are {', '.join(pages)}, POST /v1/chat/completions"
            )
        is_local = re.match(LOOPBACK, f"http://{self.headers.get('Host')}")
        if not length or not is_local or self.headers.get_content_type() != "application/json":
            self.close_connection = True
            # A web page may send other types here, or from a host that comes to mean 127.0.0.1.
            return self.fail(
                403, "send Content-Type: application/json, Host: localhost and a Content-Length"
            )
        try:
            self.body, messages = json.loads(data), []
            for message in self.body["messages"]:
                content = message["content"] or ""  # a text, null, or a list of parts
                texts = (
                    [content] if isinstance(content, str) else [part["text"] for part in content]
                )
                messages.append({"role": self.roles[message["role"]], "content": "\n".join(texts)})
            self.body["messages"], model, _ = messages, self.body["model"], messages[0]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return self.fail(
                400,
                'expected {"model": NAME, "messages": [{"role": ROLE, "content": TEXT}]}; '
                f"a role is one of {', '.join(self.roles)}",
            )
        if model not in self.models:
            return self.fail(
                404, f"there is no model {model!r}; there are {', '.join(self.models)}"
            )
        self.card = {
            "id": f"chatcmpl-{time.time_ns()}",
            "created": int(time.time()),
            "model": model,
        }
        try:
            self.complete(self.body)
        except Exception as bug:  # The client has to hear of it, too.
            self.fail(500, f"{type(bug).__name__}: {bug}", retry=False)
            raise

    do_GET = do_POST = answer

    def send(self, status: int, data: dict, **headers):
        """Send a response in JSON."""
        body = json.dumps(data).encode()
        self.send_response(status)
        headers |= {"Content-Type": "application/json", "Content-Length": len(body)}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def fail(self, status: int, message: str, retry: bool = True):
        """Answer with an error as OpenAI writes it. retry=False: not to be asked, and paid, again."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"error": {"message": message, "type": kind, "param": None, "code": None}}
        if self.streaming:
            return self.send_piece(f"data: {json.dumps(error)}\n\n")
        self.send(status, error, **({} if retry else {"x-should-retry": "false"}))

    def reply(self, text: str, finish: str = "stop", usage: dict | None = None, **extra):
        """Answer with a completion. extra: further fields, which clients pass over."""
        if self.body.get("stream"):
            self.send_event({"content": text}, finish, usage=usage, **extra)
            return self.send_piece("data: [DONE]\n\n")
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": finish,
        }
        self.send(
            200,
            self.card | {"object": "chat.completion", "choices": [choice], "usage": usage} | extra,
        )

    def send_comment(self, text: str):
        """Break the silence of a stream: clients pass over comments."""
        self.send_piece(f": {text}\n\n")

    def send_event(self, delta: dict, finish: str | None = None, **fields):
        choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
        event = {**self.card, "object": "chat.completion.chunk", "choices": choices, **fields}
        self.send_piece(f"data: {json.dumps(event)}\n\n")

    def send_piece(self, text: str):
        """Send a part of a stream. The first begins it; it ends with the connection, as also in HTTP/1.0."""
        if not self.streaming:
            self.streaming = self.close_connection = True
            head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
            self.wfile.write(head.encode())
            self.send_event({"role": "assistant", "content": ""})
        self.wfile.write(text.encode())

    def hung_up(self) -> bool:
        """Whether the client has closed the connection: nobody waits for the answer any more."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except OSError as e:
            return not isinstance(
                e, BlockingIOError
            )  # which says that there is nothing to read: it waits

    def handle(self):
        with contextlib.suppress(
            ConnectionError
        ):  # A client that has gone is no fault of the server.
            super().handle()

    def log_message(self, *args):
        pass


class SpecialistHandler(Handler):
    """The local specialists. A token is a word."""

    models = list(dict.fromkeys(itertools.chain(*LOCAL.values())))

    def complete(self, body: dict):
        text = specialist(body["model"], body["messages"])
        n_in, n_out = sum(len(m["content"].split()) for m in body["messages"]), len(text.split())
        self.reply(
            text, usage=dict(prompt_tokens=n_in, completion_tokens=n_out, total_tokens=n_in + n_out)
        )


def loopback_server(port: int, handler: type[Handler]) -> ThreadingHTTPServer:
    """A server that is bound, not yet started; ValueError says why it could not be."""
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    except (OSError, OverflowError) as e:
        raise ValueError(
            f"cannot serve on 127.0.0.1:{port}: {e}; choose another --port=N (0: any)"
        ) from None
    server.socket.listen(
        1024
    )  # With a queue of 5, the default, clients that connect at once wait a second.
    return server


def serve_specialists(port: int, wait=threading.Event().wait):
    """The specialists on 127.0.0.1 until `wait` returns."""
    server = loopback_server(port, SpecialistHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
    wait()


@once
def local_server() -> tuple[str, subprocess.Popen]:
    """The specialists' server, once a process: its URL and process, which gets no key and ends with us."""
    keep = (
        "PATH",
        "HOME",
        "LANG",
        "LC_ALL",
        "PYTHONPATH",
        "PYTHONHOME",
        "LD_LIBRARY_PATH",
        "TMPDIR",
    )
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys, workers; workers.serve_specialists(0, sys.stdin.read)"],
        cwd=FOLDER,
        env={name: os.environ[name] for name in keep if name in os.environ},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )  # Ctrl-C is the parent's.
    return process.stdout.readline().strip(), process


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("command", nargs="?", choices=["serve"])
    parser.add_argument("--pool", default="local")
    parser.add_argument("--port", type=int, default=8765)
    settings = parser.parse_args()
    if settings.command == "serve":
        return serve_specialists(settings.port)
    pool = load_pool(settings.pool)
    words = ping_workers(pool)
    for worker, word in zip(pool, words):
        if isinstance(word, Reply):
            cost = "unknown cost" if word.cost is None else f"${word.cost:.6f}"
            tokens = word.prompt_tokens + word.completion_tokens
            word = f"{worker.name:<24}{word.seconds:.2f} s, {tokens} tokens, {cost}"
        print(word)
    sys.exit(any(isinstance(word, WorkerError) for word in words))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, KeyboardInterrupt) as e:
        sys.exit(str(e) or "interrupted")
