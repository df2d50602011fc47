"""Is this GPU machine fit to train, and how fast? `python tests/gpu_smoke.py`: one GPU, at most 8 minutes.

    masks      the block lists that FlexAttention gets, written out, equal the dense mask of the CPU path
    attention  FlexAttention's output and gradients against scaled_dot_product_attention with that dense mask
    model      loss and gradients of a small model on the GPU against the CPU, the same weights and tokens
    fused_mlp  one MLP with the Triton kernel of --fused_mlp against the plain one: results and time
    resume     train_gpt_medium.py resumed from a checkpoint, against the run that went on
    step       the record's step, one micro-batch, compiled, tuning off: time, memory and loss, against the
               plain version of tests/bench.py

Prints a table; exit code 1 when a row fails. Every part takes its device as an argument: tests/test_bench.py
runs them on a CPU.
"""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
import typing
from pathlib import Path

import torch
import torch.nn.functional as F

import bench
from bench import script

Row = tuple[str, bool]  # what was measured; is it right


def some_docs(length: int, device: torch.device) -> torch.Tensor:
    """Document counts: short documents, one that spans many blocks, borders on and off the blocks' own."""
    starts = torch.zeros(length, dtype=torch.int32)
    starts[[0, 3, 100, 128, 129, 300, length // 2, length - 5]] = 1
    return starts.cumsum(0, dtype=torch.int32).to(device)


def written_out(mask: script.BlockMask, docs: torch.Tensor) -> torch.Tensor:
    """(T, T) bool: the pairs that a kernel which follows the block lists computes."""
    blocks, size = docs.numel() // script.BLOCK, script.BLOCK
    dense = torch.zeros(docs.numel(), docs.numel(), dtype=torch.bool, device=docs.device)
    for row in range(blocks):
        for numbers, indices, whole in (
            (mask.full_kv_num_blocks, mask.full_kv_indices, True),
            (mask.kv_num_blocks, mask.kv_indices, False),
        ):
            for col in indices[0, 0, row, : int(numbers[0, 0, row])].tolist():
                q = torch.arange(row * size, (row + 1) * size, device=docs.device)[:, None]
                k = torch.arange(col * size, (col + 1) * size, device=docs.device)[None, :]
                dense[q, k] |= torch.ones_like(q == k) if whole else mask.mask_mod(None, None, q, k)
    return dense


def check_masks(device: torch.device, length: int = 4096) -> Row:
    docs, compared = some_docs(length, device), 0
    for blocks in (1, 2, 5, length // script.BLOCK):
        window = torch.tensor(blocks, dtype=torch.int32, device=device)
        for mask, w in zip(script.attention_masks(docs, window), (window, window // 2)):
            found = mask if isinstance(mask, torch.Tensor) else written_out(mask, docs)
            if not torch.equal(found.cpu(), script.dense_mask(docs.cpu(), w.cpu())):
                return f"differs at a window of {int(w)} blocks", False
            compared += 1
    return f"{compared} masks of {length} tokens equal", True


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """The distance of a from b, as a share of b's norm."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def check_attention(device: torch.device, length: int = 2048) -> Row:
    generator = torch.Generator().manual_seed(0)
    docs, window = some_docs(length, device), torch.tensor(5, dtype=torch.int32, device=device)
    q, k, v, dy = (
        torch.randn(1, 2, length, 128, generator=generator).to(device, torch.bfloat16) for _ in range(4)
    )
    attend = torch.compile(script.attend, dynamic=False) if device.type == "cuda" else script.attend
    results = []
    for mask in (script.attention_masks(docs, window)[0], script.dense_mask(docs, window)):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        if mask is not None and isinstance(mask, torch.Tensor):
            y = F.scaled_dot_product_attention(*(t.float() for t in leaves), attn_mask=mask, scale=0.12)
        else:
            y = attend(*leaves, mask, 0.12)
        y.backward(dy.to(y.dtype))
        results.append([y, *(t.grad for t in leaves)])
    worst = max(relative(a, b) for a, b in zip(*results))
    return f"output and gradients within {worst:.1e} (at most 2e-2)", worst < 2e-2


def check_model(device: torch.device) -> Row:
    args = script.Hyperparameters(**script.SCALES["rehearsal"])
    torch.manual_seed(0)
    ours = script.GPT(
        args.vocab_size,
        args.num_layers,
        args.num_heads,
        args.model_dim,
        args.train_seq_len,
        args.head_dim,
        args.eot_token,
    )
    for p in ours.parameters():  # no zero matrices: every gradient is to be tested
        if p.ndim >= 2 and not p.any():
            p.data.normal_(std=0.05)
    for attention in ours.attentions.values():
        attention.qkvo_w.data[3].normal_(std=0.05)
    theirs = copy.deepcopy(ours).to(device)
    tokens = torch.randint(
        args.vocab_size, (args.train_seq_len + 1,), generator=torch.Generator().manual_seed(1)
    )
    batch = tokens[:-1].to(torch.int32), tokens[1:], torch.tensor(2, dtype=torch.int32)
    forward = torch.compile(theirs, dynamic=False, fullgraph=True) if device.type == "cuda" else theirs
    losses = [ours(*batch), forward(*(t.to(device) for t in batch))]
    for loss in losses:
        loss.backward()
    apart = abs(float(losses[0].detach()) - float(losses[1].detach()))
    grads = {
        name: relative(b.grad, a.grad) for (name, a), b in zip(ours.named_parameters(), theirs.parameters())
    }
    worst = max(grads, key=grads.get)
    text = (
        f"loss {float(losses[1].detach()):.4f}, {apart:.1e} apart (at most 5e-3); gradients within "
        f"{grads[worst]:.1e}, {worst} (at most 0.1)"
    )
    return text, apart < 5e-3 and grads[worst] < 0.1 and math.isfinite(apart)


def check_fused_mlp(device: torch.device, tokens: int = 65536, dim: int = 1024) -> Row:
    """The MLP with and without --fused_mlp's kernel (which needs CUDA: on a CPU both are the plain one)."""
    torch.manual_seed(0)
    plain = script.MLP(dim, False).to(device)
    plain.proj_w.data.normal_(std=0.02)
    fused = copy.deepcopy(plain)
    fused.fused = device.type == "cuda"
    x, dy = (torch.randn(1, tokens, dim, device=device).bfloat16() for _ in range(2))
    results, calls = [], {}
    for name, mlp in (("fused", fused), ("plain", plain)):
        forward = torch.compile(mlp, dynamic=False, fullgraph=True) if device.type == "cuda" else mlp

        def call(forward: typing.Any = forward, mlp: script.MLP = mlp) -> list[torch.Tensor]:
            leaf = x.clone().requires_grad_()
            mlp.zero_grad()
            y = forward(leaf)
            y.backward(dy)
            return [y, leaf.grad, mlp.fc_w.grad, mlp.proj_w.grad]

        results.append(call())
        calls[name] = call
    worst = max(relative(a, b) for a, b in zip(*results))
    times = bench.in_turns(calls, 5, device)
    text = (
        f"within {worst:.1e} of plain (at most 2e-2); forward and backward {1e3 * times['fused']:.2f} ms, "
        f"plain {1e3 * times['plain']:.2f} ms"
    )
    return text, worst < 2e-2


def check_resume(device: torch.device, extra: tuple[str, ...] = ()) -> Row:
    """Six steps with a checkpoint at 3, and a second process that goes on from there: the same final loss."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in ("train", "val"):
            bench.write_shard(folder / f"{kind}.bin", 40000, 257, 256, document=100)
        sizes = (
            "--scale rehearsal --num_iterations 6 --val_loss_every 0 --val_tokens 2048 --seed 3 "
            "--warmup_steps 0 --snoo_k 2 "
            f"--train_files {folder}/train.bin --val_files {folder}/val.bin --log_dir {folder}"
        ).split() + list(extra)
        finals = []
        for options in (
            ["--run_name", "whole", "--save_every", "3", "--keep_checkpoints", "9"],
            ["--run_name", "rest", "--resume"],
        ):
            if options[-1] == "--resume":
                options.append(str(next(folder.glob("whole/*_checkpoints/step_000003"))))
            ended = subprocess.run(
                [sys.executable, script.__file__, *sizes, *options],
                capture_output=True,
                text=True,
                timeout=240,
                env={**os.environ, **({} if device.type == "cuda" else {"CUDA_VISIBLE_DEVICES": ""})},
            )
            if ended.returncode != 0:
                return f"a run ended with {ended.returncode}: {ended.stderr[-300:]}", False
            finals.append(float(ended.stdout.strip().splitlines()[-1].split("val_loss: ")[1]))
    apart, allowed = (
        abs(finals[0] - finals[1]),
        5e-3 if device.type == "cuda" else 0.0,
    )  # a GPU adds in any order
    return f"final loss {finals[0]:.6f} and {finals[1]:.6f} (at most {allowed} apart)", apart <= allowed


def check_step(device: torch.device, steps: int = 3, args: script.Hyperparameters | None = None) -> Row:
    found = bench.bench_step(script.Distributed(0, 0, 1, device), steps, args)
    ours, plain = found["ours"], found["plain"]
    text = (
        f"{1e3 * ours['total']:.1f} ms, plain {1e3 * plain['total']:.1f} ms; optimizers "
        f"{1e3 * (ours['phases']['inner optimizers'] + ours['phases']['outer step']):.1f} and "
        f"{1e3 * (plain['phases']['inner optimizers'] + plain['phases']['outer step']):.1f} ms; "
        f"utilisation {100 * ours['utilisation']:.1f} %; "
        f"{ours['memory']}; losses {found['apart']:.1e} apart (at most 0.05)"
    )
    return text, found["apart"] < 0.05


CHECKS: dict[str, typing.Callable[[torch.device], Row]] = {
    "masks": check_masks,
    "attention": check_attention,
    "model": check_model,
    "fused_mlp": check_fused_mlp,
    "resume": check_resume,
    "step": check_step,
}


def main(device: torch.device) -> int:
    rows, start = [], time.perf_counter()
    for name, check in CHECKS.items():
        began = time.perf_counter()
        try:
            text, right = check(device)
        except Exception as e:  # the other rows still tell something
            traceback.print_exc()
            text, right = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}", False
        rows.append((name, "ok" if right else "FAILED", f"{time.perf_counter() - began:6.1f} s", text))
        print(f"{name}: {rows[-1][1]}", flush=True)
    print(
        f"\n{torch.__version__}, {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}, "
        f"{time.perf_counter() - start:.0f} s in all"
    )
    for name, verdict, seconds, text in rows:
        print(f"{name:10} {verdict:7} {seconds}  {text}")
    return int(any(verdict != "ok" for _, verdict, _, _ in rows))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("tests/gpu_smoke.py needs a GPU, and torch sees none on this machine.")
    sys.exit(main(torch.device("cuda", 0)))
