"""What a file may use to be written from scratch, found by reading it; nothing is run.

The CS336 course allows of torch.nn `Parameter`, `Module` and the containers, of torch.optim the
base class, and of torch.nn.functional nothing. Refused as well are the same functions by another
door (torch.softmax, x.softmax) and libraries that hold the answers. Files of the same project that
are imported are read, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scratchlm.check.loading import read_source

ALLOWED = {
    *("torch.nn", "torch.nn.Parameter", "torch.nn.Module", "torch.nn.parameter"),
    *("torch.nn.parameter.Parameter", "torch.nn.Buffer", "torch.nn.ModuleList"),
    *("torch.nn.ModuleDict", "torch.nn.Sequential", "torch.nn.ParameterList"),
    *("torch.nn.ParameterDict", "torch.optim", "torch.optim.Optimizer"),
    *("torch.optim.optimizer", "torch.optim.optimizer.Optimizer"),
    "torch.nn.init",
}
REFUSED = ("torch.nn", "torch.optim", "torch.ops", "torch.special.softmax", "torch._C._nn")
ANSWERS = ("scratchlm", "transformers", "tokenizers", "tiktoken", "x_transformers", "xformers")
METHODS = {"softmax", "log_softmax", "logsumexp"}  # of tensors
NAMES = METHODS | {"rms_norm", "layer_norm", "embedding", "bilinear"}  # of torch itself


@dataclass(frozen=True)
class Refused:
    """Something a file uses, and where."""

    path: Path
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name}"


def find_refused(path: Path) -> list[Refused]:
    """List what a file, and those of its project that it imports, takes instead of writing."""
    found: list[Refused] = []
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        one = waiting.pop(0)
        if one.resolve() in seen:
            continue
        seen.add(one.resolve())
        tree = read_source(one).tree
        found += sorted(set(_refused_in(tree, one)), key=lambda r: (r.line, r.name))
        waiting += _imported_files(tree, path)
    return found


def _refused_in(tree: ast.Module, path: Path) -> Iterator[Refused]:
    aliases = _aliases(tree)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (Refused(path, line, n) for n in names if _is_refused(n))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (Refused(path, line, n) for n in full if _is_refused(n))
        elif isinstance(node, ast.Attribute | ast.Name):
            name = _full_name(node, aliases)
            if name and id(node) not in inner and _is_refused(name):
                yield Refused(path, line, name)
            elif not name and _is_method(node):
                yield Refused(path, line, f"Tensor.{getattr(node, 'attr', '')}")
        elif isinstance(node, ast.Call):
            name = _by_string(node, aliases)
            if name and _is_refused(name):
                yield Refused(path, line, name)


def _is_method(node: ast.AST) -> bool:
    """Say whether an attribute is a tensor's method, and not one of the learner's own object."""
    if not isinstance(node, ast.Attribute) or node.attr not in METHODS:
        return False
    owner = node.value
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    return not (isinstance(owner, ast.Name) and owner.id in ("self", "cls"))


def _is_refused(name: str) -> bool:
    if name.split(".")[0] in ANSWERS:
        return True
    if name in ALLOWED or name.startswith("torch.nn.init."):
        return False
    if any(name == door or name.startswith(f"{door}.") for door in REFUSED):
        return True
    return name.startswith("torch.") and name.count(".") == 1 and name.split(".")[1] in NAMES


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Map every name in the file to what it stands for: F to torch.nn.functional."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                aliases[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):  # nn = torch.nn
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            name = _full_name(node.value, aliases)
            if name and isinstance(node.targets[0], ast.Name):
                aliases.setdefault(node.targets[0].id, name)
    return aliases


def _full_name(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """Return the full name of torch's or a library's that an expression stands for."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _full_name(node.value, aliases)
        return f"{owner}.{node.attr}" if owner else None
    return None


def _by_string(call: ast.Call, aliases: dict[str, str]) -> str | None:
    """Resolve getattr(nn, "Linear"), import_module("torch.nn.functional") and __import__(…)."""
    texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    if not texts:
        return None
    function = _full_name(call.func, aliases) or getattr(call.func, "id", "")
    if function in ("__import__", "importlib.import_module", "importlib.__import__"):
        return texts[0]
    if function == "getattr" and len(call.args) > 1:
        owner = _full_name(call.args[0], aliases)
        return f"{owner}.{texts[0]}" if owner else None
    return None


def _imported_files(tree: ast.Module, first: Path) -> list[Path]:
    """Return the files of the same project that a file imports."""
    folder = first.resolve().parent
    roots = [folder, folder.parent, folder.parent / "src"]
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names += [base, *(f"{base}.{alias.name}".strip(".") for alias in node.names)]
    found = []
    for name in filter(None, names):
        for root in roots:
            place = root.joinpath(*name.split("."))
            for file in (place.with_suffix(".py"), place / "__init__.py"):
                if file.is_file() and file.resolve() != first.resolve():
                    found.append(file)
    return list(dict.fromkeys(found))
