"""A soak: a training run of many small steps with saves, watched from outside. Memory and open files must stay flat.

    python tests/bench_soak.py [--steps 2000] [--save_every 50]

The model is the rehearsal's program at the smallest size (12 layers, 32 wide, 128 tokens a step), one rank. Every second it
reads the run's resident memory and open files from /proc; it prints a table by tenths of the run, and exits with 1
when the last tenth holds over 2 % more memory than the fifth, or one file more (at its least: a save has one
file open while it writes).
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fault_helpers import body, checkpoints, leftovers, logs, make_shards, words
from train_helpers import SCRIPT, clean_environment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save_every", type=int, default=50)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "shards").mkdir()
        shards = make_shards(Path(folder) / "shards", batches=args.steps // 3, more=args.steps)
        log_dir = Path(folder) / "logs"
        run_words = words(shards, log_dir, num_iterations=args.steps, save_every=args.save_every, val_loss_every=100, snoo_k=28)
        start = time.monotonic()
        run = subprocess.Popen([sys.executable, str(SCRIPT), *run_words], stdout=subprocess.DEVNULL, env=clean_environment())
        samples: list[tuple[int, float, int]] = []  # step, MiB, files
        while run.poll() is None:
            try:
                status = Path(f"/proc/{run.pid}/status").read_text()
                files = len(os.listdir(f"/proc/{run.pid}/fd"))
                if logs(log_dir) and (lines := [w for w in body(logs(log_dir)[0]).splitlines() if w.startswith("step:")]):
                    rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
                    samples.append((int(lines[-1][5:].split("/")[0]), rss / 1024, files))
            except (OSError, StopIteration):  # it ended meanwhile
                pass
            time.sleep(1)
        seconds, kept, aside = time.monotonic() - start, sorted(checkpoints(log_dir)), leftovers(log_dir)
    if run.returncode != 0:
        print(f"the run ended with {run.returncode}", file=sys.stderr)
        return 1
    print(f"{args.steps} steps with {args.steps // args.save_every} saves in {seconds:.0f} s; checkpoints kept: {kept}, left aside: {len(aside)}")
    print(f"{'steps':>12} {'samples':>8} {'RSS MiB, mean':>14} {'max':>7} {'open files':>11}")
    tenths = []
    for tenth in range(10):
        low, high = args.steps * tenth // 10, args.steps * (tenth + 1) // 10
        inside = [s for s in samples if low <= s[0] < high]
        if not inside:
            continue
        mean, most = sum(s[1] for s in inside) / len(inside), max(s[1] for s in inside)
        files = min(s[2] for s in inside)
        tenths.append((tenth, mean, files))
        print(f"{low:>6}-{high:<5} {len(inside):>8} {mean:>14.1f} {most:>7.1f} {files:>11}")
    half = [t for t in tenths if t[0] >= 4]
    flat = half[-1][1] <= 1.02 * half[0][1] and half[-1][2] <= half[0][2]
    print("flat" if flat else "NOT FLAT")
    return 0 if flat else 1


if __name__ == "__main__":
    raise SystemExit(main())
