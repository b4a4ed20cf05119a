"""What real providers' refusals say, in the shapes of their own documentation: who is at fault, whether to ask
again and when, and words that help. Servers of one answer stand in for them."""
import json

import pytest
from rogue import CHAT, GOOD, Rogue, always, http, quick, waits, worker  # noqa: F401 (two are fixtures)

from workers import Budget, Worker, WorkerError

INVALID_KEY = {"error": {"code": 400, "message": "API key not valid.", "status": "INVALID_ARGUMENT",
                         "details": [{"reason": "API_KEY_INVALID", "domain": "googleapis.com"}]}}
NO_CREDIT = {"type": "error", "error": {"type": "invalid_request_error",
                                        "message": "Your credit balance is too low to access the Anthropic API."}}


def refused(body, status=400, **headers):
    """The error of a worker whose provider answers so."""
    with always(body, status, **headers) as server, pytest.raises(WorkerError) as e:
        worker(server).chat(CHAT)
    return e.value


@pytest.mark.parametrize("status, body, told", [
    # openrouter.ai/docs/api/reference/errors-and-debugging: the message may only say that somebody else failed
    (400, {"error": {"code": 400, "message": "Provider returned error", "metadata": {
        "provider_name": "OpenAI", "raw": '{"error": {"message": "max_tokens is too large"}}'}}},
     'Provider returned error: {"error": {"message": "max_tokens is too large"}}'),
    (403, {"error": {"code": 403, "message": "Flagged", "metadata": {"reasons": ["violence"]}}}, "Flagged: ['violence']"),
    (400, {"error": {"message": "No", "metadata": "of no use"}}, "No (attempt"),
    # Google's wrapping of an error at some endpoints (github.com/google-gemini/gemini-cli/issues/13665)
    (400, [INVALID_KEY], "HTTP 400: API key not valid. (attempt"),
    (400, [], "HTTP 400: []"),
    # Mistral's, FastAPI's, and a page of HTML
    (422, {"object": "error", "message": "Unknown model"}, "HTTP 422: Unknown model (attempt"),
    (403, {"detail": "Not allowed"}, "HTTP 403: Not allowed (attempt"),
    (422, {"detail": [{"loc": ["body", "top_k"], "msg": "too large"}]}, "too large"),
    (403, b"<h1>Forbidden</h1>", "HTTP 403: <h1>Forbidden</h1>"),
])
def test_what_a_refusal_says(status, body, told):
    assert told in str(refused(body, status))


@pytest.mark.parametrize("status", [404, 405])
def test_a_wrong_base_url_is_shown(status):
    """The commonest mistake of a pool file is a base_url with too little or too much behind the host."""
    with always({"detail": "Not Found"}, status) as server, pytest.raises(WorkerError) as e:
        worker(server, base_url=f"{server.url}/oops").chat(CHAT)
    assert f"asked {server.url}/oops/chat/completions" in str(e.value) and "base_url" in str(e.value)


def test_a_404_of_openrouters_is_not_the_urls_fault():
    told = str(refused({"error": {"code": 404, "message": "No endpoints found", "metadata": {
        "failed_routing_step": "Filter by Parameters"}}}, 404))
    assert "No endpoints found: Filter by Parameters" in told and "base_url" not in told


def test_a_query_in_base_url_is_refused():
    """Behind it would stand the protocol's path: Azure's URLs of before its /openai/v1."""
    with pytest.raises(ValueError, match="base_url must be .*query"):
        Worker("openai", "https://res.openai.azure.com/openai?api-version=2024-10-21", "m")


@pytest.mark.parametrize("status, body, request_is_wrong", [
    (400, {"error": {"message": "temperature is above 2"}}, True), (422, {"detail": "x"}, True),
    (400, INVALID_KEY, False), (400, [INVALID_KEY], False), (400, NO_CREDIT, False), (401, {}, False), (404, {}, False),
])
def test_who_is_at_fault(status, body, request_is_wrong):
    """Google and Anthropic answer a wrong key and an empty account with 400, as they do a wrong request. The
    server would blame its client for it."""
    assert refused(body, status).bad_request == request_is_wrong


def test_openrouters_402_is_busy_where_it_says_when_to_come_back(waits):
    """Too many paid requests were running at once: openrouter.ai/docs/api/reference/limits, "In-flight spending
    budget". Without that header the account is empty."""
    body = {"error": {"code": 402, "message": "Too much is in flight",
                      "metadata": {"limit_source": "openrouter_in_flight_budget"}}}
    with Rogue(lambda n, c: http(body, 402, Retry_After="5") if n < 8 else http(GOOD)) as server:
        worker(server, timeout=120).chat(CHAT)
    assert len(server.requests) == 9 and min(waits) >= 5
    with always({"error": {"code": 402, "message": "Insufficient credits"}}, 402) as server:
        with pytest.raises(WorkerError, match="Insufficient credits .attempt 1,"):
            worker(server).chat(CHAT)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status, body", [
    (429, {"error": {"type": "insufficient_quota", "message": "Pay"}}),  # as gateways write OpenAI's code
    (429, {"error": {"code": "billing_not_active", "message": "Pay"}}),
    (429, {"error": {"type": "rate_limit_error", "details": {"error_code": "enforced_spend_limit_reached"}, "message": "Pay"}}),
    (400, {"error": {"type": "invalid_request_error", "message": "You have reached your specified workspace API usage limits."}}),
    (429, {"error": {"details": [{"violations": [{"quotaId": "GenerateRequestsPerDayPerProjectPerModel-FreeTier"}]},
                                 {"retryDelay": "1s"}]}}),
    (429, {"error": {"code": 429, "message": "Rate limit exceeded: free-models-per-day. Add credits"}}),
    *((429, {"error": {"type": "billing", "code": code, "message": "Pay"}}) for code in (
        "credit_balance_exhausted", "organization_spend_limit_exceeded", "project_spend_limit_exceeded", "organization_usage_limit_exceeded")),
    (429, {"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "message": "Your project has exceeded its monthly spending cap."}}),
    (429, {"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "message": "Your prepayment credits are depleted."}}),
])
def test_what_waiting_does_not_mend_is_no_busy_provider(status, body, waits):
    """Spent accounts and quotas of a day, as OpenAI, Anthropic, Google and OpenRouter write them."""
    error = refused(body, status)
    assert "attempt 1," in str(error) and not error.bad_request and not waits


@pytest.mark.parametrize("response", [
    http([{"error": {"details": [{"retryDelay": "7s"}]}}], 429),
    http({}, 429).replace(b"\r\n\r\n", b"\r\nllm_provider-retry-after: 7\r\n\r\n", 1),  # LiteLLM renames it so
])
def test_the_wait_that_is_asked_for_in_other_shapes(response, waits):
    with Rogue(lambda n, c: response if n == 0 else http(GOOD)) as server:
        worker(server, timeout=120).chat(CHAT)
    assert waits == [pytest.approx(7 + 2)]


def test_a_wait_is_called_too_long_only_if_it_is(waits):
    """Here the worker's own waits reach the deadline, not those of one second that it was asked for."""
    with always({"error": {"message": "later"}}, 429, Retry_After="1") as server:
        with pytest.raises(WorkerError, match=r"later \(attempt"):
            worker(server, timeout=4, deadline=12).chat(CHAT)
    assert sum(waits) < 12


@pytest.mark.parametrize("body", [b"", b"\n \n\r\n  "])
def test_a_blank_response_is_asked_for_again(body, waits):
    """OpenRouter sends blanks while it waits for a host, and nothing more if that dies."""
    with Rogue(lambda n, c: http(body) if n == 0 else http(GOOD)) as server:
        assert worker(server, timeout=120).chat(CHAT).text == "Because."
    assert len(server.requests) == 2


def test_a_provider_that_failed_midway_without_a_word(waits):
    half = {"choices": [{"message": {"content": "Bec"}, "finish_reason": "error"}]}
    with Rogue(lambda n, c: http(half) if n == 0 else http(GOOD)) as server:
        assert worker(server, timeout=120).chat(CHAT).text == "Because."


def test_what_openrouter_does_not_charge_goes_back_to_the_budget(waits):
    """openrouter.ai/docs/features/zero-completion-insurance: not for a response whose finish reason is error."""
    half = {"choices": [{"message": {"content": "Bec"}, "finish_reason": "error"}]}
    with always(half) as server, pytest.raises(WorkerError, match="failed midway"):
        poor = worker(server, price=[1, 1], params={"max_tokens": 10}, budget=Budget(1.0))
        poor.chat(CHAT)
    assert poor.budget.left == 1.0


@pytest.mark.parametrize("status, message", [
    (400, "Your organization must be verified to stream this model."),  # OpenAI's
    (422, "extra_forbidden: stream_options.include_usage"),  # Mistral's
])
def test_who_does_not_stream_is_asked_without(status, message):
    def play(n, conn):
        return http({"error": {"message": message}}, status) if "stream" in server.requests[n][2] else http(GOOD)

    told = []
    with Rogue(play) as server:
        reply = worker(server).chat(CHAT, on_text=told.append)
    assert told == [reply.text] == ["Because."] and len(server.requests) == 2
    with always({"error": {"message": message}}, status) as server, pytest.raises(WorkerError, match="stream"):
        worker(server).chat(CHAT, on_text=told.append)
    assert len(server.requests) == 2 and len(told) == 1


def test_a_stream_that_fails_midway_is_not_told_twice():
    """Its error may be a 400 and speak of a stream: the beginning is told, and paid."""
    error = {"error": {"code": 400, "message": "upstream closed while streaming"}, "choices": [{"delta": {}, "finish_reason": "error"}]}
    begun = b'data: {"choices": [{"delta": {"content": "The "}}]}\n\ndata: %s\n\n' % json.dumps(error).encode()
    told = []
    with always(begun, Content_Type="text/event-stream") as server, pytest.raises(WorkerError, match="upstream closed"):
        worker(server).chat(CHAT, on_text=told.append)
    assert told == ["The "] and len(server.requests) == 1


def test_a_host_that_refuses_to_stream_by_an_error_in_a_200_is_asked_without():
    error = {"error": {"code": 400, "message": "Your organization must be verified to stream this model."}}
    told = []
    with Rogue(lambda n, c: http(error if "stream" in server.requests[n][2] else GOOD)) as server:
        worker(server).chat(CHAT, on_text=told.append)
    assert told == ["Because."] and len(server.requests) == 2


@pytest.mark.parametrize("cut, text", [(b"data: [DON", "So."), (b'data: {"choices": [], "usa', "So."), (b'data: {"cho', None),
                                       (b"data:" + b"[" * 100_000, "So.")])
def test_half_an_event_at_the_end_is_none(cut, text, waits):
    whole = b'data: {"choices": [{"delta": {"content": "So."}, "finish_reason": "stop"}]}\n\n' if text else b""
    with Rogue(lambda n, c: http(whole + cut, Content_Type="text/event-stream") if n == 0 else http(GOOD)) as server:
        assert worker(server, timeout=120).chat(CHAT, on_text=lambda piece: None).text == (text or "Because.")


@pytest.mark.parametrize("stream", [
    b'data:\n\ndata: {"choices": [{"delta": {"content": "So."}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}\n\n',
    b'data: {"choices": [{"delta": {"content": "So."}, "finish_reason": "stop"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}',
])
def test_events_without_data_and_without_an_end(stream):
    """The SSE standard drops the first, and what the last one says is the bill."""
    with always(stream, Content_Type="text/event-stream") as server:
        reply = worker(server).chat(CHAT, on_text=lambda piece: None)
    assert (reply.text, reply.prompt_tokens, reply.completion_tokens) == ("So.", 1, 2)


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_who_does_not_stream_and_is_down_is_asked_no_more_often(attempts, waits):
    def play(n, conn):
        if "stream" in server.requests[n][2]:
            return http({"error": {"message": "stream_options is unknown"}}, 400)
        return http({"error": {"message": "down"}}, 503)

    with Rogue(play) as server, pytest.raises(WorkerError, match="down"):
        worker(server, attempts=attempts).chat(CHAT, on_text=print)
    assert len(server.requests) == 1 + attempts


# What a call costs, where the response says it


@pytest.mark.parametrize("usage, price, cost", [
    ({"cost": 0.25}, [1, 10], 0.25), ({"cost": 0.25}, None, 0.25), ({"cost": 1e-9}, [0, 0], 1e-9),
    ({"cost": 0.25, "is_byok": True}, [1, 10], 30e-6),  # OpenRouter's share of a bill that another sends
    ({"cost": 0}, [1, 10], 30e-6), ({"cost": "0.25"}, [1, 10], 30e-6), ({"cost": -1}, [1, 10], 30e-6),
    ({"cost": True}, [1, 10], 30e-6), ({"cost": None}, None, None),
])
def test_a_cost_that_is_told_counts(usage, price, cost):
    """openrouter.ai/docs/use-cases/usage-accounting, and our own server: in dollars."""
    with always({**GOOD, "usage": {**GOOD["usage"], **usage}}) as server:
        assert worker(server, price=price).chat(CHAT).cost == (cost and pytest.approx(cost))


# What is no part of an answer


@pytest.mark.parametrize("content, text", [
    ("<think>Why? Because.</think>\n\nSo.", "So."), ("Why? Because.</think>So.", "So."),
    ("<think>Why? Bec", ""), ("\n<think>\n</think>\n\nSo.", "So."), ("<think>a</think>b</think>c", "c"),
    ("So <think> is a tag.", "So <think> is a tag."), ("  So.", "  So."),
])
def test_thoughts_that_a_server_leaves_in_the_content(content, text):
    """Groq's default and LM Studio's; a later step would read and pay for them as an answer."""
    choice = {"message": {"content": content}, "finish_reason": "stop"}
    with always({"choices": [choice], "usage": GOOD["usage"]}) as server:
        assert worker(server).chat(CHAT).text == text
