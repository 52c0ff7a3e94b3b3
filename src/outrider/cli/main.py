"""`outrider`: the command line. One file per command, imported when it is asked for, so that --help is quick.

Exit status: 0 done, 1 failed, 2 wrong usage. Errors are one line on stderr that says what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from io import TextIOWrapper
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from outrider.errors import ConfigError, OutriderError, UnsupportedError

DONE, FAILED, WRONG_USAGE = 0, 1, 2

# typer carries a click of its own in newer versions and uses the installed one in older ones.
UsageError: Any = typer.BadParameter.__base__


class Command(NamedTuple):
    """Where a command lives: a module of outrider.cli and the function, or Typer of subcommands, in it."""

    module: str
    attribute: str
    summary: str  # its line in the overview


COMMANDS: Mapping[str, Command] = {
    "chat": Command("chat", "chat", "Talk to a model in the terminal."),
    "generate": Command("generate", "generate", "Answer one prompt."),
    "serve": Command("serve", "serve", "Serve a model over an OpenAI-compatible HTTP API."),
    "pull": Command("pull", "pull", "Fetch and check a catalogued model."),
    "info": Command("info", "info", "Show what a model is: family, shape, size, tokenizer."),
    "plan": Command("plan", "plan_command", "Work out what fits in memory, and what goes where."),
    "distill": Command("distill", "distill", "Train a drafter for a model."),
    "eval": Command("eval", "eval_command", "Measure what reading less of a long context costs in accuracy."),
    "bench": Command("bench", "app", "Measure speed and long contexts, compare with peers, simulate."),
}


class LazyGroup(TyperGroup):
    """A group whose commands are stubs until one of them is run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command in place of its stub."""
        name, stub, rest = super().resolve_command(ctx, args)
        return name, load(str(name)) if name in COMMANDS else stub, rest


def load(name: str) -> Any:
    """Import a command and make it what typer runs."""
    command = COMMANDS[name]
    target = getattr(import_module(f"outrider.cli.{command.module}"), command.attribute)
    if not isinstance(target, typer.Typer):
        app = new_app()
        app.command(name)(target)
        return typer.main.get_command(app)
    return typer.main.get_command(target)


def new_app(**settings: Any) -> typer.Typer:
    """A Typer whose help is plain text."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)


def outrider(
    show_version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version.")] = False,
) -> None:
    """Language models whose small outriders guess the next tokens and point at the context that matters.

    Example: outrider chat smollm2-135m
    """
    if show_version:
        print(version("outrider"))
        raise typer.Exit()


def build() -> typer.Typer:
    """The whole command line, with a stub for every command."""
    app = new_app(cls=LazyGroup)
    app.callback(invoke_without_command=True)(outrider)
    for name, command in COMMANDS.items():
        app.command(name, help=command.summary)(lambda: None)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status; every error of Outrider's own becomes one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that cannot show a character must not end an answer
            stream.reconfigure(errors="replace")
    try:
        result = typer.main.get_command(build()).main(given, prog_name="outrider", standalone_mode=False)
    except UsageError as error:
        return explain(error)
    except (ConfigError, UnsupportedError) as error:
        return complain(str(error), WRONG_USAGE)
    except OutriderError as error:
        return complain(str(error), FAILED)
    except OSError as error:
        return complain(f"{error}; check the path, the disk and the permissions", FAILED)
    except typer.Abort:
        return FAILED
    return result if isinstance(result, int) else DONE


def complain(message: str, status: int) -> int:
    """One line on stderr; gives the status back."""
    print(f"outrider: {' '.join(message.split())}", file=sys.stderr)
    return status


def explain(error: Any) -> int:
    """Wrong usage: one line and where to look; the help itself where a group was called with nothing."""
    if error.ctx is not None and error.format_message() == error.ctx.get_help():
        print(error.ctx.get_help(), file=sys.stderr)
        return WRONG_USAGE
    command = error.ctx.command_path if error.ctx is not None else "outrider"
    return complain(f"{error.format_message()} (see {command} --help)", WRONG_USAGE)


if __name__ == "__main__":
    sys.exit(main())
