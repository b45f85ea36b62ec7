"""The layering holds, and the checker sees each way of breaking it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import import_rules
import pytest

ROOT = Path(__file__).resolve().parent.parent

# Imports every module of the daemon's process, then names what must not have come along.
IMPORT_THE_DAEMON = """
import importlib, pkgutil, sys
import switchgear.daemon

for info in pkgutil.walk_packages(switchgear.daemon.__path__, "switchgear.daemon."):
    if not info.name.startswith("switchgear.daemon.cli"):
        importlib.import_module(info.name)

print(" ".join(sorted(set(sys.argv[1:]) & set(sys.modules))))
"""


def test_every_module_keeps_to_its_layer() -> None:
    modules = import_rules.read_tree(ROOT)

    assert {module.layer for module in modules.values()} == set(import_rules.LAYERS)
    assert import_rules.broken_rules(modules) == []


def test_no_script_imports_a_layer_by_its_bare_name() -> None:
    found = []
    for folder in ("tests", "benchmarks", "examples", "src"):
        for path in sorted((ROOT / folder).glob("**/*.py")):
            module = import_rules.parse(path.read_text(), f"switchgear.{path.stem}")
            found += [
                f"{path.relative_to(ROOT)}:{imported.line} imports {imported.name}"
                for imported in module.imports
                if imported.top in import_rules.LAYERS
            ]

    assert found == []


def test_the_daemon_process_loads_no_driver() -> None:
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_THE_DAEMON, *import_rules.NEVER_IN_THE_DAEMON],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        check=True,
    )

    assert result.stdout.split() == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("switchgear.ipc.x", "import switchgear.daemon.router"),
        ("switchgear.ipc.x", "from switchgear import daemon"),
        ("switchgear.client.x", "from ..backends.cpu import CpuBackend"),
        ("switchgear.client.x", "from .. import backends"),
        ("switchgear.backends.x", "def f():\n    from switchgear.fingerprints import store"),
        ("switchgear.backends.x", "if TYPE_CHECKING:\n    from ..daemon import supervisor"),
        ("switchgear.fingerprints.x", "import_module('switchgear.daemon.jobs')"),
        ("switchgear.daemon.x", "import daemon.router"),
        ("switchgear.daemon.x", "from ipc import record"),
        ("switchgear.ipc.x", "import pydantic"),
        ("switchgear.ipc.x", "def f():\n    import numpy"),
        ("switchgear.client.x", "import numpy"),
        ("switchgear.client.x", "try:\n    import numpy\nexcept OSError:\n    pass"),
        ("switchgear.client.x", "try:\n    pass\nexcept ImportError:\n    import numpy"),
        ("switchgear.client.x", "def f():\n    import asyncvarlink"),
        ("switchgear.daemon.x", "import numpy as np"),
        ("switchgear.daemon.x", "def f():\n    from PIL import Image"),
        ("switchgear.daemon.x", "importlib.import_module('vulkan')"),
    ],
)
def test_a_broken_rule_is_seen(name: str, source: str) -> None:
    module = import_rules.parse(source, name)

    assert import_rules.broken_rules({name: module})


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("switchgear.daemon.x", "from ..ipc import record\nimport asyncio, pydantic"),
        ("switchgear.daemon.cli.infer", "import numpy\nfrom PIL import Image"),
        ("switchgear.fingerprints.x", "import vulkan\nfrom switchgear.backends import probe"),
        (
            "switchgear.client.x",
            "try:\n    import numpy\nexcept ImportError:\n    numpy = None",
        ),
        ("switchgear.client.x", "def f():\n    import numpy"),
        ("switchgear.client.x", "from . import session\nfrom ..ipc.errors import BadSlot"),
    ],
)
def test_a_kept_rule_is_not_reported(name: str, source: str) -> None:
    assert import_rules.broken_rules({name: import_rules.parse(source, name)}) == []


def test_a_driver_is_found_through_a_lower_layer() -> None:
    sources = {
        "switchgear.daemon.x": "from ..backends import contract",
        "switchgear.backends": "",
        "switchgear.backends.contract": "from . import engine",
        "switchgear.backends.engine": "import ai_edge_litert.interpreter",
    }
    modules = {
        name: import_rules.parse(source, name, is_package=name.count(".") == 1)
        for name, source in sources.items()
    }

    (line,) = import_rules.broken_rules(modules)
    assert "switchgear.backends.engine -> ai_edge_litert" in line

    late = import_rules.parse(
        "def run():\n    import ai_edge_litert", "switchgear.backends.engine"
    )
    assert import_rules.broken_rules({**modules, late.name: late}) == []


def test_conditions_of_an_import_are_read() -> None:
    source = (
        "if TYPE_CHECKING:\n    import a\n"
        "else:\n    import b\n"
        "try:\n    import c\nexcept (ImportError, OSError):\n    import d\n"
        "def f():\n    import e\n"
    )
    found = import_rules.parse(source, "switchgear.ipc.x").imports

    assert [one.name for one in found] == ["a", "b", "c", "d", "e"]
    assert [one.name for one in found if one.typing_only] == ["a"]
    assert [one.name for one in found if one.guarded] == ["c"]
    assert [one.name for one in found if one.lazy] == ["e"]
    assert [one.line for one in found] == [2, 4, 6, 8, 10]


def test_relative_names_are_resolved_from_a_package_and_from_a_module() -> None:
    in_module = import_rules.parse("from .a import b", "switchgear.daemon.x")
    in_package = import_rules.parse("from .a import b", "switchgear.daemon", is_package=True)

    for module in (in_module, in_package):
        names = [one.name for one in module.imports]
        assert names == ["switchgear.daemon.a", "switchgear.daemon.a.b"]


def test_the_links_of_the_package_lead_to_the_layers() -> None:
    for layer in import_rules.LAYERS:
        link = ROOT / "src" / "switchgear" / layer
        assert link.readlink() == Path("../..") / layer
        assert ast.parse((link / "__init__.py").read_text()).body
