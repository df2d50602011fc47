"""tests/h100.py without a CUDA build of torch: options, environment, comparison, blame, byte counts, one
graph.

What needs the CUDA build is the tool itself: `python tests/h100.py` (README, "before you rent").
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parent))
import h100

sys.path.insert(0, str(h100.ROOT))
import train_gpt_medium as script

FIGURES = json.loads(h100.FIGURES.read_text())


@pytest.mark.parametrize(
    "words, message",
    [
        (["--seq", "100"], "--seq 100: must be a positive multiple of 128"),
        (["--seq", "0"], "--seq 0: must be a positive multiple of 128"),
        (["--ranks", "0"], "--ranks 0: must be at least 1"),
        (["--script", "absent.py"], "--script absent.py: there is no such file"),
        (["--set", "backout"], "--set backout: is written NAME=VALUE"),
        (["--set", "a-b=1"], "--set a-b=1: is written NAME=VALUE"),
        (["--set", "backout=yes"], "--set backout=yes: the value must be a number, true or false"),
    ],
)
def test_a_bad_option_is_one_message_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert h100.main(words) == 2
    said = capsys.readouterr()
    assert said.err == f"error: {message}\n" and said.out == ""


def test_variants_are_named_by_what_differs() -> None:
    def name(*words: str) -> str:
        return h100.variant_name(h100.parse_options(list(words)))

    assert name() == name("--top", "3", "--quick") == "training 65536"
    assert name("--eval", "--seq", "262144") == "evaluation 262144"
    assert (
        name("--set", "smear=true", "backout=true")
        == name("--set", "backout=true", "smear=true")
        == "training 65536 backout=true smear=true"
    )
    assert name("--num_layers", "12") == "training 65536 num_layers=12"


def test_an_interpreter_without_cuda_is_refused() -> None:
    assert torch.version.cuda is None, "these tests expect the CPU build"
    with pytest.raises(h100.UserError, match="its torch is a CPU build"):
        h100.find_interpreter(sys.executable)
    with pytest.raises(h100.UserError, match="no such interpreter"):
        h100.find_interpreter("/nowhere/python")
    bare = getattr(sys, "_base_executable", sys.executable)
    with pytest.raises(h100.UserError, match="torch, triton or numpy is missing there .*ModuleNotFoundError"):
        h100.check_interpreter(str(isolated(bare)))


def isolated(base: str) -> Path:
    """An interpreter that finds no installed package."""
    import tempfile

    path = Path(tempfile.mkdtemp()) / "python"
    path.write_text(f'#!/bin/sh\nexec "{base}" -I -S "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("pip_works", [True, False])
def test_the_environment_is_announced_and_made_whole_or_not_at_all(
    pip_works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    commands = []

    def run(command: list[str], **kwargs) -> subprocess.CompletedProcess:
        if not commands:
            assert "about 6 GB, some minutes" in capsys.readouterr().out, "said before anything is fetched"
        commands.append(command)
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir(parents=True)
            (Path(command[-1]) / "bin" / "python").touch()
        if "pip" in command and not pip_works:
            raise subprocess.CalledProcessError(1, command)
        return subprocess.CompletedProcess(command, 0, stdout="13.0\n", stderr="")

    monkeypatch.setattr(h100, "ROOT", tmp_path)
    monkeypatch.setattr(h100, "ENVIRONMENT", tmp_path / ".h100")
    monkeypatch.setattr(h100.subprocess, "run", run)
    monkeypatch.setattr(h100.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 50e9}))
    if pip_works:
        assert h100.find_interpreter("") == str(tmp_path / ".h100" / "bin" / "python")
        assert (tmp_path / ".h100" / ".gitignore").read_text() == "*\n"
        made = len(commands)
        h100.find_interpreter("")
        assert len(commands) == made + 1, "the second time it is only checked"
        assert f"torch=={h100.TORCH}" in commands[1]
    else:
        with pytest.raises(h100.UserError, match="could not be made: .*pip install"):
            h100.find_interpreter("")
        assert not (tmp_path / ".h100").exists()
    assert not list(tmp_path.glob("*.tmp"))


def test_too_little_disk_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h100, "ENVIRONMENT", tmp_path / ".h100")
    monkeypatch.setattr(h100.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1e9}))
    with pytest.raises(h100.UserError, match="1.0 GB are free"):
        h100.find_interpreter("")


def report(**changes) -> dict:
    figures = FIGURES["ours"]["training 65536"]
    return (
        dict(
            variant="training 65536",
            script="train_gpt_medium.py",
            torch=h100.TORCH,
            seconds=150,
            error=None,
            top=[],
            **figures,
        )
        | changes
    )


def test_the_committed_figures_pass_and_show_beside_the_published() -> None:
    lines, wrong = h100.compare(report(), FIGURES)
    assert wrong == []
    (row,) = [line for line in lines if line.startswith("GB moved")]
    assert row.split()[2:] == [
        f"{FIGURES[who]['training 65536']['gb']:.2f}" if who != "now" else f"{report()['gb']:.2f}"
        for who in ("now", "ours", "published")
    ]


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(error="graph break at train_gpt_medium.py, line 7: why"),
            "graph break at train_gpt_medium.py, line 7: why",
        ),
        (dict(graphs=2), "2 graphs, not one"),
        (dict(graphs=0), "0 graphs, not one"),
        (dict(gb=340.0), "340.0 GB moved, more than the"),
        (dict(kernels=500), "500 kernels, more than the"),
    ],
)
def test_what_is_worse_fails(changes: dict, message: str) -> None:
    _, wrong = h100.compare(report(**changes), FIGURES)
    assert wrong and message in wrong[0]


def test_kernels_that_were_not_built_are_not_compared() -> None:
    lines, wrong = h100.compare(report(kernels=None), FIGURES)
    assert wrong == []
    row = next(line for line in lines if line.startswith("kernels built"))
    assert row.split()[2] == "-"


def test_a_variant_without_figures_says_so_and_passes() -> None:
    lines, wrong = h100.compare(report(variant="training 128"), FIGURES)
    assert wrong == [] and "no figures are committed for this variant; there are: training 65536" in lines[-1]


def test_the_figures_are_whole_and_no_worse_than_the_published() -> None:
    assert {
        "training 65536",
        "evaluation 262144",
        "training 65536 backout=true smear=true",
        "training 65536 head_chunks=8",
    } <= FIGURES["ours"].keys()
    for variant, ours in FIGURES["ours"].items():
        assert ours["graphs"] == 1, variant
        published = FIGURES["published"].get(variant, FIGURES["published"]["training 65536"])
        for key in ("gb", "kernels"):
            assert ours[key] <= published.get(key, float("inf")), (variant, key)
    assert FIGURES["torch"].startswith(h100.TORCH)
    assert "modded-nanogpt" in FIGURES["source"]


def test_exit_code_and_json_of_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The outer half with an inner half that only writes its report."""
    found = report(gb=1.5, top=[[1.0, 0.3, "fused: add; line 7"]])

    def run(command: list[str], **kwargs) -> subprocess.CompletedProcess:
        (Path(kwargs["env"]["H100_INSIDE"]) / "report.json").write_text(json.dumps(found))
        assert kwargs["env"]["LD_PRELOAD"].endswith("shim.so")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(h100, "find_interpreter", lambda chosen: "python")
    monkeypatch.setattr(h100, "build_pretence", lambda folder: None)
    monkeypatch.setattr(h100.subprocess, "run", run)
    assert h100.main(["--top", "1", "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == found
    printed = capsys.readouterr().out
    assert "fused: add; line 7" in printed and printed.endswith("ok\n")
    found["error"] = "graph break at line 7"
    assert h100.main([]) == 1
    assert "FAILED: graph break at line 7" in capsys.readouterr().out


def test_the_stand_in_for_the_driver_builds(tmp_path: Path) -> None:
    h100.build_pretence(tmp_path)
    assert (tmp_path / "shim.so").stat().st_size > 0 and (tmp_path / "libcuda.so.1").stat().st_size > 0


BROKEN = """
import torch

def helper(x):
    torch._dynamo.graph_break()
    return x + 1

class GPT(torch.nn.Module):
    def forward(self, x):
        return helper(x) * 2
"""


def test_a_graph_break_is_blamed_on_the_scripts_line(tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    path.write_text(BROKEN)
    spec = importlib.util.spec_from_file_location("edited", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch._dynamo.reset()
    with pytest.raises(Exception) as caught:
        torch.compile(module.GPT(), backend="eager", fullgraph=True)(torch.ones(3))
    text = h100.blame(caught.value, h100.Compiled(), path)
    assert text.startswith("graph break at edited.py, line 5: ")


def test_a_kernel_of_the_script_is_blamed_on_its_line(tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    path.write_text("import triton\n\n\n@triton.jit\ndef my_kernel(a):\n    b = a\n    return c\n")
    error = ValueError(
        "CompilationError: at 3:11:\n    return c\nNameError"
    )  # 3: the third line from the def on
    text = h100.blame(error, h100.Compiled(failed=["my_kernel"]), path)
    assert text.startswith("kernel my_kernel does not build, edited.py, line 7: ValueError: CompilationError")


def test_other_failures_are_blamed_too(tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    path.write_text("\n\ndef f():\n    raise TypeError('two devices')\n")
    spec = importlib.util.spec_from_file_location("edited", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(TypeError) as caught:
        module.f()
    assert (
        h100.blame(caught.value, h100.Compiled(), path)
        == "failure at edited.py, line 4: TypeError: two devices"
    )
    kernel = h100.Compiled(failed=["triton_fused_add_0"], origins={"triton_fused_add_0": "add; line 9"})
    assert (
        h100.blame(ValueError("shared memory"), kernel, path)
        == "kernel triton_fused_add_0 does not build (add; line 9): ValueError: shared memory"
    )
    assert (
        h100.blame(ValueError("x"), h100.Compiled(lowering="aten.sort, line 3"), path)
        == "failure at in aten.sort, line 3: ValueError: x"
    )


def test_live_bytes_counts_storages_once_and_forgets_them() -> None:
    with FakeTensorMode(), h100.live_bytes_mode("cpu") as live:
        a = torch.empty(1000, dtype=torch.float32)  # 4000 bytes: 4096 as allocated
        view = a[10:].view(-1, 2)
        assert (live.now, live.peak) == (4096, 4096)
        b = a + 1
        assert (live.now, live.peak) == (8192, 8192)
        del b
        assert (live.now, live.peak) == (4096, 8192)
        del a
        assert live.now == 4096, "a view keeps the storage"
        del view
        assert live.now == 0
        torch.empty(1000, device="meta")
        assert live.peak == 8192, "what is on another device does not count"


@pytest.mark.parametrize(
    "extra, training", [(dict(backout=True, smear=True, head_chunks=2), True), ({}, False)]
)
def test_the_script_is_one_graph(extra: dict, training: bool) -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        graphs.append(graph)
        return graph.forward

    model = script.GPT(257, 12, 1, 32, 256, 32, 256, **extra).train(training)
    compiled = torch.compile(model, dynamic=False, fullgraph=True, backend=backend)
    batch = torch.randint(257, (256,), dtype=torch.int32), torch.randint(257, (256,))
    with torch.set_grad_enabled(training):
        losses = [compiled(*batch, torch.tensor(window, dtype=torch.int32)) for window in (1, 2)]
    assert len(graphs) == 1, "a window that grows recompiles nothing"
    assert all(torch.isfinite(loss) for loss in losses)
