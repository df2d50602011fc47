"""Made-up logs for the tests of records/: in our script's shape and in modded-nanogpt's."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import uuid
from pathlib import Path

RECORDS = Path(__file__).resolve().parent.parent / "records"
sys.path.insert(0, str(RECORDS))

LINE = b"=" * 100 + b"\n"
SNOO = RECORDS / "track_2_medium" / "2025-09-16_Snoo"
SMOOTHED = RECORDS / "track_2_medium" / "2025-09-30_SmoothedSnooMedium"

# A script that holds all that could fool a parser: a separator, a header, prints and a whole finished run.
TRICKY_SOURCE = b'''import torch
print(f"step:{step}/{steps} val_loss:{val_loss:.6f} train_time:{ms:.0f}ms step_avg:{ms / step:.2f}ms")
EXAMPLE = """
''' + LINE + b'''run: fake/000_00000000-0000-0000-0000-000000000000
source_sha256: ''' + b"0" * 64 + b'''
''' + LINE + b'''step:0/10 val_loss:10.825840 train_time:0ms step_avg:0.00ms
step:10/10 val_loss:1.000000 train_time:5ms step_avg:0.50ms
peak memory allocated: 1 MiB reserved: 1 MiB
"""
'''
# The same without our header: what another trainer's source may hold.
TRICKY_PUBLISHED_SOURCE = b'''import torch
print0(f"step:{step}/{train_steps} val_loss:{val_loss:.6f} train_time:{t:.0f}ms step_avg:{a:.2f}ms")
BANNER = """
''' + LINE + b'''val_loss:1.000000
"""
'''
NVIDIA_SMI = "\n".join(
    ["+------------------------------------------------------------+",
     "|=========================================+==================|",
     *(f"|   {i}  NVIDIA H100 80GB HBM3          On  |   0000000{i}:19:00.0 |" for i in range(8)),
     "+------------------------------------------------------------+"])


def uuid_of(seed: int) -> str:
    return str(uuid.UUID(int=random.Random(seed).getrandbits(128), version=4))


def body(seed: int = 0, steps: int = 200, every: int = 50, loss: float = 2.9196, ms: float = 249.15,
         memory: bool = True, start: int = 0) -> bytes:
    """A finished run's lines; every seed gives another final loss and other times."""
    rng = random.Random(seed)
    lines, final = [], loss + rng.gauss(0, 0.0007)
    ms += rng.gauss(0, 0.5)
    for step in range(start, steps + 1):
        time = f"train_time:{step * ms:.0f}ms step_avg:{ms if step else 0:.2f}ms"
        if step % every == 0 or step == steps:
            value = final if step == steps else 10.82584 - (10.82584 - final) * (step / steps) ** 0.1
            lines.append(f"step:{step}/{steps} val_loss:{value:.6f} {time}")
        if step < steps:
            lines.append(f"step:{step + 1}/{steps} train_time:{(step + 1) * ms:.0f}ms step_avg:{ms:.2f}ms")
    if memory:
        lines.append("peak memory allocated: 56505 MiB reserved: 58000 MiB")
    return ("\n".join(lines) + "\n").encode()


def own_log(seed: int = 0, source: bytes = TRICKY_SOURCE, overrides: dict[str, object] | None = None,
            world_size: int = 8, recipe: str = "2025-09-16_Snoo", scale: str = "record", parent: str = "",
            text: bytes | None = None, **run: object) -> bytes:
    """A log as train_gpt_medium.py writes it."""
    header = [f"run: {recipe}/{seed:03d}_{uuid_of(seed)}", "command: train_gpt_medium.py",
              f"recipe: {recipe}",
              f"scale: {scale}", f"world_size: {world_size}", f"overrides: {json.dumps(overrides or {})}",
              f"source_sha256: {hashlib.sha256(source).hexdigest()}",
              *([f"parent: {parent}"] if parent else []),
              "python: 3.11.7", "pytorch: 2.9.0+cu126", "cuda: 12.6", "hyperparameter muon_lr: 0.027",
              f"hyperparameter seed: {seed + 1000}", "data: a.bin 100 tokens", "data: b.bin 100 tokens",
              NVIDIA_SMI]
    newline = b"" if source.endswith(b"\n") else b"\n"
    return (source + newline + LINE + ("\n".join(header) + "\n").encode() + LINE
            + (body(seed, **run) if text is None else text))  # type: ignore[arg-type]


def published_log(seed: int = 0, source: bytes = TRICKY_PUBLISHED_SOURCE, **run: object) -> bytes:
    """A log as modded-nanogpt's scripts write it: print0(code), so an empty line before the separator."""
    header = ("Running Python 3.10.18 (main, Jun 4 2025) [GCC 13.3.0]\n"
              f"Running PyTorch 2.9.0.dev20250823+cu126 compiled for CUDA 12.6\n{NVIDIA_SMI}\n").encode()
    return source + b"\n" + LINE + header + LINE + body(seed, **run)  # type: ignore[arg-type]


def write_logs(folder: Path, count: int, make=own_log, **run: object) -> list[Path]:
    """`count` good logs of different runs in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{seed:03d}_{uuid_of(seed)}.txt" for seed in range(count)]
    for seed, path in enumerate(paths):
        path.write_bytes(make(seed, **run))
    return paths
