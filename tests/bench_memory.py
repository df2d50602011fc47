"""Peak memory of head and loss, forward and backward, by --head_chunks: a real CPU peak, one process a row.

    python tests/bench_memory.py [--tokens 2048] [--dim 256] [--vocab 50257]

Each process runs HeadLoss once and reports VmHWM, the kernel's own high-water mark, above what it held before. On a GPU the
logits are bf16 and the chain behind them float32, as here; the record's 65536 x 50304 logits are 6.1 GiB in bf16.
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHILD = """
import sys, time
sys.path.insert(0, {root!r})
import torch
import train_gpt_medium as t
chunks, tokens, dim, vocab = map(int, sys.argv[1:])

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

torch.set_num_threads(1)
torch.manual_seed(0)
x, w = torch.randn(tokens, dim).bfloat16().requires_grad_(), torch.randn(-(-vocab // 128) * 128, dim).requires_grad_()
targets = torch.randint(vocab, (tokens,))
t.HeadLoss.apply(x[:128], w[:128], targets[:128] % 128, 15.0, 1).backward()  # code and thread pools are loaded
x.grad = w.grad = None
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts anew
before, start = status("VmRSS"), time.perf_counter()
loss = t.HeadLoss.apply(x, w, targets, 15.0, chunks)
loss.backward()
print(status("VmHWM") - before, time.perf_counter() - start, float(loss), float(w.grad.norm()))
"""


def measure(chunks: int, tokens: int, dim: int, vocab: int) -> tuple[float, float, float, float]:
    """(peak in MiB, seconds, loss, norm of the head's gradient) of a fresh process."""
    out = subprocess.run([sys.executable, "-c", CHILD.format(root=str(ROOT)), *map(str, (chunks, tokens, dim, vocab))], text=True,
                         capture_output=True, check=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1",
                                                                     # freed tensors go back to the kernel at once
                                                                     "MALLOC_MMAP_THRESHOLD_": "1048576"}).stdout
    peak, seconds, loss, norm = map(float, out.split())
    return peak / 1024, seconds, loss, norm


def peak_of(chunks: int, tokens: int, dim: int, vocab: int) -> float:
    return measure(chunks, tokens, dim, vocab)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=50257)
    args = parser.parse_args()
    logits = args.tokens * (-(-args.vocab // 128) * 128) * 4 / 2**20
    print(f"{args.tokens} tokens, {args.dim} wide, vocabulary {args.vocab}: float32 logits are {logits:.0f} MiB; {time.strftime('%F')}")
    print(f"{'head_chunks':>11} {'peak MiB':>9} {'of N = 1':>9} {'seconds':>8} {'loss':>10} {'|grad|':>10}")
    first = None
    for chunks in (1, 2, 4, 8, 16):
        peak, seconds, loss, norm = measure(chunks, args.tokens, args.dim, args.vocab)
        first = first or peak
        print(f"{chunks:>11} {peak:>9.0f} {peak / first:>9.1%} {seconds:>8.1f} {loss:>10.6f} {norm:>10.6f}", flush=True)


if __name__ == "__main__":
    main()
