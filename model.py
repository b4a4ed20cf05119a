"""Qwen2.5 in PyTorch: the config, the layers, the tokenizer with its chat template, Hugging Face checkpoints in and out.

    python model.py Qwen/Qwen2.5-7B-Instruct      fetch a checkpoint into models/ and describe it; a folder is only described

The modules carry Hugging Face's names, so that a state dict *is* a checkpoint. The model owns weights and positions only: who
attends to what is a function, `attend`, that the caller may replace. Generation (sample.py) passes one that reads a KV cache, and
training (grpo.py) one that shares the prompt between rollouts; both then run these very layers. Read sample.py next.
"""
import dataclasses
import difflib
import errno
import functools
import glob
import hashlib
import json
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass
from urllib.parse import quote

import requests
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer as BPE
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

# ---------------------------------------------------------------------------------------------------------------------------------
# Settings: every file's command line is a dataclass and `--key=value` words


def configure(settings, argv: list[str]) -> list[str]:
    """Apply `--key=value` words to a dataclass in place, typed by its present values, and return the words that are not flags.

    `--key` alone turns a bool on. An unknown key or a value of the wrong type ends the program, naming the nearest key."""
    words = []
    for word in argv:
        if not word.startswith("--"):
            words.append(word)
            continue
        key, has_value, value = word[2:].partition("=")
        known = [field.name for field in dataclasses.fields(settings)]
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise SystemExit(f"unknown setting --{key}" + (f"; did you mean --{near[0]}?" if near else f"; there are {', '.join(known)}"))
        kind = type(getattr(settings, key))
        try:
            if kind is bool:
                value = {"": True, "true": True, "1": True, "false": False, "0": False}[value.lower() if has_value else ""]
            elif not has_value:
                raise SystemExit(f"--{key} needs a value: --{key}=VALUE, with = and no blank")
            setattr(settings, key, kind(value))
        except (ValueError, KeyError):
            raise SystemExit(f"--{key}={value}: expected a value of type {kind.__name__}, as in --{key}={getattr(settings, key)}") from None
    return words


# ---------------------------------------------------------------------------------------------------------------------------------
# The model


@dataclass
class Config:
    """Qwen2.5's shape, under the keys of Hugging Face's config.json. The defaults are Qwen2.5-7B's."""
    vocab_size: int = 152064
    hidden_size: int = 3584
    intermediate_size: int = 18944
    num_hidden_layers: int = 28
    num_attention_heads: int = 28
    num_key_value_heads: int = 4
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_pretrained(cls, path: str) -> "Config":
        """Read `path`/config.json. ValueError if it is not a dense Qwen2 or uses what this file does not implement."""
        file = os.path.join(path, "config.json")
        if not os.path.exists(file):
            raise FileNotFoundError(f"{file} is missing: {path} is not a Hugging Face checkpoint folder")
        found = read_json(file)
        if found.get("model_type") != "qwen2":
            raise ValueError(f"{file}: model_type is {found.get('model_type')!r}, this is an implementation of 'qwen2' (Qwen2.5, dense)")
        rope = found.get("rope_parameters") or {}  # transformers 5 moved rope_theta in here
        if rope.get("rope_type", "default") != "default" or found.get("rope_scaling") or found.get("use_sliding_window"):
            raise ValueError(f"{file}: RoPE scaling and sliding windows are not implemented")
        found = {**found, "rope_theta": found.get("rope_theta", rope.get("rope_theta"))}
        missing = [f.name for f in dataclasses.fields(cls) if not isinstance(found.get(f.name), int | float)]
        if missing:
            raise ValueError(f"{file} lacks {', '.join(missing)}")
        return cls(**{f.name: found[f.name] for f in dataclasses.fields(cls)})


def causal(layer: int, q, k, v):
    """The plain `attend`: every position sees itself and what stands before it. q (B, H, T, D), k and v (B, Hkv, T, D)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def rotary(positions, config: Config):
    """cos and sin tables of RoPE in fp32 for integer positions (B, T): each (B, 1, T, D/2)."""
    frequency = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, device=positions.device).float() / config.head_dim)
    angle = positions[:, None, :, None].float() * frequency  # (B, 1, T, D/2)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotate x (B, H, T, D) by its position; Qwen pairs dimension i with i + D/2 (the half-split layout)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=True)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=True)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=True)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def forward(self, x, cos, sin, attend):
        B, T, _ = x.shape
        q = rotate(self.q_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2), cos, sin)  # (B, H, T, D)
        k = rotate(self.k_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2), cos, sin)  # (B, Hkv, T, D)
        v = self.v_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, Hkv, T, D)
        y = attend(self.layer, q, k, v)  # (B, H, T, D)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # SwiGLU


class Layer(nn.Module):
    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.self_attn, self.mlp = Attention(config, layer), MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, cos, sin, attend):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.compute = None  # the device of computation where the weights wait elsewhere (train.py --offload)
        self.recompute = False  # True: a layer keeps only its input, and computes the rest again in the backward pass
        self.model = nn.ModuleDict({  # Hugging Face's names begin with `model.`, all but the head's
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers)),
            "norm": RMSNorm(config.hidden_size, config.rms_norm_eps)})
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids, positions=None, attend=causal, head=None):
        """ids (B, T) -> logits (B, T, V) in fp32.

        positions (B, T), default 0 … T-1. attend(layer, q, k, v) -> (B, H, T, D) replaces plain causal attention. head(hidden (B, T, C))
        replaces the projection to logits; it runs inside this forward, where FSDP has the head's weights gathered."""
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        cos, sin = rotary(positions, self.config)
        x = self.model.embed_tokens(ids)  # (B, T, C)
        for layer in self.model.layers:
            x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False) if self.recompute else layer(x, cos, sin, attend)
        return (head or self.logits)(self.model.norm(x))

    def logits(self, hidden):
        return self.lm_head(hidden).float()  # (…, C) -> (…, V)

    @property
    def device(self) -> torch.device:
        return self.compute or self.lm_head.weight.device

    @classmethod
    def from_pretrained(cls, path: str, dtype=torch.float32, device="cpu", shard=None) -> "Qwen":
        """Load a Hugging Face folder, tensor by tensor. ValueError names a tensor that is missing, extra or misshapen.

        shard(model) may apply FSDP to the model while it is still without memory: each rank then keeps its part of every tensor only."""
        config = Config.from_pretrained(path)
        with torch.device("meta"):
            model = cls(config)
        state = {}
        parts = dict(shard(model).named_parameters()) if shard else {}
        for name, tensor in read_tensors(path, model):
            state[name] = tensor.to(device, dtype)
            if shard:
                state[name] = local_part(state[name], parts[name], device)
        model.load_state_dict(state, assign=True, strict=False)  # strict by read_tensors, but for the tied head, which is not in the file
        if config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
        return model

    def save_pretrained(self, path: str):
        """Write config.json and safetensors in Hugging Face's layout."""
        write_tensors(path, self.config, self.named_parameters())


# ---------------------------------------------------------------------------------------------------------------------------------
# Checkpoints in Hugging Face's layout


def weight_files(path: str) -> list[str]:
    """Names of the safetensors files of a folder: those its index lists, or the only one."""
    index = os.path.join(path, "model.safetensors.index.json")
    if os.path.exists(index):
        files = sorted(set(read_json(index).get("weight_map", {}).values()))
        if wandering := [file for file in files if os.path.basename(file) != file]:
            raise ValueError(f"{index} points outside its folder: {wandering[0]}")
        return files
    if os.path.exists(os.path.join(path, "model.safetensors")):
        return ["model.safetensors"]
    raise FileNotFoundError(f"{path} holds neither model.safetensors nor model.safetensors.index.json")


def local_part(tensor, like, device):
    """This rank's part of a tensor, distributed like the DTensor `like`. A clone, lest it keep the whole alive."""
    from torch.distributed.tensor import distribute_tensor  # here, for it takes half a second
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None).clone().to(device)  # comes on the mesh's device


def read_tensors(path: str, model: Qwen):
    """Yield (name, tensor) for each parameter of `model` (which may be on the meta device) from a folder, one or many safetensors files."""
    wanted = dict(model.named_parameters())  # the tied head is listed once, as the embedding
    for file in weight_files(path):
        try:
            opened = safe_open(os.path.join(path, file), framework="pt")
        except SafetensorError as e:
            raise ValueError(f"{path}/{file} is damaged: {e}") from None
        with opened as f:
            for name in f.keys():
                if name == "lm_head.weight" and model.config.tie_word_embeddings:
                    continue
                if name not in wanted:
                    raise ValueError(f"{path}/{file} has an unexpected (or repeated) tensor {name}")
                if (shape := f.get_slice(name).get_shape()) != list(wanted[name].shape):
                    raise ValueError(f"{path}/{file}: {name} has shape {shape}, config.json says {list(wanted[name].shape)}")
                del wanted[name]
                yield name, f.get_tensor(name)
    if wanted:
        raise ValueError(f"{path} lacks {len(wanted)} tensors, first {next(iter(wanted))}")


def write_tensors(path: str, config: Config, tensors, shard_bytes: int = 4 << 30):
    """Write (name, tensor) pairs as safetensors of at most `shard_bytes` each, with an index if there are several, and config.json.

    The pairs are consumed one by one, so that a sharded model can gather each tensor as it is written."""
    os.makedirs(path, exist_ok=True)
    shards, size, total = [{}], 0, 0  # the last shard holds tensors, those before it, already written, only their names

    def flush():
        save_file(shards[-1], os.path.join(path, f"shard-{len(shards)}.tmp"), metadata={"format": "pt"})
        shards[-1] = list(shards[-1])

    for name, tensor in tensors:
        tensor = tensor.detach().cpu().contiguous()
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            flush()
            shards.append({})
            size = 0
        shards[-1][name], size, total = tensor, size + tensor.nbytes, total + tensor.nbytes
    dtype = str(tensor.dtype).removeprefix("torch.")
    flush()
    for stale in glob.glob(os.path.join(glob.escape(path), "model*.safetensors*")):  # of a checkpoint that was here before
        os.remove(stale)
    write_json(file := os.path.join(path, "config.json"), {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "torch_dtype": dtype, **dataclasses.asdict(config)})
    weight_map = {}
    for i, names in enumerate(shards):
        final = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        shutil.copymode(file, part := os.path.join(path, f"shard-{i + 1}.tmp"))  # safetensors lets nobody but the owner read it
        os.replace(part, os.path.join(path, final))
        weight_map.update(dict.fromkeys(names, final))
    if len(shards) > 1:
        write_json(os.path.join(path, "model.safetensors.index.json"), {"metadata": {"total_size": total}, "weight_map": weight_map})


def read_json(file: str) -> dict:
    """The object in a JSON file. ValueError names the file if that is something else."""
    with open(file, encoding="utf-8") as f:
        try:
            value = json.load(f)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{file} is no JSON: {e}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} is not a JSON object")
    return value


def write_json(file: str, value):
    """Write JSON atomically: beside, then renamed."""
    with open(file + ".tmp", "w", encoding="utf-8") as f:
        json.dump(value, f, indent=2, ensure_ascii=False)
    os.replace(file + ".tmp", file)


# ---------------------------------------------------------------------------------------------------------------------------------
# Checkpoints from the Hugging Face hub


def fetch(name: str) -> str:
    """The folder of a checkpoint, fit for --checkpoint and --init_from: `name` itself if it is a folder, otherwise models/NAME under the
    current directory, downloaded from $HF_ENDPOINT (default https://huggingface.co) unless it is there.

    Files arrive in models/NAME.part, renamed once all are there: models/NAME is whole. After a failure call again, and it resumes.
    $HF_TOKEN goes to the hub alone. OSError says what failed and what to do, ValueError what in config.json is not Qwen2."""
    if os.path.isdir(name):
        return name
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise FileNotFoundError(f"{name} is neither a folder here nor a repository's name, like Qwen/Qwen2.5-7B-Instruct")
    folder = os.path.join("models", name)
    if os.path.isdir(folder):
        return folder
    with hub_session() as hub:
        get = functools.partial(download, hub, name, folder + ".part")
        get("config.json")
        Config.from_pretrained(folder + ".part")  # another architecture is refused before its gigabytes come
        get("tokenizer.json")
        for file in ("tokenizer_config.json", "vocab.json", "merges.txt", "generation_config.json"):  # for transformers and vLLM
            get(file, optional=True)
        get("model.safetensors.index.json", optional=True) or get("model.safetensors")
        for file in weight_files(folder + ".part"):
            get(file)
    os.replace(folder + ".part", folder)
    return folder


def hub_session() -> requests.Session:
    """A session that bears $HF_TOKEN, which requests drops where a redirect leaves the host or port."""
    hub, token = requests.Session(), os.environ.get("HF_TOKEN", "").strip()
    if not re.fullmatch("[!-~]*", token):  # what a header can hold; requests would print it
        raise ValueError("HF_TOKEN is no token: it has blanks or characters beyond ASCII")
    hub.headers["Accept-Encoding"] = "identity"  # compressed, a body has another size than its file
    if token:
        hub.headers["Authorization"] = f"Bearer {token}"
    return hub


def download(hub: requests.Session, repository: str, folder: str, file: str, optional: bool = False) -> bool:
    """Bring `file` into `folder` if it is not there, growing FILE.part over retries and runs. False if it is optional and does not exist.

    The hub redirects a large file to a CDN and says in that redirect its size and sha256: X-Linked-Size and X-Linked-Etag, as read by
    get_hf_file_metadata in huggingface_hub's file_download.py. Five failures in a row without a new byte are final."""
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    final, part, most, failures = os.path.join(folder, file), os.path.join(folder, file + ".part"), 0, 0
    while not os.path.exists(final):
        have = os.path.getsize(part) if os.path.exists(part) else 0
        most, start = max(most, have), max(have - 1, 0)  # the last byte again: beyond the end of a whole part there is nothing to ask for
        try:
            with hub.get(f"{endpoint}/{repository}/resolve/main/{quote(file)}", headers={"Range": f"bytes={start}-"} if start else None,
                         stream=True, timeout=30) as r:
                if r.status_code == 404 and optional:
                    return False
                if r.status_code in (401, 403, 404) and r.url.startswith(endpoint + "/"):  # from a CDN: a link that expired, so ask again
                    code = r.headers.get("X-Error-Code", r.reason)
                    why = {"GatedRepo": "it is gated; accept its terms there and set HF_TOKEN to your token", "EntryNotFound": "no such file"}
                    raise FileNotFoundError(f"{endpoint}/{repository} gives no {file} (HTTP {r.status_code} {code}): "
                                            + why.get(code, "no such repository, or a private one that HF_TOKEN does not open"))
                if r.status_code == 416:  # the part is longer than the file, so it is not of this file
                    os.remove(part)
                r.raise_for_status()
                start = start if r.status_code == 206 else 0  # 200: a server that ignores Range
                told = (r.history or [r])[-1].headers  # by the hub: a CDN's own ETag is no sha256, nor is that of a small file (git's sha1)
                sha256 = re.fullmatch('(?:W/)?"?([0-9a-f]{64})"?', told.get("X-Linked-Etag", told.get("ETag", "")))
                size = int(told.get("X-Linked-Size", start + int(r.headers.get("Content-Length", -start))))  # 0: unknown
                os.makedirs(folder, exist_ok=True)
                if size - have > (free := shutil.disk_usage(folder).free):
                    raise OSError(errno.ENOSPC, f"{part} lacks {(size - have) / 1e9:.1f} GB, free are {free / 1e9:.1f}: make room, run again")
                with open(part, "ab") as f, tqdm(total=size or None, initial=start, desc=file, unit="B", unit_scale=True) as bar:
                    f.truncate(start)
                    for chunk in r.iter_content(1 << 16):
                        bar.update(f.write(chunk))
            have, digest = os.path.getsize(part), hashlib.sha256()
            if have < size:
                raise requests.ConnectionError(f"the transfer ended after {have:,} of {size:,} bytes")
            with open(part, "rb") as f:
                while chunk := f.read(1 << 20):
                    digest.update(chunk)
            if have != (size or have) or sha256 and sha256[1] != digest.hexdigest():
                os.remove(part)
                raise OSError(f"{part} had another size or sha256 than {endpoint} says, and was removed: run again")
            os.replace(part, final)
        except requests.RequestException as e:
            failures = 1 if os.path.exists(part) and os.path.getsize(part) > most else failures + 1
            if failures == 5:
                raise ConnectionError(f"{file} of {repository} did not come from {endpoint}: check the network and HF_ENDPOINT, "
                                      f"and run again to resume. The last failure: {e}") from e
            time.sleep(2 ** failures)
    return True


# ---------------------------------------------------------------------------------------------------------------------------------
# The tokenizer

CHAT_TEMPLATE = (  # Qwen2.5's ChatML for transformers, without its tool calls
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


class Tokenizer:
    """A Hugging Face tokenizer.json with Qwen2.5's chat template. `len` is the number of ids in use; a model's vocab_size may be larger.
    `eos_id` ends a turn, any of `end_ids` what a model writes.

    Text never turns into control tokens: only `chat` writes <|im_start|> and <|im_end|>, so a question or a worker's reply that
    spells them cannot end its own turn."""

    def __init__(self, bpe: BPE):
        self.bpe = bpe
        self.bpe.encode_special_tokens = True  # i.e. special tokens found in text are encoded as the text they are
        self.start_id, self.eos_id = bpe.token_to_id("<|im_start|>"), bpe.token_to_id("<|im_end|>")
        if self.start_id is None or self.eos_id is None:
            raise ValueError("the tokenizer has no <|im_start|> and <|im_end|>: it is not a ChatML tokenizer like Qwen2.5's")
        document = bpe.token_to_id("<|endoftext|>")  # what Qwen2.5's base models, which were never taught to chat, end with
        self.end_ids = [self.eos_id] + [document] * (document is not None)

    @classmethod
    def from_pretrained(cls, path: str) -> "Tokenizer":
        file = os.path.join(path, "tokenizer.json")
        if not os.path.exists(file):
            raise FileNotFoundError(f"{file} is missing: a checkpoint folder holds the tokenizer beside the weights")
        try:
            bpe = BPE.from_file(file)
        except Exception as e:  # what tokenizers raises is of no other class
            raise ValueError(f"{file} is damaged: {e}") from None
        return cls(bpe)

    def save_pretrained(self, path: str):
        self.bpe.save(os.path.join(path, "tokenizer.json"))
        write_json(os.path.join(path, "tokenizer_config.json"), {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE})
        write_json(os.path.join(path, "generation_config.json"), {"eos_token_id": self.end_ids})

    def __len__(self) -> int:
        return self.bpe.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        return self.bpe.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Text of the ids, without control tokens."""
        return self.bpe.decode(ids, skip_special_tokens=True)

    def chat(self, messages: list[dict]) -> list[int]:
        """Ids of a conversation [{"role", "content"}, …] up to where the assistant speaks next."""
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."}, *messages]
        ids, newline = [], self.encode("\n")
        for m in messages:
            ids += [self.start_id, *self.encode(f"{m['role']}\n{m['content']}"), self.eos_id, *newline]
        return [*ids, self.start_id, *self.encode("assistant\n")]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    try:
        path = fetch(sys.argv[1])
        config = Config.from_pretrained(path)
    except (OSError, ValueError) as e:
        raise SystemExit(str(e)) from None
    with torch.device("meta"):
        n = sum(p.numel() for p in Qwen(config).parameters())
    layers, kv_heads, d = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    print(f"{path}: {n:,} parameters, {layers} layers, {config.num_attention_heads} heads over {kv_heads} key-value heads of {d}\n"
          f"KV in bf16: 2 x {layers} layers x {kv_heads} heads x {d} x 2 bytes = {4 * layers * kv_heads * d:,} bytes a token\n"
          "training, before activations and KV: 16 bytes a parameter (fp32 weight, gradient, two moments of Adam) over the ranks, and 2 in\n"
          "each rank's bf16 copy for sampling")
    for ranks in (1, 2, 4, 8):
        print(f"  {ranks} rank{'s'[:ranks > 1]}: 16 x {n:,} / {ranks} + 2 x {n:,} = {16 * n / ranks / 1e9:.1f} + {2 * n / 1e9:.1f} = "
              f"{(16 / ranks + 2) * n / 1e9:.1f} GB a rank")
