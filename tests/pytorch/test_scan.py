"""The scan from Python: every dtype and every place, compared with torch's own predicates."""

import pytest
import torch

from nanlocator import _C

pytestmark = pytest.mark.host  # `scan` takes tensors of host memory

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
]
BAD = {"nan": float("nan"), "+inf": float("inf"), "-inf": float("-inf")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_bad_element_is_counted_and_placed(dtype, kind, place):
    if dtype == torch.float8_e4m3fn and kind != "nan":
        pytest.skip("float8_e4m3fn has no infinity")
    numel = 5003
    index = {"first": 0, "middle": numel // 2, "last": numel - 1}[place]
    values = torch.linspace(-2, 2, numel)
    if dtype.is_complex:
        values = torch.complex(values, values.flip(0))
        values[index] = complex(0.0, BAD[kind])
    else:
        values[index] = BAD[kind]
    stats = _C.scan([values.to(dtype)])[0]
    expected_index = 2 * index + 1 if dtype.is_complex else index  # real and imaginary parts count separately
    assert (stats.nan, stats.pos_inf, stats.neg_inf) == tuple(int(kind == k) for k in BAD)
    assert stats.first_bad == expected_index


@pytest.mark.parametrize("dtype", DTYPES[:6], ids=str)
def test_finite_statistics_are_torchs(dtype):
    tensor = torch.randn(70_001).clamp(-8, 8).to(dtype)
    wide = tensor.double()
    stats = _C.scan([tensor], threads=2)[0]
    assert stats.finite_min == wide.min().item() and stats.finite_max == wide.max().item()
    assert stats.absmin == wide.abs().min().item() and stats.absmax == wide.abs().max().item()
    assert stats.zeros == int((wide == 0).sum())
    # Squares of 16-bit and 8-bit values are exact in fp32, and added there eight at a time before fp64.
    tolerance = 1e-12 if dtype in (torch.float64, torch.float32) else 1e-6
    assert stats.sum_of_squares == pytest.approx((wide * wide).sum().item(), rel=tolerance)


def test_a_strided_view_has_the_stats_of_its_copy():
    base = torch.randn(37, 41, 5)
    base[3, 7, 2] = float("nan")
    for view in (base.permute(2, 0, 1), base[::2, 1::3], base.transpose(0, 1)[5:9], base[:, :, 2]):
        assert _C.scan([view])[0] == _C.scan([view.contiguous()])[0]


def test_unsupported_dtypes_and_layouts_say_so():
    for tensor, word in (
        (torch.zeros(3, dtype=torch.int64), "int64"),
        (torch.eye(3).to_sparse_csr(), "(?i)layout|csr"),
        (torch.zeros(3, dtype=torch.bool), "(?i)bool"),
    ):
        with pytest.raises(_C.UnsupportedError, match=word):
            _C.scan([tensor])
