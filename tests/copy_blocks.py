"""Copy a shared block of one script into all others that have it.

    python tests/copy_blocks.py run_experiment.py effects
"""

import re
import sys
from pathlib import Path

source, name = Path(sys.argv[1]), sys.argv[2]
pattern = rf"^# --- shared: {name} ---\n.*?^# --- end shared ---\n"
block = re.compile(pattern, re.DOTALL | re.MULTILINE)
found = block.search(source.read_text(encoding="utf-8"))
if not found:
    sys.exit(f"error: {source} has no block {name}")
for path in sorted(source.resolve().parent.glob("*.py")):
    text = path.read_text(encoding="utf-8")
    path.write_text(block.sub(lambda _: found[0], text), encoding="utf-8")
