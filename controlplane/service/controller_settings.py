"""Controller settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from schemas import toml_settings


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    """Where the controller listens; every socket asks for a key."""

    host: str = "127.0.0.1"
    events: int = 7700
    agents: int = 7701
    clients: int = 7702
    feed: int = 7703
    shippers: int = 7704
    followers: int = 7705
    metrics: int = 9464  # HTTP, for Prometheus; 0: none


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """Key files, relative to the settings file."""

    server: str = "keys/server.key_secret"
    authorised: str = "keys/authorised.toml"


class PolicyChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which policy decides."""

    name: str = "ones"
    options: dict[str, Any] = {}  # its own; see the policy's page


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """When a silent node is suspect and when it is lost, in seconds."""

    suspect_s: float = 6.0
    lost_s: float = 30.0


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of what is kept."""

    log_bytes_per_job: int = 1 << 30
    snapshot_bytes: int = 512 << 20


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's TOML file."""

    state: str = "state"  # journal, logs and snapshots, relative to the settings file
    pid_file: str = ""
    listen: Listen = Listen()
    keys: Keys = Keys()
    policy: PolicyChoice = PolicyChoice()
    silence: Silence = Silence()
    store: Store = Store()


def load(path: Path) -> ControllerSettings:
    """The settings in `path`, overridden by `ONES__SECTION__KEY` variables.

    Args:
        path: of a TOML file.

    Raises:
        SettingsError: if the file cannot be read, a key is unknown or a value of the wrong type.
    """
    return toml_settings.load(ControllerSettings, path, os.environ)
