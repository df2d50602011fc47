"""What the tests of faults share: the words of the smallest run, what a run left on disk, and exact comparison of state.

Every expected value is an undisturbed run's or counted by hand; runs are forked or launched by train_helpers.
"""
from __future__ import annotations

import re
import time
import typing
from pathlib import Path

import torch

from train_helpers import SEPARATOR, Result, english, fork_ranks, shard

NAME = "2025-09-16_Snoo"  # the default recipe, and so the run's folder
STEPS = 8
BATCH = 128  # tokens a step with --batch_sequences 1


def make_shards(folder: Path, batches: int = 5, sequences: int = 1, more: int = 205) -> Path:
    """Training shards of `batches` and of `more` batches; one for validation. English by the byte."""
    first, more = batches * BATCH * sequences + 2, more * BATCH * sequences
    (folder / "train_000001.bin").write_bytes(shard(english(first)))
    (folder / "train_000002.bin").write_bytes(shard(english(more, first)))
    (folder / "val_000000.bin").write_bytes(shard(english(2000, first + more)))
    return folder


def words(shards: Path, log_dir: Path, *more: object, **fields: object) -> list[str]:
    """A run of 8 steps: outer steps after steps 1, 4 and 7, cooldown from step 4, the second shard from step 5 on."""
    given = dict(train_files=f"{shards}/train_*.bin", val_files=f"{shards}/val_*.bin", log_dir=log_dir, num_layers=12,
                 model_dim=32, num_heads=1, head_dim=32, train_seq_len=128, batch_sequences=1, val_seq_len=128,
                 val_tokens=128, window_max=128, warmup_steps=0, num_iterations=STEPS, val_loss_every=1, snoo_k=3,
                 cooldown_frac=0.5, muon_momentum_steps=4, seed=7) | fields
    return ["--scale", "rehearsal", *map(str, more), *(w for k, v in given.items() for w in (f"--{k}", str(v)))]


def succeed(run_words: list[str], world: int = 1, **how: typing.Any) -> Result:
    result = fork_ranks(run_words, world, **how)
    assert result.returncodes == [0] * world, result.stdouts + result.stderrs
    return result


def wait_for(condition: typing.Callable[[], object], limit: float = 60) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "what the test waits for did not come"
        time.sleep(0.005)


def logs(log_dir: Path) -> list[Path]:
    """The runs' logs, oldest first."""
    return sorted(log_dir.glob("*/*.txt"))


def body(log: Path) -> str:
    """A log behind its header; empty while the header is not whole."""
    return log.read_bytes().split(f"\n{SEPARATOR}\n".encode())[-1].decode() if log.read_bytes().count(f"\n{SEPARATOR}\n".encode()) > 1 else ""


def header(log: Path) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in log.read_bytes().rsplit(f"\n{SEPARATOR}\n".encode(), 2)[-2].decode().splitlines()
                if ": " in line)


def val_losses(log: Path) -> dict[int, str]:
    return {int(s): loss for s, loss in re.findall(r"^step:(\d+)/\d+ val_loss:(\S+)", body(log), re.MULTILINE)}


def checkpoints(log_dir: Path) -> dict[int, Path]:
    """step -> folder, of all runs under log_dir; a later run's where two have one."""
    return {int(p.name[5:]): p for p in sorted(log_dir.glob("*/*_checkpoints/step_*"))}


def leftovers(log_dir: Path) -> list[Path]:
    return sorted(log_dir.glob("*/*_checkpoints/.step_*"))


def contents(checkpoint: Path) -> dict[str, typing.Any]:
    """All that a checkpoint holds and a continued run must reproduce, Muon's shards joined."""
    value = torch.load(checkpoint / "shared.pt", weights_only=True)
    shards = [torch.load(p, weights_only=True) for p in sorted(checkpoint.glob("muon_*.pt"))]
    value["muon"] = dict(state={i: s for part in shards for i, s in part["state"].items()}, param_groups=shards[0]["param_groups"])
    return {k: value[k] for k in ("step", "val_losses", "data_position", "model", "adam", "muon", "snoo", "rng", "source_sha256")}


def differences(a: typing.Any, b: typing.Any, where: str = "") -> list[str]:
    """Where two trees differ, in type, dtype, shape or any bit."""
    if type(a) is not type(b):
        return [f"{where}: {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return [f"{where}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"]
        same = torch.equal(a.reshape(-1).contiguous().view(torch.uint8), b.reshape(-1).contiguous().view(torch.uint8))
        return [] if same else [f"{where}: other bits"]
    if isinstance(a, dict):
        if list(a) != list(b):
            return [f"{where}: keys {list(a)} and {list(b)}"]
        return [line for k in a for line in differences(a[k], b[k], f"{where}.{k}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{where}: {len(a)} and {len(b)} items"]
        return [line for i, (x, y) in enumerate(zip(a, b)) for line in differences(x, y, f"{where}[{i}]")]
    return [] if a == b else [f"{where}: {a!r} and {b!r}"]


def tree_of(folder: Path) -> dict[str, bytes | None]:
    """Every path under a folder, with a file's bytes: equal before and after means that nothing changed."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}
