"""Workers over networks and proxies that fail, as nginx, tinyproxy and a firewall that drops packets were seen to."""
import socket

import pytest
from rogue import CHAT, GOOD, KEY, Rogue, always, http, quick, worker  # noqa: F401 (quick is a fixture)

import workers
from workers import Worker, WorkerError

HTML = b"<html><body><h1>Sorry</h1></body></html>"


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux's")
def test_a_path_that_has_gone_dead_is_noticed_in_two_minutes_idle_or_used():
    with always(GOOD) as server:
        w = worker(server)
        w.chat(CHAT)
        pools = w.session.adapters["http://"].poolmanager.pools
        sock = pools[pools.keys().pop()].pool.get().sock
    for option, value in (("KEEPIDLE", 60), ("KEEPINTVL", 10), ("KEEPCNT", 6), ("USER_TIMEOUT", 120_000)):
        assert sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}")) == value


@pytest.mark.parametrize("fails", ["name", "TLS handshake"])
def test_where_nothing_was_sent_nothing_is_billed_however_long_it_took(fails, monkeypatch):
    """A resolver or a firewall that falls silent: it is tried again, and the budget stays whole."""
    def lookup(*_, **__):
        raise socket.gaierror(-3, "Temporary failure in name resolution")
    monkeypatch.setattr(workers, "CONNECT", 1e-9 if fails == "name" else 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}/v1"
        if fails == "name":
            url = "http://models.invalid/v1"
            monkeypatch.setattr(socket, "getaddrinfo", lookup)
        budget = workers.Budget(1.0)
        w = Worker("openai", url, "m", price=[1, 1], params={"max_tokens": 9}, attempts=2, budget=budget)
        with pytest.raises(WorkerError, match="the connection failed.*attempt 2"):
            w.chat(CHAT)
    assert budget.left == pytest.approx(1.0)


@pytest.mark.parametrize("status", [504, 524])
def test_a_proxy_that_did_not_wait_is_not_asked_again(status, monkeypatch):
    """The worker behind it may still be at work, and be paid. (A quick 504: test_retried_until_it_works.)"""
    received = workers.received

    def in_a_minute(*asked):
        pieces = received(*asked)
        response = next(pieces)
        response.elapsed *= 1e6
        yield response
        yield from pieces
    monkeypatch.setattr(workers, "received", in_a_minute)
    with always(HTML, status) as server, pytest.raises(WorkerError, match=f"did not wait long enough.*HTTP {status}"):
        worker(server).chat(CHAT)
    assert len(server.requests) == 1
    body = {"error": {"type": "timeout_error", "message": "Out of time"}}  # Anthropic's and Google's own
    with always(body, status) as server, pytest.raises(WorkerError, match=f"^m: HTTP {status}: Out of time .attempt 1,"):
        worker(server).chat(CHAT)


def test_a_redirect_says_where_to():
    there = "https://models.invalid/v1/chat/completions"
    with always(HTML, 301, Location=there) as server, pytest.raises(WorkerError, match=f"redirected to {there}, so change base_url"):
        worker(server).chat(CHAT)


@pytest.mark.parametrize("status, attempts", [(401, 1), (407, 1), (413, 1), (500, 2)])
def test_who_refuses_and_hangs_up_is_told_by_the_status(status, attempts):
    """A proxy that refuses before it has read the request resets the connection amid its own answer."""
    with Rogue(lambda n, c: c.sendall(http(HTML, status)[:-5])) as server:
        with pytest.raises(WorkerError, match=f"HTTP {status}"):
            worker(server, attempts=2).chat(CHAT)
    assert len(server.requests) == attempts


def test_certificates_of_the_environment_are_trusted_at_loopback_too(monkeypatch):
    monkeypatch.delenv("CURL_CA_BUNDLE", raising=False)
    for bundle, verify in (("/my/ca.crt", "/my/ca.crt"), ("", True)):
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", bundle)
        assert Worker("openai", "https://localhost:1/v1", "m").session.verify == verify


@pytest.mark.parametrize("url", ["localhost:8000/v1", "", f"https://me:{KEY}@h/v1", f"me:{KEY}@h/v1", '"http://h/v1"'])
def test_a_variable_has_to_hold_an_url_and_its_value_is_not_shown(url, monkeypatch):
    monkeypatch.setenv("MY_URL", url)
    with pytest.raises(ValueError, match="base_url must be http") as caught:
        Worker("openai", "$MY_URL", "m")
    assert KEY not in str(caught.value)
