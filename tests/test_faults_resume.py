"""--resume: bit-identical to a run that never stopped, at any step, with every recipe; refusals; what is kept."""
from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
import torch

from fault_helpers import (NAME, STEPS, body, checkpoints, contents, differences, header, leftovers, logs, make_shards,
                           succeed, tree_of, val_losses, wait_for, words)
from train_helpers import SCRIPT, finish_ranks, fork_ranks, start_ranks

RECIPES = ["2025-09-11_SecondInputEmbed", "2025-09-16_Snoo", "2025-09-17_UpdateSmoothing", "2025-09-30_SmoothedSnooMedium",
           "2025-10-04_GPT2MediumLayerReuse", "2025-11-02-Smear-MTP"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def whole(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log folder of an undisturbed run of the default recipe, with a checkpoint after every step."""
    log_dir = tmp_path_factory.mktemp("whole")
    succeed(words(shards, log_dir, save_every=1, keep_checkpoints=100))
    assert sorted(checkpoints(log_dir)) == list(range(1, STEPS + 1))
    return log_dir


def refused(run_words: list[str], *parts: object, world: int = 1) -> None:
    """One message that holds `parts`, exit code 1, and no file more or less."""
    log_dir = Path(run_words[run_words.index("--log_dir") + 1])
    log_dir.mkdir(exist_ok=True)
    before = tree_of(log_dir)
    result = fork_ranks(run_words, world)
    assert result.returncodes == [1] * world and "Traceback" not in "".join(result.stderrs), result.stderrs
    assert result.stderr.count("error: ") == 1 and all(str(part) in result.stderr for part in parts), result.stderr
    assert tree_of(log_dir) == before


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_resume_at_every_step(step: int, whole: Path, shards: Path, tmp_path: Path) -> None:
    # outer steps follow steps 1, 4 and 7; cooldown from step 4; shard 2 from step 5; 8 is the end
    command = words(shards, tmp_path, save_final=True, resume=checkpoints(whole)[step])
    succeed(command)
    assert not differences(contents(checkpoints(whole)[STEPS]), contents(checkpoints(tmp_path)[STEPS]))
    log = logs(tmp_path)[0]
    expected = val_losses(logs(whole)[0])
    assert val_losses(log) == {s: loss for s, loss in expected.items() if s >= step}
    assert header(log)["parent"] == f"{NAME}/{logs(whole)[0].name}"
    assert shlex.split(header(log)["command"]) == ["train_gpt_medium.py", *command]  # main's words, not the test's
    times = [torch.load(checkpoints(folder)[s] / "shared.pt", weights_only=True)["train_time_ms"]
             for folder, s in ((whole, step), (tmp_path, STEPS))]
    assert times[1] > times[0] or step == STEPS  # train time goes on from where it was
    assert len(checkpoints(whole)) == STEPS  # a checkpoint named by its path is nobody's to delete


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != NAME])
def test_resume_with_every_recipe(recipe: str, shards: Path, tmp_path: Path) -> None:
    how = dict(update_smoothing_steps=6) if recipe == "2025-09-17_UpdateSmoothing" else {}
    base = dict(keep_checkpoints=9, save_every=1, num_iterations=6, **how)
    succeed(words(shards, tmp_path / "whole", "--recipe", recipe, **base))
    for step in (3, 4):  # right before and right after an outer step and the start of the cooldown
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        succeed(words(shards, tmp_path / "again", "--recipe", recipe, **base, resume=checkpoints(tmp_path / "whole")[step]))
        assert not differences(contents(checkpoints(tmp_path / "whole")[6]), contents(checkpoints(tmp_path / "again")[6]))
    smoothed = {"smoothing" in s for s in contents(checkpoints(tmp_path / "again")[6])["muon"]["state"].values()}
    assert smoothed == {recipe not in RECIPES[:2]}


def test_dtypes_in_a_checkpoint(whole: Path) -> None:
    state = contents(checkpoints(whole)[4])
    assert {s["momentum"].dtype for s in state["muon"]["state"].values()} == {torch.float32}
    assert {s["mantissa"].dtype for s in state["muon"]["state"].values()} == {torch.uint16}
    assert {t.dtype for s in state["adam"]["state"].values() for n, t in s.items() if n == "step"} == {torch.float32}
    assert {n: t.dtype for n, t in state["model"].items() if t.dtype != torch.bfloat16} == {
        "scalars": torch.float32, "lm_head_w": torch.float32}
    assert [t.dtype for t in state["snoo"]["outer_buf"]] == [t.dtype for t in state["model"].values()]
    assert state["snoo"]["current_step"] == state["step"] == 4
    # 257 is the first number that bf16 does not hold: a pass through it would leave no odd low half above 256
    low = torch.cat([s["mantissa"].to(torch.int32).flatten() for s in state["muon"]["state"].values()])
    assert ((low > 256) & (low % 2 == 1)).float().mean() > 0.3


def test_after_the_warm_up_a_resumed_run_is_where_it_was(whole: Path, shards: Path, tmp_path: Path) -> None:
    succeed(words(shards, tmp_path, save_final=True, resume=checkpoints(whole)[5], warmup_steps=2, resume_anyway=True))
    a, b = contents(checkpoints(whole)[STEPS]), contents(checkpoints(tmp_path)[STEPS])
    assert not differences({k: a[k] for k in a if k != "rng"}, {k: b[k] for k in b if k != "rng"})


@pytest.fixture(scope="module")
def wide_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("shards"), sequences=4)


def test_resume_on_another_world_size(wide_shards: Path, tmp_path: Path) -> None:
    base = dict(batch_sequences=4, val_tokens=512, num_iterations=6)
    succeed(words(wide_shards, tmp_path / "one", save_every=3, **base))
    expected = val_losses(logs(tmp_path / "one")[0])
    succeed(words(wide_shards, tmp_path / "two", save_every=3, resume=checkpoints(tmp_path / "one")[3], **base), world=2)
    succeed(words(wide_shards, tmp_path / "four", save_every=3, resume=checkpoints(tmp_path / "one")[3], **base), world=4)
    forgetful = contents(checkpoints(tmp_path / "one")[3])["val_losses"]
    for name in ("two", "four"):
        found = val_losses(logs(tmp_path / name)[0])
        assert sorted(found) == [3, 4, 5, 6]
        assert all(abs(float(found[s]) - float(expected[s])) < 0.01 for s in found), (name, found, expected)
    assert abs(forgetful[-1][1] - float(expected[6])) > 0.1  # the tolerance is small beside what three steps change
    # what four ranks wrote, one rank reads: every matrix's state is there once
    assert len(list(checkpoints(tmp_path / "four")[6].glob("muon_*.pt"))) == 4
    one, four = (contents(checkpoints(tmp_path / n)[6])["muon"]["state"] for n in ("one", "four"))
    assert sorted(one) == sorted(four)
    succeed(words(wide_shards, tmp_path / "back", resume=checkpoints(tmp_path / "four")[6], **base))
    assert abs(float(val_losses(logs(tmp_path / "back")[0])[6]) - float(expected[6])) < 0.01


def test_other_hyperparameters_are_refused_by_name(whole: Path, shards: Path, tmp_path: Path) -> None:
    refused(words(shards, tmp_path, resume=checkpoints(whole)[4], snoo_k=4, muon_lr=0.02),
            "snoo_k: 3 there, 4 here", "muon_lr: 0.027 there, 0.02 here", "--resume_anyway")
    refused(words(shards, tmp_path, resume=checkpoints(whole)[4], num_iterations=3), "step 4", "--num_iterations 3")
    refused(words(shards, tmp_path, resume=checkpoints(whole)[4], batch_sequences=2, val_tokens=256), "batch_sequences", world=2)


def test_another_source_is_refused(whole: Path, shards: Path, tmp_path: Path) -> None:
    script = tmp_path / "train_gpt_medium.py"
    script.write_bytes(SCRIPT.read_bytes() + b"\n# one line more\n")
    patch = f"t.__file__ = {str(script)!r}"
    result = fork_ranks(words(shards, tmp_path / "logs", resume=checkpoints(whole)[4]), patch=patch)
    assert result.returncode == 1 and "the script's source" in result.stderr
    succeed(words(shards, tmp_path / "logs", resume=checkpoints(whole)[4], resume_anyway=True, save_final=True), patch=patch)
    assert "resumed anyway: the script's source" in logs(tmp_path / "logs")[0].read_text()


def test_other_training_data_is_refused(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    other = make_shards(tmp_path / "shards", batches=3)
    moved = [w.replace(f"{other}", "SAME") for w in words(other, tmp_path / "logs", resume=checkpoints(whole)[6])]
    old = torch.load(checkpoints(whole)[6] / "shared.pt", weights_only=True)["hyperparameters"]["train_files"]
    original = Path(old).parent
    for name in ("train_000001.bin", "train_000002.bin"):
        (original / name).rename(original / f"{name}.away")
        shutil.copy(other / name, original / name)
    try:
        refused([w.replace("SAME", str(original)) for w in moved], "position in the training data",
                "['train_000002.bin', 128] there, ['train_000002.bin', 384] here")
    finally:
        for name in ("train_000001.bin", "train_000002.bin"):
            (original / f"{name}.away").rename(original / name)


def test_resume_anyway_takes_state_but_keeps_this_runs_hyperparameters(whole: Path, shards: Path, tmp_path: Path) -> None:
    more = dict(muon_lr=0.02, head_lr=0.001, snoo_k=2, snoo_lr=0.5, adam_beta1=0.7)
    succeed(words(shards, tmp_path, resume=checkpoints(whole)[4], resume_anyway=True, num_iterations=5, save_final=True, **more))
    state = contents(checkpoints(tmp_path)[5])
    assert {g["base_lr"] for g in state["muon"]["param_groups"]} == {0.02}
    assert state["adam"]["param_groups"][0]["base_lr"] == 0.001 and state["adam"]["param_groups"][0]["betas"][0] == 0.7
    assert (state["snoo"]["k"], state["snoo"]["lr"], state["snoo"]["current_step"]) == (2, 0.5, 5)
    assert {float(s["step"]) for s in state["adam"]["state"].values()} == {5.0}  # the state itself was taken
    remarks = [line for line in logs(tmp_path)[0].read_text().splitlines() if line.startswith("resumed anyway: ")]
    assert len(remarks) == len(more) + 1 and "resumed anyway: muon_lr: 0.027 there, 0.02 here" in remarks  # and all was taken


def test_resume_with_another_outer_momentum_keeps_what_sgd_would_keep(whole: Path, shards: Path, tmp_path: Path) -> None:
    """The state is (momentum - 1) times SGD's buffer; no outer step comes before the end."""
    succeed(words(shards, tmp_path, resume=checkpoints(whole)[4], resume_anyway=True, snoo_momentum=0.9, snoo_k=100,
                  num_iterations=5, save_final=True))
    before, after = (contents(checkpoints(folder)[step])["snoo"] for folder, step in ((whole, 4), (tmp_path, 5)))
    moves = [state["optimizer_state_dict"]["average_move"] for state in (before, after)]
    assert any(old.any() for old in moves[0])
    for old, new in zip(*moves, strict=True):
        buffers = old.double() / (1 - 0.37), new.double() / (1 - 0.9)
        assert (buffers[0] - buffers[1]).abs().max() <= 2**-7 * buffers[0].abs().max()
    assert all(torch.equal(a, b) for a, b in zip(before["outer_buf"], after["outer_buf"], strict=True))
    assert after["momentum"] == 0.9


def test_resume_anyway_names_what_did_not_fit(whole: Path, shards: Path, tmp_path: Path) -> None:
    # a model twice as wide: the scalars alone fit; and the slow weights must be the new model's, or they would pull it away
    wide = dict(model_dim=64, num_heads=2)
    succeed(words(shards, tmp_path / "a", resume=checkpoints(whole)[4], resume_anyway=True, save_every=1, **wide))
    text = logs(tmp_path / "a")[0].read_text()
    assert "resumed anyway: only 1 of " in text and all(f"{part}'s state not taken" in text for part in ("adam", "muon", "snoo"))
    losses = [float(v) for v in val_losses(logs(tmp_path / "a")[0]).values()]
    assert all(loss < 6.2 for loss in losses) and losses[-1] < losses[0]  # ln(384) = 5.95: it starts anew and learns
    succeed(words(shards, tmp_path / "b", "--recipe", "2025-09-11_SecondInputEmbed", save_every=1, num_iterations=2))
    succeed(words(shards, tmp_path / "c", resume=checkpoints(tmp_path / "b")[2], resume_anyway=True, save_final=True,
                  num_iterations=3))  # Snoo joins late: its slow weights are the loaded parameters
    state = contents(checkpoints(tmp_path / "c")[3])
    assert state["snoo"]["current_step"] == 1 and float(val_losses(logs(tmp_path / "c")[0])[3]) < 6.0


def test_newest_k_are_kept_over_resumed_runs(shards: Path, tmp_path: Path) -> None:
    stop_at = "real = t.train_step\n" \
              "def train_step(training, batch, step, *rest):\n" \
              "    if step == {0}: os.kill(os.getpid(), 9)\n" \
              "    return real(training, batch, step, *rest)\n" \
              "t.train_step = train_step"
    base = words(shards, tmp_path, save_every=1, keep_checkpoints=2, resume="auto", val_loss_every=0)
    steps = []
    for at in (3, 4, 6):
        assert fork_ranks(base, patch=stop_at.format(at)).returncode == -9
        steps.append(sorted(checkpoints(tmp_path)))
    assert steps == [[2, 3], [3, 4], [5, 6]]
    folders = sorted(p.name for p in tmp_path.glob("*/*_checkpoints"))
    assert len(folders) == 1 and folders[0].startswith("002_")  # what was emptied is gone
    succeed(base)
    assert sorted(checkpoints(tmp_path)) == [7, 8] and not leftovers(tmp_path)
    # that run has finished: the same command starts a new one instead of repeating its end
    result = succeed(words(shards, tmp_path, resume="auto", num_iterations=1))
    assert "starting at step 0" in result.stdout and sorted(val_losses(logs(tmp_path)[-1])) == [0, 1]


def test_auto_leaves_a_run_that_is_alive_alone(shards: Path, tmp_path: Path) -> None:
    """A second run of the same name neither continues the first nor deletes what the first is writing."""
    log_dir, signs = tmp_path / "logs", tmp_path / "signs"
    signs.mkdir()
    patch = f"""
import time
real = t.write_synced
def write_synced(value, path):
    real(value, path)
    if path.name == "shared.pt" and "000002" in str(path):
        open({str(signs / "writing")!r}, "w").close()
        while not os.path.exists({str(signs / "go on")!r}): time.sleep(0.01)
t.write_synced = write_synced
"""
    first = start_ranks(words(shards, log_dir, save_every=1, num_iterations=3, keep_checkpoints=9, val_loss_every=0), 1, tmp_path,
                        patch=patch)
    wait_for((signs / "writing").exists)
    assert sorted(checkpoints(log_dir)) == [1] and len(leftovers(log_dir)) == 1
    second = words(shards, log_dir, resume="auto", save_every=1, keep_checkpoints=1, num_iterations=2, val_loss_every=0)
    assert "starting at step 0" in succeed(second).stdout
    assert len(leftovers(log_dir)) == 1
    (signs / "go on").touch()
    finish_ranks(first)
    log = logs(log_dir)[0]
    assert len(list(log.with_name(log.stem + "_checkpoints").glob("step_*"))) == 3 and not leftovers(log_dir)
    assert "WARNING" not in body(log)


def test_a_checkpoint_deleted_while_auto_reads_it_is_passed_over(whole: Path, shards: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "logs")
    for finished in (tmp_path / "logs").glob("*/*/finished"):
        finished.unlink()
    patch = """
real = t.read_checkpoint
def read_checkpoint(folder):
    if folder.name in ("step_000008", "step_000007"):
        t.shutil.rmtree(folder)
    return real(folder)
t.read_checkpoint = read_checkpoint
"""
    result = succeed(words(shards, tmp_path / "logs", resume="auto", save_every=0), patch=patch)
    assert "step_000006 at step 6" in result.stdout


def test_validation_losses_are_listed_once(whole: Path) -> None:
    assert [s for s, _ in contents(checkpoints(whole)[STEPS])["val_losses"]] == list(range(STEPS + 1))
