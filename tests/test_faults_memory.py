"""Out of memory: one line with the peak and the fields that lower it. --head_chunks: the same numbers, without all logits.

No GPU is needed: the out-of-memory error is raised where CUDA would, and the peaks are those of CPU processes (bench_memory.py).
"""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

import train_gpt_medium as t
from bench_memory import peak_of
from fault_helpers import body, logs, make_shards, words
from train_helpers import fork_ranks

OUT = """
import time
def forward(*a):
    time.sleep(rank * {1})
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12.28 GiB.")
real = t.train_step
def train_step(training, batch, step, *rest):
    if step == 2 and rank in {0}: training.forward = forward
    return real(training, batch, step, *rest)
t.train_step = train_step
"""


@pytest.mark.parametrize("later", [0, 1])  # rank 1 fails with rank 0, which keeps the store, or a second after it
def test_out_of_memory_is_one_line_with_the_fields_that_lower_it(later: int, tmp_path: Path) -> None:
    shards = make_shards(tmp_path, sequences=2)
    result = fork_ranks(words(shards, tmp_path / "logs", batch_sequences=2, val_tokens=256), 2, limit=40,
                        patch=OUT.format((0, 1), later))
    assert result.returncodes == [1, 1]
    text = "".join(result.stderrs)
    assert "Traceback" not in text and text.count("error: ") == 1 and text.count("\n") == 1, text
    for part in ("ran out of GPU memory at step 2", "peak memory allocated: ", "--head_chunks", "--train_seq_len", "--val_seq_len",
                 "--snoo false", "12.28 GiB"):
        assert part in text, part
    assert body(logs(tmp_path / "logs")[0]).splitlines()[-1] == "failed: " + text.removeprefix("error: ").strip()


def test_out_of_memory_of_one_rank_alone(tmp_path: Path) -> None:
    shards = make_shards(tmp_path)
    result = fork_ranks(words(shards, tmp_path / "logs"), limit=40, patch=OUT.format((0,), 0))
    assert result.returncode == 1 and "Traceback" not in result.stderr and result.stderr.startswith("error: rank 0 ran out of GPU memory")


@pytest.mark.parametrize("chunks", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_head_chunks_change_nothing_but_rounding(chunks: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x0, w0 = torch.randn(128, 32).to(dtype), torch.randn(384, 32, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    targets = torch.randint(384, (128,))

    def run(pieces: int | None) -> tuple[torch.Tensor, ...]:
        x, w = x0.clone().requires_grad_(), w0.clone().requires_grad_()
        if pieces is None:  # the plain formula, by autograd
            z = (x @ w.to(dtype).T).to(w.dtype)
            loss = torch.nn.functional.cross_entropy(15 * z * torch.rsqrt(z * z + 225), targets)
        else:
            loss = t.HeadLoss.apply(x, w, targets, 15.0, pieces)
        loss.backward()
        return loss.detach(), x.grad, w.grad

    whole, parts, plain = run(1), run(chunks), run(None)
    assert all(a.dtype == b.dtype == c.dtype for a, b, c in zip(whole, parts, plain))
    limit = 1e-12 if dtype == torch.float64 else 1e-2
    for a, b, c in zip(whole, parts, plain):
        assert (a - b).double().norm() <= limit * a.double().norm() and (c - b).double().norm() <= 2 * limit * c.double().norm()


def test_head_chunks_save_nearly_all_of_the_logits() -> None:
    tokens, vocab = 4096, 4096
    logits = 4 * tokens * vocab / 2**20  # MiB, float32, once: 64
    one, eight = (peak_of(chunks, tokens, 64, vocab) for chunks in (1, 8))
    assert one - eight > 0.8 * 7 / 8 * logits  # the head alone holds them more than once at its peak
    assert eight < 0.5 * one
