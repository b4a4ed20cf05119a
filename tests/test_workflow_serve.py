"""workflow.py in front: a checkpoint in the Conductor's seat, the command line, the server as its clients see
it, over real HTTP."""
import contextlib
import inspect
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import torch
from tokenizers import Tokenizer as BPE
from tokenizers import models, pre_tokenizers, decoders

import sample
import workflow as wf
from model import Config, Qwen, Tokenizer
from rogue import always
from test_workflow import Local, Wire, pool_of, said, user
from test_workflow_parse import lists
from workers import Reply, WorkerError
from workflow import Prompting, Step, Workflow, as_lists, execute, messages

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def byte_tokenizer():
    """One token a byte, and the chat's two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = BPE(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(bpe)


LEARNED = 'model_id = [0]\nsubtasks = ["Go."]\naccess_list = [[]]'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Conductor that has learned one workflow by heart: in its last layer's eyes the next byte depends
    on the position alone."""
    path = str(tmp_path_factory.mktemp("checkpoint"))
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    model = Qwen(Config(258, 64, 128, 2, 4, 2, tie_word_embeddings=True, max_position_embeddings=512))
    prompts = [tokenizer.chat(messages(q, 1, prompting=Prompting("short")))
               for q in ("Why?", "What is 6 * 7?", *(f"Question:\nWhy?\n\nYour task:\n{t}." for t in "AB"))]
    answer = tokenizer.encode(LEARNED) + [tokenizer.eos_id]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        for prompt in prompts:
            logits = model(torch.tensor([prompt + answer]))[0, len(prompt) - 1:-1]
            torch.nn.functional.cross_entropy(logits, torch.tensor(answer)).backward()
        optimizer.step()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    with open(os.path.join(path, "conductor.json"), "w") as f:
        json.dump({"style": "short", "max_new_tokens": 80, "dtype": "fp32", "n_workers": 1}, f)
    return path


def write_all(write, chats, n=1, first=0):
    return {(i, j): text for i, j, text, prompt, completion in write(chats, n, first)}


def test_a_checkpoint_writes(checkpoint):
    model, tokenizer, prompting = wf.load_conductor(checkpoint)
    assert prompting == Prompting("short", max_new_tokens=80, dtype="fp32")
    write = wf.model_conductor(model, tokenizer, prompting, 0.0)
    long, short, other = [messages(q, 1, prompting=Prompting("short")) for q in ("Why? " * 400, "Why?", "What is 6 * 7?")]
    assert write_all(write, [short, other], 2) == dict.fromkeys([(0, 0), (0, 1), (1, 0), (1, 1)], LEARNED)
    told = [(i, j, str(text)) for i, j, text, *_ in write([long, short, long], 1, 0)]
    # a model of 512 positions, 80 of them to write
    why = "the prompt has 2047 tokens, and the Conductor can read 432"
    assert told == [(0, 0, why), (2, 0, why), (1, 0, LEARNED)]


def test_a_question_that_is_asked_again_gets_other_workflows(checkpoint, monkeypatch):
    """Also where its prompts do not fit into one batch. The first batch is what it is alone."""
    write = wf.model_conductor(*wf.load_conductor(checkpoint), 5.0, seed=7)
    chats = [messages("Why?", 1, prompting=Prompting("short"))] * 3
    alone = write_all(write, chats[:1], 2)
    for at_once in (sample.READ_AT_ONCE, 1):
        monkeypatch.setattr(sample, "READ_AT_ONCE", at_once)
        written = write_all(write, chats, 2)
        assert alone.items() <= written.items() and len({*written.values()}) == 6


def test_a_checkpoint_is_loaded_in_its_own_dtype(checkpoint, tmp_path, monkeypatch):
    """Also on a device that has units for bf16, which decides only where conductor.json does not."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert wf.load_conductor(checkpoint)[0].lm_head.weight.dtype == torch.float32
    shutil.copytree(checkpoint, tmp_path / "copy")
    (tmp_path / "copy" / "conductor.json").unlink()
    assert wf.load_conductor(str(tmp_path / "copy"))[0].lm_head.weight.dtype == torch.bfloat16


def said_by_main(capsys, *words):
    """What the command line prints, and the status it ends with."""
    status = 0
    try:
        wf.main([*words])
    except SystemExit as end:
        status = end.code
    return capsys.readouterr().out, status


def test_command_line(checkpoint, tmp_path, capsys):
    workflow = lists("[1]", '["Answer."]', "[[]]")

    def answer(model, chat):
        return workflow if "You conduct" in chat[0]["content"] else f"{model} says so"

    with Wire(answer) as wire:
        pool_of(tmp_path, wire.url, "a")
        (tmp_path / "pool.json").rename(tmp_path / "a.json")
        pool_of(tmp_path, wire.url, "ab", params={"max_tokens": 100})
        pool_a, pool = f"--pool={tmp_path}/a.json", f"--pool={tmp_path}/pool.json"
        shown = said_by_main(capsys, "Why?", f"--checkpoint={checkpoint}", "--temperature=0", pool_a)
        seated = said_by_main(capsys, "Why?", "--conductor=worker-a", pool, "--rounds=1")
    assert "a says so\n1 call, " in shown[0] and "Go." in shown[0]
    assert "Round 1" in seated[0] and "\nAnswer: b says so\n2 calls" in seated[0]
    assert not shown[1] and not seated[1]
    assert wire.limits == {("a", None), ("a", 200), ("b", 100)}  # in the Conductor's seat twice the output


def test_ctrl_c_ends_it_at_once(tmp_path):
    asked, go_on = threading.Event(), threading.Event()

    def answer(model, chat):
        asked.set()
        go_on.wait(60)
        return "late"

    with Wire(answer) as wire:
        pool_of(tmp_path, wire.url, "a")
        process = subprocess.Popen([sys.executable, "workflow.py", "Why?", "--conductor=worker-a",
                                    f"--pool={tmp_path}/pool.json"], cwd=ROOT,
                                   stderr=subprocess.PIPE, text=True)
        assert asked.wait(60)
        process.send_signal(signal.SIGINT)
        # the worker's timeout is 30 s
        assert process.communicate(timeout=25)[1].strip() == "interrupted" and process.returncode == 1
        go_on.set()


def test_ctrl_c_while_a_model_writes(checkpoint, tmp_path):
    """The server's model writes in the main thread: a process that ended with another thread inside torch
    would abort."""
    pool_of(tmp_path, "http://127.0.0.1:9/v1", "a")
    code = """if True:
        import sys, workflow
        generate_each = workflow.generate_each
        def for_ever(*args, **how):
            print("writing", flush=True)
            while True:
                [*generate_each(*args, **how)]
            yield
        workflow.generate_each = for_ever
        workflow.main(sys.argv[1:])"""
    argv = [sys.executable, "-c", code, "serve", f"--checkpoint={checkpoint}",
            f"--pool={tmp_path}/pool.json", "--port=0"]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    url = process.stdout.readline().split()[0]
    client = threading.Thread(target=ask_and_forget, args=(url,), daemon=True)
    client.start()
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1].strip() == "interrupted" and process.returncode == 1
    client.join(60)


def ask_and_forget(url):
    with contextlib.suppress(requests.RequestException):
        requests.post(f"{url}/chat/completions", json={"model": "conductor", "messages": [user("Why?")]},
                      timeout=60)


def test_show(tmp_path, capsys):
    """The lines of a run's traces/, as train.py writes them, and bare traces."""
    pool = [Local("w1", lambda chat: "one\x1b[31m"), Local("w2", lambda chat: "two")]
    trace = execute(Workflow([Step(0, "A.", []), Step(1, "B.", [0])]), "Why?", pool)
    rows = [{"problem": "p", "answer": "7", "reward": 0.5, "trace": wf.trace_to_json(trace)},
            {"problem": "p", "reward": 0, "text": "I would\nrather not."},
            wf.trace_to_json(trace)]
    file = tmp_path / "traces.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, third = said_by_main(capsys, "show", str(file))[0].splitlines()
    assert first.split() == ["0", "reward", "0.5", "chain", "Why?", "[w1", ">", "w2]"]
    assert third.split()[:2] == ["2", "chain"]
    assert second.split() == ["1", "reward", "0", "no", "workflow", "I", "would", "rather", "not."]
    shown = wf.show(str(file), 0)
    assert shown == wf.view(trace) + "\nReward: 0.5"
    assert "Step 0: w1 (model 0)" in shown
    assert "Step 1: w2 (model 1), sees steps [0]: B." in shown and "\x1b" not in shown
    assert wf.show(str(file), 2) == wf.view(trace) and "rather not" in wf.show(str(file), 1)
    (tmp_path / "other.jsonl").write_text(json.dumps(rows[0]) + "\n[1]\n")
    for words, reason in [(("show", str(file), "3"), "no line 3"),
                          (("show", str(tmp_path / "other.jsonl")), "line 1, holds no trace"),
                          (("show",), "usage"), (("show", str(file), "x"), "usage"),
                          (("show", "nowhere.jsonl"), "nowhere.jsonl")]:
        with pytest.raises(SystemExit, match=reason):
            wf.main([*words])


@pytest.mark.parametrize("words, reason", [
    (["Why?", "--conductor=nobody", "--pool={pool}"], "worker-a"),
    (["Why?", "--checkpoint={dir}/none", "--pool={pool}"],
     r"^no checkpoint in '\S+/none', which is neither a folder here nor .*: train.py --out=DIR makes DIR/checkpoint$"),
    (["Why?", "--checkpoint={dir}", "--pool={pool}"], "no checkpoint in .*config.json is missing; .*/checkpoint is one"),
    ([], "python workflow.py"), (["Why?", "--chekpoint=x"], "--checkpoint"),
    (["serve", "out/laptop/checkpoint"], "usage"), (["Why?", "--rounds=-1"], "usage"),
    (["serv"], "'serv' is no question; did you mean serve"), (["shwo"], "did you mean show"), ([" "], "python workflow.py"),
    (["Why?", "--conductor=worker-a,worker-a2", "--pool={pool}"], "worker-a2"),
    (["serve", "--conductor=worker-a", "--pool={pool}", "--port=99999"], "--port=N")])
def test_command_line_refuses(words, reason, tmp_path):
    pool_of(tmp_path, "http://127.0.0.1:9/v1", "a")
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(SystemExit, match=reason):
        wf.main([w.format(pool=f"{tmp_path}/pool.json", dir=tmp_path) for w in words])


# ------------------------------------------------------------------------------------------------------------
# Serve


class Serving:
    """workflow.conductor_server on a free port: over this pool, with this write()."""

    def __init__(self, write, pool, prompting=Prompting(), rounds=2):
        self.server = wf.conductor_server(write, pool, prompting, rounds, 0)
        self.address = self.server.server_address
        self.url = f"http://127.0.0.1:{self.address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def post(self, chat, model="conductor", **more):
        chat = [user(chat)] if type(chat) is str else chat
        stream = more.pop("live", False)
        return requests.post(self.url + "/chat/completions", json={"model": model, "messages": chat, **more},
                             timeout=60, stream=stream)

    __enter__, __exit__ = Wire.__enter__, Wire.__exit__


def text_of(response):
    return response.json()["choices"][0]["message"]["content"]


def writes(*texts):
    """A write() that writes these, one after the other, and then the last again and again."""
    texts = list(texts)

    def write(chats, n, first):
        yield 0, 0, texts.pop(0) if texts[1:] else texts[0]
    return write


TWO, KEEP = lists("[0, 0]", '["A.", "B."]', "[[], []]"), as_lists(Workflow([]))
ECHO = [Local("echo", lambda chat: chat[-1]["content"])]


def test_serve_answers_and_sums_the_usage():
    with Serving(writes(TWO), ECHO) as s:
        assert [m["id"] for m in requests.get(s.url + "/models", timeout=60).json()["data"]] == [
            "conductor", "conductor-recursive"]
        assert requests.get(s.url.replace("/v1", "/health"), timeout=60).status_code == 200
        body = s.post("Why?").json()
        assert body["object"] == "chat.completion"
        assert body["model"] == "conductor" and body["choices"][0]["finish_reason"] == "stop"
        assert body["choices"][0]["message"] == {"role": "assistant",
                                                 "content": "Question:\nWhy?\n\nYour task:\nB."}
        assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4, "cost": 0.0}
        body = s.post("Why?", model="conductor-recursive").json()
        assert body["usage"]["total_tokens"] == 12  # three rounds of two steps
        chat = [{"role": "system", "content": "Be brief."}, user("Hi"), said("Hello"),
                user([{"type": "text", "text": "Why?"}])]
        assert "system: Be brief.\n\nuser: Hi\n\nassistant: Hello\n\nuser: Why?\n" in text_of(s.post(chat))
        assert text_of(s.post("Why \ud83d?")).startswith("Question:\nWhy ??")  # half an emoji is no text


def events(response):
    return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]


def deltas(response):
    return [choice["delta"].get("content", "") for event in events(response)[:-1]
            for choice in json.loads(event)["choices"]]


class Slow:
    """A worker that says "one " and goes on with "two" only once the test says so; it keeps what it was
    asked."""
    name = "slow"

    def __init__(self):
        self.go_on, self.asked = threading.Event(), queue.SimpleQueue()

    def chat(self, chat, on_text=None, **overrides):
        self.asked.put((chat[-1]["content"], overrides))
        if on_text:
            on_text("one ")
        assert self.go_on.wait(60)
        if "fail" in chat[0]["content"]:
            raise WorkerError("slow: down")
        if on_text:
            on_text("two")
        return Reply("one two", 1, 1, 0.0, 0.0)


def test_the_last_steps_text_is_streamed_as_it_comes():
    """Its first piece is read while the worker still writes; the step before it is not heard."""
    slow = Slow()
    pool = [Local("quick", lambda chat: "quick"), slow]
    with Serving(writes(lists("[0, 1]", '["A.", "B."]', '[[], ["all"]]')), pool) as s:
        response = s.post("Why?", stream=True, stream_options={"include_usage": True}, live=True)
        lines = (line.removeprefix("data: ") for line in response.iter_lines(1, decode_unicode=True) if line)
        first = json.loads(next(lines))
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert json.loads(next(lines))["choices"][0]["delta"] == {"content": "one "}
        slow.go_on.set()
        *chunks, end = lines
        chunks = [json.loads(chunk) for chunk in chunks]
        assert end == "[DONE]" and response.headers["Content-Type"] == "text/event-stream"
        assert [c["choices"][0]["delta"] for c in chunks[:-1]] == [{"content": "two"}, {}]
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["usage"]["total_tokens"] == 4
        response = s.post("fail", stream=True)  # after the stream's head no status can say so
        assert "slow: down" in json.loads(events(response)[-1])["error"]["message"]
        assert "[DONE]" not in response.text


def test_a_stream_of_several_rounds_brings_the_answer_once():
    # all rounds are used: the last one's last step is the answer for sure
    with Serving(writes(TWO, TWO, TWO), ECHO, rounds=2) as s:
        pieces = deltas(s.post("Why?", "conductor-recursive", stream=True))
        assert "".join(pieces) == "Question:\nWhy?\n\nYour task:\nB."
    with Serving(writes(TWO, KEEP), ECHO, rounds=2) as s:  # it is kept: one piece
        pieces = deltas(s.post("Why?", "conductor-recursive", stream=True))
        assert "".join(pieces) == "Question:\nWhy?\n\nYour task:\nB."


def test_what_a_client_asks_of_the_answer_belongs_to_the_last_step():
    slow = Slow()
    slow.go_on.set()
    wishes = {"temperature": 0.5, "top_p": 0.9, "stop": ["\n"], "seed": 3,
              "response_format": {"type": "json_object"}}
    with Serving(writes(lists("[0, 0]", '["A.", "B."]', "[[], [0]]")), [slow]) as s:
        assert s.post("Why?", **wishes, max_completion_tokens=9, user="me", metadata={}, logit_bias=None,
                      top_k=None).status_code == 200
    asked = [slow.asked.get(), slow.asked.get()]
    assert asked[0] == ("Question:\nWhy?\n\nYour task:\nA.", {"call_id": ""})
    assert asked[1] == ("Your task:\nB.", {"call_id": "", **wishes, "max_tokens": 9})


def test_serve_refuses(capsys):
    def write(chats, n, first):
        question = chats[0][-1]["content"]
        if "No memory" in question:
            raise MemoryError("no memory left")
        written = {"No workflow": "I cannot.", "No worker": lists("[1]", '["A."]', "[[]]"),
                   "Too long": WorkerError("more than the Conductor's 512", bad_request=True),
                   "Nobody there": WorkerError("who sits in the seat is down")}
        yield 0, 0, next((written[words] for words in written if words in question), TWO)

    def down(chat):
        raise WorkerError("w: down")

    with Serving(write, [*ECHO, Local("w", down)]) as s:
        wrong = [{"n": 2}, {"max_tokens": "x"}, {"max_tokens": 0}, {"temperature": 3}, {"tools": [{}]}, {"top_k": 3}]
        for status, response in [(404, s.post("Why?", model="gpt")), *[(400, s.post("Why?", **wish)) for wish in wrong],
                                 (400, s.post("Too long")), (502, s.post("Nobody there")), (500, s.post("No memory")),
                                 (502, s.post("No workflow")), (502, s.post("No worker")), (502, s.post("No worker", stream=True))]:
            assert response.status_code == status
            assert len(response.json()["error"]["message"]) > 10, response.text
            paid = status >= 500 or "512" in response.text  # and would be paid again
            assert (response.headers.get("x-should-retry") == "false") == paid
        assert "top_k is not supported" in s.post("Why?", top_k=3).json()["error"]["message"]
        assert s.post("Why?").status_code == s.post("Why?", n=None).status_code == 200
    # A bug is told to whoever runs the server; a worker's failure is not one.
    assert re.findall(r"(?m)^\w+Error: .*", capsys.readouterr().err) == ["MemoryError: no memory left"]


def test_a_wish_for_nothing_is_none(tmp_path):
    """Some clients always send these, and Anthropic's protocol has no word for them."""
    reply = {"content": [{"type": "text", "text": "Because."}], "stop_reason": "end_turn"}
    with always(reply) as server:
        pool = pool_of(tmp_path, server.url, ["a"], protocol="anthropic")
        with Serving(writes(lists("[0]", '["A."]', "[[]]")), pool) as s:
            assert s.post("Why?", presence_penalty=0, frequency_penalty=0, logit_bias={}).status_code == 200
            assert s.post("Why?", presence_penalty=1).status_code == 400


@pytest.mark.parametrize("at, wishes, status", [(1, {"max_tokens": 9 ** 9}, 400), (1, {}, 502),
                                                (0, {"max_tokens": 9 ** 9}, 502), (1, {"verbosity": "low"}, 400)])
def test_what_the_last_worker_cannot_do_is_the_clients_fault(at, wishes, status, tmp_path):
    """Its 400 is the client's where the client asked for something; an earlier step's is none of theirs. So is
    what the worker's protocol has no word for."""
    with Wire(lambda model, chat: 400 if model == "strict" else "ok") as wire:
        [strict] = pool_of(tmp_path, wire.url, ["strict"], protocol="anthropic" if "verbosity" in wishes else "openai")
        [easy] = pool_of(tmp_path, wire.url, ["easy"])
        pool = [strict, easy] if at == 0 else [easy, strict]
        with Serving(writes(lists("[0, 1]", '["A.", "B."]', "[[], []]")), pool) as s:
            response = s.post("Why?", **wishes)
    assert response.status_code == status and f"step {at}: worker-strict: " in response.json()["error"]["message"]
    assert response.headers["x-should-retry"] == "false"


def test_a_stream_is_kept_alive_while_the_workers_are_busy(monkeypatch):
    """By comments, which every reader of server-sent events passes over."""
    monkeypatch.setattr(wf, "SILENCE", 0.01)
    slow = Slow()
    with Serving(writes(lists("[0, 1]", '["A.", "B."]', "[[], [0]]")), [slow, *ECHO]) as s:
        lines = s.post("Why?", stream=True, live=True).iter_lines(1, decode_unicode=True)
        heard = [next(lines) for _ in range(8)]
        assert heard.count(": the workers are busy") == 3
        assert json.loads(heard[0].removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
        slow.go_on.set()
        rest = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert json.loads(rest[0])["choices"][0]["delta"] == {"content": "Your task:\nB."} and rest[-1] == "[DONE]"


def test_a_client_that_hangs_up_stops_the_workflow():
    """The running step ends, as it is paid for; the next is never asked."""
    slow = Slow()
    others = set(threading.enumerate())
    with Serving(writes(lists("[0, 0]", '["A.", "B."]', "[[], [0]]")), [slow]) as s:
        body = json.dumps({"model": "conductor", "messages": [user("Why?")]}).encode()
        client = socket.create_connection(s.address)
        head = ("POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n")
        client.sendall(head.encode() + body)
        assert "A." in slow.asked.get(timeout=60)[0]
        handlers = [t for t in set(threading.enumerate()) - others if "process_request_thread" in t.name]
        client.close()
        slow.go_on.set()
        for handler in handlers:
            handler.join(60)
    assert slow.asked.empty()


def test_who_has_gone_gets_no_further_round():
    said, asked = [], []

    def write(chats, n, first):
        asked.append(chats)
        yield 0, 0, TWO

    def answer(chat):
        said.append(chat)
        return "ok"

    task = wf.Task("Why?", [Local("w", answer)] * 2)
    [rollout] = wf.conduct(write, [task], rounds=2, hung_up=lambda: len(said) >= 2)
    assert rollout.trace.answer == "ok" and len(asked) == 1


def test_serve_on_a_port_in_use(tmp_path):
    pool_of(tmp_path, "http://127.0.0.1:9/v1", "a")
    with Serving(writes(TWO), ECHO) as s, pytest.raises(SystemExit, match="in use.*--port"):
        wf.main(["serve", "--conductor=worker-a", f"--pool={tmp_path}/pool.json", f"--port={s.address[1]}"])


def test_thirty_two_clients_at_once(checkpoint):
    """They share the model's batches, everyone gets their own answer, and nothing of them is left: no thread,
    no socket."""
    model, tokenizer, prompting = wf.load_conductor(checkpoint)
    batches, together = [], threading.Barrier(32)
    sample = wf.model_conductor(model, tokenizer, prompting, 0.0)

    def write(chats, n, first):
        batches.append(len(chats))
        yield from sample(chats, n, first)

    class Teller:
        name = "teller"

        def chat(self, chat, seed, **_):
            together.wait(60)  # all are in flight at the same time
            return Reply(f"You sent {seed}.", 1, 1, 0.0, 0.0)

    others = set(threading.enumerate())
    ask_for, work_on = wf.from_one_thread(write)
    threading.Thread(target=work_on, daemon=True).start()
    with Serving(ask_for, [Teller()], prompting) as s, ThreadPoolExecutor(32) as clients:
        working = []
        for _ in range(3):
            answers = clients.map(lambda i: text_of(s.post("Why?", seed=i)), range(32))
            assert list(answers) == [f"You sent {i}." for i in range(32)]
            working.append(sum(thread.name.endswith("(work)") for thread in threading.enumerate()))
        for thread in set(threading.enumerate()) - others:
            if "process_request_thread" in thread.name:
                thread.join(60)
        assert sum(batches) == 96 and len(batches) < 96 and working[-1] < working[0] + 16
        with open(f"/proc/{os.getpid()}/net/tcp") as f:
            assert sum(f":{s.address[1]:04X} " in line.split("00000000:0000", 1)[0] and " 01 " in line
                       for line in f) == 0


def test_a_bug_fails_only_its_batch():
    """Whoever comes after it is answered, and its grid does not live on in a traceback."""
    grids = []

    def write(chats, n, first):
        grid = threading.Event()  # stands for gigabytes
        grids.append(weakref.ref(grid))
        yield 0, 0, str(1 // len(chats[0]))

    ask_for, work_on = wf.from_one_thread(write)
    threading.Thread(target=work_on, daemon=True).start()
    with pytest.raises(ZeroDivisionError):
        next(ask_for([""], 1, 0))
    assert [*ask_for(["x"], 1, 2)] == [(0, 0, "1")] and grids[0]() is None


def test_a_conductor_is_a_worker_of_another(checkpoint, tmp_path):
    """A checkpoint behind the server, as a worker of a pool that a workflow runs over: usage and cost come up
    through both."""
    with Wire(lambda model, chat: f"{model} heard {chat[0]['content']!r}") as wire:
        inner = pool_of(tmp_path, wire.url, "i")
        *conductor, prompting = wf.load_conductor(checkpoint)
        ask_for, work_on = wf.from_one_thread(wf.model_conductor(*conductor, prompting, 0.0))
        threading.Thread(target=work_on, daemon=True).start()
        with Serving(ask_for, inner, prompting) as s:
            outer = pool_of(tmp_path, s.url, ["conductor"])
            trace = execute(Workflow([Step(0, "A.", []), Step(0, "B.", [])]), "Why?", outer)
    assert trace.error is None and trace.calls == 2 and trace.tokens == 24
    assert sorted(chat[0]["content"] for _, chat in wire.seen) == [
        f"Question:\nQuestion:\nWhy?\n\nYour task:\n{t}.\n\nYour task:\nGo." for t in "AB"]


def test_clients_of_a_batch_do_not_share_their_bugs():
    """Nor do they wait for one another: whose workflow is written is told so before the next is."""
    told = queue.SimpleQueue()

    def write(chats, n, first):
        yield 0, 0, "fine"
        assert told.get(timeout=60) == "fine"  # while the batch is still being written
        yield 1, 0, "bad"
        raise MemoryError

    def hear():
        [(_, _, text)] = ask_for(["x"], 1, 0)
        {"fine": told.put, "bad": lambda text: 1 // 0}[text](text)

    ask_for, work_on = wf.from_one_thread(write)
    with ThreadPoolExecutor(3) as clients:
        futures = [clients.submit(hear) for _ in range(3)]
        asked = inspect.getclosurevars(ask_for).nonlocals["asked"]
        while asked.qsize() < 3:
            pass
        threading.Thread(target=work_on, daemon=True).start()
        assert sorted(type(future.exception(60)).__name__ for future in futures) == [
            "MemoryError", "NoneType", "ZeroDivisionError"]


def test_a_further_round_that_fails_keeps_the_paid_answer():
    """The worker of the second round is down; without a first round that is an error."""
    def down(chat):
        raise WorkerError("down")

    first, second = lists("[0]", '["A."]', "[[]]"), lists("[1]", '["B."]', "[[]]")
    with Serving(writes(first, second), [*ECHO, Local("w", down)], rounds=1) as s:
        response = s.post("Why?", model="conductor-recursive")
        assert response.status_code == 200 and "A." in text_of(response)
        assert s.post("Why?", model="conductor").status_code == 502
