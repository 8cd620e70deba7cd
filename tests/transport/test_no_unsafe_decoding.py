"""Nothing received is ever unpickled or executed: the sources do not contain the means to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[2] / "src").rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {"eval", "exec", "compile_command"}
ATTRIBUTES = {("torch", "load"), ("recv_pyobj",), ("yaml", "load"), ("np", "load"), ("numpy", "load")}


def findings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in MODULES:
                yield str(node.module)
        elif isinstance(node, ast.keyword):
            if node.arg == "allow_pickle" and not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield "allow_pickle"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield node.func.id
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if (owner, node.attr) in ATTRIBUTES or (node.attr,) in ATTRIBUTES:
                yield f"{owner}.{node.attr}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_source_can_unpickle_or_execute(path: Path) -> None:
    assert list(findings(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import joblib.x",
        "torch.load(f)",
        "np.load(f)",
        "f(allow_pickle=True)",
        "f(allow_pickle=x)",
        "socket.recv_pyobj()",
        "eval(x)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert list(findings(ast.parse(source)))
