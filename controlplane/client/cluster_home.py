"""Where a cluster is and who we are there: the folder that ONES_HOME names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from schemas import toml_settings
from schemas.errors import SettingsError

DEFAULT = ".ones"
FILE = "client.toml"
CONTROLLER = "controller.toml"  # in the folder of `ones local up`


class _ClientFile(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: str  # tcp://HOST:PORT of the client port
    server_key: str = "keys/server.key"
    key: str = "keys/admin.key_secret"


@dataclass(frozen=True, slots=True)
class Home:
    """How to reach one cluster."""

    folder: Path
    endpoint: str
    server_key: Path
    key: Path

    @property
    def host(self) -> str:
        """The controller's address."""
        return self.endpoint.removeprefix("tcp://").rpartition(":")[0]

    @property
    def remedy(self) -> str:
        """What to do when nobody answers there."""
        if (self.folder / CONTROLLER).is_file():
            return f"`ones local up --dir {self.folder}` starts it"
        return "is the controller up, and its port open from here?"


def home_folder(folder: Path | str | None = None) -> Path:
    """Return `folder`, else $ONES_HOME, else ~/.ones, whether or not a cluster is there."""
    return Path(folder or os.environ.get("ONES_HOME") or Path.home() / DEFAULT).expanduser()


def find_home(folder: Path | str | None = None) -> Home:
    """The cluster in `folder`, else in $ONES_HOME, else in ~/.ones.

    Args:
        folder: may begin with `~`; None: $ONES_HOME decides.

    Raises:
        SettingsError: if there is none.
    """
    chosen = home_folder(folder)
    path = chosen / FILE
    if not path.is_file():
        hint = f"set ONES_HOME or --home, or start one with `ones local up --dir {chosen}`"
        raise SettingsError(f"no cluster in {chosen}", hint, "ONES_HOME")
    loaded = toml_settings.load(_ClientFile, path)
    return Home(chosen, loaded.endpoint, chosen / loaded.server_key, chosen / loaded.key)
