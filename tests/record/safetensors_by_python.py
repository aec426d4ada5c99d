"""The other implementation of safetensors, for safetensors_test.cpp.

python safetensors_by_python.py read FILE
    prints {"metadata": {...}, "tensors": {name: [dtype, shape, bytes in hexadecimal]}}
python safetensors_by_python.py write FILE DESCRIPTION
    writes the tensors that DESCRIPTION, a file of that form, names
"""

import json
import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def bytes_of(tensor: torch.Tensor) -> str:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()).hex()


def read(path: str) -> None:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        described = {
            name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), bytes_of(tensor)]
            for name, tensor in tensors.items()
        }
        print(json.dumps({"metadata": file.metadata(), "tensors": described}))


def write(path: str, description: dict) -> None:
    def tensor(dtype: str, shape: list[int], data: str) -> torch.Tensor:
        raw = torch.tensor(list(bytes.fromhex(data)), dtype=torch.uint8)
        return raw.view(getattr(torch, dtype)).reshape(shape)

    tensors = {name: tensor(*parts) for name, parts in description["tensors"].items()}
    save_file(tensors, path, metadata=description["metadata"])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["read", path]:
            read(path)
        case ["write", path, description]:
            with open(description) as file:
                write(path, json.load(file))
        case _:
            sys.exit(__doc__)
