"""Stand-alone run of a script as a worker would run it: `python -P -m elastic.launch SCRIPT ARGS`.

With `-P`, files of the user cannot shadow the library's modules before these are imported.
"""

from __future__ import annotations

from elastic.worker.run_script import main

if __name__ == "__main__":
    main()
