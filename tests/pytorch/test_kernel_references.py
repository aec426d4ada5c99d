"""Every kernel reference, compared with PyTorch's operators and autograd; and calls without a reference."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F

from nanlocator.calls.kernel_references import _TABLE, references_of
from nanlocator.calls.kernel_signatures import argument_names, rows_of_the_table
from nanlocator.kernel_calls import register_signature

ROWS, WIDTH, HEADS = 6, 8, 2


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def autograd(function, gradient, *tensors):
    """Gradients of the floating-point tensors among ``tensors``."""
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    return torch.autograd.grad(function(*leaves), [t for t in leaves if t.requires_grad], gradient)


CASES = {}  # family and variant -> () -> (kernel, its tensors by name, numbers, expected results)


def case(family, variant=""):
    return lambda make: CASES.setdefault((family, variant), make)


def both_ways(family, kernel, function, tensors, scalars=None, variant="", gradient="dy", outputs=("out",)):
    """Cases of the forward and of the backward of ``function``; ``tensors()``: its arguments, by name."""
    scalars = scalars or {}

    @case(family, variant)
    def forward():
        inputs = tensors()
        return kernel, inputs | dict.fromkeys(outputs), scalars, [function(*inputs.values())]

    @case(f"{family} backward", variant)
    def backward():
        inputs = tensors()
        output = function(*inputs.values())
        given = randn(*output.shape)
        expected = autograd(function, given, *inputs.values())
        return f"{kernel}_bwd", {gradient: given} | inputs | {"dx": None}, scalars, list(expected)


for name, function in {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
}.items():
    both_ways(name, f"fused::{name.split()[0]}", function, lambda: {"x_ptr": randn(ROWS, WIDTH)})
for family, entry, activation in (
    ("swiglu", "_swiglu_kernel", F.silu),
    ("geglu", "geglu", F.gelu),
    ("geglu (tanh)", "_geglu_tanh_kernel", lambda x: F.gelu(x, approximate="tanh")),
):
    both_ways(
        family,
        f"triton::{entry}",
        lambda a, b, activation=activation: activation(a) * b,
        lambda: {"a": randn(ROWS, WIDTH), "b": randn(ROWS, WIDTH)},
        gradient="dc",
        outputs=("c",),
    )
    both_ways(
        family,
        f"transformer_engine_torch::{entry}",
        lambda x, activation=activation: activation(x[:, :WIDTH]) * x[:, WIDTH:],
        lambda: {"input": randn(ROWS, 2 * WIDTH)},
        variant="halves",
        gradient="grad",
    )
both_ways(
    "swiglu",
    "triton::_swiglu",
    lambda a, b: F.silu(a * 0.5) * b,
    lambda: {"a_ptr": randn(ROWS, WIDTH), "b_ptr": randn(ROWS, WIDTH)},
    {"gate_multiplier": 0.5},
    variant="gate multiplier",
    gradient="dc_ptr",
)
for variant, kernel, eps_name, eps, shape in (
    ("", "triton::_layer_norm_kernel", "eps", 1e-3, [WIDTH]),
    ("two dimensions", "fused_layer_norm_cuda::forward", "epsilon", 1e-5, [ROWS // 2, WIDTH]),
):
    both_ways(
        "layer_norm",
        kernel,
        lambda x, w, b, shape=shape, eps=eps: F.layer_norm(x, shape, w, b, eps),
        lambda shape=shape: {
            "X_ptr": randn(2, ROWS // 2, WIDTH),
            "W_ptr": randn(*shape),
            "B_ptr": randn(*shape),
        },
        {"normalized_shape": shape, eps_name: eps},
        variant=variant,
        outputs=("Y_ptr", "Mean_ptr", "RSTD_ptr"),
    )
for variant, kernel, scalars, added in (
    ("", "fused_layer_norm_cuda::rms_forward_affine", {"epsilon": 1e-3}, 0),
    ("zero centred", "transformer_engine_torch::rmsnorm_fwd", {"eps": 1e-3, "zero_centered_gamma": True}, 1),
    ("Gemma", "triton::_rms_norm_kernel", {"eps": 1e-3, "offset": 1.0}, 1),
):
    both_ways(
        "rms_norm",
        kernel,
        lambda x, w, added=added: F.rms_norm(x, [WIDTH], w + added, 1e-3),
        lambda: {"input": randn(ROWS, WIDTH), "weight": randn(WIDTH)},
        scalars,
        variant=variant,
        outputs=("rsigma",),
    )
both_ways(
    "l2_norm",
    "triton::l2norm_kernel",
    lambda x: x / (x.square().sum(1, keepdim=True) + 1e-3).sqrt(),
    lambda: {"x": randn(ROWS, WIDTH)},
    {"eps": 1e-3},
    outputs=("y", "rstd"),
)
both_ways(
    "embedding",
    "my::embedding",
    lambda weight, ids: F.embedding(ids, weight),
    lambda: {"weight": randn(5, WIDTH), "ids": torch.arange(ROWS) % 5},
)


@case("softmax backward", "of its output")
def _():
    x, gradient = randn(ROWS, WIDTH), randn(ROWS, WIDTH)
    softmax = functools.partial(F.softmax, dim=-1)
    return "my::softmax", {"dy": gradient, "y": softmax(x)}, {}, list(autograd(softmax, gradient, x))


def logits_and_labels():
    labels = torch.arange(ROWS) % WIDTH
    labels[2] = 7
    return randn(ROWS, WIDTH), labels


for reduction in ("none", "mean"):
    loss = functools.partial(F.cross_entropy, ignore_index=7, reduction=reduction)

    @case("cross entropy", reduction)
    def _(loss=loss):
        logits, labels = logits_and_labels()
        return (
            "my::cross_entropy",
            {"logits": logits, "labels": labels},
            {"ignore_index": 7},
            [loss(logits, labels)],
        )

    @case("cross entropy backward", reduction)
    def _(loss=loss):
        logits, labels = logits_and_labels()
        gradient = torch.ones_like(loss(logits, labels))
        expected = autograd(loss, gradient, logits, labels)
        return "liger::cross_entropy", {"X_ptr": logits, "Y_ptr": labels}, {"ignore_index": 7}, list(expected)


for trans_a in (False, True):
    for trans_b in (False, True):

        @case("gemm", f"{trans_a} {trans_b}")
        def _(trans_a=trans_a, trans_b=trans_b):
            """cuBLAS's matrices are column-major: in row-major order D is op(B) op(A)."""
            a = randn(5, WIDTH).T.contiguous().T if trans_a else randn(WIDTH, 5)
            b = randn(WIDTH, ROWS) if trans_b else randn(ROWS, WIDTH)
            d, bias = randn(ROWS, 5), randn(5)
            expected = (b.T if trans_b else b) @ (a.T if trans_a else a) + bias + d
            tensors = {"A": a, "B": b, "D": d, "bias": bias, "workspace": torch.empty(0)}
            scalars = {"transA": trans_a, "transB": trans_b, "gelu": False, "grad": False, "accumulate": True}
            return "transformer_engine_torch::generic_gemm", tensors, scalars, [expected]


@case("gemm", "linear")
def _():
    x, weight, bias = randn(2, ROWS, WIDTH), randn(5, WIDTH), randn(5)
    return "my::linear", {"input": x, "weight": weight, "bias": bias}, {}, [F.linear(x, weight, bias)]


COUNTS = [2, 0, 4]


def by_expert(x, weight):
    return torch.cat([part @ w for part, w in zip(x.split(COUNTS), weight, strict=True)])


for kernel in ("grouped_gemm_backend::gmm", "my::grouped_gemm"):
    is_library = kernel.startswith("grouped_gemm_backend")
    counts = {"batch_sizes": torch.tensor(COUNTS)} if is_library else {}
    scalars = {"trans_b": True} if is_library else {"m_splits": COUNTS}
    names = ("a", "b", "c") if is_library else ("x", "w", "out")

    @case("grouped gemm", kernel)
    def _(kernel=kernel, counts=counts, scalars=scalars, names=names):
        x, weight = randn(ROWS, WIDTH), randn(3, 5, WIDTH)
        tensors = dict(zip(names, (x, weight, None), strict=True)) | counts
        return kernel, tensors, scalars, [by_expert(x, weight.mT)]

    @case("grouped gemm backward", kernel)
    def _(kernel=kernel, counts=counts, scalars=scalars, is_library=is_library):
        x, weight, gradient = randn(ROWS, WIDTH), randn(3, WIDTH, 5), randn(ROWS, 5)
        _, of_weight = autograd(by_expert, gradient, x, weight)
        names = ("a", "b", "c") if is_library else ("x", "grad", "of_w")
        return kernel, dict(zip(names, (x, gradient, None), strict=True)) | counts, scalars, [of_weight]


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rotated_pairs(x, cos, sin):
    return torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)
    ).flatten(-2)


for variant, rotate in (("halves", rotated), ("pairs", rotated_pairs)):
    for layout in ("bshd", "bhsd"):

        def tensors(rotate=rotate, layout=layout):
            angles = randn(1, ROWS, WIDTH // 2)
            angles = torch.cat([angles, angles], -1) if rotate is rotated else angles
            x = randn(2, ROWS, HEADS, WIDTH) if layout == "bshd" else randn(2, HEADS, ROWS, WIDTH)
            return x, angles.cos(), angles.sin()

        def apply(x, cos, sin, rotate=rotate, layout=layout):
            heads = 2 if layout == "bshd" else 1
            return rotate(x, cos.unsqueeze(heads), sin.unsqueeze(heads))

        @case("rope", f"{variant} {layout}")
        def _(tensors=tensors, apply=apply):
            x, cos, sin = tensors()
            return "triton::_rope", {"x": x, "cos": cos, "sin": sin}, {}, [apply(x, cos, sin)]

        @case("rope backward", f"{variant} {layout}")
        def _(tensors=tensors, apply=apply):
            x, cos, sin = tensors()
            gradient = randn(*x.shape)
            (of_x,) = autograd(lambda x: apply(x, cos, sin), gradient, x)
            return "triton::_rope_backward", {"dy": gradient, "cos": cos, "sin": sin}, {}, [of_x]


def attention(q, k, v, is_causal, scale):
    """Attention of (heads, length, width), with as many heads of k and v; a fully masked row gives 0."""
    rows, columns = q.shape[-2], k.shape[-2]
    mask = torch.ones(rows, columns, dtype=torch.bool)
    mask = mask.tril(columns - rows) if is_causal else mask
    return F.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=scale)[0].nan_to_num()


def packed(q, k, v, of_q, of_k, is_causal, scale):
    """Attention of (tokens, heads, width); if k and v have fewer heads, they are shared."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    parts = [t.transpose(0, 1).split(lengths, 1) for t, lengths in ((q, of_q), (k, of_k), (v, of_k))]
    return torch.cat([attention(*each, is_causal, scale) for each in zip(*parts, strict=True)], 1).transpose(
        0, 1
    )


LENGTHS, LENGTHS_OF_K = [3, 0, 5], [4, 2, 5]


def flash(entry, count, tensors, scalars):
    """A call of the C++ entry with ``count`` arguments: its name, its tensors, its numbers."""
    names = argument_names(f"flash_attn_2_cuda::{entry}", count)
    assert set(tensors) <= set(names) and set(scalars) <= set(names)
    return f"flash_attn_2_cuda::{entry}", {n: tensors[n] for n in names if n in tensors}, scalars


def ends_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


ENDS = {"cu_seqlens_q": ends_of(LENGTHS), "cu_seqlens_k": ends_of(LENGTHS_OF_K)}


def of_backward(dout, q, k, v):
    written = dict.fromkeys(("out", "softmax_lse", "dq", "dk", "dv"))
    return {"dout": dout, "q": q, "k": k, "v": v, **written}


for is_causal in (False, True):
    numbers = {
        "p_dropout": 0.0,
        "softmax_scale": 0.3,
        "is_causal": is_causal,
        "window_size_left": -1,
        "window_size_right": -1,
    }

    def tensors_of_packed():
        return randn(sum(LENGTHS), 2 * HEADS, WIDTH), *(randn(sum(LENGTHS_OF_K), HEADS, WIDTH) for _ in "kv")

    lengths = {"max_seqlen_q": 5, "max_seqlen_k": 5, "zero_tensors": False}
    of_packed = functools.partial(packed, of_q=LENGTHS, of_k=LENGTHS_OF_K, is_causal=is_causal, scale=0.3)

    @case("attention", f"packed {is_causal}")
    def _(numbers=numbers | lengths, of_packed=of_packed):
        q, k, v = tensors_of_packed()
        tensors = {"q": q, "k": k, "v": v, "out": None, **ENDS}
        return *flash("varlen_fwd", 21, tensors, numbers), [of_packed(q, k, v)]

    @case("attention backward", f"packed {is_causal}")
    def _(numbers=numbers | lengths, of_packed=of_packed):
        q, k, v = tensors_of_packed()
        dout = randn(*q.shape)
        tensors = of_backward(dout, q, k, v)
        expected = autograd(of_packed, dout, q, k, v)
        return *flash("varlen_bwd", 24, tensors | ENDS | {"rng_state": None}, numbers), list(expected)

    def of_batches(q, k, v, is_causal=is_causal):
        """Attention of (batch, length, heads, width)."""
        each = zip(q, k, v, strict=True)
        return torch.stack([packed(*one, [ROWS], [ROWS + 1], is_causal, 0.3) for one in each])

    def tensors_of_batches():
        return randn(2, ROWS, HEADS, WIDTH), *(randn(2, ROWS + 1, HEADS, WIDTH) for _ in "kv")

    @case("attention", f"batches {is_causal}")
    def _(numbers=numbers, of_batches=of_batches):
        q, k, v = tensors_of_batches()
        return *flash("fwd", 12, {"q": q, "k": k, "v": v, "out": None}, numbers), [of_batches(q, k, v)]

    @case("attention backward", f"batches {is_causal}")
    def _(numbers=numbers, of_batches=of_batches):
        q, k, v = tensors_of_batches()
        dout = randn(*q.shape)
        tensors = of_backward(dout, q, k, v)
        return *flash("bwd", 19, tensors, numbers), list(autograd(of_batches, dout, q, k, v))


def values(kernel, tensors, scalars, family=None):
    """Values of all offered references, or of ``family``'s, that accept these tensors."""
    given = [torch.empty(3) if each is None else each for each in tensors.values()]
    found = []
    for name, reference in references_of(kernel, list(tensors), scalars):
        if family in (None, name):
            with contextlib.suppress(RuntimeError):  # another layout: the engine skips it too
                found += reference(given)
    return found


@pytest.mark.parametrize("of", CASES, ids=" ".join)
def test_a_reference_gives_what_pytorch_gives(of):
    torch.manual_seed(0)
    kernel, tensors, scalars, expected = CASES[of]()
    found = values(kernel, tensors, scalars, of[0])
    for each in expected:
        alike = [value for value in found if value.numel() == each.numel()]
        assert any(torch.allclose(value.reshape(each.shape), each) for value in alike)


def test_every_reference_of_the_table_has_a_case():
    assert {family for _, family, _, _ in _TABLE} == {family for family, _ in CASES}


VARLEN = CASES["attention", "packed True"]
VARLEN_BACKWARD = CASES["attention backward", "packed True"]


@pytest.mark.parametrize("of", [VARLEN, VARLEN_BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "changed",
    [
        {"p_dropout": 0.1},
        {"window_size_left": 128},
        {"is_causal": False, "window_size_right": 16},
        {"softcap": 30.0},
        {"max_seqlen_q": 4},  # shorter than the longest sequence: the caller's fault
    ],
    ids=str,
)
def test_no_reference_of_attention_where_more_is_computed_than_it_knows(of, changed):
    kernel, tensors, scalars, _ = of()
    assert values(kernel, tensors, scalars) and not values(kernel, tensors, scalars | changed)


@pytest.mark.parametrize("name", ["alibi_slopes", "block_table", "seqused_k", "leftpad_k"])
def test_no_reference_where_a_tensor_has_no_role_in_it(name):
    kernel, tensors, scalars, _ = VARLEN()
    assert not references_of(kernel, [*tensors, name], scalars)


def test_no_reference_where_no_release_has_as_many_arguments():
    names = [f"arg{i}" for i in range(3)]
    assert references_of("my_extension::attention", names, {})
    assert not references_of("flash_attn_2_cuda::fwd", names, {})


def test_no_reference_where_apex_has_the_output_in_place_of_the_input():
    (family, reference), *_ = references_of(
        "fused_layer_norm_cuda::rms_backward",
        ["dout", "invvar", "input_or_output"],
        {"memory_efficient": True},
    )
    assert family == "rms_norm backward"
    with pytest.raises(NotImplementedError):
        reference([randn(ROWS, WIDTH), randn(ROWS), randn(ROWS, WIDTH)])


def test_a_window_that_ends_at_the_token_itself_is_a_causal_mask():
    torch.manual_seed(0)
    kernel, tensors, scalars, (expected,) = VARLEN()
    found = values(kernel, tensors, scalars | {"is_causal": False, "window_size_right": 0})
    assert torch.allclose(found[0], expected)


def test_tokens_of_no_sequence_have_no_value():
    """A kernel need not write the elements after the last sequence."""
    kernel, tensors, scalars, _ = VARLEN_BACKWARD()
    short = ends_of([3, 0, 2])
    found = values(kernel, tensors | {"cu_seqlens_q": short, "cu_seqlens_k": short}, scalars)
    assert [torch.isnan(each).all(2).all(1).sum().item() for each in found] == [3, 6, 6]


@pytest.mark.parametrize("kernel", dict.fromkeys(kernel for kernel, _, _ in rows_of_the_table()))
def test_the_number_of_arguments_tells_the_release(kernel):
    rows = [names.split() for name, _, names in rows_of_the_table() if name == kernel]
    assert len({len(row) for row in rows}) == len(rows)
    assert all(len(set(row)) == len(row) for row in rows)
    assert argument_names(kernel, 99) == []


def test_a_program_adds_the_signature_of_its_own_kernel():
    """Without it, this norm's second tensor could be a weight or anything else."""
    x, weight = randn(ROWS, WIDTH), randn(WIDTH)
    register_signature("my_extension::rms_norm", "out input weight epsilon")
    names = argument_names("my_extension::rms_norm", 4)
    offered = dict(references_of("my_extension::rms_norm", names[:3], {"epsilon": 1e-3}))
    (found,) = offered["rms_norm"]([torch.empty_like(x), x, weight])
    torch.testing.assert_close(found, F.rms_norm(x, [WIDTH], weight, 1e-3))
    assert references_of("my_extension::rms_norm", ["arg0", "arg1", "arg2"], {}) == []


def test_the_names_of_a_call_are_those_of_the_signature():
    """The numbers of arguments are from flash_api.cpp, v2.4.1 and v2.8.3."""
    old, new = (argument_names("flash_attn_2_cuda::varlen_bwd", count) for count in (23, 24))
    assert (old[6], old[17], old[21]) == ("dq", "is_causal", "gen")
    assert (new[6], new[17], new[20]) == ("dq", "is_causal", "softcap")
