"""The six recipes and what they add: update smoothing, backout, smear, and the comparison with a published run."""
from __future__ import annotations

import copy
import csv
import itertools
import math
import os
import re
import statistics
from pathlib import Path

import pytest
import torch

import train_gpt_medium as t
from test_train_model import call, hidden_states, named_weights, random_model, random_tokens
from test_train_optimizers import MOMENTA, RATES, decay, five_muon_steps, gradients, master, matrices, matrix, orthogonalised
from test_train_run import NOT_EVEN_STARTED, assert_refused, changed
from train_helpers import ROOT, SEPARATOR, fork_ranks

PUBLISHED = ROOT / "records" / "track_2_medium"

# ---------------------------------------------------------------------------------------------------------------------
# The table

TABLE = {  # iterations, muon lr, final lr scale, snoo, (smoothing from, to, over steps, interpolated), backout, smear
    "2025-09-11_SecondInputEmbed": (5690, 0.025, 0, False, None, False, False),
    "2025-09-16_Snoo": (5640, 0.027, 0, True, None, False, False),
    "2025-09-17_UpdateSmoothing": (5610, 0.03, 0.01, False, (0.5, 0.2, 3000, True), False, False),
    "2025-09-30_SmoothedSnooMedium": (5590, 0.03, 0.01, True, (0.2, 0.2, 0, False), False, False),
    "2025-10-04_GPT2MediumLayerReuse": (5550, 0.03, 0.01, True, (0.2, 0.2, 0, False), True, False),
    "2025-11-02-Smear-MTP": (5535, 0.03, 0.01, True, (0.2, 0.2, 0, False), True, True),
}
COMMON = dict(
    train_files="data/fineweb10B/fineweb_train_*.bin", val_files="data/fineweb10B/fineweb_val_*.bin", batch_sequences=8,
    train_seq_len=65536, val_seq_len=262144, val_tokens=10485760, num_layers=16, num_heads=8, head_dim=128, model_dim=1024,
    vocab_size=50257, eot_token=50256, cooldown_frac=0.7, val_loss_every=125, warmup_steps=10, window_max=3456, head_lr=1 / 320,
    embed_lr=0.3, scalar_lr=0.015, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-10, adam_weight_decay=0.0, muon_weight_decay=0.01,
    mlp_decay_multiplier=2.0, muon_momentum_start=0.85, muon_momentum_end=0.95, muon_momentum_steps=300, snoo_lr=0.68,
    snoo_momentum=0.37, snoo_k=28, snoo_nesterov=True, attention_scale=0.12, logit_softcap=15.0, coordinate_descent_tuning=True,
    compile=True, seed=None)


@pytest.mark.parametrize("recipe", TABLE)
def test_recipe_is_the_designs(recipe):
    args = t.parse_command(["--recipe", recipe]).args
    iterations, muon_lr, final, snoo, smoothing, backout, smear = TABLE[recipe]
    assert (args.num_iterations, args.muon_lr, args.final_lr_scale, args.snoo) == (iterations, muon_lr, final, snoo)
    assert (args.backout, args.smear, args.run_name) == (backout, smear, recipe)
    assert {name: getattr(args, name) for name in COMMON} == COMMON
    assert t.smoothing_is_on(args) == (smoothing is not None)
    if smoothing is not None:
        start, end, steps, interpolated = smoothing
        joint = {0: start, steps // 2: (start + end) / 2, steps: end, steps + 1: end, iterations: end}
        assert {s: t.smoothing_beta(s, args) for s in joint} == pytest.approx(joint, abs=1e-12)
        assert args.update_smoothing_interpolated == interpolated
    t.check_hyperparameters(args, 8)


def test_there_are_these_recipes_and_the_default_is_snoos():
    assert set(t.RECIPES) == set(TABLE)
    assert t.parse_command([]).args == t.parse_command(["--recipe", "2025-09-16_Snoo"]).args
    assert vars(t.Hyperparameters(run_name="2025-09-16_Snoo")) == vars(t.parse_command([]).args)


def test_smoothing_schedule_at_ends_and_joint():
    args = t.parse_command(["--recipe", "2025-09-17_UpdateSmoothing"]).args
    expected = {0: 0.5, 1: 0.5 - 0.0001, 1500: 0.35, 2999: 0.2 + 0.0001, 3000: 0.2, 3001: 0.2, 5609: 0.2}
    assert {s: t.smoothing_beta(s, args) for s in expected} == pytest.approx(expected, abs=1e-12)


def test_one_change_at_a_time_is_one_option_and_every_combination_is_legal():
    args = t.parse_command("--recipe 2025-09-30_SmoothedSnooMedium --snoo_k 14".split()).args
    assert (args.snoo_k, args.update_smoothing, args.num_iterations) == (14, 0.2, 5590)
    args = t.parse_command("--recipe 2025-09-16_Snoo --update_smoothing 0.2".split()).args
    assert t.smoothing_is_on(args) and t.smoothing_beta(0, args) == 0.2 and args.snoo
    for snoo, beta, backout, smear in itertools.product(("on", "off"), ("0", "0.2"), ("on", "off"), ("on", "off")):
        words = ["--snoo", snoo, "--update_smoothing", beta, "--backout", backout, "--smear", smear]
        t.check_hyperparameters(t.parse_command(words).args, 8)


@pytest.mark.parametrize("options, extras", [({}, []), (dict(backout=True), [1.0, 0.0]), (dict(smear=True), [0.0]),
                                             (dict(backout=True, smear=True), [1.0, 0.0, 0.0])])
def test_scalars_have_exactly_what_the_recipe_needs(options, extras):
    model = t.GPT(70, 16, 1, 8, 128, head_dim=8, eot_token=3, **options)
    assert model.scalars.tolist() == [1.0] * 16 + [1.0, 0.0, 0.0] * 16 + [0.5] * 32 + extras


def test_the_default_run_pays_nothing_for_what_is_off():
    p = matrices()
    muon = t.Muon(p, lr=0.1, weight_decay=0.0, momentum=0.9)
    assert all(s.keys() == {"momentum", "mantissa"} for s in muon.state.values())
    args = t.parse_command([]).args
    model = t.GPT(70, 16, 1, 8, 128, head_dim=8, eot_token=3)
    args.compile = False
    assert all(s.keys() == {"momentum", "mantissa"} for s in t.build_optimizers(model, args)[1].state.values())
    args.update_smoothing = 0.2
    smoothed = t.build_optimizers(model, args)[1].state
    assert all(s.keys() == {"momentum", "mantissa", "smoothing"} and s["smoothing"].dtype == torch.bfloat16 for s in smoothed.values())

# ---------------------------------------------------------------------------------------------------------------------
# Update smoothing


@pytest.mark.parametrize("interpolated", [False, True])
def test_smoothing_equals_float64(interpolated, monkeypatch):
    """Five steps with a beta that moves, the orthogonalisation exact, the buffer rounded to bf16 as DESIGN says."""
    monkeypatch.setattr(t, "newton_schulz", lambda G, steps=5: orthogonalised(G).float())
    betas, params = [0.5, 0.45, 0.4, 0.3, 0.2], matrices()
    start = [p.detach().clone() for p in params]
    steps = five_muon_steps(params, update_smoothing=0.5, smoothing_interpolated=interpolated)
    expected = [p.double() for p in start]
    m, s = [torch.zeros_like(w) for w in expected], [torch.zeros_like(w) for w in expected]
    first = next(steps)  # the groups exist now: set each later step's beta before it runs
    for step in range(5):
        for i, w in enumerate(expected):
            g, mu, beta, rate = gradients(step)[i].double(), MOMENTA[step], betas[step], RATES[step]
            m[i] = mu * m[i] + (1 - mu) * g
            v = orthogonalised(mu * m[i] + (1 - mu) * g)
            s[i] = (beta * s[i] + (1 - beta) * v).bfloat16().double()
            update = beta * s[i] + (1 - beta) * v if interpolated else s[i]
            rows, cols = w.shape[-2:]
            expected[i] = w * (1 - rate * decay(i)) - rate * math.sqrt(max(1, rows / cols)) * update
        for i, p in enumerate(params):
            error = (master(p, first.state[p]["mantissa"]).double() - expected[i]).abs()
            # a buffer entry that lies between two bf16 numbers may fall to either: one ulp of it times the rate
            assert error.max() < 2e-4 * expected[i].abs().max() and error.median() < 1e-7 * expected[i].abs().max(), (step, i)
            difference = (first.state[p]["smoothing"].double() - s[i]).abs()
            assert first.state[p]["smoothing"].dtype == torch.bfloat16
            assert (difference <= 2.0**-7 * s[i].abs() + 1e-6).all() and (difference > 0).double().mean() < 0.02
        if step < 4:
            for group in first.param_groups:
                group["beta"] = betas[step + 1]
            next(steps)


@pytest.mark.parametrize("interpolated", [False, True])
def test_smoothing_with_beta_0_is_bit_identical_to_none(interpolated):
    plain, smoothed = matrices(), matrices()
    for a, b in zip(five_muon_steps(plain), five_muon_steps(smoothed, smoothing=True, smoothing_interpolated=interpolated)):
        for p, q in zip(plain, smoothed):
            assert torch.equal(p, q)
            assert torch.equal(a.state[p]["mantissa"].view(torch.int16), b.state[q]["mantissa"].view(torch.int16))


@pytest.mark.parametrize("beta", [0.2, 0.5, 0.8])
def test_snoo_with_k_1_without_nesterov_equals_smoothing_of_the_same_beta(beta):
    """On one parameter and without decay both move it by the average of Muon's updates: here from 0, so that bf16's steps
    are small beside what moves; the gradients do not depend on the weights."""
    results = []
    for smoothing in (True, False, None):
        p = torch.nn.Parameter(torch.zeros(12, 20, dtype=torch.bfloat16))
        muon = t.Muon([p], lr=0.5, weight_decay=0.0, momentum=0.9, update_smoothing=beta if smoothing else 0.0)
        snoo = t.Snoo([p], lr=1 - beta, momentum=beta, k=1, nesterov=False) if smoothing is False else None
        for step in range(8):
            p.grad = matrix(12, 20, seed=step).bfloat16()
            muon.step()
            if snoo is not None:
                snoo.step()
        results.append(p.detach().double())
    smoothed, outer, neither = results
    assert (smoothed - outer).norm() < 0.02 * smoothed.norm()
    assert (smoothed - neither).norm() > 0.1 * beta * smoothed.norm()  # and that is not because nothing was averaged

# ---------------------------------------------------------------------------------------------------------------------
# Backout and smear (their gradients: test_train_model)


@pytest.mark.parametrize("backout, smear", [(True, False), (False, True), (True, True)])
def test_extensions_at_their_initial_values_change_no_bit(backout, smear):
    tokens, targets = random_tokens(1, 256, [60]), random_tokens(2, 256, [])
    plain = random_model(4, 256)
    extended = random_model(4, 256, backout=backout, smear=smear)
    weights = named_weights(plain)
    with torch.no_grad():
        for name, p in named_weights(extended).items():
            if name == "scalars":
                p.copy_(torch.cat([weights[name], torch.tensor([1.0, 0.0] * backout + [0.0] * smear)]))
            else:
                p.copy_(weights[name])
    losses = [call(m, tokens, targets, 2) for m in (plain, extended)]
    assert torch.equal(losses[0], losses[1])
    losses[0].backward(), losses[1].backward()
    for name, p in named_weights(extended).items():
        grad = p.grad[:96] if name == "scalars" else p.grad
        assert torch.equal(grad, weights[name].grad), name
    assert extended.scalars.grad[96:].abs().min() > 0  # the extension's own scalars can move


def with_scalars(model: t.GPT, *extras: float) -> t.GPT:
    changed_model = copy.deepcopy(model)
    with torch.no_grad():
        changed_model.scalars[96:] = torch.tensor(extras, dtype=changed_model.scalars.dtype)
    return changed_model


def test_smear_adds_c_times_the_position_before():
    model = random_model(6, 128, vocab=200, smear=True).double()
    tokens = random_tokens(1, 128, [40], vocab=200)
    plain, smeared = (hidden_states(with_scalars(model, c), tokens, 3) for c in (0.0, -0.7))
    for position in range(128):
        expected = plain[position] + (-0.7 * plain[position - 1] if position > 0 else 0)
        assert torch.allclose(smeared[position], expected, rtol=0, atol=1e-11), position


def test_backout_mixes_in_the_normed_output_of_block_11():
    model = random_model(7, 128, vocab=200, backout=True).double()
    tokens = random_tokens(1, 128, [40], vocab=200)
    last, eleventh, mixed = (hidden_states(with_scalars(model, *b), tokens, 3) for b in ((1, 0), (0, 1), (0.8, -0.3)))
    assert torch.allclose(mixed, 0.8 * last - 0.3 * eleventh, rtol=0, atol=1e-11)
    assert torch.allclose(eleventh.pow(2).mean(1), torch.ones(128).double(), atol=1e-9)  # it is normed
    for layer, moves in ((10, True), (11, True), (12, False), (15, False)):  # it is block 11's output: nothing after that
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.mlps[layer].proj_w.mul_(1.5)
        change = (hidden_states(with_scalars(other, 0, 1), tokens, 3) - eleventh).abs().max()
        assert (change > 1e-3) if moves else (change < 1e-11), layer


def test_smear_comes_after_backout():
    model = random_model(8, 128, vocab=200, backout=True, smear=True).double()
    tokens = random_tokens(1, 128, [], vocab=200)
    mixed, both = (hidden_states(with_scalars(model, 0.8, -0.3, c), tokens, 3) for c in (0.0, 0.5))
    assert torch.allclose(both[1:], mixed[1:] + 0.5 * mixed[:-1], rtol=0, atol=1e-11) and torch.allclose(both[0], mixed[0])

# ---------------------------------------------------------------------------------------------------------------------
# All six run, and the comparison


@pytest.mark.parametrize("recipe", TABLE)
def test_every_recipe_rehearses(recipe, tiny, tmp_path):
    words = changed(tiny, recipe=recipe, log_dir=tmp_path, seed=1, batch_sequences=1, num_iterations=3, val_loss_every=0,
                    warmup_steps=0, save_final="true", snoo_k=2)
    result = fork_ranks(words)
    assert result.returncode == 0, result.stderr
    assert result.header()["recipe"] == recipe and 3 < float(result.losses()[3]) < 5.95
    folder = next(tmp_path.glob("*/*_checkpoints/step_000003"))
    shared, muon = (torch.load(folder / f, weights_only=True) for f in ("shared.pt", "muon_0.pt"))
    _, _, _, snoo, smoothing, backout, smear = TABLE[recipe]
    assert (shared["snoo"] is not None) == snoo and (not snoo or shared["snoo"]["current_step"] == 3)
    assert all(("smoothing" in s) == (smoothing is not None) for s in muon["state"].values())
    assert not smoothing or any(s["smoothing"].any() for s in muon["state"].values())
    extras = shared["model"]["scalars"][96:]
    assert len(extras) == 2 * backout + smear and not (extras == torch.tensor([1.0, 0.0] * backout + [0.0] * smear)).any()


def compared(tiny: list[str], folder: Path, curve: object, **fields: object):
    words = changed(tiny, log_dir=folder / "logs", seed=1, batch_sequences=1, num_iterations=3, val_loss_every=1, warmup_steps=0,
                    compare_with=curve, **fields)
    result = fork_ranks(words)
    assert result.returncode == 0, result.stderr
    return result


def test_validations_gain_the_published_loss_where_the_curve_has_the_step(tiny, tmp_path):
    """A made-up curve with steps 0, 2 and 3, and the finals beside it."""
    (tmp_path / "curve.csv").write_text("step,val_loss,train_time_ms\n0,5.900000,0\n2,5.5,99\n3,6.123456,140\n70,1.0,9\n")
    finals = [5.1, 5.3, 5.25, 5.05]
    (tmp_path / "runs.csv").write_text("val_loss,train_time_ms\n" + "".join(f"{x},1000\n" for x in finals))
    result = compared(tiny, tmp_path, tmp_path / "curve.csv")
    losses = {step: float(loss) for step, loss in result.losses().items()}
    published = {0: 5.9, 2: 5.5, 3: 6.123456}
    usual = r"step:(\d)/3 val_loss:\d+\.\d{6} train_time:\d+ms step_avg:\d+\.\d\dms"
    for text, after in ((result.body(), ""), (result.stdout, r" time_left:\d+\.\dmin")):
        found = re.findall(rf"^{usual}( published:\S+ delta:\S+)?{after}$", text, re.MULTILINE)
        assert [int(step) for step, _ in found] == [0, 1, 2, 3], text
        for step, remark in found:
            step = int(step)
            if step not in published:
                assert remark == ""
                continue
            shown, delta = re.fullmatch(r" published:(\d+\.\d{6}) delta:([+-]\d+\.\d{4})", remark).groups()
            assert float(shown) == published[step] and abs(float(delta) - (losses[step] - published[step])) <= 0.51e-4
    mean, sd = statistics.mean(finals), statistics.stdev(finals)
    verdict = (f"final val_loss {losses[3]:.6f}; published runs: n 4 mean {mean:.6f} sd {sd:.6f} "
               f"z {(losses[3] - mean) / sd:+.2f}")
    assert verdict in result.body().splitlines() and verdict in result.stdout.splitlines()
    assert f"comparison: {tmp_path}/curve.csv" in result.parts()[1] and result.body().splitlines()[-1].startswith("peak memory")


def test_a_recipe_compares_with_its_own_curve_and_overrides_are_named(tiny, tmp_path):
    """The published curve's first point, ln 50304, stands beside ours, ln 384."""
    result = compared(tiny, tmp_path, "recipe", recipe="2025-11-02-Smear-MTP", muon_lr=0.02)
    first = result.body().splitlines()[0]
    assert first.endswith(f" published:10.825840 delta:{float(result.losses()[0]) - 10.825840:+.4f}")
    header = result.header()["comparison"]
    assert header.startswith(str(PUBLISHED / "2025-11-02-Smear-MTP" / "curve.csv")) and "this run differs from recipe 2025-11-02-Smear-MTP in " in header
    assert "muon_lr" in header and "model_dim" in header and "log_dir" not in header and "seed" not in header
    plain, note = t.find_published(t.parse_command(["--seed", "3"]))
    assert "differs" not in note and plain.curve[0] == 10.825840


def test_comparison_can_be_switched_off_and_a_log_of_ones_own_is_a_curve(tiny, tmp_path):
    first = compared(tiny, tmp_path, "none")
    assert "published" not in first.body() and "comparison: none" in first.stdout
    again = compared(tiny, tmp_path, first.log)
    assert len(re.findall(r"^step:.* published:(\S+) delta:[+-]0\.0000$", again.body(), re.MULTILINE)) == 4
    assert again.losses() == first.losses() and "final val_loss" not in again.body()


@pytest.mark.parametrize("recipe", TABLE)
def test_published_curves_are_readable_and_end_where_the_recipe_does(recipe):
    """Against the files themselves, read by the csv module."""
    published, _ = t.find_published(t.parse_command(["--recipe", recipe]))
    with open(PUBLISHED / recipe / "curve.csv", newline="") as f:
        rows = {int(row["step"]): float(row["val_loss"]) for row in csv.DictReader(f)}
    with open(PUBLISHED / recipe / "runs.csv", newline="") as f:
        finals = [float(row["val_loss"]) for row in csv.DictReader(f)]
    assert published.curve == rows and published.finals == finals and len(finals) >= 2
    assert rows[0] == 10.825840 and set(range(0, max(rows), 125)) <= set(rows) and 2.90 < rows[max(rows)] < 2.93
    assert max(rows) == TABLE[recipe][0]
    n, mean, sd = re.search(r"n (\d+) mean (\S+) sd (\S+) ", published.verdict(2.92)).groups()
    assert int(n) == len(finals) and abs(float(mean) - statistics.mean(finals)) < 0.51e-6
    assert abs(float(sd) - statistics.stdev(finals)) < 0.51e-6


GOOD_BODY = "step:0/9 val_loss:5.900000 train_time:0ms step_avg:0.00ms\nstep:1/9 train_time:5ms step_avg:5.00ms\nstep:3/9 val_loss:5.5"
CURVES = {  # file name, content, message
    "an empty file": ("curve.csv", "", "needs the columns step, val_loss, found nothing"),
    "a header alone": ("curve.csv", "step,val_loss\n", "holds no validation loss"),
    "a wrong header": ("curve.csv", "steps;loss\n0;5.9\n", "needs the columns step, val_loss, found steps;loss"),
    "a column missing": ("curve.csv", "step,train_time_ms\n0,5\n", "found step, train_time_ms"),
    "a row cut off": ("curve.csv", "step,val_loss\n0,5.9\n125,\n", "line 3"),
    "not a number": ("curve.csv", "step,val_loss\n0,5.9\nlast,5.0\n", "line 3"),
    "nan": ("curve.csv", "step,val_loss\n0,nan\n", "finite"),
    "not utf-8": ("curve.csv", b"\xff\xfe\x00", "cannot be read"),
    "an empty log": ("run.txt", "", "holds no validation loss"),
    "a log of a run that never validated": ("run.txt", f"x\n{SEPARATOR}\ny\n{SEPARATOR}\nstep:1/9 train_time:5ms step_avg:1ms\n",
                                            "holds no validation loss"),
}


@pytest.mark.parametrize("what", CURVES)
def test_curves_that_cannot_be_read_are_refused_before_anything_is_built(what, tiny, tmp_path):
    name, content, message = CURVES[what]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    words = changed(tiny, log_dir=tmp_path / "logs", compare_with=tmp_path / name)
    assert_refused(fork_ranks(words, patch=NOT_EVEN_STARTED), f"{tmp_path}/{name}", message)


def test_a_missing_curve_is_refused_when_it_was_named(tiny, tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    for name in ("nowhere.csv", "pipe.csv", ""):  # the last one is the folder
        words = changed(tiny, log_dir=tmp_path / "logs", compare_with=tmp_path / name)
        assert_refused(fork_ranks(words, patch=NOT_EVEN_STARTED), str(tmp_path / name), "cannot be read")


def test_a_log_cut_off_gives_its_whole_lines_and_the_source_in_it_is_no_curve(tmp_path):
    """Cut in the middle of step 3's line; its embedded source prints lines of the same shape, behind a line of 100 =."""
    log = tmp_path / "run.txt"
    fake = "step:7/9 val_loss:1.000000 train_time:0ms step_avg:0.00ms"
    log.write_text(f"print('''\n{fake}\n{SEPARATOR}\n{fake}\n''')\n{SEPARATOR}\nheader\n{SEPARATOR}\n{GOOD_BODY}")
    assert t.read_published(log).curve == {0: 5.9}
    log.write_text(log.read_text() + "12345 train_time:9ms step_avg:3.00ms\n")
    assert t.read_published(log).curve == {0: 5.9, 3: 5.512345}
