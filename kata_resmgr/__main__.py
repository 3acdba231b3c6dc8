"""``python -m kata_resmgr`` is ``kata-resmgr``."""

from __future__ import annotations

import sys

from kata_resmgr.cli import main

if __name__ == "__main__":
    sys.exit(main())
