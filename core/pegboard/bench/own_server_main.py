"""`python -m pegboard.bench.own_server_main PARENT ...`: `serve ...`, which ends with its parent.

The parent holds the other end of this process's standard input.
"""

from __future__ import annotations

import sys

from pegboard.cli import serve_main
from pegboard.lifeline import end_with_parent

if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    sys.exit(serve_main(sys.argv[2:]))
