"""Wrong, cut, foreign, empty and hostile checkpoints: one clear message, nothing changed, no code run. And records/checkpoint.py."""
from __future__ import annotations

import math
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from fault_helpers import checkpoints, contents, logs, make_shards, succeed, tree_of, words
from train_helpers import ROOT, clean_environment, fork_ranks

COMMAND = ROOT / "records" / "checkpoint.py"
sys.path.insert(0, str(ROOT / "records"))
import checkpoint as command  # noqa: E402


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("shards"), sequences=2)


PAIR = dict(batch_sequences=2, val_tokens=256, num_iterations=3)


@pytest.fixture(scope="module")
def original(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks: three files."""
    log_dir = tmp_path_factory.mktemp("whole")
    succeed(words(shards, log_dir, save_every=2, **PAIR), 2)
    return checkpoints(log_dir)[2]


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "run" / "000_copy_checkpoints" / "step_000002")


def refused(copy: Path, shards: Path, *parts: str, of_command: bool = True) -> None:
    log_dir = copy.parent.parent.parent
    before = tree_of(log_dir)
    result = fork_ranks(words(shards, log_dir, resume=copy, run_name="run", save_every=1, **PAIR))
    assert result.returncode == 1 and "Traceback" not in result.stderr and not result.stdout, (result.stdout, result.stderr)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") <= 3, result.stderr
    assert all(part in result.stderr for part in (*parts, str(copy))), result.stderr
    if of_command:
        with pytest.raises(command.NoCheckpoint, match=copy.name):
            list(command.describe(copy))
    assert tree_of(log_dir) == before


class Planted:
    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.sign),)


@pytest.mark.parametrize("name", ["shared.pt", "muon_0.pt", "muon_1.pt"])
def test_a_planted_pickle_does_not_run(name: str, copy: Path, shards: Path, tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    value = torch.load(copy / name, weights_only=True)
    # in the place of a value of a file that is otherwise right, as the file itself, and as a pickle of the old format
    for how in ("value", "file", "plain"):
        hostile = {**value, "step" if name == "shared.pt" else "state": Planted(sign)} if how == "value" else Planted(sign)
        if how == "plain":
            (copy / name).write_bytes(pickle.dumps(hostile))
        else:
            torch.save(hostile, copy / name)
        refused(copy, shards, name)
        assert not sign.exists()
        with pytest.raises(FileExistsError):  # the trap works where code may run: this is the oracle of the test
            for _ in range(2):
                pickle.loads((copy / name).read_bytes()) if how == "plain" else torch.load(copy / name, weights_only=False)
        sign.rmdir()


@pytest.mark.parametrize("name", ["shared.pt", "muon_1.pt"])
def test_cut_empty_and_foreign_files(name: str, copy: Path, shards: Path) -> None:
    whole = (copy / name).read_bytes()
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        (copy / name).write_bytes(whole[:size])
        refused(copy, shards, name)
    for foreign in (b"step:1/2 val_loss:3.0\n" * 1000, bytes(len(whole)), b"PK\x03\x04" + whole[4:200]):
        (copy / name).write_bytes(foreign)
        refused(copy, shards, name)
    middle = len(whole) // 2
    (copy / name).write_bytes(whole[:middle] + bytes(b ^ 255 for b in whole[middle:middle + 64]) + whole[middle + 64:])
    refused(copy, shards, name, "damaged")
    with zipfile.ZipFile(copy / name, "w") as archive:
        archive.writestr("readme.txt", "an archive, but not torch's")
    refused(copy, shards, name)
    for value in ([1, 2], torch.zeros(3), {"model": {}}, 7):
        torch.save(value, copy / name)
        refused(copy, shards, str(copy), of_command=name == "shared.pt")
    (copy / name).unlink()
    refused(copy, shards, name)
    (copy / name).mkdir()
    refused(copy, shards, name)


def test_values_of_the_wrong_kind(copy: Path, shards: Path) -> None:
    good = torch.load(copy / "shared.pt", weights_only=True)
    for change in (dict(step="2"), dict(step=-1), dict(world_size=0), dict(world_size=10**12), dict(format=1), dict(model=None),
                   dict(val_losses={}), dict(hyperparameters=[]), dict(snoo=3), dict(log=b"x"), dict(kept="x"),
                   dict(val_losses=[["a", 3.0]]), dict(val_losses=[[1]]), dict(kept=[3]), dict(train_time_ms=math.nan),
                   dict(hyperparameters={**good["hyperparameters"], 3: 4})):
        torch.save({**good, **change}, copy / "shared.pt")
        refused(copy, shards, of_command=False)
    for key in good:
        torch.save({k: v for k, v in good.items() if k != key}, copy / "shared.pt")
        if key not in ("snoo",):
            refused(copy, shards, "shared.pt", key, of_command=False)


def test_state_that_does_not_fit_the_model(copy: Path, shards: Path) -> None:
    """The hyperparameters are right and the state is another model's: found before there is a log."""
    good = torch.load(copy / "shared.pt", weights_only=True)
    model, adam, snoo = good["model"], good["adam"], good["snoo"]
    wrong = [dict(model={**model, "scalars": torch.zeros(3)}), dict(model={k: v for k, v in model.items() if k != "scalars"}),
             dict(model={**model, "scalars": "no tensor"}), dict(adam={}), dict(adam={**adam, "param_groups": adam["param_groups"][:1]}),
             dict(adam={**adam, "state": {0: {**adam["state"][0], "exp_avg": torch.zeros(2, 2)}}}),
             dict(snoo={**snoo, "outer_buf": snoo["outer_buf"][1:]}), dict(snoo={}), dict(snoo=None), dict(rng={}),
             dict(rng=dict(cpu=torch.zeros(3))),
             dict(snoo={**snoo, "momentum": 1.0}), dict(snoo={**snoo, "momentum": "x"}), dict(snoo={**snoo, "current_step": "x"}),
             dict(snoo={**snoo, "k": 0}), dict(model={**model, "surplus": torch.zeros(3)}),
             dict(adam={**adam, "param_groups": [{k: v for k, v in g.items() if k != "base_lr"} for g in adam["param_groups"]]})]
    for change in wrong:
        torch.save({**good, **change}, copy / "shared.pt")
        refused(copy, shards, "does not fit", of_command=False)
    torch.save(good, copy / "shared.pt")
    muon = torch.load(copy / "muon_1.pt", weights_only=True)
    first = next(iter(muon["state"]))
    for state in ({}, {**muon["state"], first: {**muon["state"][first], "mantissa": muon["state"][first]["mantissa"].to(torch.bfloat16)}}):
        torch.save({**muon, "state": state}, copy / "muon_1.pt")
        refused(copy, shards, "does not fit", of_command=False)


def test_what_rank_1_could_not_take_is_in_the_log(copy: Path, shards: Path, tmp_path: Path) -> None:
    """Each rank takes Muon's state of its own matrices: here rank 0 takes all, rank 1 nothing, and rank 0 writes the log."""
    muon = torch.load(copy / "muon_1.pt", weights_only=True)
    torch.save({**muon, "state": {i: {**s, "mantissa": s["mantissa"].to(torch.bfloat16)} for i, s in muon["state"].items()}},
               copy / "muon_1.pt")
    succeed(words(shards, tmp_path / "logs", resume=copy, resume_anyway=True, **PAIR), 2)
    log, = logs(tmp_path / "logs")
    remarks = [line for line in log.read_text().splitlines() if line.startswith("resumed anyway: ")]
    assert len(remarks) == 1 and "muon's state not taken" in remarks[0] and "mantissa" in remarks[0]


def test_names_in_a_checkpoint_delete_nothing_else(copy: Path, shards: Path, tmp_path: Path) -> None:
    good = torch.load(copy / "shared.pt", weights_only=True)
    precious = tmp_path / "elsewhere_checkpoints" / "step_000001"
    precious.mkdir(parents=True)
    own = copy.parent.parent / "notes"
    own.mkdir()
    kept = [str(precious), "../elsewhere_checkpoints/step_000001", "notes", ".", "", "../..", f"{copy.parent.name}/../../notes"]
    torch.save({**good, "kept": kept}, copy / "shared.pt")
    succeed(words(shards, tmp_path, resume="auto", run_name="run", save_every=1, keep_checkpoints=1, **PAIR))
    assert precious.is_dir() and own.is_dir() and sorted(checkpoints(tmp_path)) == [3]  # what it may delete, it did


def test_a_folder_without_a_checkpoint(shards: Path, tmp_path: Path) -> None:
    for name in ("missing", "empty"):
        folder = tmp_path / "logs" / "run" / name
        if name == "empty":
            folder.mkdir(parents=True)
        (tmp_path / "logs").mkdir(exist_ok=True)
        refused(folder, shards, "no checkpoint is there")
    with pytest.raises(command.NoCheckpoint, match="no such folder"):
        list(command.describe(tmp_path / "missing"))


def test_the_command_prints_what_is_there(original: Path) -> None:
    result = subprocess.run([sys.executable, str(COMMAND), str(original)], capture_output=True, text=True, timeout=60,
                            env=clean_environment())
    assert result.returncode == 0 and not result.stderr
    lines = result.stdout.splitlines()
    state = contents(original)
    assert "step: 2" in lines and "world_size: 2" in lines and "recipe: 2025-09-16_Snoo" in lines
    assert [f"val_loss at step {s}: {loss:.6f}" for s, loss in state["val_losses"]] == [x for x in lines if x.startswith("val_loss")]
    assert "hyperparameter snoo_k: 3" in lines and "hyperparameter muon_lr: 0.027" in lines
    assert "  model.lm_head_w  (384, 32)  float32" in lines and "  model.embed1.weight  (257, 32)  bfloat16" in lines
    assert sum(line.startswith("  model.") for line in lines) == len(state["model"])
    # 11 attentions, 12 MLPs of two matrices; momentum and mantissa each
    assert sum(line.startswith("  muon.") for line in lines) == 2 * (11 + 24)
    assert sum(line.endswith("uint16") for line in lines) == 11 + 24


def test_the_command_needs_one_folder_and_says_so(tmp_path: Path, original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(original.parent)]) == 1
    assert str(original) in capsys.readouterr().err  # it names what lies below
    assert command.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_the_readmes_four_lines_load_the_weights(original: Path, shards: Path) -> None:
    import train_gpt_medium as t
    saved = torch.load(original / "shared.pt", map_location="cpu", weights_only=True)
    h = saved["hyperparameters"]
    model = t.GPT(h["vocab_size"], h["num_layers"], h["num_heads"], h["model_dim"], h["val_seq_len"], h["head_dim"], h["eot_token"],
                  backout=h["backout"], smear=h["smear"])
    model.load_state_dict(saved["model"])
    inputs, targets = next(t.token_batches(f"{shards}/val_*.bin", 256))
    with torch.no_grad():
        model.eval()
        loss = sum(float(model(i, o, torch.tensor(1, dtype=torch.int32))) for i, o in zip(inputs.split(128), targets.split(128))) / 2
    assert abs(loss - saved["val_losses"][-1][1]) < 1e-6
