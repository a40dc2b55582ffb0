"""Every command with its options, from the application itself."""

import re
from typing import Any

from typer.main import get_command

from rankscope.cli import app
from sitegen.markdown import table


def commands() -> dict[str, Any]:
    """By name, in the order of `rankscope --help`."""
    known: Any = get_command(app)
    return {name: each for name, each in known.commands.items() if not each.hidden}


def page() -> str:
    """A section for each command."""
    return "\n\n".join(section(name, each) for name, each in commands().items())


def section(name: str, command: Any) -> str:
    """What a command does, how it is called, and what it takes."""
    given = [each for each in command.params if not getattr(each, "hidden", False) and each.name != "help"]
    arguments = [each for each in given if not each.opts[0].startswith("-")]
    usage = " ".join(["rankscope", name, *(_argument(each) for each in arguments), "[OPTIONS]"])
    parts = [f"## {name}", prose(command.help or ""), f"```text\n{usage}\n```"]
    groups: dict[str, list[Any]] = {}
    for each in given:
        panel = getattr(each, "rich_help_panel", None)
        what = "Arguments" if each in arguments else panel if isinstance(panel, str) else "Options"
        groups.setdefault(what, []).append(each)
    rows = [[_spelt(each), prose(each.help or ""), _default(each)] for group in groups.values() for each in group]
    if rows:
        parts.append(table(["", "meaning", "if left out"], rows))
    return "\n\n".join(parts)


def prose(text: str) -> str:
    """Help as Markdown: rich's marks become Markdown's, options become code."""
    text = re.sub(r"\[bold\](.*?)\[/bold\]", r"`\1`", text)
    text = re.sub(r"\[/?\w+\]", "", text)
    text = re.sub(r"(?<![`\w-])(--?[a-z][\w-]*)", r"`\1`", text)
    text = re.sub(r"``+", "`", text)
    return re.sub(r"([*_<])", r"\\\1", text) if "`" not in text else text


def _argument(each: Any) -> str:
    name = each.metavar or each.name.upper()
    return name if each.required else f"[{name}]"


def _spelt(each: Any) -> str:
    names = [*each.opts, *each.secondary_opts]
    if not names[0].startswith("-"):
        return f"`{each.metavar or names[0].upper()}`"
    value = (each.metavar or "").strip()
    return ", ".join(f"`{name}`" for name in sorted(names, key=len, reverse=True)) + (f" `{value}`" if value else "")


def _default(each: Any) -> str:
    if each.required:
        return "must be given"
    shown = getattr(each, "show_default", None)
    if isinstance(shown, str):
        return shown
    if getattr(each, "is_flag", False):
        return ""
    if each.default in (None, "", ()) or callable(each.default):
        return ""
    value = each.default
    return f"`{' '.join(map(str, value)) if isinstance(value, list | tuple) else value}`"
