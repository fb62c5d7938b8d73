"""The pages of `docs/wire/fields/`, made of the messages and what their source says of each field.

`python -m tests.support.wire_page` writes them; a test of the gate compares them.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from schemas.codec import tag_of
from schemas.wire import Message, client, feed, files
from tests.support.schemas_examples import structs_in

FOLDER: Final = Path(__file__).parents[2] / "docs" / "wire" / "fields"
NOTICE: Final = (
    "<!-- Made by `python -m tests.support.wire_page`; edit the code, not this page. -->\n\n"
)
PAGES: Final[Mapping[str, tuple[str, str]]] = {  # title and messages by page
    "job-files": ("job files", """
        JobSpec StopRule Utility SecretEnv EndWarning ArrayElement
    """),
    "sweep-files": ("sweep files", """
        SweepSpec SearchSpec Parameter Grid RandomSearch SuccessiveHalving Hyperband Asha
        MedianStopping PopulationBased TrialSpec
    """),
    "job-requests": ("requests about jobs", """
        client.put_snapshot.1 client.submit_job.1 client.check_job.1 client.cancel_job.1
        client.resize_job.1 client.pause_job.1 client.resume_job.1 client.hold_job.1
        client.release_job.1 client.rerun_job.1 client.list_jobs.1 client.get_job.1
        client.wait_job.1 client.explain_job.1
    """),
    "job-replies": ("replies about jobs", """
        client.snapshot_stored.1 client.job_accepted.1 client.expected_start.1
        client.job_checked.1 client.job_summary.1 client.jobs.1 client.job_state.1
        client.get_usage.1 client.job_usage.1 client.usage.1
    """),
    "job-details": ("details of a job", """
        client.job_detail.3 EpochInfo EpochFacts StepTimes client.worker_info.2
        client.version_info.3 client.promise_info.1
    """),
    "decisions": ("decisions and the search", """
        client.explanation.1 client.decision.2 client.change.2 client.size.1 client.get_search.1
        client.search_info.1 PlannedJob
    """),
    "sweeps": ("sweeps", """
        client.get_sweep.1 client.sweep_detail.2 TrialInfo client.change_sweep.1
        client.sweep_changed.1 client.get_ledger.1 client.ledger.2 LedgerUnit
    """),
    "nodes": ("nodes", """
        client.list_nodes.1 client.nodes.1 client.node_info.1 client.drain_node.1
        client.undrain_node.1 client.forget_node.1 client.reserve_nodes.1 Reservation
        client.cancel_reservation.1
    """),
    "sharing": ("sharing and policy", """
        client.get_sharing.1 client.change_sharing.1 client.sharing_info.1 client.account_share.1
        Sharing Project UserShare UserLimits PriorityClass client.pause_scheduling.1
        client.get_policy.1 client.choose_policy.1 client.policy_info.1
    """),
    "cluster": ("cluster, keys, events and errors", """
        client.get_cluster.1 client.cluster.1 client.failed.1 keys.add.1 keys.list.1 keys.revoke.1
        keys.key.1 keys.keys.1 client.read_events.1 client.events_page.1 feed.event.1
    """),
    "output": ("output", """
        logs.read.1 logs.page.1 logs.piece.1 logs.hello.1 logs.chunk.1 logs.ended.1 logs.stored.1
        logs.get_snapshot.1 logs.snapshot_piece.1
    """),
    "files": ("files and states", """
        files.list.1 files.files.1 files.info.1 files.read.1 files.piece.1 files.ask_list.1
        files.ask_piece.1 files.refused.1 states.ask.1 states.piece.1 states.refused.2
    """),
}  # fmt: skip
CONVENTIONS: Final = """\
An omitted field has its default; a `required` field must be present. `nil` is that of MessagePack.
Unless stated otherwise, times are in seconds since the epoch, durations in seconds, sizes in bytes
and batches in samples. Names in the column of types are other tables. Some messages are sent
between agents and the controller only.

| page | messages and their parts |
|---|---|
"""
PLAIN: Final[Mapping[Any, str]] = {
    int: "int", float: "float", str: "text", bytes: "bytes", bool: "bool", type(None): "nil"
}  # fmt: skip
BASES: Final = {Message, client.Request, client.Reply}  # never sent themselves
FIELD: Final = re.compile(r"\| `(\w+)` \| ([^|]+) \| ([^|]+) \| (.*) \|")


class Row(NamedTuple):
    """A field as the page has it."""

    name: str
    kind: str
    default: str  # `required`, or what it is when it is left out
    meaning: str


def structs() -> Iterator[type[msgspec.Struct]]:
    """All that a client sends or gets, and all that is in it, each once."""
    seen: dict[type[msgspec.Struct], None] = {}
    for module in (client, client, feed, files, feed, files):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in BASES:
                for found in _with_parts(kind):
                    seen.setdefault(found)
    yield from seen


def _with_parts(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    yield kind
    for hint in get_type_hints(kind, include_extras=True).values():
        for inner in structs_in(hint):
            yield from _with_parts(inner)


def name_of(kind: type[msgspec.Struct]) -> str:
    """What the page calls it: its tag, or the name of its class."""
    return tag_of(kind) if issubclass(kind, Message) else kind.__name__


def rows_of(kind: type[msgspec.Struct]) -> list[Row]:
    """Its fields."""
    hints, notes = get_type_hints(kind, include_extras=True), notes_of(kind)
    return [
        Row(field.encode_name, _kind(hints[field.name]), _default(field), notes.get(field.name, ""))
        for field in msgspec.structs.fields(kind)
    ]


def _kind(hint: Any) -> str:
    hint = getattr(hint, "__supertype__", hint)
    origin, parts = get_origin(hint), get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if hint is Any:
        return "anything"
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return name_of(hint)
    if origin is typing.Annotated:
        return f"{_kind(parts[0])}{_bounds(parts[1])}"
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in {tuple, list}:
        if parts[-1] is Ellipsis or origin is list:
            return f"list of {_kind(parts[0])}"
        return f"[{', '.join(map(_kind, parts))}]"
    if origin in {dict, Mapping} or getattr(origin, "__name__", "") == "Mapping":
        return f"map of {_kind(parts[1])}"
    if origin in {typing.Union, UnionType}:
        return " or ".join(_kind(part) for part in parts if part is not msgspec.UnsetType)
    raise TypeError(hint)


def _bounds(meta: Any) -> str:
    if meta.min_length is not None and meta.min_length == meta.max_length:
        return f" of {meta.min_length}"
    if meta.ge is None:
        return ""
    return f" from {meta.ge}" if meta.le is None else f" {meta.ge} to {meta.le}"


def _default(field: Any) -> str:
    if field.required:
        return "required"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{msgspec.json.encode(field.default_factory()).decode()}`"
    if field.default is msgspec.UNSET:
        return "left out"
    if field.default == math.inf:
        return "infinity"
    return f"`{msgspec.json.encode(field.default).decode()}`"


def notes_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The comments of its source, by field; those of its bases, too."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base in {msgspec.Struct, Message} or not issubclass(base, msgspec.Struct):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        lines = source.splitlines()
        (body,) = ast.parse(source).body
        for node in getattr(body, "body", []):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = _note(lines, node)
    return found


def _note(lines: list[str], node: ast.AnnAssign) -> str:
    behind = [_comment(line) for line in lines[node.lineno - 1 : node.end_lineno]]
    before: list[str] = []
    at = node.lineno - 2
    while lines[at].strip().startswith("# ") and not lines[at].strip().startswith("# ---"):
        before.insert(0, lines[at].strip().removeprefix("# "))
        at -= 1
    return " ".join([*before, *filter(None, behind)]).replace("|", "/")


def _comment(line: str) -> str:
    _, hash_, comment = line.partition("  # ")
    return comment.strip() if hash_ else ""


def _table(kind: type[msgspec.Struct]) -> str:
    """Return what a page says of a message."""
    what = inspect.cleandoc(kind.__doc__ or "").replace("\n\n", " ").replace("\n", " ")
    config = kind.__struct_config__
    if config.tag and not issubclass(kind, Message):
        what += f" Its `{config.tag_field}` is `{config.tag}`."
    lines = [f"**{name_of(kind)}**: {what}\n"]
    if rows := rows_of(kind):
        lines.append("| field | type | left out | what |\n|---|---|---|---|")
        lines += [f"| `{row.name}` | {row.kind} | {row.default} | {row.meaning} |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """Return the text of each page by its name.

    Raises:
        KeyError: if a message of `PAGES` is not spoken.
    """
    kinds = {name_of(kind): kind for kind in structs()}
    found, rows = {}, []
    for name, (title, messages) in PAGES.items():
        tables = "\n".join(_table(kinds[message]) for message in messages.split())
        found[name] = f"{NOTICE}# Fields: {title}\n\n[Conventions](index.md)\n\n{tables}"
        listed = ", ".join(f"`{message}`" for message in messages.split())
        rows.append(f"| [{title}]({name}.md) | {listed} |\n")
    return {"index": f"{NOTICE}# Fields\n\n{CONVENTIONS}{''.join(rows)}", **found}


def written() -> dict[str, str]:
    """Return the pages of the folder by their names."""
    return {path.stem: path.read_text("utf-8") for path in FOLDER.glob("*.md")}


def tables_on_pages() -> dict[str, list[Row]]:
    """What the pages say, by the name of the message; by nothing but their text."""
    found: dict[str, list[Row]] = {}
    for text in written().values():
        for line in text.splitlines():
            if line.startswith("**"):
                rows = found.setdefault(line[2:].partition("**")[0], [])
            elif (row := FIELD.fullmatch(line)) is not None:
                rows.append(Row(*row.groups()))
    return found


def write() -> None:
    """Write all pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / f"{name}.md").write_text(text, "utf-8")


if __name__ == "__main__":
    write()
