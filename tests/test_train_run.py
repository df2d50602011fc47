"""The whole run: what it writes, what it repeats, what leaves it unchanged, what it learns, and what it refuses.

Real processes through torch.distributed.run where the launcher matters; forks of a warm one where only ranks do.
"""
from __future__ import annotations

import hashlib
import json
import math
import os
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch

import train_gpt_medium as t
from train_helpers import (LIMIT, ROOT, SCRIPT, Result, call_on_ranks, clean_environment, english, finish_ranks, fork_ranks,
                           launch, shard, start_ranks)


def changed(words: list[str], **fields: object) -> list[str]:
    """The words with some fields set; --field value pairs only."""
    pairs = dict(zip((w[2:] for w in words[::2]), words[1::2]))
    pairs.update({name: str(value) for name, value in fields.items()})
    return [word for name, value in pairs.items() for word in (f"--{name}", value)]


@pytest.fixture(scope="session")
def base(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The tiny run on 2 ranks of torchrun, with 3 outer steps."""
    folder = tmp_path_factory.mktemp("base")
    result = launch(changed(tiny, log_dir=folder, seed=7, snoo_k=2), ranks=2)
    assert result.returncode == 0, result.stderr
    return result

# ---------------------------------------------------------------------------------------------------------------------
# The log and the console


def test_log_embeds_the_source_and_has_the_parsers_line_shapes(base: Result):
    source, header, body = base.parts()
    assert source == SCRIPT.read_bytes()
    assert base.log.read_bytes().startswith(SCRIPT.read_bytes() + b"=" * 100 + b"\n")
    lines = body.splitlines()
    assert body.endswith("\n") and "\r" not in body
    shape = r"train_time:\d+ms step_avg:\d+\.\d\dms"
    expected = [r"step:0/6 val_loss:\d+\.\d{6} " + shape, *[rf"step:{n}/6 {shape}" for n in (1, 2, 3)],
                r"step:3/6 val_loss:\d+\.\d{6} " + shape, *[rf"step:{n}/6 {shape}" for n in (4, 5, 6)],
                r"step:6/6 val_loss:\d+\.\d{6} " + shape, r"peak memory allocated: \d+ MiB reserved: \d+ MiB"]
    assert len(lines) == len(expected) and all(re.fullmatch(e, line) for e, line in zip(expected, lines)), body
    assert abs(float(base.losses()[0]) - math.log(384)) < 2e-6
    times = [int(x) for x in re.findall(r"train_time:(\d+)ms", body)]
    assert times == sorted(times) and times[0] < 50  # the clock starts after the warm-up
    assert times[4] == times[3] or times[4] - times[3] < 50  # and stands still in a validation
    for line in lines[1:-1]:  # the average is the time by the number of steps
        n, ms, average = re.match(r"step:(\d+)/6 .*train_time:(\d+)ms step_avg:([\d.]+)ms", line).groups()
        assert abs(int(ms) / int(n) - float(average)) <= 0.51 / int(n) + 0.01


def test_log_name_and_folder(base: Result):
    uuid4 = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    assert re.fullmatch(rf"000_{uuid4}\.txt", base.log.name)
    assert base.log.parent.name == "2025-09-16_Snoo"
    assert [p.name for p in base.log.parent.iterdir() if p.suffix == ".txt"] == [base.log.name]


def test_header_names_machine_seed_source_data_and_every_hyperparameter(base: Result, shards: Path):
    text = base.parts()[1]
    header = base.header()
    assert header["python"] == sys.version.split()[0] and header["pytorch"] == torch.__version__
    assert header["cuda"] == str(torch.version.cuda) and "gpus" in header
    assert header["source_sha256"] == hashlib.sha256(SCRIPT.read_bytes()).hexdigest()
    assert (header["recipe"], header["scale"], header["world_size"]) == ("2025-09-16_Snoo", "rehearsal", "2")
    values = base.hyperparameters()
    assert list(values) == [f.name for f in t.dataclasses.fields(t.Hyperparameters)]
    assert (values["seed"], values["snoo_k"], values["muon_lr"], values["run_id"]) == (7, 2, 0.027, 0)
    for name, tokens in (("train_000001", 40_000), ("train_000002", 40_000), ("val_000000", 9_000)):
        assert f"data: {shards}/{name}.bin {tokens} tokens\n" in text


def test_console_of_rank_0(base: Result):
    """A line a validation with the time left, no step lines, and last what ran, where the log is, and the loss."""
    lines = base.stdout.splitlines()
    validations = [line for line in lines if "val_loss:" in line and line.startswith("step:")]
    assert [re.sub(r" time_left:\d+\.\dmin$", "", line) for line in validations] == [
        line for line in base.body().splitlines() if "val_loss" in line]
    assert all(re.search(r" time_left:\d+\.\dmin$", line) for line in validations)
    assert not [line for line in lines if line.startswith("step:") and "val_loss" not in line] and "\r" not in base.stdout
    assert any("3 outer steps, every 2 inner steps" in line and "1 inner steps trail" in line for line in lines)
    assert lines[-3:] == ["finished: recipe 2025-09-16_Snoo, scale rehearsal, 6 steps on 2 ranks", f"log: {base.log}",
                          f"val_loss: {base.losses()[6]}"]
    assert "error" not in base.stderr.lower()


def test_the_log_alone_reruns_the_run(base: Result, tmp_path: Path):
    """The source cut out of it, started with the hyperparameters that it names: the same losses, digit for digit; and a
    copy that is edited while it runs logs what it was when it started."""
    script = tmp_path / "train.py"
    source = base.parts()[0]
    script.write_bytes(source)
    words = [w for name, value in base.hyperparameters().items() if name not in ("log_dir", "run_id")
             for w in (f"--{name}", value if isinstance(value, str) else json.dumps(value).replace("null", "none"))]
    header = base.header()
    words = [f"{w}" for pair in zip(words[::2], words[1::2]) if pair[1] != "" for w in pair]
    logs = tmp_path / "logs"

    def edit() -> None:
        end = time.monotonic() + LIMIT
        while not list(logs.glob("*/*.txt")) and time.monotonic() < end:
            time.sleep(0.05)
        script.write_bytes(source + b"raise SystemExit('edited while it ran')\n")

    again = launch(["--recipe", header["recipe"], "--scale", header["scale"], *words, "--log_dir", logs],
                   ranks=int(header["world_size"]), script=script, cwd=tmp_path, while_running=edit)
    assert again.returncode == 0, again.stderr
    assert again.losses() == base.losses()
    assert again.parts()[0] == source != script.read_bytes()
    changed_fields = {n for n, v in again.hyperparameters().items() if v != base.hyperparameters()[n]}
    assert changed_fields == {"log_dir"}


def test_other_ranks_print_nothing_and_a_terminal_gets_one_progress_line(tiny, tmp_path):
    result = fork_ranks(changed(tiny, log_dir=tmp_path, batch_sequences=2), 2, terminal=True)
    assert result.returncodes == [0, 0]
    assert result.stdouts[1] == "" and result.stderrs == ["", ""]
    pieces = re.findall(r"\rstep:(\d)/6 train_time:\d+ms step_avg:\d+\.\d\dms ", result.stdout)
    assert pieces == ["1", "2", "3", "4", "5", "6"]  # each over the last: no newline between them
    assert not re.search(r"step:\d/6 train_time:[^\n\r]*\n", result.stdout)
    assert len(re.findall(r"\rstep:\d/6 val_loss:[^\r\n]*\n", result.stdout)) == 3


def test_runs_started_together_do_not_clash_and_run_ids_count_on(tiny, tmp_path):
    words = changed(tiny, log_dir=tmp_path / "logs", num_iterations=1, batch_sequences=1, run_name="trial.1")
    first = fork_ranks(words)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    processes = [p for folder in folders for p in start_ranks(changed(words, run_id=5), 1, folder)]
    finish_ranks(processes)
    assert [p.exitcode for p in processes] == [0, 0] and first.returncode == 0
    last = fork_ranks(words)
    names = sorted(p.name[:4] for p in (tmp_path / "logs" / "trial.1").glob("*.txt"))
    assert names == ["000_", "005_", "005_", "006_"] and last.log.name.startswith("006_")


def test_a_fresh_seed_is_drawn_shared_and_logged(tiny, tmp_path):
    runs = [fork_ranks(changed(tiny, log_dir=tmp_path, num_iterations=1, batch_sequences=2), 2) for _ in range(2)]
    seeds = [r.hyperparameters()["seed"] for r in runs]
    assert all(isinstance(s, int) for s in seeds) and seeds[0] != seeds[1]
    assert runs[0].losses()[1] != runs[1].losses()[1]

# ---------------------------------------------------------------------------------------------------------------------
# What a run computes does not depend on what goes on around it


def run_ways(words: dict[str, list[str]]) -> dict[str, Result]:
    """Runs of one rank, two at a time; they are long for their work, not for a hang."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(words, pool.map(lambda w: fork_ranks(w, limit=3 * LIMIT), words.values())))


def tensors(folder: Path) -> dict[str, object]:
    """Every leaf of a checkpoint's parts that training reads, by its path."""
    leaves: dict[str, object] = {}

    def walk(path: str, value: object) -> None:
        if isinstance(value, dict):
            for k, v in value.items():
                walk(f"{path}/{k}", v)
        elif isinstance(value, (list, tuple)):
            for i, v in enumerate(value):
                walk(f"{path}/{i}", v)
        else:
            leaves[path] = value

    shared = torch.load(folder / "shared.pt", weights_only=True)
    for part in ("model", "adam", "snoo", "rng"):
        walk(part, shared[part])
    for file in sorted(folder.glob("muon_*.pt")):
        walk(file.stem, torch.load(file, weights_only=True))
    return leaves


def assert_same(a: dict[str, object], b: dict[str, object]) -> None:
    assert a.keys() == b.keys() and len(a) > 100
    for path, x in a.items():
        if isinstance(x, torch.Tensor):
            assert x.dtype == b[path].dtype and x.shape == b[path].shape, path
            bits, others = (y.contiguous().reshape(-1).view(torch.uint8) for y in (x, b[path]))
            assert torch.equal(bits, others), path
        else:
            assert x == b[path], path


@pytest.fixture(scope="module")
def variants(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """One seed, five ways: as it is, again, with a warm-up, validating at every step, in another seed."""
    folder = tmp_path_factory.mktemp("variants")
    plain = changed(tiny, seed=11, warmup_steps=0, val_loss_every=0, batch_sequences=2, num_iterations=5, snoo_k=2,
                    save_final="true")
    ways = dict(plain={}, again={}, warm=dict(warmup_steps=3), watched=dict(val_loss_every=1), other=dict(seed=12))
    made = run_ways({name: changed(plain, log_dir=folder / name, **fields) for name, fields in ways.items()})
    assert [r.returncode for r in made.values()] == [0] * 5
    return made


def final_state(result: Result) -> dict[str, object]:
    return tensors(result.log.parent / f"{result.log.stem}_checkpoints" / "step_000005")


def test_two_runs_with_one_seed_agree_bit_for_bit(variants):
    assert variants["again"].losses() == variants["plain"].losses() != variants["other"].losses()
    assert_same(final_state(variants["again"]), final_state(variants["plain"]))


def test_a_warm_up_leaves_no_trace(variants):
    assert variants["warm"].losses() == variants["plain"].losses()
    assert_same(final_state(variants["warm"]), final_state(variants["plain"]))


def test_validating_every_step_leaves_training_identical(variants):
    assert list(variants["watched"].losses()) == [0, 1, 2, 3, 4, 5] and list(variants["plain"].losses()) == [5]
    assert variants["watched"].losses()[5] == variants["plain"].losses()[5]
    assert_same(final_state(variants["watched"]), final_state(variants["plain"]))


def test_state_after_a_warm_up_is_the_state_before_it(tiny):
    """Through Training.state(), fresh and in the middle of a run, with every buffer that a recipe can have."""
    words = changed(tiny, seed=3, batch_sequences=1, warmup_steps=2, snoo_k=2, recipe="2025-11-02-Smear-MTP")
    args, ctx = t.parse_command(words).args, t.Distributed(0, 0, 1, torch.device("cpu"))
    training = t.build_training(args, ctx)
    batches = t.token_batches(args.train_files, args.train_seq_len)

    def flat(value: object, path: str = "") -> dict[str, object]:
        if isinstance(value, (dict, list, tuple)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            return {k: v for key, x in items for k, v in flat(x, f"{path}/{key}").items()}
        return {path: value.clone() if isinstance(value, torch.Tensor) else value}

    for steps in range(3):
        before = flat(training.state())
        t.warm_up(training, args, ctx)
        assert_same(flat(training.state()), before)
        assert training.model.training and all(p.grad is None for p in training.model.parameters())
        t.train_step(training, next(batches), steps, args, ctx)
        if steps:
            moved = flat(training.state())
            assert any(isinstance(v, torch.Tensor) and not torch.equal(v, before[k]) for k, v in moved.items())


def gradients_on_rank(rank: int, world: int, words: list[str]) -> dict[str, object]:
    """One step from weights without zeros: the mean gradients that this rank's optimizers saw."""
    args = t.parse_command(words).args
    ctx = t.start_distributed(args, rank, rank, world)
    training = t.build_training(args, ctx)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in training.model.parameters():  # embed2's share starts at 0 too
            p.add_(torch.randn(p.shape, generator=generator).mul(0.1).to(p.dtype))
    start = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    seen: dict[str, torch.Tensor] = {}
    clear = training.model.zero_grad

    def keep(*a: object, **k: object) -> None:
        seen.update({n: p.grad.clone() for n, p in training.model.named_parameters()})
        clear(*a, **k)

    training.model.zero_grad = keep
    batch = next(t.token_batches(args.train_files, args.batch_sequences * args.train_seq_len, rank, world))
    t.train_step(training, batch, 100, args, ctx)
    mu = 0.85 + 0.1 * 100 / 300
    for name, p in training.model.named_parameters():
        if p in training.muon.state:  # Muon's mean is where its owner keeps it: momentum = (1 - mu) * gradient
            seen[name] = training.muon.state[p]["momentum"] / (1 - mu)
        elif name.startswith(("attentions", "mlps")):
            del seen[name]  # this rank's own part of the mean only
    return dict(grads=seen, start=start, after={n: p.detach().clone() for n, p in training.model.named_parameters()})


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_gradients_after_one_step_agree_between_1_2_and_4_ranks_and_with_float64(tiny, shards):
    words = changed(tiny, seed=3, num_iterations=600)
    del words[words.index("--compare_with"): words.index("--compare_with") + 2]
    worlds = {n: call_on_ranks("test_train_run:gradients_on_rank", n, words) for n in (1, 2, 4)}
    one = worlds[1][0]
    # the oracle: the float64 model over the four sequences of the global batch, cut out of the shard by hand
    model = t.GPT(257, 16, 1, 32, 128, head_dim=32, eot_token=256).double()
    model.load_state_dict({n: p.double() for n, p in one["start"].items()})
    tokens = english(513)
    for i in range(4):
        piece = tokens[128 * i: 128 * i + 129]
        window = torch.tensor(t.window_blocks(100, t.parse_command(words).args), dtype=torch.int32)
        (model(torch.tensor(piece[:-1], dtype=torch.int32), torch.tensor(piece[1:]), window) / 4).backward()
    for name, p in model.named_parameters():
        assert relative(one["grads"][name], p.grad) < 0.05, name
    for world, ranks in worlds.items():
        owners = Counter(name for r in ranks for name in r["grads"])
        assert all(owners[n] == (1 if n.startswith(("attentions", "mlps")) else world) for n in one["start"])
        for r in ranks:
            for name, grad in r["grads"].items():
                assert relative(grad, one["grads"][name]) < 0.01, (world, name)  # the order of bf16 sums
            assert all(torch.equal(p, ranks[0]["after"][n]) for n, p in r["after"].items())  # ranks stay together
            assert not any(torch.equal(p, one["start"][name]) for name, p in r["after"].items())

# ---------------------------------------------------------------------------------------------------------------------
# It learns


def echoes(length: int, seed: int) -> list[int]:
    """Eight letters; each is, nine times in ten, the one two places before it: only who looks back can guess it. Guesses
    from frequencies, or from the letter before, cost ln 8 = 2.079 (the second a little less: two letters alternate)."""
    random, tokens = Random(seed), [256, 0, 1]
    while len(tokens) < length:
        tokens.append(random.randrange(8) if random.random() < 0.1 else tokens[-2])
    return tokens


def entropy_after_one(tokens: list[int]) -> float:
    """The least cross-entropy of a guess that knows the token before: from the text's own counts of pairs."""
    pairs, firsts = Counter(zip(tokens, tokens[1:])), Counter(tokens[:-1])
    return -sum(n * math.log(n / firsts[a]) for (a, _), n in pairs.items()) / (len(tokens) - 1)


@pytest.fixture(scope="module")
def rehearsals(tiny, tmp_path_factory) -> dict[str, list[float]]:
    """Val losses of a rehearsal; the same with every optimizer, or Muon alone, switched off by a rate next to nothing."""
    folder, off = tmp_path_factory.mktemp("echoes"), 1e-12
    (folder / "train.bin").write_bytes(shard(echoes(30_000, 0)))
    (folder / "val.bin").write_bytes(shard(echoes(4100, 1)))
    words = changed(tiny, model_dim=64, head_dim=64, train_seq_len=512, batch_sequences=1, val_seq_len=1024, val_tokens=4096,
                    num_iterations=45, val_loss_every=15, warmup_steps=0, seed=1, snoo_k=11,
                    train_files=folder / "train.bin", val_files=folder / "val.bin")
    ways = dict(full={}, no_muon=dict(muon_lr=off),
                nothing=dict(muon_lr=off, embed_lr=off, head_lr=off, scalar_lr=off, num_iterations=15))
    results = run_ways({name: changed(words, log_dir=folder / name, **fields) for name, fields in ways.items()})
    assert all(result.returncode == 0 for result in results.values()), results
    return {name: [float(loss) for loss in result.losses().values()] for name, result in results.items()}


def test_a_rehearsal_learns_what_only_attention_can(rehearsals):
    full = rehearsals["full"]
    assert len(full) == 4 and full == sorted(full, reverse=True)
    assert full[-1] < entropy_after_one(echoes(4097, 1)) - 0.1


def test_a_rehearsal_is_told_from_one_without_its_optimizers(rehearsals):
    full, no_muon, nothing = rehearsals["full"], rehearsals["no_muon"], rehearsals["nothing"]
    assert all(abs(loss - math.log(384)) < 1e-3 for loss in nothing)
    assert full[-1] < no_muon[-1] - 0.1 and no_muon[-1] > entropy_after_one(echoes(4097, 1)) - 0.05

# ---------------------------------------------------------------------------------------------------------------------
# The command line


def test_importing_touches_nothing():
    probe = """
import sys, os
import torch, torch.distributed, torch.nn.attention.flex_attention, numpy
sys.argv = ["x", "--no_such_option", "7"]
before, touched = dict(os.environ), []
def hook(event, arguments):
    mode, flags = arguments[1:3] if event == "open" else ("", 0)
    if set(mode or "") & set("wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        touched.append((event, arguments))
    if event.split(".")[0] in ("socket", "subprocess", "shutil", "tempfile", "signal") or event in (
            "os.mkdir", "os.remove", "os.rename", "os.chdir", "os.putenv", "os.fork"):
        touched.append((event, arguments))
torch.cuda.init = torch.cuda._lazy_init = lambda: touched.append("cuda")
seed = torch.get_rng_state()
sys.addaudithook(hook)
import train_gpt_medium
assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()
assert torch.equal(seed, torch.get_rng_state()) and dict(os.environ) == before
assert not touched, touched
print("clean")
"""
    result = subprocess.run([sys.executable, "-c", probe], env=clean_environment(PYTHONPATH=str(ROOT)), capture_output=True,
                            text=True, timeout=LIMIT, cwd="/")
    assert (result.returncode, result.stdout) == (0, "clean\n"), result.stderr


def test_help_takes_under_5_seconds_and_explains_every_field(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = launch(["--help"], cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # processor seconds: what it takes by itself, however busy the machine is
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    assert result.returncode == 0 and result.stderr == ""
    for field in t.dataclasses.fields(t.Hyperparameters):
        wanted = {"": "empty", None: "none"}.get(field.default, str(field.default))
        wanted = wanted.lower() if isinstance(field.default, bool) else wanted
        assert re.search(rf"^  --{field.name} \S.*\S {{1,}}\S+.*\(default {re.escape(wanted)}\)$", result.stdout,
                         re.MULTILINE), field.name
    for word in ("--recipe", "--scale", "--dry_run", *t.RECIPES, *t.SCALES):
        assert word in result.stdout


def test_precedence_is_default_recipe_scale_field(tiny):
    default = t.parse_command([]).args
    assert (default.num_iterations, default.muon_lr, default.snoo, default.batch_sequences) == (5640, 0.027, True, 8)
    command = t.parse_command("--scale rehearsal --recipe 2025-09-30_SmoothedSnooMedium".split())
    assert (command.args.num_iterations, command.args.model_dim) == (t.SCALES["rehearsal"]["num_iterations"], 128)  # scale over recipe
    assert (command.args.muon_lr, command.args.update_smoothing) == (0.03, 0.2)  # recipe over default
    explicit = t.parse_command("--muon_lr=0.5 --scale rehearsal --recipe 2025-09-30_SmoothedSnooMedium --model_dim 256".split())
    assert (explicit.args.muon_lr, explicit.args.model_dim, explicit.args.num_heads) == (0.5, 256, 2)
    assert explicit.overrides == {"muon_lr": 0.5, "model_dim": 256}
    for text, value in (("true", True), ("False", False), ("on", True), ("0", False)):
        assert t.parse_command(["--snoo", text]).args.snoo is value
    assert t.parse_command(["--save_final", "--snoo=no"]).args.save_final is True
    assert t.parse_command(["--seed", "none"]).args.seed is None
    hyphens = t.parse_command("--snoo-k 3 --run-name a-b --train_files=a-b/c=*.bin --val_files x-y".split()).args
    assert (hyphens.snoo_k, hyphens.run_name, hyphens.train_files, hyphens.val_files) == (3, "a-b", "a-b/c=*.bin", "x-y")


def test_every_field_can_be_set_from_the_command_line():
    for field in t.dataclasses.fields(t.Hyperparameters):
        kind = field.type.partition(" | ")[0]
        text, value = {"int": ("3", 3), "float": ("0.25", 0.25), "bool": ("false", False), "str": ("abc", "abc")}[kind]
        args = t.parse_command([f"--{field.name}", text]).args
        assert getattr(args, field.name) == value and type(getattr(args, field.name)) is type(value), field.name


def test_scales_set_only_sizes_data_and_cadence():
    assert t.SCALES["record"] == {}
    allowed = {"train_files", "val_files", "batch_sequences", "train_seq_len", "val_seq_len", "val_tokens", "num_heads", "head_dim",
               "model_dim", "vocab_size", "eot_token", "num_iterations", "window_max", "val_loss_every", "warmup_steps", "compile",
               "log_dir", "compare_with", "snoo_k"}
    assert set(t.SCALES["rehearsal"]) <= allowed
    args = t.parse_command(["--scale", "rehearsal"]).args
    assert -(-args.vocab_size // 128) * 128 == 384 and args.num_layers == 16 and args.log_dir == "records/rehearsal"
    t.check_hyperparameters(args, 2)
    steps = range(args.num_iterations + 1)
    assert args.batch_sequences // 2 >= 2 and t.outer_steps(args)[0] >= 4
    assert len({t.window_blocks(s, args) for s in steps}) >= 4
    assert len([s for s in steps if s % args.val_loss_every == 0]) >= 4


def test_dry_run_checks_everything_and_builds_nothing(tiny, tmp_path):
    words = changed(tiny, log_dir=tmp_path / "logs", snoo_k=4, muon_lr=0.5)
    no_building = "t.build_training = t.GPT = t.start_distributed = t.RunLog = lambda *a, **k: sys.exit('built')"
    result = fork_ranks([*words, "--dry_run"], patch=no_building)
    assert (result.returncode, result.stderr) == (0, "")
    assert "6 steps of 512" in result.stdout and "2 outer steps, every 4 inner steps" in result.stdout
    assert "1 inner steps trail" in result.stdout and f"log: {tmp_path}/logs/2025-09-16_Snoo/" in result.stdout
    values = dict(re.findall(r"^  --(\w+) (.*)$", result.stdout, re.MULTILINE))
    assert set(values) == {f.name for f in t.dataclasses.fields(t.Hyperparameters)}
    assert (values["muon_lr"], values["snoo_k"], values["model_dim"]) == ("0.5", "4", "32")
    assert not (tmp_path / "logs").exists()
    refused = fork_ranks([*changed(words, num_iterations=100_000), "--dry_run"], patch=no_building)
    assert refused.returncode == 1 and "batches" in refused.stderr

# ---------------------------------------------------------------------------------------------------------------------
# Bad input: one message, exit code 1, nothing built, no log


NOT_EVEN_STARTED = "t.build_training = t.GPT = lambda *a, **k: sys.exit('built before the fault was seen')"

BAD_OPTIONS = {  # words after the tiny run's (a field there is replaced), and what the message must hold
    "--muon_lrr 1": ["--muon_lrr: no such option; nearest: muon_lr"],
    "--trian_files=/a/very/long/path/*.bin": ["--trian_files: no such option; nearest: train_files"],
    "--reciep x": ["--reciep: no such option; nearest: recipe"],
    "--hel": ["--hel: no such option; nearest: help"],
    "--step_timeout 999999999999999": ["--step_timeout 999999999999999", "at most 10 million"],
    "--startup_timeout 99999999999": ["--startup_timeout 99999999999", "at most 10 million"],
    "--window_max 140737488355328": ["--window_max 140737488355328", "below 2^30"],
    f"--run_name {'a' * 300}": ["--run_name aaa", "up to 200 letters"],
    f"--resume {'a' * 300}": ["no checkpoint is there"],
    "--xyzzy": ["--xyzzy: no such option; see --help"],
    "--snoo_k 2 --snoo-k=3": ["--snoo_k is given twice"],
    "--run_name -x": ["--run_name: expected one argument; a value that begins with - is written --field=value"],
    "--run_name=-x": ["--run_name -x", "no - in front"],
    "--fused_mlp true --model_dim 96 --num_heads 3": ["--fused_mlp true --model_dim 96", "multiple of 64"],
    "--recipe 2025-09-16_Sno": ["--recipe: invalid choice: '2025-09-16_Sno'", "2025-09-16_Snoo"],
    "--scale rehersal": ["--scale: invalid choice: 'rehersal'", "rehearsal"],
    "surplus x": ["surplus: no option before it takes it", "--field value"],
    "--snoo_k": ["--snoo_k: expected one argument"],
    "--snoo_k two": ["--snoo_k: 'two' must be a whole number"],
    "--snoo_k 2.5": ["--snoo_k: '2.5' must be a whole number"],
    "--muon_lr fast": ["--muon_lr: 'fast' must be a finite number"],
    "--muon_lr nan": ["--muon_lr: 'nan' must be a finite number"],
    "--muon_lr inf": ["--muon_lr: 'inf' must be a finite number"],
    "--snoo maybe": ["--snoo: 'maybe' must be true or false"],
    "--seed x": ["--seed: 'x' must be a whole number or none"],
    "--seed -1": ["--seed -1", "[0, 2^63)"],
    "--train_seq_len 100": ["--train_seq_len 100", "multiple of 128"],
    "--train_seq_len 0": ["--train_seq_len 0", "multiple of 128"],
    "--val_seq_len 192": ["--val_seq_len 192", "multiple of 128"],
    "--window_max 100": ["--window_max 100", "multiple of 128"],
    "--val_tokens 500": ["--val_tokens 500", "multiple of the validation batch of 128"],
    "--val_tokens 0": ["--val_tokens 0", "positive multiple"],
    "--snoo_k 0": ["--snoo_k 0", "at least 1"],
    "--snoo_momentum 1": ["--snoo_momentum 1", "[0, 1)"],
    "--snoo_momentum -0.1": ["--snoo_momentum -0.1", "[0, 1)"],
    "--snoo_lr 0": ["--snoo_lr 0", "positive"],
    "--muon_momentum_end 1.0": ["--muon_momentum_end 1.0", "[0, 1)"],
    "--adam_beta2 1": ["--adam_beta2 1", "[0, 1)"],
    "--update_smoothing 1": ["--update_smoothing 1", "[0, 1)"],
    "--update_smoothing_start 0.5": ["--update_smoothing_start 0.5", "both its start and its steps"],
    "--update_smoothing_interpolated true": ["nothing to interpolate|no smoothing to interpolate"],
    "--cooldown_frac 1.5": ["--cooldown_frac 1.5", "[0, 1]"],
    "--final_lr_scale -1": ["--final_lr_scale -1", "[0, 1]"],
    "--num_iterations 0": ["--num_iterations 0", "at least 1"],
    "--num_layers 11": ["--num_layers 11", "at least 12"],
    "--num_heads 2": ["--num_heads 2 --head_dim 32 --model_dim 32", "must equal model_dim"],
    "--head_dim 6 --model_dim 6": ["--head_dim 6", "multiple of 4"],
    "--vocab_size 70000": ["--vocab_size 70000", "uint16"],
    "--eot_token 257": ["--eot_token 257 --vocab_size 257", "below vocab_size"],
    "--head_chunks 3": ["--head_chunks 3 --train_seq_len 128", "divide"],
    "--batch_sequences 0": ["--batch_sequences 0", "at least 1"],
    "--run_name a/b": ["--run_name a/b", "names a folder"],
    "--run_name ..": ["--run_name ..", "names a folder"],
    "--warmup_steps -1": ["--warmup_steps -1", "not be negative"],
    "--muon_lr 0 --snoo_k 0 --val_tokens 1": ["--muon_lr 0", "--snoo_k 0", "--val_tokens 1"],  # all at once
    "--num_iterations 1000": ["training: 1000 batches of 512 tokens are needed", "the 2 shards of", "give 156",
                              "the run needs 13 shards", "python data/cached_fineweb10B.py 13"],
    "--val_tokens 9088": ["validation: 71 batches of 128 tokens are needed", "the 1 shards of", "give 70", "lower --val_tokens"],
    "--train_files nowhere/*.bin": [f"{ROOT}/nowhere/*.bin", "no shard matches", "python data/cached_fineweb10B.py 30"],
    "--val_files nowhere/*.bin": ["nowhere/*.bin", "no shard matches"],
}


def assert_refused(result: Result, *parts: str) -> None:
    assert result.returncodes == [1] * len(result.returncodes), (result.returncodes, result.stderr)
    assert result.stdouts == [""] * len(result.stdouts)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and result.stderr.startswith("error: ") and "Traceback" not in result.stderr
    assert all(any(option in result.stderr for option in part.split("|")) for part in parts), result.stderr
    assert result.stderrs[1:] == [""] * (len(result.stderrs) - 1)


@pytest.mark.parametrize("words", BAD_OPTIONS)
def test_bad_options_are_refused(words, tiny, tmp_path):
    new = words.split()
    named = [w for w in new if w.startswith("--")]
    pairs = list(zip(tiny[::2], tiny[1::2]))
    kept = [w for pair in pairs if pair[0] not in named for w in pair]
    result = fork_ranks([*kept, "--log_dir", str(tmp_path / "logs"), *new], patch=NOT_EVEN_STARTED)
    assert_refused(result, *BAD_OPTIONS[words])
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("name", ["train_files", "val_files", "log_dir"])
def test_empty_paths_are_refused(name, tiny):
    assert_refused(fork_ranks(changed(tiny, **{name: ""}), patch=NOT_EVEN_STARTED), f"--{name} : must not be empty")


def test_exactly_enough_data_passes_and_a_long_window_too(tiny, tmp_path):
    words = changed(tiny, log_dir=tmp_path / "logs", num_iterations=156, val_tokens=70 * 128, window_max=1280)
    result = fork_ranks([*words, "--dry_run"])
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("world, fields, parts", [
    (2, dict(batch_sequences=3), ["--batch_sequences 3 on 2 ranks", "must divide"]),
    (4, dict(batch_sequences=2), ["--batch_sequences 2 on 4 ranks", "must divide"]),
    (2, dict(val_tokens=384), ["--val_tokens 384", "256 tokens (2 ranks * val_seq_len 128)"]),
])
def test_worlds_that_do_not_fit_are_refused(world, fields, parts, tiny, tmp_path):
    assert_refused(fork_ranks(changed(tiny, log_dir=tmp_path, **fields), world, patch=NOT_EVEN_STARTED), *parts)


def good(**how) -> bytes:
    return shard(english(3000), **how)


BAD_SHARDS = {
    "wrong magic": (good(magic=1234), "magic number 1234, not 20240520"),
    "wrong version": (good(version=7), "shard version 7"),
    "0 bytes": (b"", "0 bytes"),
    "shorter than its header says": (good()[:-200], "promises 3000 tokens, 7024 bytes, but the file has 6824"),
    "longer than its header says": (good() + b"12", "but the file has 7026"),
    "odd byte count": (good() + b"1", "but the file has 7025"),
}


@pytest.mark.parametrize("which", ["train_files", "val_files"])
@pytest.mark.parametrize("what", BAD_SHARDS)
def test_one_bad_shard_among_good_ones_is_refused(what, which, tiny, tmp_path):
    data, message = BAD_SHARDS[what]
    for i in range(3):
        (tmp_path / f"s{i}.bin").write_bytes(data if i == 1 else good())
    words = changed(tiny, log_dir=tmp_path / "logs", **{which: f"{tmp_path}/s*.bin"})
    assert_refused(fork_ranks(words, patch=NOT_EVEN_STARTED), f"{tmp_path}/s1.bin", message)


def test_a_token_past_the_vocabulary_ends_the_run_with_its_place(tiny, tmp_path):
    (tmp_path / "a.bin").write_bytes(shard([1] * 700 + [400] + [1] * 5000))
    words = changed(tiny, log_dir=tmp_path / "logs", train_files=f"{tmp_path}/a.bin", batch_sequences=2)
    result = fork_ranks(changed(words, warmup_steps=0), 2)
    assert result.returncodes == [1, 1] and "Traceback" not in "".join(result.stderrs)
    assert "token id 400" in result.stderr and "vocab_size is 257" in result.stderr
    assert "token id 400" in result.log.read_text().splitlines()[-1] and not re.search(r"step:6/6 val", result.body())


def test_folders_that_cannot_take_the_log_are_refused_before_anything_is_built(tiny, tmp_path):
    """Not by modes, which root ignores: the folder, or one above it, is a file; and /proc takes no folder."""
    (tmp_path / "file").write_text("not a folder")
    for folder, message in ((tmp_path / "file", "not a folder"), (tmp_path / "file" / "below", "not a folder|cannot be written"),
                            (Path("/proc/1/logs"), "cannot be written|not writable")):
        result = fork_ranks(changed(tiny, log_dir=folder), patch="t.warm_up = t.train = lambda *a, **k: sys.exit('too late')")
        assert_refused(result, str(folder), message, "--log_dir")


def test_real_processes_refuse_too(tiny, tmp_path):
    """The exit code and the message as a shell sees them, alone and through torchrun."""
    words = changed(tiny, log_dir=tmp_path, snoo_k=0)
    alone = launch(words, cwd=tmp_path)
    assert_refused(alone, "--snoo_k 0", "at least 1")
    ranks = launch(words, ranks=2, cwd=tmp_path)
    assert ranks.returncode == 1 and ranks.stdout == ""
    assert len(re.findall(r"^error: --snoo_k 0: must be at least 1$", ranks.stderr, re.MULTILINE)) == 1

# ---------------------------------------------------------------------------------------------------------------------
# Faults that one rank alone sees


UNREADABLE = """
real = t.check_shard
def check(path):
    if rank == {rank} and "train_000002" in str(path):
        raise t.UserError(str(path) + ": the shard cannot be read (Permission denied)")
    return real(path)
t.check_shard = check
"""


def test_a_shard_that_only_rank_1_cannot_read_ends_all_ranks(tiny, tmp_path):
    result = fork_ranks(changed(tiny, log_dir=tmp_path), 2, patch=UNREADABLE.format(rank=1) + NOT_EVEN_STARTED)
    assert result.returncodes == [1, 1] and "".join(result.stdouts) == ""
    assert "rank 1: " in result.stderr and "train_000002.bin: the shard cannot be read" in result.stderr
    assert not list(tmp_path.glob("*/*.txt"))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_ranks_fault_under_torchrun(rank, tiny, tmp_path):
    """A launcher's ranks run a wrapper in which one of them cannot read a shard: exit 1, one message, in time."""
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nimport train_gpt_medium as t\n"
                       f"rank = int(os.environ['RANK'])\n{UNREADABLE.format(rank=rank)}\nt.main()\n")
    result = launch(changed(tiny, log_dir=tmp_path / "logs"), ranks=2, script=wrapper)
    assert result.returncode == 1 and result.stdout == ""
    assert "train_000002.bin: the shard cannot be read (Permission denied)" in result.stderr
    assert not (tmp_path / "logs").exists()


def test_ranks_with_different_options_are_refused(tiny, tmp_path):
    words = changed(tiny, log_dir=tmp_path, seed=3)
    result = fork_ranks(words, 2, words_of={1: changed(words, muon_lr=0.5)}, patch=NOT_EVEN_STARTED)
    assert result.returncodes == [1, 1] and "different hyperparameters" in result.stderr


def test_a_bad_token_that_only_rank_1_reads_ends_both(tiny, tmp_path):
    (tmp_path / "a.bin").write_bytes(shard([1] * 400 + [400] + [1] * 5000))  # in rank 1's half of the first batch
    result = fork_ranks(changed(tiny, log_dir=tmp_path / "logs", train_files=f"{tmp_path}/a.bin", warmup_steps=0), 2)
    assert result.returncodes == [1, 1]
    assert any("token id 400" in text for text in result.stderrs)
    assert "token id 400" in result.log.read_text().splitlines()[-1]

# ---------------------------------------------------------------------------------------------------------------------
# A loss that is not finite


def assert_stopped(result: Result, step: int) -> None:
    """Exit code, console and log name the first bad step; nothing in the log reads as a result."""
    assert all(code == 1 for code in result.returncodes), result.returncodes
    assert f"step {step}/6 is not finite" in result.stderr and "Traceback" not in "".join(result.stderrs)
    body = result.body()
    assert f"step {step}/6 is not finite" in body.splitlines()[-1]
    assert not re.search(r"^step:6/6 val_loss", body, re.MULTILINE) and "nan" not in body.lower().replace("finite", "")
    steps = [int(n) for n in re.findall(r"^step:(\d)/6 train_time", body, re.MULTILINE)]
    assert steps[-1] <= step + 2  # found within a few steps
    assert "peak memory" not in body and "finished" not in result.stdout and "val_loss: " not in result.stdout


def test_a_run_that_diverges_stops_and_names_the_step(tiny, tmp_path):
    """embed_lr 1e39 is inf in bfloat16: the first update ruins the embeddings, the loss of step 2 is nan."""
    result = fork_ranks(changed(tiny, log_dir=tmp_path, embed_lr=1e39, batch_sequences=1, warmup_steps=0, seed=1))
    assert_stopped(result, 2)


POISON = """
real, calls = t.train_step, []
def poisoned(training, batch, step, args, ctx):
    loss = real(training, batch, step, args, ctx)
    calls.append(step)
    return loss * float("{value}") if rank == {rank} and step == {step} else loss
t.train_step = poisoned
"""


@pytest.mark.parametrize("rank, step, value, save", [
    (1, 2, "nan", "false"), (0, 1, "inf", "true"), (1, 5, "nan", "true"), (0, 4, "nan", "false")])
def test_one_ranks_bad_loss_stops_all_even_in_the_last_step(rank, step, value, save, tiny, tmp_path):
    words = changed(tiny, log_dir=tmp_path, batch_sequences=2, warmup_steps=0, val_loss_every=0, save_final=save)
    result = fork_ranks(words, 2, patch=POISON.format(rank=rank, step=step, value=value))
    assert_stopped(result, step + 1)
    assert result.stdouts[1] == "" and not list(tmp_path.glob("*/*_checkpoints/step_*"))


def test_weights_that_the_last_step_ruins_are_not_a_result(tiny, tmp_path):
    patch = """
real = t.train_step
def ruin(training, batch, step, args, ctx):
    loss = real(training, batch, step, args, ctx)
    if step == 5:
        training.model.lm_head_w.data.fill_(float("nan"))
    return loss
t.train_step = ruin
"""
    result = fork_ranks(changed(tiny, log_dir=tmp_path, batch_sequences=1, warmup_steps=0, val_loss_every=0), patch=patch)
    assert result.returncode == 1 and "validation loss at step 6/6 is not finite" in result.stderr
    assert "val_loss" not in result.body()
