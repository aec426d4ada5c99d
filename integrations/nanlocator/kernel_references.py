"""What kernels of well-known families should give: definitions in plain PyTorch, for float64.

A reference never makes a verdict by matching a name. ``references_of`` offers those of a family where every
tensor of the call has a role in it; the engine takes one as a judge only where it reproduces what the kernel
has computed (nanlocator/replay/kernel_replay.hpp). A tensor without a role (a mask, a scale, an offset) may
change the mathematics: then there is no reference.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]
Scalars = dict[str, Any]
Values = Callable[[Tensors, Scalars], list[torch.Tensor]]


# What arguments are called, without "_ptr" and in small letters; pybind's unnamed ones by position.
_ROLES: dict[str, tuple[str, ...]] = {
    "x": ("x", "input", "inp", "self", "hidden_states", "in", "a", "gate", "logits", "mat1", "src"),
    "y": ("b", "up", "other", "mat2", "c_in"),
    "weight": ("w", "weight", "gamma", "table", "embeddings"),
    "bias": ("bias", "beta"),
    "grad": ("gradient", "grad", "dy", "dout", "do", "grad_output", "grad_out", "dc", "gradient_of_y"),
    "q": ("q", "query"),
    "k": ("k", "key"),
    "v": ("v", "value"),
    "cos": ("cos",),
    "sin": ("sin",),
    "labels": ("labels", "target", "targets", "y_true"),
    "ids": ("ids", "indices", "input_ids", "index"),
    "probabilities": ("y", "out", "output", "probs", "p"),  # that a softmax gave
    "cu_seqlens": ("cu_seqlens", "cu_seqlens_q", "cu_seq_lens"),
    "cu_seqlens_k": ("cu_seqlens_k",),
}
_ROLE_OF = {alias: role for role, aliases in _ROLES.items() for alias in aliases}
# That are written and not read, or what forward keeps for backward: a reference computes its own.
_NOT_READ = re.compile(
    r"^(out|output|y|o|z|result|of_\w+|d[xwbqkv]|dgate|dup|da|db|grad_(input|weight|bias|q|k|v|x)|loss|lse|softmax_lse|"
    r"rstd|mean|rng_state|workspace|delta|dsum)$"
)
_UNNAMED = re.compile(r"argument\[\d+\]$|arg\d+$")


def references_of(
    kernel: str, names: list[str], scalars: Scalars
) -> list[tuple[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]]]:
    """(family, function of the call's tensors) of what ``kernel`` may compute. ``names``: of its tensors;
    ``scalars``: its numbers and lists of them."""
    plain = kernel.rpartition("::")[2].lower()
    return [
        (family, _bound(values, names, required, scalars))
        for pattern, family, required, values in _TABLE
        if re.search(pattern, plain) and _roles(names, required) is not None
    ]


def _plain(name: str) -> str:
    name = name.lower()
    for ending in ("_ptr", "_pointer", "ptr"):
        name = name.removesuffix(ending)
    return name


def _roles(names: list[str], required: tuple[str, ...]) -> dict[str, int] | None:
    """Which tensor has which role; None where one is missing, or one has none."""
    optional = {role.removesuffix("?") for role in required}
    found: dict[str, int] = {}
    left: list[int] = []
    for i, name in enumerate(names):
        role = _ROLE_OF.get(_plain(name))
        if role in optional and role not in found:
            found[role] = i
        elif _NOT_READ.match(_plain(name)):
            continue
        else:
            left.append(i)
    for role in required:  # unnamed ones, in order
        if role not in found and not role.endswith("?") and left and _UNNAMED.match(names[left[0]]):
            found[role] = left.pop(0)
    is_whole = all(role in found or role.endswith("?") for role in required)
    found = {role.removesuffix("?"): i for role, i in found.items()}
    return found if is_whole and not left else None


def _bound(
    values: Values, names: list[str], required: tuple[str, ...], scalars: Scalars
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    roles = _roles(names, required) or {}

    def of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return values({role: tensors[i] for role, i in roles.items()}, scalars)

    return of


def _scalar(scalars: Scalars, *names: str, default: Any) -> Any:
    for name, value in scalars.items():
        if _plain(name) in names and isinstance(value, bool | int | float):
            return value
    return default


# --- families ---


def _pointwise(function: Callable[..., torch.Tensor]) -> Values:
    return lambda t, s: [function(*(t[role] for role in ("x", "y") if role in t))]


def _gradients(forward: Values, *of: str) -> Values:
    """Of what ``forward`` gives first, for the role ``grad``, by the roles ``of``, through autograd."""

    def values(tensors: Tensors, scalars: Scalars) -> list[torch.Tensor]:
        with torch.enable_grad():
            leaves = {
                role: t.detach().requires_grad_(role in of and t.is_floating_point())
                for role, t in tensors.items()
            }
            (output, *_) = forward(leaves, scalars)
            wanted = [leaves[role] for role in of if role in leaves]
            given = tensors["grad"].reshape(output.shape)
            return list(torch.autograd.grad(output, wanted, given, allow_unused=True, materialize_grads=True))

    return values


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _rms_norm(t: Tensors, s: Scalars) -> list[torch.Tensor]:
    eps = _scalar(s, "eps", "epsilon", default=1e-6)
    normed = t["x"] * torch.rsqrt(t["x"].square().mean(-1, keepdim=True) + eps)
    weight = t.get("weight")
    offset = _scalar(s, "offset", default=0.0)
    return [normed if weight is None else normed * (weight + offset)]


def _layer_norm(t: Tensors, s: Scalars) -> list[torch.Tensor]:
    eps = _scalar(s, "eps", "epsilon", default=1e-5)
    return [F.layer_norm(t["x"], t["x"].shape[-1:], t.get("weight"), t.get("bias"), eps)]


def _softmax(t: Tensors, _: Scalars) -> list[torch.Tensor]:
    return [torch.softmax(t["x"], -1)]


def _log_softmax(t: Tensors, _: Scalars) -> list[torch.Tensor]:
    return [torch.log_softmax(t["x"], -1)]


def _softmax_gradient(t: Tensors, _: Scalars) -> list[torch.Tensor]:
    y, grad = t["probabilities"], t["grad"]
    return [y * (grad - (grad * y).sum(-1, keepdim=True))]


def _cross_entropy(t: Tensors, s: Scalars) -> list[torch.Tensor]:
    logits = t["x"].flatten(0, -2)
    ignored = _scalar(s, "ignore_index", "ignored", default=-100)
    each = F.cross_entropy(logits, t["labels"].flatten(), ignore_index=ignored, reduction="none")
    count = (t["labels"] != ignored).sum().clamp(min=1)
    return [each, each / count, each.sum() / count]


def _cross_entropy_gradient(t: Tensors, s: Scalars) -> list[torch.Tensor]:
    logits, labels = t["x"].flatten(0, -2), t["labels"].flatten()
    ignored = _scalar(s, "ignore_index", "ignored", default=-100)
    slope = torch.softmax(logits, -1)
    is_valid = labels != ignored
    slope[is_valid, labels[is_valid]] -= 1
    slope[~is_valid] = 0
    return [slope, slope / is_valid.sum().clamp(min=1)]


def _products(t: Tensors, _: Scalars) -> list[torch.Tensor]:
    """Of matrices, in the layouts that fit."""
    a, b = t["x"], t.get("y", t.get("weight"))
    assert b is not None
    found = []
    for left in (a, a.mT):
        for right in (b, b.mT):
            if left.shape[-1] == right.shape[-2]:
                product = left @ right
                found += [product] if "bias" not in t else [product + t["bias"]]
    return found


def _counts(s: Scalars) -> list[int]:
    for name in ("counts", "m_splits", "batch_sizes", "tokens_per_expert", "splits"):
        if isinstance(s.get(name), list):
            return [int(count) for count in s[name]]
    raise KeyError("counts")


def _grouped_products(t: Tensors, s: Scalars) -> list[torch.Tensor]:
    rows = t["x"].split(_counts(s))
    found = []
    for weights in (t["weight"], t["weight"].mT):
        if weights.shape[-2] == t["x"].shape[-1]:
            found.append(torch.cat([x @ w for x, w in zip(rows, weights, strict=True)]))
    return found


def _grouped_gradients(t: Tensors, s: Scalars) -> list[torch.Tensor]:
    pairs = list(zip(t["grad"].split(_counts(s)), t["x"].split(_counts(s)), strict=True))
    return [torch.stack([g.mT @ x for g, x in pairs]), torch.stack([x.mT @ g for g, x in pairs])]


def _rope(t: Tensors, _: Scalars) -> list[torch.Tensor]:
    """Rotated halves and pairs, in both directions; ``cos`` and ``sin`` of a whole head or of half."""
    found = []
    for x in (t[role] for role in ("x", "q", "k") if role in t):
        half = x.shape[-1] // 2
        left, right = t["cos"][..., :half], t["sin"][..., :half]
        for heads in (None, 1, 2):  # where the dimension of the heads is missing
            cos, sin = (
                each if heads is None else each.unsqueeze(min(heads, each.dim())) for each in (left, right)
            )
            for sign in (1, -1):
                for a, b, join in (
                    (x[..., :half], x[..., half:], lambda u, v: torch.cat((u, v), -1)),
                    (x[..., ::2], x[..., 1::2], lambda u, v: torch.stack((u, v), -1).flatten(-2)),
                ):
                    with contextlib.suppress(RuntimeError):  # shapes that do not fit
                        rotated = join(a * cos - sign * b * sin, b * cos + sign * a * sin)
                        found += [rotated] if rotated.shape == x.shape else []
    return found


def _embedding(t: Tensors, _: Scalars) -> list[torch.Tensor]:
    return [t["weight"][t["ids"].long()]]


def _attention_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, is_causal: bool
) -> torch.Tensor:
    """(batch, heads, length, width); fewer heads of k and v are shared."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * scale
    if is_causal:  # aligned at the last row and column, as flash-attention 2.1 and later do
        rows, columns = scores.shape[-2:]
        mask = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
        scores = scores.masked_fill(~mask, -math.inf)
    return torch.softmax(scores, -1) @ v


def _attention(layout: str) -> Values:
    def values(t: Tensors, s: Scalars) -> list[torch.Tensor]:
        q, k, v = t["q"], t["k"], t["v"]
        scale = _scalar(s, "scale", "softmax_scale", "sm_scale", default=q.shape[-1] ** -0.5)
        is_causal = bool(_scalar(s, "causal", "is_causal", default=False))
        if _scalar(s, "p_dropout", "dropout_p", "dropout", default=0.0):
            return []
        if any(
            _scalar(s, name, default=-1) not in (-1, 0) for name in ("window_size_left", "window_size_right")
        ):
            return []
        if _scalar(s, "softcap", default=0.0):
            return []
        if "cu_seqlens" in t:
            return [_varlen(q, k, v, t, scale, is_causal)]
        if layout == "bshd":
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        output = _attention_of(q, k, v, scale, is_causal)
        return [output.transpose(1, 2) if layout == "bshd" else output]

    return values


def _varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Tensors, scale: float, is_causal: bool
) -> torch.Tensor:
    """(tokens, heads, width) of packed sequences; tokens of no sequence have no value."""
    ends_q = t["cu_seqlens"].tolist()
    ends_k = t.get("cu_seqlens_k", t["cu_seqlens"]).tolist()
    output = q * math.nan
    pieces = []
    for i in range(len(ends_q) - 1):
        parts = (q[ends_q[i] : ends_q[i + 1]], k[ends_k[i] : ends_k[i + 1]], v[ends_k[i] : ends_k[i + 1]])
        one = [part.transpose(0, 1)[None] for part in parts]
        pieces.append(_attention_of(*one, scale, is_causal)[0].transpose(0, 1))
    pieces.append(output[ends_q[-1] :])
    return torch.cat(pieces)


def _table() -> Iterator[tuple[str, str, tuple[str, ...], Values]]:
    """Pattern of the kernel's name, family, roles ("?": may be missing), values."""
    activations: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
        "silu": (r"silu|swish", _silu),
        "gelu": (r"gelu", F.gelu),
        "gelu (tanh)": (r"gelu", _gelu_tanh),
        "relu": (r"relu", torch.relu),
        "sigmoid": (r"sigmoid", torch.sigmoid),
        "tanh": (r"tanh", torch.tanh),
        "exp": (r"exp", torch.exp),
    }
    for family, (pattern, function) in activations.items():
        forward = _pointwise(function)
        yield pattern, family, ("x",), forward
        yield pattern, f"{family} backward", ("grad", "x"), _gradients(forward, "x")
    gated: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
        "swiglu": (r"swiglu|silu_and_mul|silu_mul", _silu),
        "geglu": (r"geglu|gelu_and_mul|gelu_mul", F.gelu),
        "geglu (tanh)": (r"geglu|gelu_and_mul|gelu_mul", _gelu_tanh),
    }
    for family, (pattern, function) in gated.items():
        forward = _pointwise(lambda x, y, function=function: function(x) * y)
        yield pattern, family, ("x", "y"), forward
        yield pattern, f"{family} backward", ("grad", "x", "y"), _gradients(forward, "x", "y")
    for pattern, family, roles, forward in (
        (r"rms_?norm", "rms_norm", ("x", "weight?"), _rms_norm),
        (r"layer_?norm", "layer_norm", ("x", "weight?", "bias?"), _layer_norm),
        (r"log_?softmax", "log_softmax", ("x",), _log_softmax),
        (r"softmax", "softmax", ("x",), _softmax),
    ):
        yield pattern, family, roles, forward
        yield pattern, f"{family} backward", ("grad", *roles), _gradients(forward, "x", "weight", "bias")
    yield r"softmax", "softmax backward", ("grad", "probabilities"), _softmax_gradient
    yield r"cross_?entropy|nll", "cross entropy", ("x", "labels"), _cross_entropy
    yield r"cross_?entropy|nll", "cross entropy backward", ("x", "labels"), _cross_entropy_gradient
    yield r"group", "grouped gemm", ("x", "weight"), _grouped_products
    yield r"group", "grouped gemm backward", ("grad", "x"), _grouped_gradients
    for roles in (("x", "y", "bias?"), ("x", "weight", "bias?")):
        yield r"gemm|matmul|(^|_)mm|linear", "gemm", roles, _products
    yield r"rope|rotary", "rope", ("x?", "q?", "k?", "cos", "sin"), _rope
    yield r"embedding", "embedding", ("weight", "ids"), _embedding
    yield (
        r"embedding",
        "embedding backward",
        ("grad", "weight", "ids"),
        _gradients(_embedding, "weight"),
    )
    roles = ("q", "k", "v", "cu_seqlens?", "cu_seqlens_k?")
    for layout in ("bshd", "bhsd"):
        forward = _attention(layout)
        yield r"attn|attention|fwd|bwd|fmha", "attention", roles, forward
        yield (
            r"attn|attention|bwd|fmha",
            "attention backward",
            ("grad", *roles),
            _gradients(forward, "q", "k", "v"),
        )


_TABLE = tuple(_table())
