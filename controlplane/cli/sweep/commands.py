"""The commands of `ones sweep`."""

from __future__ import annotations

from cyclopts import App

from controlplane.cli.sweep import changes, export, list_and_show, manifest, preview, sample, submit

sweep = App(name="sweep", help="Train many configurations of one model, and keep the best.")
for command in (
    submit.submit,
    preview.preview,
    list_and_show.ls,
    list_and_show.show,
    list_and_show.best,
    changes.stop,
    changes.pause,
    changes.resume,
    changes.delete,
    changes.clone,
    changes.add,
    sample.sample,
    export.export,
    manifest.manifest,
    manifest.replay,
):
    sweep.command(command)
sweep.command(
    "controlplane.cli.sweep.top:top",
    name="top",
    help="Show a sweep as it trains, every second until Ctrl-C.",
)
sweep.command(
    "controlplane.cli.sweep.plot:plot",
    name="plot",
    help="Draw the learning curves of a sweep into a PNG file.",
)
