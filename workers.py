"""Workers: LLMs behind raw HTTP, pools of them, and the local specialists.

    python workers.py [--pool=local|paper|paper:unconstrained|FILE.json]  # list the pool, say which keys are set, ping all
    python workers.py serve [--port=8765]                                 # the local specialists, for any OpenAI client
    python workers.py --bench                                             # 256 workflows at once: wall time, CPU time of a call

`chat` turns messages into a Reply or raises WorkerError: what a model said and what went wrong on the way never mix.
Keys are read from the environment at each call and kept nowhere. Read next: workflow.py.
"""
import atexit
import contextlib
import email.utils
import functools
import hashlib
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
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import requests
from requests.packages import urllib3  # which requests is made of

CONNECT, BACKOFF, BACKOFF_MAX = 10.0, 0.5, 30.0  # seconds: to reach a host; longest wait before the first retry, before any retry
MAX_BODY = 32 << 20  # bytes of a response; honest ones stay below 1 MB
jitter = random.Random()  # not the global generator, whose draws are the experiment's


class WorkerError(Exception):
    """Transport or provider failed for good; never a wrong answer. The text names the worker and holds no key."""

    def __init__(self, text: str, retry: bool = False, wait: float = 0.0, billed: bool = True):
        super().__init__(text)
        self.retry, self.wait = retry, wait  # may another attempt succeed; the seconds that the provider asks for before it
        self.billed = billed  # may the attempt cost something


@dataclass
class Reply:
    text: str  # the model's own words; empty and cut-off ones too
    prompt_tokens: int  # cached ones included
    completion_tokens: int  # reasoning included
    cost: float | None  # dollars; None where the price or the usage is unknown
    seconds: float  # with retries, without the wait for a free slot
    finish: str = "stop"  # or "length" (cut off), "refusal" (the model's or a filter's), else the provider's own word


# Protocols: model, messages, params -> path, body; and the response's JSON -> text, finish, tokens in, tokens out.
# max_tokens, temperature, top_p and top_k mean the same in all three; other params go into the body as they are.
FINISH = {"end_turn": "stop", "stop_sequence": "stop", "STOP": "stop", "max_tokens": "length", "MAX_TOKENS": "length",
          "model_context_window_exceeded": "length", "content_filter": "refusal", "SAFETY": "refusal", "RECITATION": "refusal",
          "BLOCKLIST": "refusal", "PROHIBITED_CONTENT": "refusal", "SPII": "refusal"}
SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "logit_bias")


def openai_request(model, messages, params):
    """platform.openai.com/docs/api-reference/chat; also vLLM, Ollama, llama.cpp, OpenRouter, Together."""
    if re.match(r"(openai/)?(o\d|gpt-5(?!-chat)|gpt-[6-9])", model):  # .../docs/guides/reasoning: 400 to other params
        params = {"max_completion_tokens" if k == "max_tokens" else k: v for k, v in params.items() if k not in SAMPLING}
    return "/chat/completions", {"model": model, "messages": messages, **params}


def openai_reply(data):
    choice, usage = data["choices"][0], data.get("usage") or {}
    if choice.get("error"):  # OpenRouter, when its provider fails midway
        raise WorkerError(f"the provider failed midway: {choice['error']}", retry=True)
    text, refusal = choice["message"].get("content"), choice["message"].get("refusal")
    finish = "refusal" if refusal else choice.get("finish_reason")
    return text or refusal or "", finish, usage.get("prompt_tokens"), usage.get("completion_tokens")


def anthropic_request(model, messages, params):
    """platform.claude.com/docs/en/api/messages: max_tokens is required, system is no turn, no turn may be blank."""
    turns = [{**m, "content": m["content"] if m["content"].strip() else "(empty)"} for m in messages if m["role"] != "system"]
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    return "/messages", {"model": model, "max_tokens": 4096, "messages": turns, **params} | ({"system": system} if system else {})


def anthropic_reply(data):
    usage, text = data.get("usage") or {}, "".join(block["text"] for block in data["content"] if block["type"] == "text")
    n_in = usage.get("input_tokens")
    if n_in is not None:  # unlike the others', without what was read from the cache or written to it
        n_in += (usage.get("cache_read_input_tokens") or 0) + (usage.get("cache_creation_input_tokens") or 0)
    return text, data.get("stop_reason"), n_in, usage.get("output_tokens")


def gemini_request(model, messages, params):
    """ai.google.dev/api/generate-content; params beyond the four common ones are generationConfig's own, like thinkingConfig."""
    names, roles = {"max_tokens": "maxOutputTokens", "top_p": "topP", "top_k": "topK"}, {"user": "user", "assistant": "model"}
    turns = [{"role": roles[m["role"]], "parts": [{"text": m["content"] or "(empty)"}]} for m in messages if m["role"] in roles]
    body = {"contents": turns, "generationConfig": {names.get(k, k): v for k, v in params.items()}}
    system = [{"text": m["content"]} for m in messages if m["role"] == "system"]
    return f"/models/{model}:generateContent", body | ({"systemInstruction": {"parts": system}} if system else {})


def gemini_reply(data):
    usage, blocked = data.get("usageMetadata") or {}, (data.get("promptFeedback") or {}).get("blockReason")
    candidate = {"finishReason": "SAFETY"} if blocked and not data.get("candidates") else data["candidates"][0]
    parts = (candidate.get("content") or {}).get("parts") or []  # none also when thinking used up maxOutputTokens
    text = "".join(part.get("text", "") for part in parts if not part.get("thought"))
    n_out = usage.get("candidatesTokenCount", 0) + usage.get("thoughtsTokenCount", 0) if usage else None
    return text, candidate.get("finishReason"), usage.get("promptTokenCount"), n_out


PROTOCOLS = {"openai": (openai_request, openai_reply, {"Authorization": "Bearer {}"}),
             "anthropic": (anthropic_request, anthropic_reply, {"x-api-key": "{}", "anthropic-version": "2023-06-01"}),
             "gemini": (gemini_request, gemini_reply, {"x-goog-api-key": "{}"})}  # in the URL, a key would land in logs


def seconds_until(retry_after: str) -> float:
    """Retry-After, a number of seconds or a date (RFC 9110, 10.2.3), as seconds from now; 0 if it is neither."""
    try:
        if re.fullmatch(r"\s*\d+(\.\d+)?\s*", retry_after):
            return float(retry_after)
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


class Line(requests.adapters.HTTPAdapter):
    """One kept-alive connection. urllib3 limits the wait for each byte, not for all of them: for that the watchdog cuts it."""
    pool = sock = None

    def open(self, url: str, options: dict):
        """Let requests find the way to the host once, proxy and certificates included; its `send` would for every call, which costs a third
        of it."""
        request = requests.Request("POST", url).prepare()
        pool = self.get_connection_with_tls_context(request, options["verify"], options["proxies"], options["cert"])
        self.cert_verify(pool, request.url, options["verify"], options["cert"])
        self.pool, self.path, kind = pool, self.request_url(request, options["proxies"]), type(pool).ConnectionCls

        def make(**options):
            def connect():
                kind.connect(connection)
                self.sock = connection.sock  # which forgets it while a response without length is read
            connection = kind(**options)
            connection.connect = connect
            return connection
        pool.ConnectionCls = make


ends: dict[Line, float] = {}  # the running exchanges and the time.monotonic() when each must be over


@functools.cache
def watchdog():
    def watch():
        while True:
            time.sleep(0.05)
            for line in [line for line, end in list(ends.items()) if time.monotonic() > end and line.sock]:
                sock = getattr(line.sock, "socket", line.sock)  # urllib3 wraps one for TLS through a TLS proxy
                with contextlib.suppress(OSError, TypeError):  # closed, or no socket. Not an SSLSocket's own: it takes the TLS state from who reads
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
    threading.Thread(target=watch, daemon=True).start()


def exchange(line: Line, url: str, headers: dict, body: bytes, seconds: float, options: dict) -> dict:
    """One POST within so many seconds: the response's JSON object, or a WorkerError that says whether to retry."""
    watchdog()
    got, fault, response = bytearray(), None, None
    ends[line] = end = time.monotonic() + seconds
    try:
        if line.pool is None:
            line.open(url, options)
        response = line.pool.urlopen("POST", line.path, body, headers, retries=False, redirect=False, assert_same_host=False,
                                     timeout=urllib3.Timeout(connect=min(CONNECT, seconds), read=seconds),
                                     preload_content=False, decode_content=False)
        for chunk in response.stream(1 << 16):
            got += chunk
            if len(got) > MAX_BODY:
                response.close()
                raise WorkerError(f"the response is larger than {MAX_BODY >> 20} MiB")
    except (urllib3.exceptions.HTTPError, requests.RequestException, OSError) as e:
        heard = response is not None or isinstance(e, urllib3.exceptions.ReadTimeoutError)
        fault = WorkerError(f"the connection failed: {type(e).__name__}: {e}", retry=True, billed=heard)
    finally:
        del ends[line]
    if time.monotonic() > end:  # the cut can look like a proper end
        raise WorkerError(f"no complete response within {seconds:.3g} s", retry=True)
    if fault:
        raise fault
    try:
        data = json.loads(got)
    except (ValueError, RecursionError):
        data = None
    status, error = response.status, data.get("error") if isinstance(data, dict) else None
    if error and status == 200:  # openrouter.ai/docs/api/reference/errors: once a model has begun, failures come with a 200
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) and code >= 400 else 500
    if status != 200:
        text = error.get("message") if isinstance(error, dict) else error or got.decode("utf-8", "replace")
        refused = status < 500 or response.status in (503, 529)  # overloaded
        raise WorkerError(f"HTTP {status}: {' '.join(str(text).split())}", status in (408, 409, 429) or status >= 500,
                          seconds_until(response.headers.get("Retry-After", "")), billed=not refused)
    if not isinstance(data, dict):
        raise WorkerError(f"the response is no JSON object: {got.decode('utf-8', 'replace')!r}", retry=True)
    return data


class Replay:
    """Replies in one file, a line each, appended as they come: what a killed run had paid for is free when it is run again."""

    def __init__(self, path: str):
        self.file = open(path, "a+b", buffering=0)
        self.file.seek(0)
        lines, newline, torn = self.file.read().rpartition(b"\n")
        if not all(re.match(rb"[0-9a-f]{64} |[0-9a-f]{0,64}$", line) for line in (*lines.splitlines(), torn)):
            raise OSError("the file is there, and is no file of replies")
        self.replies = dict(line.split(b" ", 1) for line in lines.splitlines())
        self.file.truncate(len(lines + newline))  # a kill can tear the last line


class Budget:
    """Dollars that a pool may spend. An attempt first takes what it can cost at most, and then gives back what it did not: what the
    providers report never passes the budget. What a broken attempt took stays taken, unless the provider said that it refused it or hung up without
    a word."""

    def __init__(self, dollars: float):
        self.dollars = self.left = dollars
        self.room, self.running, self.refused = threading.Condition(), 0, False  # refused: whether a call has been

    def take(self, most: float, name: str) -> float:
        """Set it apart, once it is there. Returns the seconds that this took."""
        begun = time.monotonic()
        with self.room:
            self.room.wait_for(lambda: most <= self.left or not self.running)  # those that run will give something back
            if most > self.left:
                self.refused = True
                raise WorkerError(f"{name}: the budget of ${self.dollars:g} is spent, but for ${self.left:.4f}")
            self.left, self.running = self.left - most, self.running + 1
        return time.monotonic() - begun

    def settle(self, back: float):
        with self.room:
            self.left, self.running = self.left + back, self.running - 1
            self.room.notify_all()


@dataclass
class Worker:
    """One entry of a pool. `chat` may be called from any number of threads."""
    protocol: str
    base_url: str  # $VARIABLES are the environment's
    model: str
    name: str = ""  # the model's unless given
    api_key_env: str | None = None  # the variable that holds the key
    params: dict = field(default_factory=dict)
    price: list | None = None  # dollars per million tokens: input, output
    concurrency: int = 16  # calls at a time
    rpm: int | float | None = None  # requests per minute
    timeout: int | float = 120  # seconds for an attempt
    deadline: int | float | None = None  # seconds for all attempts and the waits between them; three timeouts unless given
    attempts: int = 6
    replay: Replay | None = field(default=None, repr=False)
    budget: Budget | None = field(default=None, repr=False)
    letter = ""  # its place in the whole pool: a Conductor that works with subsets knows it by that

    def __post_init__(self):
        for key, kind in type(self).__annotations__.items():  # the errors leave the value out: it may be a misplaced API key
            value = getattr(self, key)
            number = isinstance(value, int | float)
            if not isinstance(value, kind) or number and not 0 < value < 1e6:
                raise ValueError(f"{key} must be {getattr(kind, '__name__', kind)}{', above 0' * number}")
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol must be one of {', '.join(PROTOCOLS)}")
        if not re.fullmatch(r"(https?://[^/@\s]+|\$\w+)(/\S*)?", self.base_url):
            raise ValueError("base_url must be http(s)://host/... without a password, or $VARIABLE")
        if self.api_key_env is not None and not self.api_key_env.isidentifier():
            raise ValueError("api_key_env must be the name of an environment variable, not the key")
        if self.price is not None and [type(p) in (int, float) and 0 <= p < 1e6 for p in self.price] != [True, True]:
            raise ValueError("price must be [input, output] in dollars per million tokens")
        self.name, self.deadline = self.name or self.model, self.deadline or 3 * self.timeout
        self.url = os.path.expandvars(self.base_url).rstrip("/")
        self.slots, self.lock, self.lines, self.turn = threading.Semaphore(self.concurrency), threading.Lock(), [], 0.0
        # Proxies and CA bundle of the environment, found once: left to requests, every call pays for the search.
        self.options = requests.Session().merge_environment_settings(self.url, {}, True, None, None)
        if re.match(r"https?://(127\.|localhost\b|\[::1\])", self.url):
            self.options["proxies"] = {}
        self.calls, self.spent, self.unpriced = 0, 0.0, 0  # replies; their dollars; how many have an unknown cost

    def chat(self, messages: list[dict], nonce: str | None = None, on_text=None, **overrides) -> Reply:
        """Ask the model. messages: [{"role": "system", "user" or "assistant", "content": str}, ...]; overrides win over params.

        on_text(piece) is called with the text as it comes where the protocol is OpenAI's, else once with all of it.

        nonce names this very call within a run (step, question, rollout, workflow step): with it the reply is kept in `replay`.
        WorkerError when transport or provider fail for good. A reply counts in calls, spent and unpriced, also a replayed one."""
        params, known = {**self.params, **overrides}, None
        if keep := self.replay is not None and nonce is not None:
            ask = json.dumps([self.name, self.protocol, self.model, messages, params, nonce], sort_keys=True).encode()
            known = self.replay.replies.get(ask := hashlib.sha256(ask).hexdigest().encode())
        reply = Reply(**json.loads(known)) if known else self.call(messages, params)
        if keep and not known:
            self.replay.file.write(b"%s %s\n" % (ask, json.dumps(asdict(reply)).encode()))
        if on_text:
            on_text(reply.text)
        with self.lock:
            self.calls += 1
            self.spent, self.unpriced = self.spent + (reply.cost or 0), self.unpriced + (reply.cost is None)
        return reply

    def most(self, messages, params) -> float:
        """Dollars that a call can cost: a token is at least a byte, and the answer has an end."""
        n_in = sum(len(m["content"].encode(errors="replace")) + 16 for m in messages)
        n_out = params.get("max_tokens", params.get("max_completion_tokens", math.inf))
        return sum(price * n for price, n in zip(self.price, (n_in, n_out)) if price) / 1e6

    def call(self, messages, params) -> Reply:
        """Over the wire: attempts with exponential backoff, full jitter and Retry-After as a floor, until the deadline."""
        key = os.environ.get(self.api_key_env or "", "").strip()
        if self.url.startswith("$") or self.api_key_env and not re.fullmatch("[!-~]+", key):  # what a header can hold
            raise WorkerError(f"{self.name}: set {self.url if self.url.startswith('$') else self.api_key_env} in the environment")
        request, parse, headers = PROTOCOLS[self.protocol]
        path, body = request(self.model, messages, params)
        headers = {k: v.format(key) for k, v in headers.items() if key or "{}" not in v}
        headers, body = {"Content-Type": "application/json", "Accept-Encoding": "identity", **headers}, json.dumps(body).encode()
        most = self.most(messages, params) if self.budget else 0.0
        with self.slots:
            self.pace()
            begun, line = time.monotonic(), self.lines.pop() if self.lines else Line(pool_connections=1, pool_maxsize=1)
            for attempt in range(1, self.attempts + 1):
                if self.budget:
                    begun += self.budget.take(most, self.name)
                seconds, spent = max(0.001, min(self.timeout, begun + self.deadline - time.monotonic())), most
                try:
                    text, finish, n_in, n_out = parse(exchange(line, self.url + path, headers, body, seconds, self.options))
                    kinds = (text, str), (finish, str | None), (n_in, int | None), (n_out, int | None)
                    if not all(isinstance(value, kind) for value, kind in kinds):
                        raise TypeError("text, stop reason or token counts")
                    cost = None
                    if self.price and n_in is not None and n_out is not None:
                        cost = spent = (n_in * self.price[0] + n_out * self.price[1]) / 1e6
                    break
                except WorkerError as e:
                    fault, spent = e, most if e.billed else 0.0
                except (KeyError, IndexError, TypeError, AttributeError) as e:
                    fault = WorkerError(f"the response is not as {self.protocol} defines it: {type(e).__name__}: {e}", retry=True)
                finally:
                    if self.budget:
                        self.budget.settle(most - spent)
                wait = max(fault.wait, jitter.uniform(0, min(BACKOFF * 2 ** (attempt - 1), BACKOFF_MAX)))
                if not fault.retry or attempt == self.attempts or time.monotonic() + wait > begun + self.deadline:
                    text = str(fault).replace(key or "\0", "***")[:400]  # only now is it cut: half a key would go unnoticed
                    raise WorkerError(f"{self.name}: {text} (attempt {attempt}, after {time.monotonic() - begun:.1f} s)")
                time.sleep(wait)
                begun += self.pace()  # a turn or a budget that is waited for takes nothing from the deadline
            self.lines.append(line)
        text = text.encode(errors="replace").decode()  # half of an emoji, as JSON can spell it, is no text
        return Reply(text, n_in or 0, n_out or 0, cost, time.monotonic() - begun, FINISH.get(finish, finish) or "stop")

    def pace(self) -> float:
        """Wait for a turn under rpm. Returns the seconds that this took."""
        if not self.rpm:
            return 0.0
        begun = time.monotonic()
        with self.lock:
            turn = max(self.turn, begun)
            self.turn = turn + 60 / self.rpm
        time.sleep(max(0.0, turn - time.monotonic()))
        return time.monotonic() - begun


def paper_pool(free: bool) -> list[dict]:
    """§4.1, App. A.1: the seven workers, constrained as in training, or free: with all the tokens and reasoning that each has.

    The open ones are at $OPEN_BASE_URL, say a gateway to vLLM. By their makers' notices Claude Sonnet 4 was retired in June 2026,
    Gemini 2.5 in October 2026, and GPT-5 goes in December 2026: to use their successors, write a pool file."""
    base = {"max_tokens": 32768 if free else 4096, "temperature": 0.2}
    qwen = {**base, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.0}
    gemini = {**base, "max_tokens": 65536 if free else 4096, "thinkingConfig": {"thinkingBudget": 32768 if free else 128}}
    claude = {"max_tokens": 64000, "thinking": {"type": "enabled", "budget_tokens": 60000}} if free else base
    gpt = {"max_tokens": 128000 if free else 4096, "reasoning_effort": "high" if free else "minimal"}
    # Last prices before retirement, for prompts up to 200k tokens: ai.google.dev/gemini-api/docs/pricing,
    # docs.anthropic.com/en/docs/about-claude/pricing, developers.openai.com/api/docs/pricing. The open ones' are their host's.
    google, anthropic, own = "https://generativelanguage.googleapis.com/v1beta", "https://api.anthropic.com/v1", "$OPEN_BASE_URL"
    names = ("name", "model", "params", "protocol", "base_url", "api_key_env", "price")
    rows = [("Gemini 2.5 Pro", "gemini-2.5-pro", gemini, "gemini", google, "GEMINI_API_KEY", [1.25, 10.0]),
            ("Claude Sonnet 4", "claude-sonnet-4-20250514", claude, "anthropic", anthropic, "ANTHROPIC_API_KEY", [3.0, 15.0]),
            ("GPT-5", "gpt-5", gpt, "openai", "https://api.openai.com/v1", "OPENAI_API_KEY", [1.25, 10.0]),
            ("R1-Distill-Qwen-32B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", base, "openai", own),
            ("Gemma 3 27B", "google/gemma-3-27b-it", base, "openai", own),
            ("Qwen3-32B", "Qwen/Qwen3-32B", {**qwen, "chat_template_kwargs": {"enable_thinking": False}}, "openai", own),
            ("Qwen3-32B thinking", "Qwen/Qwen3-32B", {**qwen, "chat_template_kwargs": {"enable_thinking": True}}, "openai", own)]
    return [{**dict(zip(names, row)), "timeout": 3600 if free else 300} for row in rows]


def load_pool(spec: str, local_url: str | None = None, replay: str = "", budget: float = 0.0, ranks: int = 1) -> list[Worker]:
    """The workers of a local pool, "paper", "paper:unconstrained" or a JSON file; a bad one ends the program, naming entry and field.

    A local pool starts the specialists' server, once per process, unless local_url names a running one. replay: a file of replies. budget:
    dollars that the workers may spend together, 0 for no limit; every worker then needs a price, and an end to its answers. ranks: how many
    processes share budget, rpm and concurrency."""
    if spec in LOCAL:
        url = local_url or local_server()[0]
        entries = [{"protocol": "openai", "base_url": url, "model": name, "price": [0, 0]} for name in LOCAL[spec]]
    elif spec in ("paper", "paper:unconstrained"):
        entries = paper_pool(free=spec != "paper")
    else:
        try:
            with open(spec, encoding="utf-8") as f:
                entries = json.load(f)
        except (OSError, ValueError) as e:
            sys.exit(f"--pool={spec}: {e}; expected {', '.join(LOCAL)}, paper, paper:unconstrained or a JSON file with a list of workers")
    try:
        pool, replies, limit = [], Replay(replay) if replay else None, Budget(budget / ranks) if budget else None
    except OSError as e:
        sys.exit(f"--replay={replay}: {e}")
    for i, entry in enumerate(entries if isinstance(entries, list) else []):
        try:
            fields = [key for key in Worker.__annotations__ if key not in ("replay", "budget")]
            if not isinstance(entry, dict):
                raise ValueError("expected an object with protocol, base_url and model")
            if unknown := [key for key in entry if key not in fields]:
                raise ValueError(f"unknown field {unknown[0]}, there are {', '.join(fields)}")
            if missing := [key for key in fields[:3] if key not in entry]:
                raise ValueError(f"no {missing[0]}")
            worker = Worker(**entry, replay=replies, budget=limit)
            worker = replace(worker, rpm=worker.rpm and worker.rpm / ranks, concurrency=max(1, worker.concurrency // ranks))
            pool.append(worker)
            if worker.name in [w.name for w in pool[:-1]]:
                raise ValueError(f"another worker has the name {worker.name!r} already: give each a name of its own")
            worker.letter = chr(ord("A") + i)
            if budget and (worker.price is None or worker.most([], worker.params) == math.inf):
                raise ValueError("a budget needs price ([0, 0] for a model of your own), and max_tokens in params: write a pool file")
        except ValueError as e:
            sys.exit(f"{spec}: entry {i}: {e}")
    return pool or sys.exit(f"{spec}: expected a list of workers")


# The local specialists: honest little programs behind an OpenAI-compatible endpoint. They see what a worker sees, never the answer.

ELEMENTS = ("hydrogen helium lithium beryllium boron carbon nitrogen oxygen fluorine neon sodium magnesium aluminium silicon phosphorus sulfur "
            "chlorine argon potassium calcium scandium titanium vanadium chromium manganese iron cobalt nickel copper zinc").split()
CAPITALS = dict(pair.split("-") for pair in (
    "Austria-Vienna Belgium-Brussels Chile-Santiago Cuba-Havana Denmark-Copenhagen Egypt-Cairo Finland-Helsinki France-Paris Germany-Berlin "
    "Ghana-Accra Greece-Athens Hungary-Budapest Iceland-Reykjavik Iran-Tehran Iraq-Baghdad Ireland-Dublin Italy-Rome Japan-Tokyo Jordan-Amman "
    "Kenya-Nairobi Lebanon-Beirut Libya-Tripoli Nepal-Kathmandu Norway-Oslo Peru-Lima Poland-Warsaw Portugal-Lisbon Qatar-Doha "
    "Russia-Moscow Senegal-Dakar Spain-Madrid Sweden-Stockholm Syria-Damascus Thailand-Bangkok Tunisia-Tunis Uruguay-Montevideo").split())
FACTS = {f"the atomic number of {element}": str(i + 1) for i, element in enumerate(ELEMENTS)} | {
    f"the capital of {country}": city for country, city in CAPITALS.items()} | {
    f"element number {i + 1}": element for i, element in enumerate(ELEMENTS)}
SPANISH = {word: str(i + 1) for i, word in enumerate((
    "uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince dieciséis diecisiete dieciocho diecinueve veinte "
    "veintiuno veintidós veintitrés veinticuatro veinticinco veintiséis veintisiete veintiocho veintinueve treinta").split())}
ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul}
SPELLING = {"backwards": lambda w: w[::-1], "in capitals": str.upper, "without vowels": lambda w: re.sub("[aeiouAEIOU]", "", w)}

# A trade rewrites what it understands in a text and leaves the rest, so that where one specialist stops another can go on. It is set
# to work by certain verbs only.
TRADES = {
    "calculator": (r"\b(work|simplify|find|compute|calculate)\b", lambda text: re.sub(
        r"\b(\d{1,6}) ([-+*]) (\d{1,6})\b", lambda m: str(ARITHMETIC[m[2]](int(m[1]), int(m[3]))), text)),
    "translator": (r"\b(rewrite|simplify|process|translate)\b", lambda text: re.sub(r"\w+", lambda m: SPANISH.get(m[0], m[0]), text)),
    "librarian": (r"\b(find|rewrite|name|look up|recall)\b", lambda text: re.sub(
        r"the (atomic number|capital) of \w+|element number \d+", lambda m: FACTS.get(m[0], m[0]), text)),
    "coder": (r"\b(process|work|name|transform|spell)\b", lambda text: re.sub(
        r"\b(\w+) (backwards|in capitals|without vowels)", lambda m: SPELLING[m[2]](m[1]), text)),
}


def bare(text: str) -> str:
    """`What is 7?` is as good as answered: 7."""
    answer = re.fullmatch(r"(?:What is|Find|Tell me|Give me) (\S+?)[?.]", text)
    return answer[1] if answer else text


def read_turns(messages: list[dict]) -> tuple[str, str | None, list[str]]:
    """(question, own subtask or None, visible responses) as execute in workflow.py writes them."""
    first = re.fullmatch(r"Question:\n(.*?)(?:\n\nYour task:\n(.*))?", messages[0]["content"], re.DOTALL)
    if not first:
        return messages[0]["content"], None, []
    subtask = first[2] if len(messages) == 1 else messages[-1]["content"].removeprefix("Your task:\n")
    return first[1], subtask, [m["content"] for m in messages if m["role"] == "assistant"]


def luck(messages: list[dict]) -> float:
    """A number in [0, 1) that is a hash of the messages: asked the same, a local worker says the same."""
    return zlib.crc32(json.dumps(messages).encode()) / 2**32


SKILL = {"": 1.0, "junior": 0.6, "tired": 0.7}  # on how many days a specialist of that kind does not simply give up


def specialist(kind: str, trade: str, messages: list[dict]) -> str:
    """Works on the newest visible text in which it finds something of its trade, the question last. What day it has is a hash of its kind and
    the messages."""
    day = int.from_bytes(hashlib.sha256(json.dumps([kind, messages]).encode()).digest()[:4], "big") / 2**32
    if day >= SKILL[kind]:
        return "I have lost the thread."
    question, subtask, responses = read_turns(messages)
    verbs, rewrite = TRADES[trade]
    if subtask is not None and not re.search(verbs, subtask.lower()):
        return f"I am a {trade}; that is not my work."
    for skipped, text in enumerate([*reversed(responses), question]):
        if rewrite(text) != text:  # every newer response in which it found nothing has distracted it, half of the time
            return bare(rewrite(text)) if luck(messages) < 0.5 ** skipped else "I have lost the thread."
    return f"I am a {trade}; I find nothing here to work on."


def generalist(messages: list[dict]) -> str:
    """Tries everything, whatever it is told, and is right on one in eight of the questions that take one step."""
    question, chance = read_turns(messages)[0], luck(messages)
    answers = [bare(rewrite(question)) for _, rewrite in TRADES.values() if rewrite(question) != question]
    return answers[0] if answers and chance < 1 / 8 else f"I think it is {chance * 100:.0f}."


SPECIALISTS = {f"{kind} {trade}".strip(): functools.partial(specialist, kind, trade) for kind in SKILL for trade in TRADES} | {
    "generalist": generalist}
LOCAL = {"local": [*TRADES, "generalist"],
         "local:pairs": [f"{kind}{trade}" for trade in TRADES for kind in ("", "junior ")],  # two for each trade, one weaker
         "local:tired": [f"{kind} {trade}" for trade in TRADES for kind in ("tired", "junior")]}  # the same two on a bad day


MAX_DEPTH = 64  # of a request's JSON
PATHS = "there are GET /health, GET /v1/models, GET /v1/models/NAME and POST /v1/chat/completions"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
UNSUPPORTED = ("tools", "functions", "logprobs", "audio", "prediction", "web_search_options")  # of a chat request


def nested(value, depth: int = 0) -> bool:
    """Whether a JSON value is nested more deeply than an honest request ever is."""
    if depth > MAX_DEPTH:
        return True
    inner = value if isinstance(value, list) else []
    if isinstance(value, dict):
        inner = value.values()
    return any(nested(item, depth + 1) for item in inner)


def plain_message(message) -> dict:
    """A chat message with its content as one string; ValueError where it is not of text."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ValueError(f"expected messages whose role is one of {', '.join(ROLES)}")
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError("expected messages whose content is text: nothing else is supported")
    return {"role": ROLES[message["role"]], "content": "".join(part["text"] for part in parts)}


def checked_chat(body) -> dict:
    """A chat request as `Handler.complete` gets it; ValueError says what is wrong with it or not supported."""
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        raise ValueError("expected an object with model, a name, and messages")
    if nested(body):
        raise ValueError(f"expected JSON that is nested at most {MAX_DEPTH} deep")
    for key in UNSUPPORTED:
        if body.get(key):
            raise ValueError(f"{key} is not supported")
    if body.get("n") not in (None, 1):
        raise ValueError("n above 1 is not supported: ask once for each answer")
    if not isinstance(body.get("stream"), bool | None) or not isinstance(body.get("stream_options"), dict | None):
        raise ValueError("expected stream to be true or false, and stream_options an object")
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise ValueError("expected messages, a list of at least one")
    return {**body, "messages": [plain_message(message) for message in body["messages"]]}


class Handler(BaseHTTPRequestHandler):
    """OpenAI's chat completions on a loopback address. A subclass has `models`, a list of names, and `complete`.

    complete(body) gets a checked request: body["model"] is one of `models`, and body["messages"] a list of
    {"role": "system", "user" or "assistant", "content": str}. It calls `reply` once, or `send_chunk` for each
    piece of a stream and then `end_stream`, or `fail`."""
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    models: list[str] = []
    streaming = False  # whether the head of a stream has been sent

    def complete(self, body: dict):
        raise NotImplementedError

    def answer(self, status: int, data: dict, **headers):
        """Send a whole response, in one packet where it fits. headers: x_name="value"."""
        body = json.dumps(data).encode()
        head = [f"HTTP/1.1 {status} {self.responses.get(status, ('Unknown',))[0]}",
                "Content-Type: application/json", f"Content-Length: {len(body)}"]
        head += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        if self.close_connection:
            head.append("Connection: close")
        self.wfile.write("\r\n".join([*head, "", ""]).encode() + body)

    def fail(self, status: int, message: str, retry: bool = True):
        """Answer with an error as OpenAI writes it; within a stream it ends the stream.

        retry=False asks the clients that read x-should-retry (OpenAI's own do) not to ask, and pay, again."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"error": {"message": message, "type": kind, "param": None, "code": None}}
        if self.streaming:
            self.send_event(error)
        elif retry:
            self.answer(status, error)
        else:
            self.answer(status, error, x_should_retry="false")

    def reply(self, text: str, finish: str = "stop", usage: dict | None = None):
        """Send a whole completion, as a stream of one piece where the request asks for a stream."""
        if self.chat.get("stream"):
            self.send_chunk({"content": text})
            self.send_chunk({}, finish, usage)
            return self.end_stream()
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        self.answer(200, {**self.card, "object": "chat.completion", "choices": [choice], "usage": usage})

    def send_chunk(self, delta: dict, finish: str | None = None, usage: dict | None = None):
        """Send a piece of a stream: delta is {"content": str} or {}. usage is sent where the request asks for it."""
        if not self.streaming:
            self.streaming = self.close_connection = True  # the stream's end is the connection's
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                             b"Cache-Control: no-cache\r\nConnection: close\r\n\r\n")
            delta = {"role": "assistant", **delta}
        card = {**self.card, "object": "chat.completion.chunk"}
        self.send_event({**card, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
        if usage and (self.chat.get("stream_options") or {}).get("include_usage"):
            self.send_event({**card, "choices": [], "usage": usage})

    def end_stream(self):
        self.wfile.write(b"data: [DONE]\n\n")

    def send_event(self, data: dict):
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def hung_up(self) -> bool:
        """Whether the client has closed the connection: nobody waits for the answer any more."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:  # nothing to read: it waits
            return False
        except OSError:
            return True

    def handle(self):
        with contextlib.suppress(ConnectionError):  # a client that has gone is no fault of the server
            super().handle()

    def do_GET(self):
        if self.read_body() is None:
            return
        path = self.path.partition("?")[0]
        cards = {name: {"id": name, "object": "model", "created": 0, "owned_by": "local"} for name in self.models}
        name = urllib.parse.unquote(path.removeprefix("/v1/models/"))
        if path == "/health":
            self.answer(200, {"status": "ok"})
        elif path == "/v1/models":
            self.answer(200, {"object": "list", "data": list(cards.values())})
        elif path.startswith("/v1/models/") and name in cards:
            self.answer(200, cards[name])
        else:
            self.fail(404, f"there is nothing at {path}; {PATHS}, and the models are {', '.join(cards)}")

    def do_POST(self):
        data = self.read_body()
        if data is None:
            return
        if self.path.partition("?")[0] != "/v1/chat/completions":
            return self.fail(404, f"there is nothing to post to at {self.path}; {PATHS}")
        if self.headers.get_content_type() != "application/json":  # any web page can send the other types here
            return self.fail(415, "expected Content-Type: application/json")
        try:
            self.chat = checked_chat(json.loads(data))
        except (ValueError, RecursionError) as e:
            return self.fail(400, f"expected a chat in JSON: {e}")
        model = self.chat["model"]
        if model not in self.models:
            return self.fail(404, f"there is no model {model!r}; there are {', '.join(self.models)}")
        self.card = {"id": f"chatcmpl-{time.time_ns()}", "created": int(time.time()), "model": model}
        try:
            self.complete(self.chat)
        except ConnectionError:
            raise
        except Exception as bug:  # the client must hear of it, and not ask for the same again
            traceback.print_exc()
            self.fail(500, f"{type(bug).__name__}: {bug}", retry=False)

    def read_body(self) -> bytes | None:
        """The request's body; None where the request was refused without reading it."""
        length = self.headers.get("Content-Length", "0")
        if not re.fullmatch(r"(localhost|127\.[\d.]+|\[::1\])(:\d+)?", self.headers.get("Host", "")):
            # A page whose host's name is made to mean 127.0.0.1 could otherwise use the server from a browser.
            return self.refuse(403, "expected a loopback address as Host")
        if "Transfer-Encoding" in self.headers:
            return self.refuse(411, "expected a Content-Length: an upload in chunks is not supported")
        if not re.fullmatch("[0-9]+", length):
            return self.refuse(400, "expected a number as Content-Length")
        if len(length) > 9 or int(length) > MAX_BODY:
            return self.refuse(413, f"expected a body of at most {MAX_BODY >> 20} MiB")
        return self.rfile.read(int(length))

    def refuse(self, status: int, message: str):
        """Answer without reading the body, and end the connection once the client can have read why."""
        self.close_connection = True
        self.fail(status, message)
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(1)
        with contextlib.suppress(OSError):
            for _ in range(MAX_BODY >> 16):  # what is left unread at the end would reset the connection
                if not self.connection.recv(1 << 16):
                    break

    def send_error(self, code: int, message: str | None = None, explain: str | None = None):
        """The base class's own errors (an unknown method, a bad request line), in JSON too."""
        self.close_connection = True
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
    request_queue_size = 1024  # with 5, the default, clients that connect at once wait a second
    server_bind = socketserver.TCPServer.server_bind  # not HTTPServer's own, which looks up the host's name and can hang


def serve(port: int, child: bool = False, latency: float = 0.0):
    """The specialists on 127.0.0.1 until Ctrl-C; for local_server until stdin ends, which it does however the parent dies. latency:
    seconds that each takes to answer."""
    try:
        server = Server(("127.0.0.1", port), SpecialistHandler)
    except (OSError, OverflowError) as e:
        sys.exit(f"cannot serve on 127.0.0.1:{port}: {e}; choose another port with --port=N (0: any free one)")
    server.latency = latency
    print(f"http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
    if child:
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


@functools.cache
def local_server(latency: float = 0.0) -> tuple[str, subprocess.Popen]:
    """Start the specialists' server, once per process and latency: its URL and process. It gets no key, only what Python needs."""
    keep = ("PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TMPDIR")
    process = subprocess.Popen([sys.executable, "-c", f"import workers; workers.serve(0, True, {latency})"], text=True,
                               cwd=os.path.dirname(os.path.abspath(__file__)), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               start_new_session=True,  # Ctrl-C is the parent's affair
                               env={name: os.environ[name] for name in keep if name in os.environ})
    atexit.register(lambda: (process.stdin.close(), process.wait()))
    if not (url := process.stdout.readline().strip()):
        raise WorkerError(f"the local specialists' server ended at its start, with status {process.wait()}")
    return url, process


def bench(workflows: int = 256, steps: int = 3, latency: float = 0.05):
    """Chains of calls, as workflows make them, all at once over workers that take so many seconds: wall time beside the least possible,
    and this process's CPU time of a call. The last line is JSON."""
    pool = load_pool("local", local_server(latency)[0])

    def chain(k):
        for i in range(steps):
            pool[(k + i) % len(pool)].chat([{"role": "user", "content": "Question:\nWhat is 6 * 7?\n\nYour task:\nWork it out."}])

    with ThreadPoolExecutor(workflows) as threads:
        list(threads.map(chain, range(workflows)))  # opens the connections and starts the threads
        begun, before = time.monotonic(), os.times()
        list(threads.map(chain, range(workflows)))
        wall, client = time.monotonic() - begun, sum(os.times()[:2]) - sum(before[:2])
    calls, slots = workflows * steps, sum(w.concurrency for w in pool)
    print(json.dumps({"calls": calls, "at_a_time": slots, "latency_ms": 1000 * latency, "wall_seconds": round(wall, 4),
                      "times_the_least": round(wall / (math.ceil(calls / slots) * latency), 3),
                      "client_cpu_ms_per_call": round(1000 * client / calls, 3)}))


def main():
    from model import configure  # here, as it brings torch, which the specialists' server does without

    @dataclass
    class Settings:
        pool: str = "local"
        port: int = 8765  # of serve
        bench: bool = False
    settings = Settings()
    words = configure(settings, sys.argv[1:])
    if words == ["serve"]:
        return serve(settings.port)
    if words:
        sys.exit(f"unknown command {' '.join(words)}; there is serve, or none to list the pool")
    if settings.bench:
        return bench()
    for w in load_pool(settings.pool):
        key = f"{w.api_key_env} is {'set' if os.environ.get(w.api_key_env) else 'NOT SET'}" if w.api_key_env else "no key needed"
        try:
            ping = f"answers in {replace(w, attempts=1).chat([{'role': 'user', 'content': 'Say pong.'}]).seconds:.2f} s"
        except WorkerError as e:
            ping = str(e)
        print(f"{w.name:<22}{w.protocol:<11}{w.model:<42}{key:<30}{ping}", flush=True)


if __name__ == "__main__":
    main()
