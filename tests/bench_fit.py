"""Time fit_model.py as commands, from the start of Python, and their peak memory. Run by hand on a quiet machine; pytest does not collect it.

    python tests/bench_fit.py few_shot_m50.csv            # the published accuracies, m = 50
    python tests/bench_fit.py few_shot_m50.csv --only tables paired-500

Each case is one fresh process in an empty folder: draws, predictive and tables included. Targets on 2 cores: tables 15 s, paper-500
45 s, paper-50 120 s, paired 30 s for any cell, paper-all (8 fits) 480 s, memory 1,500 MB.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "fit_model.py"
ONE = ["--effects", "bias", "--no-figures"]
CASES = {
    "tables": ["--draws", "0"],
    "paper-500": [*ONE, "--analysis", "paper", "--n", "500"],
    "paper-50": [*ONE, "--analysis", "paper", "--n", "50"],
    "paired-500": [*ONE, "--analysis", "paired", "--n", "500"],
    "paired-50": [*ONE, "--analysis", "paired", "--n", "50"],
    "paper-all": ["--analysis", "paper", "--no-figures"],
    "everything": [],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=list(CASES))
    args = parser.parse_args()
    print(f"{'case':<12} {'seconds':>8} {'peak MB':>8} {'exit':>5}")
    peak = 0
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            began = time.time()
            done = subprocess.run([sys.executable, str(SCRIPT), str(args.results.resolve()), *CASES[name]], cwd=folder, capture_output=True, text=True)
            seconds = time.time() - began
        highest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024  # of all so far: only a rise is this case's
        print(f"{name:<12} {seconds:>8.1f} {f'{highest:.0f}' if highest > peak else f'<= {peak:.0f}':>8} {done.returncode:>5}", flush=True)
        peak = max(peak, highest)
        for line in done.stdout.splitlines():
            if line.startswith("  fit "):
                print("   " + line)
        if done.returncode not in (0, 3):
            print(done.stderr)


if __name__ == "__main__":
    main()
