"""The pages of `docs/reference/`, made of the code that they describe.

`python -m tests.support.reference_pages` writes them; a test of the gate compares them.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import typing
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
from cyclopts import App

from controlplane.cli.main import build
from controlplane.client.sweeps.sweep import JOB_FIELDS, Searcher, Sweep
from controlplane.policy.options import Within
from controlplane.policy.placement.placers import PlacerName
from controlplane.policy.registry import check_options
from controlplane.service.settings import ControllerSettings
from nodeagent.settings import AgentSettings
from schemas.jobs import ELASTIC_FIELDS, EndWarning, JobSpec, StopRule, Utility
from schemas.sharing import Sharing
from schemas.sweeps import Parameter
from tests.support.schemas_examples import structs_in
from tests.support.wire_page import notes_of

FOLDER: Final = Path(__file__).parents[2] / "docs" / "reference"
NOTICE: Final = (
    "<!-- Made by `python -m tests.support.reference_pages`; edit the code, not this page. -->"
)
COMMANDS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {  # title and commands by page
    "commands": ("Commands: start here", (
        "local", "init", "submit", "ps", "logs", "run", "top", "web",
    )),
    "commands-jobs": ("Commands: jobs", (
        "show", "explain", "wait", "cancel", "resize", "pause", "resume", "hold", "release",
        "rerun", "history",
    )),
    "commands-results": ("Commands: results and terminals", (
        "fetch", "export", "samples", "timeline", "trace", "attach", "shell", "forward",
        "completion",
    )),
    "commands-sweeps": ("Commands: sweeps", ("sweep",)),
    "commands-nodes": ("Commands: nodes", ("node", "cluster")),
    "commands-cluster": ("Commands: sharing, policy and events", (
        "events", "usage", "quota", "project", "scheduling", "policy",
    )),
    "commands-admin": ("Commands: keys, journal and settings", ("key", "admin", "config", "doctor")),
    "commands-simulator": ("Commands: simulator", ("sim",)),
}  # fmt: skip
EXPLAINED: Final = {  # page of a policy, if it is not that of its options
    "slaq": "slaq", "harmony": "harmony", "harmony-drl": "harmony",
}  # fmt: skip
POLICIES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {  # likewise
    "policies-ones": ("Policy options: ones", ("ones", "ones-paper")),
    "policies-rounds": ("Policy options: policies with rounds", (
        "optimus", "goodput", "pollux", "drl", "slaq", "oasis",
    )),
    "policies-queues": ("Policy options: queues, shares and placement", (
        "fifo", "fair", "srtf", "tiresias", "gittins", "harmony", "harmony-drl",
    )),
}  # fmt: skip
CONTROLLER: Final = """\
Keys of `controller.toml`. [Sharing](sharing-settings.md) and [policy options](policies-ones.md)
have pages of their own. An environment variable `ONES__SECTION__KEY` overrides a key.
`ones config check controller.toml` prints every problem of a file.

"""
SHARING: Final = """\
Tables below `[sharing]` of `controller.toml`. [Sharing](../sharing.md) explains the rules.
`ones project` and `ones quota` change them while the controller runs.

"""
AGENT: Final = """\
Keys of an agent's TOML file. An environment variable `ONES__SECTION__KEY` overrides a key.
`ones config check agent.toml` prints every problem of a file.

"""
EVERYWHERE: Final = frozenset({"--home", "--output"})  # options named once on each page
MANY: Final = 10  # common options, from which on they are named once
BY_CLUSTER: Final = frozenset({"trial", "element", "revision"})  # fields that no file sets
TOML: Final[Mapping[Any, str]] = {
    int: "integer", float: "number", str: "text", bool: "true or false", Any: "any value",
    PlacerName: "name",
}  # fmt: skip
METAVARS: Final[Mapping[Any, str]] = {int: "N", float: "NUMBER", Path: "PATH"}  # else TEXT
SPELLED: Final = (
    (r"noqa: \w+ - ", ""),
    (r"\bNone:", "none:"),
    (r"\bTrue\b", "true"),
    (r"\bFalse\b", "false"),
)  # in TOML
NO_BOUND: Final = 2**31 - 1  # an upper bound from here on is not mentioned
SECONDS: Final = ((86_400, "d"), (3600, "h"), (60, "min"))
BYTES: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"))
SHARED_OPTIONS: Final = {
    "placer": "how a job's slots are chosen: [placers](../policies/placers.md#placers)",
    "moves": "how a job changes its size: while it trains, or by a restart",
    "starts": "when a job that arrives between rounds starts",
}


def type_of(hint: Any) -> str:
    """Return the type of a value as a reader of TOML knows it."""
    hint = getattr(hint, "__supertype__", hint)
    origin, parts = get_origin(hint), get_args(hint)
    if hint in TOML:
        return TOML[hint]
    if origin is Annotated:
        return f"{type_of(parts[0])}{_range(parts[1])}"
    if origin is Literal:
        return " or ".join(f"`{json.dumps(part)}`" for part in parts)
    if origin is list or (origin is tuple and parts[-1] is Ellipsis):
        return f"list of {type_of(parts[0])}"
    if origin is tuple:
        return f"[{', '.join(map(type_of, parts))}]"
    if origin in {typing.Union, UnionType}:
        kept = [part for part in parts if part not in {type(None), msgspec.UnsetType}]
        return " or ".join(dict.fromkeys(map(type_of, kept)))
    return "table"


def _range(bounds: Any) -> str:
    if isinstance(bounds, Within):
        low, high = bounds.least, bounds.most
    else:
        low, high = bounds.ge, math.inf if bounds.le is None else bounds.le
        if bounds.gt is not None:
            return f" above {bounds.gt:g}"
    if low is None:
        return ""
    return f" from {_plain(low)}" if high >= NO_BOUND else f", {_plain(low)} to {_plain(high)}"


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def default_of(field: Any) -> str:
    """Return the default of a field as TOML, in larger units as well; empty if there is none."""
    if field.required:
        return "required"
    value = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value is None or value is msgspec.UNSET or isinstance(value, msgspec.Struct):
        return ""
    if value == math.inf:
        return "none"
    return f"`{msgspec.json.encode(value).decode()}`{_in_words(field.name, value)}"


def _in_words(name: str, value: Any) -> str:
    if not isinstance(value, (int, float)):
        return ""
    for size, unit in SECONDS if name.endswith("_s") else BYTES:
        if value >= size and value % size == 0:
            return f" ({value / size:g} {unit})"
    return ""


def table(kind: Any, what: str = "key", without: Container[str] = ()) -> str:
    """Return the table of the fields of a struct; with a column of examples if it has any."""
    hints, notes = get_type_hints(kind, include_extras=True), notes_of(kind)
    examples = getattr(kind, "EXAMPLES", {})
    head = [what, "type", "default", "meaning", *(["example"] if examples else [])]
    rows = [head]
    for field in msgspec.structs.fields(kind):
        if field.name not in without:
            note = notes.get(field.name) or SHARED_OPTIONS.get(field.name, "")
            for pattern, spelled in SPELLED:
                note = re.sub(pattern, spelled, note)
            example = examples.get(field.encode_name)
            row = [f"`{field.encode_name}`", type_of(hints[field.name]), default_of(field), note]
            rows.append([*row, *([f"`{example}`" if example else ""] if examples else [])])
    lines = [f"| {' | '.join(map(_cell, row))} |\n" for row in rows]
    lines.insert(1, f"|{'---|' * len(head)}\n")
    return "".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _said(kind: type) -> str:
    """Return the docstring of a class without its line breaks."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split())


# --- files


def _job_file() -> str:
    sections = [table(JobSpec, without=BY_CLUSTER)]
    for name, kind in (("stop", StopRule), ("warn", EndWarning), ("utility", Utility)):
        sections.append(f"## `{name}`\n\n{_said(kind)}\n\n{table(kind)}")
    elastic = ", ".join(f"`{name}`" for name in ELASTIC_FIELDS if name not in BY_CLUSTER)
    return (
        "Keys of a job file, in TOML. [Job files](../jobs.md) explains them. An unknown key is an "
        "error. `ones submit job.toml --dry-run` checks a file.\n\n"
        f"Only `name` is always needed. These keys apply to elastic jobs alone: {elastic}. "
        "Programs (`kind` is not `elastic`) are called *rigid* in the table.\n\n"
        + "".join(sections)
    )


def _sweep_file() -> str:
    searchers = [
        f"### `{kind.__struct_config__.tag}`\n\n{_said(kind)}\n\n{table(kind)}"
        for kind in get_args(Searcher)
    ]
    inside = [name for name in Sweep.__struct_fields__ if name not in JOB_FIELDS]
    return (
        "Keys of a job file with a table `[sweep]`. [Sweeps](../sweeps.md) explains them.\n\n"
        f"{table(Sweep, without=inside)}"
        f"## `[sweep]`\n\n{table(Sweep, without=JOB_FIELDS)}"
        f"## `[sweep.space.NAME]`\n\n{_said(Parameter)}\n\n{table(Parameter)}"
        "## `[sweep.searcher]`\n\nThe key `type` names one of the searchers below.\n\n"
        + "".join(searchers)
    )


def _sections(
    kind: Any, path: str = "", without: Container[str] = (), seen: dict[Any, str] | None = None
) -> Iterator[str]:
    """Yield the section of a table of settings, and those of the tables inside it."""
    seen = {} if seen is None else seen
    hints = get_type_hints(kind)
    inner = {name: parts[0] for name, hint in hints.items() if (parts := list(structs_in(hint)))}
    title = f"`[[{path[:-2]}]]`" if path.endswith("[]") else f"`[{path}]`"
    yield f"## {title if path else 'Outside of tables'}\n\n"
    if kind in seen:
        yield f"The keys are those of {seen[kind]}.\n\n"
        return
    seen[kind] = title
    yield f"{_said(kind)}\n\n{table(kind, without={*inner, *BY_CLUSTER})}"
    for name, part in inner.items():
        if name not in without:
            origin = get_origin(hints[name])
            mark = ".NAME" if origin is dict else "[]" if origin is tuple else ""
            yield from _sections(part, f"{path}.{name}{mark}".removeprefix("."), seen=seen)


def _policies(page: str, names: Sequence[str]) -> str:
    parts = []
    for name in names:
        options = check_options(name, {})
        said = table(type(options), "option") if options.__struct_fields__ else "No options.\n\n"
        explained = EXPLAINED.get(name, page.removeprefix("policies-"))
        link = f"[What it does](../policies/{explained}.md#{name})"
        parts.append(f"## `{name}`\n\n{link}\n\n{said}")
    return (
        "Options of scheduling policies: the table `[policy.options]` of the controller's settings, "
        "`ones policy set`, and `--option` of `ones sim`.\n\n" + "".join(parts)
    )


# --- commands


def _commands(names: Sequence[str]) -> str:
    app, seen = build(), dict[str, list[str]]()
    parts = [part for name in names for part in _command(app[name], f"ones {name}", seen)]
    return (
        "Every command also takes `--help`. Those that talk to a cluster take `--home DIR`, its "
        "folder (default: `$ONES_HOME`, else `~/.ones`). `-o` selects `table`, `json`, `jsonl` or "
        "`quiet`.\n\n" + "".join(parts)
    )


def _command(app: App, words: str, seen: dict[str, list[str]]) -> Iterator[str]:
    """Yield the sections of a command and of its subcommands.

    `seen` has the options of the commands above on the page. Where many are the same, they are
    only named.
    """
    inner = [name for name in app.resolved_commands() if not name.startswith("-")]
    if app.default_command is not None:
        arguments = [
            one for one in app.assemble_argument_collection(parse_docstring=True) if one.name != "*"
        ]
        given = [_positional(one) for one in arguments if one.index is not None]
        options = [one for one in arguments if one.index is None and one.name not in EVERYWHERE]
        own = {one.name: one for one in reversed(options)}  # before those of a group of this name
        rows = [_option(one) for one in options if own[one.name] is one]
        said = inspect.cleandoc(app.help).partition("\nParameters\n")[0].split()
        yield f"## {' '.join([words, *given])}\n\n{' '.join(said)}\n\n"
        for other, others in seen.items():
            same = [row for row in rows if row in others]
            if len(same) >= MANY:
                names = ", ".join(row.split(" ")[1].strip("`,") for row in same)
                yield f"These options are those of `{other}`: {names}.\n\n"
                rows = [row for row in rows if row not in others]
                break
        if rows:
            yield f"| option | meaning | default |\n|---|---|---|\n{''.join(rows)}\n"
        seen[words] = rows
    for name in inner:
        yield from _command(app[name], f"{words} {name}", seen)


def _positional(argument: Any) -> str:
    name = "|".join(argument.get_choices() or [argument.name.lstrip("-").upper()])
    name = f"{name}..." if _is_list(argument) else name
    return name if argument.required else f"[{name}]"


def _kinds(argument: Any) -> tuple[Any, ...]:
    return (argument.hint, *get_args(argument.hint))


def _is_list(argument: Any) -> bool:
    return any(get_origin(kind) in {list, tuple} for kind in _kinds(argument))


def _option(argument: Any) -> str:
    default, meaning = argument.field_info.default, argument.parameter.help or ""
    off = ("--empty-",) if default is None or default is True else ("--no-", "--empty-")
    names = [name for name in argument.names if not name.startswith(off)]
    if choices := argument.get_choices():
        meaning = (
            f"{meaning.rstrip('.')}: {', '.join(f'`{choice}`' for choice in choices)}".removeprefix(
                ": "
            )
        )
    value = "" if bool in _kinds(argument) else f" {_metavar(argument)}"
    shown = "" if default is None or default is False or default in ("", ()) else f"`{default}`"
    shown = "required" if argument.required else "on" if default is True else shown
    return f"| {', '.join(f'`{name}{value}`' for name in names)} | {_cell(meaning)} | {shown} |\n"


def _metavar(argument: Any) -> str:
    found = [METAVARS[kind] for kind in _kinds(argument) if kind in METAVARS]
    word = "CHOICE" if argument.get_choices() else found[0] if found else "TEXT"
    return f"{word}..." if _is_list(argument) else word


# --- pages


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    bodies: dict[str, tuple[str, str]] = {
        "job-file": ("Job file", _job_file()),
        "sweep-file": ("Sweep file", _sweep_file()),
        "controller-settings": (
            "Settings of the controller",
            CONTROLLER + "".join(_sections(ControllerSettings, without={"sharing"})),
        ),
        "sharing-settings": (
            "Settings of sharing",
            SHARING + "".join(_sections(Sharing, "sharing")),
        ),
        "agent-settings": ("Settings of the agent", AGENT + "".join(_sections(AgentSettings))),
    }
    for name, (title, names) in POLICIES.items():
        bodies[name] = (title, _policies(name, names))
    for name, (title, names) in COMMANDS.items():
        bodies[name] = (title, _commands(names))
    return {
        name: f"{NOTICE}\n\n# {title}\n\n{body.rstrip()}\n"
        for name, (title, body) in bodies.items()
    }


def write(folder: Path = FOLDER) -> None:
    """Write all pages."""
    for name, text in pages().items():
        (folder / f"{name}.md").write_text(text, "utf-8")


if __name__ == "__main__":
    write()
