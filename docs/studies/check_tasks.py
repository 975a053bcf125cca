"""Compares the tasks of tasks.json with the paper's Table 2, where the Hub can be reached.

    python docs/studies/check_tasks.py [--tasks NAME ...]

Prints for each source, up to the first that loads: rows, classes, 25th and 75th percentile of the
lengths in characters. The exit status is 2 if a source loads and is wrong.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import run_experiment as run


def faults(task, lengths):
    """What differs from the entry."""
    spec, paper = task.spec, np.array(task.spec.get("length_percentiles", lengths))
    if np.any(np.abs(lengths - paper) > np.maximum(5, 0.25 * paper)):
        yield f"{paper} characters"
    rows = spec.get("rows", len(task.texts))
    if "filters" not in spec and not 0.98 * rows <= len(task.texts) <= rows:  # some are unlabeled
        yield f"{spec['rows']} rows"
    if len(set(task.classes)) != task.labels.max() + 1:
        yield "other classes"
    if task.data_hash != spec.get("data", task.data_hash):
        yield "other texts, labels or order"


@run.errors_on_one_line()
def main(argv=None):
    registered, status = run.load_registry()["tasks"], 0
    for name in run.parse_args(argv).tasks or registered:
        spec = registered[name]
        for source in spec["sources"]:
            place = [*source.values()][0]
            try:
                task = run.read_task(name, spec, source)
            except Exception as error:
                print(name, "not available here:", place, run.brief(error))
                if isinstance(error, ValueError):
                    print("  WRONG: the entry does not fit the data")
                    status = 2
                continue
            lengths = np.percentile([len(text) for text in task.texts], [25, 75]).round()
            print(name, len(task.texts), len(task.classes), lengths, place)
            for fault in faults(task, lengths):
                print(f"  WRONG: expected {fault}")
                status = 2
            break
    return status


if __name__ == "__main__":
    sys.exit(main())
