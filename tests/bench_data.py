"""How fast data/fineweb.py encodes: 1 and 2 workers against one plain loop of encode_ordinary, in the same
run.

    python tests/bench_data.py [--megabytes 60] [--rounds 3] [--vocabulary FILE]

The corpus is the English of the rehearsal (help topics and docstrings of the standard library), repeated, as
one parquet file. A build is timed as its user sees it: a fresh process, reading, encoding, writing one shard
to disk. The plain loop has its text in memory and keeps nothing. Prints every round and the medians of the
ratios, which other work on the machine disturbs less than the speeds. pytest does not collect this file.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet

from data_helpers import plain_encoding, run, vocabulary

import fineweb
import rehearsal


def plain_loop(texts: list[str]) -> tuple[int, float]:
    """Tokens of `texts`, end-of-text tokens included, and seconds of one loop over them."""
    encoding = plain_encoding()
    tokens = 0
    began = time.perf_counter()
    for text in texts:
        tokens += 1 + len(encoding.encode_ordinary(text))
    return tokens, time.perf_counter() - began


def timed_build(corpus: Path, out: Path, workers: int, vocabulary_file: Path) -> float:
    """Seconds of one build in a process of its own."""
    began = time.perf_counter()
    result = run("fineweb.py", corpus, "--out", out, "--workers", workers, "--vocabulary", vocabulary_file,
                 timeout=600)
    assert result.returncode == 0, result.stderr
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=60, help="text to encode (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--vocabulary", type=Path, help="default: the file in the package mlx-whisper")
    args = parser.parse_args()
    vocabulary_file = args.vocabulary or vocabulary()
    texts = rehearsal.documents()
    texts *= args.megabytes * 10**6 // sum(map(len, texts)) + 1
    ratios: dict[str, list[float]] = {"1 worker / loop": [], "2 workers / loop": [],
                                      "2 workers / 1 worker": []}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), corpus)
        for number in range(1, args.rounds + 1):
            tokens, loop = plain_loop(texts)
            one = timed_build(corpus, Path(folder) / f"one{number}", 1, vocabulary_file)
            two = timed_build(corpus, Path(folder) / f"two{number}", 2, vocabulary_file)
            print(f"round {number}, {tokens} tokens: plain loop {tokens / loop / 1e6:.2f}M tokens/s, "
                  f"1 worker {tokens / one / 1e6:.2f}M, 2 workers {tokens / two / 1e6:.2f}M "
                  f"({fineweb.processors()} processors)")
            for name, ratio in zip(ratios, (loop / one, loop / two, one / two)):
                ratios[name].append(ratio)
    for name, values in ratios.items():
        print(f"{name}: median {statistics.median(values):.2f}, from {min(values):.2f} to {max(values):.2f}")


if __name__ == "__main__":
    main()
