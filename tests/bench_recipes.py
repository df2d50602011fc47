"""The README's ablation table: the final rehearsal loss of each recipe over a few seeds.

    python tests/bench_recipes.py [--seeds 3] [--jobs 2]      about 25 minutes on two cores

Each run is `train_gpt_medium.py --recipe NAME --scale rehearsal --seed N` on one rank and one thread; with one seed it
prints the same loss each time. The table proves that every recipe runs and learns at this size; it does not say which
recipe is better at the record's.
"""
from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train_gpt_medium  # noqa: E402


def rehearse(recipe: str, seed: int, folder: str) -> float:
    """The final val loss of one rehearsal. RuntimeError with the run's last words when it fails."""
    command = [sys.executable, str(ROOT / "train_gpt_medium.py"), "--recipe", recipe, "--scale", "rehearsal", "--seed",
               str(seed), "--val_loss_every", "0", "--log_dir", folder]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    found = re.search(r"^val_loss: (\d+\.\d+)$", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        raise RuntimeError(f"{recipe}, seed {seed}: {done.stderr[-1000:]}")
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, one core each")
    args = parser.parse_args()
    subprocess.run([sys.executable, str(ROOT / "data" / "rehearsal.py")], check=True)
    cases = [(recipe, seed) for recipe in train_gpt_medium.RECIPES for seed in range(1, args.seeds + 1)]
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        losses = dict(zip(cases, pool.map(lambda case: rehearse(*case, folder), cases)))
    print("| recipe | mean | " + " | ".join(f"seed {s}" for s in range(1, args.seeds + 1)) + " |")
    print("|---" * (args.seeds + 2) + "|")
    for recipe in train_gpt_medium.RECIPES:
        row = [losses[recipe, seed] for seed in range(1, args.seeds + 1)]
        print(f"| {recipe} | {statistics.mean(row):.3f} | " + " | ".join(f"{loss:.3f}" for loss in row) + " |")


if __name__ == "__main__":
    main()
