"""`outlast completion`: a script for the shell that completes commands, their options and files."""

from __future__ import annotations

from typing import Annotated, Literal

import click
import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_BASH = """_outlast() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" words
  case "$COMP_CWORD:${{COMP_WORDS[1]}}:${{COMP_WORDS[2]}}" in
    1:*) words="{commands}" ;;
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _outlast outlast
"""


@app.command()
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Whose script: bash, zsh or fish.")],
) -> int:
    """Print a script that completes outlast's commands and options in a shell."""
    print(_fish() if shell == "fish" else _zsh() if shell == "zsh" else _bash(), end="")
    return 0


def _words() -> dict[tuple[str, ...], list[str]]:
    """What may follow each command and each command's subcommand."""
    from outlast.cli import COMMANDS, command_of

    found: dict[tuple[str, ...], list[str]] = {}
    for name in COMMANDS:
        command = command_of(name)
        inner: dict[str, click.Command] = getattr(command, "commands", {})
        found[(name,)] = [*inner, *_options(command)]
        for other, child in inner.items():
            found[name, other] = _options(child)
    return found


def _options(command: click.Command) -> list[str]:
    told = [option for param in command.params if isinstance(param, click.Option) for option in param.opts]
    return [*sorted(option for option in told if option.startswith("--")), "--help"]


def _bash() -> str:
    words = _words()
    cases = [
        f'    *:{path[0]}:{path[1]}) words="{" ".join(told)}" ;;' for path, told in words.items() if len(path) == 2
    ]
    cases += [f'    *:{path[0]}:*) words="{" ".join(told)}" ;;' for path, told in words.items() if len(path) == 1]
    return _BASH.format(commands=" ".join(path[0] for path in words if len(path) == 1), cases="\n".join(cases))


def _zsh() -> str:
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash()}"


def _fish() -> str:
    from outlast.cli import COMMANDS

    lines = [
        f"complete -c outlast -n __fish_use_subcommand -a {name} -d '{_plain(said)}'"
        for name, (_, said) in COMMANDS.items()
    ]
    for path, words in _words().items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {name}" for name in path)
        for word in words:
            how = f"-l {word.removeprefix('--')}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c outlast -n '{seen}' {how}")
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return text.replace("'", "")
