"""An app that has nothing but the standard library can import the client."""

from __future__ import annotations

import subprocess
import sys

# Everything outside the standard library and Switchgear is made impossible to import, then
# every module of the two layers an app needs is imported.
IMPORT_THE_CLIENT = """
import importlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top != "switchgear" and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

before = {name.partition(".")[0] for name in sys.modules}
sys.meta_path.insert(0, Blocker())
try:
    import numpy
except ImportError:
    pass
else:
    raise SystemExit("the blocker blocks nothing")

imported = []
for layer in ("ipc", "client"):
    package = importlib.import_module(f"switchgear.{layer}")
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(info.name)
        imported.append(info.name)

from switchgear.client import connect

foreign = {name.partition(".")[0] for name in sys.modules} - before
foreign -= set(sys.stdlib_module_names) | {"switchgear"}
assert not foreign, foreign
assert callable(connect)
print("\\n".join(imported))
"""


def test_the_client_needs_only_the_standard_library() -> None:
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_THE_CLIENT], capture_output=True, text=True, cwd="/"
    )

    assert result.returncode == 0, result.stderr
    assert {"switchgear.ipc.record", "switchgear.ipc.errors"} <= set(result.stdout.split())
