"""Qwen2.5 in PyTorch: config, layers, tokenizer and chat template, Hugging Face checkpoints in and out.

    python model.py Qwen/Qwen2.5-7B      fetch a checkpoint and describe it; a folder is only described

Module names are Hugging Face's, so a state dict *is* a checkpoint. Attention is a function, `attend`,
that the caller may replace: sample.py passes one with a KV cache, grpo.py one with a shared prompt. Read
sample.py next.
"""
import dataclasses
import difflib
import glob
import inspect
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer as BPE
from torch.utils.checkpoint import checkpoint


@dataclass
class Config:
    """Qwen2.5's shape, by the keys of Hugging Face's config.json. The defaults: Qwen2.5-7B-Instruct."""
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
        """Read config.json of a folder or repository. ValueError for what is not implemented."""
        return cls(**config_values(path, dataclasses.fields(cls)))


# -----------------------------------------------------------------------------------------------------------
# Layers. B sequences of T tokens, C channels, H heads over Hkv key-value heads of D channels, V tokens


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


def rotary(positions, config: Config):
    """RoPE's tables cos and sin in fp32 for integer positions (B, T): each (B, 1, T, D/2)."""
    exponent = torch.arange(0, config.head_dim, 2, device=positions.device).float() / config.head_dim
    frequency = config.rope_theta ** -exponent               # (D/2)
    angle = positions[:, None, :, None].float() * frequency  # (B, 1, T, D/2)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotate x (B, H, T, D) by its positions. Qwen pairs channel i with i + D/2."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def causal(layer_idx: int, q, k, v):
    """The plain `attend`: token i of q (B, H, T, D) attends to 0 … i of k and v (B, Hkv, T, D)."""
    dtype = q.dtype
    if q.device.type == "cpu":  # bf16 would be no faster there
        q, k, v = q.float(), k.float(), v.float()
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).to(dtype)


class Attention(nn.Module):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx  # by which `attend` finds its KV cache
        self.head_dim = config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=True)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=True)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=True)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, cos, sin, attend):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, D)
        k = self.k_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, Hkv, T, D)
        v = self.v_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, Hkv, T, D)
        y = attend(self.layer_idx, rotate(q, cos, sin), rotate(k, cos, sin), v)  # (B, H, T, D)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # SwiGLU


class Layer(nn.Module):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__()
        self.self_attn = Attention(config, layer_idx)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, cos, sin, attend):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.compute_device = None  # where to compute if the weights are in the CPU's memory (--offload)
        self.recompute = False  # True: activation checkpointing, a layer at a time
        self.model = nn.ModuleDict({  # so Hugging Face's names begin with `model.`, except lm_head
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
        """ids (B, T) -> logits (B, T, V) in fp32, or what `head` returns.

        positions (B, T) are 0 … T-1 unless given. attend(layer_idx, q, k, v) -> (B, H, T, D) replaces causal.
        head(hidden (B, T, C)) replaces `logits`, for instance to compute fewer positions."""
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        cos, sin = rotary(positions, self.config)
        x = self.model.embed_tokens(ids)  # (B, T, C)
        for layer in self.model.layers:
            if self.recompute:
                x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False)
            else:
                x = layer(x, cos, sin, attend)
        return (head or self.logits)(self.model.norm(x))  # inside forward: only here FSDP has all of lm_head

    def logits(self, hidden):
        """hidden (…, C) -> logits (…, V) in fp32. bf16 would be too coarse for a ratio π/π_old."""
        if hidden.dtype == torch.float32:
            return self.lm_head(hidden)
        return HeadFP32.apply(hidden.flatten(0, -2), self.lm_head.weight).view(*hidden.shape[:-1], -1)

    @property
    def device(self) -> torch.device:
        return self.compute_device or self.lm_head.weight.device

    @classmethod
    def from_pretrained(cls, path: str, dtype=torch.float32, device="cpu", shard=None) -> "Qwen":
        """Load a folder, or a repository of the Hugging Face hub. ValueError names a wrong config or tensor.
        shard(model) applies FSDP in place, and a rank keeps only its part of each tensor."""
        with torch.device("meta"):
            model = cls(Config.from_pretrained(path))
        load_tensors(model, path, dtype, device, shard)
        return model

    def save_pretrained(self, path: str):
        """Write config.json and safetensors in Hugging Face's layout."""
        write_tensors(path, self.config, self.named_parameters())


# -----------------------------------------------------------------------------------------------------------
# Appendix: the tokenizer, fp32 products, checkpoint files, the Hugging Face hub, JSON, command lines

SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
CHAT_TEMPLATE = (  # Qwen2.5's ChatML for transformers, without its tool calls
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n" + SYSTEM + "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


class Tokenizer:
    """A Hugging Face tokenizer.json with Qwen2.5's chat template. `len` counts the ids in use; a model may
    have more. `eos_id` ends a turn of a chat. A model has ended what it writes with any of `end_ids`.

    Text never turns into control tokens: only `chat` writes <|im_start|> and <|im_end|>, so a question or a
    worker's reply that spells them cannot end its own turn."""

    def __init__(self, bpe: BPE):
        self.bpe = bpe
        self.bpe.encode_special_tokens = True  # if a text spells special tokens, they are encoded as text
        self.start_id = bpe.token_to_id("<|im_start|>")
        self.eos_id = bpe.token_to_id("<|im_end|>")
        if self.start_id is None or self.eos_id is None:
            raise ValueError("the tokenizer has no <|im_start|> and <|im_end|>: it is not a ChatML tokenizer")
        bpe.no_truncation()
        bpe.no_padding()
        if {self.start_id, self.eos_id} & {*self.encode("<|im_start|><|im_end|>")}:
            raise ValueError("the tokenizer makes control tokens of text: <|im_start|> is not special in it")
        end_of_document = bpe.token_to_id("<|endoftext|>")  # what base models, never taught to chat, end with
        self.end_ids = [i for i in (self.eos_id, end_of_document) if i is not None]

    @classmethod
    def from_pretrained(cls, path: str) -> "Tokenizer":
        file = checkpoint_file(path, "tokenizer.json")
        try:
            bpe = BPE.from_file(file)
        except Exception as e:  # tokenizers has no class of its own for its errors
            raise ValueError(f"{file} is damaged: {e}") from None
        return cls(bpe)

    def save_pretrained(self, path: str):
        """Write what transformers and vLLM need to use it alike."""
        self.bpe.save(os.path.join(path, "tokenizer.json"))
        write_json(os.path.join(path, "tokenizer_config.json"), {
            "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE,
            "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "clean_up_tokenization_spaces": False})
        write_json(os.path.join(path, "generation_config.json"), {"eos_token_id": self.end_ids})

    def __len__(self) -> int:
        return self.bpe.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        return self.bpe.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """The text of the ids, without control tokens."""
        return self.bpe.decode(ids, skip_special_tokens=True)

    def chat(self, messages: list[dict]) -> list[int]:
        """The ids of a conversation [{"role", "content"}, …] up to where the assistant speaks next."""
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": SYSTEM}, *messages]
        ids = []
        for message in messages:
            turn = self.encode(f"{message['role']}\n{message['content']}")
            ids += [self.start_id, *turn, self.eos_id, *self.encode("\n")]
        return [*ids, self.start_id, *self.encode("assistant\n")]


def compute_dtype(device, name: str = "") -> torch.dtype:
    """The dtype of computation: bf16 or fp32 as named, or "": bf16 where the device has units for it."""
    if name not in ("", "bf16", "fp32"):
        raise ValueError(f"--dtype={name}: there are bf16 and fp32")
    if torch.device(device).type == "cuda":
        has_units = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_units = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if name == "bf16" or has_units and not name else torch.float32


torch.backends.cuda.enable_cudnn_sdp(False)  # On Hopper it reportedly plans each new length for a second.


def matmul_fp32(a, b):
    """a (…, N, K) @ b (…, K, M), accumulated and returned in fp32. For bf16 on CUDA it has no gradient."""
    if a.device.type != "cuda" or a.dtype == torch.float32:
        return a.float() @ b.float()
    if a.dim() == 2:
        return torch.mm(a, b, out_dtype=torch.float32)
    product = torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=torch.float32)
    return product.view(*a.shape[:-1], b.shape[-1])


class HeadFP32(torch.autograd.Function):
    """hidden (N, C) times weight (V, C), both bf16: logits (N, V) in fp32. A logit of 20 that is rounded to
    bf16 is off by up to 0.06, and so is a log-probability. Gradients are bf16, as all of them are."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        if hidden.device.type == "cuda":
            return matmul_fp32(hidden, weight.T)
        # A CPU wants them in fp32: piece by piece, so that they stay in its cache. There oneDNN may make bf16
        # of them again, which loses nothing, and its sums are fp32.
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        try:
            return torch.cat([matmul_fp32(hidden, piece.T) for piece in weight.split(2048)], dim=-1)
        finally:
            torch.backends.mkldnn.matmul.fp32_precision = "none"

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        return grad @ weight, grad.T @ hidden


WEIGHTS = "model*.safetensors"  # the files that hold a model, one or many


def fetch(name: str, *patterns: str) -> str:
    """The folder of a checkpoint: `name` itself if it is one, else that of the repository `name` of the hub,
    whose files that match a pattern are brought into Hugging Face's cache. OSError says what failed."""
    if os.path.isdir(name):
        return name
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise FileNotFoundError(f"no checkpoint in {name!r}, which is neither a folder here nor a name like "
                                "Qwen/Qwen2.5-7B: train.py --out=DIR makes DIR/checkpoint")
    from huggingface_hub import snapshot_download
    try:
        return snapshot_download(name, allow_patterns=list(patterns))
    except Exception as e:  # its errors are of many classes, its transport's among them
        raise OSError(f"{name} is no folder here, and the Hugging Face hub did not give it. Check name "
                      f"and network; a gated repository needs HF_TOKEN.\nThe hub's client says: {e}") from e


def config_values(path: str, wanted) -> dict:
    """What config.json says under the names of some of dataclasses.fields, which have the types."""
    file = checkpoint_file(path, "config.json")
    found = read_json(file)
    if found.get("model_type") not in ("qwen2", "llama"):
        raise ValueError(f"{file}: model_type is {found.get('model_type')!r}, "
                         "this is an implementation of 'qwen2' (Qwen2.5, dense), which can read a 'llama'")
    rope = found.get("rope_parameters") or {}  # transformers 5 moved rope_theta in here
    scaled = found.get("rope_scaling") or rope.get("rope_type", "default") != "default"
    if scaled or found.get("use_sliding_window"):
        raise ValueError(f"{file}: RoPE scaling and sliding windows are not implemented")
    if found.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{file}: hidden_act is {found['hidden_act']!r}, and 'silu' is what is implemented")
    found.setdefault("rope_theta", rope.get("rope_theta"))
    values, lacks = {}, []
    for field in wanted:
        value = found.get(field.name)
        if field.type is float and type(value) is int:
            value = float(value)
        if type(value) is not field.type or not (value is False or 0 < value < 1e12):
            lacks.append(field.name)
        values[field.name] = value
    if lacks:
        raise ValueError(f"{file} lacks {', '.join(lacks)}, or has no sensible number there")
    return values


def checkpoint_file(path: str, name: str) -> str:
    """The file of that name in a folder or repository. FileNotFoundError if it is not there."""
    file = os.path.join(fetch(path, name), name)
    if not os.path.exists(file):
        within = os.path.join(path, "checkpoint")
        hint = f"{within} is one" if os.path.isdir(within) else "train.py --out=DIR makes DIR/checkpoint"
        raise FileNotFoundError(f"no checkpoint in {path}: {file} is missing; {hint}")
    return file


def load_tensors(model: Qwen, path: str, dtype, device, shard):
    """Give a model on the meta device its weights: see Qwen.from_pretrained."""
    parts = dict(shard(model).named_parameters()) if shard else None
    state = {}
    for name, tensor in read_tensors(fetch(path, WEIGHTS), model):
        tensor = tensor.to(device, dtype)
        state[name] = local_part(tensor, parts[name], device) if shard else tensor
    model.load_state_dict(state, assign=True, strict=False)  # A tied head may be missing.
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


def read_tensors(path: str, model: Qwen):
    """Yield (name, tensor) for each parameter of `model`, which may be on the meta device, from a folder.
    ValueError names the tensor that is missing, unexpected or misshapen. A Llama (SmolLM2, for instance) is a
    Qwen2 whose biases are 0."""
    wanted = dict(model.named_parameters())  # a tied head is in here once, as the embedding
    files = sorted(glob.glob(os.path.join(glob.escape(path), WEIGHTS)))
    if not files:
        raise FileNotFoundError(f"{path} holds no {WEIGHTS}")
    for file in files:
        try:
            f = safe_open(file, framework="pt")
        except SafetensorError as e:
            raise ValueError(f"{file} is damaged: {e}") from None
        for name in f.keys():
            if name == "lm_head.weight" and model.config.tie_word_embeddings:
                continue
            if name not in wanted:
                raise ValueError(f"{file} has an unexpected (or repeated) tensor {name}")
            shape = f.get_slice(name).get_shape()
            expected = list(wanted.pop(name).shape)
            if shape != expected:
                raise ValueError(f"{file}: {name} has shape {shape}, config.json says {expected}")
            yield name, f.get_tensor(name)
    if read_json(os.path.join(path, "config.json"))["model_type"] == "llama":
        for name in [name for name in wanted if name.endswith("bias")]:
            yield name, torch.zeros(wanted.pop(name).shape)
    if wanted:
        raise ValueError(f"{path} lacks {len(wanted)} tensors, first {next(iter(wanted))}")


def local_part(tensor, like, device):
    """This rank's part of a tensor, distributed as the DTensor `like` is. A clone, lest the whole live on."""
    from torch.distributed.tensor import distribute_tensor  # here, as it takes half a second
    part = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return part.clone().to(device)


def write_tensors(path: str, config: Config, tensors, shard_bytes: int = 4 << 30):
    """Write config.json, and (name, tensor) pairs as safetensors of at most `shard_bytes`, with their index.
    The pairs are consumed one by one, so that a sharded model can gather each tensor as it is written."""
    os.makedirs(path, exist_ok=True)
    for stale in glob.glob(os.path.join(glob.escape(path), WEIGHTS + "*")):
        os.remove(stale)
    weight_map = {}  # the file of each tensor
    shards = []  # the bytes of each file
    shard = {}

    def flush():
        shards.append(sum(tensor.nbytes for tensor in shard.values()))
        file = f"model-{len(shards):05d}.safetensors"
        save_file(shard, os.path.join(path, file), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in tensors:
        tensor = tensor.detach().cpu().contiguous()
        if shard and sum(held.nbytes for held in shard.values()) + tensor.nbytes > shard_bytes:
            flush()
        shard[name] = tensor
    flush()
    config_file = os.path.join(path, "config.json")
    write_json(config_file, {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
                             "hidden_act": "silu", "torch_dtype": str(tensor.dtype).removeprefix("torch."),
                             **dataclasses.asdict(config)})
    for file in set(weight_map.values()):  # safetensors lets nobody but the owner read its files
        shutil.copymode(config_file, os.path.join(path, file))
    if len(shards) == 1:
        os.replace(os.path.join(path, file), os.path.join(path, "model.safetensors"))
    else:
        index = {"metadata": {"total_size": sum(shards)}, "weight_map": weight_map}
        write_json(os.path.join(path, "model.safetensors.index.json"), index)


def read_json(file: str) -> dict:
    """The object in a JSON file. ValueError names the file if it holds something else."""
    with open(file, encoding="utf-8") as f:
        try:
            value = json.load(f)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{file} is no JSON: {e}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} is not a JSON object")
    return value


def write_json(file: str, value):
    """Write JSON beside the file, then rename: a reader never sees half of it."""
    with open(file + ".tmp", "w", encoding="utf-8") as f:
        json.dump(value, f, indent=2, ensure_ascii=False)
    os.replace(file + ".tmp", file)


ALSO_CALLED = {"checkpoint": "init_from", "init_from": "checkpoint"}  # in another of the programs


def configure(settings, argv: list[str]) -> list[str]:
    """Apply `--key=value` words to a dataclass in place, typed by its present values; return the other words.

    `--key` alone turns a bool on, --help prints them all. SystemExit says what is wrong, and names the key
    nearest to one unknown."""
    if "--help" in argv:
        flags = "\n".join(inspect.getsource(type(settings)).splitlines()[2:])
        flags = re.sub(r"(?m)^    (\w+): \w+ = ", r"  --\1=", flags)
        print(f"{sys.modules[type(settings).__module__].__doc__}\n{flags}")  # at once: `| head` may end first
        sys.exit()
    known = [field.name for field in dataclasses.fields(settings)]
    for word in argv:
        if not word.startswith("--"):
            continue
        key, equals, value = word[2:].partition("=")
        if key not in known:
            near = difflib.get_close_matches(key, known)
            if ALSO_CALLED.get(key) in known:
                near = [ALSO_CALLED[key]]
            hint = f"did you mean --{near[0]}?" if near else f"there are {', '.join(known)}"
            raise SystemExit(f"unknown setting --{key}; {hint}")
        default = getattr(settings, key)
        kind = type(default)
        if not equals and kind is not bool:
            raise SystemExit(f"--{key} needs a value: --{key}=VALUE, with = and no blank")
        try:
            if not equals:
                value = True
            elif kind is bool:
                value = {"true": True, "1": True, "false": False, "0": False}[value.lower()]
            elif value.startswith("~"):  # which a shell leaves as it is behind --key=
                value = os.path.expanduser(value)
            setattr(settings, key, kind(value))
        except (ValueError, KeyError):
            example = default or {int: 1, float: 1e-3, bool: True}[kind]
            raise SystemExit(f"{word}: expected {kind.__name__}, as in --{key}={example}") from None
    return [word for word in argv if not word.startswith("--")]


def main(argv):
    if len(argv) != 1 or argv[0] == "--help":
        raise SystemExit(__doc__)
    try:
        config = Config.from_pretrained(argv[0])  # first, lest the gigabytes of another architecture come
        folder = fetch(argv[0], WEIGHTS, "tokenizer.json")
    except (OSError, ValueError) as e:
        raise SystemExit(str(e)) from None
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Qwen(config).parameters())
    layers, kv_heads = config.num_hidden_layers, config.num_key_value_heads
    print(f"{folder}: {parameters:,} parameters, {layers} layers, {config.num_attention_heads} heads "
          f"over {kv_heads} key-value heads of {config.head_dim}")
    print(f"keys and values in bf16: {4 * layers * kv_heads * config.head_dim:,} bytes a token")


if __name__ == "__main__":
    main(sys.argv[1:])
