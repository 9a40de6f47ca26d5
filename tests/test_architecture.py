"""The plan of the code, enforced: who may import whom, and what the textbook may not mention."""

import ast
import functools
import re
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "scratchlm"

# room -> the rooms it may import (itself is always allowed). See docs/architecture.md.
MAY_IMPORT = {
    "__init__": {
        *("config", "model", "ops", "accounting", "inference", "tokenizer", "training", "errors"),
    },
    "__main__": {"cli"},
    "errors": set(),
    "untrusted": {"errors"},
    "durable": {"errors"},
    "threads": set(),
    "cuda_graphs": set(),
    "config": {"errors", "untrusted"},
    "ops": {"durable", "errors"},
    "model": {"config", "ops", "threads"},
    "paged": {"config", "ops"},
    "quantization": {"config", "ops", "model", "interop", "errors"},
    "quantization.rule": {"config", "interop"},
    "accelerate": {"config", "ops", "model", "quantization", "paged", "cuda_graphs", "errors"},
    "acceleration": {"accelerate", "model", "paged", "errors"},  # the door to the room
    "accounting": {"config", "errors", "quantization.rule"},
    "accounting.verify": {"config", "accounting", "model", "ops", "accelerate", "errors"},
    "tokenizer": {"durable", "errors", "untrusted"},
    "data": {"config", "tokenizer", "durable", "errors", "untrusted"},
    "checkpoint": {"config", "durable", "errors", "untrusted"},
    "parallel": {"config", "ops", "model", "accelerate", "acceleration", "errors"},
    "training": {
        *("model", "accelerate", "acceleration", "parallel", "data", "accounting", "checkpoint"),
        *("config", "ops", "durable", "errors", "untrusted", "threads", "cuda_graphs"),
        "quantization",  # of a base that an adapter learns beside
    },
    "interop": {
        *("config", "ops", "tokenizer", "quantization.rule", "durable", "errors", "untrusted"),
    },
    "inference": {
        *("model", "acceleration", "paged", "tokenizer", "checkpoint", "interop", "config"),
        *("accounting", "errors", "untrusted", "threads", "quantization", "ops", "parallel"),
    },
    "inspect": {"ops", "model", "quantization", "inference", "errors"},
    "evaluation": {"inference", "tokenizer", "errors", "untrusted"},
    "check": {"ops", "model", "training", "tokenizer", "data", "config", "errors", "untrusted"},
    "serve": {
        *("inference", "inspect", "accounting", "config", "model", "tokenizer", "errors"),
        "ops",  # the page shows the formulas
    },
    "cli": None,  # all
}
# Rooms a room may name in its annotations, and not import when it runs.
MAY_ANNOTATE = {"inference": {"accelerate"}}
# What a room may use from outside the standard library; absent: no limit but NOT_ELSEWHERE.
OUTSIDE = {
    "__init__": set(),
    "__main__": set(),
    "errors": set(),
    "untrusted": set(),
    "durable": set(),
    "threads": {"torch"},
    "cuda_graphs": set(),
    "config": set(),
    "accounting": set(),
    "tokenizer": {"regex", "numpy", "tokenizers", "jinja2"},
    "ops": {"torch", "einops", "jaxtyping"},
    "model": {"torch", "einops", "jaxtyping"},
    "accelerate": {"torch", "einops", "jaxtyping", "triton", "numpy"},
    "acceleration": {"torch"},
    "paged": {"torch", "jaxtyping"},
}
NOT_ELSEWHERE = {"triton": "accelerate"}  # package -> the only room that may use it
STDLIB = set(__import__("sys").stdlib_module_names)


def room_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    inner = ".".join(parts[:2])
    return inner if inner in MAY_IMPORT else parts[0]


@functools.cache
def nodes_of(path: Path):
    """Return every node of a file's syntax."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports_of(path: Path):
    """Yield every import: its name, its line, and whether it serves annotations alone."""
    for_types = {
        inner
        for node in nodes_of(path)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written in full"
            names = [node.module]
            if node.module == "scratchlm":
                names = [f"scratchlm.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((name, node.lineno, node in for_types) for name in names)


FILES = sorted(SRC.rglob("*.py"))


def unplanned_imports(path):
    """Yield what a file imports and the plan does not allow."""
    room = room_of(path)
    if room not in MAY_IMPORT:
        yield f"{path}: a room the plan does not know"
        return
    allowed, outside = MAY_IMPORT[room], OUTSIDE.get(room)
    for name, line, for_types in imports_of(path):
        top, *rest = name.split(".")
        if top == "scratchlm":
            target = rest[0] if rest else "__init__"
            if ".".join(rest[:2]) in (allowed or ()):
                continue
            if target.startswith("__version__"):
                continue
            if room.startswith("accounting") and target == "accounting":
                continue
            if for_types and target in MAY_ANNOTATE.get(room, set()):
                continue
            if allowed is not None and target != room and target not in allowed:
                yield f"{path}:{line}: {room} -> {target}"
            continue
        foreign = outside is not None and top not in STDLIB and top not in outside
        if foreign or NOT_ELSEWHERE.get(top, room) != room:
            yield f"{path}:{line}: {room} must not need {top}"


def test_a_room_imports_only_what_the_plan_allows():
    assert [found for path in FILES for found in unplanned_imports(path)] == []


def test_there_is_no_drawer_for_everything():
    drawers = {"utils", "util", "common", "helpers", "misc"}
    assert [path for path in FILES if path.stem in drawers] == []


def unpickled_or_evaluated(path):
    """Yield what a file calls or imports that runs what it reads."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
            owner = getattr(getattr(node.func, "value", None), "id", "")
            evaluates = isinstance(node.func, ast.Name) and name in {"eval", "exec"}
            if evaluates or (owner, name) in {("torch", "load"), ("torch", "save")}:
                yield f"{path}:{node.lineno}: {name}"
    for name, line, _ in imports_of(path):
        if name in {"pickle", "dill", "cloudpickle"}:
            yield f"{path}:{line}: {name}"


def test_nothing_unpickles_or_evaluates():
    assert [found for path in FILES for found in unpickled_or_evaluated(path)] == []


REFERENCE_MUST_NOT_USE = {
    "scaled_dot_product_attention",
    "cross_entropy",
    "softmax",
    "log_softmax",
    "logsumexp",
    "linear",
    "embedding",
    "rms_norm",
    "layer_norm",
    "silu",
    "gelu",
    "relu",
    "nn",
    "functional",
}
OWN = {"self", "_formulas"}  # a formula may call another


def borrowed(tree):
    """Yield what a file takes from torch that it should write out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in REFERENCE_MUST_NOT_USE:
            if not (isinstance(node.value, ast.Name) and node.value.id in OWN):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            taken = REFERENCE_MUST_NOT_USE & {alias.name for alias in node.names}
            if taken or node.module.startswith("torch.nn"):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Import) and any(
            alias.name.startswith("torch.") for alias in node.names
        ):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_the_reference_is_written_out_not_borrowed():
    tree = ast.parse((SRC / "ops" / "reference.py").read_text(encoding="utf-8"))
    assert list(borrowed(tree)) == []


@pytest.mark.parametrize(
    "line",
    [
        "y = torch.softmax(x, -1)",
        "y = x.softmax(-1)",
        "import torch.nn.functional as F",
        "from torch.nn import functional as F",
        "from torch.nn.functional import linear",
        "from torch import nn",
        "y = torch.nn.functional.linear(x, w)",
    ],
)
def test_borrowing_is_noticed(line):
    assert list(borrowed(ast.parse(line)))


def test_a_formula_may_call_another():
    assert not list(borrowed(ast.parse("self.softmax(x)\nlinear = _formulas.linear")))


MODEL = sorted((SRC / "model").rglob("*.py"))


@pytest.mark.parametrize("path", MODEL, ids=lambda p: p.name)
def test_the_model_tests_no_device_and_knows_no_kernel(path):
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        found = re.search(r"is_cuda|kernel|accelerate\b|acceleration|triton", line)
        assert not found, f"{path}:{number}: {line.strip()}"


def test_the_textbook_is_short():
    """The model and its formulas, which a reader goes through from end to end."""
    pages = [*MODEL, SRC / "ops" / "reference.py"]
    assert sum(len(page.read_text(encoding="utf-8").splitlines()) for page in pages) <= 1_700
