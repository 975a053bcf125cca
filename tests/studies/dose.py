"""The dose curve of docs/results.md: which detector sees which dose of test texts, and does accuracy move? Run by hand.

    python tests/studies/dose.py            # hours on a CPU; table and figure grow in docs/, units (2 GB) in dose/
    python tests/studies/dose.py --list     # the commands that are left

smollm2, rotten_tomatoes, n = 50. Chosen before looking: the primary numbers are the crossed change of the question at 30
epochs and of the control at 10 epochs, 10 subsamples each; everything else is description.

    question     packed, without answers      1, 3, 10, 30 epochs    6 subsamples each, 10 at 30 epochs
    control      padded, with answers         1, 3, 10 epochs        4 subsamples each, 10 at 10 epochs
    description  packed, with answers         10, 30 epochs          2 subsamples each

Two subsamples at a time (two processes of one thread), each audited when it is there: two of every dose, then the rest,
primary settings first. It may be stopped at any moment: the same command goes on where it was, also on another machine,
where the table in docs/ says what is done and keeps the rows of units that are not there. The figure alone, from it:

    python contamination_test.py --from-table docs/contamination.csv
"""

import argparse
import csv
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FORMS = {"packed": ["--pack"], "padded-answers": ["--answers"], "packed-answers": ["--pack", "--answers"]}
SETTINGS = [
    ("packed", 30, 10),
    ("padded-answers", 10, 10),
    ("packed", 10, 6),
    ("padded-answers", 3, 4),
    ("packed", 3, 6),
    ("packed-answers", 30, 2),
    ("padded-answers", 1, 4),
    ("packed", 1, 6),
    ("packed-answers", 10, 2),
]
TOGETHER = 2  # subsamples a step


def plan():
    """(form, epochs, first subsample) of every step, in order."""
    steps = [
        (form, epochs, first) for form, epochs, count in SETTINGS for first in range(1, count + 1, TOGETHER)
    ]
    early = [
        step for step in steps if step[2] == 1 and step[0] != "packed-answers"
    ]  # a figure of all doses first
    return early + [step for step in steps if step not in early]


def finished(table):
    """{(experiment, subsample)} of the audited units."""
    if not table.exists():
        return set()
    with open(table, newline="", encoding="utf-8") as file:
        return {(row["experiment"], int(row["subsample"])) for row in csv.DictReader(file)}


def commands(step, folder):
    """The commands of a step, as lists: training, audit."""
    form, epochs, first = step
    flags = [
        f"--n 50 --pretrain-epochs {epochs} --first-subsample {first} --subsamples {TOGETHER}",
        f"--experiment {form}-{epochs} --workers {TOGETHER} --threads 1",
    ]
    train = [
        sys.executable,
        str(ROOT / "run_zero_shot.py"),
        "--tasks",
        "rotten_tomatoes",
        *FORMS[form],
        *" ".join(flags).split(),
        "--adapters",
        str(folder / "units"),
        "--out",
        str(folder / "results.csv"),
    ]
    audit = [
        sys.executable,
        str(ROOT / "contamination_test.py"),
        str(folder / "units"),
        "--out",
        str(folder / "contamination.csv"),
    ]
    return train, audit


def join(source, table):
    """Append to the table the rows of units of source that it lacks, and draw it."""
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
    with open(source, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(lines) == len(rows) + 1, "a row is a line"
    text = table.read_text(encoding="utf-8") if table.exists() else lines[0]
    assert text.startswith(lines[0]), f"{table} has other columns"
    known = finished(table)
    for line, row in zip(lines[1:], rows):
        if (row["experiment"], int(row["subsample"])) not in known:
            text += line
    draft = table.with_suffix(".draft")  # whole or not at all
    draft.write_text(text, encoding="utf-8")
    draft.replace(table)
    subprocess.run(
        [sys.executable, str(ROOT / "contamination_test.py"), "--from-table", str(table)], check=True
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "dose", help="units and results.csv (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "contamination.csv", help="table (%(default)s)"
    )
    parser.add_argument("--list", action="store_true", help="print the commands that are left, run nothing")
    args = parser.parse_args(argv)
    if not args.list:
        args.folder.mkdir(parents=True, exist_ok=True)
    for number, step in enumerate(plan(), 1):
        form, epochs, first = step
        wanted = {(f"{form}-{epochs}", k) for k in range(first, first + TOGETHER)}
        if wanted <= finished(args.out):
            continue
        print(
            f"\nstep {number} of {len(plan())}: {form}, {epochs} epochs, from subsample {first}", flush=True
        )
        try:
            for command in commands(step, args.folder):
                if args.list:
                    print(shlex.join(command))
                else:
                    subprocess.run(command, check=True)  # both skip what is finished
            if not args.list:
                join(args.folder / "contamination.csv", args.out)
        except (KeyboardInterrupt, subprocess.CalledProcessError) as error:
            raise SystemExit(f"stopped in step {number} ({error!r}): the same command goes on") from None


if __name__ == "__main__":
    main()
