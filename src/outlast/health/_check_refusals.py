"""Models whose products cannot be checked, or not by these patterns: refused by name before the first step."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from outlast.errors import ConfigError, nearest
from outlast.health._checks import ProductChecks

__all__ = ["refuse_compiled", "refuse_unmatched"]


def refuse_unmatched(model: nn.Module, checks: ProductChecks) -> None:
    """ConfigError for a pattern that no module's name matches: what nobody checks would look like what is right."""
    names = [name for name, _ in model.named_modules()]
    for pattern in checks.modules:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"checks: no module's name matches {pattern!r}",
                remedy=nearest(pattern, names, f"names such as {', '.join(names[1:6])}, with * for parts of them"),
            )


def refuse_compiled(model: nn.Module) -> None:
    """ConfigError for a model with compiled parts: their products are in kernels that cannot be looked into."""
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise ConfigError(
                f"checks: {name or 'the model'} is compiled, and a compiled kernel shows none of its products",
                remedy="leave it uncompiled, or use audit= in place of checks=",
            )
