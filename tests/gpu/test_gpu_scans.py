"""Scans on the device: their stats equal the CPU's, and are those from the moment of the call."""

import contextlib

import pytest
import torch

from nanlocator import _C

EXACT = ("numel", "nan", "pos_inf", "neg_inf", "zeros", "first_bad", "fingerprint")
EXACT += ("finite_min", "finite_max", "absmin", "absmax")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def scan_each(tensors):
    scans = _C.TensorScans()
    numbers = [scans.enqueue(tensor) for tensor in tensors]
    read = scans.read()
    return [read[number] if isinstance(number, int) else number for number in numbers]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_stats_of_the_device_are_those_of_the_cpu(dtype, device, record_property):
    sizes = [1, 7, 8, 33, 4095, 4097, 65537] + ([2**20 + 3, 2**26 + 5] if device == "cuda" else [])
    compared = 0
    for size in sizes:
        values = torch.randn(size + 9).mul(100)
        for bad in (float("nan"), float("inf"), -float("inf")):
            values[torch.randint(0, size + 9, (1 + size // 1000,))] = bad
        host = values.to(dtype)
        whole = host.to(device)

        # Every alignment, every second element, and a transposed matrix.
        def views(t, size=size):
            shifted = [t[begin : begin + size] for begin in range(9)]
            return [*shifted, t[::2], t[: size // 4 * 4].view(4, -1).t(), t[:0]]

        expected = [_C.scan([view])[0] for view in views(host)]
        found = scan_each(views(whole))
        for number, (a, b) in enumerate(zip(expected, found, strict=True)):
            if a.numel == 0 and b is None:
                continue
            for name in EXACT:
                same = getattr(a, name) == getattr(b, name)
                assert same or a.numel == 0, (size, number, name, getattr(a, name), getattr(b, name))
            error = abs(a.sum_of_squares - b.sum_of_squares)
            most = 1e-12 if dtype in (torch.float32, torch.float64) else 1e-6  # sums of eight are in fp32
            assert error <= most * abs(a.sum_of_squares), (size, number, "sum_of_squares")
            compared += 1
        as_floats = host.float()
        assert expected[0].nan == int(as_floats[:size].isnan().sum()), size
    record_property("compared", compared)


def test_a_scan_sees_the_tensor_as_it_was_when_it_was_asked_for(device):
    rounds = 200 if device == "cuda" else 20
    tensor = torch.zeros(2**22 if device == "cuda" else 2**12, device=device)
    scans, numbers = _C.TensorScans(), []
    others = [torch.cuda.Stream() for _ in range(4)] if device == "cuda" else []
    for number in range(rounds):
        with contextlib.ExitStack() as stack:
            if others:
                stream = others[number % len(others)]
                stream.wait_stream(torch.cuda.current_stream())
                stack.enter_context(torch.cuda.stream(stream))
                torch.cuda._sleep(100_000)  # a scan that is enqueued too early would see the previous round
            tensor.fill_(float("nan") if number % 2 else float(number))
            numbers.append(scans.enqueue(tensor))
            tensor.zero_()
        if others:
            torch.cuda.current_stream().wait_stream(stream)
    read = scans.read()
    stats = [read[number] if isinstance(number, int) else number for number in numbers]
    for number, each in enumerate(stats):
        if number % 2:
            assert each.nan == tensor.numel(), (number, each.nan)
        else:
            assert each.is_finite and each.finite_max == number, (number, each.finite_max)
