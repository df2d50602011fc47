"""Fixtures of the tests of train_gpt_medium.py: tiny shards, the words of a tiny run, and runs that several tests read."""
from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402

from train_helpers import english, shard  # noqa: E402

# A shell that starts the tests in the background has SIGINT ignored, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)  # more threads than cores make torch many times slower, and these tensors are tiny


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two training shards and one for validation, English by the byte, vocabulary 257."""
    folder = tmp_path_factory.mktemp("shards")
    (folder / "train_000001.bin").write_bytes(shard(english(40_000)))
    (folder / "train_000002.bin").write_bytes(shard(english(40_000, 40_000)))
    (folder / "val_000000.bin").write_bytes(shard(english(9_000, 80_000)))
    return folder


@pytest.fixture(scope="session")
def tiny(shards: Path) -> list[str]:
    """The words of the smallest run: the record's recipe, 16 layers, 32 wide, 6 steps. Without --log_dir and --seed."""
    return (f"--scale rehearsal --train_files {shards}/train_*.bin --val_files {shards}/val_*.bin --model_dim 32 --num_heads 1 "
            "--head_dim 32 --train_seq_len 128 --batch_sequences 4 --val_seq_len 128 --val_tokens 512 --num_iterations 6 "
            "--warmup_steps 1 --val_loss_every 3 --compile false --vocab_size 257 --eot_token 256 --compare_with none").split()
