"""Qwen2.5, dense Qwen3 and Llama in PyTorch: config, layers, tokenizer, Hugging Face checkpoints.

The class Qwen covers all three model types. They differ in which layers have biases, in whether
queries and keys are normalized, in the size of a head, and in the scaling of RoPE. Config's fields
describe these differences.

Except for LoRA's matrices, parameters have the same names as in Hugging Face's checkpoints.
Attention is a function, `attend`, that a caller can replace: sample.py passes a function with a KV
cache, and grpo.py passes one for completions that share a prompt. The command-line parser of
sample.py, workflow.py, eval.py and train.py is here, too. Read sample.py next.
"""

import argparse
import difflib
import functools
import glob
import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as BPE
from tokenizers import processors
from torch.utils.checkpoint import checkpoint

MODEL_TYPES = ("qwen2", "qwen3", "llama")
# The settings of Llama 3.1's RoPE scaling; see `stretch`.
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass
class Config:
    """A model's configuration. Fields are keys of Hugging Face's (HF) config.json unless noted.

    The defaults are those of Qwen2.5-7B-Instruct. If head_dim, attention_bias,
    attention_output_bias or qk_norm is None, __post_init__ derives it from the other fields.
    """

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
    model_type: str = "qwen2"
    head_dim: int | None = None
    attention_bias: bool | None = None  # whether q_proj, k_proj and v_proj have a bias
    attention_output_bias: bool | None = None  # whether o_proj has a bias; not an HF key
    qk_norm: bool | None = None  # whether RMSNorm is applied to each head's q and k; not an HF key
    rope_scaling: dict | None = None  # for the long context of Llama 3.1; see `stretch`

    def __post_init__(self):
        is_qwen3 = self.model_type == "qwen3"
        if self.head_dim is None:
            self.head_dim = 128 if is_qwen3 else self.hidden_size // self.num_attention_heads
        if self.attention_bias is None:
            self.attention_bias = self.model_type == "qwen2"
        if self.attention_output_bias is None:
            self.attention_output_bias = self.attention_bias and self.model_type != "qwen2"
        if self.qk_norm is None:
            self.qk_norm = is_qwen3

    @classmethod
    def from_pretrained(cls, path: str) -> "Config":
        """Read config.json from a folder or from a repository on the Hugging Face hub.

        Raises ValueError, naming the file, if it is damaged, if a value is missing, or if the model
        is not supported. Sizes are not checked here, but when the weights are loaded.
        """
        file = os.path.join(fetch(path, "config.json"), "config.json")
        found = read_json(file)
        rope = found.get("rope_scaling") or found.get("rope_parameters") or {}
        # Copy the RoPE settings to the top level. transformers 5 writes them, including rope_theta,
        # to rope_parameters. Older versions write rope_theta to the top level and the rest to
        # rope_scaling, in which rope_type may be called `type`. If a file has rope_parameters and
        # rope_scaling, somebody has added the latter by hand, so it takes precedence, as it does in
        # transformers.
        found = found | {"rope_type": rope.get("type", "default")} | rope
        refuse_unknown(file, found)

        wanted = [f.name for f in fields(cls) if f.default is not None]
        if found["rope_type"] == "llama3":
            wanted += LLAMA3_ROPE
        missing = [name for name in wanted if found.get(name) is None]
        if missing:
            raise ValueError(f"{file} does not say {', '.join(missing)}")

        # Keep what `stretch` uses, and rope_type, which a saved model's config.json must have.
        found["rope_scaling"] = None
        if found["rope_type"] == "llama3":
            found["rope_scaling"] = {key: found[key] for key in ("rope_type", *LLAMA3_ROPE)}
        return cls(**{f.name: found[f.name] for f in fields(cls) if f.name in found})


def refuse_unknown(file: str, found: dict):
    """Raise ValueError if a model has a feature that is not implemented.

    Args:
        file: the path of config.json, for the message.
        found: the contents of config.json, with its RoPE settings copied to the top level.
    """
    model_type = found.get("model_type")
    act = found.get("hidden_act", "silu")
    rope_type = found["rope_type"]
    unknown = {
        f"model_type is {model_type!r}": model_type not in MODEL_TYPES,
        f"hidden_act is {act!r}": act != "silu",
        f"RoPE scaling is {rope_type!r}": rope_type not in ("default", "llama3"),
        "use_sliding_window asks for sliding windows": found.get("use_sliding_window"),
        "mlp_bias is true": found.get("mlp_bias"),
        "quantization_config says that the weights are quantized": found.get("quantization_config"),
    }
    for what, is_unknown in unknown.items():
        if is_unknown:
            raise ValueError(f"{file}: {what}, which is not implemented")


# ---- Layers ------------------------------------------------------------------------------------
# Shapes: B sequences, T tokens, C channels, H query heads, Hkv key-value heads, D channels per
# head, V tokens in the vocabulary.


def in_bf16_on_gpu(x) -> bool:
    """Return whether x is a bf16 tensor on CUDA.

    Two things happen only for such tensors: functions marked @fused are compiled, and grpo.py
    calls varlen_attn.
    """
    return x.is_cuda and x.dtype == torch.bfloat16


def fused(function):
    """Decorate a function of tensors so that it runs as a single kernel if that is faster.

    The kernel comes from torch.compile. The environment variable TORCHDYNAMO_DISABLE=1 turns
    compilation off.
    """

    @functools.wraps(function)
    def run(x, *others):
        if is_worth_fusing(x) and os.environ.get("TORCHDYNAMO_DISABLE") != "1":
            return compiled(function)(x, *others)
        return function(x, *others)

    return run


def is_worth_fusing(x) -> bool:
    """Return whether to compile a function of x, instead of running one kernel per operation.

    Only functions of bf16 tensors on a GPU are compiled.
    Calling a compiled function costs about 0.1 ms of CPU time. If x is large, this time is hidden,
    because the GPU is busy for longer. In inference mode, which only the sampler uses, functions of
    a small x are compiled, too: the sampler rarely calls them, because it replays CUDA graphs.
    """
    return in_bf16_on_gpu(x) and (torch.is_inference_mode_enabled() or x.numel() >= FUSE_FROM)


FUSE_FROM = 1 << 24  # min elements of x that make fusing worthwhile outside inference mode


@functools.cache
def compiled(function):
    """Return `function` wrapped by torch.compile, which makes a kernel for each kind of input.

    One kernel serves different numbers of tokens, but a dimension of size 1, a model with different
    widths, and turning gradients on or off can each require another kernel. At most 64 kernels are
    made for each function. After that, a call with a new kind of input runs without compilation.
    """
    announce_compilation()
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(function, dynamic=True)


@functools.cache
def announce_compilation():
    if os.environ.get("RANK", "0") == "0":
        print("compiling kernels for this GPU, once per process", file=sys.stderr, flush=True)


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return normalize(x, self.weight, self.eps)


@fused
def normalize(x, weight, eps: float):
    """Return RMSNorm of x (…, C) in the dtype of x.

    As in transformers, x is normalized in fp32, rounded to its dtype, and then multiplied by the
    weight (C). If F.rms_norm were given the weight, it would round only after the multiplication.
    A compiled kernel may skip the first rounding.
    """
    return weight * F.rms_norm(x, weight.shape, eps=eps)


def rotary(positions, config: Config):
    """Return the tables of rotary position embeddings (RoPE, arXiv:2104.09864) in fp32.

    Args:
        positions: the integer position of each token, (B, T).

    Returns:
        cos and sin, (B, 1, T, D) each. Both halves of D are for the same D/2 angles. The first half
        of sin is negated, because `rotate` needs the negative sine there.
    """
    channels = torch.arange(0, config.head_dim, 2, device=positions.device)  # (D/2,)
    frequency = config.rope_theta ** -(channels.float() / config.head_dim)  # radians per token
    if config.rope_scaling:
        frequency = stretch(frequency, config.rope_scaling)
    angle = positions[:, None, :, None].float() * frequency  # (B, 1, T, D/2)
    return angle.cos().repeat(1, 1, 1, 2), torch.cat((-angle.sin(), angle.sin()), -1)


def stretch(frequency, scaling: dict):
    """Return RoPE's frequencies for a longer context, as Llama 3.1 computes them.

    A frequency that makes more than high_freq_factor turns within the original context is kept. One
    that makes fewer than low_freq_factor turns is divided by `factor`. For a number of turns in
    between, the result is interpolated linearly.
    """
    factor, low, high, length = (scaling[key] for key in LLAMA3_ROPE)
    turns = length * frequency / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1: keep the frequency, 0: divide it
    return frequency * (kept + (1 - kept) / factor)


@fused
def rotate(x, cos, sin):
    """Rotate queries or keys x (B, H, T, D) by the angles in `rotary`'s tables, computing in fp32.

    Channels i and i + D/2 form a pair. Rolling x by D/2 swaps the two channels of each pair.
    """
    y = x.float()
    return (y * cos + y.roll(y.shape[-1] // 2, -1) * sin).to(x.dtype)


def causal(layer_idx: int, q, k, v):
    """Compute causal attention: each token attends to itself and to all tokens before it.

    This is the default `attend`. q is (B, H, T, D), k and v are (B, Hkv, T, D); returns
    (B, H, T, D). layer_idx is not used here; an `attend` with a KV cache needs it.
    """
    dtype = q.dtype
    if q.device.type == "cpu":  # On a CPU, bf16 makes attention no faster, only less precise.
        q, k, v = q.float(), k.float(), v.float()
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).to(dtype)


class Attention(nn.Module):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx  # tells `attend` which layer's KV cache to use
        self.head_dim = config.head_dim
        C = config.hidden_size
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(C, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(C, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(C, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, C, bias=config.attention_output_bias)
        self.joined = None  # after Qwen.join: (weight, bias or None) of q_proj, k_proj and v_proj
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def forward(self, x, cos, sin, attend):
        B, T, _ = x.shape
        heads = (B, T, -1, self.head_dim)
        q, k, v = project(x, (self.q_proj, self.k_proj, self.v_proj), self.joined)
        q = self.q_norm(q.view(heads)).transpose(1, 2)  # (B, H, T, D)
        k = self.k_norm(k.view(heads)).transpose(1, 2)  # (B, Hkv, T, D)
        v = v.view(heads).transpose(1, 2)  # (B, Hkv, T, D)
        y = attend(self.layer_idx, rotate(q, cos, sin), rotate(k, cos, sin), v)  # (B, H, T, D)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, C)


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.joined = None  # after Qwen.join: (weight, None) of gate_proj and up_proj

    def forward(self, x):
        gate, up = project(x, (self.gate_proj, self.up_proj), self.joined)
        return self.down_proj(swiglu(gate, up))


@fused
def swiglu(gate, up):
    return F.silu(gate) * up


def project(x, linears, joined):
    """Return each linear's output for x, all from one matrix product if `joined` is given."""
    if joined is None:
        return [linear(x) for linear in linears]
    return F.linear(x, *joined).split([linear.out_features for linear in linears], dim=-1)


@torch.no_grad()
def join(*linears: nn.Linear):
    """Concatenate the weights and the biases of linears; return (weight, bias or None).

    The weights and biases of the linears become views of the result, so nothing is stored twice.
    """
    sizes = [linear.out_features for linear in linears]
    weight = torch.cat([linear.weight for linear in linears])
    for linear, part in zip(linears, weight.split(sizes)):
        linear.weight = nn.Parameter(part, requires_grad=False)
    if linears[0].bias is None:
        return weight, None
    bias = torch.cat([linear.bias for linear in linears])
    for linear, part in zip(linears, bias.split(sizes)):
        linear.bias = nn.Parameter(part, requires_grad=False)
    return weight, bias


class LoRALinear(nn.Linear):
    """A frozen Linear plus a trained low-rank part: W x + b + B (A x) (LoRA, arXiv:2106.09685).

    A (rank, in) is initialized to random rows of length 1 and B (out, rank) to zeros, so initially
    nothing is added. Both are stored in fp32; the products are computed in the dtype of x.

    The usual factor alpha/rank is left out, because rows of length 1 already give the update the
    right scale: if A is square and orthogonal, a step of plain SGD on B changes B A exactly as a
    step on W would change W.
    """

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        A, B = self.start(rank, linear.weight.device)
        self.lora_A = nn.Parameter(A)
        self.lora_B = nn.Parameter(B)

    def start(self, rank: int, device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return initial values for A and B."""
        A = F.normalize(torch.randn(rank, self.in_features, device=device))
        return A, torch.zeros(self.out_features, rank, device=device)

    def forward(self, x):
        low = F.linear(x, self.lora_A.to(x.dtype))  # (…, rank)
        return super().forward(x) + F.linear(low, self.lora_B.to(x.dtype))


def add_lora(model: "Qwen", rank: int):
    """Freeze a model in place and add LoRA matrices of this rank to every Linear of its layers.

    For example:

        add_lora(model, rank=16)
        optimizer = AdamW([p for p in model.parameters() if p.requires_grad])
        …
        model.save_pretrained(path)  # merges the LoRA matrices into the weights
    """
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                layer.set_submodule(name, LoRALinear(module, rank))


def merge_lora(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a new state dict in which each pair of LoRA matrices is merged into its weight.

    W becomes W + B A, computed in fp32 and stored in W's dtype. All other tensors are shared with
    `state`.

    Merge only a finished model: an element of B A is rounded away if it is less than half the
    distance from W's element to the next number that W's dtype can hold. In bf16, this distance is
    1/256 to 1/128 of the element, often more than the first steps of training add.
    """
    merged = {name: tensor for name, tensor in state.items() if ".lora_" not in name}
    for name, A in state.items():
        if name.endswith(".lora_A"):
            B = state[name.replace("lora_A", "lora_B")]
            weight = name.replace("lora_A", "weight")
            whole = torch.addmm(merged[weight].float(), B.float(), A.float())
            merged[weight] = whole.to(merged[weight].dtype)
    return merged


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
        # The device to compute on, if train.py's --offload keeps the weights in host memory.
        self.compute_device = None
        self.recompute = False  # True: activation checkpointing, one layer at a time
        # In Hugging Face's checkpoints, every name except lm_head's begins with `model.`.
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers)),
                "norm": RMSNorm(config.hidden_size, config.rms_norm_eps),
            }
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids, positions=None, attend=causal, head=None):
        """Return fp32 logits (B, T, V) for token ids (B, T), or the result of `head` if given.

        Args:
            positions: (B, T); by default, 0 … T-1 in each sequence.
            attend: computes attention in place of `causal`: (layer_idx, q, k, v) -> (B, H, T, D).
            head: computes the result from hidden states (B, T, C) in place of `logits`, for
                instance at fewer positions. With FSDP, a caller could not do this after `forward`,
                because the weights of lm_head are gathered only while `forward` runs.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        cos, sin = rotary(positions, self.config)
        x = self.model.embed_tokens(ids)  # (B, T, C)
        for layer in self.model.layers:
            if self.recompute:
                x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False)
            else:
                x = layer(x, cos, sin, attend)
        hidden = self.model.norm(x)
        return head(hidden) if head else self.logits(hidden)

    def logits(self, hidden):
        """Return the logits (…, V) of hidden states (…, C).

        Logits are fp32, because bf16 is too coarse for the ratio π/π_old of the GRPO loss.
        """
        if hidden.dtype == torch.float32:
            return self.lm_head(hidden)
        rows = hidden.flatten(0, -2)  # (N, C)
        return HeadFP32.apply(rows, self.lm_head.weight).view(*hidden.shape[:-1], -1)

    def join(self) -> "Qwen":
        """Join matrices that multiply the same vector, to speed up sampling. Return the model.

        The joined parameters keep their names, but become views of the joined matrices. No
        parameter gets gradients any longer, so the model cannot be trained afterwards. It must have
        no LoRA matrices, because the product with a joined matrix would leave them out.
        """
        self.requires_grad_(False)
        for layer in self.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            attention.joined = join(attention.q_proj, attention.k_proj, attention.v_proj)
            mlp.joined = join(mlp.gate_proj, mlp.up_proj)
        return self

    @property
    def device(self) -> torch.device:
        return self.compute_device or self.lm_head.weight.device

    @classmethod
    def from_pretrained(
        cls, path: str, dtype=torch.float32, device="cpu", shard=None, lora_rank=0
    ) -> "Qwen":
        """Load a checkpoint from a folder or from a repository on the Hugging Face hub.

        Args:
            dtype: the dtype of the weights; None: as in the file. LoRA matrices are always fp32.
            shard: if given, shard(model) applies FSDP to the empty model in place. Each rank then
                keeps only its part of every tensor.
            lora_rank: if not 0, freeze the weights and add LoRA matrices of this rank (see
                `add_lora`).

        Raises ValueError, naming the file, tensor or key, if a file is damaged, if the model is not
        supported, or if the weights are missing or do not match config.json.
        """
        model = empty_model(Config.from_pretrained(path), lora_rank)
        if shard:
            shard(model)
        state = read_tensors(path)
        parameters = dict(model.named_parameters())

        # A Qwen2 that was saved as a Llama has a zero bias in each o_proj: drop these biases.
        if is_llama_with_zero_bias(model.config):
            state = {name: p for name, p in state.items() if not name.endswith("o_proj.bias")}

        # LoRA matrices are not in the checkpoint: add their initial values.
        for name, module in model.named_modules():
            if isinstance(module, LoRALinear):
                A, B = module.start(lora_rank, "cpu")
                state |= {f"{name}.lora_A": A, f"{name}.lora_B": B}

        # Convert each tensor and, with FSDP, keep only this rank's part.
        for name, tensor in state.items():
            state[name] = tensor.to(device, torch.float32 if ".lora_" in name else dtype)
            if shard and name in parameters:
                state[name] = own_part(state[name], parameters[name]).to(device)
        if model.config.tie_word_embeddings:  # The checkpoint may lack lm_head.weight.
            state["lm_head.weight"] = state.get("model.embed_tokens.weight")

        try:
            model.load_state_dict(state, assign=True)
        except RuntimeError as e:  # e names the missing, unexpected and misshapen tensors.
            raise ValueError(f"{path} does not fit its config.json: {str(e)[:400]}") from None
        if model.config.tie_word_embeddings:  # load_state_dict has untied the weights
            model.lm_head.weight = model.model.embed_tokens.weight
        return model

    def save_pretrained(self, path: str):
        """Write config.json and model.safetensors in Hugging Face's format.

        LoRA matrices are merged into the weights. If the folder has a tokenizer that is not Qwen's,
        a Qwen2 model is written as a Llama (see `has_qwen_tokenizer`). Each file is written under a
        temporary name and then renamed, so a reader never sees half a file.
        """
        os.makedirs(path, exist_ok=True)
        state = {name: p.detach().cpu().contiguous() for name, p in self.named_parameters()}
        state = merge_lora(state)
        config = self.config
        if config.model_type == "qwen2" and not has_qwen_tokenizer(path):
            config = replace(config, model_type="llama")
        if is_llama_with_zero_bias(config):
            for i in range(config.num_hidden_layers):
                bias = torch.zeros(config.hidden_size, dtype=self.lm_head.weight.dtype)
                state[f"model.layers.{i}.self_attn.o_proj.bias"] = bias

        config_file = os.path.join(path, "config.json")
        keys = {
            "architectures": [f"{config.model_type.capitalize()}ForCausalLM"],
            "hidden_act": "silu",
            "torch_dtype": str(self.lm_head.weight.dtype).removeprefix("torch."),
            # Without this key, transformers 4.57.6 warns, wrongly, that the tokenizer's regex is
            # incorrect.
            "transformers_version": "4.57.0",
        }
        write_json(config_file, keys | asdict(config))
        file = os.path.join(path, "model.safetensors")
        save_file(state, file + ".tmp", metadata={"format": "pt"})
        # safetensors makes its file readable by the owner alone; copy the mode of config.json.
        os.chmod(file + ".tmp", os.stat(config_file).st_mode)
        os.replace(file + ".tmp", file)


def empty_model(config: Config, lora_rank: int = 0) -> Qwen:
    """Return a model whose parameters have a shape, but no values and no memory.

    They are on torch's device "meta"; load_state_dict(…, assign=True) replaces them. With
    lora_rank, the model has LoRA matrices of this rank (see `add_lora`).
    """
    with torch.device("meta"):
        model = Qwen(config)
        if lora_rank:
            add_lora(model, lora_rank)
    return model


def is_llama_with_zero_bias(config: Config) -> bool:
    """Return whether o_proj has a bias in the checkpoint but not in the model.

    In transformers, attention_bias also gives the o_proj of a Llama a bias. The o_proj of a Qwen2
    has no bias, so a bias of zeros is written when a Qwen2 is saved as a Llama.
    """
    is_llama = config.model_type == "llama"
    return is_llama and config.attention_bias and not config.attention_output_bias


def read_tensors(path: str) -> dict[str, torch.Tensor]:
    """Return {name: tensor} for a checkpoint. The tensors are memory-mapped and not yet read.

    If the folder holds model.safetensors, all other files of weights are ignored, as in
    transformers. Raises ValueError if a file is damaged, if two files hold a tensor of the same
    name, or if there are no weights.
    """
    patterns = ("model.safetensors", "model-*.safetensors")
    folder = fetch(path, *patterns)
    single, several = (glob.glob(pattern, root_dir=folder) for pattern in patterns)
    state = {}
    for file in single or several:
        try:
            tensors = load_file(os.path.join(folder, file))
        except SafetensorError as e:
            raise ValueError(f"{folder}/{file} is damaged: {e}") from None
        if state.keys() & tensors.keys():
            raise ValueError(f"{folder} mixes the files of two checkpoints: {sorted(several)}")
        state |= tensors
    if not state:
        raise ValueError(f"{folder} holds no weights: {' or '.join(patterns)}")
    return state


def own_part(tensor, parameter):
    """Return a DTensor with this rank's part of a tensor, split like the given FSDP parameter."""
    from torch.distributed.tensor import distribute_tensor  # a slow import, only for FSDP

    mesh, placements = parameter.device_mesh, parameter.placements
    # With src_data_rank=None, each rank splits its own copy, without communication.
    part = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    return part.clone()  # A view would keep the whole tensor in memory.


# ---- Precision ---------------------------------------------------------------------------------
# Turn off cuDNN's attention: on Hopper GPUs, it reportedly spends a second on planning for each new
# sequence length.
torch.backends.cuda.enable_cudnn_sdp(False)


# A model with fewer parameters than this computes in fp32.
TINY = 10_000_000


def dtype_for(config: Config, device) -> torch.dtype:
    """Return the dtype in which a model computes, both in training and in sampling."""
    return torch.float32 if count_parameters(config) < TINY else compute_dtype(device)


def count_parameters(config: Config, lora_rank: int = 0) -> int:
    """Return the number of trained weights: the whole model's or, with lora_rank, only LoRA's."""
    parameters = empty_model(config, lora_rank).parameters()
    return sum(p.numel() for p in parameters if p.requires_grad)


def compute_dtype(device) -> torch.dtype:
    """Return bf16 if the device, a GPU or an x86 CPU, has hardware support for it, else fp32."""
    if torch.device(device).type == "cuda":
        has_units = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_units = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if has_units else torch.float32


class HeadFP32(torch.autograd.Function):
    """Multiply hidden states (N, C) by weight (V, C), both bf16; return logits (N, V) in fp32.

    Rounding a logit near 20 to bf16 could change it, and its log-probability, by up to 0.06. The
    gradients are bf16, like those of all other layers.
    """

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        if hidden.device.type == "cuda":
            return torch.mm(hidden, weight.T, out_dtype=torch.float32)
        # On a CPU, a product of bf16 matrices is rounded to bf16. To recover what the rounding
        # lost, addmm computes the product again and subtracts `rounded` before rounding. Two
        # products in bf16 are faster than one in fp32.
        rounded = hidden @ weight.T
        return rounded.float() + torch.addmm(rounded, hidden, weight.T, beta=-1)

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        return grad @ weight, grad.T @ hidden


# ---- Chat templates ----------------------------------------------------------------------------
@dataclass
class ChatTemplate:
    """How a conversation is written as text. Names in <|…|> are control tokens."""

    turn: str  # one message, with the placeholders {role} and {content}
    ends: tuple[str, ...]  # the token that ends a turn, then further tokens that end generation
    begin: str = ""  # the text before the first turn
    system: str = ""  # the system message put first unless a conversation begins with one
    opening: str = ""  # the text put at the start of the assistant's next answer
    clean: Callable = lambda role, content: content  # returns the content to put into `turn`
    jinja_clean: str = "m['content']"  # what `clean` returns for a message m, in Jinja

    def answer(self) -> str:
        """Return the beginning of the assistant's next turn."""
        return self.turn.partition("{content}")[0].format(role="assistant") + self.opening

    def jinja(self) -> str:
        """Return the template in Jinja, for other programs that read tokenizer_config.json."""
        system = self.turn.format(role="system", content=self.system)
        if_missing = "{% if messages[0]['role'] != 'system' %}" + system + "{% endif %}"
        turn = self.turn.format(role="{{ m['role'] }}", content="{{ " + self.jinja_clean + " }}")
        turns = "{% for m in messages %}" + turn + "{% endfor %}"
        answer = "{% if add_generation_prompt %}" + self.answer() + "{% endif %}"
        return self.begin + (if_missing if self.system else "") + turns + answer


def without_thoughts(role: str, content: str) -> str:
    """Return a message's content, without an assistant's thoughts.

    The thoughts are all text up to the last </think>, and the newlines after it. Qwen3's template
    drops them in all turns before the last question.
    """
    if role == "assistant" and "</think>" in content:
        return content.split("</think>")[-1].lstrip("\n")
    return content


CONTROL_TOKEN = r"(<\|\w+\|>)"
CHATML = "<|im_start|>{role}\n{content}<|im_end|>\n"
CHATML_ENDS = ("<|im_end|>", "<|endoftext|>")
QWEN2_CHAT = ChatTemplate(
    CHATML,
    CHATML_ENDS,
    system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
)
QWEN3_CHAT = ChatTemplate(
    CHATML,
    CHATML_ENDS,
    # After an empty thinking block, Qwen3 answers without thinking. The Instruct-2507 models get
    # the block as well, although they never think.
    opening="<think>\n\n</think>\n\n",
    clean=without_thoughts,
    jinja_clean=(
        "m['content'].split('</think>')[-1].lstrip('\\n') if m['role'] == 'assistant'"
        " and '</think>' in m['content'] else m['content']"
    ),
)
LLAMA3_CHAT = ChatTemplate(
    "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
    ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    begin="<|begin_of_text|>",
    clean=lambda role, content: content.strip(),
    jinja_clean="m['content'] | trim",
)


def find_template(bpe: BPE, model_type: str) -> ChatTemplate:
    """Return the chat template that fits the tokenizer.

    A template fits if the tokenizer has all control tokens in `template.turn`, and never produces
    them from a text that spells them out. A tokenizer with ChatML's control tokens gets Qwen3's
    template if the model is a Qwen3, and Qwen2.5's otherwise. Raises ValueError if no template
    fits.
    """
    for template in (QWEN3_CHAT if model_type == "qwen3" else QWEN2_CHAT, LLAMA3_CHAT):
        tokens = re.findall(CONTROL_TOKEN, template.turn)
        ids = {bpe.token_to_id(token) for token in tokens}
        texts = bpe.encode_batch(tokens, add_special_tokens=False)
        if None not in ids and ids.isdisjoint(i for text in texts for i in text.ids):
            return template
    raise ValueError(
        "no ChatML tokenizer, nor one of Llama 3: <|im_start|> and <|im_end|>, or "
        "<|start_header_id|>, <|end_header_id|> and <|eot_id|>, must be special tokens"
    )


# ---- Tokenizer ---------------------------------------------------------------------------------
class Tokenizer:
    """A Hugging Face tokenizer.json with its chat template (ChatML or Llama 3).

    len(tokenizer) is the largest id plus one; a model's vocab_size may be larger. `eos_id` is the
    id of the token that ends a turn of a chat. Generation stops at any of `end_ids`: at `eos_id`,
    and at tokens such as <|endoftext|>, with which a base model ends a text.

    Text is never encoded as a control token. Only `chat` inserts control tokens, so a question or a
    worker's reply that contains the text <|im_end|> cannot end its own turn.
    """

    def __init__(self, bpe: BPE, model_type: str = "qwen2"):
        self.bpe = bpe
        bpe.encode_special_tokens = True  # Encode a text such as "<|im_end|>" as plain text.
        bpe.post_processor = processors.ByteLevel(trim_offsets=False)  # adds no BOS
        bpe.no_truncation()
        bpe.no_padding()
        self.template = find_template(bpe, model_type)
        self.ends = [end for end in self.template.ends if bpe.token_to_id(end) is not None]
        self.end_ids = [bpe.token_to_id(end) for end in self.ends]
        self.eos_id = self.end_ids[0]
        self.n_ids = 1 + max(bpe.get_vocab(with_added_tokens=True).values())

    @classmethod
    def from_pretrained(cls, path: str) -> "Tokenizer":
        """Read tokenizer.json from a folder or from a repository on the Hugging Face hub.

        config.json, if it exists, decides between the chat templates of Qwen2.5 and Qwen3. Raises
        ValueError, naming the file, if a file is damaged, if the folder has no tokenizer.json, or
        if no chat template fits.
        """
        folder = fetch(path, "tokenizer.json", "config.json")
        file = os.path.join(folder, "tokenizer.json")
        config_file = os.path.join(folder, "config.json")
        config = read_json(config_file) if os.path.exists(config_file) else {}
        try:
            return cls(BPE.from_file(file), config.get("model_type", "qwen2"))
        except Exception as e:  # The tokenizers library raises Exception, not a subclass.
            raise ValueError(f"cannot read {file}: {e}") from None

    def save_pretrained(self, path: str):
        """Write tokenizer.json and, for other programs, the chat template and the end tokens.

        If the folder already holds a Qwen2 model and this tokenizer is not Qwen's, the model is
        saved again, as a Llama (see `has_qwen_tokenizer`).
        """
        self.bpe.save(os.path.join(path, "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
            "chat_template": self.template.jinja(),
            "eos_token": self.ends[0],
            "pad_token": self.ends[-1],
            "unk_token": None,
        }
        write_json(os.path.join(path, "tokenizer_config.json"), config)
        generation = {"eos_token_id": self.end_ids, "pad_token_id": self.end_ids[-1]}
        write_json(os.path.join(path, "generation_config.json"), generation)

        # If the model was saved first, Qwen.save_pretrained assumed Qwen's tokenizer: correct that.
        if os.path.exists(os.path.join(path, "model.safetensors")):
            found = read_json(os.path.join(path, "config.json"))
            if found.get("model_type") == "qwen2" and not has_qwen_tokenizer(path):
                Qwen.from_pretrained(path, dtype=None).save_pretrained(path)

    def __len__(self) -> int:
        return self.n_ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. A lone surrogate, such as half an emoji, becomes "?"."""
        text = text.encode(errors="replace").decode()
        return self.bpe.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of the ids, without control tokens."""
        return self.bpe.decode(ids, skip_special_tokens=True)

    def chat(self, messages: list[dict]) -> list[int]:
        """Return the token ids of a conversation, up to where the assistant's next answer begins.

        Args:
            messages: the turns, each {"role": role, "content": text}. The role is "system", "user"
                or "assistant".
        """
        template = self.template
        if template.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": template.system}, *messages]
        ids = self.fill(template.begin)
        for message in messages:
            role = message["role"]
            ids += self.fill(template.turn, role, template.clean(role, message["content"]))
        return ids + self.fill(template.answer())

    def fill(self, template: str, role: str = "", content: str = "") -> list[int]:
        """Fill role and content into part of a chat template, and return its token ids.

        Each control token in the template becomes its id. Everything else, including what looks
        like a control token in role or content, is encoded as plain text.
        """
        ids = []
        for part in re.split(CONTROL_TOKEN, template):
            if re.fullmatch(CONTROL_TOKEN, part):
                ids.append(self.bpe.token_to_id(part))
            else:
                ids += self.encode(part.format(role=role, content=content))
        return ids


def check_ids(tokenizer: Tokenizer, config: Config):
    """Raise ValueError if the tokenizer has ids for which the model has no embedding."""
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"tokenizer.json has ids up to {len(tokenizer) - 1}, but the model's vocab_size is "
            f"{config.vocab_size}: they do not belong together"
        )


# The regular expression in Qwen2.5's tokenizer.json that splits a text into words.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def has_qwen_tokenizer(folder: str) -> bool:
    """Return whether a folder's tokenizer.json normalizes and splits text as Qwen2.5's does.

    Returns True if the file is missing. With model_type qwen2, transformers 5 reads only the
    vocabulary and the merges from tokenizer.json; it always normalizes and splits text as Qwen2.5
    does. With any other tokenizer, the ids would silently be wrong, so the model is saved with
    model_type llama instead.
    """
    file = os.path.join(folder, "tokenizer.json")
    if not os.path.exists(file):
        return True
    found = read_json(file)
    steps = (found.get("pre_tokenizer") or {}).get("pretokenizers") or [{}]
    is_split_like_qwen = steps[0].get("pattern") == {"Regex": QWEN_WORDS}
    return is_split_like_qwen and found.get("normalizer") == {"type": "NFC"}


# ---- Files -------------------------------------------------------------------------------------
def fetch(name: str, *patterns: str) -> str:
    """Return the local folder of a checkpoint, after downloading its files if necessary.

    If `name` is not a folder, it must name a repository on the Hugging Face hub, such as
    "Qwen/Qwen2.5-7B". The files that match any of the patterns are then downloaded into Hugging
    Face's cache. For a gated repository, set HF_TOKEN in the environment. Raises OSError if there
    is no such folder or repository, or if the download fails.
    """
    if os.path.isdir(name):
        nested = os.path.join(name, "checkpoint")
        if os.path.isdir(nested) and not os.path.exists(os.path.join(name, "config.json")):
            raise OSError(f"{name} holds a run, not a model: its Conductor is in {nested}")
        return name
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise OSError(f"{name} is no folder, and cannot be a name on the Hugging Face hub")
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=list(patterns))
    except Exception as e:  # The hub and its transport raise errors of many classes.
        raise OSError(f"{name} is no folder, and the hub did not give it: {e}") from e


def read_json(file: str) -> dict:
    """Read a JSON file as a dict. Raises ValueError, naming it, if it holds no JSON object."""
    with open(file, encoding="utf-8") as f:
        try:
            value = json.load(f)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{file} holds no JSON object: {e}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds no JSON object")
    return value


def write_json(file: str, value):
    """Write JSON to a temporary file, then rename it, so that a reader never sees half a file."""
    with open(file + ".tmp", "w", encoding="utf-8") as f:
        json.dump(value, f, indent=2, ensure_ascii=False)
    os.replace(file + ".tmp", file)


# ---- Command lines -----------------------------------------------------------------------------


def flag(default, help: str):
    """Return a field for a dataclass of settings; `help` describes its command-line flag."""
    return field(default=default, metadata={"help": help})


def configure(settings, argv: list[str]) -> list[str]:
    """Set the fields of a dataclass from command-line flags; return the words that are not flags.

    `--lr=1e-3` and `--lr 1e-3` set the field `lr`; the text is converted to the type of the field's
    current value. A bool is set by `--resume`, `--no-resume`, `--resume=true` or `--resume=false`.
    Words after `--` are not flags. `--help` prints the docstring of the module that defines the
    dataclass and a list of all flags, then exits. If a flag is unknown or its value is invalid,
    a line that names the flag is printed, and the program exits with status 2, before any setting
    is changed.
    """
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description=sys.modules[type(settings).__module__].__doc__,
        formatter_class=ManualPage,
        argument_default=argparse.SUPPRESS,  # so that flags that are not given set nothing
        allow_abbrev=False,
    )
    parser.error = usage_error  # so that argparse's errors look like those found below
    group = parser.add_argument_group("flags, with their defaults in brackets")
    known = ["--help"]
    switches = {}  # another spelling of a bool's flag -> the spelling that argparse knows
    for f in fields(settings):
        default = getattr(settings, f.name)
        if isinstance(default, bool):
            shown = "on" if default else "off"
            how = {"action": argparse.BooleanOptionalAction}
            switches |= {f"--{f.name}=true": f"--{f.name}", f"--{f.name}=false": f"--no-{f.name}"}
        else:
            shown = str(default)
            convert, metavar = FLAG_TYPES[type(default)]
            how = {"type": convert, "metavar": metavar}
        text = f.metadata["help"].replace("%", "%%")
        text += f" [{shown}]" if shown else ""
        known += group.add_argument(f"--{f.name}", help=text, **how).option_strings

    end = argv.index("--") if "--" in argv else len(argv)
    flags = [switches.get(word.lower(), word) for word in argv[:end]]
    given, words = parser.parse_known_args(flags)
    for word in words:
        if re.match(r"--?[A-Za-z][\w-]*(=|$)", word):  # "-3 + 4 = ?" is a word, not a flag
            nearest = difflib.get_close_matches(word.partition("=")[0], known, n=1) or known
            usage_error(f"unknown flag {word}; did you mean {nearest[0]}?")
    vars(settings).update(vars(given))
    return words + argv[end + 1 :]


def discard_output():
    """Discard all further output, because the program that reads it, such as head, has ended.

    Without this, Python's flush of its output at exit would fail.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class ManualPage(argparse.RawDescriptionHelpFormatter):
    """Lays out --help in at most 100 columns, without splitting names such as zero-shot."""

    def __init__(self, prog: str):
        width = min(100, shutil.get_terminal_size().columns)
        super().__init__(prog, max_help_position=36, width=width)

    def _split_lines(self, text, width):
        return textwrap.wrap(text, width, break_on_hyphens=False)


def number(text: str) -> float:
    """Return a flag's text as a float. Raises ValueError if it is not a finite number."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


# Type of a flag -> (the function that converts its text, what --help calls its value)
FLAG_TYPES = {
    int: (int, "INTEGER"),
    float: (number, "NUMBER"),
    str: (os.path.expanduser, "TEXT"),  # A shell does not expand the ~ in --out=~/run.
}


def usage_error(message: str):
    """Print a message to stderr and exit with status 2."""
    print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)
    raise SystemExit(2)
