"""References for kernels of well-known families: definitions in plain PyTorch, for float64.

A name that matches is not enough for a verdict. ``references_of`` offers a family's references only if every
tensor of the call has a role in it, and the engine uses a reference only if it reproduces the kernel's finite
elements (nanlocator/replay/kernel_replay.hpp). A tensor without a role (a mask, a scale, an offset) may
change the mathematics: then there is no reference.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from nanlocator.calls import kernel_signatures

Tensors = dict[str, torch.Tensor]
Scalars = dict[str, Any]
Values = Callable[[Tensors, Scalars], list[torch.Tensor]]


# The arguments' names of each role, in lower case and without "_ptr"; pybind11's unnamed arguments get roles
# by position. A name with several roles (Liger's "Y_ptr" holds labels) takes the first that the family
# requires.
_ROLES = {
    "x": "x input inp self hidden_states in a gate logits mat1 src fwd_input input_or_output",
    "y": "b up other mat2 c_in",
    "weight": "w weight gamma table embeddings",
    "bias": "bias beta b",
    "grad": "gradient grad dy dz dout do grad_output grad_out dc gradient_of_y",
    "q": "q query",
    "k": "k key",
    "v": "v value",
    "cos": "cos",
    "sin": "sin",
    "labels": "labels target targets y_true y",
    "ids": "ids indices input_ids index",
    "probabilities": "y out output probs p",  # a softmax's result
    "cu_seqlens": "cu_seqlens cu_seqlens_q cu_seq_lens",
    "cu_seqlens_k": "cu_seqlens_k",
    "counts": "counts m_splits batch_sizes tokens_per_expert splits",  # rows per expert
    "written": "c d",  # a product's result, which may be added to the previous content
}
_ALIASES = {role: aliases.split() for role, aliases in _ROLES.items()}
# Arguments that a kernel only writes, or that forward saves for backward: a reference computes its own.
_NOT_READ = re.compile(
    r"^(out|output|y|o|z|result|of_\w+|d[xwbqkv]|dgate|dup|da|db|grad_(input|weight|bias|q|k|v|x)|loss|lse|softmax_lse|"
    r"rstd|mean|mu|rsigma|invvar|ln_out|rng_state|workspace|delta|dsum)$"
)
_UNNAMED = re.compile(r"argument\[\d+\]$|arg\d+$")


def references_of(
    kernel: str, names: list[str], scalars: Scalars
) -> list[tuple[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]]]:
    """Candidate references for ``kernel``: (family, function of the call's tensors). ``names``: of its
    tensors; ``scalars``: its numbers and lists of numbers."""
    if kernel_signatures.is_known(kernel) and any(map(_UNNAMED.match, names)):
        return []  # a release whose signature is unknown
    plain = kernel.lower()  # includes the module: Apex calls its norms "forward" and "backward"
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
    """Each role's tensor; None if a role has no tensor, or a tensor no role."""
    optional = [role.removesuffix("?") for role in required]
    found: dict[str, int] = {}
    left: list[int] = []
    for i, name in enumerate(names):
        plain = _plain(name)
        may_be = [role for role in optional if plain in _ALIASES[role] and role not in found]
        if may_be:
            found[may_be[0]] = i
        elif _NOT_READ.match(plain):
            continue
        else:
            left.append(i)
    for role in required:  # unnamed arguments, in order
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
    """The gradients of ``forward``'s first result, given ``grad``, by the roles ``of``, through autograd."""

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


def _swiglu(t: Tensors, s: Scalars) -> list[torch.Tensor]:
    gate = t["x"] * _scalar(s, "gate_multiplier", default=1.0)  # Liger
    return [_silu(gate) * t["y"]]


def _halves(function: Callable[[torch.Tensor], torch.Tensor]) -> Values:
    """For gate and up side by side in one tensor, as in TransformerEngine."""

    def values(t: Tensors, _: Scalars) -> list[torch.Tensor]:
        gate, up = t["x"].chunk(2, dim=-1)
        return [function(gate) * up]

    return values


def _normalized_shape(t: Tensors, s: Scalars) -> tuple[int, ...]:
    given = s.get("normalized_shape")
    return tuple(int(size) for size in given) if isinstance(given, list | tuple) else t["x"].shape[-1:]


def _norm_weight(t: Tensors, s: Scalars) -> torch.Tensor | None:
    """The weight plus its offset: TransformerEngine's ``zero_centered_gamma``, Gemma's ``offset``."""
    if _scalar(s, "memory_efficient", default=False):
        raise NotImplementedError  # Apex then passes the output instead of the input
    offset = _scalar(s, "offset", default=0.0) + bool(_scalar(s, "zero_centered_gamma", default=False))
    return t["weight"] + offset if "weight" in t else None


def _rms_norm(t: Tensors, s: Scalars) -> list[torch.Tensor]:
    eps = _scalar(s, "eps", "epsilon", default=1e-6)
    weight, shape = _norm_weight(t, s), _normalized_shape(t, s)
    squares = t["x"].square().mean(tuple(range(-len(shape), 0)), keepdim=True)
    normed = t["x"] * torch.rsqrt(squares + eps)
    return [normed if weight is None else normed * weight]


def _layer_norm(t: Tensors, s: Scalars) -> list[torch.Tensor]:
    eps = _scalar(s, "eps", "epsilon", default=1e-5)
    return [F.layer_norm(t["x"], _normalized_shape(t, s), _norm_weight(t, s), t.get("bias"), eps)]


def _l2_norm(t: Tensors, s: Scalars) -> list[torch.Tensor]:
    eps = _scalar(s, "eps", "epsilon", default=1e-6)
    return [t["x"] * torch.rsqrt(t["x"].square().sum(-1, keepdim=True) + eps)]


def _softmax(t: Tensors, _: Scalars) -> list[torch.Tensor]:
    return [torch.softmax(t["x"], -1)]


def _log_softmax(t: Tensors, _: Scalars) -> list[torch.Tensor]:
    return [torch.log_softmax(t["x"], -1)]


def _softmax_gradient(t: Tensors, _: Scalars) -> list[torch.Tensor]:
    y, grad = t["probabilities"], t["grad"]
    return [y * (grad - (grad * y).sum(-1, keepdim=True))]


def _labelled(t: Tensors, s: Scalars) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Logits of shape (tokens, classes), labels of shape (tokens,), and the ignored label."""
    if any(_scalar(s, name, default=0) for name in ("label_smoothing", "lse_square_scale", "softcap")):
        raise NotImplementedError
    ignored = _scalar(s, "ignore_index", "ignored", default=-100)
    return t["x"].flatten(0, -2), t["labels"].flatten(), ignored


def _cross_entropy(t: Tensors, s: Scalars) -> list[torch.Tensor]:
    logits, labels, ignored = _labelled(t, s)
    each = F.cross_entropy(logits, labels, ignore_index=ignored, reduction="none")
    count = (labels != ignored).sum().clamp(min=1)
    return [each, each / count, each.sum() / count]


def _cross_entropy_gradient(t: Tensors, s: Scalars) -> list[torch.Tensor]:
    logits, labels, ignored = _labelled(t, s)
    slope = torch.softmax(logits, -1)
    is_valid = labels != ignored
    slope[is_valid, labels[is_valid]] -= 1
    slope[~is_valid] = 0
    return [slope, slope / is_valid.sum().clamp(min=1)]


def _products(t: Tensors, s: Scalars) -> list[torch.Tensor]:
    """The products of two matrices in all layouts and orders that fit. For cuBLAS's callers, the first is the
    right one."""
    a, b = t["x"], t.get("y", t.get("weight"))
    assert b is not None
    if _scalar(s, "gelu", default=False) or _scalar(s, "beta", default=1.0) not in (0, 1):
        return []
    bias = None if _scalar(s, "grad", default=False) else t.get("bias")  # grad: TransformerEngine writes it
    added = t.get("written") if _scalar(s, "accumulate", default=False) else None
    found = []
    for first, second in ((a, b), (b, a)):
        for left in (first, first.mT):
            for right in (second, second.mT):
                if left.shape[-1] != right.shape[-2]:
                    continue
                product = left @ right * _scalar(s, "alpha", default=1.0)
                with contextlib.suppress(RuntimeError):  # shapes that do not fit
                    product = product if bias is None else product + bias
                    found.append(product if added is None else product + added.view_as(product))
    return found


def _counts(t: Tensors, s: Scalars) -> list[int]:
    if "counts" in t:
        return [int(count) for count in t["counts"].tolist()]
    for name in _ALIASES["counts"]:
        if isinstance(s.get(name), list | tuple):
            return [int(count) for count in s[name]]
    raise KeyError("counts")


def _grouped_products(t: Tensors, s: Scalars) -> list[torch.Tensor]:
    """x (tokens, width), weights (experts, ., .): each expert's rows times its weight."""
    rows, given = t["x"].split(_counts(t, s)), t.get("weight", t.get("y"))
    assert given is not None
    if given.dim() != 3:
        return []
    found = []
    for weights in (given, given.mT):
        if weights.shape[-2] == t["x"].shape[-1]:
            found.append(torch.cat([x @ w for x, w in zip(rows, weights, strict=True)]))
    return found


def _grouped_gradients(t: Tensors, s: Scalars) -> list[torch.Tensor]:
    """Gradients of the weights. Both operands are (tokens, .)."""
    left, right = t.get("grad", t.get("y")), t["x"]
    assert left is not None
    if left.dim() != 2 or right.dim() != 2:
        return []
    pairs = list(zip(left.split(_counts(t, s)), right.split(_counts(t, s)), strict=True))
    return [torch.stack([g.mT @ x for g, x in pairs]), torch.stack([x.mT @ g for g, x in pairs])]


def _rope(t: Tensors, _: Scalars) -> list[torch.Tensor]:
    """Rotates halves and pairs, in both directions, because backward rotates back. ``cos`` and ``sin`` cover
    a whole head or half of it."""
    found = []
    for x in (t[role] for role in ("x", "q", "k", "grad") if role in t):
        half = x.shape[-1] // 2
        left, right = t["cos"][..., :half], t["sin"][..., :half]
        for heads in (None, 1, 2):  # the position of a missing dimension of heads
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
    """Attention of tensors (batch, heads, length, width). If k and v have fewer heads, they are shared."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * scale
    if not is_causal:
        return torch.softmax(scores, -1) @ v
    # Aligned at the last row and column, as in flash-attention since 2.1; fully masked rows are 0.
    rows, columns = scores.shape[-2:]
    is_seen = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
    sees_any = is_seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~(is_seen | ~sees_any), -math.inf)
    return (torch.softmax(scores, -1) @ v).masked_fill(~sees_any, 0)


def _attention(layout: str) -> Values:
    def values(t: Tensors, s: Scalars) -> list[torch.Tensor]:
        rule = _attention_rule(t, s, layout)
        if rule is None:
            return []
        if "cu_seqlens" in t:
            return _packed(t, s, lambda q, k, v, _: [_attention_of(q, k, v, *rule)], ("q",))
        q, k, v = (t[role].transpose(1, 2) if layout == "bshd" else t[role] for role in ("q", "k", "v"))
        output = _attention_of(q, k, v, *rule)
        return [output.transpose(1, 2) if layout == "bshd" else output]

    return values


def _attention_gradients(layout: str) -> Values:
    def values(t: Tensors, s: Scalars) -> list[torch.Tensor]:
        rule = _attention_rule(t, s, layout)
        if rule is None:
            return []
        if "cu_seqlens" not in t:
            return _gradients(_attention(layout), "q", "k", "v")(t, s)

        def of_one(*tensors: torch.Tensor) -> list[torch.Tensor]:
            named = dict(zip(("q", "k", "v", "grad"), tensors, strict=True))
            forward = lambda t, _: [_attention_of(t["q"], t["k"], t["v"], *rule)]  # noqa: E731
            return _gradients(forward, "q", "k", "v")(named, s)

        return _packed(t, s, of_one, ("q", "k", "v"))

    return values


def _attention_rule(t: Tensors, s: Scalars, layout: str) -> tuple[float, bool] | None:
    """The scale, and whether it is causal; None if the kernel computes more. Packed sequences are "bshd"."""
    scale = _scalar(s, "scale", "softmax_scale", "sm_scale", default=t["q"].shape[-1] ** -0.5)
    is_causal = bool(_scalar(s, "causal", "is_causal", default=False))
    left = _scalar(s, "window_size_left", default=-1)
    right = 0 if is_causal else _scalar(s, "window_size_right", default=-1)
    others = ("p_dropout", "dropout_p", "dropout", "softcap", "sink_token_length")
    if left >= 0 or right > 0 or any(_scalar(s, name, default=0) for name in others):
        return None
    return None if "cu_seqlens" in t and layout != "bshd" else (scale, right == 0)


def _packed(
    t: Tensors, s: Scalars, of_one: Callable[..., list[torch.Tensor]], like: tuple[str, ...]
) -> list[torch.Tensor]:
    """The values of each sequence in tensors (tokens, heads, width), in the shapes of ``like``. Tokens
    outside every sequence have no value. If the lengths do not fit the tensors, which is the caller's fault,
    no token has one."""
    ends = {"q": t["cu_seqlens"].tolist()}
    ends["grad"] = ends["q"]
    ends["k"] = ends["v"] = t.get("cu_seqlens_k", t["cu_seqlens"]).tolist()
    for role, name in (("q", "max_seqlen_q"), ("k", "max_seqlen_k")):
        lengths = [end - begin for begin, end in itertools.pairwise(ends[role])]
        longest = max(lengths, default=0)
        fits = ends[role][:1] == [0] and min(lengths, default=0) >= 0 and ends[role][-1] <= len(t[role])
        if not fits or longest > _scalar(s, name, default=longest):
            return []
    found = [torch.full_like(t[role], math.nan) for role in like]
    for i in range(len(ends["q"]) - 1):
        at = {role: slice(ends[role][i], ends[role][i + 1]) for role in ("q", "k", "v", "grad")}
        one = [t[role][at[role]].transpose(0, 1)[None] for role in at if role in t]
        given = one if len(one) == 4 else [*one, None]
        for whole, role, part in zip(found, like, of_one(*given), strict=True):
            whole[at[role]] = part[0].transpose(0, 1)
    return found


def _table() -> Iterator[tuple[str, str, tuple[str, ...], Values]]:
    """Pattern of the kernel's name, family, roles ("?": optional), values."""
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
    roles: tuple[str, ...]
    of_silu, of_gelu = r"swiglu|silu_and_mul|silu_mul", r"geglu|gelu_and_mul|gelu_mul"
    for pattern, family, two, one in (
        (of_silu, "swiglu", _swiglu, _halves(_silu)),
        (of_gelu, "geglu", _pointwise(lambda x, y: F.gelu(x) * y), _halves(F.gelu)),
        (of_gelu, "geglu (tanh)", _pointwise(lambda x, y: _gelu_tanh(x) * y), _halves(_gelu_tanh)),
    ):
        for roles, forward in ((("x", "y", "written?"), two), (("x", "written?"), one)):
            yield pattern, family, roles, forward
            yield pattern, f"{family} backward", ("grad", *roles), _gradients(forward, "x", "y")
    for pattern, family, roles, forward in (
        (r"rms_?(norm|forward|backward)", "rms_norm", ("x", "weight?"), _rms_norm),
        (r"layer_?norm", "layer_norm", ("x", "weight?", "bias?"), _layer_norm),
        (r"l2_?norm", "l2_norm", ("x",), _l2_norm),
        (r"log_?softmax", "log_softmax", ("x",), _log_softmax),
        (r"softmax", "softmax", ("x",), _softmax),
    ):
        yield pattern, family, roles, forward
        yield pattern, f"{family} backward", ("grad", *roles), _gradients(forward, "x", "weight", "bias")
    yield r"softmax", "softmax backward", ("grad", "probabilities"), _softmax_gradient
    yield r"cross_?entropy|nll", "cross entropy", ("x", "labels"), _cross_entropy
    yield r"cross_?entropy|nll", "cross entropy backward", ("x", "labels"), _cross_entropy_gradient
    for matrices in (("x", "weight"), ("x", "y")):
        yield r"group|gmm", "grouped gemm", (*matrices, "counts?", "written?"), _grouped_products
    for matrices in (("grad", "x"), ("x", "y")):
        yield r"group|gmm", "grouped gemm backward", (*matrices, "counts?", "written?"), _grouped_gradients
    for matrices in (("x", "y"), ("x", "weight")):
        yield r"gemm|matmul|(^|_|:)mm|linear", "gemm", (*matrices, "bias?", "written?"), _products
    yield r"rope|rotary", "rope", ("x?", "q?", "k?", "cos", "sin"), _rope
    yield r"rope|rotary", "rope backward", ("grad", "cos", "sin"), _rope
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
            _attention_gradients(layout),
        )


_TABLE = tuple(_table())
