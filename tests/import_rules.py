"""Which module may import what: reads the imports of a source file and names those that break
the layering.

Layers import only downward: daemon > fingerprints > backends > client > ipc. `client` and `ipc`
need nothing but the standard library. The daemon's process never imports numpy, an engine, a
driver or Pillow, not even through a layer below; its command line (`daemon/cli`) may.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAYERS = ("ipc", "client", "backends", "fingerprints", "daemon")
STANDARD_LIBRARY_ONLY = ("ipc", "client")
NEVER_IN_THE_DAEMON = frozenset(
    {
        "PIL",
        "ai_edge_litert",
        "flatbuffers",
        "numpy",
        "openvino",
        "pyopencl",
        "tflite_runtime",
        "tinygrad",
        "vulkan",
    }
)


@dataclass(frozen=True)
class Import:
    """One imported module: its absolute name, where, and under which conditions it is run."""

    name: str
    line: int
    lazy: bool  # inside a function
    typing_only: bool  # under `if TYPE_CHECKING`
    guarded: bool  # in a try block that catches ImportError

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Module:
    name: str  # switchgear.daemon.router
    is_package: bool
    imports: tuple[Import, ...]

    @property
    def layer(self) -> str:
        return layer_of(self.name)


def layer_of(name: str) -> str:
    """The layer of a module's name; empty for `switchgear` itself and for foreign modules."""
    parts = name.split(".")
    return parts[1] if parts[0] == "switchgear" and len(parts) > 1 else ""


def read_tree(root: Path) -> dict[str, Module]:
    """Every module of the layers below the checkout `root`, by name."""
    modules = {}
    for layer in LAYERS:
        for path in sorted((root / layer).rglob("*.py")):
            parts = ["switchgear", *path.relative_to(root).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            modules[name] = parse(path.read_text(), name, is_package)

    return modules


def parse(source: str, name: str, is_package: bool = False) -> Module:
    package = name if is_package else name.rpartition(".")[0]
    found = _walk(ast.parse(source), package, lazy=False, typing_only=False, guarded=False)
    return Module(name, is_package, tuple(found))


def _walk(
    node: ast.AST, package: str, *, lazy: bool, typing_only: bool, guarded: bool
) -> Iterator[Import]:
    for name in _imported(node, package):
        assert isinstance(node, ast.stmt | ast.expr)
        yield Import(name, node.lineno, lazy, typing_only, guarded)

    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        lazy = True

    under_typing: list[ast.stmt] = []
    under_guard: list[ast.stmt] = []
    if isinstance(node, ast.If) and _mentions(node.test, {"TYPE_CHECKING"}):
        under_typing = node.body
    elif isinstance(node, ast.Try) and any(
        handler.type is not None
        and _mentions(handler.type, {"ImportError", "ModuleNotFoundError"})
        for handler in node.handlers
    ):
        under_guard = node.body

    for child in ast.iter_child_nodes(node):
        yield from _walk(
            child,
            package,
            lazy=lazy,
            typing_only=typing_only or child in under_typing,
            guarded=guarded or child in under_guard,
        )


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(
        (isinstance(part, ast.Name) and part.id in names)
        or (isinstance(part, ast.Attribute) and part.attr in names)
        for part in ast.walk(node)
    )


def _imported(node: ast.AST, package: str) -> list[str]:
    """The absolute names that this one node imports; `from a import b` gives a and a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]

    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1]
            base = ".".join([*above, base] if base else above)

        return [base, *(f"{base}.{alias.name}" for alias in node.names if alias.name != "*")]

    # importlib.import_module("numpy") and __import__("numpy")
    if isinstance(node, ast.Call) and _mentions(node.func, {"import_module", "__import__"}):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return [first.value]

    return []


def broken_rules(modules: dict[str, Module]) -> list[str]:
    """One line for each import that breaks a rule, with the module and the line."""
    found = []
    for module in modules.values():
        for imported in module.imports:
            reason = _why_not(module, imported)
            if reason:
                found.append(f"{module.name}:{imported.line} {reason}")

    return [*dict.fromkeys(found), *_drivers_in_the_daemon(modules)]


def _why_not(module: Module, imported: Import) -> str:
    if imported.top in LAYERS:
        return f"imports {imported.name}: say switchgear.{imported.name}"

    target = layer_of(imported.name)
    if target in LAYERS and LAYERS.index(target) > LAYERS.index(module.layer):
        return f"imports {imported.name}, a layer above {module.layer}"

    if (
        module.layer in STANDARD_LIBRARY_ONLY
        and imported.top != "switchgear"
        and imported.top not in sys.stdlib_module_names
        and not _optional_numpy(module, imported)
    ):
        return f"imports {imported.name}, which is not in the standard library"

    return ""


def _optional_numpy(module: Module, imported: Import) -> bool:
    return (
        module.layer == "client"
        and imported.top == "numpy"
        and (imported.lazy or imported.guarded or imported.typing_only)
    )


def _drivers_in_the_daemon(modules: dict[str, Module]) -> list[str]:
    """What the daemon's process would import, followed through the layers below.

    In the daemon's own modules an import inside a function counts too. Below, only what runs
    when the module is imported: there a function may load a driver, in a worker.
    """
    found = []
    seen = set()
    todo = [(name, name) for name in modules if _in_daemon_process(name)]
    while todo:
        name, path = todo.pop()
        if name in seen:
            continue

        seen.add(name)
        for imported in modules[name].imports:
            if imported.typing_only or (imported.lazy and not _in_daemon_process(name)):
                continue

            if imported.top in NEVER_IN_THE_DAEMON:
                found.append(f"{path} -> {imported.name} (line {imported.line})")

            targets = [part for part in _with_parents(imported.name) if part in modules]
            todo += [(target, f"{path} -> {target}") for target in targets]

    return [f"the daemon's process would import a driver: {path}" for path in found]


def _in_daemon_process(name: str) -> bool:
    in_cli = name == "switchgear.daemon.cli" or name.startswith("switchgear.daemon.cli.")
    return layer_of(name) == "daemon" and not in_cli


def _with_parents(name: str) -> list[str]:
    """`a.b.c` gives a, a.b and a.b.c: importing a module runs the packages above it."""
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]
