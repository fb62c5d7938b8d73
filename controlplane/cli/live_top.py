"""Full-screen `ones top`: jobs, slots, and the curves, decisions and output of one job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import (
    DataTable,
    Footer,
    Input,
    Label,
    RichLog,
    Sparkline,
    Static,
    TabbedContent,
    TabPane,
)

from controlplane.cli import job_list
from controlplane.cli.output import ABSENT_AFTER_S, ABSENT_NOTE, STYLES
from controlplane.cli.terminal import harmless
from controlplane.cli.top import ClusterStatus, StatusReader, header, slot_strips
from controlplane.client import BlockingClient
from controlplane.client.allocations import job_colour
from controlplane.client.formats import second, span
from controlplane.client.streams import OutputLine
from schemas.errors import OnesError, UnavailableError, UnreachableError
from schemas.ids import JobId
from schemas.jobs import ENDED
from schemas.wire.client import Explanation, JobDetail, JobSummary

T = TypeVar("T")
REFRESH_S: Final = 1.0
LAST_LINES: Final = 500  # of the output of a job
BAR: Final = 5  # columns of a bar of progress
ORDERS: Final[Mapping[str, Callable[[JobSummary], Any]]] = {  # by which the table can be sorted
    "submission": lambda job: job.submitted_at,
    "state": lambda job: (job.state, job.submitted_at),
    "user": lambda job: (job.user, job.submitted_at),
    "slots": lambda job: (-job.slots, job.submitted_at),
    "progress": lambda job: -(job.progress or 0.0),
    "end": lambda job: remaining_s(job) or float("inf"),
}
COLUMNS: Final = (  # by precedence: the last ones are left out of narrow terminals
    "job", "state", "done", "slots", "batch", "end in", "user", "uses", "why", "samples/s", "loss",
    "lr",
)  # fmt: skip
WIDEST: Final = {"job": 20, "user": 12, "uses": 12}  # longer texts are cut
REASON_WIDTH: Final = 24  # columns, at least
PADDING: Final = 2  # columns around a cell


def remaining_s(job: JobSummary) -> float | None:
    """Return the expected time until the end of a job, or None if it is not known.

    Without a forecast of the policy, the job goes on as fast as it was on average.
    """
    if job.state in ENDED:
        return None
    if job.expected_end is not None:
        return max(0.0, job.expected_end - time.time())
    if not job.progress or not job.slots:
        return None
    return job.running_s * (1.0 - job.progress) / job.progress


def cells_of(job: JobSummary, colour: int) -> dict[str, Text]:
    """Return the cells of a job by column."""
    left_s, start = remaining_s(job), job_list.start_in_words(job)
    ends = "" if left_s is None else span(left_s)
    if job.progress is not None:
        full = round(BAR * job.progress)
        done = f"{'█' * full}{'░' * (BAR - full)} {job.progress:.0%}"
    else:
        done = f"epoch {job.epoch}" if job.epoch else ""
    share = "" if job.gpu_share is None else f"GPU {job.gpu_share:.0%}"
    used = f"{job.cpu_cores:.1f} cpu" if job.cpu_cores is not None else ""
    return {
        "job": Text(job.job, style=job_colour(colour)),
        "user": Text(harmless(job.user)),
        "state": Text(job.state, style=STYLES.get(job.state, "")),
        "done": Text(done),
        "end in": Text(f"starts {start}" if start else ends, justify="right"),
        "uses": Text(share or used),
        **{
            name: Text(job_list.COLUMNS[name](job), justify="right")
            for name in ("slots", "batch", "samples/s", "loss", "lr")
        },
        "why": Text(harmless(job.reason)),
    }


def widths_for(rows: Sequence[Mapping[str, Text]], width: int) -> dict[str, int]:
    """Return the columns that fit into `width`, with their widths; the reason has what is left."""
    left, found = width, dict[str, int]()
    for name in COLUMNS:
        longest = max([len(name), *(row[name].cell_len for row in rows)])
        wide = REASON_WIDTH if name == "why" else min(longest, WIDEST.get(name, longest))
        if wide + PADDING > left:
            break
        left -= wide + PADDING
        found[name] = wide
    if "why" in found:
        found["why"] = found.pop("why") + left
    return found


class Prompt(ModalScreen[str | None]):
    """Question with one line for the answer."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss_none", "Back")]

    def __init__(self, question: str, begin: str = "") -> None:
        super().__init__()
        self._question, self._begin = question, begin

    def compose(self) -> ComposeResult:
        """Show the question above its line."""
        with Vertical(classes="box"):
            yield Label(self._question)
            yield Input(self._begin)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Return the answer."""
        self.dismiss(event.value)

    def action_dismiss_none(self) -> None:
        """Return no answer."""
        self.dismiss(None)


OF_TABLE: Final = frozenset({"open", "order", "filter"})
ACTIONS: Final[list[BindingType]] = [
    Binding("p", "change('pause')", "Pause"),
    Binding("r", "change('resume')", "Resume"),
    Binding("s", "resize", "Slots"),
    Binding("c", "cancel", "Cancel"),
]


class LiveTop(App[None]):
    """Full-screen view of a cluster; all requests run in one thread of its own."""

    TITLE = "ones top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: auto; max-height: 3; padding: 0 1; }
    #jobs { height: 1fr; }
    #why { height: auto; max-height: 3; min-height: 1; padding: 0 1; }
    #slots { height: auto; max-height: 40%; padding: 0 1; }
    #filter { display: none; border: none; height: 1; background: $surface; }
    #filter.shown { display: block; }
    Prompt { align: center middle; }
    .box { width: 60; max-width: 90%; height: auto; border: round $primary; padding: 0 1; }
    .curve { height: 3; padding: 0 1; }
    .curve Label { width: 34; height: 3; }
    .curve Sparkline { height: 3; }
    #about { height: auto; max-height: 5; padding: 0 1; overflow: hidden; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("enter", "open", "Open", show=True, priority=False),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("o", "order", "Order"),
        *ACTIONS,
    ]

    def __init__(self, connect: Callable[[], BlockingClient], *, ended: bool = False) -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(1, "requests")
        self._connect, self._ended = connect, ended
        self._client: BlockingClient | None = None
        self._reader: StatusReader | None = None
        self.status: ClusterStatus | None = None
        self._order = "submission"
        self._wanted = ""  # text of the filter
        self._head, self._why, self._slots = (Static(id=name) for name in ("head", "why", "slots"))
        self._filter = Input(id="filter", placeholder="words that a row must have")
        self._table = DataTable[Text](id="jobs", cursor_type="row", zebra_stripes=True)

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        yield from (self._head, self._filter, self._table, self._why, self._slots, Footer())

    def on_mount(self) -> None:
        """Begin to read."""
        self._table.focus()
        self.run_worker(self._follow(), exclusive=True)

    async def on_unmount(self) -> None:
        """Close the connection."""
        if self._client is not None:
            await self.in_thread(self._client.close)
        self._thread.shutdown(wait=False)

    async def in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking call in the thread of the requests."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    async def ask(self, call: Callable[[BlockingClient], T]) -> T:
        """Return what `call` returns with the client.

        Raises:
            OnesError: the controller's error, or that it does not reply.
        """
        if self._client is None:
            raise UnreachableError(ABSENT_NOTE)
        return await self.in_thread(call, self._client)

    def _open(self) -> StatusReader:
        self._client = self._connect()
        return StatusReader(self._client, ended=self._ended)

    async def _follow(self) -> None:
        note = ""
        while True:
            try:
                if self._reader is None:
                    self._reader = await self.in_thread(self._open)
                self.status, note = await self.in_thread(self._reader.read), ""
            except (UnreachableError, UnavailableError):
                note = ABSENT_NOTE
            except OnesError as error:
                self.exit(return_code=1, message=f"ones: {error}")
                return
            self.show(note)
            await asyncio.sleep(REFRESH_S)

    def show(self, note: str = "") -> None:
        """Draw the present status."""
        if self.status is None:
            self._head.update(Text(note or "connecting ..."))
            return
        line = header(self.status)
        if self._order != "submission":
            line.append(f"   by {self._order}", style="dim")
        if note:
            line.append(f"   {note}", style="bold red")
        self._head.update(line)
        self._slots.update(Group(slot_strips(self.status)))
        self._show_jobs(self.status)

    def _show_jobs(self, status: ClusterStatus) -> None:
        table = self._table
        words = self._wanted.lower().split()
        rows: dict[str, dict[str, Text]] = {}
        for job in sorted(status.jobs, key=ORDERS[self._order]):
            cells = cells_of(job, status.colours[job.job])
            text = " ".join(cell.plain for cell in cells.values()).lower()
            if all(word in text for word in words):
                rows[job.job] = cells
        chosen, place = self.chosen, table.cursor_row
        table.clear(columns=True)
        widths = widths_for(list(rows.values()), table.size.width or self.size.width)
        for name, wide in widths.items():
            table.add_column(name, key=name, width=wide)
        for key, row in rows.items():
            table.add_row(*(row[name] for name in widths), key=key)
        keys = list(rows)
        if keys:
            at = keys.index(chosen) if chosen in keys else min(place, len(keys) - 1)
            table.move_cursor(row=at, animate=False)
            self._show_reason()

    def _show_reason(self) -> None:
        """Show the whole reason of the job under the cursor."""
        jobs = self.status.jobs if self.status else ()
        why = next((job.reason for job in jobs if job.job == self.chosen), "")
        self._why.update(Text(harmless(why), style="italic"))

    def on_data_table_row_highlighted(self) -> None:
        """Follow the cursor."""
        self._show_reason()

    @property
    def chosen(self) -> JobId | None:
        """Job under the cursor."""
        table = self._table
        if not table.row_count:
            return None
        key = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
        return None if key is None else JobId(key)

    def on_data_table_row_selected(self) -> None:
        """Open the job under the cursor."""
        self.action_open()

    def action_open(self) -> None:
        """Show one job."""
        if (job := self.chosen) is not None:
            self.push_screen(JobScreen(job))

    def action_order(self) -> None:
        """Sort by the next column."""
        orders = list(ORDERS)
        self._order = orders[(orders.index(self._order) + 1) % len(orders)]
        self.show()

    def action_filter(self) -> None:
        """Show the line for a filter."""
        self._filter.add_class("shown")
        self._filter.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Apply the filter while it is typed."""
        if event.input.id == "filter":
            self._wanted = event.value
            self.show()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Go back to the table; an empty filter is hidden."""
        if event.input.id == "filter":
            event.input.set_class(bool(event.value), "shown")
            self._table.focus()

    # --- actions

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide keys of the table while one job is shown."""
        return not (action in OF_TABLE and isinstance(self.screen, JobScreen))

    @property
    def target(self) -> JobId | None:
        """Job that the keys change."""
        return self.screen.job if isinstance(self.screen, JobScreen) else self.chosen

    def action_change(self, name: str) -> None:
        """Pause or resume the job."""
        if (job := self.target) is not None:
            self.change(f"{name} {job}", lambda client: getattr(client, name)(job))

    def change(self, said: str, call: Callable[[BlockingClient], Any]) -> None:
        """Send a change; show what became of it."""

        async def send() -> None:
            try:
                await self.ask(call)
            except OnesError as error:
                self.notify(harmless(str(error)), severity="error", markup=False)
            else:
                self.notify(said, markup=False)

        self.run_worker(send())

    def action_resize(self) -> None:
        """Ask for a number of slots."""
        job = self.target
        if job is None:
            return

        def resize(answer: str | None) -> None:
            if answer is None:
                return
            if answer.strip() == "auto":
                self.change(f"{job}: left to the policy", lambda one: one.resume(job, auto=True))
            elif answer.strip().isdecimal():
                count = int(answer)
                self.change(f"{job}: {count} slots", lambda one: one.resize(job, slots=count))
            else:
                self.notify("write a number of slots, or auto", severity="error")

        self.push_screen(Prompt(f"Slots of {job} (a number, or auto):"), resize)

    def action_cancel(self) -> None:
        """Ask before a job is cancelled."""
        job = self.target

        def cancel(answer: str | None) -> None:
            if job is not None and answer is not None and answer.strip() == "yes":
                self.change(f"{job} is cancelled", lambda client: client.cancel(job))

        if job is not None:
            self.push_screen(Prompt(f"Cancel {job}? Write yes:"), cancel)


class JobScreen(Screen[None]):
    """Curves, decisions and output of one job."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "app.pop_screen", "Back"),
        Binding("slash", "search", "Search", key_display="/"),
        *ACTIONS,
    ]
    app: LiveTop

    def __init__(self, job: JobId) -> None:
        super().__init__()
        self.job = job
        self._about, self._tabs = Static(id="about"), TabbedContent()
        self._panel = VerticalScroll()
        self._decisions, self._log = RichLog(wrap=True), RichLog(wrap=True)
        self._lines: list[OutputLine] = []
        self._wanted = ""

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        yield self._about
        with self._tabs:
            with TabPane("Curves"):
                yield self._panel
            with TabPane("Decisions"):
                yield self._decisions
            with TabPane("Output", id="output"):
                yield self._log
        yield Footer()

    def on_mount(self) -> None:
        """Begin to read."""
        self.run_worker(self._follow(), exclusive=True)

    async def _follow(self) -> None:
        seen: object = None
        while True:
            try:
                detail, explained, lines = await self.app.ask(self._read)
            except OnesError as error:
                shown = Text(harmless(str(error)), style="red")
            else:
                shown = about(detail)
                if not self.is_attached:  # it was closed meanwhile
                    return
                if (news := (len(detail.epochs), len(explained.decisions))) != seen:
                    seen = news
                    self._show_decisions(explained)
                    await self._show_curves(detail)
                self._show_output(lines)
            if not self.is_attached:
                return
            self._about.update(shown)
            await asyncio.sleep(REFRESH_S)

    def _read(self, client: BlockingClient) -> tuple[JobDetail, Explanation, list[OutputLine]]:
        return client.job(self.job), client.explain(self.job), self._output(client)

    def _output(self, client: BlockingClient) -> list[OutputLine]:
        pages = client.output_pages(self.job, follow=False, last=LAST_LINES, matching=self._wanted)
        return [line for page in pages for line in page]

    async def _show_curves(self, detail: JobDetail) -> None:
        panel = self._panel
        await panel.remove_children()
        for name, values in curves(detail).items():
            label = f"{name}\n{values[-1]:,.6g} now\n{min(values):,.6g} to {max(values):,.6g}"
            if not panel.is_attached:
                return
            await panel.mount(Horizontal(Label(label), Sparkline(values), classes="curve"))

    def _show_decisions(self, explained: Explanation) -> None:
        log = self._decisions
        log.clear()
        for one in reversed(explained.decisions):
            size = f"{len(one.before.slots)} to {len(one.to.slots)} slots, batch {one.to.batch}"
            log.write(Text(f"{second(one.time)}  {size}: {harmless(one.reason)}"))

    def _show_output(self, lines: Sequence[OutputLine]) -> None:
        if lines == self._lines:
            return
        self._lines = list(lines)
        log = self._log
        log.clear()
        for line in lines:
            log.write(Text(f"{'' if line.rank is None else line.rank}  {harmless(line.text)}"))

    def action_search(self) -> None:
        """Ask for a pattern that the lines of the output must have."""

        def search(answer: str | None) -> None:
            if answer is not None:
                self._wanted = answer
                self._tabs.active = "output"

        self.app.push_screen(Prompt("Output with (regular expression):", self._wanted), search)


def about(detail: JobDetail) -> Text:
    """Return a few lines about a job."""
    job = detail.summary
    left_s = remaining_s(job)
    facts = [
        f"{job.slots} slot{'s' * (job.slots != 1)}",
        f"batch {job.global_batch}" if job.global_batch else "",
        f"epoch {job.epoch}", "" if job.progress is None else f"{job.progress:.0%} done",
        "" if left_s is None else f"ends in {span(left_s)}", f"ran {span(job.running_s)}",
        f"{job.rescales} re-scales", job_list.use_in_words(job),
    ]  # fmt: skip
    state = (job.state, STYLES.get(job.state, ""))
    first = Text.assemble((f"{job.job}  ", "bold"), state, f"  {harmless(job.reason)}\n")
    return first.append(", ".join(filter(None, facts)), style="dim")


def curves(detail: JobDetail) -> dict[str, list[float]]:
    """Return the values of each curve of a job, one for each epoch."""
    epochs = detail.epochs
    found: dict[str, list[float]] = {
        "batch size": [float(one.global_batch) for one in epochs],
        "slots": [float(one.slots) for one in epochs],
        "loss": [one.train_loss for one in epochs if one.train_loss is not None],
        "learning rate": [one.lr for one in epochs if one.lr is not None],
        "samples/s": [one.samples_per_s for one in epochs],
    }
    for name in sorted({name for one in epochs for name in one.metrics}):
        found[name] = [one.metrics[name] for one in epochs if name in one.metrics]
    return {name: values for name, values in found.items() if values}


def run(home: Path | None, *, ended: bool) -> int:
    """Show the cluster until the user quits; return the exit code."""
    app = LiveTop(lambda: BlockingClient(home, ABSENT_AFTER_S), ended=ended)
    app.run()
    return app.return_code or 0
