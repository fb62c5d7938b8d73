"""Shell script that runs the agent of one machine, for every engine."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

SCRIPT: Final = """\
{head}umask 022  # users of jobs pass through the folders; what is private has its own mode
node={prefix}-$machine
run=${{TMPDIR:-/tmp}}/{name}-$UID-$machine  # short, for the paths of Unix sockets
mkdir -p -m 711 "$run" && [ -O "$run" ] || {{ echo "$run belongs to another user" >&2; exit 1; }}
export ONES__NODE=$node ONES__RUN=$run/run ONES__WORK={home}/state/work/$node
export ONES__ADDRESS=$address ONES__KEY=$run/keys/$node.key_secret
export ONES__SLOTS=$slots ONES__CORES=$cores
export ONES__NOTICE__FILE=$run/end-of-time-limit ONES__CONTROLLER__KEY=$run/keys/server.key
agent=({python} -P -m nodeagent --config {home}/autoscaler-agent.toml)
"${{agent[@]}}" --end-workers > "$run/ended" 2>&1  # of an earlier job that was killed
rm -rf "$run/run" "$run/keys" "$run/end-of-time-limit"
{python} -P -m controlplane.cli.main key add "$node" --role node --home {home}/join --out "$run" \\
  || exit 1
{before}"${{agent[@]}}" & child=$!
{after}while kill -0 $child 2> "$run/ended"; do wait $child; done
"${{agent[@]}}" --end-workers > "$run/ended" 2>&1
rm -rf "$run"
"""


def machine_script(
    head: str, *, before: str = "", after: str = "", prefix: str, name: str, home: Path, python: str
) -> str:
    """Return the script.

    Args:
        head: sets `machine`, `address`, `slots` and `cores`.
        before: commands before the start of the agent.
        after: commands after the start of the agent, whose process is `$child`.
        prefix: node names are PREFIX-MACHINE.
        name: name of the cluster at its engine.
        home: folder of the cluster.
        python: interpreter of the agent.
    """
    return SCRIPT.format(
        head=head, before=before, after=after, prefix=prefix, name=name,
        home=shlex.quote(str(home)), python=shlex.quote(python),
    )  # fmt: skip
