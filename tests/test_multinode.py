"""Several nodes: two torchrun agents on loopback train what one agent trains, bit for bit at one world size.

Each launch is a real one: agents, rendezvous, gloo, ranks, run log, checkpoint. What is compared is the final
checkpoint: all validation losses as full floats, every parameter, AdamW's and Snoo's state and each rank's
share of Muon's.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 240  # seconds for a launch; alone on a machine it takes about 8
SIZES = (
    "--scale rehearsal --model_dim 32 --num_heads 1 --head_dim 32 --train_seq_len 128 "
    "--num_layers 12 --batch_sequences 4 --val_seq_len 128 --val_tokens 512 --num_iterations 3 "
    "--warmup_steps 0 --val_loss_every 1 --snoo_k 2 --seed 5 --save_final true"
).split()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for name, seed in (("train", 0), ("val", 1)):
        tokens = np.random.default_rng(seed).integers(0, 256, 4096).astype("<u2")
        tokens[::100] = 256
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, tokens.size
        (folder / f"{name}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    shutil.copy(
        ROOT / "train_gpt_medium.py", folder
    )  # all launches run the same source, whoever edits it meanwhile
    return folder


def launch(agents: list[list[str]], shards: Path, log_dir: Path) -> dict[str, dict]:
    """Run the agents side by side to their end; the files of the checkpoint they leave, by name."""
    script = [
        str(shards / "train_gpt_medium.py"),
        *SIZES,
        "--train_files",
        str(shards / "train.bin"),
        "--val_files",
        str(shards / "val.bin"),
        "--log_dir",
        str(log_dir),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    started = []
    try:
        for i, options in enumerate(agents):
            with open(log_dir.with_suffix(f".agent{i}"), "wb") as out:
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "torch.distributed.run", *options, *script],
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        env=env,
                        start_new_session=True,
                    )
                )
        codes = [agent.wait(timeout=LIMIT) for agent in started]
    finally:
        for agent in started:  # an agent ends its ranks when asked to; they are not in its process group
            if agent.poll() is None:
                agent.terminate()
        for agent in started:
            try:
                agent.wait(timeout=45)
            except subprocess.TimeoutExpired:
                os.killpg(agent.pid, signal.SIGKILL)
    said = "\n".join(log_dir.with_suffix(f".agent{i}").read_text() for i in range(len(agents)))
    assert codes == [0] * len(agents), said
    (logs,) = [list(log_dir.glob("*/*.txt"))]
    assert len(logs) == 1, f"one log for all nodes, by rank 0, not {logs}"
    files = {
        path.name: torch.load(path, weights_only=True)
        for path in log_dir.glob("*/*_checkpoints/step_000003/*.pt")
    }
    assert "shared.pt" in files, said
    return files


def one_agent(ranks: int) -> list[list[str]]:
    return [["--standalone", f"--nproc_per_node={ranks}"]]


def two_static(ranks: int) -> list[list[str]]:
    where = [
        f"--nproc_per_node={ranks}",
        "--nnodes=2",
        "--master_addr=127.0.0.1",
        f"--master_port={free_port()}",
    ]
    return [[*where, f"--node_rank={node}"] for node in (0, 1)]


def two_rendezvous(ranks: int) -> list[list[str]]:
    where = [
        f"--nproc_per_node={ranks}",
        "--nnodes=2",
        "--rdzv_backend=c10d",
        "--rdzv_id=test",
        "--local_addr=127.0.0.1",
        f"--rdzv_endpoint=127.0.0.1:{free_port()}",
    ]
    return [[*where, f"--rdzv_conf=is_host={node == 0}"] for node in (0, 1)]


def assert_equal(a: object, b: object, where: str) -> None:
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, pair in enumerate(zip(a, b)):
            assert_equal(*pair, f"{where}/{i}")
    else:
        assert a == b, where


@pytest.mark.parametrize(
    "ranks, two_agents", [(1, two_static), (2, two_rendezvous)], ids=["2 x 1 static", "2 x 2 c10d"]
)
def test_two_nodes_train_what_one_node_trains(ranks: int, two_agents, shards: Path, tmp_path: Path) -> None:
    one = launch(one_agent(2 * ranks), shards, tmp_path / "one")
    two = launch(two_agents(ranks), shards, tmp_path / "two")
    assert sorted(one) == sorted(two) == sorted(["shared.pt", *(f"muon_{r}.pt" for r in range(2 * ranks))])
    losses = one["shared.pt"]["val_losses"]
    assert [step for step, _ in losses] == [0, 1, 2, 3] and losses[0][1] > losses[3][1] + 0.01, (
        "it does not learn"
    )
    own = ("log", "train_time_ms", "hyperparameters")  # the runs' own names, clocks and folders
    for name in one:
        for files in (one, two):
            for key in own:
                files[name].pop(key, None)
        assert_equal(one[name], two[name], name)
