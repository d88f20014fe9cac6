"""Prints one dependency of pyproject.toml with its pin, so that the version is stated once."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
print(next(pin for pin in project["dependencies"] if pin.startswith(sys.argv[1])))
