"""Checkpoints by their name on a hub: huggingface_hub against a server here, with a cache of its own."""
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import model as model_file
from model import Config, Qwen, Tokenizer, write_tensors
from test_model import CLOSE, batch, program, tiny
from train import tiny_tokenizer

NAME, COMMIT = "Org/Tiny-1.5B", "0123456789abcdef" * 2 + "01234567"


class Hub(BaseHTTPRequestHandler):
    """The hub's API for one repository, as huggingface_hub asks it. The server's `files` are what it holds, `refuses` the
    (status, X-Error-Code) of every answer if set, and `asked` what was asked for."""
    protocol_version = "HTTP/1.1"

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        files, path = self.server.files, self.path.partition("?")[0]
        self.server.asked.append(path)
        if self.server.refuses:
            status, code = self.server.refuses
            self.answer(status, X_Error_Code=code)
        elif path == f"/api/models/{NAME}/revision/main":
            info = {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
            self.answer(200, json.dumps(info).encode())
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            tree = [{"type": "file", "path": file, "size": len(body), "oid": hashlib.sha1(body).hexdigest()} for file, body in files.items()]
            self.answer(200, json.dumps(tree).encode())
        elif path.startswith(f"/{NAME}/resolve/") and path.rpartition("/")[2] in files:
            body = files[path.rpartition("/")[2]]
            self.answer(200, body, ETag=f'"{hashlib.sha1(body).hexdigest()}"')
        else:
            self.answer(404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with a sharded checkpoint and much that no program here needs; $HF_ENDPOINT and $HF_HOME point to it."""
    model, source = tiny(vocab_size=512), tmp_path / "source"
    write_tensors(str(source), model.config, model.named_parameters(), 90_000)
    tiny_tokenizer(["a b"]).save_pretrained(str(source))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.model, server.asked, server.refuses = model, [], None
    server.files = {file.name: file.read_bytes() for file in source.iterdir()}
    server.files |= {"pytorch_model.bin": b"pickle", "README.md": b"Hello", "model.onnx": b"", "vocab.json": b"{}"}
    for name, value in dict(HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HOME=str(tmp_path / "home"), NO_PROXY="127.0.0.1",
                            PYTHONPATH=os.path.dirname(model_file.__file__)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def brought(hub):
    return [path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path]


LOAD = f"""import json, model, torch
tokenizer = model.Tokenizer.from_pretrained({NAME!r})
config = model.Config.from_pretrained({NAME!r})
qwen = model.Qwen.from_pretrained({NAME!r}, torch.float32)
ids = torch.randint(61, (2, 23), generator=torch.Generator().manual_seed(1))
print(json.dumps([len(tokenizer), config.hidden_size, qwen(ids).tolist()]))"""


def test_a_repository_is_loaded_by_its_name(hub, tmp_path):
    """Config, tokenizer and weights come by the repository's name, nothing else does, config.json before the weights; without
    a network they come from the cache. train.py and sample.py take such names as they take folders."""
    run = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    tokens, width, logits = json.loads(run.stdout)
    assert tokens == len(tiny_tokenizer(["a b"])) and width == 48
    torch.testing.assert_close(torch.tensor(logits), hub.model(batch()), **CLOSE)
    needed = {file for file in hub.files if file.startswith("model-")} | {"config.json", "tokenizer.json"}
    assert set(brought(hub)) == needed and len(needed) > 4
    assert brought(hub).index("config.json") < min(i for i, file in enumerate(brought(hub)) if file.startswith("model-"))
    hub.refuses = 503, "Down"
    assert subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, timeout=100).stdout == run.stdout
    sample = [sys.executable, "-m", "sample", f"--checkpoint={NAME}", "--max_new_tokens=3", "Hi"]
    run = subprocess.run(sample, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0 and run.stdout.strip(), run.stderr


def test_another_architecture_is_refused_before_its_weights_come(hub):
    """config.json of a llama: an error, and no further file."""
    hub.files["config.json"] = json.dumps({"model_type": "llama"}).encode()
    run = program(NAME)
    assert run.returncode == 1 and "model_type is 'llama'" in run.stderr and "Traceback" not in run.stderr
    assert set(brought(hub)) == {"config.json"}


def test_the_program_fetches_and_describes(hub):
    """`python model.py ORG/NAME` brings all that is needed, and says where it is."""
    run = program(NAME)
    assert run.returncode == 0 and "parameters, 3 layers" in run.stdout, run.stderr
    folder = run.stdout.partition(": ")[0]
    assert set(brought(hub)) == {file for file in hub.files if file.startswith("model-")} | {"config.json", "tokenizer.json"}
    assert torch.equal(Qwen.from_pretrained(folder)(batch()), hub.model(batch()))
    assert Tokenizer.from_pretrained(folder).encode("a b")


@pytest.mark.parametrize("name, refuses, offline, said", [
    ("Org/Other", None, "0", "404"), (NAME, (401, "GatedRepo"), "0", "(?i)gated"), (NAME, (403, "GatedRepo"), "0", "(?i)gated"),
    (NAME, (401, "RepoNotFound"), "0", "401"), (NAME, None, "1", "(?i)offline")])
def test_a_repository_that_does_not_come(name, refuses, offline, said, hub, monkeypatch):
    """Unknown, gated, private, or offline and not in the cache: one message that says what was asked for, what to do, and what
    the hub said; no traceback."""
    hub.refuses = refuses
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    run = program(name)
    assert run.returncode == 1 and "Traceback" not in run.stderr and run.stdout == ""
    assert f"{name} is no folder here" in run.stderr and "HF_TOKEN" in run.stderr and re.search(said, run.stderr), run.stderr


@pytest.mark.parametrize("name", ["out/laptop/checkpoint", "nowhere", "../up", "Org/", "", "/nowhere"])
@pytest.mark.parametrize("load", [Config.from_pretrained, Tokenizer.from_pretrained, Qwen.from_pretrained])
def test_what_can_be_neither_folder_nor_repository(load, name, hub):
    """An error at once, without a request."""
    with pytest.raises(FileNotFoundError, match="no checkpoint in .*neither a folder here nor.*train.py makes one"):
        load(name)
    assert not hub.asked
