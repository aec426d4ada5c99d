"""Writes without an operator, like a bit error or a kernel that PyTorch's dispatcher does not see."""

import ctypes

import torch


def write_behind(tensor: torch.Tensor, index: int, value: float) -> None:
    """Writes ``value`` at ``index`` of the memory of a float32 tensor."""
    address = tensor.data_ptr() + 4 * index
    if tensor.device.type == "cpu":
        ctypes.c_float.from_address(address).value = value
        return
    number = ctypes.c_float(value)
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyHtoD_v2  # ordered with the default stream
    status = copy(ctypes.c_uint64(address), ctypes.byref(number), ctypes.c_size_t(4))
    assert status == 0, f"CUDA's error {status}"
