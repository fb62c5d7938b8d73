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
        return getattr(importlib.import_module(f"tests.fuzz.targets.{module}"), name)


CORE: Final = ("controlplane.core.handlers", "controlplane.core.model", "controlplane.core.reactor")
TARGETS: Final[dict[str, Target]] = {
    "messages": Target("decoders:messages", ("schemas.codec",), share=1),
    "agent_session": Target("sessions:agent", ("schemas.session",), share=1),
    "controller_session": Target("sessions:controller", ("schemas.session",), share=1),
    "controller": Target(
        "controller:controller",
        ("controlplane.service.api", "controlplane.service.node_sessions",
         "controlplane.service.relay.log_relay", "controlplane.service.uploads",
         "controlplane.service.event_feed", "controlplane.service.relay.job_files"),
        2048,
        6,
    ),
    "ports": Target(
        "ports:ports",
        ("schemas.transport.sockets", "schemas.transport.flood_guard",
         "schemas.transport.connection_limits", "schemas.host.metrics_server", "nodeagent.connections"),
        1024,
        4,
    ),
    "core_reports": Target("core:reports", CORE, 2048, 5),
    "core_sweeps": Target("core:sweeps", ("controlplane.core.handlers", "controlplane.sweeps"), 2048, 5),
    "archives": Target("archives:archives", ("schemas.host.archives", "nodeagent.job_folders"), 4096, 3),
    "stored_output": Target("logs:stored_output", ("controlplane.service.relay.log_store",)),
    "cursors": Target("logs:cursors", ("controlplane.service.api.views",), share=1),
    "job_files": Target("settings:job_files", ("controlplane.client.job_file", "controlplane.client.spec_overrides", "schemas.jobs", "schemas.host.settings")),
    "sweep_files": Target("settings:sweep_files", ("controlplane.client.job_file", "controlplane.client.sweeps.sweep", "schemas.sweeps")),
    "settings_files": Target("settings:settings_files", ("schemas.host.settings", "controlplane.service.settings", "nodeagent.settings")),
    "key_files": Target("settings:key_files", ("schemas.transport.keys",), share=1),
    "worker_folders": Target("node:worker_folders", ("nodeagent.folders",), 2048, 1),
    "zygotes": Target("node:zygotes", ("nodeagent.zygotes",), share=1),
    "files_of_jobs": Target("node:job_files", ("nodeagent.job_folders",), share=1),
    "state_files": Target("states:state_files", ("schemas.host.state_files",), share=1),
    "fetched_states": Target("states:fetched_states", ("schemas.transport.state_transfer",), share=1),
    "journal_rows": Target("journal:rows", ("controlplane.journal.database", "controlplane.journal.snapshots"), share=1),
    "journal_files": Target("journal:files", ("controlplane.journal.reader", "controlplane.journal.replay", "controlplane.journal.database")),
    "terminal": Target("texts:terminal", ("controlplane.cli.terminal",), 256, 1),
}  # fmt: skip
