"""`python -m gbfunc`: the command line."""

from __future__ import annotations

from gbfunc.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
