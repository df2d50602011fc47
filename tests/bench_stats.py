"""How fast records/stats.py reads logs, and in how much memory: `python tests/bench_stats.py [--logs 1500]`.

Makes logs of 0.4 MB (5640 steps, an embedded script of 130 kB, other numbers in every log) in a temporary
folder, runs `stats.py summary` on a tenth of them and on all, and prints seconds and the peak memory of the
process and of its largest worker. The aim is 1500 logs in under 20 s on 2 cores, and memory that does not
grow with the number of logs. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stats_helpers import RECORDS, TRICKY_SOURCE, own_log, published_log

CODE = """
import resource, runpy, sys
sys.argv = [{path!r}, "summary", {folder!r}, "--brief", "--format", "json"]
try:
    runpy.run_path({path!r}, run_name="__main__")
finally:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(use.ru_utime + use.ru_stime for use in used)
    print(cpu, *(use.ru_maxrss for use in used), file=sys.stderr)  # KiB on Linux
"""


def measure(folder: Path, expected: int) -> None:
    code = CODE.format(path=str(RECORDS / "stats.py"), folder=str(folder))
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                            env={**os.environ, "PYTHONPATH": str(RECORDS)})
    seconds = time.perf_counter() - start
    cpu, own, worker = map(float, result.stderr.split()[-3:])
    own, worker = own / 1024, worker / 1024
    counted = json.loads(result.stdout)["loss"]["n"]
    assert counted == expected, f"{counted} of {expected} logs counted"
    print(f"{expected:6d} logs: {seconds:6.2f} s, {1000 * seconds / expected:.2f} ms a log, processor time "
          f"{cpu:.1f} s, peak memory {own:.0f} MiB, largest worker {worker:.0f} MiB")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__,
                                      formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--logs", type=int, default=1500, help="number of logs (default %(default)s)")
    count = options.parse_args().logs
    source = TRICKY_SOURCE + b"# a line of a script\n" * 6000
    with tempfile.TemporaryDirectory() as name:
        few, folder = Path(name) / "few", Path(name) / "all"
        few.mkdir()
        folder.mkdir()
        for seed in range(count):
            make, script = (own_log, source) if seed % 2 else (published_log,
                                                               source.replace(b"sha256", b"sum"))
            path = folder / f"{seed:05d}.txt"
            path.write_bytes(make(seed, source=script, steps=5640, every=125))
            if seed < count // 10:
                (few / path.name).symlink_to(path)
        size = sum(path.stat().st_size for path in folder.iterdir()) / count / 1e6
        cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
        print(f"{count} logs of {size:.2f} MB; {cores} cores, load {load:.1f} before the start")
        measure(few, count // 10)
        measure(folder, count)


if __name__ == "__main__":
    main()
