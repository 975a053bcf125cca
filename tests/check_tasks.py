"""What the tasks of tasks.json hold, beside the paper's Table 2. Run by hand, where the Hub can be
reached.

    python tests/check_tasks.py                    # all of tasks.json
    python tests/check_tasks.py --tasks all mine   # the paper's 25, and yours

A line a task: rows, classes, 25th and 75th percentile of the lengths in characters, the paper's,
the source. Exit status 2 if one that can be reached is wrong.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import run_experiment as run

LINE = "{:<32} {:>8} {:>3} {:>12} {:>12}  {}"


def percentiles(task):
    lengths = [len(text) for text in task.texts]
    return np.percentile(lengths, [25, 75]).round().astype(int)


def faults(task):
    """What differs from the entry."""
    spec, found = task.spec, []
    lengths = percentiles(task)
    paper = np.array(spec.get("length_percentiles", lengths))
    if np.any(np.abs(lengths - paper) > np.maximum(5, 0.25 * paper)):
        found.append("lengths")
    if "filters" not in spec and len(task.texts) != spec.get("rows", len(task.texts)):
        found.append(f"{spec['rows']} rows expected")
    if len(set(task.classes)) != task.labels.max() + 1:
        found.append(f"classes {task.classes}")
    if task.data != spec.get("data", task.data):
        found.append(f"data {task.data}, {spec['data']} expected: other texts, labels or order")
    return found


def main(argv=None):
    tasks = run.load_registry()["tasks"]
    names = run.parse_args(argv).tasks or [*tasks]
    if "all" in names:
        paper = [name for name in tasks if tasks[name].get("paper", True)]
        names = [*paper, *[name for name in names if name != "all"]]
    status = 0
    print(LINE.format("task", "rows", "K", "characters", "Table 2", "source"))
    for name in names:
        try:
            task = run.load_task(name, tasks[name])
        except SystemExit as end:
            what = "not available here"
            if "cannot be had" not in end.code or "ValueError" in end.code:
                what, status = "WRONG", 2
            print(f"{name:<32} {what}: {end.code}")
            continue
        note = task.source
        if faults(task):
            note += f"; WRONG: {'; '.join(faults(task))}"
            status = 2
        lengths = percentiles(task)
        pairs = ["{}-{}".format(*pair) for pair in
                 (lengths, task.spec.get("length_percentiles", lengths))]
        print(LINE.format(name, len(task.texts), len(task.classes), *pairs, note))
    return status


if __name__ == "__main__":
    sys.exit(main())
