"""What is fuzzed: a function of bytes for each, which raises where something is found."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Final, NamedTuple


class Target(NamedTuple):
    """One of them."""

    place: str  # module of `tests.fuzz.targets`, and function
    about: tuple[str, ...]  # modules whose lines it is to reach
    longest: int = 1024  # bytes of an input
    share: int = 2  # of the time, beside that of the others

    def load(self) -> Callable[[bytes], None]:
        """The function; its modules are imported now, so that a fuzzer can instrument them."""
        module, _, name = self.place.partition(":")
        found: Callable[[bytes], None] = getattr(
            importlib.import_module(f"tests.fuzz.targets.{module}"), name
        )
        return found


CORE: Final = ("controlplane.core.handlers", "controlplane.core.model", "controlplane.core.reactor")
TARGETS: Final[dict[str, Target]] = {
    "messages": Target("decoders:messages", ("schemas.codec",), share=1),
    "agent_session": Target("sessions:agent", ("schemas.session.agent_session",), share=1),
    "controller_session": Target(
        "sessions:controller", ("schemas.session.controller_session",), share=1
    ),
    "controller": Target(
        "controller:controller",
        ("controlplane.service.client_api", "controlplane.service.node_sessions",
         "controlplane.service.logs", "controlplane.service.workdir_snapshots",
         "controlplane.service.event_feed", "controlplane.service.job_files"),
        2048,
        6,
    ),
    "core_reports": Target("core:reports", CORE, 2048, 5),
    "core_sweeps": Target("core:sweeps", ("controlplane.core.handlers", "controlplane.sweeps"), 2048, 5),
    "archives": Target("archives:archives", ("schemas.workdir_archives", "nodeagent.job_workspaces"), 4096, 3),
    "stored_output": Target("logs:stored_output", ("controlplane.service.logs.log_store", "controlplane.service.logs.log_records")),
    "cursors": Target("logs:cursors", ("controlplane.service.client_api.pages",), share=1),
    "job_files": Target("settings:job_files", ("controlplane.client.jobfile", "controlplane.client.spec_overrides", "schemas.jobs", "schemas.toml_settings")),
    "sweep_files": Target("settings:sweep_files", ("controlplane.client.sweeps.sweep_file", "controlplane.client.sweeps.sweep", "controlplane.client.sweeps.searchers", "schemas.sweeps")),
    "settings_files": Target("settings:settings_files", ("schemas.toml_settings", "controlplane.service.controller_settings", "nodeagent.agent_settings")),
    "key_files": Target("settings:key_files", ("schemas.link.key_files",), share=1),
    "worker_folders": Target("node:worker_folders", ("nodeagent.worker_folders",), 2048, 1),
    "zygotes": Target("node:zygotes", ("nodeagent.zygote_pool",), share=1),
    "files_of_jobs": Target("node:job_files", ("nodeagent.job_files",), share=1),
    "state_files": Target("states:state_files", ("schemas.state_files",), share=1),
    "fetched_states": Target("states:fetched_states", ("schemas.link.state_client", "schemas.link.state_targets"), share=1),
    "journal_rows": Target("journal:rows", ("controlplane.journal.record", "controlplane.journal.state_image"), share=1),
    "journal_files": Target("journal:files", ("controlplane.journal.reader", "controlplane.journal.replay", "controlplane.journal.row_checks")),
    "terminal": Target("texts:terminal", ("controlplane.cli.terminal",), 256, 1),
}  # fmt: skip
