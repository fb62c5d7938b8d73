"""The notebook of the examples, cell by cell, in an event loop that runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests.support.cluster import Cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK: dict[str, Any] = json.loads((EXAMPLES / "notebook.ipynb").read_text())
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
async def test_the_notebook_runs_from_top_to_bottom(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ONES_HOME", str(cluster.home))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.chdir(EXAMPLES)
    shell = InteractiveShell()
    shell.history_manager.enabled = False
    for cell in CELLS:
        source = "".join(cell["source"])
        done = await shell.run_cell_async(source, transformed_cell=shell.transform_cell(source))
        done.raise_error()

    jobs = {one.job: one.state for one in shell.user_ns["_"]}
    assert jobs[shell.user_ns["job"]] == "succeeded"


def test_the_notebook_is_kept_without_outputs() -> None:
    assert [(cell["outputs"], cell["execution_count"]) for cell in CELLS] == [([], None)] * len(
        CELLS
    )
