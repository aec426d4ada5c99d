"""The call within a source line: nanlocator/engine/expressions.py, and the block's marker."""

import sys

import pytest
import torch
from torch import nn

import nanlocator
from nanlocator.engine.expressions import expression_at

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="columns are kept from Python 3.11 on")


def expressions_of(line):
    """All that are found in ``line``, by the source that they mark."""
    code = compile(line.strip(), "line", "exec")
    found = {}
    for instruction in range(0, len(code.co_code), 2):
        if (each := expression_at(code, instruction, line.strip())) is not None:
            begin, end, call, arguments = each
            found[line.strip()[begin:end]] = (call, arguments)
    return found


@pytest.mark.parametrize(
    ("line", "marked", "call", "arguments"),
    [
        ("y = (total * size) / size", "(total * size) / size", "div", ["total * size", "size"]),
        ("y = torch.log(self.a(x))", "torch.log(self.a(x))", "log", ["self.a(x)"]),
        ("y = h.float().sqrt_() + 1", ".sqrt_()", "sqrt_", ["h.float()"]),
        ("y = (a + b).sqrt()", ".sqrt()", "sqrt", ["a + b"]),
        ("y = log(x)", "log(x)", "log", ["x"]),
        ("y = a ** 0.5", "a ** 0.5", "pow", ["a", "0.5"]),
        ("y = f(*x)", "f(*x)", "", []),
    ],
)
def test_a_call_has_its_name_and_its_arguments(line, marked, call, arguments):
    assert expressions_of(line)[marked] == (call, arguments)


def test_what_is_not_on_the_line_or_not_known_is_none():
    code = compile("x = (a\n     / b)", "line", "exec")
    assert all(expression_at(code, at, "x = (a") is None or at for at in range(0, len(code.co_code), 2))
    assert expression_at(code, -1, "x = (a") is None
    assert expression_at(compile("y = a / b", "line", "exec"), 8, "") is None  # its file cannot be read


class Relative(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, size):
        total = self.linear(x).square().sum(-1)
        return (total + 1) * 2 + total / size


def test_the_block_marks_the_call_and_names_its_operands(capfd):
    model = Relative()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = nanlocator.watch(model, optimizer)
    with pytest.raises(nanlocator.NonFiniteGradientError):
        model(torch.ones(3, 4), torch.tensor([1.0, 0.0, 2.0])).sum().backward()
        optimizer.step()
    watch.remove()
    lines = capfd.readouterr().err.splitlines()
    at = next(i for i, line in enumerate(lines) if "|  return (total + 1)" in line)
    begin = lines[at].index("total / size")
    assert lines[at + 1] == lines[at + 1][: lines[at].index("|")] + "|" + " " * (
        begin - lines[at].index("|") - 1
    ) + "^" * len("total / size")
    assert "size is 0 at element [1]" in lines[at + 2]
