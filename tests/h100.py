"""Before you rent: compile the training step for an NVIDIA H100 on a machine that has no GPU.

    python tests/h100.py                                # the training graph of train_gpt_medium.py, as edited
    python tests/h100.py --eval --seq 262144            # the validation graph
    python tests/h100.py --set backout=true smear=true  # keyword arguments of GPT
    python tests/h100.py --set head_chunks=8 --top 20   # and the 20 kernels that move the most bytes
    python tests/h100.py --setup                        # only make the environment

Dynamo, AOTAutograd, Inductor, Triton and ptxas run for real; only the launches are left out. All tensors are
fake CUDA tensors: they have a shape, a dtype and a device, and no memory. What is wrong with a script is
found here at no cost: code that does not compile, a graph break, two devices in one operation, a kernel that
does not build for sm_90. Each is printed with the script's line at fault. What is right is counted and set
beside the figures of tests/h100_figures.json: exit code 1 on any failure, and when the script moves more
bytes or builds more kernels than the figure committed for the variant; 2 when nothing was compiled.

The counts, none of which is a measurement:
    kernels   Triton kernels built (cuBLAS products are not among them)
    GB        bytes that the compiled kernels read and write, Inductor's own count; of a hand-written kernel,
              its arguments
    est ms    Inductor's roofline: the slower of bytes at 3.35 TB/s and FLOPs at 989 TFLOP/s, summed over
              kernels
    TFLOP     2 m n k over the graph's matrix products; without attention (tests/bench.py has it) and what a
              hand-written kernel multiplies
    peak MiB  the largest sum of live storages, each rounded up to the 512 bytes of torch's allocator, while
              the compiled code runs on the fake tensors: parameters, gradients, activations and temporaries,
              as the code allocates and frees them. "graph": forward and backward alone. "step": two of the
              script's own training steps, as rank 0 of --ranks, so that all optimizer state exists; eager
              parts (AdamW, Snoo) count their temporaries. Not counted: cuBLAS workspaces, NCCL buffers, the
              CUDA context, fragmentation.

The first use makes an environment of its own in .h100/ (about 6 GB and some minutes: a CUDA build of torch,
which needs no GPU to be installed). --python or H100_PYTHON names another interpreter that has one. A compile
takes 2 to 5 minutes of one core and 3 GB of memory; gcc and g++ must be there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
import typing
import weakref
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "tests" / "h100_figures.json"
ENVIRONMENT = ROOT / ".h100"
TORCH = "2.14.1"
CEILINGS = {"gb": 1.001, "kernels": 1.0}  # a variant may exceed its committed figure by this factor, not more


class UserError(Exception):
    """Said in one message, exit code 2: nothing was compiled."""


# -----------------------------------------------------------------------------------------------------------
# Outside: options, the environment, the comparison. Needs nothing but Python.


def parse_options(argv: list[str]) -> argparse.Namespace:
    description, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--script", type=Path, default=ROOT / "train_gpt_medium.py", help="another file that offers GPT"
    )
    parser.add_argument("--seq", type=int, default=65536, help="tokens a sequence (default %(default)s)")
    parser.add_argument("--eval", action="store_true", help="the validation graph: no gradients")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="keyword arguments of GPT")
    parser.add_argument(
        "--top", type=int, default=0, metavar="N", help="list the N kernels that move the most bytes"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="no kernel is built by Triton and ptxas: the other counts in half the time",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=8,
        help="world size of the step whose memory is counted (default %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--setup", action="store_true", help="make the environment, compile nothing")
    parser.add_argument(
        "--python",
        default=os.environ.get("H100_PYTHON", ""),
        help="an interpreter with a CUDA build of torch",
    )
    for name, value in dict(vocab_size=50257, num_layers=16, num_heads=8, model_dim=1024).items():
        parser.add_argument("--" + name, type=int, default=value, help="of GPT (default %(default)s)")
    options = parser.parse_args(argv)
    if options.seq < 128 or options.seq % 128:
        raise UserError(f"--seq {options.seq}: must be a positive multiple of 128")
    if options.ranks < 1:
        raise UserError(f"--ranks {options.ranks}: must be at least 1")
    if not options.script.is_file():
        raise UserError(f"--script {options.script}: there is no such file")
    options.extra = {}
    for word in options.set:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"--set {word}: is written NAME=VALUE")
        try:
            options.extra[name] = json.loads(text)
        except json.JSONDecodeError:
            raise UserError(f"--set {word}: the value must be a number, true or false") from None
    return options


def variant_name(options: argparse.Namespace) -> str:
    """The key of a variant's figures: what differs from the training graph of the default recipe."""
    default = parse_options([])
    sizes = [
        f"{n}={getattr(options, n)}"
        for n in ("vocab_size", "num_layers", "num_heads", "model_dim")
        if getattr(options, n) != getattr(default, n)
    ]
    words = [
        "evaluation" if options.eval else "training",
        str(options.seq),
        *sizes,
        *(f"{k}={json.dumps(v)}" for k, v in sorted(options.extra.items())),
    ]
    return " ".join(words)


def find_interpreter(chosen: str) -> str:
    """An interpreter that has a CUDA build of torch: the named one, or that of .h100/, made if it is
    missing."""
    if chosen:
        path = shutil.which(os.path.expanduser(chosen))
        if path is None:
            raise UserError(f"{chosen}: there is no such interpreter (--python, H100_PYTHON)")
        check_interpreter(path)
        return path
    path = str(ENVIRONMENT / "bin" / "python")
    if not os.path.exists(path):
        print(
            f"Making {ENVIRONMENT}: torch {TORCH} for CUDA, about 6 GB, some minutes, once. "
            "--python names an interpreter that has one.",
            flush=True,
        )
        free = shutil.disk_usage(ROOT).free
        if free < 12e9:
            raise UserError(
                f"{ENVIRONMENT}: needs about 12 GB while it is made, {free / 1e9:.1f} GB are free"
            )
        aside = ENVIRONMENT.with_name(f".h100.{os.getpid()}.tmp")  # whole, or not there
        try:
            subprocess.run([sys.executable, "-m", "venv", str(aside)], check=True)
            (aside / ".gitignore").write_text("*\n")
            subprocess.run(
                [
                    str(aside / "bin" / "python"),
                    "-m",
                    "pip",
                    "install",
                    "--quiet",
                    f"torch=={TORCH}",
                    "numpy",
                ],
                check=True,
            )
            check_interpreter(str(aside / "bin" / "python"))
            os.replace(aside, ENVIRONMENT)
        except subprocess.CalledProcessError as e:
            raise UserError(
                f"the environment could not be made: {' '.join(map(str, e.cmd))} failed"
            ) from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    check_interpreter(path)
    return path


def check_interpreter(path: str) -> None:
    code = "import numpy, torch; print(torch.version.cuda); torch.version.cuda and __import__('triton')"
    found = subprocess.run([path, "-c", code], capture_output=True, text=True)
    if found.returncode != 0:
        raise UserError(
            f"{path}: torch, triton or numpy is missing there ({found.stderr.strip().splitlines()[-1]})"
        )
    if found.stdout.strip() == "None":
        raise UserError(
            f"{path}: its torch is a CPU build; a CUDA build is needed (pip install torch=={TORCH})"
        )


def compare(report: dict[str, typing.Any], figures: dict[str, typing.Any]) -> tuple[list[str], list[str]]:
    """(lines of the table, what is wrong). A variant without committed figures is compared with nothing."""
    ours, published = (figures[who].get(report["variant"], {}) for who in ("ours", "published"))
    rows = [
        ("graphs", "graphs"),
        ("kernels built", "kernels"),
        ("GB moved", "gb"),
        ("estimated ms", "est_ms"),
        ("TFLOP of matrix products", "tflop"),
        ("peak MiB, graph", "graph_mib"),
        ("peak MiB, step", "step_mib"),
    ]

    def cell(value: typing.Any) -> str:
        return "-" if value is None else f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"

    lines = [
        f"{report['variant']}: {report['script']}, torch {report['torch']}, {report['seconds']} s to compile",
        f"{'':26}{'now':>12}{'committed':>12}{'published':>12}",
    ]
    lines += [
        f"{title:26}{cell(report[key]):>12}{cell(ours.get(key)):>12}{cell(published.get(key)):>12}"
        for title, key in rows
    ]
    if not ours:
        lines.append(f"no figures are committed for this variant; there are: {', '.join(figures['ours'])}")
    wrong = [report["error"]] if report["error"] else []
    if not report["error"] and report["graphs"] != 1:
        wrong.append(f"{report['graphs']} graphs, not one")
    for key, title in (("gb", "GB moved"), ("kernels", "kernels")):
        for who, reference in (("committed", ours), ("published", published)):
            counted = not report["error"] and report[key] is not None and key in reference
            if counted and report[key] > reference[key] * CEILINGS[key]:
                wrong.append(f"{report[key]} {title}, more than the {reference[key]} {who}")
    return lines, wrong


def main(argv: list[str]) -> int:
    try:
        options = parse_options(argv)
        if os.environ.get("H100_INSIDE"):
            measure(options, Path(os.environ["H100_INSIDE"]))
        figures = json.loads(FIGURES.read_text())
        interpreter = find_interpreter(options.python)
        if options.setup:
            print(f"{interpreter}: ready")
            return 0
        with tempfile.TemporaryDirectory(prefix="h100_") as name:
            folder = Path(name)
            build_pretence(folder)
            env = {
                **os.environ,
                "H100_INSIDE": name,
                "LD_PRELOAD": str(folder / "shim.so"),
                "LD_LIBRARY_PATH": f"{name}:{os.environ.get('LD_LIBRARY_PATH', '')}",
                "TORCHINDUCTOR_CACHE_DIR": f"{name}/inductor",
                "TRITON_CACHE_DIR": f"{name}/triton",
            }
            print(
                f"compiling {options.script} for sm_90: {variant_name(options)} (2 to 5 minutes)", flush=True
            )
            ended = subprocess.run([interpreter, str(Path(__file__).resolve()), *argv], env=env)
            if not (folder / "report.json").exists():
                raise UserError(
                    f"the compiling process ended with {ended.returncode} and no report (its output is above)"
                )
            report = json.loads((folder / "report.json").read_text())
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    lines, wrong = compare(report, figures)
    if options.top:
        print(f"{'GB':>8} {'est ms':>7}  kernel: the operations it came from; the script's lines")
        for gb, ms, text in report["top"]:
            print(f"{gb:8.2f} {ms:7.3f}  {text}")
    print("\n".join(lines))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    for text in wrong:
        print(f"FAILED: {text}")
    if not wrong:
        print("ok")
    return 1 if wrong else 0


# -----------------------------------------------------------------------------------------------------------
# The pretended device. Two small libraries stand in for the driver and for the runtime calls that torch
# makes in C++ where no kernel is launched; the rest is asked in Python and patched there.

RUNTIME = r"""
extern "C" {
#define ANSWER(name, args, effect) int name args { effect; return 0; }
ANSWER(cudaGetDeviceCount, (int* n), *n = 1)
ANSWER(cudaGetDevice, (int* d), *d = 0)
ANSWER(cudaSetDevice, (int), )
ANSWER(cudaGetLastError, (void), )
ANSWER(cudaPeekAtLastError, (void), )
ANSWER(cudaDeviceSynchronize, (void), )
ANSWER(cudaDeviceGetStreamPriorityRange, (int* low, int* high), *low = 0; *high = -5)
ANSWER(cudaStreamCreateWithPriority, (void** s, unsigned, int), *s = (void*)16)
ANSWER(cudaStreamIsCapturing, (void*, int* s), *s = 0)
ANSWER(cudaStreamQuery, (void*), )
ANSWER(cudaStreamSynchronize, (void*), )
ANSWER(cudaStreamWaitEvent, (void*, void*, unsigned), )
ANSWER(cudaEventCreateWithFlags, (void** e, unsigned), *e = (void*)32)
ANSWER(cudaEventRecord, (void*, void*), )
ANSWER(cudaEventRecordWithFlags, (void*, void*, unsigned), )
ANSWER(cudaEventQuery, (void*), )
ANSWER(cudaEventDestroy, (void*), )
}
namespace c10 { namespace cuda {
signed char device_count() { return 1; }
bool hasPrimaryContext(signed char) { return false; }
} }
"""
DRIVER = r"""
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = 0; return 0; }
int cuGetErrorString(int error, const char** text) { *text = "no device"; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) { *flags = *active = 0; return 0; }
"""


@dataclasses.dataclass
class Card:
    """What Inductor and Triton ask of a device: an H100 SXM5 with 80 GB."""

    name: str = "NVIDIA H100 80GB HBM3"
    type: str = "cuda"
    index: int = 0
    major: int = 9
    minor: int = 0
    cc: int = 90
    multi_processor_count: int = 132
    total_memory: int = 85 * 10**9
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    gcnArchName: str = ""
    shared_memory_per_block: int = 48 * 1024
    shared_memory_per_block_optin: int = 227 * 1024
    shared_memory_per_multiprocessor: int = 228 * 1024
    L2_cache_size: int = 50 * 2**20
    is_integrated: int = 0


TFLOPS, GBPS = 989.4, 3352.0  # dense bf16; HBM3


def build_pretence(folder: Path) -> None:
    for compiler, source, text, library in (
        ("g++", "runtime.cpp", RUNTIME, "shim.so"),
        ("gcc", "driver.c", DRIVER, "libcuda.so.1"),
    ):
        if shutil.which(compiler) is None:
            raise UserError(
                f"{compiler} is missing; it builds the stand-in for the CUDA driver, and Triton needs it"
            )
        (folder / source).write_text(text)
        built = subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", str(folder / library), str(folder / source)],
            capture_output=True,
            text=True,
        )
        if built.returncode != 0:
            raise UserError(
                f"{compiler} failed on the stand-in for the CUDA driver: {built.stderr.strip()[:300]}"
            )


@dataclasses.dataclass
class Compiled:
    """What the compiler did: kernels in the order they were built, sums over all graphs."""

    kernels: list[str] = dataclasses.field(default_factory=list)
    graphs: int = 0
    bytes: int = 0
    est_ms: float = 0.0
    flops: int = 0
    nodes: list[tuple[float, float, str]] = dataclasses.field(
        default_factory=list
    )  # GB, estimated ms, description
    origins: dict[str, str] = dataclasses.field(default_factory=dict)  # kernel -> operations; lines
    failed: list[str] = dataclasses.field(default_factory=list)  # kernels whose build failed
    lowering: str = ""  # the operation that Inductor is working on


def script_lines(nodes: typing.Iterable[typing.Any], script: Path) -> list[int]:
    """The script's lines that FX nodes came from, innermost frame each."""
    lines = set()
    for node in nodes:
        frames = re.findall(
            rf'File "[^"]*{re.escape(script.name)}", line (\d+)', node.meta.get("stack_trace") or ""
        )
        if frames:
            lines.add(int(frames[-1]))
    return sorted(lines)


def describe(scheduler_nodes: typing.Iterable[typing.Any], script: Path) -> str:
    """The operations of a kernel and the lines they came from."""
    origins = [
        o
        for n in scheduler_nodes
        if getattr(n, "node", None) is not None
        for o in (getattr(n.node, "origins", None) or ())
    ]
    names = dict.fromkeys(re.sub(r"^aten\.|\.default$|\.Tensor$", "", str(o.target)) for o in origins)
    lines = ", ".join(map(str, script_lines(origins, script)))
    return f"{', '.join(names)}"[:140] + (f"; line {lines}" if lines else "")


def pretend(compiled: Compiled, script: Path, quick: bool) -> contextlib.ExitStack:
    """Patches that make torch believe in the card, and that note in `compiled` what is compiled for it."""
    import torch
    import torch._dynamo.device_interface as interfaces
    import torch._functorch.config as functorch_config
    import torch._inductor.config as config
    import torch._inductor.fx_passes.fuse_attention
    import torch._inductor.fx_passes.joint_graph
    import torch._inductor.runtime.triton_heuristics as heuristics
    import torch._inductor.runtime.triton_helpers
    import torch._inductor.scheduler as scheduler
    import triton
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.graph import GraphLowering
    from triton.backends.compiler import GPUTarget

    config.compile_threads = 1
    config.force_disable_caches = True
    config.joint_graph_constant_folding = False  # it would run operations on the device
    if hasattr(config, "use_static_cuda_launcher"):
        config.use_static_cuda_launcher = False
    functorch_config.enable_autograd_cache = False
    functorch_config.force_non_lazy_backward_lowering = True  # forward and backward are compiled at once

    card, stack = Card(), contextlib.ExitStack()

    class TritonDriver:
        class utils:
            @staticmethod
            def get_device_properties(device: int) -> dict[str, int]:
                return dict(
                    max_shared_mem=card.shared_memory_per_block_optin,
                    multiprocessor_count=card.multi_processor_count,
                    warpSize=card.warp_size,
                    max_num_regs=card.regs_per_multiprocessor,
                )

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", card.cc, card.warp_size)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_current_device(self) -> int:
            return 0

        def set_current_device(self, device: int) -> None:
            pass

        def get_current_stream(self, device: int = 0) -> int:
            return 0

        def get_device_interface(self) -> typing.Any:
            return torch.cuda

    triton.runtime.driver.set_active(TritonDriver())

    def answer(value: typing.Any) -> typing.Callable[..., typing.Any]:
        return lambda *args, **kwargs: value

    def patch(owner: typing.Any, **values: typing.Any) -> None:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(owner, name, value))

    def rng_state(*args: typing.Any, **kwargs: typing.Any) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    # what is asked about the device
    patch(
        torch.cuda,
        is_available=answer(True),
        is_initialized=answer(True),
        _is_in_bad_fork=answer(False),
        current_device=answer(0),
        device_count=answer(1),
        get_device_properties=answer(card),
        get_device_capability=answer((9, 0)),
        get_device_name=answer(card.name),
        _lazy_init=answer(None),
        synchronize=answer(None),
        set_device=answer(None),
        is_current_stream_capturing=answer(False),
        get_rng_state=rng_state,
        set_rng_state=answer(None),
        _exchange_device=answer(0),
        _maybe_exchange_device=answer(0),
    )
    patch(torch.cuda.random, _lazy_init=answer(None), get_rng_state=rng_state, set_rng_state=answer(None))
    static = {
        name: staticmethod(answer(value))
        for name, value in dict(
            is_available=True,
            get_device_properties=card,
            current_device=0,
            get_compute_capability=90,
            device_count=1,
            synchronize=None,
            raise_if_triton_unavailable=None,
            is_triton_capable=True,
        ).items()
    }
    patch(interfaces.CudaInterface, **static)
    patch(
        interfaces.CudaInterface.Worker,
        **{name: static[name] for name in ("get_device_properties", "current_device")},
    )
    patch(torch._subclasses.fake_tensor, init_gpu_context=answer(None))
    patch(torch._inductor.fx_passes.fuse_attention, _sfdp_init=answer(None))
    patch(torch._inductor.runtime.triton_helpers, set_driver_to_gpu=answer(None))
    patch(torch.utils._triton, has_triton=answer(True))
    patch(scheduler, has_triton=answer(True))
    for module in (torch._inductor.utils, scheduler):
        for name, value in dict(get_device_tflops=TFLOPS, get_gpu_dram_gbps=GBPS).items():
            if hasattr(module, name):
                patch(module, **{name: answer(value)})

    # what is noted: each graph's counts, each kernel's origin, each build
    node_class = scheduler.BaseSchedulerNode
    source = textwrap.dedent(inspect.getsource(node_class.get_read_write_buffer_accesses))
    assert "int(1e9)" in source, "Inductor no longer cuts a buffer at 1e9 elements: drop this patch"
    scope = dict(
        vars(scheduler)
    )  # Inductor counts at most 1e9 elements of a buffer, and the logits have 3.3e9
    exec("from __future__ import annotations\n" + source.replace("int(1e9)", "int(1e15)"), scope)
    patch(node_class, get_read_write_buffer_accesses=scope["get_read_write_buffer_accesses"])

    to_module, run_node = GraphLowering.compile_to_module, GraphLowering.run_node
    define_kernel, precompile = TritonScheduling.define_kernel, heuristics.CachingAutotuner.precompile

    def counted(self: GraphLowering) -> typing.Any:
        module = to_module(self)
        total, sizes, runtimes = self.count_bytes()
        compiled.bytes += total
        compiled.est_ms += sum(ms for _, ms in runtimes)
        for (node, words), (_, ms) in zip(sizes, runtimes, strict=True):
            kind = "extern" if node.is_extern() else "template" if node.is_template() else "fused"
            compiled.nodes.append(
                (round(words * 4 / 1e9, 3), round(ms, 3), f"{kind}: {describe(node.get_nodes(), script)}")
            )
        for node in self.module.graph.nodes:
            if node.op == "call_function" and str(node.target) in (
                "aten.mm.default",
                "aten.addmm.default",
                "aten.bmm.default",
            ):
                left = node.args[1 if "addmm" in str(node.target) else 0].meta["val"]
                compiled.flops += 2 * node.meta["val"].numel() * left.shape[-1]
        return module

    def lowered(self: GraphLowering, node: typing.Any) -> typing.Any:
        lines = script_lines([node], script)
        compiled.lowering = f"{node.target}" + (f", line {lines[-1]}" if lines else "")
        return run_node(self, node)

    def defined(self: TritonScheduling, src_code: str, node_schedule: typing.Any, kernel: typing.Any) -> str:
        name = define_kernel(self, src_code, node_schedule, kernel)
        compiled.origins[name] = describe((n for n in node_schedule if hasattr(n, "node")), script)
        return name

    def built(self: heuristics.CachingAutotuner, *args: typing.Any, **kwargs: typing.Any) -> None:
        if quick:
            return
        try:
            precompile(self, *args, **kwargs)
        except Exception:
            compiled.failed.append(getattr(self.fn, "__name__", "?"))
            raise

    def keep_binary(self: heuristics.CachingAutotuner) -> None:  # instead of loading it on a device
        compiled.kernels.append(getattr(self.fn, "__name__", "?"))
        self.launchers = [lambda *args, **kwargs: None]

    patch(GraphLowering, compile_to_module=counted, run_node=lowered)
    patch(TritonScheduling, define_kernel=defined)
    patch(heuristics.CachingAutotuner, precompile=built, _make_launchers=keep_binary, run=answer(None))

    # what the compiled code calls: storages are fake ones, so that it runs through without a device
    guards = torch._C._dynamo.guards
    patch(
        guards,
        _empty_strided_cuda=lambda size, stride, dtype: torch.empty_strided(
            size, stride, dtype=dtype, device="cuda"
        ),
        _reinterpret_tensor=torch.as_strided,
    )
    patch(torch._C, _cuda_getCurrentRawStream=answer(0))
    return stack


# -----------------------------------------------------------------------------------------------------------
# Inside: compile, run on fake tensors, count.


def live_bytes_mode(device_type: str = "cuda") -> typing.Any:
    """A dispatch mode whose `now` and `peak` are the bytes of live storages on a device."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class LiveBytes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.now = self.peak = 0
            self.known: weakref.WeakSet = weakref.WeakSet()

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return (
                True  # else torch.compile would hand over to eager mode; what it compiled is seen as it runs
            )

        def __torch_dispatch__(
            self, func: typing.Any, types: typing.Any, args: typing.Any = (), kwargs: typing.Any = None
        ) -> typing.Any:
            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.device.type == device_type:
                    self.add(leaf.untyped_storage())
            return result

        def add(self, storage: torch.UntypedStorage) -> None:
            if storage in self.known:
                return
            size = -(-storage.nbytes() // 512) * 512
            self.known.add(storage)
            weakref.finalize(storage, self.drop, size)
            self.now += size
            self.peak = max(self.peak, self.now)

        def drop(self, size: int) -> None:
            self.now -= size

    return LiveBytes()


def on_card(model: typing.Any) -> typing.Any:
    """Put a fake CUDA tensor in the place of each parameter and buffer: Module.to cannot do it for fake
    ones."""
    import torch

    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            for name, old in kind.items():
                if old is not None:
                    new = torch.empty_like(old, device="cuda")
                    if isinstance(old, torch.nn.Parameter):
                        new = torch.nn.Parameter(new, old.requires_grad)
                    new.__dict__.update(
                        {k: v for k, v in vars(old).items() if k not in vars(new)}
                    )  # what a script hangs on it
                    kind[name] = new
    return model


def blame(error: BaseException, compiled: Compiled, script: Path) -> str:
    """One message: what failed, and the script's line at fault."""
    text = f"{type(error).__name__}: {str(error).strip()}"
    in_text = re.findall(rf'File "[^"]*{re.escape(script.name)}", line (\d+)', text)
    frames = [
        f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == script.name
    ]
    short = "\n    ".join(line for line in text.splitlines() if line.strip())[:1500]
    if compiled.failed:
        name = compiled.failed[-1]
        own = re.search(rf"^ *def {re.escape(name)}\(", script.read_text(), re.MULTILINE)
        place = re.search(r"\bat (\d+):\d+:", text)
        if own and place:  # a kernel of the script: Triton counts from its def
            line = script.read_text()[: own.end()].count("\n") + int(place[1])
            return f"kernel {name} does not build, {script.name}, line {line}: {short}"
        return f"kernel {name} does not build ({compiled.origins.get(name, 'origin unknown')}): {short}"
    line = in_text[-1] if in_text else frames[-1] if frames else ""
    where = (
        f"{script.name}, line {line}"
        if line
        else f"in {compiled.lowering}"
        if compiled.lowering
        else "no line known"
    )
    kind = "graph break" if "Unsupported" in type(error).__name__ else "failure"
    return f"{kind} at {where}: {short}"


def measure(options: argparse.Namespace, folder: Path) -> typing.NoReturn:
    """Compile and count; write folder/report.json and end the process: the device cannot be torn down."""
    import torch
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses.fake_tensor import FakeTensorMode

    sys.path.insert(0, str(options.script.parent))
    spec = importlib.util.spec_from_file_location(options.script.stem, options.script)
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look their module up
    compiled, error, start = Compiled(), None, time.time()
    report = dict(
        variant=variant_name(options),
        script=options.script.name,
        torch=torch.__version__,
        error=None,
        graph_mib=None,
        step_mib=None,
    )

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> typing.Any:
        compiled.graphs += 1
        return compile_fx(graph, inputs)

    def note() -> None:
        report.update(
            graphs=compiled.graphs,
            kernels=None if options.quick else len(compiled.kernels),
            gb=round(compiled.bytes / 1e9, 2),
            est_ms=round(compiled.est_ms, 2),
            tflop=round(compiled.flops / 1e12, 2),
            seconds=round(time.time() - start),
            top=sorted(compiled.nodes, reverse=True)[: options.top],
        )

    try:
        spec.loader.exec_module(script)
        with pretend(compiled, options.script, options.quick), FakeTensorMode(allow_non_fake_inputs=True):
            model = script.GPT(
                options.vocab_size,
                options.num_layers,
                options.num_heads,
                options.model_dim,
                options.seq,
                **options.extra,
            )
            model = on_card(model).train(not options.eval)
            with torch.device("cuda"):
                batch = (
                    torch.empty(options.seq, dtype=torch.int32),
                    torch.empty(options.seq, dtype=torch.int64),
                )
                window = torch.empty((), dtype=torch.int32)
            forward = torch.compile(model, dynamic=False, fullgraph=True, backend=backend)
            with torch.set_grad_enabled(not options.eval):
                forward(*batch, window)
            note()
            with live_bytes_mode() as live:
                for tensor in (*model.parameters(), *model.buffers(), *batch, window):
                    live.add(tensor.untyped_storage())
                with torch.set_grad_enabled(not options.eval):
                    loss = forward(*batch, window)
                    if not options.eval:
                        loss.backward()
                report["graph_mib"] = live.peak >> 20
                del loss
                model.zero_grad(set_to_none=True)
                if not options.eval and hasattr(script, "train_step"):
                    report["step_mib"] = step_memory(script, model, forward, batch, options, live)
    except Exception as e:
        error = e
        traceback.print_exc()
        report["error"] = blame(e, compiled, options.script)
    if error is not None:
        note()
    (folder / "report.json").write_text(json.dumps(report))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else 1)


def step_memory(
    script: typing.Any,
    model: typing.Any,
    forward: typing.Any,
    batch: typing.Any,
    options: argparse.Namespace,
    live: typing.Any,
) -> int:
    """Peak MiB of the script's own training step on rank 0 of `ranks`; its collectives move nothing."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if options.ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    args = script.Hyperparameters(batch_sequences=options.ranks, train_seq_len=options.seq)
    ctx = script.Distributed(0, 0, options.ranks, torch.device("cuda", 0))
    with torch.device("cuda"):
        training = script.Training(model, forward, *script.build_optimizers(model, args, 0, options.ranks))
    for step in range(2):
        live.peak = live.now
        script.train_step(training, batch, step, args, ctx)
    return live.peak >> 20


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
