"""What is in a checkpoint of train_gpt_medium.py: step, losses, hyperparameters, and each tensor's shape and dtype.

    python records/checkpoint.py records/track_2_medium/2025-09-16_Snoo/000_<uuid>_checkpoints/step_005640

Builds no model, needs no GPU, and runs no code from the files: their checksums are compared, then they are memory-mapped
and read with weights_only.
Exit code 0, or 1 with one message on stderr when the folder is no whole checkpoint.
"""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from train_gpt_medium import UserError as NoCheckpoint, load_tensors  # noqa: E402


def tensors(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(dotted name, tensor) of each tensor in nested dicts and lists."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, (dict, list, tuple)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors(value, f"{name}.{key}" if name else str(key))


def describe(folder: Path) -> Iterator[str]:
    """The lines that main prints."""
    if not os.path.isdir(folder):  # also when the name is too long
        raise NoCheckpoint(f"{folder}: no such folder")
    if not (folder / "shared.pt").is_file():
        inside = sorted(str(p.parent) for p in folder.glob("**/step_*/shared.pt"))
        hint = f"; there are, further down: {', '.join(inside)}" if inside else ""
        raise NoCheckpoint(f"{folder}: no checkpoint (a folder step_NNNNNN with shared.pt and a muon_N.pt a rank){hint}")
    shared = load_tensors(folder / "shared.pt")
    ranks, hyperparameters, losses = shared.get("world_size"), shared.get("hyperparameters"), shared.get("val_losses")
    if not isinstance(ranks, int) or not isinstance(hyperparameters, dict) or not isinstance(losses, list) or "step" not in shared:
        raise NoCheckpoint(f"{folder / 'shared.pt'}: not a checkpoint of train_gpt_medium.py")
    shards = [load_tensors(folder / f"muon_{rank}.pt") for rank in range(ranks)]

    for key in ("step", "train_time_ms", "recipe", "scale", "world_size", "log", "data_position", "source_sha256", "format"):
        yield f"{key}: {shared.get(key, 'absent')}"
    for pair in losses:
        yield f"val_loss at step {pair[0]}: {pair[1]:.6f}" if isinstance(pair, list) and len(pair) == 2 else f"val_loss: {pair}"
    for key, value in hyperparameters.items():
        yield f"hyperparameter {key}: {value}"
    parts = {part: [shared.get(part)] for part in ("model", "adam", "snoo", "rng")} | {"muon": shards}
    for part in ("model", "adam", "muon", "snoo", "rng"):
        rows = [row for tree in parts[part] for row in tensors(tree)]
        size = sum(t.numel() * t.element_size() for _, t in rows)
        yield f"{part}: {len(rows)} tensors, {sum(t.numel() for _, t in rows)} elements, {size / 2**20:.1f} MiB"
        for name, tensor in rows:
            yield f"  {part}.{name}  {tuple(tensor.shape)}  {str(tensor.dtype).removeprefix('torch.')}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkpoint: a folder step_NNNNNN")
    try:
        for line in describe(parser.parse_args(argv).folder):
            print(line.encode(sys.stdout.encoding or "utf-8", "backslashreplace").decode(sys.stdout.encoding or "utf-8"))
        sys.stdout.flush()
    except NoCheckpoint as e:
        print(f"error: {e}".encode("ascii", "backslashreplace").decode(), file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
