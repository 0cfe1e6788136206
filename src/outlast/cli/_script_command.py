"""A command whose last arguments are a script and the script's own arguments, which may look like options."""

from __future__ import annotations

import click
from typer.core import TyperCommand

__all__ = ["ScriptCommand"]


class ScriptCommand(TyperCommand):
    """After `-m MODULE`, as after SCRIPT, all that follows belongs to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags = {"--help"}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (param.is_flag or param.count):
                flags |= {*param.opts, *param.secondary_opts}
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] not in ("-m", "--"):
            at += 1 if args[at] in flags or "=" in args[at] else 2
        if args[at : at + 1] == ["-m"] and len(args) > at + 1:
            args = [*args[: at + 2], "--", *args[at + 2 :]]
        return super().parse_args(ctx, args)
