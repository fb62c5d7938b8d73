"""Stand-alone run of a script as in a worker: `python -P -m elastic.launch SCRIPT ARGS`.

With `-P`, the user's files cannot shadow modules of the library that are not imported yet.
"""

from __future__ import annotations

from elastic.worker.run_script import main

if __name__ == "__main__":
    main()
