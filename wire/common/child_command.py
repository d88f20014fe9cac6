"""How a module of this package is run in a process of its own, wherever the user happens to stand.

`python -m` would look for modules in the current directory first: somebody's `deploy.py` there would be run in place of
the package. The child imports from where this very process did, be it installed or a source tree.
"""

from __future__ import annotations

import sys
from pathlib import Path

_PREPARE = "import sys; sys.path.insert(0, {root!r}); "
_RUN = "import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"


def _root() -> str:
    """Return the directory that this process imports the package from."""
    found = sys.modules[__name__.partition(".")[0]].__file__
    assert found is not None
    return str(Path(found).resolve().parents[1])


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `python -m module arguments` with the package's own modules."""
    return code_command(_RUN.format(module=module), *arguments)


def code_command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs `python -c code arguments` with the package's own modules."""
    return [sys.executable, "-P", "-c", _PREPARE.format(root=_root()) + code, *arguments]
