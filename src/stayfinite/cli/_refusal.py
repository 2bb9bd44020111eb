"""How a command says that it cannot do what was asked."""

from __future__ import annotations

import click


class Refused(click.ClickException):
    """One line and exit code 2."""

    exit_code = 2
