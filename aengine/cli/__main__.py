"""`python -m aengine.cli`: the same as the console script, for a checkout whose scripts point elsewhere.

Owns: nothing. Does not know: any command. Invariants: none of its own.
"""

from aengine.cli.main import main

raise SystemExit(main())
