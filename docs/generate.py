"""Writes what comes from the code: docs/api.md, the options in docs/cli.md, the list of causes.

    python docs/generate.py [--check]

With --check nothing is written, and the exit code is 1 if something would change.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import stayfinite
from stayfinite.causes import CAUSES
from stayfinite.cli import main as command_line

DOCS = Path(__file__).resolve().parent
WIDTH = 92
# The room that a name lives in: the heading that it is under. What is not here comes last.
HEADINGS = {
    "tracing": "Find what made it",
    "detect": "Find what made it",
    "locate": "Find what made it",
    "guard": "Continue training",
    "recover": "Continue training",
    "snapshot": "Continue training",
    "amp": "Mixed precision",
    "clip": "Clip gradients",
    "prevent": "Prevent",
    "checkpoint": "Checkpoints",
    "testing": "Faults on purpose",
    "records": "Records",
    "errors": "Errors",
}
ELSEWHERE = "More"
INTRODUCTION = """\
# API

Every public name, from its docstring; the examples are run in the tests. All of them are names of
`stayfinite` and are loaded on first use, so that `import stayfinite` costs nothing. What belongs
to a framework or a tracker is on its page: [Lightning](lightning.md),
[transformers](transformers.md), [Accelerate](accelerate.md), [Ignite](ignite.md),
[trackers](trackers.md).

Written by `python docs/generate.py`.
"""
GENERATED = re.compile(r"(<!-- options of (?P<name>\w+) -->\n).*?(<!-- end -->)", re.S)


def pages() -> dict[Path, str]:
    """What each page with a generated part is to hold."""
    cli, index, site = DOCS / "cli.md", DOCS / "causes" / "index.md", DOCS.parent / "mkdocs.yml"
    return {
        DOCS / "api.md": api_page(),
        cli: cli_page(old(cli)),
        index: with_new_causes(old(index), "| [`{0.slug}`]({0.slug}.md) | {0.title} |"),
        site: with_new_causes(old(site), "          - causes/{0.slug}.md"),
    }


def with_new_causes(text: str, row: str) -> str:
    """The text with a row for each cause that it lacks, below the last one of the same kind."""
    lines = text.splitlines()
    for cause in CAUSES.values():
        if row.format(cause) not in lines:
            kin = [row.format(each) for each in CAUSES.values() if each.kind == cause.kind]
            last = max(number for number, line in enumerate(lines) if line in kin)
            lines.insert(last + 1, row.format(cause))
    return "\n".join(lines) + "\n"


def cli_page(text: str) -> str:
    """The page with all options as they are now; a command that it lacks gets a section."""
    context = click.Context(command_line, info_name="stayfinite", **command_line.context_settings)
    names = command_line.list_commands(context)
    commands = {name: command_line.get_command(context, name) for name in names}
    known = {found["name"] for found in GENERATED.finditer(text)}
    for name in sorted(set(names) - known):
        text += f"\n## {name}\n\n<!-- options of {name} -->\n<!-- end -->\n"
    return GENERATED.sub(
        lambda found: found[1] + options(commands[found["name"]], context) + found[3], text
    )


def options(command: click.Command, parent: click.Context) -> str:
    """Usage, description and a table of the options."""
    context = click.Context(command, parent=parent, info_name=command.name)
    usage = " ".join(command.collect_usage_pieces(context))
    rows = [
        f"| `{escaped(names)}` | {escaped(text)} |"
        for parameter in command.get_params(context)
        if isinstance(parameter, click.Option)
        if (record := parameter.get_help_record(context))
        for names, text in [record]
    ]
    about = inspect.cleandoc(command.help or "")
    head = f"```text\n{context.command_path} {usage}\n```\n\n{about}\n"
    return "\n".join([head, "| option | |", "|---|---|", *rows, ""])


def escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def api_page() -> str:
    groups: dict[str, list[str]] = {heading: [] for heading in [*HEADINGS.values(), ELSEWHERE]}
    for name in sorted(stayfinite.__all__, key=str.lower):
        if name != "__version__":
            groups[heading_of(name)].append(name)
    parts = [INTRODUCTION]
    for heading, names in groups.items():
        if names:
            parts.append(f"## {heading}\n")
            parts += [entry(name, getattr(stayfinite, name)) for name in names]
    return "\n".join(parts)


def heading_of(name: str) -> str:
    room = stayfinite._HOME[name].partition(".")[0]
    return HEADINGS.get(room, ELSEWHERE)


def entry(name: str, thing: Any) -> str:
    """A name with its signature, its docstring, and the methods of a class."""
    lines = [f"### {name}\n", signature(name, thing), prose(inspect.getdoc(thing) or "")]
    listed = [method(name, each, member) for each, member in methods(thing)]
    return "\n".join([*lines, *listed, ""] if listed else lines)


def methods(thing: Any) -> Iterator[tuple[str, Any]]:
    if not inspect.isclass(thing) or issubclass(thing, (enum.Enum, BaseException)):
        return
    for each, member in vars(thing).items():
        plain = unwrapped(member)
        is_ours = inspect.isfunction(plain) or isinstance(plain, property)
        if is_ours and plain.__doc__ and not each.startswith("_"):
            yield each, member


def unwrapped(member: Any) -> Any:
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member


def method(owner: str, name: str, member: Any) -> str:
    first = inspect.cleandoc(unwrapped(member).__doc__).partition("\n\n")[0].replace("\n", " ")
    given = "" if isinstance(member, property) else shown(unwrapped(member), without_self=True)
    return f"- `{owner}.{name}{given}`: {first}"


def signature(name: str, thing: Any) -> str:
    if inspect.isclass(thing) and issubclass(thing, enum.Enum):
        text = "\n".join(f"{name}.{member.name} = {member.value!r}" for member in thing)
    elif inspect.isclass(thing) and issubclass(thing, BaseException):
        text = f"{name}, a {thing.__bases__[0].__name__}"
    else:
        text = name + shown(thing)
    return f"```text\n{text}\n```\n"


def shown(thing: Any, *, without_self: bool = False) -> str:
    """Names and defaults, one to a line if they do not fit into one; types are in the editor."""
    parts, star = [], False
    for each in inspect.signature(thing).parameters.values():
        if without_self and each.name in ("self", "cls"):
            continue
        if each.kind is each.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        parts.append(parameter_text(each))
    line = f"({', '.join(parts)})"
    if len(line) <= WIDTH - 24 or without_self:
        return line
    return "(\n" + textwrap.indent(",\n".join(parts), "    ") + ",\n)"


def parameter_text(each: inspect.Parameter) -> str:
    stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
    if each.default is each.empty:
        return stars + each.name
    return f"{each.name}={default_text(each.default)}"


def default_text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return repr(value.value)
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}()"
    return "..." if repr(value).startswith("<") else repr(value)


def prose(docstring: str) -> str:
    """A docstring as markdown: its examples as code blocks."""
    lines, in_example = [], False
    for line in docstring.splitlines():
        if line.startswith(">>>") and not in_example:
            lines.append("```pycon")
            in_example = True
        elif in_example and not line.strip():
            lines.append("```")
            in_example = False
        lines.append(line)
    return "\n".join([*lines, "```"] if in_example else lines) + "\n"


def main() -> None:
    changed = {page: text for page, text in pages().items() if old(page) != text}
    if "--check" in sys.argv[1:]:
        raise SystemExit(", ".join(page.name for page in changed) if changed else 0)
    for page, text in changed.items():
        page.write_text(text, encoding="utf-8")
        print(f"{page.relative_to(DOCS.parent)} was written again")


def old(page: Path) -> str:
    return page.read_text(encoding="utf-8") if page.exists() else ""


if __name__ == "__main__":
    main()
