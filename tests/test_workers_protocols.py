"""Three protocols on the wire against the providers' documentation, and where keys may appear."""
import json
import logging
import re
import traceback
import urllib.parse

import pytest
from rogue import CHAT, GOOD, KEY, Rogue, always, http, quick, worker  # noqa: F401 (quick is a fixture)

import workers
from workers import WorkerError, wire_params

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "Why?"},
]


def wire(protocol, response, messages=TALK, model="m", params=None, **fields):
    """One call: the request's first line and headers in lower case, its body, and the Reply."""
    with Rogue(lambda n, c: http(response)) as server:
        reply = worker(server, protocol=protocol, model=model, params=params or {}, **fields).chat(messages)
    [(_, head, body)] = server.requests
    return head.lower(), body, reply


def test_openai_on_the_wire(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-1")
    head, body, reply = wire(
        "openai", GOOD, params={"max_tokens": 9, "top_k": 3}, api_key_env="SOME_KEY", price=[1, 10]
    )
    assert (
        head.startswith("post /v1/chat/completions http/1.1") and "\r\nauthorization: bearer sk-1\r\n" in head
    )
    said = [*TALK[:2], {"role": "assistant", "content": "(empty)"}, TALK[3]]  # Claude's hosts refuse blank turns.
    assert body == {"model": "m", "messages": said, "max_tokens": 9, "top_k": 3}
    assert (reply.text, reply.prompt_tokens, reply.completion_tokens, reply.finish) == (
        "Because.",
        10,
        2,
        "stop",
    )
    assert reply.cost == pytest.approx(30e-6) and 0 < reply.seconds < 20
    head, _, _ = wire("openai", GOOD)
    assert "authorization" not in head


@pytest.mark.parametrize(
    "protocol, model, params, sent",
    [
        (
            "openai",
            "gpt-5",
            {"max_tokens": 9, "temperature": 1, "reasoning_effort": "minimal"},
            {"max_completion_tokens": 9, "reasoning_effort": "minimal"},
        ),
        ("openai", "gpt-5-mini-2025-08-07", {"top_p": 1, "max_tokens": 9}, {"max_completion_tokens": 9}),
        ("openai", "gpt-6.2-sol", {"top_k": 1, "max_tokens": 9}, {"max_completion_tokens": 9}),
        ("openai", "openai/gpt-6.2-sol", {"top_k": 1, "max_tokens": 9}, {"max_tokens": 9}),  # OpenRouter's name
        ("openai", "o3", {"logit_bias": {}, "max_tokens": 9}, {"max_completion_tokens": 9}),
        # At OpenRouter both may not be said, if they differ.
        ("openai", "z/z", {"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, {"reasoning": {"effort": "high"}}),
        ("openai", "z/z", {"reasoning_effort": "high", "reasoning": {"exclude": True}}, {"reasoning": {"effort": "high"}}),
        ("openai", "z/z", {"reasoning": {"enabled": False, "exclude": True}}, {"reasoning": {"enabled": False, "exclude": True}}),
        ("anthropic", "claude-opus-4-6", {"seed": 1, "max_tokens": 9}, {"max_tokens": 9}),  # at best a wish, in OpenAI's own words
        (
            "openai",
            "gpt-5-chat-latest",
            {"temperature": 1, "max_tokens": 9},
            {"temperature": 1, "max_tokens": 9},
        ),
        ("openai", "Qwen/Qwen3-32B", {"temperature": 1, "top_k": 3}, {"temperature": 1, "top_k": 3}),
        ("openai", "olmo", {"max_tokens": 9}, {"max_tokens": 9}),
        ("openai", "anthropic/claude-sonnet-5.5", {"temperature": 1, "max_tokens": 9}, {"max_tokens": 9}),
        (
            "anthropic",
            "claude-sonnet-4-20250514",
            {"temperature": 1, "top_k": 3},
            {"temperature": 1, "top_k": 3},
        ),
        ("anthropic", "claude-opus-4-6", {"temperature": 1}, {"temperature": 1}),
        ("anthropic", "claude-3-7-sonnet-20250219", {"temperature": 1}, {"temperature": 1}),
        ("anthropic", "claude-opus-4-7", {"temperature": 1, "max_tokens": 9}, {"max_tokens": 9}),
        (
            "anthropic",
            "claude-sonnet-5-5",
            {"top_p": 1, "thinking": {"type": "adaptive"}},
            {"thinking": {"type": "adaptive"}},
        ),
        (
            "anthropic",
            "claude-haiku-4-5",
            {"stop": "x", "max_completion_tokens": 9},
            {"stop_sequences": ["x"], "max_tokens": 9},
        ),
        ("gemini", "gemini-2.5-pro", {"temperature": 1, "top_p": 1}, {"temperature": 1, "topP": 1}),
        ("gemini", "gemini-4-hydrogen", {"temperature": 1, "max_tokens": 9}, {"maxOutputTokens": 9}),
        (
            "gemini",
            "gemma",
            {"stop": ["a", "b"], "presence_penalty": 1, "seed": 3},
            {"stopSequences": ["a", "b"], "presencePenalty": 1, "seed": 3},
        ),
    ],
)
def test_each_generation_gets_what_it_takes(protocol, model, params, sent):
    assert wire_params(protocol, model, params) == sent


@pytest.mark.parametrize(
    "protocol, params",
    [
        ("openai", {"n": 2}),
        ("openai", {"n": None}),
        ("gemini", {"n": 3}),
        ("openai", {"stream": True}),
        ("anthropic", {"stream": True}),
        ("anthropic", {"presence_penalty": 1}),
        ("anthropic", {"logprobs": True}),
        ("anthropic", {"reasoning_effort": "low"}),
        ("anthropic", {"verbosity": "low"}),
        ("gemini", {"verbosity": "low"}),
        ("gemini", {"logit_bias": {}}),
        ("gemini", {"reasoning_effort": "low"}),
        ("anthropic", {"response_format": {"type": "json_object"}}),
    ],
)
def test_what_a_protocol_cannot_say_is_never_sent(protocol, params):
    with always(GOOD) as server, pytest.raises(WorkerError, match=f"jane: {next(iter(params))}"):
        worker(server, name="jane", protocol=protocol).chat(CHAT, **params)
    assert not server.requests


def test_json_on_demand():
    schema = {"type": "object"}
    wish = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    text = {"type": "text"}
    for protocol in BODIES:
        _, body, _ = wire(protocol, BODIES[protocol], CHAT, params={"response_format": text})
        assert ("response_format" in json.dumps(body)) == (protocol == "openai")
    assert wire("openai", GOOD, CHAT, params={"response_format": wish})[1]["response_format"] == wish
    _, body, _ = wire(
        "anthropic",
        claude(["{}"], "end_turn"),
        CHAT,
        params={"response_format": wish, "output_config": {"effort": "low"}},
    )
    assert (
        body["output_config"] == {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
        and "response_format" not in body
    )
    _, body, _ = wire("gemini", gemini([{"text": "{}"}], "STOP"), CHAT, params={"response_format": wish})
    assert body["generationConfig"] == {"responseMimeType": "application/json", "responseJsonSchema": schema}
    _, body, _ = wire(
        "gemini", gemini([{"text": "{}"}], "STOP"), CHAT, params={"response_format": {"type": "json_object"}}
    )
    assert body["generationConfig"] == {"responseMimeType": "application/json"}


def test_overrides_win_over_params():
    with Rogue(lambda n, c: http(GOOD)) as server:
        worker(server, params={"temperature": 0.2, "max_tokens": 5}).chat(CHAT, temperature=1.0)
        worker(server, params={"max_completion_tokens": 50}).chat(CHAT, max_tokens=10)  # OpenAI refuses both at once
    assert server.requests[0][2] == {"model": "m", "messages": CHAT, "temperature": 1.0, "max_tokens": 5}
    assert server.requests[1][2] == {"model": "m", "messages": CHAT, "max_completion_tokens": 10}


def openai_choice(content, finish, **message):
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}
    return {"choices": [choice], "usage": None}


@pytest.mark.parametrize(
    "response, text, finish",
    [
        (openai_choice(None, "length"), "", "length"),
        (openai_choice("", "stop"), "", "stop"),
        (openai_choice("Bec", "length"), "Bec", "length"),
        (openai_choice("", "content_filter"), "", "content_filter"),
        (openai_choice(None, "stop", refusal="I will not."), "I will not.", "stop"),
        (
            openai_choice(
                [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]},
                    {"type": "text", "text": "A"},
                    {"type": "text", "text": "B"},
                ],
                "stop",
            ),
            "AB",
            "stop",
        ),
        (openai_choice("Hm.", None), "Hm.", "stop"),
        (openai_choice("Hm.", "tool_calls"), "Hm.", "tool_calls"),
    ],
)
def test_openai_replies_of_the_models_own(response, text, finish):
    _, _, reply = wire("openai", response, price=[1, 10])
    assert (reply.text, reply.finish) == (text, finish)
    assert (
        reply.cost is None and reply.prompt_tokens == reply.completion_tokens == 0
    )  # no usage: the cost is unknown, not zero


def test_reasoning_that_stands_in_the_total_only_is_paid():
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 112}
    _, _, reply = wire("openai", {**GOOD, "usage": usage}, price=[1, 10])
    assert reply.completion_tokens == 102 and reply.cost == pytest.approx(1030e-6)


def test_what_openai_writes_to_a_cache_costs_a_quarter_more():
    usage = {**GOOD["usage"], "prompt_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 8}}
    _, _, reply = wire("openai", {**GOOD, "usage": usage}, price=[1, 10])
    assert reply.prompt_tokens == 10 and reply.cost == pytest.approx((12 + 20) * 1e-6)


def claude(text, reason, **usage):
    return {
        "type": "message",
        "role": "assistant",
        "stop_reason": reason,
        "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}]
        + [{"type": "text", "text": t} for t in text],
        "usage": {"input_tokens": 10, "output_tokens": 7, **usage},
    }


def test_anthropic_on_the_wire(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-1")
    response = claude(
        ["Be", "cause."], "end_turn", cache_read_input_tokens=100, cache_creation_input_tokens=1000
    )
    head, body, reply = wire(
        "anthropic", response, params={"temperature": 0.2}, api_key_env="SOME_KEY", price=[3, 15]
    )
    assert head.startswith("post /v1/messages http/1.1") and "\r\nx-api-key: sk-1\r\n" in head
    assert "\r\nanthropic-version: 2023-06-01\r\n" in head and "authorization" not in head
    assert body == {"model": "m", "max_tokens": 4096, "temperature": 0.2, "system": "Be brief.", "messages": [
        TALK[1], {"role": "assistant", "content": "(empty)"}, TALK[3]]}  # the API refuses empty turns
    assert (reply.text, reply.prompt_tokens, reply.completion_tokens, reply.finish) == (
        "Because.",
        1110,
        7,
        "end_turn",
    )
    assert reply.cost == pytest.approx(((110 + 1.25 * 1000) * 3 + 7 * 15) / 1e6)
    hour = claude(
        ["Hm."],
        "end_turn",
        cache_creation_input_tokens=1000,
        cache_creation={"ephemeral_1h_input_tokens": 400},
    )
    assert wire("anthropic", hour, price=[3, 15])[2].cost == pytest.approx(
        ((10 + 1.25 * 600 + 2 * 400) * 3 + 7 * 15) / 1e6
    )
    _, body, _ = wire(
        "anthropic", response, [*CHAT, {"role": "assistant", "content": " \n"}], params={"max_tokens": 64000}
    )
    assert body["messages"][1]["content"] == "(empty)"  # nor blank ones
    assert "system" not in body and body["max_tokens"] == 64000


@pytest.mark.parametrize(
    "text, reason, finish",
    [
        ([], "end_turn", "end_turn"),
        (["Bec"], "max_tokens", "length"),
        ([], "refusal", "refusal"),
        (["a"], "stop_sequence", "stop_sequence"),
        (["b"], "model_context_window_exceeded", "length"),
    ],
)
def test_anthropic_stop_reasons(text, reason, finish):
    _, _, reply = wire("anthropic", claude(text, reason))
    assert (reply.text, reply.finish) == ("".join(text), finish)


def gemini(parts, reason):
    content = {"role": "model", **({} if parts is None else {"parts": parts})}
    return {
        "candidates": [{"content": content, "finishReason": reason}],
        "usageMetadata": {
            "promptTokenCount": 10,
            "candidatesTokenCount": 3,
            "thoughtsTokenCount": 40,
            "totalTokenCount": 53,
        },
    }


def test_gemini_on_the_wire(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-1")
    response = gemini([{"text": "Hm.", "thought": True}, {"text": "Be"}, {"text": "cause."}], "STOP")
    head, body, reply = wire(
        "gemini",
        response,
        api_key_env="SOME_KEY",
        price=[1, 10],
        params={
            "max_tokens": 9,
            "temperature": 0.2,
            "top_p": 0.8,
            "top_k": 3,
            "thinkingConfig": {"thinkingBudget": 128},
        },
    )
    assert (
        head.startswith("post /v1/models/m:generatecontent http/1.1")
        and "\r\nx-goog-api-key: sk-1\r\n" in head
    )
    assert body == {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "Hi."}]},
            {"role": "model", "parts": [{"text": "(empty)"}]},
            {"role": "user", "parts": [{"text": "Why?"}]},
        ],
        "generationConfig": {
            "maxOutputTokens": 9,
            "temperature": 0.2,
            "topP": 0.8,
            "topK": 3,
            "thinkingConfig": {"thinkingBudget": 128},
        },
    }
    assert (reply.text, reply.prompt_tokens, reply.completion_tokens, reply.finish) == (
        "Because.",
        10,
        43,
        "STOP",
    )
    assert reply.cost == pytest.approx(440e-6)


def test_geminis_fields_outside_of_its_generation_config():
    safety = [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}]
    _, body, _ = wire(
        "gemini", gemini([{"text": "Hi."}], "STOP"), CHAT, params={"safetySettings": safety, "max_tokens": 9}
    )
    assert body["safetySettings"] == safety and body["generationConfig"] == {"maxOutputTokens": 9}


@pytest.mark.parametrize("response, text, finish", [
    (gemini(None, "MAX_TOKENS"), "", "length"), (gemini([], "SAFETY"), "", "SAFETY"),
    (gemini([{"text": "Bec"}], "MAX_TOKENS"), "Bec", "length"),
    (gemini([{"text": "Bec"}], "CONTINUATION"), "Bec", "length"),  # Gemini 4's, after 32,768 tokens
    ({"candidates": [{"finishReason": "PROHIBITED_CONTENT"}]}, "", "PROHIBITED_CONTENT"),
    ({"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {"promptTokenCount": 4}}, "", "SAFETY")])
def test_gemini_finish_reasons(response, text, finish):
    _, _, reply = wire("gemini", response)
    assert (reply.text, reply.finish) == (text, finish)


def test_what_gemini_reads_of_its_tools_is_paid():
    """totalTokenCount counts it beside the prompt, and it costs as much."""
    used = {"promptTokenCount": 10, "toolUsePromptTokenCount": 5000, "candidatesTokenCount": 20, "thoughtsTokenCount": 30}
    _, _, reply = wire("gemini", gemini([{"text": "Hi."}], "STOP") | {"usageMetadata": used}, price=[1.5, 7.5])
    assert (reply.prompt_tokens, reply.completion_tokens) == (5010, 50)
    assert reply.cost == pytest.approx(5010 * 1.5e-6 + 50 * 7.5e-6)


@pytest.mark.parametrize("protocol, response", [
    ("gemini", {"usageMetadata": {}}), ("gemini", {"candidates": []}), ("anthropic", {"type": "message"})])
def test_a_response_that_is_none(protocol, response):
    with pytest.raises(WorkerError, match=f"not as {protocol} defines it"):
        wire(protocol, response, attempts=1)


BODIES = {
    "openai": GOOD,
    "anthropic": claude(["Hi."], "end_turn"),
    "gemini": gemini([{"text": "Hi."}], "STOP"),
}


def test_half_an_emoji_is_no_text():
    """JSON can spell a lone surrogate, which nothing can encode: a question mark takes its place."""
    with Rogue(lambda n, conn: http(json.dumps(GOOD).replace("Because.", r"\ud83d!").encode())) as server:
        assert worker(server).chat(CHAT).text == "?!"


# Keys


@pytest.mark.parametrize("protocol", workers.PROTOCOLS)
def test_a_planted_key_appears_nowhere_but_in_its_header(protocol, monkeypatch, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("PLANTED", KEY)
    told = []

    def play(n, conn):  # the provider repeats the request's headers in its error, as some do
        head = server.requests[n][1]
        return [
            http({"error": {"message": f"who are you? {head}"}}, 401),
            http(head.encode(), 500),
            http(head.encode()),
            None,
        ][n]
    with Rogue(play) as server:
        w = worker(server, protocol=protocol, api_key_env="PLANTED", attempts=1)
        w.replay = workers.Replay(str(tmp_path / "replay"))
        told.append(repr(w))
        for _ in range(4):
            with pytest.raises(WorkerError) as caught:
                w.chat(CHAT, call_id="1")
            told += [repr(caught.value), *traceback.format_exception(caught.value)]
    assert len(server.requests) == 4 and all(
        KEY in head and KEY not in json.dumps(body) for _, head, body in server.requests
    )
    assert "who are you" in "".join(told)
    assert KEY not in "".join(told) + caplog.text + (tmp_path / "replay").read_text() + json.dumps(w.params)


@pytest.mark.parametrize(
    "written",
    [
        urllib.parse.quote,
        urllib.parse.quote_plus,
        lambda key: urllib.parse.quote(urllib.parse.quote(key)),
        str.upper,
        lambda key: re.sub("%..", lambda m: m[0].lower(), urllib.parse.quote(key, safe="")),
        lambda key: "".join(f"%{ord(c):02x}" for c in key),
    ],
)
def test_a_key_that_comes_back_in_other_letters_is_left_out(written, monkeypatch):
    key = "sk+planted/0123=45&6 789".replace(" ", "~")
    monkeypatch.setenv("PLANTED", key)
    with (
        always({"error": {"message": f"bad request: /v1?key={written(key)}&x=1"}}, 400) as server,
        pytest.raises(WorkerError) as caught,
    ):
        worker(server, api_key_env="PLANTED").chat(CHAT)
    assert str(caught.value).startswith("m: HTTP 400: bad request: /v1?key=***&x=1")


def test_a_key_that_is_no_header(monkeypatch):
    monkeypatch.setenv("PLANTED", KEY + "\n" + KEY)
    with Rogue(lambda n, c: http(GOOD)) as server, pytest.raises(WorkerError) as caught:
        worker(server, api_key_env="PLANTED", attempts=1).chat(CHAT)
    assert KEY not in "".join(traceback.format_exception(caught.value)) and not server.requests


@pytest.mark.parametrize("at", [370, 380, 390, 395, 400, 1990])
def test_no_half_of_a_key_where_the_error_is_cut(at, monkeypatch):
    monkeypatch.setenv("PLANTED", KEY)
    with (
        Rogue(lambda n, c: http(b"x" * at + KEY.encode() + b"y" * 99, 400)) as server,
        pytest.raises(WorkerError) as caught,
    ):
        worker(server, api_key_env="PLANTED").chat(CHAT)
    assert KEY[:4] not in str(caught.value) and len(str(caught.value)) < 500


def test_keys_are_read_at_the_call_and_a_netrc_does_not_replace_them(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("PLANTED", raising=False)
    with Rogue(lambda n, c: http(GOOD)) as server:
        w = worker(server, api_key_env="PLANTED")
        with pytest.raises(WorkerError, match="not set in the environment: PLANTED"):
            w.chat(CHAT)
        assert not server.requests
        monkeypatch.setenv("PLANTED", KEY)
        w.chat(CHAT)
    assert f"Authorization: Bearer {KEY}\r\n" in server.requests[0][1]
