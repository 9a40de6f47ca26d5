"""A learner's file: which functions it has written, and the module it makes."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from scratchlm.check.tasks import BY_NAME
from scratchlm.errors import ScratchLMError
from scratchlm.untrusted import MAX_CONFIG_BYTES, read_bytes

MODULE = "learner_functions"


@dataclass(frozen=True)
class Source:
    """A file as text: what is written in it, and what each function looks like."""

    path: Path
    tree: ast.Module

    @property
    def unwritten(self) -> set[str]:
        """The functions that are stubs still."""
        return {n.name for n in self._functions() if n.name in BY_NAME and _is_stub(n)}

    @property
    def absent(self) -> set[str]:
        """The functions that the file does not have at all."""
        named: set[str] = set()
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                named.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                named |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                named |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        return set() if "*" in named else set(BY_NAME) - named

    def _functions(self) -> list[ast.FunctionDef]:
        return [node for node in self.tree.body if isinstance(node, ast.FunctionDef)]

    def changed_since(self, before: Source) -> set[str]:
        """Name the functions whose text changed, and those that use a changed name.

        Anything at the top level (a class, a helper, an import) is a name like any other; where
        what has no name changed, all functions count as changed.
        """
        old, new = before._parts(), self._parts()
        if old.get("") != new.get(""):
            return set(BY_NAME)
        changed = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
        while True:
            users = {name for name, uses in self._uses().items() if uses & changed}
            if users <= changed:
                return changed & set(BY_NAME)
            changed |= users

    def _parts(self) -> dict[str, str]:
        parts: dict[str, str] = {}
        for node in self.tree.body:
            name = getattr(node, "name", "")
            parts[name] = parts.get(name, "") + ast.dump(node)
        return parts

    def _uses(self) -> dict[str, set[str]]:
        return {
            node.name: {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            for node in self.tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }


def read_source(path: Path) -> Source:
    """Parse a file; what Python cannot read is one line."""
    try:
        return Source(path, ast.parse(read_bytes(path, MAX_CONFIG_BYTES), str(path)))
    except RecursionError:
        raise ScratchLMError(f"{path}: nested too deeply") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{path}:{line}" if line else f"{path}"
        raise ScratchLMError(f"{where}: {getattr(error, 'msg', error)}") from None


def _is_stub(function: ast.FunctionDef) -> bool:
    body = [
        node
        for node in function.body
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        and not isinstance(node, ast.Pass)
    ]
    if not body:
        return True
    return (
        len(body) == 1
        and isinstance(body[0], ast.Raise)
        and body[0].exc is not None
        and "NotImplementedError" in ast.unparse(body[0].exc)
    )


class _FromSource(SourceFileLoader):
    """Takes no bytecode: of two saves within a second that of the first may look current."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the file as it is now."""
        return self.source_to_code(self.get_data(self.path), self.path)


def load_module(path: Path) -> ModuleType:
    """Import a file; one inside a package (`tests/adapters.py`) is imported as part of it."""
    folder = path.resolve().parent
    packaged = (folder / "__init__.py").is_file()
    root = folder.parent if packaged or folder.name == "tests" else folder
    for place in (str(root / "src"), str(root), str(folder)):
        if place not in sys.path:
            sys.path.insert(0, place)
    name = f"{folder.name}.{path.stem}" if packaged else MODULE
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    if packaged:
        sys.modules.pop(folder.name, None)
        importlib.import_module(folder.name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def borrow(module: ModuleType, names: set[str]) -> None:
    """Put the definition in the place of functions that are missing or wrong."""
    for name in names:
        setattr(module, name, BY_NAME[name].definition)


def function_of(module: ModuleType, name: str) -> Any:
    """Return a function of the file, or None."""
    found = getattr(module, name, None)
    return found if callable(found) else None
