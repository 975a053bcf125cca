"""What the tasks of tasks.json hold, beside the paper's Table 2. Run by hand, where the Hub can be
reached.

    python tests/check_tasks.py                    # all of tasks.json
    python tests/check_tasks.py --tasks all mine   # the paper's 25, and yours

A line for each source, up to the first that loads: rows, classes, 25th and 75th percentile of the
lengths in characters, the paper's, the source. The exit status is 2 if one is there and wrong.
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
        paper = [name for name, spec in tasks.items()
                 if spec.get("paper", "length_percentiles" in spec)]
        names = [*paper, *[name for name in names if name != "all"]]
    status = 0
    for name in names:
        for source in tasks[name]["sources"]:
            place = [*source.values()][0]
            try:
                task = run.read_task(tasks[name], source)
            except ValueError as error:
                print(f"{name:<32} WRONG: {place}: {run.brief(error)}")
                status = 2
                continue
            except Exception as error:
                print(f"{name:<32} not available here: {place}: {run.brief(error)}")
                continue
            if faults(task):
                place = f"{place}; WRONG: {'; '.join(faults(task))}"
                status = 2
            lengths = percentiles(task)
            paper = task.spec.get("length_percentiles", lengths)
            pairs = ["{}-{}".format(*pair) for pair in (lengths, paper)]
            print(LINE.format(name, len(task.texts), len(task.classes), *pairs, place))
            break
    return status


if __name__ == "__main__":
    sys.exit(main())
