"""The call that a frame executes, within its line of source code.

Python 3.11 and later keep the columns of each instruction (PEP 657, ``code.co_positions``).
"""

from __future__ import annotations

import ast
from types import CodeType

_OPERATORS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "remainder",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
}
_MODULES = {"torch", "F", "nn", "math", "np"}  # names of modules, whose functions are no methods
_LONGEST = 200  # of a source line

Found = tuple[int, int, str, list[str]]


def expression_at(code: CodeType, instruction: int, line: str) -> Found | None:
    """Begin and end of the expression that ``instruction`` (``frame.f_lasti``) of ``code`` evaluates, in
    bytes from the first character of ``line`` that is no blank, of a chain of calls its last one; its
    function's last name; its arguments, a method's object first. ``line``: the source line on which it
    begins. None if it is not known, or not on that line."""
    if instruction < 0 or not hasattr(code, "co_positions"):
        return None
    first, last, begin, end = list(code.co_positions())[instruction // 2]
    if first is None or first != last or begin is None or end is None:
        return None
    text = line.encode()
    indent = len(text) - len(text.lstrip())
    if not indent <= begin < end <= min(len(text), indent + _LONGEST):
        return None
    source = text[begin:end].decode(errors="replace")
    try:
        node = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError):
        return begin - indent, end - indent, "", []
    call, arguments = _parts(source, node)
    return begin + _begin_of_call(source, node) - indent, end - indent, call, arguments


def _begin_of_call(source: str, node: ast.expr) -> int:
    """Of `x.pow(2).sum(-1).sqrt()`, whose parts the same line calls, too, that of `.sqrt()`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return 0
    called_on = node.func.value
    if isinstance(called_on, ast.Name | ast.Attribute):
        return 0
    return max(source.encode().find(b".", called_on.end_col_offset or 0), 0)  # behind its parentheses


def _parts(source: str, node: ast.expr) -> tuple[str, list[str]]:
    if isinstance(node, ast.BinOp):
        return _OPERATORS.get(type(node.op), ""), [_source(source, each) for each in (node.left, node.right)]
    if not isinstance(node, ast.Call) or any(isinstance(each, ast.Starred) for each in node.args):
        return "", []
    arguments = [_source(source, each) for each in node.args]
    if isinstance(node.func, ast.Name):
        return node.func.id, arguments
    if not isinstance(node.func, ast.Attribute):
        return "", []
    owner = node.func.value
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    is_method = not (isinstance(owner, ast.Name) and owner.id in _MODULES)
    return node.func.attr, [_source(source, node.func.value)] * is_method + arguments


def _source(source: str, node: ast.expr) -> str:
    return ast.get_source_segment(source, node) or ""
