"""What the tasks of tasks.json hold, beside the paper's Table 2. Run by hand, where the Hub can be reached.

    python tests/check_tasks.py                    # all of tasks.json
    python tests/check_tasks.py --tasks all mine   # the paper's 25, and yours

A line a task: rows, classes, 25th and 75th percentile of the lengths in characters, the paper's, the source. Exit status 2
if one that can be loaded is wrong.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import run_experiment as run

LINE = "{:<32} {:>8} {:>3} {:>12} {:>12}  {}"


def main(argv=None):
    args = run.parse_args(argv)
    status = 0
    print(LINE.format("task", "rows", "K", "characters", "Table 2", "source"))
    registry = run.load_registry()
    for name, spec in run.choose_specs(args, registry, default=registry["tasks"]).items():
        try:
            task = run.load_task(name, spec, args.cache)
        except run.UserError as error:
            what = "not available here"
            if "no source can be reached" not in str(error):
                what, status = "WRONG", 2
            print(f"{name:<32} {what}: {error}")
            continue
        note, texts = task["source"], task["texts"]
        found = np.percentile([len(text) for text in texts], [25, 75]).round().astype(int)
        paper = np.array(spec.get("length_percentiles", found))
        if np.any(np.abs(found - paper) > np.maximum(5, 0.25 * paper)):
            note += "; WRONG: lengths are far from the paper's"
            status = 2
        if task["rows"] != spec.get("rows", task["rows"]):
            note += f"; the paper had {spec['rows']} rows: other splits"
        lengths = ["{}-{}".format(*pair) for pair in (found, paper)]
        print(LINE.format(name, len(texts), len(task["classes"]), *lengths, note))
    return status


if __name__ == "__main__":
    run.run_script(main, None)
