"""`python -P -m elastic.launch SCRIPT ARGS` runs a script stand-alone as a worker would run it.

With `-P` no file of the user's can hide a module of ours before ours are imported.
"""

from __future__ import annotations

from elastic.worker.run_script import main

if __name__ == "__main__":
    main()
