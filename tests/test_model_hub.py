"""Checkpoints by their name on a hub: huggingface_hub against a server here, with a cache of its own."""
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
import torch

from model import Config, Qwen, Tokenizer, write_tensors
from test_model import CLOSE, batch, tiny
from train import tiny_tokenizer
from train_runs import Ended, Forked

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
def hub(tmp_path):
    """A hub with a sharded checkpoint and much that no program here needs. `client` is the environment of a process that uses it."""
    model, source = tiny(vocab_size=512), tmp_path / "source"
    write_tensors(str(source), model.config, model.named_parameters(), 90_000)
    tiny_tokenizer(["a b"]).save_pretrained(str(source))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.model, server.asked, server.refuses = model, [], None
    server.files = {file.name: file.read_bytes() for file in source.iterdir()}
    server.files |= {"pytorch_model.bin": b"pickle", "README.md": b"Hello", "model.onnx": b"", "vocab.json": b"{}"}
    server.client = dict(
        HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HOME=str(tmp_path / "home"), NO_PROXY="127.0.0.1", HF_HUB_OFFLINE="0")
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
    (tmp_path / "load.py").write_text(LOAD)
    run = Ended(Forked(str(tmp_path / "load.py"), **hub.client))
    assert run.status == 0, run.err
    tokens, width, logits = json.loads(run.out)
    assert tokens == len(tiny_tokenizer(["a b"])) and width == 48
    torch.testing.assert_close(torch.tensor(logits), hub.model(batch()), **CLOSE)
    needed = {file for file in hub.files if file.startswith("model-")} | {"config.json", "tokenizer.json"}
    assert set(brought(hub)) == needed and len(needed) > 4
    assert brought(hub).index("config.json") < min(i for i, file in enumerate(brought(hub)) if file.startswith("model-"))
    hub.refuses = 503, "Down"
    assert Ended(Forked(str(tmp_path / "load.py"), **hub.client)).out == run.out
    run = Ended(Forked("sample.py", f"--checkpoint={NAME}", "--max_new_tokens=3", "Hi", **hub.client))
    assert run.status == 0 and run.out.strip(), run.err


def test_another_architecture_is_refused_before_its_weights_come(hub):
    """config.json of a gemma2: an error, and no further file."""
    hub.files["config.json"] = json.dumps({"model_type": "gemma2"}).encode()
    run = Ended(Forked("model.py", NAME, **hub.client))
    assert run.status == 1 and "model_type is 'gemma2'" in run.err and "Traceback" not in run.err
    assert set(brought(hub)) == {"config.json"}


def test_the_program_fetches_and_describes(hub):
    """`python model.py ORG/NAME` brings all that is needed, and says where it is."""
    run = Ended(Forked("model.py", NAME, **hub.client))
    assert run.status == 0 and "parameters, 3 layers" in run.out, run.err
    folder = run.out.partition(": ")[0]
    assert set(brought(hub)) == {file for file in hub.files if file.startswith("model-")} | {"config.json", "tokenizer.json"}
    assert torch.equal(Qwen.from_pretrained(folder)(batch()), hub.model(batch()))
    assert Tokenizer.from_pretrained(folder).encode("a b")


@pytest.mark.parametrize("name, refuses, offline, said", [
    ("Org/Other", None, "0", "404"), (NAME, (401, "GatedRepo"), "0", "(?i)gated"), (NAME, (403, "GatedRepo"), "0", "(?i)gated"),
    (NAME, (401, "RepoNotFound"), "0", "401"), (NAME, None, "1", "(?i)offline")])
def test_a_repository_that_does_not_come(name, refuses, offline, said, hub):
    """Unknown, gated, private, or offline and not in the cache: one message that says what was asked for, what to do, and what
    the hub said; no traceback."""
    hub.refuses = refuses
    run = Ended(Forked("model.py", name, **hub.client | {"HF_HUB_OFFLINE": offline}))
    assert run.status == 1 and "Traceback" not in run.err and run.out == ""
    assert f"{name} is no folder here" in run.err and "HF_TOKEN" in run.err and re.search(said, run.err), run.err


@pytest.mark.parametrize("name", ["out/laptop/checkpoint", "nowhere", "../up", "Org/", "", "/nowhere"])
@pytest.mark.parametrize("load", [Config.from_pretrained, Tokenizer.from_pretrained, Qwen.from_pretrained])
def test_what_can_be_neither_folder_nor_repository(load, name, tmp_path, monkeypatch):
    """An error at once, without a request."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *how, **more: pytest.fail("the hub is asked"))
    with pytest.raises(FileNotFoundError, match="no checkpoint in .*neither a folder here nor.*train.py --out=DIR makes"):
        load(name)


def test_a_conductor_is_asked_as_it_was_trained(hub, tmp_path):
    """conductor.json comes by the repository's name too."""
    hub.files["conductor.json"] = json.dumps({"style": "short", "max_new_tokens": 80}).encode()
    (tmp_path / "load.py").write_text(f"import workflow\nprint(workflow.load_conductor({NAME!r})[2])")
    run = Ended(Forked(str(tmp_path / "load.py"), **hub.client))
    assert "style='short'" in run.out and "max_new_tokens=80" in run.out, run.err
