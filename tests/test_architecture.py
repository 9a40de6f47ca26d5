"""The house plan, enforced: who may import whom, and no room that should not be there."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "scratchlm"

# room -> the rooms it may import (itself is always allowed). See docs/architecture.md.
MAY_IMPORT = {
    "__init__": {"config", "model"},
    "errors": set(),
    "durable": set(),
    "config": {"errors"},
    "ops": {"errors"},
    "model": {"config", "ops", "errors"},
    "accounting": {"config", "errors"},
    "accounting.verify": {"config", "accounting", "model", "ops", "errors"},
    "tokenizer": {"durable", "errors"},
    "data": {"config", "tokenizer", "durable", "errors"},
    "checkpoint": {"config", "durable", "errors"},
    "training": {
        *("model", "data", "accounting", "checkpoint", "config", "ops", "durable", "errors"),
    },
    "interop": {"config", "durable", "errors"},
    "inference": {"model", "tokenizer", "checkpoint", "interop", "config", "errors"},
    "distributed": {"model", "errors"},
    "serving": {"inference", "errors"},
    "cli": None,  # all
}
# What a room may use from outside the standard library; None: no limit.
OUTSIDE = {
    "__init__": set(),
    "errors": set(),
    "durable": set(),
    "config": set(),
    "accounting": set(),
    "tokenizer": {"regex", "numpy", "tokenizers"},
    "ops": {"torch", "einops", "jaxtyping", "triton"},
    "model": {"torch", "einops", "jaxtyping"},
}
STDLIB = set(__import__("sys").stdlib_module_names)


def room_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    if parts[:2] == ("accounting", "verify"):
        return "accounting.verify"
    return parts[0]


def imports_of(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written in full"
            if node.module == "scratchlm":
                yield from ((f"scratchlm.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield node.module, node.lineno


FILES = sorted(SRC.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_a_room_imports_only_what_the_plan_allows(path):
    room = room_of(path)
    assert room in MAY_IMPORT, f"{path}: a room the plan does not know"
    allowed, outside = MAY_IMPORT[room], OUTSIDE.get(room)
    for name, line in imports_of(path):
        top, *rest = name.split(".")
        if top == "scratchlm":
            target = rest[0] if rest else "__init__"
            if target.startswith("__version__"):
                continue
            if room.startswith("accounting") and target == "accounting":
                continue
            if allowed is not None:
                assert target == room or target in allowed, f"{path}:{line}: {room} -> {target}"
        elif outside is not None and top not in STDLIB:
            assert top in outside, f"{path}:{line}: {room} must not need {top}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_there_is_no_drawer_for_everything(path):
    assert path.stem not in {"utils", "util", "common", "helpers", "misc"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_nothing_unpickles_or_evaluates(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
            owner = getattr(getattr(node.func, "value", None), "id", "")
            assert not (isinstance(node.func, ast.Name) and name in {"eval", "exec"}), path
            assert (owner, name) not in {("torch", "load"), ("torch", "save")}, path
    assert not {name for name, _ in imports_of(path)} & {"pickle", "dill", "cloudpickle"}, path


REFERENCE_MUST_NOT_USE = {
    "scaled_dot_product_attention",
    "cross_entropy",
    "softmax",
    "log_softmax",
    "linear",
    "embedding",
    "rms_norm",
    "layer_norm",
    "silu",
    "gelu",
}


def test_the_reference_is_written_out_not_borrowed():
    tree = ast.parse((SRC / "ops" / "reference.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in REFERENCE_MUST_NOT_USE:
            raise AssertionError(f"reference.py:{node.lineno} borrows {ast.unparse(node)}")
        if isinstance(node, ast.ImportFrom):
            assert node.module not in {"torch.nn", "torch.nn.functional"}
