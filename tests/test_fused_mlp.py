"""The Triton kernel of --fused_mlp: interpreted on the CPU against float64 autograd of the plain formula, and built for
an H100 (sm_90), which takes no GPU."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# In a process of its own: Triton decides at import whether it interprets. Sizes: several tiles in every direction,
# and more rows of tiles than one group of the kernel's walk.
PROGRAM = """
import json, sys
import torch
sys.path.insert(0, sys.argv[1])
import train_gpt_medium as script

torch.manual_seed(0)
errors = {}
for dtype in (torch.float32, torch.float16):
    tokens, dim = 128 * 9, 128
    x, fc_w, proj_w, dy = ((torch.randn(*shape) * scale).to(dtype) for shape, scale in (
        ((tokens, dim), 1), ((4 * dim, dim), 0.1), ((dim, 4 * dim), 0.1), ((tokens, dim), 1)))
    leaves = [t.clone().requires_grad_() for t in (x, fc_w, proj_w)]
    y = script.FusedMLP.apply(*leaves)
    found = [y, *torch.autograd.grad(y, leaves, dy)]
    exact = [t.double().requires_grad_() for t in (x, fc_w, proj_w)]
    y = torch.relu(exact[0] @ exact[1].T) ** 2 @ exact[2].T
    wanted = [y, *torch.autograd.grad(y, exact, dy.double())]
    errors[str(dtype)] = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted)]
print(json.dumps(errors))
"""


@pytest.fixture(scope="module")
def errors() -> dict[str, list[float]]:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(ROOT)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype, bound", [("torch.float32", 3e-6), ("torch.float16", 2e-3)])
def test_output_and_gradients_are_those_of_float64(errors: dict, dtype: str, bound: float) -> None:
    """Output, dx, dfc_w, dproj_w: the largest error over the largest value, within the type's rounding."""
    assert len(errors[dtype]) == 4
    assert max(errors[dtype]) < bound


BUILD = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
sys.path.insert(0, sys.argv[1])
import train_gpt_medium as script

for backward, unit_stride in ((False, "stride_bk"), (True, "stride_bn")):  # fc_w^T and proj_w, as the model passes them
    fixed = dict(BACKWARD=backward, BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, GROUP=8, **{unit_stride: 1})
    names = ["a", "b", "out", "act", "N", "K", "stride_bk", "stride_bn"]
    kinds = {n: "constexpr" if n in fixed else "*bf16" if n in names[:4] else "i32" for n in [*names, *fixed]}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in fixed}
    source = ASTSource(fn=script.relu_squared_product_kernel, signature=kinds, constexprs=fixed, attrs=aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=8, num_stages=3))
    print(backward, len(built.asm["cubin"]) > 0, "wgmma" in built.asm["ptx"], built.metadata.shared)
"""


def test_the_kernel_builds_for_an_h100(tmp_path: Path) -> None:
    """ptxas takes both directions, the products use the tensor cores, and shared memory fits its 227 KiB."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", BUILD, str(ROOT)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:3] for line in lines] == [["False", "True", "True"], ["True", "True", "True"]]
    assert all(0 < int(line[3]) <= 227 * 1024 for line in lines)


def test_without_a_gpu_the_option_is_refused() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "train_gpt_medium.py"), "--scale", "rehearsal", "--fused_mlp"],
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "--fused_mlp" in done.stderr and "GPU" in done.stderr
