"""Names the environment variable that a refused value came from: no flag of the user's is to blame then."""

from __future__ import annotations

import os

import click
from click.core import ParameterSource


def variable_of(param: click.Parameter | None, ctx: click.Context | None) -> str:
    """Return " (from NAME)" where a parameter's value comes from a variable, otherwise nothing."""
    if param is None or ctx is None or param.name is None:
        return ""
    if ctx.get_parameter_source(param.name) is not ParameterSource.ENVIRONMENT:
        return ""
    own = [param.envvar] if isinstance(param.envvar, str) else [*(param.envvar or ())]
    names = [*own, f"{ctx.auto_envvar_prefix}_{param.name.upper()}"]
    return f" (from {next((name for name in names if os.environ.get(name)), 'the environment')})"
