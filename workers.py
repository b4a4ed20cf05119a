"""Workers: language models over HTTP, Python functions, pools of them, and the laptop world.

    python workers.py [--pool=NAME]          say hello to every worker; print its reply or error
    python workers.py serve [--port=8765]    serve the laptop world's workers to any OpenAI client

NAME is local, local:pairs or local:tired (pools of the laptop world), the name of a file in
assets/pools/ without .json, or the path of a JSON file. A pool's file holds a list with one object
for each worker. The keys of an object are fields of Worker. The laptop world consists of toy
questions and small programs that answer them. Read workflow.py next.
"""

import argparse
import base64
import contextlib
import functools
import hashlib
import hmac
import inspect
import itertools
import json
import os
import random
import re
import runpy
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.parse
import zlib
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from email.utils import parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.pool import ThreadPool

import requests
from requests.packages.urllib3 import HTTPResponse, Timeout, exceptions
from requests.packages.urllib3.util import wait_for_read

FOLDER = os.path.dirname(os.path.abspath(__file__))
ASSETS = os.path.join(FOLDER, "assets")
POOLS = os.path.join(ASSETS, "pools")
# Matches the URL of a server on this machine. The URL's host is 127.x.x.x, 0.0.0.0, localhost,
# NAME.localhost, [::], [::1] or [::ffff:127.x.x.x].
LOOPBACK = (
    r"(?i)https?://(127\.[\d.]+|0\.0\.0\.0|([\w.-]+\.)?localhost\.?"
    r"|\[[0:]*[01:]\]|\[[0:]*:ffff:(127\.[\d.]+|7f[\da-f]{2}:[\da-f]+)\])(:\d+)?(/|$)"
)
LIMITS = ("max_tokens", "max_completion_tokens")  # the parameters that bound a reply's length
# The finish reasons of Anthropic and Mistral that mean the same as OpenAI's "length".
CUT_OFF = ("max_tokens", "model_context_window_exceeded", "model_length")
# The finish reasons by which OpenRouter, vLLM and DeepSeek report a failure midway.
INTERRUPTED = ("error", "abort", "insufficient_system_resource")
MAX_BODY = 32 << 20  # the maximum size of a response, in bytes
HARD_FAILURES = 6  # a call gives up after this many failures; a busy provider does not count as one
NEVER = float("inf")  # the seconds until another attempt may succeed, if none can
# Probe a silent connection about once a minute, so that no router drops it while a model thinks.
SOCKET_OPTIONS = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),  # urllib3's default
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", 0x10), 60),  # on macOS, the option is 0x10
]
jitter = random.Random()  # for pauses only; experiments use separate generators


def once(function):
    """Cache the result of a function that takes no arguments.

    Even simultaneous first calls run it only once, unless it raises an exception.
    """
    lock = threading.Lock()
    cached = functools.cache(function)

    @functools.wraps(function)
    def locked():
        with lock:
            return cached()

    return locked


class WorkerError(Exception):
    """A call failed or was not made. This does not count as a wrong answer.

    API keys in the message are masked.
    """


@dataclass
class Reply:
    """A worker's answer, and what the call cost."""

    text: str  # the model's answer without its thoughts; may be empty or cut off
    prompt_tokens: int  # including cached tokens; 0 if unknown
    completion_tokens: int  # including reasoning tokens; 0 if unknown
    cost: float | None  # dollars; None if unknown
    seconds: float = 0.0  # duration of the attempt that succeeded
    # Why the text ends, in the provider's words, except that a cut-off text always has "length".
    finish: str = "stop"


@dataclass
class Worker:
    """One member of a pool. Any number of threads may call `chat` at the same time."""

    protocol: str  # a key of PROTOCOLS: openai, anthropic or python
    base_url: str = ""  # the URL without the protocol's path, such as https://api.openai.com/v1
    model: str = ""
    name: str = ""  # "": use the name of the model or of the function
    note: str = ""  # a sentence that tells a Conductor what this worker is good at
    api_key_env: str | None = None  # the environment variable that holds the key
    params: dict = field(default_factory=dict)  # request parameters; `chat` can override them
    headers: dict = field(default_factory=dict, repr=False)  # override the usual headers
    # Dollars per million tokens, [input, output]. None: unknown, or 0 for a Python function.
    price: list | None = None
    # Maximum number of simultaneous calls from this process. `load_pool` divides the number in the
    # pool's file among the ranks, but gives each at least 1.
    concurrency: int = 16
    # Seconds per attempt. After 3 * timeout seconds, a call starts no new attempt.
    timeout: int | float = 600
    attempts: int | None = None  # maximum per call; None: only the limits that `chat` describes
    # FILE.py:NAME, for protocol "python". The function maps messages to a text or a Reply.
    function: str = ""
    replay: object = field(default=None, repr=False)  # a Replay
    budget: object = field(default=None, repr=False)  # a Budget

    def __post_init__(self):
        self.name = name_of(vars(self))
        self.run_function = None
        self.code = ""  # for a Python function, HASH_OF_ITS_FILE:NAME; part of Replay's keys
        if self.protocol == "python":
            self.run_function = load_function(self.function)
            file, _, function_name = self.function.rpartition(":")
            self.code = f"{file_hash(file)}:{function_name}"
        self.slots = threading.Semaphore(self.concurrency)

        path, self.write_request, self.read_reply = PROTOCOLS[self.protocol]
        self.url = self.base_url.rstrip("/") + path
        self.route = once(self.find_route)

        self.lock = threading.Lock()  # guards the next two sums, which include replayed calls
        self.calls = 0
        self.spent = 0.0  # dollars; None as soon as a call's cost is unknown

    def chat(self, messages: list[dict], call_id: str = "", **overrides) -> Reply:
        """Send a chat to the worker and return its reply.

        `chat` tries again if the provider is busy (status 429, 498, 503 or 529, 402 with a
        Retry-After, or an overloaded_error), and after a hard failure (any other 5xx, a 408, a 409,
        a failed connection, a blank response, or a reply that broke off). It starts no attempt
        later than 3 * `timeout` seconds after the first, makes no more than `attempts` attempts,
        and gives up after the sixth hard failure.

        Args:
            messages: [{"role": role, "content": text}, ...]. A role is "system", "user" or
                "assistant". The worker gets "(empty)" instead of a blank text.
            call_id: the call's name within a run, under which `replay` stores the reply. The cost
                of a replayed reply is added to `spent`, but not charged to the budget. "": the
                reply is neither stored nor replayed.
            overrides: parameters that take precedence over `params`.

        Raises:
            WorkerError: the last attempt failed, or too little of the budget is left. These
                failures end the call at once: a timeout, a redirect, any other 4xx, an unknown
                host, an untrusted certificate, an exhausted account, an error with
                x-should-retry: false, an unreadable reply, and most exceptions in a Python
                function.
        """
        # Replace blank turns, which some APIs, such as Anthropic's, reject.
        messages = [m if m["content"].strip() else {**m, "content": "(empty)"} for m in messages]
        params = {**self.params, **overrides}
        if self.replay and call_id:
            key = self.replay.key(self, messages, params, call_id)
            with self.replay.locks.setdefault(key, threading.Lock()):  # Pay once for equal calls.
                reply = self.replay.find(key)
                if reply is None:
                    reply = self.send(messages, params)
                    self.replay.keep(key, reply)
        else:
            reply = self.send(messages, params)

        with self.lock:
            self.calls += 1
            is_known = None not in (self.spent, reply.cost)
            self.spent = self.spent + reply.cost if is_known else None
        return reply

    def send(self, messages: list[dict], params: dict) -> Reply:
        """Send a request, with retries as the docstring of `chat` describes, and return the reply.

        The retries built into urllib3 are not used, because each attempt must first reserve the
        money that it may cost.
        """
        api_key = os.environ.get(self.api_key_env or "", "").strip()
        key_headers, body = self.write_request(self.model, messages, params, api_key)
        headers = requests.utils.default_headers()  # a dict with case-insensitive keys
        headers.update({"content-type": "application/json", **key_headers})
        headers.update(self.headers)
        budget = self.budget or UNLIMITED
        max_cost = highest_cost(vars(self), params, body) if self.budget else 0.0

        with self.slots:
            first_sent = time.monotonic()
            hard_failures = 0
            for attempt in itertools.count(1):
                budget.reserve(max_cost)
                sent = time.monotonic()
                outcome = self.send_once(messages, headers, body)
                budget.settle(max_cost, outcome.cost)
                now = time.monotonic()
                if isinstance(outcome, Reply):
                    outcome.seconds = now - sent
                    return outcome

                hard_failures += not outcome.busy
                pause = self.pause_after(attempt, outcome)
                is_last = hard_failures == HARD_FAILURES or attempt == self.attempts
                is_late = now + pause > first_sent + 3 * self.timeout  # NEVER is always late
                if is_last or is_late:
                    reason = self.without_secrets(outcome.text, api_key)
                    seconds = now - first_sent
                    where = f"{self.function}, " if self.function else ""
                    raise WorkerError(
                        f"{self.name}: {reason} ({where}attempt {attempt}, after {seconds:.1f} s)"
                    )
                time.sleep(pause)

    def send_once(self, messages: list[dict], headers: dict, body: dict):
        """Make one attempt and return a Reply or a Failure.

        The attempt calls the Python function, or posts the request and reads the response.
        """
        try:
            if self.run_function:
                return self.call_function(messages)
            return self.post(headers, body)
        except Failure as failure:
            return failure
        except (TimeoutError, exceptions.ReadTimeoutError) as e:
            if "handshake" in str(e.__cause__):  # TLS was not set up, so nothing was sent.
                return Failure("no TLS handshake within 10 s", wait=0.0, cost=0.0)
            return Failure(f"no whole answer in time; its timeout is {self.timeout:g} s")
        except Exception as e:  # such as a lost connection
            return failed_attempt(e)

    def call_function(self, messages: list[dict]) -> Reply:
        """Call the Python function and return its answer, a text or a Reply, as a new Reply.

        Python cannot stop a running function. If the function takes longer than `timeout`, its
        answer is ignored, and its thread may continue until the program ends.

        Raises Failure if the function raises an exception, TimeoutError if it takes too long, and
        TypeError if it returns anything but a text or a well-formed Reply.
        """
        future = Future()

        def run():
            try:
                # Pass copies, because a function may change the messages that it gets.
                future.set_result(self.run_function([{**message} for message in messages]))
            except BaseException as e:  # In this thread, a KeyboardInterrupt is not Ctrl-C.
                future.set_exception(failed_attempt(e))

        threading.Thread(target=run, daemon=True).start()
        answer = future.result(self.timeout)
        if not isinstance(answer, Reply):
            answer = Reply(answer, 0, 0, cost=None if any(self.price or []) else 0.0)
        values = [answer.text, answer.prompt_tokens, answer.completion_tokens, answer.cost]
        if not fits(values, rf"\[{TEXT}, {NUMBER}, {NUMBER}, ({NUMBER}|null)\]"):
            raise TypeError(
                f"expected a text, or a Reply of a text, tokens and a cost, got {values}"
            )
        return replace(answer, text=without_surrogates(answer.text))

    def post(self, headers: dict, body: dict) -> Reply:
        """Post a request and return the reply."""
        deadline = time.monotonic() + self.timeout
        connections, target = self.route()
        response = connections.urlopen(
            "POST",
            target,
            json.dumps(body, allow_nan=False).encode(),
            headers,
            retries=False,
            redirect=False,
            assert_same_host=False,  # With an HTTP proxy, `target` names the server, not the proxy.
            timeout=Timeout(connect=10, read=self.timeout),  # seconds; read: the longest silence
            preload_content=False,
        )
        try:
            return read_response(self, response, deadline)
        finally:
            response.close()  # also closes the connection, unless the whole response was read

    def find_route(self) -> tuple:
        """Return urllib3's connection pool for the server, and the path or URL to post to.

        requests.post would look up the proxies and the CA bundle in the environment on every call,
        which would take half of a call's CPU time. `find_route` runs only once per worker.
        """
        request = requests.Request("POST", self.url).prepare()
        is_own = re.match(LOOPBACK, self.base_url)
        proxies = {} if is_own else requests.utils.get_environ_proxies(self.url)
        verify = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or True
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=self.concurrency)
        connections = adapter.get_connection_with_tls_context(request, verify, proxies)
        adapter.cert_verify(connections, self.url, verify, cert=None)
        connections.conn_kw["socket_options"] = SOCKET_OPTIONS
        return connections, adapter.request_url(request, proxies)

    def pause_after(self, attempt: int, failure: "Failure") -> float:
        """Return the number of seconds to wait before the next attempt.

        This is the wait that the provider asks for plus a backoff. With the default timeout, the
        backoff is 2, 4, 8, 16, 30, 30, … s. Jitter shortens each backoff by up to half, so that
        callers do not all try again at the same moment.
        """
        backoff = min(30, self.timeout / 300 * 2 ** min(attempt - 1, 9))
        return failure.wait + backoff * jitter.uniform(0.5, 1)

    def without_secrets(self, text: str, api_key: str) -> str:
        """Return a text as one line of at most 400 characters, with keys masked.

        Besides the API key, this masks each word of 8 or more characters in the values of
        `headers`, such as KEY in "Bearer KEY".
        """
        line = one_line(text)
        words = " ".join([api_key, *self.headers.values()]).split()
        long_words = [word for word in words if len(word) >= 8]
        for secret in filter(None, [api_key, *long_words]):
            line = line.replace(secret, "***")
        return line[:400]


@dataclass
class Failure(Exception):
    """The outcome of an attempt that got no usable reply."""

    text: str
    wait: float = NEVER  # seconds until another attempt may succeed
    busy: bool = False  # whether the provider is merely busy, which is no hard failure
    cost: float | None = None  # dollars; 0.0: certainly not billed; None: may have been billed


# Matches what OpenAI, Anthropic, Google, OpenRouter, xAI, Moonshot, Z.ai, Ollama and litellm write
# if an account or a key has no money or quota left.
EXHAUSTED = (
    "(?i)insufficient_quota|billing_not_active|credit balance is too low|credits are depleted"
    "|PerDay|per-day|API usage limits|(spend|usage)_limit_|monthly spending cap"
    "|credit_balance_exhausted|used all available credits|insufficient balance"
    r'|exceeded_current_quota|"1113"|reached your \w+ usage limit'
    "|budget_exceeded|crossed budget|budget limit reached"
    "|error-codes/api-errors"  # a link in OpenAI's message, which litellm keeps; it drops the code
)
# DashScope writes insufficient_quota with a link to this section if too many tokens were sent in
# the last minute.
TOKENS_PER_MINUTE = "error-code#token-limit"


def read_response(worker: Worker, response: HTTPResponse, deadline: float) -> Reply:
    """Read a response and return the reply in it.

    Raises Failure if the response is an error, is too large or contains no reply, and TimeoutError
    if a piece of it arrives after `deadline` (a value of time.monotonic()).
    """
    body = bytearray()
    for piece in iter(lambda: response.read1(1 << 16, decode_content=True), b""):
        body += piece
        if len(body) > MAX_BODY:
            raise Failure("the response is larger than 32 MiB")
        if time.monotonic() > deadline:
            raise TimeoutError

    # Some servers begin the body with a byte order mark, which shows the encoding.
    text = body.decode(json.detect_encoding(body), "replace").strip()
    data = None
    with contextlib.suppress(ValueError, RecursionError):
        data = json.loads(text)
    if response.status >= 300 or find(data, "error"):  # Status 200 may come with an error, too.
        raise failed_response(worker.url, response, find(data, "error", "code"), text)

    try:
        answer, finish = worker.read_reply(data)
        answer = without_surrogates(without_leading_thoughts(answer))
    except (LookupError, TypeError, AttributeError, ValueError):
        # OpenRouter sends spaces and newlines while it waits for a model's host. If the host dies,
        # the response contains nothing else, and another attempt may succeed.
        wait = NEVER if text else 0.0
        raise Failure(f"no reply as {worker.protocol} defines it: {text}", wait)

    tokens = read_usage(find(data, "usage"))
    n_in, n_out, n_billed = tokens or (0, 0, 0)
    cost = billed_cost(response, data)
    if cost is None and tokens and worker.price:
        # Some gateways do not count tokens, and report zero. The cost is then unknown, unless the
        # price is zero. The cost is also unknown if Claude has searched the web, because Anthropic
        # charges a fee for each search and does not report the fee.
        is_counted = n_out or not answer or not any(worker.price)
        if is_counted and not find(data, "usage", "server_tool_use", "web_search_requests"):
            cost = (n_billed * worker.price[0] + n_out * worker.price[1]) / 1e6
    finish = "length" if finish in CUT_OFF else str(finish or "stop")
    return Reply(answer, n_in, n_out, cost, finish=finish)


def billed_cost(response: HTTPResponse, data: dict) -> float | None:
    """Return the cost in dollars that the server itself reports for a response, or None.

    litellm reports the cost in a header; OpenRouter and our own server report it in usage.cost,
    Perplexity in usage.cost.total_cost, and xAI in ticks of 1e-10 dollars. A cost of zero counts as
    not reported, because servers also report zero if they do not know the price. If OpenRouter uses
    the account's own key for the provider (BYOK), usage.cost is ignored, because it is only
    OpenRouter's fee. Of two reported costs, the higher is returned.
    """
    cost = find(data, "usage", "cost")
    reported = [] if find(data, "usage", "is_byok") else [cost, find(cost, "total_cost")]
    ticks = find(data, "usage", "cost_in_usd_ticks")
    reported.append(ticks / 1e10 if fits(ticks, NUMBER) else None)
    with contextlib.suppress(ValueError):
        reported.append(float(response.headers.get("x-litellm-response-cost", "")))
    return max((dollars for dollars in reported if fits(dollars, NUMBER)), default=None) or None


def failed_response(url: str, response: HTTPResponse, code, text: str) -> Failure:
    """Return the Failure that describes an error response.

    Args:
        code: the error's code in the body, or None. If a model fails after it has started,
            OpenRouter sends status 200, and this code is the real status.
        text: the response's body.
    """
    status = response.status
    if status < 300:
        status = code if code in range(400, 600) else 500
    retry_after = response.headers.get("Retry-After", "")
    # Groq's flex tier sends 498 if its capacity is used up. OpenRouter sends 402 with a Retry-After
    # if the running calls may together cost more than the account holds. litellm sends 500 for
    # Anthropic's 529, but quotes its text.
    is_reserved = status == 402 and retry_after != ""
    busy = status in (429, 498, 503, 529) or is_reserved or "overloaded_error" in text
    is_broken = status in (408, 409) or status >= 500
    is_exhausted = re.search(EXHAUSTED, text) and TOKENS_PER_MINUTE not in text
    is_final = response.headers.get("x-should-retry") == "false" or is_exhausted

    wait = NEVER
    if (busy or is_broken) and not is_final:
        wait = 0.0
        with contextlib.suppress(ValueError):  # Ignore a text that is neither seconds nor a date.
            if re.fullmatch(r"\d+(\.\d+)?", retry_after):
                wait = float(retry_after)
            else:
                wait = max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    # A provider that is busy or rejects the request charges nothing. A provider that breaks down,
    # or that reports an error with a status of success, may charge for the attempt.
    is_unpaid = response.status >= 300 and (busy or not is_broken)
    target = response.headers.get("Location")
    where = f"{url}, which redirects to {target}" if target else url
    return Failure(f"HTTP {status} of {where}: {text}", wait, busy, cost=0.0 if is_unpaid else None)


def failed_attempt(error: BaseException) -> Failure:
    """Return the Failure for an exception that a request or a Python function raised."""
    # A user's function may call `requests`, whose errors wrap the error that says what happened.
    is_wrapper = isinstance(error, requests.RequestException) and error.args
    cause = getattr(error.args[0], "reason", error) if is_wrapper else error
    is_lost = isinstance(error, (requests.ConnectionError, exceptions.HTTPError, ConnectionError))
    is_unresolved = isinstance(cause, exceptions.NameResolutionError)
    # After EAI_AGAIN, the host may still exist: the name server was unavailable for the moment.
    is_unknown_host = is_unresolved and cause.__cause__.errno != socket.EAI_AGAIN
    is_unconnected = isinstance(
        cause,
        (exceptions.NewConnectionError, exceptions.ConnectTimeoutError, exceptions.ProxyError),
    )
    is_untrusted = "CERTIFICATE_VERIFY_FAILED" in str(cause)
    hint = "; $REQUESTS_CA_BUNDLE may name a file of certificates to trust" if is_untrusted else ""
    return Failure(
        f"{type(cause).__name__}: {cause}{hint}",
        wait=0.0 if is_lost and not (is_unknown_host or is_untrusted) else NEVER,
        cost=0.0 if is_unconnected or is_untrusted else None,
    )


def find(data, *path: str):
    """Return the value at a path of keys in nested dicts, or None if a key is missing.

    find(data, "error", "code") is data["error"]["code"].
    """
    for name in path:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def fits(value, pattern: str) -> bool:
    """Return whether a value, written as JSON, fully matches a regular expression.

    What JSON cannot express, such as bytes, is written as {}.
    """
    return bool(re.fullmatch(pattern, json.dumps(value, default=lambda _: {})))


def without_surrogates(text: str) -> str:
    """Replace each lone surrogate (half an emoji, say), which UTF-8 cannot encode, with "?"."""
    return text.encode(errors="replace").decode()


def one_line(text: str) -> str:
    """Return a text as one line, without unprintable characters, which could control a terminal."""
    return "".join(filter(str.isprintable, " ".join(text.split())))


# ---- Protocols: one function writes requests, another reads replies ----------------------------


def openai_request(model: str, messages: list[dict], params: dict, api_key: str) -> tuple:
    """Return (headers, body) of a request in OpenAI's chat protocol.

    OpenRouter, vLLM, Ollama, llama.cpp and most other servers use this protocol, which
    platform.openai.com/docs/api-reference/chat defines.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return headers, {"model": model, "messages": messages, **params}


def openai_reply(data: dict) -> tuple:
    """Return (text, finish reason) from the JSON of a response.

    Raises Failure if the provider failed midway.
    """
    choice = data["choices"][0]
    finish = choice.get("finish_reason")
    error = choice.get("error")
    if finish in INTERRUPTED or error:
        # An error in a choice, or the reason "error", comes from OpenRouter, which then charges
        # nothing.
        cost = 0.0 if error or finish == "error" else None
        raise Failure(f"the provider failed midway: {error or finish}", wait=0.0, cost=cost)
    # Gemini sends no message if its thoughts took all the tokens or a filter blocked the answer.
    message = choice["message"] if finish in (None, "stop") else choice.get("message") or {}
    text = message.get("content") or message.get("refusal") or ""
    if isinstance(text, list):  # Mistral's thinking models send a list of parts.
        text = join_parts(text)
    return text, finish


def join_parts(parts: list) -> str:
    """Join the texts among an answer's parts, leaving out thoughts and all other kinds of part."""
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return "".join(part.get("text") or "" for part in texts if part.get("type") == "text")


def without_leading_thoughts(text: str) -> str:
    r"""Return a reply without the thoughts that some servers leave at its beginning.

    If a reply begins with <think>, everything up to the first </think> is thoughts, and so is the
    whole reply if </think> is missing. If the opening tag is missing, the thoughts end with the
    first closing tag that a line break follows, or with one that is alone on the last line. Tags
    elsewhere are kept, as they may be part of an answer:

        "<think>Hm.</think>So."         -> "So."
        "Hm.\n</think>\n\nSo."          -> "So."
        "<think>Hm."                    -> ""
        "Write <think>x</think> first." -> the same
    """
    if text.lstrip().startswith("<think>"):
        return text.partition("</think>")[2].lstrip()
    # Dropping everything up to a tag at the very end would leave no answer. So a final tag without
    # a line break counts only if it is alone on its line.
    closing = re.search(r"</think>[ \t\r]*\n\s*|^[ \t]*</think>\s*\Z", text, re.MULTILINE)
    if closing and "<think>" not in text[: closing.start()]:
        return text[closing.end() :]
    return text


def anthropic_request(model: str, messages: list[dict], params: dict, api_key: str) -> tuple:
    """Return (headers, body) of a request as platform.claude.com/docs/en/api/messages defines it.

    This API requires max_tokens, and takes system messages in a separate field.
    """
    headers = {"x-api-key": api_key, "anthropic-version": "2023-06-01"}
    system = [message["content"] for message in messages if message["role"] == "system"]
    turns = [message for message in messages if message["role"] != "system"]
    body = {"model": model, "max_tokens": 4096, "messages": turns}
    if system:
        body["system"] = "\n\n".join(system)
    return headers, {**body, **params}


def anthropic_reply(data: dict) -> tuple:
    """Return (text, finish reason) from the JSON of a response."""
    return join_parts(data["content"]), data.get("stop_reason")


def read_usage(usage) -> tuple[int, int, float] | None:
    """Return (prompt tokens, completion tokens, prompt tokens to bill) from a response's usage.

    The third number allows for caches. Writing a token to a cache costs as much as 1.25 prompt
    tokens, or as much as 2 if the token is kept for an hour
    (platform.claude.com/docs/en/build-with-claude/prompt-caching). Reading a token from a cache
    costs less than a prompt token, but how much less depends on the provider. So a token that was
    read counts as a whole prompt token here.

    Returns None if the usage lacks the prompt or completion tokens, or if a count is not a whole
    number of at most nine digits.
    """
    is_anthropic = find(usage, "prompt_tokens") is None
    names = ("input", "output") if is_anthropic else ("prompt", "completion")
    n_in, n_out = (find(usage, f"{name}_tokens") for name in names)
    optional = [
        find(usage, "total_tokens"),
        find(usage, "cache_read_input_tokens"),
        find(usage, "cache_creation_input_tokens")  # Anthropic, litellm
        or find(usage, "prompt_tokens_details", "cache_write_tokens"),  # OpenRouter
        find(usage, "cache_creation", "ephemeral_1h_input_tokens"),
    ]
    if not fits([n_in, n_out, *optional], r"\[\d{1,9}, \d{1,9}(, (\d{1,9}|null)){4}\]"):
        return None

    total, read, written, for_an_hour = (n or 0 for n in optional)
    # Anthropic's input_tokens and Portkey's prompt_tokens exclude tokens read from or written to a
    # cache.
    if is_anthropic or total == n_in + n_out + read + written:
        n_in += read + written
    n_out = max(n_out, total - n_in)  # Some servers count reasoning only in the total.
    return n_in, n_out, n_in + 0.25 * written + 0.75 * for_an_hour


# name -> (URL path, function that writes a request, function that reads a reply). A protocol may
# have names of its own for what bounds a reply (LIMITS) and for a reply that was cut off (CUT_OFF).
PROTOCOLS = {
    "openai": ("/chat/completions", openai_request, openai_reply),
    "anthropic": ("/messages", anthropic_request, anthropic_reply),
    # A Python function gets messages, not a request, but `highest_cost` needs a request's length.
    "python": ("", openai_request, None),
}


# ---- The user's own functions --------------------------------------------------------------------


def file_hash(path: str) -> str:
    """Return the SHA-256 hash of a file's content."""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


@functools.cache
def run_file(path: str, content_hash: str) -> dict:
    """Run a Python file and return its globals. The file may import modules in its folder.

    Later calls with the same path and hash return the same globals, without running the file again.
    """
    sys.path.append(os.path.dirname(os.path.abspath(path)))
    return runpy.run_path(path)


def load_name(spec: str):
    """Run the file in a spec FILE.py:NAME; return its global NAME, or None if that is not defined.

    Raises ValueError if there is no such file or it fails to run.
    """
    path, _, name = spec.rpartition(":")
    if not os.path.isfile(path):
        raise ValueError(f"{spec}: no file {path!r}; expected FILE.py:NAME")
    try:
        return run_file(path, file_hash(path)).get(name)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # includes sys.exit
        raise ValueError(f"{path} cannot be imported: {type(e).__name__}: {e}") from e


def load_function(spec: str):
    """Run the file in a spec FILE.py:NAME; return its function NAME, wrapped.

    If the function raises something that is not an Exception, such as SystemExit, the wrapper
    raises a RuntimeError instead. So a function that calls sys.exit ends neither the program nor
    the calling thread. Ctrl-C still ends the program.

    Raises ValueError if the file cannot be run or has no such function, or if the function is
    async.
    """
    function = load_name(spec)
    if not callable(function):
        path, _, name = spec.rpartition(":")
        raise ValueError(f"{path} has no function {name}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{spec} is async: wrap it in a function that calls asyncio.run")

    @functools.wraps(function)
    def guarded(*arguments):
        try:
            return function(*arguments)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as e:
            raise RuntimeError(f"it raised {e!r}") from e

    return guarded


# ---- Pools -------------------------------------------------------------------------------------

# Regular expressions for values written as JSON.
COUNT = r"[1-9]\d*"
NUMBER = r"\d[\d.]*(e[-+]\d+)?"  # not negative
TEXT = r'"(?:[^"\\]|\\.)*+"'
HEADER = r'"(?:[^"\\]|\\["\\]|\\u00[a-f].)*+"'  # one line in Latin-1
# Field of an entry -> (regex for its value in JSON, what the error message says is expected).
FIELDS = {
    "protocol": (f'"({"|".join(PROTOCOLS)})"', ", ".join(PROTOCOLS)),
    "base_url": (
        r'(?i)(?!.*/(completions|messages|responses)/?"$)"https?://[^"/@?#\s]+(/[^"?#\s]*)?"',
        "http(s)://HOST/…, without a password, a query, or the /chat/completions or /messages "
        "that each call appends",
    ),
    "model": ('".+"', "its name at the provider"),
    "name": (r'"([^"\\,]|\\[^nr])+"', "a text of one line without commas"),
    "note": (r'"([^"\\]|\\[^nr])+"', "a text of one line"),
    "api_key_env": ('"[A-Z][A-Z0-9_]*"', "the name of a variable, in capitals, not the key"),
    "params": (
        r'\{(?!.*"(n|stream)":).*\}',
        "an object without n and stream: a call gives one whole reply",
    ),
    "headers": (rf"\{{({TEXT}: {HEADER}(, )?)*+\}}", "an object of one-line texts in Latin-1"),
    "price": (rf"\[{NUMBER}, {NUMBER}\]", "[input, output], dollars per million tokens"),
    "concurrency": (r"[1-9]\d{0,5}", "a whole number above 0"),
    "attempts": (r"[1-9]\d{0,5}", "a whole number above 0"),
    "timeout": (r"(?=.*[1-9])\d{1,6}(\.\d+)?", "seconds, above 0"),
    "function": (r'".+:\w+"', "FILE.py:NAME, the file beside the pool's"),
}


def pool_names() -> list[str]:
    """Return the names of all pools in this repository."""
    return [*LOCAL, *sorted(file.removesuffix(".json") for file in os.listdir(POOLS))]


def read_pool(spec: str) -> list[dict]:
    """Return the entries of a pool as dicts, not yet checked.

    For a pool of the laptop world, this starts the world's server, unless it is already running.

    Args:
        spec: a name or a JSON file, as described at the top of this file.

    Raises:
        ValueError: there is no such pool, or its file does not hold a list of one or more objects.
    """
    if spec in LOCAL:
        same = {"protocol": "openai", "base_url": local_server()[0], "price": [0, 0]}
        return [{**same, "model": name, "note": local_note(name)} for name in LOCAL[spec]]
    if not spec:
        raise ValueError("no workers are named: say --pool=NAME or --pool=FILE.json")

    is_named = spec in pool_names()
    path = os.path.join(POOLS, f"{spec}.json") if is_named else os.path.abspath(spec)
    try:
        with open(path, encoding="utf-8-sig") as file:  # Some editors write a byte order mark.
            entries = json.load(file)
        is_list = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
        if not is_list or not entries:
            raise ValueError("it holds no list of objects")
    except (OSError, ValueError, RecursionError) as e:
        names = ", ".join(pool_names())
        expected = f"there are {names}, or a JSON list of objects of {', '.join(FIELDS)}"
        raise ValueError(f"--pool={spec}: {e}; {expected}") from None

    entries = [{k: value for k, value in entry.items() if value is not None} for entry in entries]
    for entry in entries:
        if "function" in entry:  # The function's path is relative to the pool's folder.
            entry["function"] = os.path.join(os.path.dirname(path), str(entry["function"]))
    return entries


def name_of(entry: dict) -> str:
    """Return the name in a pool's entry, which defaults to the name of the model or function."""
    function = str(entry.get("function", "")).rpartition(":")[2]
    return str(entry.get("name") or entry.get("model") or function)


def check_pool(entries: list[dict], budget: float = 0.0) -> list[str]:
    """Return a sentence for each field that is missing or wrong in the entries of a pool.

    Each sentence names the worker and the field. Apart from names, it quotes no malformed value,
    because such a value may be a misplaced API key.
    """
    sentences = []
    names = []
    for number, entry in enumerate(entries):
        wrong = check_entry(entry, budget)
        name = name_of(entry) or f"worker {number}"
        if name in names:
            wrong["name"] = "another worker has it, too"
        names.append(name)
        sentences += [f"{name}: {key}: {sentence}" for key, sentence in wrong.items()]
    return sentences


def check_entry(entry: dict, budget: float) -> dict[str, str]:
    """Return {field: what is wrong with it} for an entry of a pool."""
    # Find the fields that are missing, and those whose value does not match their pattern.
    is_function = entry.get("protocol") == "python"
    required = ["function"] if is_function else ["base_url", "model"]
    wrong = {}
    for key in [*entry, "protocol", *required]:
        # An unknown field gets the pattern "", which no JSON value matches. So it is reported.
        pattern, expected = FIELDS.get(key, ("", f"one of {', '.join(FIELDS)}"))
        if not fits(entry.get(key), pattern):
            wrong[key] = f"expected {expected}"

    # Check the API key and the function that the entry names. If there is a budget, check that a
    # call's maximum cost is known.
    variable = entry.get("api_key_env")
    if variable and "api_key_env" not in wrong:
        api_key = os.environ.get(variable, "").strip()
        if not api_key:
            wrong["api_key_env"] = f"${variable} is not set"
        elif not re.fullmatch("[ -~]+", api_key):
            wrong["api_key_env"] = f"${variable} is not one line of ASCII characters"
    if is_function and "function" not in wrong:
        try:
            load_function(entry["function"])
        except ValueError as e:
            wrong["function"] = str(e)
    has_price = not wrong.keys() & {"protocol", "price", "params"}
    if budget and has_price and highest_cost(entry, entry.get("params", {}), {}) == float("inf"):
        if is_function:
            wrong["price"] = "leave it out for a budget, and return a Reply with the call's cost"
        else:
            wrong["price, params"] = (
                "a budget needs a price ([0, 0] for a server of your own) and max_tokens"
            )
    return wrong


def load_pool(
    spec: str, replay: str = "", budget: float = 0.0, ranks: int = 1, share: str = ""
) -> list[Worker]:
    """Return the workers of a pool.

    Args:
        spec: see `read_pool`.
        replay: the file of a Replay; "": replies are not kept.
        budget: dollars that the workers of all ranks may spend together; 0: no limit.
        ranks: the number of processes among which the budget and each worker's concurrency are
            divided. In each process, each worker's concurrency is at least 1.
        share: see Replay.

    Raises:
        ValueError: something is wrong with the pool. The message lists all wrong fields.
    """
    entries = read_pool(spec)
    sentences = check_pool(entries, budget)
    if sentences:
        raise ValueError("\n".join([f"--pool={spec}:", *sentences]))
    shared = {
        "replay": Replay(replay, share, is_local=spec in LOCAL) if replay else None,
        "budget": Budget(budget / ranks) if budget else None,
    }
    for entry in entries:
        concurrency = entry.get("concurrency", Worker.concurrency)
        entry["concurrency"] = max(1, concurrency // ranks)
    return [Worker(**entry, **shared) for entry in entries]


def ping_workers(pool: list[Worker]) -> list[Reply | WorkerError]:
    """Say hello to all workers at once; return each worker's Reply or WorkerError, in pool order.

    Each worker gets at most two attempts, of at most 120 s each. An empty reply counts as an error.
    """

    def ping(worker):
        hurried = replace(
            worker, timeout=min(worker.timeout, 120), attempts=min(worker.attempts or 2, 2)
        )
        try:
            reply = hurried.chat([{"role": "user", "content": "Say hello."}])
        except WorkerError as e:
            return e
        if not reply.text.strip():
            sentence = f"an empty answer to a hello, which ended by {reply.finish!r}"
            return WorkerError(f"{worker.name}: {sentence}")
        return reply

    with ThreadPool(len(pool)) as threads:
        return threads.map(ping, pool)


class Replay:
    """A file of replies, one JSON line each.

    If a run is killed, a rerun reads the replies from the file instead of paying for them again.
    Several processes may append to the file. Each line is written in a single call, with its
    newline at the beginning. So if a process is killed while it writes, the torn line that it
    leaves damages no other line.

    Args:
        path: the file.
        share: a prefix of call ids. Equal calls whose ids begin with the prefix share one reply,
            which is paid for once, even if their ids differ after the prefix. "": equal calls share
            a reply only if their ids are equal, too.
        is_local: whether the workers belong to the laptop world. The port in their URL is different
            in each run, so keys contain a hash of workers.py instead of the URL.
    """

    def __init__(self, path: str, share: str = "", is_local: bool = False):
        self.share = share
        self.world = file_hash(__file__) if is_local else ""
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self.file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self.replies = {}  # key -> Reply
        self.locks = {}  # key -> lock, so that equal calls wait for the reply to the first of them
        self.reading = threading.Lock()
        self.n_read = 0  # bytes read so far, excluding the last line, which may be incomplete
        self.read_new_lines()

    def read_new_lines(self):
        """Read the lines that this or another process has appended since the last call."""
        with self.reading:
            n_new = os.fstat(self.file).st_size - self.n_read
            data = os.pread(self.file, max(n_new, 0), self.n_read)
            self.n_read += max(data.rfind(b"\n"), 0)
            for line in data.split(b"\n"):
                with contextlib.suppress(ValueError, TypeError, KeyError):  # Skip a torn line.
                    row = json.loads(line)
                    self.replies[row["key"]] = Reply(**row["reply"])

    def key(self, worker: Worker, messages: list[dict], params: dict, call_id: str) -> str:
        """Return a hash of the worker, the messages, the parameters and the call's id.

        Of the worker, the hash covers the name, the protocol, the URL (or `world`) and the model.
        For a Python function, it also covers the function's name and the content of its file, but
        not the modules that the file imports. Ids that begin with a non-empty `share` are left out.
        """
        is_shared = self.share and call_id.startswith(self.share)
        call = [
            worker.name,
            worker.protocol,
            self.world or worker.base_url,
            worker.model + worker.code,
            messages,
            params,
            "shared" if is_shared else call_id,
        ]
        return hashlib.sha256(json.dumps(call, sort_keys=True).encode()).hexdigest()

    def find(self, key: str) -> Reply | None:
        """Return the reply that this or another process has stored under a key, or None."""
        if key not in self.replies:
            self.read_new_lines()
        return self.replies.get(key)

    def keep(self, key: str, reply: Reply):
        """Store a reply under a key, in memory and in the file."""
        self.replies[key] = reply
        os.write(self.file, f"\n{json.dumps({'key': key, 'reply': asdict(reply)})}".encode())


# ---- Money -------------------------------------------------------------------------------------


class Budget:
    """A spending limit in dollars for all workers of a pool together.

    Each attempt first reserves its maximum cost, and afterwards returns what it did not spend. If
    the cost of an attempt is unknown, the attempt returns nothing. Two kinds of worker can exceed
    the limit: Python functions whose price is unset or zero, for which nothing is reserved, and
    servers that charge more than the pool's price, for instance a fee for web searches.
    """

    def __init__(self, dollars: float):
        self.dollars = dollars
        self.left = dollars
        self.room = threading.Condition()
        self.running = 0  # the number of running attempts
        self.refused = False  # whether a call was refused because too little money was left

    def reserve(self, dollars: float):
        """Reserve dollars. If too few are left, first wait for running attempts to return some.

        Raises WorkerError if too few are left when no attempt is running.
        """
        with self.room:
            self.room.wait_for(lambda: dollars <= self.left or not self.running)
            if dollars > self.left:
                self.refused = True
                left = max(self.left, 0.0)
                is_too_small = dollars > self.dollars
                state = "is too small" if is_too_small else f"is spent, but for ${left:.4f}"
                raise WorkerError(
                    f"the budget of ${self.dollars:g} {state}; this call reserves ${dollars:.4f}"
                )
            self.left -= dollars
            self.running += 1

    def settle(self, reserved: float, cost: float | None):
        """End an attempt, and put back what it did not spend, or nothing if its cost is unknown."""
        with self.room:
            if cost is not None:
                self.left += reserved - cost
            self.running -= 1
            self.room.notify_all()


UNLIMITED = Budget(float("inf"))


def highest_cost(entry: dict, params: dict, body: dict) -> float:
    """Return the maximum cost of one attempt in dollars, which is 0 if the worker is free.

    The maximum is inf if the worker's price is unknown or its output is unlimited. A Python
    function without a price counts as free.
    """
    price = entry.get("price") or ([0, 0] if entry["protocol"] == "python" else None)
    if price and not any(price):
        return 0.0
    limits = [params[name] for name in LIMITS if name in params]
    if price is None or not fits(limits, rf"\[{COUNT}(, {COUNT})?\]"):
        return float("inf")

    def dearest(own: float, name: str) -> float:
        """Return the worker's own price, or OpenRouter's `max_price` if that is set and higher."""
        ceiling = find(params, "provider", "max_price", name)
        return max(own, ceiling) if fits(ceiling, NUMBER) else own

    # A token has at least one byte, so the body has at most len(json.dumps(body)) tokens. The extra
    # 512 cover the tokens that a chat template adds.
    n_in = len(json.dumps(body)) + 512
    # Writing a token to a cache costs as much as two prompt tokens, or less.
    rate = 2 if "cache_control" in params else 1
    dollars_in = dearest(price[0], "prompt") * n_in * rate
    dollars_out = dearest(price[1], "completion") * max(limits)
    return (dollars_in + dollars_out) / 1e6


def probable_cost(pool: list[Worker] | list[dict], calls: int) -> float | None:
    """Estimate the cost of a number of calls in dollars; return None if a price is unknown.

    The estimate assumes that calls are spread evenly over the workers, and that each call has 1,000
    tokens in and 700 out. A Python function and a server on this machine are free unless they have
    a price.
    """
    dollars = 0.0
    for worker in pool:
        entry = worker if isinstance(worker, dict) else vars(worker)
        is_own = entry.get("protocol") == "python" or re.match(LOOPBACK, str(entry.get("base_url")))
        price = entry.get("price") or ([0, 0] if is_own else None)
        if not fits(price, FIELDS["price"][0]):
            return None
        dollars += (1000 * price[0] + 700 * price[1]) / 1e6
    return dollars * calls / len(pool)


def demand_budget(pool: list[Worker] | list[dict], budget: float, calls: int, purpose: str):
    """Print an estimate of what `purpose`, such as "training", costs, unless it is free.

    Raises ValueError with the estimate instead if `purpose` may cost money and has no budget.
    """
    cost = probable_cost(pool, calls)
    if cost != 0.0:
        estimate = "nobody knows how much" if cost is None else f"probably ${max(cost, 0.01):,.2f}"
        sentence = f"{purpose} costs money, {estimate} for {calls:,} calls"
        if not budget:
            raise ValueError(f"{sentence}: say --budget=DOLLARS")
        print(sentence, flush=True)


# ---- The laptop world --------------------------------------------------------------------------
# The workers of the laptop world are small programs that do not cheat: they see only what any
# worker sees, and never the right answer. To add a trade, add a row to TRADES, rows to KINDS for
# questions that need the trade, and a dict of the facts that the trade knows, if it needs any.

# workflow.py writes these headings above the question and above each subtask.
QUESTION = "Question:\n"
TASK = "Your task:\n"
SKILL = {"": 1.0, "junior": 0.6, "tired": 0.7}  # sort of worker -> share of calls it attempts
FRAMES = ("What is {}?", "Find {}.", "Tell me {}.", "Give me {}.")  # {}: an expression
SIGNS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
SPELLINGS = {  # words in a question -> (a coder's instruction, what the coder does to a word)
    "turned around": ("Reverse it.", lambda word: word[::-1]),
    "shouted": ("Write it in capitals.", str.upper),
    "thinned out": ("Leave out the vowels.", lambda word: re.sub("[aeiouAEIOU]", "", word)),
}

# Unless it has lost the thread (see SKILL), a worker with a trade always follows an instruction of
# that trade, and never an unknown one. In the two cases below, it does its trade's work in only the
# given share of the calls.
VAGUE_WORKS = 0.7  # The instruction is vague or missing.
OTHERS_WORK = 0.3  # The instruction belongs to a different trade.
VAGUE = ("Work it out.", "Find the value.")
SOLVE_IT = "Solve the question."  # also vague; used by eval.py's fixed workflows and --ablate

NUMERALS = """
uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince dieciséis
diecisiete dieciocho diecinueve veinte veintiuno veintidós veintitrés veinticuatro veinticinco
veintiséis veintisiete veintiocho veintinueve treinta
""".split()
ELEMENTS = """
hydrogen helium lithium beryllium boron carbon nitrogen oxygen fluorine neon sodium magnesium
aluminium silicon phosphorus sulfur chlorine argon potassium calcium scandium titanium vanadium
chromium manganese iron cobalt nickel copper zinc
""".split()
COUNTRIES = """
Austria-Vienna Belgium-Brussels Chile-Santiago Cuba-Havana Denmark-Copenhagen Egypt-Cairo
Finland-Helsinki France-Paris Germany-Berlin Ghana-Accra Greece-Athens Hungary-Budapest
Iceland-Reykjavik Iran-Tehran Iraq-Baghdad Ireland-Dublin Italy-Rome Japan-Tokyo Jordan-Amman
Kenya-Nairobi Lebanon-Beirut Libya-Tripoli Nepal-Kathmandu Norway-Oslo Peru-Lima Poland-Warsaw
Portugal-Lisbon Qatar-Doha Russia-Moscow Senegal-Dakar Spain-Madrid Sweden-Stockholm
Syria-Damascus Thailand-Bangkok Tunisia-Tunis Uruguay-Montevideo
""".split()
WORDS = """
planet river garden window market silver dragon castle forest bridge winter summer orange yellow
purple candle basket rocket guitar violin doctor farmer sailor pirate monkey rabbit turtle
spider butter cheese pepper ginger cotton velvet marble copper bronze tunnel harbor island
desert valley meadow canyon glacier volcano thunder shadow mirror
""".split()

DIGITS = {str(n): str(n) for n in range(2, 40)}
SPANISH = {word: str(n) for n, word in enumerate(NUMERALS, 1)}
NUMBERS = {f"the atomic number of {element}": str(n) for n, element in enumerate(ELEMENTS, 1)}
NAMES = {f"element number {n}": element for n, element in enumerate(ELEMENTS, 1)}
CITIES = dict(f"the capital of {pair}".split("-") for pair in COUNTRIES)
FACTS = {**NUMBERS, **CITIES, **NAMES}

TRADES = {  # trade -> (regex for what it works on, {instruction: function that replaces a match})
    "calculator": (
        r"\b(\d{1,6}) ([-+*×]) (\d{1,6})\b",
        {"Calculate it.": lambda m: str(SIGNS[m[2].replace("×", "*")](int(m[1]), int(m[3])))},
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
# All instructions that the workers know, except SOLVE_IT. Random workflows for the laptop world's
# questions draw their subtasks from these.
PHRASES = (*VAGUE, *itertools.chain(*(instructions for _, instructions in TRADES.values())))
LOCAL = {  # pool -> its workers' names, such as "coder" or "tired coder"; "tired" is a key of SKILL
    "local": [*TRADES, "generalist"],
    "local:pairs": [f"{sort}{trade}" for trade in TRADES for sort in ("", "junior ")],
    "local:tired": [f"{sort}{trade}" for trade in TRADES for sort in ("tired ", "junior ")],
}


def local_note(name: str) -> str:
    """Return the note that tells a Conductor how to use a local worker."""
    instructions = TRADES.get(name.rpartition(" ")[2], ("", {}))[1]
    if not instructions:
        return f"It tries everything, and is seldom right; it is a {name}"
    quoted = " or ".join(f'"{instruction}"' for instruction in instructions)
    return f"Tell it {quoted}; it is a {name}"


def sums(left: dict, right: dict) -> dict:
    """Return {expression: value} for sums, differences and products of `left` with `right`.

    `left` and `right` also map expressions to values. {"2": "2"} and {"tres": "3"} give
    {"2 + tres": "5", "2 - tres": "-1", "2 * tres": "6"}.
    """
    values = {}
    for a, x in left.items():
        for b, y in right.items():
            for sign, compute in SIGNS.items():
                values[f"{a} {sign} {b}"] = str(compute(int(x), int(y)))
    return values


def spelled(values: dict) -> dict:
    """Return the values in all spellings: {"Lima": "Lima"} gives {"Lima shouted": "LIMA", …}."""
    spellings = {}
    for expression, value in values.items():
        for wish, (_, spell) in SPELLINGS.items():
            spellings[f"{expression} {wish}"] = spell(value)
    return spellings


KINDS = {  # kind of question -> (the trades it needs, {expression: value})
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
    """Return a list of (kind, question, answer) for a split, "train" or "test".

    About a quarter of the expressions belong to "test". All questions about an expression are in
    the same split.
    """
    rows = []
    for kind, (_, values) in KINDS.items():
        for expression, answer in values.items():
            is_test = zlib.crc32(expression.encode()) % 4 == 0
            if is_test == (split == "test"):
                rows += [(kind, frame.format(expression), answer) for frame in FRAMES]
    return rows


def hashed(purpose: str, content) -> float:
    """Return a pseudo-random number in [0, 1) that depends only on the arguments.

    The local workers use this instead of random draws, so that equal calls get equal replies.
    """
    digest = hashlib.sha256(json.dumps([purpose, content]).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


def rewrite(text: str, trade: str, instruction: str) -> str:
    """Do a trade's work on a text; return the new text, or "" if there is nothing to do.

    The rest of the text stays as it is, so that another worker can continue with the new text:
    rewrite("Find dos + 3.", "translator", "Translate it.") is "Find 2 + 3.". But if the text now
    asks for a single word, such as "What is 7?", only that word is returned.
    """
    pattern, works = TRADES[trade]
    rewritten = re.sub(pattern, works[instruction], text)
    answer = re.sub(r"^(?:What is|Find|Tell me|Give me) (\S+)[?.]\Z", r"\1", rewritten)
    return answer if rewritten != text else ""


def guess(trade: str, question: str) -> str:
    """Return one of a trade's instructions, always the same one for the same question."""
    own = list(TRADES[trade][1])
    return own[int(len(own) * hashed("order", question))]


def instruction_heard(trade: str, subtask: str, question: str, messages: list[dict]) -> str:
    """Return the instruction that a worker of this trade follows, or "" if it follows none."""

    def is_told(instruction):
        words = re.escape(instruction.rstrip("."))
        return re.search(rf"\b{words}\b", subtask, re.IGNORECASE)

    told = list(filter(is_told, PHRASES))
    own = [instruction for instruction in told if instruction in TRADES[trade][1]]
    if own:
        return own[0]
    if set(told) - set(VAGUE):  # instructions of other trades
        share = OTHERS_WORK
    elif told or is_told(SOLVE_IT) or not subtask:
        share = VAGUE_WORKS
    else:
        share = 0.0
    works = hashed(f"{trade} listens", messages) < share
    return guess(trade, question) if works else ""


def specialist(name: str, messages: list[dict]) -> str:
    """Return a local worker's answer, which is always the same for the same messages.

    A worker with a trade works on the last response after the question, or on the question if no
    response follows. The generalist ignores responses and instructions: for about one prompt in
    eight, it tries the trades on the question in turn. If none fits, and for all other prompts, it
    names a pseudo-random number.
    """
    # Find the last user turn that begins with QUESTION, or else the last user turn. An earlier
    # conversation may precede this turn, and responses of other workers may follow it.
    users = [i for i, message in enumerate(messages) if message["role"] == "user"] or [0]
    asking = [i for i in users if messages[i]["content"].startswith(QUESTION)] or users
    asked, *later = messages[asking[-1] :]
    question = asked["content"].removeprefix(QUESTION).partition("\n\n" + TASK)[0]
    responses = [message["content"] for message in later if message["role"] == "assistant"]
    subtask = messages[-1]["content"].partition(TASK)[2].strip()

    # Answer as this sort of worker does.
    if name == "generalist":
        chance = hashed(name, messages)
        trades = TRADES if chance < 1 / 8 else ()
        answers = [rewrite(question, trade, guess(trade, question)) for trade in trades]
        return next(filter(None, answers), f"I think it is {chance * 100:.0f}.")
    sort, _, trade = name.rpartition(" ")
    if hashed(sort, messages) >= SKILL[sort]:
        return "I have lost the thread."
    instruction = instruction_heard(trade, subtask, question, messages)
    if not instruction:
        return f"I am a {trade}; I do not know what to do."
    text = [question, *responses][-1]
    return rewrite(text, trade, instruction) or f"I am a {trade}; I find nothing here to work on."


# ---- The server: OpenAI's chat completions, for the specialists and for workflow.py --------------

LONGEST_BODY = 64 << 20  # bytes
LONGEST_CHAT = 4_000_000  # characters, which are about a million tokens
CHAT_PATH = "/v1/chat/completions"
PATHS = f"there are GET /health, GET /v1/models, GET /v1/models/NAME and POST {CHAT_PATH}"
# A role that clients may use -> the role that workers know.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Request parameter -> (regex for the accepted values in JSON, what the error message says is
# expected). null always counts as unset. Besides these, the server reads only model, messages and
# stream_options. It ignores all other parameters, whatever their values.
PARAMETERS = {
    "n": ("1", "1, as this server gives a single answer"),
    "tool_choice": ('"(none|auto)"', "none or auto, as this server makes no tool calls"),
    "function_call": ('"(none|auto)"', "none or auto, as this server makes no function calls"),
    "response_format": (r'\{"type": "text"\}', "text, as this server has no other formats"),
    "modalities": (r'\["text"\]', "text, as this server makes nothing else"),
    "logprobs": ("false", "false, as this server gives no log-probabilities"),
    "stream": ("true|false", "true or false"),
    "stop": (rf"{TEXT}|\[({TEXT}(, )?)*+\]", "a text or a list of texts"),
}


@dataclass
class Refusal(Exception):
    """Raised to answer a request with an HTTP error."""

    status: int
    message: str
    code: str | None = None  # OpenAI's name for the error, if it has one
    headers: dict = field(default_factory=dict)


def plain_messages(messages: list[dict]) -> list[dict]:
    """Return messages whose contents are strings and whose roles are those that workers know.

    OpenAI also allows null and a list of parts as the content, and "developer" as a role.

    Raises Refusal if a part is not text or the messages are too long in total, and a ValueError,
    TypeError, LookupError or AttributeError if the messages are malformed.
    """
    plain = []
    for message in messages:
        content = "" if message["content"] is None else message["content"]
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in parts:
            kind = part.get("type", "text")
            if kind != "text":
                expected = '{"type": "text", "text": TEXT}'
                raise Refusal(400, f"this server reads no {kind!r:.40}; send {expected}")
        text = without_surrogates("\n".join(part["text"] for part in parts))
        plain.append({"role": ROLES[message["role"]], "content": text})
    if not plain:
        raise ValueError("no messages")
    length = sum(len(message["content"]) for message in plain)
    if length > LONGEST_CHAT:
        sentence = f"the messages have {length:,} characters; at most {LONGEST_CHAT:,} are read"
        raise Refusal(400, sentence, "context_length_exceeded")
    return plain


def check_parameters(body: dict):
    """Raise Refusal if a parameter's value does not match PARAMETERS."""
    for name, (pattern, expected) in PARAMETERS.items():
        value = body.get(name)
        if value is not None and not fits(value, pattern):
            raise Refusal(400, f"{name}={json.dumps(value):.80}: expected {expected}")


def cut(text: str, stop: str | list[str] | None) -> str:
    """Return a text up to the first stop text in it: cut("a. b. c", ["c", "."]) == "a"."""
    stops = [stop] if isinstance(stop, str) else stop or []
    return min((text.partition(one)[0] for one in stops if one), key=len, default=text)


def content_security_policy(page: bytes) -> str:
    """Return the value of a header that limits what an HTML page may load and run.

    The page may use the scripts and styles that it contains, connect to its own server, and show
    images with data: URLs.
    """
    texts = re.findall(rb"<(?:script|style)>(.*?)</(?:script|style)>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text).digest()).decode() for text in texts]
    own = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {own}; style-src {own}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class Handler(BaseHTTPRequestHandler):
    """Answer the requests of one connection as OpenAI's API does.

    Subclasses must define `models` and `complete()`, which reads `self.body`. Each of the body's
    messages is {"role": role, "content": text}, where the role is "system", "user" or "assistant".
    `complete` must either raise Refusal or call `reply` once. If body["stream"] is true, `complete`
    may first call `send_event` and `send_comment` any number of times.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 60  # seconds after which reading from or writing to the client fails
    models: list[str] = []
    public_paths: tuple[str, ...] = ()  # paths that need no key
    streaming = False  # whether a stream has started; the connection ends with the stream

    def answer(self):
        """Answer one request with the requested content or with an error."""
        path = urllib.parse.unquote(self.path.partition("?")[0])
        try:
            self.check_client(path)
            if path == CHAT_PATH:
                self.check_method("POST")
                self.chat(self.read_body(LONGEST_BODY))
            else:
                content = self.page(path)
                self.check_method("GET", "HEAD")
                self.read_body(0)  # Refuse a body: unread, it would pass for the next request.
                self.send(200, content)
        except Refusal as refusal:
            self.fail(refusal)
            self.drop_input()

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = answer

    def check_client(self, path: str):
        """Raise Refusal if the client lacks a required key, or sends a local server a foreign Host.

        Paths in `public_paths` require no key.
        """
        # DNS rebinding: a website can make its own name resolve to 127.0.0.1, so that its page
        # reaches this server. The page's requests still carry the website's name as their Host.
        host = self.headers.get("Host", "")
        if self.server.is_local and not re.match(LOOPBACK, f"http://{host}"):
            raise Refusal(403, "this server is for programs on its machine: send Host: localhost")
        if self.server.api_key and path not in self.public_paths:
            # Encoding as Latin-1 undoes http.server's decoding.
            given = self.headers.get("Authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, f"Bearer {self.server.api_key}".encode()):
                sentence = "send this server's key, as Authorization: Bearer KEY"
                asked = {"WWW-Authenticate": "Bearer"}
                raise Refusal(401, sentence, "invalid_api_key", asked)

    def check_method(self, *allowed: str):
        if self.command not in allowed:
            sentence = f"no {self.command} {self.path:.80}; {PATHS}"
            raise Refusal(405, sentence, headers={"Allow": ", ".join(allowed)})

    def page(self, path: str) -> dict | list | bytes:
        """Return the content at a path: a dict or list for JSON, or an HTML page as bytes."""
        card = {"object": "model", "created": 0, "owned_by": "us"}
        cards = {f"/v1/models/{name}": {"id": name, **card} for name in self.models}
        models = {"object": "list", "data": [*cards.values()]}
        pages = {"/health": {"status": "ok"}, "/v1/models": models, **cards}
        if path not in pages:
            raise Refusal(404, f"no {self.command} {path:.80}; {PATHS}")
        return pages[path]

    def read_body(self, longest: int) -> bytes:
        """Return the request's body.

        Raises Refusal if it is longer than `longest` bytes, or if it is sent in chunks.
        """
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not re.fullmatch(r"\d{1,18}", length):
            raise Refusal(411, "send a Content-Length, and the body as it is, not in chunks")
        if int(length) > longest:
            raise Refusal(413, f"send a Content-Length of at most {longest:,}")
        return self.rfile.read(int(length))

    def chat(self, data: bytes):
        """Parse and check the body of a request for a completion, and answer the request.

        The Content-Type must be JSON. This keeps out the web pages of other sites, because browsers
        let those pages send JSON only to servers that permit it.
        """
        if self.headers.get_content_type() != "application/json":
            raise Refusal(415, "send Content-Type: application/json")
        try:
            self.body = json.loads(data)
            self.body["messages"] = plain_messages(self.body["messages"])
            model = self.body["model"]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            expected = '{"model": NAME, "messages": [{"role": ROLE, "content": TEXT}]}'
            roles = ", ".join(ROLES)
            raise Refusal(400, f"expected {expected}; a role is one of {roles}") from None
        if model not in self.models:
            sentence = f"there is no model {model!r:.80}; there are {', '.join(self.models)}"
            raise Refusal(404, sentence, "model_not_found")
        check_parameters(self.body)

        now = time.time_ns()
        self.card = {"id": f"chatcmpl-{now}", "created": now // 10**9, "model": model}
        self.complete()

    def reply(self, text: str, finish: str = "stop", usage: dict | None = None, **extra):
        """Answer with a completion that consists of `text`, cut before the first stop text.

        `extra` holds fields that OpenAI's API does not have, which its clients ignore.
        """
        shown = cut(text, self.body.get("stop"))
        finish = finish if shown == text else "stop"
        if not self.body.get("stream"):
            message = {"role": "assistant", "content": shown}
            choice = {"index": 0, "message": message, "finish_reason": finish}
            completion = {"object": "chat.completion", "choices": [choice], "usage": usage}
            self.send(200, self.card | completion | extra)
            return
        # A client that asks for the usage expects it in a separate event, as OpenAI sends it.
        if find(self.body, "stream_options", "include_usage"):
            self.send_event({"content": shown}, finish)
            self.send_event(None, usage=usage, **extra)
        else:
            self.send_event({"content": shown}, finish, usage=usage, **extra)
        self.send_piece("data: [DONE]\n\n")

    def fail(self, refusal: Refusal):
        """Answer with an error in OpenAI's format. The answer ends the connection."""
        self.close_connection = True
        is_server_error = refusal.status >= 500
        error = {
            "message": refusal.message,
            "type": "server_error" if is_server_error else "invalid_request_error",
            "param": None,
            "code": refusal.code,
        }
        if self.streaming:
            self.send_piece(f"data: {json.dumps({'error': error})}\n\n")
            return
        if is_server_error and "Retry-After" not in refusal.headers:
            refusal.headers["x-should-retry"] = "false"  # A retry would be paid for again.
        self.send(refusal.status, {"error": error}, **refusal.headers)

    def send(self, status: int, content, **headers):
        """Send a response. Bytes are sent as an HTML page, any other content as JSON."""
        is_page = isinstance(content, bytes)
        body = content if is_page else json.dumps(content).encode()
        headers["Content-Type"] = "text/html; charset=utf-8" if is_page else "application/json"
        headers["Content-Length"] = len(body)
        headers["X-Content-Type-Options"] = "nosniff"
        if is_page:
            headers["Content-Security-Policy"] = content_security_policy(body)
        if self.close_connection:
            headers["Connection"] = "close"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_comment(self, text: str):
        """Keep a silent stream alive with a comment, which clients ignore."""
        self.send_piece(f": {text}\n\n")

    def send_event(self, delta: dict | None, finish: str | None = None, **extra):
        """Send a chunk of a completion. If delta is None, the chunk has no choices."""
        choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
        event = {**self.card, "object": "chat.completion.chunk", "choices": choices, **extra}
        self.send_piece(f"data: {json.dumps(event)}\n\n")

    def send_piece(self, text: str):
        """Send a piece of a stream. Before the first piece, send the headers and an opening event.

        Closing the connection marks the end of the stream.
        """
        if not self.streaming:
            self.streaming = True
            self.close_connection = True
            self.wfile.write(
                b"HTTP/1.1 200 OK\r\n"
                b"Content-Type: text/event-stream\r\n"
                b"Cache-Control: no-cache\r\n"
                b"X-Accel-Buffering: no\r\n"  # so that nginx forwards each event at once
                b"Connection: close\r\n\r\n"
            )
            self.send_event({"role": "assistant", "content": ""})
        self.wfile.write(text.encode())

    def send_error(self, code, message=None, explain=None):
        """Answer a request that http.server itself rejects.

        For example, http.server rejects a request with an unknown method or malformed headers.
        """
        self.fail(Refusal(code, message or "this is no HTTP request"))

    def drop_input(self):
        """Read and drop the rest of the client's input, up to about LONGEST_BODY bytes.

        Closing a connection with unread input resets it, and the answer could get lost.
        """
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(2)
            for _ in range(LONGEST_BODY >> 16):
                if not self.rfile.read1(1 << 16):
                    break

    def hung_up(self) -> bool:
        """Return whether the client has closed the connection, or at least its sending side."""
        try:
            can_read = wait_for_read(self.connection, timeout=0)
            return can_read and self.connection.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):
            return True

    def handle(self):
        """Answer the requests of the connection. Report a bug to the client and on stderr."""
        try:
            super().handle()
        except ConnectionError:
            pass  # The client has hung up.
        except Exception as bug:
            self.fail(Refusal(500, f"{type(bug).__name__}: {bug}"))
            raise

    def log_message(self, *args):
        pass


class SpecialistHandler(Handler):
    """Serve the workers of the laptop world. Each word counts as one token."""

    models = list(dict.fromkeys(itertools.chain(*LOCAL.values())))

    def complete(self):
        messages = self.body["messages"]
        text = specialist(self.body["model"], messages)
        n_in = sum(len(message["content"].split()) for message in messages)
        n_out = len(text.split())
        usage = {
            "prompt_tokens": n_in,
            "completion_tokens": n_out,
            "total_tokens": n_in + n_out,
        }
        self.reply(text, usage=usage)


class Server(ThreadingHTTPServer):
    """An HTTP server that is bound to its port, but not started. Each connection gets a thread.

    Args:
        port: The port to bind; 0: any free one.
        handler: The class that answers the requests.
        host: The address to bind. Only this machine can reach 127.0.0.1. An address that other
            machines can reach requires an api_key.
        api_key: The key that clients must send as Bearer; "": clients need no key.

    Raises:
        ValueError: The port cannot be bound, or other machines could use the server without a key.
    """

    # The maximum number of connections that wait to be accepted. With the default of 5, if many
    # clients connect at once, some must wait a second.
    request_queue_size = 1024

    def __init__(
        self, port: int, handler: type[Handler], host: str = "127.0.0.1", api_key: str = ""
    ):
        self.is_local = bool(re.fullmatch(r"localhost|127\.[\d.]+|::1", host))
        self.api_key = api_key
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        if not self.is_local and not api_key:
            raise ValueError(
                f"--host={host} lets other machines in: set $CONDUCTOR_API_KEY to a key of your "
                "own, which clients send as Authorization: Bearer KEY"
            )
        try:
            super().__init__((host, port), handler)
        except (OSError, OverflowError) as e:
            sentence = f"cannot serve on {host}:{port}: {e}; choose another --port=N (0: any)"
            raise ValueError(sentence) from None


def serve_specialists(port: int, wait=threading.Event().wait):
    """Print the URL of the laptop world's workers, and serve them until `wait` returns."""
    server = Server(port, SpecialistHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
    wait()


@once
def local_server() -> tuple[str, subprocess.Popen]:
    """Start a process that serves the laptop world's workers; return the server's URL and process.

    Later calls return the same URL and process. The server ends when this process ends, because the
    pipe to the server's stdin is then closed. The server's environment contains no API keys.
    """
    names = "PATH HOME LANG LC_ALL PYTHONPATH PYTHONHOME LD_LIBRARY_PATH TMPDIR".split()
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys, workers; workers.serve_specialists(0, sys.stdin.read)"],
        cwd=FOLDER,
        env={name: os.environ[name] for name in names if name in os.environ},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # so that Ctrl-C reaches only the parent
    )
    return process.stdout.readline().strip(), process


def main():
    # eval.py, sample.py, train.py and workflow.py use model.configure. This file does not, so that
    # it starts without the delay of importing torch.
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command_help = "serve the laptop world's workers; default: call each worker of a pool"
    parser.add_argument("command", nargs="?", choices=["serve"], help=command_help)
    pool_help = f"the workers to call: {', '.join(pool_names())} or FILE.json [local]"
    parser.add_argument("--pool", default="local", metavar="NAME", help=pool_help)
    port_help = "the port on which to serve; 0: any free one [8765]"
    parser.add_argument("--port", default=8765, type=int, help=port_help)
    settings = parser.parse_args()
    if settings.command == "serve":
        if settings.pool != "local":
            parser.error("serve serves the laptop world's workers only; leave out --pool")
        return serve_specialists(settings.port)

    pool = load_pool(settings.pool)
    replies = ping_workers(pool)
    for worker, reply in zip(pool, replies):
        if isinstance(reply, WorkerError):
            print(reply)
            continue
        cost = "unknown cost" if reply.cost is None else f"${reply.cost:.6f}"
        tokens = reply.prompt_tokens + reply.completion_tokens
        words = textwrap.shorten(one_line(reply.text), 60, placeholder=" …")
        print(f"{worker.name:<23} {reply.seconds:.2f} s, {tokens} tokens, {cost}: {words}")
        if worker.note:
            print(" " * 24 + worker.note)
    sys.exit(any(isinstance(reply, WorkerError) for reply in replies))


if __name__ == "__main__":
    # If a user's file imports workers, give it this module instead of a second copy.
    sys.modules["workers"] = sys.modules["__main__"]
    try:
        main()
    except (ValueError, KeyboardInterrupt) as e:
        sys.exit(str(e) or "interrupted")
