"""`outrider bench ...`: measurements whose last line on stdout is one JSON record."""

from __future__ import annotations

import typer

from outrider.cli.bench_context import context
from outrider.cli.bench_peers import peers
from outrider.cli.bench_simulate import simulate
from outrider.cli.bench_speed import speed

app = typer.Typer(
    help="Measure speed and long contexts, compare with peers, simulate.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (speed, peers, context, simulate):
    app.command()(command)
