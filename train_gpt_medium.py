"""GPT-2 Medium speedrun: FineWeb to a validation cross-entropy of 2.92 on 8 H100s, AdamW + Muon wrapped in
Snoo.

Evidence for the default recipe, 2025-09-16_Snoo (modded-nanogpt, track 2, pull request 128): 30 runs, val
loss mean 2.919616, sd 0.000716, one-sided t-test against 2.92 p = 0.0032; 1404.0 s a run on its author's 8
H100s, 23.28 minutes on the maintainers'. The logged run: val loss 2.919060, 249.15 ms a step, 56505 MiB. See
records/ for the other recipes.

    ./run.sh                                                                        # set-up, data, launch
    python -m torch.distributed.run --standalone --nproc_per_node=8 train_gpt_medium.py
    python train_gpt_medium.py --scale rehearsal                                    # one rank, no launcher
    python train_gpt_medium.py --recipe 2025-09-16_Snoo --snoo_k 14 --dry_run       # checks only

What trains is in the sections from Data to Validation and in train(), near the end; the rest is command line,
log, faults and checkpoints.
"""
from __future__ import annotations

import argparse
import copy
import csv
import dataclasses
import datetime
import difflib
import fcntl
import functools
import glob
import hashlib
import io
import itertools
import json
import math
import os
import platform
import re
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import typing
import uuid
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's CPU builds come without it, and only --fused_mlp needs it
    triton = None

ROOT = Path(__file__).resolve().parent


class UserError(ValueError):
    """A mistake of the user's: printed as one message on rank 0, exit code 1. Our own mistakes are
    assertions."""


class NotFinite(UserError):
    """A loss that is inf or nan: the settings diverge. The same on all ranks."""

# ------------------------------------------------------------------------------------------------------------
# Hyperparameters and recipes. Every tuned number of a run is a field here; the comment behind a field is its
# --help. Precedence: default < recipe < scale < explicit --field value.

DEFAULT_RECIPE = "2025-09-16_Snoo"


@dataclass
class Hyperparameters:
    # data
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # glob, relative to this script
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"  # glob
    batch_sequences: int = 8  # sequences a step over all ranks; the world size must divide it
    train_seq_len: int = 65536  # tokens a training sequence (one micro-batch), a multiple of 128
    val_seq_len: int = 262144  # tokens a validation sequence, a multiple of 128 and of 4
    val_tokens: int = 10485760  # tokens a validation, a multiple of world size * val_seq_len
    # model
    num_layers: int = 16  # blocks, at least 12
    num_heads: int = 8  # attention heads; num_heads * head_dim = model_dim
    head_dim: int = 128  # width of a head, a multiple of 4
    model_dim: int = 1024  # width of the residual stream
    vocab_size: int = 50257  # token ids; the head rounds it up to a multiple of 128
    eot_token: int = 50256  # id that opens each document
    attention_scale: float = 0.12  # factor on q.k before the softmax
    logit_softcap: float = 15.0  # logits stay inside +-this
    backout: bool = False  # final hidden state = b0 * norm(x) + b1 * norm(output of block 11)
    smear: bool = False  # then each position gains c times the position before it
    # run
    num_iterations: int = 5640  # training steps
    cooldown_frac: float = 0.7  # last share of the run, in which the learning rates fall linearly
    final_lr_scale: float = 0.0  # learning rate at the end, as a share of the full one
    window_max: int = 3456  # attention window at the end of the run, tokens, a multiple of 128
    val_loss_every: int = 125  # steps between validations; 0 = only at the end
    warmup_steps: int = 10  # kernel warm-up steps on random tokens, before the clock, undone afterwards
    # AdamW: head, embeddings, scalars
    head_lr: float = 1 / 320  # learning rate of the output head
    embed_lr: float = 0.3  # learning rate of the seven embeddings
    scalar_lr: float = 0.015  # learning rate of the scalars
    adam_beta1: float = 0.8  # first-moment decay
    adam_beta2: float = 0.95  # second-moment decay
    adam_eps: float = 1e-10  # added to the root of the second moment
    adam_weight_decay: float = 0.0  # decoupled weight decay
    # Muon: the matrices of the blocks
    muon_lr: float = 0.027  # learning rate of the matrices
    muon_weight_decay: float = 0.01  # decoupled weight decay of the attention matrices
    mlp_decay_multiplier: float = 2.0  # the MLP matrices' weight decay is this times as large
    muon_momentum_start: float = 0.85  # momentum at step 0
    muon_momentum_end: float = 0.95  # momentum from muon_momentum_steps on
    muon_momentum_steps: int = 300  # steps of the linear momentum ramp
    update_smoothing: float = 0.0  # beta of the average over Muon's updates; 0 here and at the start = off
    update_smoothing_start: float | None = None  # beta at step 0; none = update_smoothing throughout
    update_smoothing_steps: int = 0  # steps of the linear ramp from that to update_smoothing
    update_smoothing_interpolated: bool = False  # apply beta * average + (1 - beta) * update, not the average
    # Snoo: Nesterov steps of the slow weights
    snoo: bool = True  # wrap the inner optimizers in Snoo
    snoo_lr: float = 0.68  # outer learning rate
    snoo_momentum: float = 0.37  # outer momentum
    snoo_k: int = 28  # inner steps an outer step
    snoo_nesterov: bool = True  # Nesterov momentum in the outer step
    # machine
    compile: bool = True  # torch.compile for model and Muon; off for the CPU rehearsal
    coordinate_descent_tuning: bool = True  # Inductor tunes each kernel: compiles longer, steps faster
    fused_mlp: bool = False  # relu squared inside the MLP's products (Triton); not yet timed on a GPU
    head_chunks: int = 1  # pieces in which head and loss are computed; more pieces, less memory
    startup_timeout: int = 3600  # seconds a rank waits for the others before training (compiling is silent)
    step_timeout: int = 300  # seconds a rank waits for the others in training before it gives up
    # bookkeeping
    seed: int | None = None  # none = draw a fresh one, and log it
    run_name: str = ""  # folder of the run in log_dir; empty = the recipe's name
    run_id: int | None = None  # number in the log's name; none = one more than the largest in the folder
    log_dir: str = "records/track_2_medium"  # where run folders go, relative to this script
    compare_with: str = "recipe"  # published curve: recipe = the recipe's own, none, or a curve.csv or a log
    save_every: int = 0  # steps between checkpoints; 0 = none
    save_final: bool = False  # a checkpoint at the end
    keep_checkpoints: int = 2  # newest checkpoints kept of a run and those it continues with --resume auto
    resume: str = ""  # a checkpoint's folder; auto = the newest of this run_name's unfinished runs, if any
    resume_anyway: bool = False  # resume although source or hyperparameters differ; the log says which

    @property
    def compile_options(self) -> dict[str, bool] | None:
        """torch.compile's options; None = not compiled."""
        return dict(coordinate_descent_tuning=self.coordinate_descent_tuning) if self.compile else None


# fields in which a resumed run may differ: nothing computed from there on depends on them
BOOKKEEPING = ("seed", "run_name", "run_id", "log_dir", "compare_with", "save_every", "save_final",
               "keep_checkpoints", "resume", "resume_anyway", "startup_timeout", "step_timeout")

# The track's records, oldest first (modded-nanogpt, records/track_2_medium; figures in our records/).
RECIPES: dict[str, dict[str, typing.Any]] = {
    "2025-09-11_SecondInputEmbed": dict(num_iterations=5690, muon_lr=0.025, snoo=False),
    "2025-09-16_Snoo": dict(num_iterations=5640, muon_lr=0.027, snoo=True),
    "2025-09-17_UpdateSmoothing": dict(
        num_iterations=5610, muon_lr=0.03, final_lr_scale=0.01, snoo=False, update_smoothing=0.2,
        update_smoothing_start=0.5, update_smoothing_steps=3000, update_smoothing_interpolated=True),
    "2025-09-30_SmoothedSnooMedium": dict(
        num_iterations=5590, muon_lr=0.03, final_lr_scale=0.01, snoo=True, update_smoothing=0.2),
    "2025-10-04_GPT2MediumLayerReuse": dict(
        num_iterations=5550, muon_lr=0.03, final_lr_scale=0.01, snoo=True, update_smoothing=0.2,
        backout=True),
    "2025-11-02-Smear-MTP": dict(
        num_iterations=5535, muon_lr=0.03, final_lr_scale=0.01, snoo=True, update_smoothing=0.2, backout=True,
        smear=True),
}

SCALES: dict[str, dict[str, typing.Any]] = {
    "record": {},
    "rehearsal": dict(  # sizes, data and cadence only, so that every recipe can be rehearsed on two CPU cores
        train_files="data/rehearsal/rehearsal_train_*.bin", val_files="data/rehearsal/rehearsal_val_*.bin",
        batch_sequences=4, train_seq_len=384, val_seq_len=1024, val_tokens=16384, num_heads=2, head_dim=64,
        model_dim=128, vocab_size=257, eot_token=256, num_iterations=90, window_max=512, val_loss_every=20,
        warmup_steps=2, compile=False, log_dir="records/rehearsal", compare_with="none"),
}


@dataclass(frozen=True)
class Command:
    """A parsed command line: the resolved hyperparameters and where they came from."""
    args: Hyperparameters
    recipe: str
    scale: str
    overrides: dict[str, typing.Any]  # the explicit fields
    dry_run: str  # "" for a run, "all" for every check, "options" for those that need no data
    words: list[str]  # the command line itself


def finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


TRUTH = {"true": True, "yes": True, "on": True, "1": True,
         "false": False, "no": False, "off": False, "0": False}


def option_type(annotation: str) -> typing.Callable[[str], typing.Any]:
    """What turns an option's text into the type of its field."""
    base, _, optional = annotation.partition(" | ")
    convert, wanted = {"int": (int, "a whole number"), "float": (finite, "a finite number"),
                       "bool": (lambda word: TRUTH[word.lower()], "true or false"), "str": (str, "")}[base]

    def parse(text: str) -> typing.Any:
        if optional and text.lower() == "none":
            return None
        try:
            return convert(text)
        except (ValueError, KeyError):
            wish = f"{wanted} or none" if optional else wanted
            raise argparse.ArgumentTypeError(f"{text!r} must be {wish}") from None

    return parse


class OptionParser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        expected = "expected one argument"
        more = "; a value that begins with - is written --field=value" if message.endswith(expected) else ""
        raise UserError(f"{message.removeprefix('argument ')}{more}; see --help")


def option_parser() -> OptionParser:
    """--recipe, --scale, --dry_run and every field; the comment behind a field is its help."""
    parser = OptionParser(
        prog="train_gpt_medium.py",
        usage="%(prog)s [--recipe NAME] [--scale NAME] [--dry_run] [--field value ...]",
        description=__doc__.split("\n\n")[0], epilog="Precedence: default < recipe < scale < field.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=42, width=180),
        argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--recipe", default=DEFAULT_RECIPE, choices=RECIPES,
                        help=f"the settings of a record (default {DEFAULT_RECIPE})")
    parser.add_argument("--scale", default="record", choices=SCALES,
                        help="sizes, data, cadence (default record)")
    parser.add_argument("--dry_run", default="", nargs="?", const="all", choices=["all", "options"],
                        help="make every check (options: those without data), print the run, and end")
    source = Path(__file__).read_text(encoding="utf-8")  # inspect.getsource takes a tenth of a second
    source = source[source.index("\nclass Hyperparameters:"):source.index("\nBOOKKEEPING")]
    comments = dict(re.findall(r"^    (\w+): [\w| ]+ = .*?  # (.*)", source, re.MULTILINE))
    for field in dataclasses.fields(Hyperparameters):
        bare = dict(nargs="?", const=True) if field.type == "bool" else {}
        default = str(field.default)
        default = {"None": "none", "True": "true", "False": "false", "": "empty"}.get(default, default)
        parser.add_argument(f"--{field.name}", type=option_type(field.type), **bare,
                            metavar=field.type.partition(" ")[0].upper(),
                            help=f"{comments.get(field.name, '')} (default {default})".replace("%", "%%"))
    return parser


def parse_command(argv: list[str]) -> Command:
    """Resolve `--field value`, `--field=value` and bare `--boolean_field`; UserError on anything unknown,
    ill-typed or given twice."""
    words = [re.sub("[^=]+", lambda name: "--" + name[0][2:].replace("-", "_"), word, count=1)
             if word.startswith("--") else word for word in argv]  # --snoo-k is --snoo_k
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{twice[0]} is given twice")
    given, unknown = option_parser().parse_known_args(words)
    if unknown and not unknown[0].startswith("--"):
        raise UserError(f"{unknown[0]}: no option before it takes it; options are written --field value, and "
                        f"a pattern in quotes")
    if unknown:
        known = ["help", "recipe", "scale", "dry_run", *(f.name for f in dataclasses.fields(Hyperparameters))]
        name = unknown[0].partition("=")[0]
        close = difflib.get_close_matches(name[2:], known, n=3, cutoff=0.5)
        raise UserError(f"{name}: no such option; {'nearest: ' if close else 'see --help'}{', '.join(close)}")
    overrides = vars(given)
    recipe, scale, dry_run = (overrides.pop(name) for name in ("recipe", "scale", "dry_run"))
    args = Hyperparameters(**{**RECIPES[recipe], **SCALES[scale], **overrides})
    args.run_name = args.run_name or recipe
    return Command(args, recipe, scale, overrides, dry_run, list(argv))


def check_hyperparameters(args: Hyperparameters, world_size: int) -> None:
    """The one validator of all fields and of how they combine. UserError lists every broken rule with its
    values."""
    broken: list[str] = []

    def rule(holds: bool, values: str, text: str) -> None:
        if not holds:
            broken.append(f"{values}: {text}")

    def each(names: str, holds: typing.Callable[[typing.Any], bool], text: str) -> None:
        for name in names.split():
            rule(holds(getattr(args, name)), f"--{name} {getattr(args, name)}", text)

    each("batch_sequences num_iterations snoo_k head_chunks num_heads head_dim model_dim keep_checkpoints "
         "startup_timeout step_timeout", lambda v: v >= 1, "must be at least 1")
    each("startup_timeout step_timeout", lambda v: v <= 10**7, "must be at most 10 million seconds")
    each("train_seq_len val_seq_len window_max", lambda v: 128 <= v < 2**30 and v % 128 == 0,
         "must be a positive multiple of 128, and below 2^30")
    each("train_files val_files log_dir", bool, "must not be empty")
    each("muon_momentum_start muon_momentum_end snoo_momentum adam_beta1 adam_beta2 update_smoothing",
         lambda v: 0 <= v < 1, "must lie in [0, 1)")
    each("head_lr embed_lr scalar_lr muon_lr snoo_lr adam_eps attention_scale logit_softcap", lambda v: v > 0,
         "must be positive")
    each("cooldown_frac final_lr_scale", lambda v: 0 <= v <= 1, "must lie in [0, 1]")
    each("adam_weight_decay muon_weight_decay mlp_decay_multiplier val_loss_every warmup_steps "
         "muon_momentum_steps save_every update_smoothing_steps eot_token", lambda v: v >= 0,
         "must not be negative")
    rule(args.num_layers >= 12, f"--num_layers {args.num_layers}", "must be at least 12 (value embeddings "
         "feed the first and the last five blocks, skip connections reach block 11)")
    rule(args.seed is None or 0 <= args.seed < 2**63, f"--seed {args.seed}", "must lie in [0, 2^63)")
    rule(args.run_id is None or 0 <= args.run_id, f"--run_id {args.run_id}", "must not be negative")
    rule(re.fullmatch(r"(?!\.+$)[\w.+][\w.+-]{,199}", args.run_name) is not None,
         f"--run_name {args.run_name}", "names a folder: up to 200 letters, digits, . _ + -; no - in front")
    rule(args.num_heads * args.head_dim == args.model_dim,
         f"--num_heads {args.num_heads} --head_dim {args.head_dim} --model_dim {args.model_dim}",
         "num_heads * head_dim must equal model_dim")
    rule(args.head_dim % 4 == 0, f"--head_dim {args.head_dim}",
         "must be a multiple of 4 (rotary frequencies)")
    rule(2 <= args.vocab_size <= 65536, f"--vocab_size {args.vocab_size}",
         "must lie in [2, 65536]: shards hold uint16 tokens")
    rule(args.eot_token < args.vocab_size, f"--eot_token {args.eot_token} --vocab_size {args.vocab_size}",
         "eot_token must be below vocab_size")
    rule(args.train_seq_len % max(args.head_chunks, 1) == 0,
         f"--head_chunks {args.head_chunks} --train_seq_len {args.train_seq_len}",
         "head_chunks must divide train_seq_len")
    rule(args.batch_sequences % world_size == 0,
         f"--batch_sequences {args.batch_sequences} on {world_size} ranks",
         "the number of ranks must divide batch_sequences, so that every rank takes as many sequences")
    val_batch = world_size * args.val_seq_len
    rule(args.val_tokens > 0 and args.val_tokens % max(val_batch, 1) == 0, f"--val_tokens {args.val_tokens}",
         f"must be a positive multiple of the validation batch of {val_batch} tokens ({world_size} ranks * "
         f"val_seq_len {args.val_seq_len})")
    start = args.update_smoothing_start
    rule(start is None or 0 <= start < 1, f"--update_smoothing_start {start}", "must lie in [0, 1)")
    rule((start is None) == (args.update_smoothing_steps == 0),
         f"--update_smoothing_start {start} --update_smoothing_steps {args.update_smoothing_steps}",
         "a ramp of the smoothing needs both its start and its steps (or neither, for a constant beta)")
    rule(not args.update_smoothing_interpolated or smoothing_is_on(args),
         "--update_smoothing_interpolated true", "there is no smoothing to interpolate: set update_smoothing")
    rule(args.warmup_steps > 0 or not args.compile, "--warmup_steps 0 --compile true",
         "the kernel warm-up is where the compiler gets its time; keep a step of it")
    longest = max(args.train_seq_len, args.val_seq_len)
    rule(not args.fused_mlp or (args.model_dim % 64 == 0 and longest * 4 * args.model_dim < 2**31),
         f"--fused_mlp true --model_dim {args.model_dim} on {longest} tokens",
         "the fused kernel needs model_dim to be a multiple of 64, and tokens * 4 * model_dim below 2^31")
    rule(not args.resume_anyway or args.resume != "", "--resume_anyway true", "goes with --resume")
    if broken:
        raise UserError("\n       ".join(broken))


def smoothing_is_on(args: Hyperparameters) -> bool:
    return args.update_smoothing > 0 or bool(args.update_smoothing_start)


def local_path(path: str) -> Path:
    """A user's path: relative ones are relative to this script, not to the working directory."""
    try:
        return ROOT / Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path}: there is no such home folder") from None

# ------------------------------------------------------------------------------------------------------------
# Distributed set-up and the run log. One rank is world size 1, with no process group.


@dataclass(frozen=True)
class Distributed:
    """Who this rank is. `group` carries the training collectives, `control` (gloo) the small host-side ones;
    both give up a minute after step_timeout. Group None, torch's default group, waits startup_timeout: for
    the warm-up, in which ranks compile."""
    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    store: dist.Store | None = None
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None

    def share(self, value: typing.Any) -> list[typing.Any]:
        """Every rank's `value` (a small picklable object), on every rank, in rank order."""
        if self.world_size == 1:
            return [value]
        values: list[typing.Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def agree(self, problem: str | None) -> None:
        """Raise UserError on all ranks when any rank has a problem; the message names the first such rank."""
        for rank, text in enumerate(self.share(problem)):
            if text is not None:
                raise UserError(text if self.world_size == 1 or rank == 0 else f"rank {rank}: {text}")

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def environment_ranks() -> tuple[int, int, int]:
    """(rank, local rank, world size) as torchrun's environment gives them; (0, 0, 1) without it."""
    try:
        rank, local, world = (int(os.environ.get(name, default)) for name, default in
                              (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    except ValueError as e:
        raise UserError(f"RANK, LOCAL_RANK and WORLD_SIZE must be whole numbers: {e}") from None
    if not 0 <= rank < world:
        raise UserError(f"RANK {rank} in the environment must lie in [0, WORLD_SIZE = {world})")
    return rank, local, world


def start_distributed(args: Hyperparameters, rank: int, local_rank: int, world_size: int) -> Distributed:
    """Join torchrun's process group. Two time limits: a long one while ranks compile, a short one in
    training."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda and local_rank < torch.cuda.device_count():  # else agree() says so
        torch.cuda.set_device(device)
    if world_size == 1:
        return Distributed(rank, local_rank, world_size, device)
    # a minute more than Watch's limit, so that Watch, which says where each rank stands, speaks first
    limits = [datetime.timedelta(seconds=s) for s in (args.startup_timeout, args.step_timeout + 60)]
    backend = "nccl" if cuda else "gloo"
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=limits[0]))
    dist.init_process_group(backend, store=dist.PrefixStore("training", store), rank=rank,
                            world_size=world_size, timeout=limits[0])
    return Distributed(rank, local_rank, world_size, device, store,
                       group=dist.new_group(backend=backend, timeout=limits[1]),
                       control=dist.new_group(backend="gloo", timeout=limits[1]))


SEPARATOR = "=" * 100


def console(text: str, end: str = "\n", file: typing.TextIO | None = None) -> None:
    """Print. A console that went away (a closed pipe, a full disk under it) does not end the run."""
    try:
        print(text, end=end, file=file or sys.stdout, flush=True)
    except OSError:
        pass


class RunLog:
    """The run's log on rank 0 (path None: a rank that logs nothing), written line by line and locked while
    the run lives. A disk that fails does not end the run: lines are lost, the console says so once, and the
    log says how many when it can be written again."""

    def __init__(self, path: Path | None, source: bytes = b"") -> None:
        self.path, self.lost = path, 0
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "xb", buffering=0)
            try:
                self._append(source + (b"" if source.endswith(b"\n") else b"\n") + f"{SEPARATOR}\n".encode())
            except OSError:
                path.unlink()
                raise
        except OSError as e:
            raise UserError(f"{path}: the run's log cannot be written there ({e.strerror}); --log_dir names "
                            f"another folder") from None
        try:  # the kernel drops the lock when the process ends, see is_running
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a file system without locks
            pass

    def _append(self, data: bytes) -> None:
        """All of data or nothing of it: the first half of a line could pass for another line."""
        end = self.file.tell()
        try:
            while data:
                data = data[self.file.write(data):]
        except OSError:
            self.file.truncate(end)
            self.file.seek(end)
            raise

    def write(self, line: str) -> None:
        if self.path is None:
            return
        note = f"log: {self.lost} lines lost before this one\n" if self.lost else ""
        try:
            self._append(f"{note}{line}\n".encode("utf-8", "backslashreplace"))
            self.lost = 0
        except OSError as e:
            self.lost += 1
            if self.lost == 1:
                console(f"WARNING: {self.path}: a line could not be written ({e.strerror}); training goes on")

    def say(self, line: str) -> None:
        """To the log and to the console."""
        self.write(line)
        if self.path is not None:
            console(line)

    def close(self) -> None:
        if self.path is not None and not self.file.closed:
            if self.lost:
                console(f"WARNING: {self.path}: its last {self.lost} lines are lost")
            try:
                self.file.close()
            except OSError as e:  # a network file system may report a quota only now
                console(f"WARNING: {self.path}: the end of the log may be lost ({e.strerror})")


def next_run_id(folder: Path) -> int:
    """One more than the largest number in the names <run_id:03d>_<uuid>.txt of a run's folder."""
    found = [int(m[1]) for p in folder.glob("*.txt") if (m := re.match(r"(\d{3,})_", p.name))]
    return max(found, default=-1) + 1

# ------------------------------------------------------------------------------------------------------------
# Data: FineWeb shards (256 int32 of header, then uint16 tokens) and the one global token stream that the
# rules fix.

SHARD_MAGIC, SHARD_VERSION, HEADER_BYTES = 20240520, 1, 1024


@dataclass(frozen=True)
class Shard:
    path: Path
    num_tokens: int


def check_shard(path: str | os.PathLike) -> Shard:
    """Read a shard's header and compare it with the file's size. UserError names the path, the value and the
    rule."""
    path = Path(path)
    again = "delete the file and fetch it again"
    try:
        size = path.stat().st_size
        with open(path, "rb") as f:
            header = np.frombuffer(f.read(HEADER_BYTES), dtype="<i4", count=-1 if size >= HEADER_BYTES else 0)
    except OSError as e:
        raise UserError(f"{path}: the shard cannot be read ({e.strerror})") from None
    if size < HEADER_BYTES:
        raise UserError(f"{path}: {size} bytes, but a shard's header alone has {HEADER_BYTES}; {again}")
    if header[0] != SHARD_MAGIC:
        raise UserError(f"{path}: magic number {header[0]}, not {SHARD_MAGIC}: this is no token shard")
    if header[1] != SHARD_VERSION:
        raise UserError(f"{path}: shard version {header[1]}, but this program reads version {SHARD_VERSION}")
    num_tokens = int(header[2])
    if num_tokens < 1:
        raise UserError(f"{path}: the header counts {num_tokens} tokens; a shard has at least one")
    if size != HEADER_BYTES + 2 * num_tokens:
        raise UserError(f"{path}: the header promises {num_tokens} tokens, {HEADER_BYTES + 2 * num_tokens} "
                        f"bytes, but the file has {size}; {again}")
    return Shard(path, num_tokens)


def load_shard(path: str | os.PathLike) -> Tensor:
    """Memory-map one shard: a 1-D uint16 tensor of its tokens. Raises UserError (a ValueError) as check_shard
    does."""
    shard = check_shard(path)
    # not torch.from_file, whose names must be UTF-8; "c", a private map, because torch wants it writable
    return torch.from_numpy(np.memmap(path, "<u2", "c", HEADER_BYTES, (shard.num_tokens,)))


def find_shards(pattern: str) -> list[Shard]:
    """The checked shards that match a glob, in name order."""
    paths = sorted(glob.glob(str(local_path(pattern)), recursive=True))
    if not paths:
        raise UserError(f"{local_path(pattern)}: no shard matches; fetch the record's with: python "
                        f"data/cached_fineweb10B.py 30, the rehearsal's with: python data/rehearsal.py")
    return [check_shard(path) for path in paths]


def batches_in_shard(num_tokens: int, batch_tokens: int) -> int:
    """Batches that a shard gives: pos = 0, B, 2B, ... as long as pos + B + 1 < its length."""
    return max(num_tokens - 2, 0) // batch_tokens


def check_enough(shards: list[Shard], batch_tokens: int, needed: int, what: str, pattern: str) -> None:
    """UserError when the shards hold fewer batches than the run will take."""
    counts = [batches_in_shard(s.num_tokens, batch_tokens) for s in shards]
    if sum(counts) >= needed:
        return
    per_shard = max(counts)
    if not per_shard:
        want = "no shard is longer than one batch"
    elif what == "validation":
        want = "lower --val_tokens"
    else:
        count = math.ceil(needed / per_shard)
        want = (f"at {per_shard} batches a shard the run needs {count} shards; fetch more with: python "
                f"data/cached_fineweb10B.py {count}, or shorten the run")
    raise UserError(f"{what}: {needed} batches of {batch_tokens} tokens are needed, but the {len(shards)} "
                    f"shards of {pattern} give {sum(counts)}; {want}")


def token_batches(pattern: str, batch_tokens: int, rank: int = 0, world_size: int = 1, skip: int = 0,
                  vocab_size: int = 65536) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's slice of the global stream, batch by batch, after the first `skip` batches.

    Batch n is tokens [pos, pos + batch_tokens + 1) of the current shard, then pos += batch_tokens; where pos
    + batch_tokens + 1 >= the shard's length the next shard starts at 0. The track's rules forbid another
    stream. Yields (inputs int32, targets int64), each of shape (batch_tokens / world_size,), on the CPU. Ends
    with the data. UserError: a bad shard, or a token id that is not below vocab_size."""
    assert batch_tokens % world_size == 0
    length = batch_tokens // world_size
    for shard in find_shards(pattern):
        count = batches_in_shard(shard.num_tokens, batch_tokens)
        if skip >= count:
            skip -= count
            continue
        tokens = load_shard(shard.path)
        for batch in range(skip, count):
            start = batch * batch_tokens + rank * length
            piece = tokens[start: start + length + 1].to(torch.int32)
            if (largest := int(piece.max())) >= vocab_size:
                raise UserError(f"{shard.path}: token id {largest} among tokens {start} to {start + length}, "
                                f"but vocab_size is {vocab_size}")
            yield piece[:-1], piece[1:].to(torch.int64)
        skip = 0


def to_device(batch: tuple[Tensor, Tensor], ctx: Distributed) -> tuple[Tensor, Tensor]:
    """Start the copy to the device; from pinned memory it overlaps with the step that runs."""
    if ctx.device.type != "cuda":
        return batch
    inputs, targets = (t.pin_memory().to(ctx.device, non_blocking=True) for t in batch)
    return inputs, targets

# ------------------------------------------------------------------------------------------------------------
# Attention masks: causal, within a document, and no further back than the window, in blocks of 128 tokens.

BLOCK = 128


def block_lists(docs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Partial and full key blocks of each query block, nearest first, before any window.

    docs: (T,) int, the running count of documents; T a multiple of 128. Returns (partial_num (N,),
    partial_idx (N, N), full_num (N,), full_idx (N, N)), int32, N = T / 128; row i's list is the first num[i]
    entries of idx[i]. Documents only grow, so that the key blocks which see any of row i are the contiguous
    range [first_i, i]; where block i lies in one document, those that lie in it whole are the full ones,
    again contiguous and just before i. So both lists follow from two counts, without the sort that a general
    mask needs."""
    low, high = docs.view(-1, BLOCK)[:, 0], docs.view(-1, BLOCK)[:, -1]
    index = torch.arange(low.numel(), dtype=torch.int32, device=docs.device)
    row, col = index[:, None], index[None, :]
    some = (col <= row) & (low[:, None] <= high[None, :])
    full = (col < row) & (low[:, None] == high[None, :]) & (high[:, None] == low[None, :])
    full_num = full.sum(1, dtype=torch.int32)
    partial_num = some.sum(1, dtype=torch.int32) - full_num
    full_idx = (row - 1 - col).clamp_min(0)
    partial_idx = torch.where(col == 0, row, row - col - full_num[:, None]).clamp_min(0)
    return partial_num, partial_idx, full_num, full_idx


def windowed(partial_num: Tensor, full_num: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each list a window of `window` blocks (0-d int32) keeps: at most max(window -
    full_num, 1) partial and window - 1 full ones, never below 0."""
    return (torch.minimum(partial_num, (window - full_num).clamp_min(1)),
            torch.minimum(full_num, (window - 1).clamp_min(0)))


def dense_mask(docs: Tensor, window: Tensor) -> Tensor:
    """The (T, T) bool mask that equals the windowed block lists: what SDPA on a CPU gets."""
    partial_num, partial_idx, full_num, full_idx = block_lists(docs)
    partial_num, full_num = windowed(partial_num, full_num, window)
    blocks = partial_num.numel()
    position = torch.arange(blocks, device=docs.device)

    def kept(num: Tensor, idx: Tensor) -> Tensor:
        # what is cut goes to a spare column
        column = torch.where(position[None, :] < num[:, None], idx.long(), blocks)
        table = torch.zeros(blocks, blocks + 1, dtype=torch.bool, device=docs.device)
        table.scatter_(1, column, True)
        return table[:, :blocks].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)

    token = torch.arange(docs.numel(), device=docs.device)
    allowed = (token[:, None] >= token[None, :]) & (docs[:, None] == docs[None, :])
    return kept(full_num, full_idx) | (kept(partial_num, partial_idx) & allowed)


def attention_masks(docs: Tensor, window: Tensor) -> tuple[BlockMask | Tensor, BlockMask | Tensor]:
    """(long, short) masks for windows of `window` and window // 2 blocks: BlockMask on CUDA, dense bool on a
    CPU."""
    windows = (window, window // 2)
    if docs.device.type == "cpu":  # FlexAttention has no backward on CPUs
        long, short = (dense_mask(docs, w) for w in windows)
        return long, short
    partial_num, partial_idx, full_num, full_idx = block_lists(docs)

    def document_causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (docs[q] == docs[k])

    def block_mask(w: Tensor) -> BlockMask:
        p, f = windowed(partial_num, full_num, w)
        return BlockMask.from_kv_blocks(p[None, None], partial_idx[None, None], f[None, None],
                                        full_idx[None, None], BLOCK_SIZE=BLOCK, mask_mod=document_causal)

    long, short = (block_mask(w) for w in windows)
    return long, short

# ------------------------------------------------------------------------------------------------------------
# --fused_mlp: relu squared inside the MLP's two products, in Triton.


if triton is not None:
    @triton.jit
    def relu_squared_product_kernel(a, b, out, act, N, K, stride_bk, stride_bn, BACKWARD: tl.constexpr,
                                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                                    GROUP: tl.constexpr):
        """A tile of out = relu(a b)^2, or BACKWARD of out = (a b) * 2 sqrt(act): the gradient of relu
        squared, which needs only its own output. a (M, K) and out (M, N) are contiguous, b (K, N) has any
        strides, sizes are whole tiles."""
        # programs go down GROUP rows of tiles before the next column: tiles of b stay in the L2 cache
        pid, columns = tl.program_id(0), N // BLOCK_N
        first = pid // (GROUP * columns) * GROUP
        rows = tl.minimum(tl.num_programs(0) // columns - first, GROUP)
        m = (first + pid % (GROUP * columns) % rows) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = pid % (GROUP * columns) // rows * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        a_tile = a + m[:, None] * K + k[None, :]
        b_tile = b + k[:, None] * stride_bk + n[None, :] * stride_bn
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for _ in range(0, K, BLOCK_K):
            total = tl.dot(tl.load(a_tile), tl.load(b_tile), total, input_precision="ieee")
            a_tile += BLOCK_K
            b_tile += BLOCK_K * stride_bk
        total = total.to(out.dtype.element_ty).to(tl.float32)  # rounded as a product of its own would be
        place = m[:, None] * N + n[None, :]
        if BACKWARD:
            result = total * 2 * tl.sqrt(tl.load(act + place).to(tl.float32))
        else:
            positive = tl.maximum(total, 0)
            result = positive * positive
        tl.store(out + place, result.to(out.dtype.element_ty))


# An operator of its own: Inductor then knows that the output is new, and neither copies nor reads it first.
@torch.library.custom_op("train_gpt_medium::relu_squared_product", mutates_args=(),
                         schema="(Tensor a, Tensor b, Tensor? act) -> Tensor")
def relu_squared_product(a: Tensor, b: Tensor, act: Tensor | None = None) -> Tensor:
    """relu(a b)^2 in one kernel, or with act = relu(h)^2 the gradient (a b) * 2 relu(h). a (M, K), b (K, N);
    M must be a multiple of 128, N of 256, K of 64, and M * N below 2^31."""
    (M, K), N = a.shape, b.size(1)
    assert M % 128 == 0 and N % 256 == 0 and K % 64 == 0 and M * N < 2**31
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    relu_squared_product_kernel[(M // 128 * (N // 256),)](
        a.contiguous(), b, out, out if act is None else act, N, K, b.stride(0), b.stride(1),
        BACKWARD=act is not None, BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, GROUP=8, num_warps=8, num_stages=3)
    return out


@relu_squared_product.register_fake
def _(a: Tensor, b: Tensor, act: Tensor | None = None) -> Tensor:
    return a.new_empty(a.size(0), b.size(1))


class FusedMLP(torch.autograd.Function):
    """relu(x fc_w^T)^2 proj_w^T for x (T, dim), saving only the activation; see --fused_mlp."""

    @staticmethod
    def forward(ctx: typing.Any, x: Tensor, fc_w: Tensor, proj_w: Tensor) -> Tensor:
        act = relu_squared_product(x, fc_w.t(), None)
        ctx.save_for_backward(x, fc_w, proj_w, act)
        return act @ proj_w.t()

    @staticmethod
    def backward(ctx: typing.Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, fc_w, proj_w, act = ctx.saved_tensors
        dh = relu_squared_product(dy, proj_w, act)
        return dh @ fc_w, dh.t() @ x, dy.t() @ act

# ------------------------------------------------------------------------------------------------------------
# Model. Its arithmetic follows its parameters: bf16 ones give the record's run, .double() a float64 model
# throughout. On a CPU, which multiplies bf16 10 to 100 times more slowly, bf16 products run in float32:
# product_dtype is the place.


def product_dtype(x: Tensor) -> torch.dtype:
    """The type in which products of x run: x's own, but float32 for bf16 on a CPU (the result is rounded
    back)."""
    return torch.float32 if x.device.type == "cpu" and x.dtype == torch.bfloat16 else x.dtype


def linear(x: Tensor, w: Tensor) -> Tensor:
    """x W^T in x's dtype: (..., in), (out, in) -> (..., out)."""
    dtype = product_dtype(x)
    return F.linear(x.to(dtype), w.to(dtype)).to(x.dtype)


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


@functools.cache
def compiled_flex_attention() -> typing.Callable[..., Tensor]:
    """For a model that is not compiled: uncompiled, FlexAttention sees a BlockMask's mask_mod alone, not the
    lists, which hold our window."""
    return torch.compile(flex_attention, dynamic=False)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor, scale: float) -> Tensor:
    """Softmax attention, (1, heads, T, head_dim) each: FlexAttention on CUDA, SDPA with the equal dense mask
    on a CPU."""
    if isinstance(mask, BlockMask):
        flex = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
        return flex(q, k, v, block_mask=mask, scale=scale)
    dtype = product_dtype(q)
    return F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=mask,
                                          scale=scale).to(q.dtype)


def rotary_table(length: int, head_dim: int, dtype: torch.dtype, device: torch.device | None = None
                 ) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, each (length, head_dim / 2): the first head_dim / 4 frequencies
    fall from 1 to 1/1024, the others are 0 and leave their half of the head unrotated."""
    frequency = (1 / 1024) ** torch.linspace(0, 1, head_dim // 4, dtype=dtype, device=device)
    frequency = torch.cat([frequency, frequency.new_zeros(head_dim // 4)])
    angle = torch.arange(length, dtype=dtype, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (1, T, heads, head_dim), in the tables' dtype, rounded back to x's."""
    x1, x2 = x.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1).to(x.dtype)


def mix(*pairs: tuple[Tensor, Tensor]) -> Tensor:
    """The sum of weight * x over pairs of a 0-d weight and an x (..., dim), in x's dtype.

    Each weight is spread over the rows first. So its gradient is summed within rows and then over them, and
    the first sum joins the kernel of a norm, which holds the same rows: no pass of its own over x (6.5 GB a
    step)."""
    terms = [weight.expand(*x.shape[:-1], 1) * x for weight, x in pairs]
    return sum(terms[1:], terms[0]).to(pairs[0][1].dtype)


def bf16_uniform(*shape: int, std: float) -> nn.Parameter:
    bound = math.sqrt(3) * std
    return nn.Parameter(torch.empty(*shape, dtype=torch.bfloat16).uniform_(-bound, bound))


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int, head_dim: int, scale: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.scale = num_heads, head_dim, scale
        # q, k, v, output projection in one parameter: one matrix stack for Muon
        self.qkvo_w = bf16_uniform(4, num_heads * head_dim, dim, std=0.5 * dim**-0.5)
        with torch.no_grad():
            self.qkvo_w[3].zero_()

    def forward(self, x: Tensor, value_embed: Tensor | None, lambdas: Tensor, mask: BlockMask | Tensor,
                cos: Tensor, sin: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = linear(x, self.qkvo_w[:3].flatten(0, 1)).view(shape).split(self.num_heads, dim=2)
        q, k, v = rotate(norm(q), cos, sin), rotate(norm(k), cos, sin), norm(v)
        v = mix((lambdas[0], v), *([] if value_embed is None else [(lambdas[1], value_embed.view(shape))]))
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, self.scale)
        return linear(y.transpose(1, 2).flatten(2), self.qkvo_w[3])


class MLP(nn.Module):
    def __init__(self, dim: int, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.fc_w = bf16_uniform(4 * dim, dim, std=0.5 * dim**-0.5)
        self.proj_w = nn.Parameter(torch.zeros(dim, 4 * dim, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return FusedMLP.apply(x[0], self.fc_w, self.proj_w)[None]
        return linear(linear(x, self.fc_w).relu().square(), self.proj_w)


def softcapped_losses(logits: Tensor, targets: Tensor, cap: float) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of cap * z / sqrt(z^2 + cap^2), per token. Returns (losses, logsumexp, rsqrt(z^2 +
    cap^2)).

    The cap bounds the logits, so that exp cannot overflow and no maximum needs to be found first: one pass
    over them."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    r = torch.rsqrt(z * z + cap * cap)
    lse = (cap * z * r).exp().sum(-1).log()
    target = z.gather(-1, targets[:, None]).squeeze(-1)
    return lse - cap * target * torch.rsqrt(target * target + cap * cap), lse, r


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of the softcapped head, `chunks` pieces of the sequence at a time.

    The loss is a scalar, so its gradients are formed in the forward pass and only scaled in the backward: no
    piece's logits outlive the piece. x (T, dim), w (rows, dim) float32 or wider, targets (T,) int64."""

    @staticmethod
    def forward(ctx: typing.Any, x: Tensor, w: Tensor, targets: Tensor, cap: float, chunks: int) -> Tensor:
        weight = w.to(x.dtype)
        total, dw, dxs = 0.0, None, []
        for xs, ts in zip(x.chunk(chunks), targets.chunk(chunks)):
            logits = linear(xs, weight)
            losses, lse, r = softcapped_losses(logits, ts, cap)
            z = logits.to(lse.dtype)
            share = (cap * z * r - lse[:, None]).exp()
            rows = torch.arange(w.size(0), device=x.device)
            share = torch.where(rows == ts[:, None], share - 1, share)
            dlogits = (share * (cap**3 * r * r * r / x.size(0))).to(x.dtype)  # d cap(z)/dz = cap^3 r^3
            dxs.append(linear(dlogits, weight.t()))
            piece = linear(dlogits.t(), xs.t()).to(w.dtype)
            dw = piece if dw is None else dw + piece
            total = total + losses.sum()
        ctx.save_for_backward(torch.cat(dxs), dw)
        return total / x.size(0)

    @staticmethod
    def backward(ctx: typing.Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        return (dx * grad).to(dx.dtype), (dw * grad).to(dw.dtype), None, None, None


# Where the extras of a block go, counted from the front.
VALUE_EMBEDS = 5  # the first five blocks and, again in order, the last five
SKIPS = {9: 6, 10: 4, 11: 2}  # before block i, add out[j] times its weight
NO_ATTENTION = 7
BACKOUT = 11  # block whose output backout mixes in


class GPT(nn.Module):
    """The record's model: two input embeddings, value embeddings, skips, document-masked window attention.

    forward(input_seq (T,) int32, target_seq (T,) int64, sliding_window_num_blocks 0-d int32) -> mean
    cross-entropy, a 0-d float32 (float64 for a .double() model). T is a multiple of 128, at most max_seq_len.
    In eval mode the head runs in eval_head_chunks pieces. Source: modded-nanogpt,
    records/track_2_medium/2025-09-16_Snoo; extensions from later ones."""

    def __init__(self, vocab_size: int, num_layers: int, num_heads: int, model_dim: int, max_seq_len: int,
                 head_dim: int = 128, eot_token: int = 50256, attention_scale: float = 0.12,
                 logit_softcap: float = 15.0, backout: bool = False, smear: bool = False,
                 head_chunks: int = 1, eval_head_chunks: int = 4, fused_mlp: bool = False) -> None:
        super().__init__()
        assert num_heads * head_dim == model_dim and num_layers >= 12
        self.eot_token, self.logit_softcap, self.head_dim = eot_token, logit_softcap, head_dim
        self.backout, self.smear = backout, smear
        self.head_chunks, self.eval_head_chunks = head_chunks, eval_head_chunks
        self.num_layers = num_layers
        late = num_layers - VALUE_EMBEDS
        self.value_embed_of = {i: i if i < VALUE_EMBEDS else i - late
                               for i in (*range(VALUE_EMBEDS), *range(late, num_layers))}
        self.long_layers = {0, 4, late, num_layers - 1}

        def embedding() -> nn.Embedding:
            return nn.Embedding(vocab_size, model_dim, dtype=torch.bfloat16)  # standard normal

        self.embed1, self.embed2 = embedding(), embedding()
        self.value_embeds = nn.ModuleList(embedding() for _ in range(VALUE_EMBEDS))
        self.attentions = nn.ModuleDict({str(i): Attention(model_dim, num_heads, head_dim, attention_scale)
                                         for i in range(num_layers) if i != NO_ATTENTION})
        self.mlps = nn.ModuleList(MLP(model_dim, fused_mlp) for _ in range(num_layers))
        # skip weights, block lambdas (x, x00, x01), attention lambdas (v, value embedding), backout, smear
        self.scalars = nn.Parameter(torch.tensor([1.0] * num_layers + [1.0, 0.0, 0.0] * num_layers
                                                 + [0.5, 0.5] * num_layers + [1.0, 0.0] * backout
                                                 + [0.0] * smear))
        self.lm_head_w = nn.Parameter(torch.zeros(-(-vocab_size // 128) * 128, model_dim))
        cos, sin = rotary_table(max_seq_len, head_dim, torch.float32)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def rotary(self, length: int) -> tuple[Tensor, Tensor]:
        if self.cos.dtype == torch.float64:  # a float32 table cast up would not do
            return rotary_table(length, self.head_dim, torch.float64, self.cos.device)
        return self.cos[:length], self.sin[:length]

    def hidden(self, input_seq: Tensor, window: Tensor) -> Tensor:
        """The final hidden state, (T, dim), that the head reads."""
        n = self.num_layers
        skip_w, block_l, attn_l, extra = self.scalars.split([n, 3 * n, 2 * n, self.scalars.numel() - 6 * n])
        block_l, attn_l = block_l.view(n, 3), attn_l.view(n, 2)
        docs = (input_seq == self.eot_token).cumsum(0, dtype=torch.int32)
        long, short = attention_masks(docs, window)
        cos, sin = self.rotary(input_seq.numel())
        x = x00 = norm(self.embed1(input_seq)[None])
        x01 = norm(self.embed2(input_seq)[None])
        values = [embed(input_seq)[None] for embed in self.value_embeds]
        outs = []
        for i in range(n):
            if i in SKIPS:
                x = x + skip_w[SKIPS[i]] * outs[SKIPS[i]]
            x = mix((block_l[i, 0], x), (block_l[i, 1], x00), (block_l[i, 2], x01))
            if i != NO_ATTENTION:
                value = values[self.value_embed_of[i]] if i in self.value_embed_of else None
                x = x + self.attentions[str(i)](x, value, attn_l[i], long if i in self.long_layers else short,
                                                cos, sin)
            x = x + self.mlps[i](norm(x))
            outs.append(x)
        x = norm(x)
        if self.backout:
            x = extra[0] * x + extra[1] * norm(outs[BACKOUT])
        if self.smear:
            x = x + extra[-1] * F.pad(x[:, :-1], (0, 0, 1, 0))
        return x[0]

    def forward(self, input_seq: Tensor, target_seq: Tensor, sliding_window_num_blocks: Tensor) -> Tensor:
        assert input_seq.ndim == 1 and input_seq.numel() % BLOCK == 0
        assert input_seq.numel() <= self.cos.size(0), "longer than max_seq_len"
        x = self.hidden(input_seq, sliding_window_num_blocks)
        if self.training and torch.is_grad_enabled():
            return HeadLoss.apply(x, self.lm_head_w, target_seq, self.logit_softcap, self.head_chunks)
        weight = self.lm_head_w.to(x.dtype)
        pieces = [softcapped_losses(linear(xs, weight), ts, self.logit_softcap)[0].sum()
                  for xs, ts in zip(x.chunk(self.eval_head_chunks), target_seq.chunk(self.eval_head_chunks))]
        return sum(pieces) / x.size(0)

# ------------------------------------------------------------------------------------------------------------
# Muon: momentum, orthogonalised by Newton-Schulz, on float32 master weights split over two 16-bit halves.
# Communication plan: matrix i of the sorted list belongs to rank i % world_size. Same-shape matrices form a
# bucket; per bucket one reduce-scatter brings each owner the mean gradients of its matrices as one stack, the
# owner updates the stack at once, one all-gather spreads the new weights. So the whole optimizer takes two
# collectives a shape.

# renamed in torch 2.13
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# (a, b, c) of X <- aX + bAX + cAAX, A = XX^T, step by step
NEWTON_SCHULZ = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
                 (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012))


def newton_schulz(G: Tensor, steps: int = 5) -> Tensor:
    """Orthogonalise the last two dims of G (..., rows, cols) in bf16: U V^T of its SVD with singular values
    near 1, not exactly 1. A zero matrix stays zero; a float64 G is worked on in float64. Source: Muon (Jordan
    et al., 2024)."""
    assert G.ndim >= 2 and 0 <= steps <= len(NEWTON_SCHULZ)
    X = G if G.dtype == torch.float64 else G.to(torch.bfloat16)
    dtype = product_dtype(X)
    tall = G.size(-2) > G.size(-1)
    X = X.mT if tall else X
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in NEWTON_SCHULZ[:steps]:
        A = (X.to(dtype) @ X.to(dtype).mT).to(X.dtype)
        B = b * A + (c * (A.to(dtype) @ A.to(dtype))).to(X.dtype)
        X = a * X + (B.to(dtype) @ X.to(dtype)).to(X.dtype)
    return X.mT if tall else X


def join_halves(high: Tensor, low: Tensor) -> Tensor:
    """The float32 tensor whose upper 16 bits are `high` (bf16) and whose lower ones are `low` (uint16)."""
    # int32 throughout: eager mode has no shifts of unsigned integers on CPUs
    return (high.view(torch.int16).to(torch.int32) << 16
            | low.view(torch.int16).to(torch.int32) & 0xFFFF).view(torch.float32)


def split_halves(master: Tensor) -> tuple[Tensor, Tensor]:
    """float32 -> (bf16 upper half, uint16 lower half). The upper half truncates; it is not the nearest
    bf16."""
    bits = master.view(torch.int32)
    high, low = (bits >> 16).to(torch.int16), (bits & 0xFFFF).to(torch.int16)
    return high.view(torch.bfloat16), low.view(torch.uint16)


def muon_update(weight: Tensor, grad: Tensor, low: Tensor, momentum: Tensor, smoothing: Tensor | None,
                mu: Tensor, shrink: Tensor, step_size: Tensor, beta: Tensor, interpolated: bool) -> Tensor:
    """One Muon step of a stack of matrices (..., rows, cols); returns the new weight (bf16), updates low
    (uint16), momentum (float32) and smoothing (bf16, or None) in place. The scalars are 0-d float32: mu the
    momentum, shrink 1 - lr * weight decay, step_size lr * sqrt(max(1, rows / cols)), beta of the update
    smoothing."""
    grad = grad.to(torch.float32)
    momentum.copy_(mu * momentum + (1 - mu) * grad)
    update = newton_schulz(mu * momentum + (1 - mu) * grad)
    if smoothing is not None:
        update = update.to(torch.float32)
        smoothing.copy_(beta * smoothing.to(torch.float32) + (1 - beta) * update)
        average = smoothing.to(torch.float32)
        update = beta * average + (1 - beta) * update if interpolated else average
    high, new_low = split_halves(join_halves(weight, low) * shrink - step_size * update.to(torch.float32))
    low.copy_(new_low)
    return high


@dataclass
class Bucket:
    """The matrices of one shape and group: per rank the same number of slots, a few of them empty."""
    group: dict[str, typing.Any]
    like: Tensor  # one of the matrices
    slots: list[list[int]]  # rank -> indices of its matrices in the sorted list
    depth: int  # slots a rank
    state: dict[str, Tensor]  # this rank's stacks: momentum, mantissa, smoothing; (matrices, *shape)
    work: dist.Work | None = None
    grads: Tensor | None = None  # this rank's mean gradients


class Muon(torch.optim.Optimizer):
    """Muon over bf16 matrices, or stacks of them (last two dims), sharded over ranks by whole matrices.

    params: an iterable of parameters, or of groups dict(params=..., and any of lr, weight_decay, momentum,
    beta). lr is scaled by sqrt(max(1, rows / cols)). `state[p]` of an owned matrix holds momentum (float32),
    mantissa (uint16, the master weight's low half; p is the high half) and, with update_smoothing or
    smoothing=True, smoothing (bf16). step() averages the gradients over the ranks itself; start_reduction()
    begins that early, beside other work. group is the process group (None: torch's default one),
    compile_options are torch.compile's (None: eager). ValueError: an empty list, not bf16, or a vector.
    Source: Muon (Jordan et al., 2024) as in modded-nanogpt's track 2; smoothing from its record
    2025-09-17_UpdateSmoothing."""

    def __init__(self, params: Iterable, lr: float, weight_decay: float, momentum: float,
                 update_smoothing: float = 0.0, smoothing_interpolated: bool = False,
                 smoothing: bool | None = None, rank: int = 0, world_size: int = 1,
                 group: dist.ProcessGroup | None = None,
                 compile_options: dict[str, typing.Any] | None = None) -> None:
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum,
                                      beta=update_smoothing))
        self.rank, self.world_size, self.process_group = rank, world_size, group
        self.smoothing = update_smoothing > 0 if smoothing is None else smoothing
        self.smoothing_interpolated = smoothing_interpolated
        self.update = muon_update
        if compile_options is not None:
            self.update = torch.compile(muon_update, dynamic=False, fullgraph=True, options=compile_options)
        pairs = [(p, g) for g in self.param_groups for p in g["params"]]
        for p, _ in pairs:
            if p.ndim < 2 or p.dtype != torch.bfloat16:
                raise ValueError(f"Muon takes bf16 matrices or stacks of them, not {p.dtype} of shape "
                                 f"{tuple(p.shape)}")
        pairs.sort(key=lambda pair: pair[0].shape, reverse=True)  # stable: by shape, the largest first
        self.matrices = [p for p, _ in pairs]
        self.buckets: list[Bucket] = []
        keys = [(p.shape, id(g)) for p, g in pairs]
        for key in dict.fromkeys(keys):
            members = [i for i, k in enumerate(keys) if k == key]
            slots = [[i for i in members if i % world_size == r] for r in range(world_size)]
            mine = [self.matrices[i] for i in slots[rank]]
            shape, device = (len(mine), *key[0]), self.matrices[members[0]].device
            state = dict(momentum=torch.zeros(shape, dtype=torch.float32, device=device),
                         mantissa=torch.zeros(shape, dtype=torch.uint16, device=device))
            if self.smoothing:
                state["smoothing"] = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            like, settings = pairs[members[0]]
            self.buckets.append(Bucket(settings, like, slots, max(map(len, slots)), state))
            for slot, p in enumerate(mine):
                self.state[p] = {name: stack[slot] for name, stack in state.items()}  # views: one truth

    def start_reduction(self) -> None:
        """Begin the mean of the gradients over the ranks; step() waits for it."""
        for bucket in self.buckets:
            assert bucket.grads is None, "start_reduction() was called twice in one step"
            owned = [[self._grad(i) for i in indices] for indices in bucket.slots]
            like, mine = bucket.like, len(bucket.slots[self.rank])
            if self.world_size == 1:
                bucket.grads = torch.stack(owned[0])
                continue
            padded = [g for grads in owned
                      for g in (*grads, *[torch.zeros_like(like)] * (bucket.depth - len(grads)))]
            stack = torch.stack(padded)
            received = torch.empty((bucket.depth, *like.shape), dtype=stack.dtype, device=stack.device)
            bucket.work = reduce_scatter_flat(received, stack, op=dist.ReduceOp.AVG, group=self.process_group,
                                              async_op=True)
            bucket.grads = received[:mine]

    def _grad(self, index: int) -> Tensor:
        grad = self.matrices[index].grad
        assert grad is not None, f"Muon's matrix {index} has no gradient"
        return grad

    @torch.no_grad()
    def step(self) -> None:
        if self.buckets[0].grads is None:
            self.start_reduction()
        gathers = []
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
            mine = [self.matrices[i] for i in bucket.slots[self.rank]]
            like = bucket.like
            news = torch.empty((bucket.depth, *like.shape), dtype=like.dtype, device=like.device)
            news[len(mine):] = 0  # empty slots are sent too
            if mine:
                g, rows, cols = bucket.group, like.size(-2), like.size(-1)
                scalars = (torch.tensor(v, dtype=torch.float32) for v in (
                    g["momentum"], 1 - g["lr"] * g["weight_decay"], g["lr"] * max(1, rows / cols) ** 0.5,
                    g["beta"]))
                news[:len(mine)] = self.update(torch.stack(mine), bucket.grads, bucket.state["mantissa"],
                                               bucket.state["momentum"], bucket.state.get("smoothing"),
                                               *scalars, self.smoothing_interpolated)
            bucket.work = bucket.grads = None
            work, everyone = None, news[None]
            if self.world_size > 1:
                everyone = torch.empty((self.world_size, *news.shape), dtype=news.dtype, device=news.device)
                work = all_gather_flat(everyone.flatten(0, 1), news, group=self.process_group, async_op=True)
            gathers.append((work, everyone, bucket))
        for work, everyone, bucket in gathers:
            if work is not None:
                work.wait()
            pairs = [(self.matrices[i], new) for stack, indices in zip(everyone, bucket.slots)
                     for new, i in zip(stack, indices)]
            torch._foreach_copy_([old for old, _ in pairs], [new for _, new in pairs])

    def state_dict(self) -> dict[str, typing.Any]:
        """This rank's share: state by index in the sorted list; tensors are the live ones, in their own
        dtypes."""
        state = {i: dict(self.state[self.matrices[i]]) for b in self.buckets for i in b.slots[self.rank]}
        return {"state": state, "param_groups": [{k: v for k, v in g.items() if k != "params"}
                                                 for g in self.param_groups]}

    def load_state_dict(self, state_dict: dict[str, typing.Any]) -> None:
        """Copy in the state of this rank's matrices (a union of several ranks' shares will do). ValueError,
        and nothing changed, when one is missing or has another shape or dtype. Not the base class's: that one
        casts every tensor to its parameter's dtype, and bf16 holds neither the momentum nor the low
        halves."""
        pairs = []
        for i in (i for b in self.buckets for i in b.slots[self.rank]):
            theirs, ours = state_dict["state"].get(i), self.state[self.matrices[i]]
            if theirs is None or theirs.keys() != ours.keys():
                raise ValueError(f"Muon's matrix {i} needs the state {sorted(ours)}, found "
                                 f"{sorted(theirs or {})}")
            for name, tensor in ours.items():
                if theirs[name].shape != tensor.shape or theirs[name].dtype != tensor.dtype:
                    raise ValueError(f"Muon's {name} of matrix {i}: {theirs[name].dtype} "
                                     f"{tuple(theirs[name].shape)} does not fit {tensor.dtype} "
                                     f"{tuple(tensor.shape)}")
                pairs.append((tensor, theirs[name]))
        if len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError(f"Muon has {len(self.param_groups)} groups, found "
                             f"{len(state_dict['param_groups'])}")
        for tensor, new in pairs:
            tensor.copy_(new)
        for group, new in zip(self.param_groups, state_dict["param_groups"]):
            group.update(new)

# ------------------------------------------------------------------------------------------------------------
# Snoo, the Sparse Nesterov Outer Optimizer: torch only, to be pasted into any trainer.


class Snoo:
    """A Nesterov step of the slow weights, every k-th call, along what the inner optimizers did since the
    last one.

    At calls 0, k, 2k, ...: d = slow - fast for each parameter, one SGD step of slow along d, and the
    parameters become the new slow weights; other calls only count. So the first outer step comes after ONE
    inner step, and the record's 5640 steps = 201 * 28 + 12 end 11 inner steps past the last outer step. Every
    parameter is covered, in its own dtype: bf16 parameters have bf16 d and momentum. Where an optimizer keeps
    a float32 master weight as two halves, as Muon here, Snoo rewrites the high half, which is the parameter,
    and the low half stays: the master moves by at most one bf16 ulp, part of the record. Momentum 0 is
    Lookahead with alpha = lr; k = 1, no Nesterov and lr = 1 - momentum is an average of the updates.

    The momentum is kept as an average of the moves fast - slow, (momentum - 1) times the buffer of
    torch.optim.SGD: foreach can update that in place, with the parameters themselves as the only scratch. A
    step allocates nothing; .grad is neither read nor written.

    model: a module or an iterable of parameters. lr > 0, momentum in [0, 1), k >= 1, else ValueError. Source:
    modded-nanogpt, records/track_2_medium/2025-09-16_Snoo (pull request 128)."""

    def __init__(self, model: nn.Module | Iterable[Tensor], lr: float, momentum: float, k: int,
                 nesterov: bool = True) -> None:
        self._check(lr, momentum, k)
        self.params = list(model.parameters() if isinstance(model, nn.Module) else model)
        if not self.params:
            raise ValueError("Snoo needs at least one parameter")
        self.lr, self.momentum, self.k, self.nesterov, self.current_step = lr, momentum, int(k), nesterov, 0
        self.outer_buf = [p.detach().clone() for p in self.params]
        self.average_move = [torch.zeros_like(slow) for slow in self.outer_buf]
        # Parameters that are updated together: of one dtype, as foreach wants them, and on a CPU no more than
        # its cache holds from one operation to the next.
        limit = 2**18 if self.params[0].device.type == "cpu" else math.inf
        self.pieces, elements = [], 0
        for i, p in enumerate(self.params):
            if not self.pieces or p.dtype != self.params[i - 1].dtype or elements + p.numel() > limit:
                self.pieces.append([])
                elements = 0
            self.pieces[-1].append(i)
            elements += p.numel()

    @staticmethod
    def _check(lr: float, momentum: float, k: int) -> None:
        if not lr > 0 or not 0 <= momentum < 1 or k < 1 or k != int(k):
            raise ValueError(f"Snoo needs lr > 0, 0 <= momentum < 1 and a whole k >= 1, not lr {lr}, "
                             f"momentum {momentum}, k {k}")

    @torch.no_grad()
    def step(self) -> None:
        """Call after every inner step."""
        if self.current_step % self.k == 0:
            for piece in self.pieces:
                fast, slow, average = ([tensors[i] for i in piece] for tensors in
                                       (self.params, self.outer_buf, self.average_move))
                torch._foreach_sub_(fast, slow)  # the parameters hold the move, -d, until they become slow
                move, lr = fast, self.lr
                if self.momentum > 0:
                    torch._foreach_lerp_(average, fast, 1 - self.momentum)
                    if self.nesterov:
                        torch._foreach_add_(move, average, alpha=self.momentum / (1 - self.momentum))
                    else:
                        move, lr = average, self.lr / (1 - self.momentum)
                torch._foreach_add_(slow, move, alpha=lr)
                torch._foreach_copy_(fast, slow)
        self.current_step += 1

    def state_dict(self) -> dict[str, typing.Any]:
        """Everything a resumed run needs. Tensors are the live ones."""
        optimizer = dict(average_move=self.average_move, nesterov=self.nesterov)
        return dict(current_step=self.current_step, lr=self.lr, momentum=self.momentum, k=self.k,
                    outer_buf=self.outer_buf, optimizer_state_dict=optimizer)

    def load_state_dict(self, state_dict: dict[str, typing.Any]) -> None:
        """Copy a state in. ValueError, and nothing changed, when a key is missing or a tensor does not fit
        its parameter."""
        keys = {"current_step", "lr", "momentum", "k", "outer_buf", "optimizer_state_dict"}
        if missing := sorted(keys - state_dict.keys()):
            raise ValueError(f"Snoo's state lacks {', '.join(missing)}")
        optimizer = state_dict["optimizer_state_dict"]
        if missing := sorted({"average_move", "nesterov"} - optimizer.keys()):
            raise ValueError(f"Snoo's optimizer_state_dict lacks {', '.join(missing)}")
        pairs = (("outer_buf", self.outer_buf, state_dict["outer_buf"]),
                 ("average_move", self.average_move, optimizer["average_move"]))
        for name, ours, theirs in pairs:
            if len(theirs) != len(ours):
                raise ValueError(f"Snoo's {name} has {len(theirs)} tensors for {len(ours)} parameters")
            for i, (p, t) in enumerate(zip(ours, theirs)):
                if t.shape != p.shape or t.dtype != p.dtype:
                    raise ValueError(f"Snoo's {name}[{i}] is {t.dtype} {tuple(t.shape)}, but its parameter "
                                     f"is {p.dtype} {tuple(p.shape)}: another model, or another order of "
                                     "parameters")
        lr, momentum, k, step = (state_dict[name] for name in ("lr", "momentum", "k", "current_step"))
        self._check(lr, momentum, k)
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"Snoo's current_step {step!r} is no count of calls")
        self.lr, self.momentum, self.k, self.current_step = lr, momentum, k, step
        self.nesterov = optimizer["nesterov"]
        for _, ours, theirs in pairs:
            torch._foreach_copy_(ours, theirs)

# ------------------------------------------------------------------------------------------------------------
# Optimizer groups, and the schedules, which are pure functions of the step.


def build_optimizers(model: GPT, args: Hyperparameters, rank: int = 0, world_size: int = 1
                     ) -> tuple[torch.optim.AdamW, Muon, Snoo | None]:
    """AdamW for head, embeddings and scalars; Muon for the blocks' matrices; Snoo over all parameters, or
    None. Each group keeps the lr of its peak as base_lr."""
    head, scalars = [model.lm_head_w], [model.scalars]
    embeds = [e.weight for e in (model.embed1, model.embed2, *model.value_embeds)]
    attention = [a.qkvo_w for a in model.attentions.values()]
    mlp = [w for m in model.mlps for w in (m.fc_w, m.proj_w)]
    covered = [id(p) for part in (head, scalars, embeds, attention, mlp) for p in part]
    everything = [id(p) for p in model.parameters()]
    assert sorted(covered) == sorted(everything), "groups must cover each parameter exactly once"
    adam = torch.optim.AdamW(
        [dict(params=params, lr=lr, base_lr=lr) for params, lr in
         ((head, args.head_lr), (embeds, args.embed_lr), (scalars, args.scalar_lr))],
        betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps, weight_decay=args.adam_weight_decay,
        fused=True)
    decay = args.muon_weight_decay
    muon = Muon(
        [dict(params=attention, base_lr=args.muon_lr, weight_decay=decay),
         dict(params=mlp, base_lr=args.muon_lr, weight_decay=decay * args.mlp_decay_multiplier)],
        lr=args.muon_lr, weight_decay=decay, momentum=muon_momentum(0, args),
        update_smoothing=smoothing_beta(0, args), smoothing=smoothing_is_on(args),
        smoothing_interpolated=args.update_smoothing_interpolated, rank=rank, world_size=world_size,
        compile_options=args.compile_options)
    if not args.snoo:
        return adam, muon, None
    return adam, muon, Snoo(model, args.snoo_lr, args.snoo_momentum, args.snoo_k, args.snoo_nesterov)


def learning_rate_scale(step: int, args: Hyperparameters) -> float:
    """Factor on the inner optimizers' learning rates: 1, then linear to final_lr_scale over the last
    cooldown_frac."""
    x = step / args.num_iterations
    if x < 1 - args.cooldown_frac or args.cooldown_frac == 0:
        return 1.0
    return (1 - x) / args.cooldown_frac * (1 - args.final_lr_scale) + args.final_lr_scale


def ramp(step: int, steps: int, start: float, end: float) -> float:
    """Linear from start at step 0 to end at `steps`, then end."""
    x = min(step / steps, 1.0) if steps > 0 else 1.0
    return (1 - x) * start + x * end


def muon_momentum(step: int, args: Hyperparameters) -> float:
    return ramp(step, args.muon_momentum_steps, args.muon_momentum_start, args.muon_momentum_end)


def smoothing_beta(step: int, args: Hyperparameters) -> float:
    start = args.update_smoothing if args.update_smoothing_start is None else args.update_smoothing_start
    return ramp(step, args.update_smoothing_steps, start, args.update_smoothing)


def window_blocks(step: int, args: Hyperparameters) -> int:
    """Attention window in blocks of 128 tokens: cubic in the share of the run, at least 1. The published
    source carries a note of 1792 tokens, left from an older record; the code that ran used 3456."""
    x = step / args.num_iterations
    tokens = args.window_max * (4 * x**3 - 6 * x**2 + 3 * x)
    # min: rounding must not reach one more
    return min(max(math.ceil(tokens / BLOCK), 1), args.window_max // BLOCK)


def outer_steps(args: Hyperparameters) -> tuple[int, int]:
    """(outer steps of a whole run, inner steps after the last one): outer steps follow inner steps 1, k + 1,
    2k + 1, ..."""
    count = -(-args.num_iterations // args.snoo_k)
    return count, args.num_iterations - ((count - 1) * args.snoo_k + 1)

# ------------------------------------------------------------------------------------------------------------
# Training step. Here the parts meet; the loop below only adds clock, log and cadence.


@dataclass
class Training:
    """What a run changes as it goes. `forward` is the model, compiled or not."""
    model: GPT
    forward: typing.Callable[[Tensor, Tensor, Tensor], Tensor]
    adam: torch.optim.AdamW
    muon: Muon
    snoo: Snoo | None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of all collectives, Muon's and the others."""
        return self.muon.process_group

    def state(self) -> dict[str, typing.Any]:
        """All state that training reads, by part; tensors are the live ones."""
        rng = dict(cpu=torch.get_rng_state())
        if self.model.scalars.is_cuda:
            rng["cuda"] = torch.cuda.get_rng_state()
        return dict(model=self.model.state_dict(), adam=self.adam.state_dict(), muon=self.muon.state_dict(),
                    snoo=self.snoo.state_dict() if self.snoo else None, rng=rng)

    def load(self, state: dict[str, typing.Any]) -> None:
        """The inverse of state()."""
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["adam"])  # in its parameters' dtypes: the cast is none
        self.muon.load_state_dict(state["muon"])
        if self.snoo:
            self.snoo.load_state_dict(state["snoo"])
        self.load_rng(state["rng"])

    def load_rng(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state["cpu"].cpu())
        if self.model.scalars.is_cuda and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"].cpu())


def build_training(args: Hyperparameters, ctx: Distributed) -> Training:
    """Model on the device, the same on all ranks, and its optimizers."""
    torch.manual_seed(args.seed)
    with ctx.device:
        model = GPT(args.vocab_size, args.num_layers, args.num_heads, args.model_dim,
                    max(args.train_seq_len, args.val_seq_len), args.head_dim, args.eot_token,
                    args.attention_scale, args.logit_softcap, args.backout, args.smear, args.head_chunks,
                    fused_mlp=args.fused_mlp)
    if ctx.world_size > 1:
        for p in model.parameters():
            dist.broadcast(p.detach(), 0)
    adam, muon, snoo = build_optimizers(model, args, ctx.rank, ctx.world_size)
    forward: typing.Callable = model
    if args.compile:
        forward = torch.compile(model, dynamic=False, fullgraph=True, options=args.compile_options)
    return Training(model, forward, adam, muon, snoo)


def window_tensor(step: int, args: Hyperparameters, ctx: Distributed) -> Tensor:
    """A tensor, so that a growing window recompiles nothing; filled on the device, so that no copy is waited
    for."""
    return torch.full((), window_blocks(step, args), dtype=torch.int32, device=ctx.device)


NEVER = 2**31 - 1  # a step that no run reaches


class FirstBadStep:
    """The first step whose loss was not finite on this rank. No wait for the device: what it found is copied
    to pinned memory, where the host reads it some steps later."""

    def __init__(self, ctx: Distributed) -> None:
        self.found = torch.full((), NEVER, dtype=torch.int32, device=ctx.device)
        self.host = torch.full((), NEVER, dtype=torch.int32, pin_memory=ctx.device.type == "cuda")

    def add(self, step: int, loss: Tensor) -> None:
        self.found = torch.where(loss.isfinite(), self.found, self.found.clamp_max(step))
        self.host.copy_(self.found, non_blocking=True)

    def seen(self) -> int:
        """NEVER, or that step; after a synchronize() it covers all steps added."""
        return int(self.host)


def train_step(training: Training, batch: tuple[Tensor, Tensor], step: int, args: Hyperparameters,
               ctx: Distributed) -> Tensor:
    """One step on this rank's slice of the global batch, taken one sequence at a time. Returns the slice's
    mean loss, 0-d, on the device."""
    micro_batches = args.batch_sequences // ctx.world_size
    window, mean_loss = window_tensor(step, args, ctx), torch.zeros((), device=ctx.device)
    for inputs, targets in zip(*(t.view(micro_batches, -1) for t in batch)):
        loss = training.forward(inputs, targets, window) / micro_batches
        loss.backward()
        mean_loss += loss.detach()

    adam, muon = training.adam, training.muon
    reductions = []
    if ctx.world_size > 1:  # AdamW's gradients first: it steps while Muon's are on their way
        reductions = [dist.all_reduce(p.grad, dist.ReduceOp.AVG, group=training.group, async_op=True)
                      for g in adam.param_groups for p in g["params"]]
    muon.start_reduction()

    scale = learning_rate_scale(step, args)
    for group in (*adam.param_groups, *muon.param_groups):
        group["lr"] = group["base_lr"] * scale
    for group in muon.param_groups:
        group["momentum"], group["beta"] = muon_momentum(step, args), smoothing_beta(step, args)
    for work in reductions:
        work.wait()
    adam.step()
    muon.step()
    if training.snoo:
        training.snoo.step()
    training.model.zero_grad(set_to_none=True)
    return mean_loss


# ------------------------------------------------------------------------------------------------------------
# Kernel warm-up and validation.


def warm_up(training: Training, args: Hyperparameters, ctx: Distributed) -> None:
    """Compile and run everything once on random tokens, then put all state back: parameters, every
    optimizer's and Snoo's state, RNG. The loader is not touched. Kept on the CPU meanwhile, so that the peak
    memory is training's own."""
    def kept(tree: typing.Any) -> typing.Any:
        if isinstance(tree, Tensor):
            return tree.detach().to("cpu", copy=True)
        if isinstance(tree, dict):
            return {k: kept(v) for k, v in tree.items()}
        return [kept(v) for v in tree] if isinstance(tree, list) else copy.deepcopy(tree)

    generator = torch.Generator().manual_seed(ctx.rank)  # the global RNG stays as it is

    def random_batch(num_tokens: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(args.vocab_size, (num_tokens + 1,), generator=generator)
        return to_device((tokens[:-1].to(torch.int32), tokens[1:]), ctx)

    if args.warmup_steps > 0:
        before = kept(training.state())
        for _ in range(args.warmup_steps):
            train_step(training, random_batch(args.batch_sequences // ctx.world_size * args.train_seq_len), 0,
                       args, ctx)
        training.model.eval()
        with torch.no_grad():
            training.forward(*random_batch(args.val_seq_len), window_tensor(0, args, ctx))
        training.model.train()
        training.load(before)
    ctx.synchronize()
    if ctx.world_size > 1:
        dist.barrier()  # of the default group, which waits for the slowest compiler
        training.muon.process_group = ctx.group
        dist.barrier(group=ctx.group)
    if ctx.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


@torch.no_grad()
def validate(training: Training, step: int, args: Hyperparameters, ctx: Distributed) -> float:
    """Mean cross-entropy over the first val_tokens of the validation stream, the same on all ranks."""
    batch_tokens = ctx.world_size * args.val_seq_len
    count = args.val_tokens // batch_tokens
    batches = token_batches(args.val_files, batch_tokens, ctx.rank, ctx.world_size,
                            vocab_size=args.vocab_size)
    window = window_tensor(step, args, ctx)
    training.model.eval()
    total = torch.zeros((), device=ctx.device)
    for batch in itertools.islice(batches, count):
        total += training.forward(*to_device(batch, ctx), window)
    training.model.train()
    total /= count
    if ctx.world_size > 1:
        dist.all_reduce(total, dist.ReduceOp.AVG, group=training.group)
    return float(total)

# ------------------------------------------------------------------------------------------------------------
# Comparison with a published run.


@dataclass(frozen=True)
class Published:
    """A curve, step -> val loss, and the final losses of the runs beside it, if there are any."""
    curve: dict[int, float]
    finals: list[float]

    def remark(self, step: int, loss: float) -> str:
        """What a validation line gains at a step that the curve has."""
        if step not in self.curve:
            return ""
        return f" published:{self.curve[step]:.6f} delta:{loss - self.curve[step]:+.4f}"

    def verdict(self, loss: float) -> str:
        """Where a final loss lies among the published ones, or "" without at least two."""
        if len(self.finals) < 2:
            return ""
        mean, sd = float(np.mean(self.finals)), float(np.std(self.finals, ddof=1))
        z = f" z {(loss - mean) / sd:+.2f}" if sd > 0 else ""
        return (f"final val_loss {loss:.6f}; published runs: n {len(self.finals)} mean {mean:.6f} sd {sd:.6f}"
                f"{z}")


def read_columns(path: Path, columns: tuple[str, ...]) -> list[tuple[float, ...]]:
    """The named columns of a CSV file, as floats. UserError names path, line and rule."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as f:
            rows = csv.DictReader(f)
            if not set(columns) <= set(found := rows.fieldnames or ["nothing"]):
                raise UserError(f"{path}: needs the columns {', '.join(columns)}, found {', '.join(found)}")
            return [tuple(finite(row[name]) for name in columns) for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise UserError(f"{path}: cannot be read ({e})") from None
    except UserError:
        raise
    except (TypeError, ValueError):
        wrong = f"{path}, line {rows.line_num}: {', '.join(columns)} must be finite numbers"
        raise UserError(wrong) from None


def read_published(path: Path) -> Published:
    """A curve from a curve.csv (with the runs.csv beside it) or from a run's log. UserError when it holds
    none."""
    if not os.path.isfile(path):  # a pipe would be waited for
        raise UserError(f"{path}: cannot be read (no such file)")
    if path.suffix == ".csv":
        curve = {int(step): loss for step, loss in read_columns(path, ("step", "val_loss"))}
        runs = path.parent / "runs.csv"
        finals = [loss for loss, in read_columns(runs, ("val_loss",))] if runs.exists() else []
    else:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as e:
            raise UserError(f"{path}: cannot be read ({e.strerror})") from None
        # whole lines only, and not those that the source in the log may hold
        found = re.findall(r"^step:(\d+)/\d+ val_loss:(\d+\.\d+)\s[^\n]*\n",
                           text[text.rfind(f"\n{SEPARATOR}\n") + 1:], re.MULTILINE)
        curve, finals = {int(step): float(loss) for step, loss in found}, []
    if not curve:
        raise UserError(f"{path}: holds no validation loss to compare with; --compare_with wants a curve.csv "
                        f"with the columns step and val_loss, a log, recipe or none")
    return Published(curve, finals)


def find_published(command: Command) -> tuple[Published | None, str]:
    """(curve or None, what the log says about it). A missing curve of the recipe is said, a missing named
    file refused."""
    wanted = command.args.compare_with
    if wanted == "none":
        return None, "comparison: none"
    ours = ROOT / "records" / "track_2_medium" / command.recipe / "curve.csv"
    path = ours if wanted == "recipe" else local_path(wanted)
    if wanted == "recipe" and not path.exists():
        return None, f"comparison: none, there is no {path}"
    recipe = Hyperparameters(**RECIPES[command.recipe])
    changed = [n for n, v in dataclasses.asdict(command.args).items()
               if n not in BOOKKEEPING and v != getattr(recipe, n)]
    differs = f"; this run differs from recipe {command.recipe} in {', '.join(changed)}" if changed else ""
    return read_published(path), f"comparison: {path}{differs}"

# ------------------------------------------------------------------------------------------------------------
# Faults: a rank that fails, is stopped or hangs ends all of them, and the log says why.


def find_cause(text: str, symptom: bool, ctx: Distributed) -> tuple[str, bool]:
    """(the first failure that any rank reported, whether it is this rank's): the others fail because of it.

    A symptom is a peer that is gone or silent. It waits 2 s, in which a failure proper is reported, and then
    names all that ranks said of themselves, and those that said nothing."""
    if ctx.store is None:
        return text, True
    try:
        # where no launcher keeps the store it ends with rank 0, and a clone would seek it for startup_timeout
        ctx.store.set_timeout(datetime.timedelta(seconds=5))
        store = ctx.store.clone()  # a connection of its own: the other one may be waiting
        store.set(f"failure/{ctx.rank}", text)
        if symptom:
            time.sleep(2)
            said = {r: store.check([f"failure/{r}"]) for r in range(ctx.world_size)}
            text = "; ".join(store.get(f"failure/{r}").decode() for r in said if said[r])
            if silent := ", ".join(str(r) for r in said if not said[r]):
                text += f"; no word from rank {silent}: killed, or stuck"
        first, _, cause = store.compare_set("failure", "", f"{ctx.rank} {text}").decode().partition(" ")
        return cause, int(first) == ctx.rank
    except (RuntimeError, ValueError):  # the store went away with the launcher that kept it
        return text, True


def tell_launcher(text: str) -> None:
    """torchrun ends by printing what the first failed rank left in this file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    extra = dict(py_callstack=text, timestamp=str(int(time.time())))
    try:
        if path:
            Path(path).write_text(json.dumps(dict(message=dict(message=text, extraInfo=extra))))
    except OSError:
        pass


def end_failed_rank(text: str, trace: str, symptom: bool, log: RunLog, ctx: Distributed,
                    code: int = 1) -> typing.NoReturn:
    """The end of one rank of several: the cause goes to log, console and launcher, once. Without the
    interpreter's shutdown, which would wait for collectives that never end."""
    cause, mine = find_cause(text, symptom, ctx)
    log.write(f"failed: {cause}")
    log.close()
    threading.Timer(5, os._exit, (code,)).start()  # a console that blocks must not keep the rank
    console((trace if mine else "") + (f"error: {cause}\n" if ctx.rank == 0 else ""), end="", file=sys.stderr)
    if mine:
        tell_launcher(f"{trace}error: {cause}")
    # torchrun takes the first rank to end for the cause; without it rank 0 keeps the store for the rest
    if not mine or (ctx.rank == 0 and "TORCHELASTIC_RUN_ID" not in os.environ):
        time.sleep(2)
    os._exit(code)


STOP_GRACE = 20  # seconds that a step may still take after a signal; torchrun kills its ranks after 30


class Watch:
    """Signals and silence, watched by a thread: a rank that waits inside C++, where Python's handlers do not
    run, ends too.

    SIGINT and SIGTERM: outside of training the rank ends at once. In training the step is finished, and all
    ranks leave after the same one: the agreement is two int32 over gloo, started at one step and read at the
    next, which costs the device nothing; the first step whose loss is not finite travels with it. A second
    signal ends the rank at once. So does a step that outlives STOP_GRACE, or no step in step_timeout seconds:
    these are failures, and the log says where each rank stands. A launcher that dies counts as SIGTERM."""

    def __init__(self, ctx: Distributed, step_timeout: int) -> None:
        self.ctx, self.limit = ctx, step_timeout
        self.log, self.how_to_resume = RunLog(None), "nothing was saved"
        self.step, self.beat, self.training, self.ending = 0, 0.0, False, False
        self.signum, self.since = 0, 0.0
        self.flag = torch.tensor([0, -NEVER], dtype=torch.int32)
        self.work: dist.Work | None = None
        self.launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.main_thread = threading.get_ident()
        self.pipe = os.pipe()
        os.set_blocking(self.pipe[1], False)
        self.before = {s: signal.signal(s, lambda signum, frame: None)
                       for s in (signal.SIGINT, signal.SIGTERM)}
        self.wakeup = signal.set_wakeup_fd(self.pipe[1])  # the C handler writes each signal's number there
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self.pipe[0]], [], [], 1.0)
            received = [n for n in os.read(self.pipe[0], 64) if n in (0, *self.before)] if ready else []
            if 0 in received:
                return
            if self.launcher is not None and os.getppid() != self.launcher:
                received, self.launcher = [*received, int(signal.SIGTERM)], None
            now = time.monotonic()
            for signum in received:
                # half a second: one Ctrl-C may arrive twice, from the terminal and through a launcher
                if not self.training or (self.signum and now - self.since > 0.5):
                    self._stop_at_once(signum)
                if not self.signum:
                    self.signum, self.since = signum, now
            if not self.training:
                continue
            if self.signum and not self.ending and now - self.since > STOP_GRACE:
                name = signal.Signals(self.signum).name
                self._fail(f"did not end {STOP_GRACE} s after {name}", 128 + self.signum)
            if now - self.beat > self.limit:
                self._fail(f"has not ended after {self.limit:.0f} s", 1)

    def _stop_at_once(self, signum: int) -> typing.NoReturn:
        cause, name = "", signal.Signals(signum).name
        threading.Timer(3, os._exit, (128 + signum,)).start()  # should console or disk block
        if self.ctx.store is not None:
            try:  # a launcher sends SIGTERM to the ranks that outlive another: that one's failure is the news
                store = self.ctx.store.clone()
                cause = store.get("failure").decode().partition(" ")[2] if store.check(["failure"]) else ""
            except (RuntimeError, ValueError):
                pass
        when = "a second time, without saving" if self.training else "before training began"
        self.log.say(f"failed: {cause}" if cause
                     else f"interrupted at step {self.step} by {name}, {when}: {self.how_to_resume}")
        self.log.close()
        os._exit(128 + signum)

    def _fail(self, what: str, code: int) -> typing.NoReturn:
        frame, where = sys._current_frames().get(self.main_thread), "?"
        while frame is not None:  # the innermost line of this file
            if frame.f_code.co_filename == __file__:
                where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                break
            frame = frame.f_back
        text = f"step {self.step} {what}: rank {self.ctx.rank} is in {where}"
        if self.ctx.world_size > 1:
            end_failed_rank(text, "", True, self.log, self.ctx, code)
        self.log.say(f"failed: {text}")
        os._exit(code)

    def begin(self, step: int) -> None:
        """Training begins: from here on a signal waits for the end of the step."""
        self.step, self.beat, self.training = step, time.monotonic(), True

    def agreed(self, step: int, bad_step: int) -> tuple[int, int]:
        """Call once a step, with this rank's first step of a loss that is not finite, or NEVER: the signal
        that all ranks stop for now, or 0, and the first such step of any rank."""
        self.step, self.beat = step, time.monotonic()
        if self.ctx.world_size == 1:
            return self.signum, bad_step
        if self.work is not None:
            self.work.wait()
        stop, bad = self.flag.tolist()
        self.flag = torch.tensor([self.signum, -bad_step], dtype=torch.int32)  # MAX: the earliest step
        self.work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, group=self.ctx.control, async_op=True)
        return stop, -bad

    def close(self) -> None:
        """Give the signals back, once the agreement that is under way has ended."""
        if self.work is not None:
            self.work.wait()
        os.write(self.pipe[1], b"\0")
        self.thread.join()
        signal.set_wakeup_fd(self.wakeup)
        for signum, handler in self.before.items():
            signal.signal(signum, handler)
        os.close(self.pipe[0]), os.close(self.pipe[1])

# ------------------------------------------------------------------------------------------------------------
# Checkpoints: a folder in which rank 0 writes what all ranks hold and each rank its own Muon shard. Written
# aside, then renamed: complete or invisible. Read with weights_only: loading runs no code from the files.

CHECKPOINT_FORMAT = 3
FINISHED = "finished"  # an empty file in a run's checkpoints: --resume auto passes it over


@dataclass
class Progress:
    """Where a run stands: what a checkpoint carries besides state."""
    step: int = 0
    train_time_ms: float = 0.0
    val_losses: list[list[float]] = dataclasses.field(default_factory=list)  # [step, loss]
    kept: list[str] = dataclasses.field(default_factory=list)  # older checkpoints still there


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_synced(value: typing.Any, path: Path) -> None:
    with open(path, "xb") as f:
        torch.save(value, f)
        f.flush()
        os.fsync(f.fileno())


def is_running(checkpoints: Path) -> bool:
    """Whether the run that owns this <log>_checkpoints folder is alive: then it holds the lock on its log."""
    try:
        with open(checkpoints.with_name(checkpoints.name.removesuffix("_checkpoints") + ".txt"), "rb") as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such log, or no locks on its file system
        pass
    return False


def clear_leftovers(folder: Path) -> None:
    """Delete what killed runs of this name were writing or deleting; a run that is alive keeps its own."""
    for aside in folder.glob("*_checkpoints/.step_*"):
        if not is_running(aside.parent):
            shutil.rmtree(aside, ignore_errors=True)


def save_checkpoint(training: Training, progress: Progress, about: dict[str, typing.Any], keep: int,
                    log: RunLog, folder: Path, ctx: Distributed) -> None:
    """Write folder/step_NNNNNN and drop older ones. A failure is said and removed; training goes on without
    it."""
    final = folder / f"step_{progress.step:06d}"
    aside = folder / f".{final.name}.{uuid.uuid4().hex}"
    problem = None
    try:
        if ctx.rank == 0:
            aside.mkdir(parents=True)
    except OSError as e:
        problem = f"{aside}: {e.strerror}"
    aside, problem = ctx.share((aside, problem))[0]
    state = training.state()
    if problem is None:
        try:
            write_synced(state.pop("muon"), aside / f"muon_{ctx.rank}.pt")
            if ctx.rank == 0:
                write_synced({**about, **dataclasses.asdict(progress), **state}, aside / "shared.pt")
        except (OSError, RuntimeError) as e:  # torch.save reports a full disk as either
            problem = f"rank {ctx.rank}: {aside}: {' '.join(str(e).split())[:300]}"
    problem = next((p for p in ctx.share(problem) if p is not None), None)
    if ctx.rank == 0:
        try:
            if problem is None:
                missing = [r for r in range(ctx.world_size) if not (aside / f"muon_{r}.pt").exists()]
                if missing:
                    raise OSError(2, f"ranks {missing} wrote elsewhere; checkpoints need a folder that all "
                                  f"nodes share")
                sync_folder(aside)
                os.rename(aside, final)
                sync_folder(folder)
        except OSError as e:
            problem = f"{aside}: {e.strerror}"
        if problem is not None:
            shutil.rmtree(aside, ignore_errors=True)
            log.say(f"WARNING: no checkpoint at step {progress.step} ({problem}); training goes on")
        else:
            log.write(f"checkpoint at step {progress.step}: {final}")
            progress.kept.append(f"{folder.name}/{final.name}")
            drop_older(progress.kept, keep, folder, log)
    ctx.share(None)  # no rank goes on before the folder is whole


def drop_older(kept: list[str], keep: int, folder: Path, log: RunLog) -> None:
    """Delete the oldest of `kept` until `keep` are left, and take them off the list. The names may come from
    a file: what is not the name of a checkpoint beside `folder`, or belongs to a run that is alive, stays."""
    while len(kept) > keep:
        old = folder.parent / kept.pop(0)
        ours = old.parent.parent == folder.parent and old.is_dir() and re.fullmatch(
            r"[\w-]+_checkpoints/step_\d{6,}", f"{old.parent.name}/{old.name}")
        if not ours or (old.parent != folder and is_running(old.parent)):
            continue
        try:
            aside = old.parent / f".{old.name}.{uuid.uuid4().hex}"
            os.replace(old, aside)  # a half-deleted checkpoint must not look whole
            shutil.rmtree(aside)
            if not any(old.parent.iterdir()):
                old.parent.rmdir()
        except OSError as e:
            log.say(f"WARNING: {old}: an old checkpoint could not be deleted ({e.strerror})")


def mark_finished(kept: list[str], folder: Path) -> None:
    """The next --resume auto starts a run of its own: it must not repeat the end of this one."""
    for name in kept:
        try:
            ((folder / name).parent / FINISHED).touch()
        except OSError:  # deleted meanwhile; or no room, and then --resume auto validates once more and ends
            pass


def find_checkpoint(args: Hyperparameters) -> Path | None:
    """The folder that --resume names. For auto the newest one of this run name, None where there is none; a
    run that is alive or has finished is not continued."""
    if args.resume != "auto":
        return local_path(args.resume)
    found = []
    for path in (local_path(args.log_dir) / args.run_name).glob("*_checkpoints/step_*"):
        try:
            ended = (path.parent / FINISHED).exists()
            if re.fullmatch(r"step_\d{6,}", path.name) and not ended and not is_running(path.parent):
                found.append(((path / "shared.pt").stat().st_mtime_ns, path))
        except OSError:  # deleted meanwhile, or none of ours
            pass
    return max(found)[1] if found else None


def load_tensors(path: Path) -> dict[str, typing.Any]:
    """A file of a checkpoint: memory-mapped, and only tensors and plain values, never code."""
    try:
        with zipfile.ZipFile(path) as file:
            if damaged := file.testzip():
                raise ValueError(f"{damaged} in it is damaged")
        # torch maps files only by names that are UTF-8, which a C locale's may not be
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=str(path).isascii())
    except OSError as e:
        raise UserError(f"{path}: the checkpoint cannot be read ({e.strerror or e})") from None
    except Exception as e:  # a cut, foreign or hostile file fails in ways that torch does not list
        raise UserError(f"{path}: not a whole checkpoint file ({type(e).__name__}: "
                        f"{' '.join(str(e).split())[:200]})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a checkpoint of this program ({type(value).__name__} inside)")
    return value


# what shared.pt must hold, and of which type
PARTS = dict(format=int, step=int, train_time_ms=float, val_losses=list, kept=list, data_position=list,
             recipe=str, scale=str, hyperparameters=dict, source_sha256=str, world_size=int, log=str,
             model=dict, adam=dict, snoo=(dict, type(None)), rng=dict)


def read_checkpoint(folder: Path) -> dict[str, typing.Any]:
    """Everything in a checkpoint's folder, Muon's shards joined. UserError when it is not a whole one."""
    if not os.path.isfile(folder / "shared.pt"):
        raise UserError(f"{folder}: no checkpoint is there (a folder step_NNNNNN with shared.pt and a "
                        f"muon_N.pt a rank)")
    shared = load_tensors(folder / "shared.pt")
    wrong = [name for name, kind in PARTS.items() if not isinstance(shared.get(name), kind)]
    if not wrong:
        holds = dict(world_size=shared["world_size"] >= 1, step=shared["step"] >= 0,
                     train_time_ms=math.isfinite(shared["train_time_ms"]),
                     kept=all(isinstance(name, str) for name in shared["kept"]),
                     hyperparameters=all(isinstance(name, str) for name in shared["hyperparameters"]),
                     val_losses=all(isinstance(pair, list) and [type(v) for v in pair] == [int, float]
                                    for pair in shared["val_losses"]))
        wrong = [name for name, good in holds.items() if not good]
    if wrong or shared["format"] != CHECKPOINT_FORMAT:
        why = f"no good: {', '.join(wrong)}" if wrong else f"its format is {shared['format']}"
        raise UserError(f"{folder / 'shared.pt'}: not a checkpoint of format {CHECKPOINT_FORMAT} of this "
                        f"program ({why})")
    shards = [load_tensors(folder / f"muon_{r}.pt") for r in range(shared["world_size"])]
    if not all(isinstance(shard.get("state"), dict) and isinstance(shard.get("param_groups"), list)
               for shard in shards):
        raise UserError(f"{folder}: a muon_N.pt holds something else than Muon's state")
    shared["muon"] = dict(state={i: s for shard in shards for i, s in shard["state"].items()},
                          param_groups=shards[0]["param_groups"])
    return shared


def open_checkpoint(args: Hyperparameters) -> tuple[Path | None, dict[str, typing.Any] | None]:
    """(folder, contents) of what --resume names, (None, None) where auto finds nothing."""
    while (folder := find_checkpoint(args)) is not None:
        try:
            saved = read_checkpoint(folder)
        except UserError:
            if args.resume == "auto" and not folder.exists():  # deleted meanwhile: a newer one is there
                continue
            raise
        # "newest K are kept" holds over all runs that auto has chained; what the user named stays
        chain = [*saved["kept"], f"{folder.parent.name}/{folder.name}"]
        saved["kept"] = chain if args.resume == "auto" else []
        return folder, saved
    return None, None


def stream_position(shards: list[Shard], batch_tokens: int, batch: int) -> list[typing.Any]:
    """[shard's file name, token] at which a batch of the global stream begins; ["", 0] behind its end."""
    for shard in shards:
        count = batches_in_shard(shard.num_tokens, batch_tokens)
        if batch < count:
            return [shard.path.name, batch * batch_tokens]
        batch -= count
    return ["", 0]


def check_resumable(saved: dict[str, typing.Any], args: Hyperparameters, source: bytes,
                    train_shards: list[Shard], folder: Path) -> list[str]:
    """What differs between the checkpoint's run and this one. UserError when anything does, unless
    resume_anyway."""
    ours, theirs = dataclasses.asdict(args), saved["hyperparameters"]
    if saved["step"] > args.num_iterations:
        raise UserError(f"{folder}: it stands at step {saved['step']}, past --num_iterations "
                        f"{args.num_iterations}")
    differing = [f"{n}: {theirs.get(n, 'absent')} there, {ours.get(n, 'absent')} here"
                 for n in sorted(ours.keys() | theirs.keys())
                 if n not in BOOKKEEPING and ours.get(n, "absent") != theirs.get(n, "absent")]
    if saved["source_sha256"] != hashlib.sha256(source).hexdigest():
        differing.append("the script's source")
    position = stream_position(train_shards, args.batch_sequences * args.train_seq_len, saved["step"])
    if saved["step"] < args.num_iterations and saved["data_position"] != position:
        differing.append(f"position in the training data: {saved['data_position']} there, {position} here")
    if differing and not args.resume_anyway:
        raise UserError("\n       ".join([f"{folder}: that run is another one; --resume_anyway true takes "
                                         f"what fits. Different:", *differing]))
    return differing


def check_adam_state(optimizer: torch.optim.AdamW, state: dict[str, typing.Any]) -> None:
    """ValueError unless each group has its settings and each parameter its state; load_state_dict itself
    would take any."""
    for ours, theirs in zip(optimizer.param_groups, state["param_groups"]):
        if missing := sorted(ours.keys() - theirs.keys()):
            raise ValueError(f"AdamW's group lacks {', '.join(missing)}")
    for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        theirs = {name: (t.dtype, t.shape) for name, t in state["state"].get(i, {}).items()}
        wanted = dict(step=(torch.float32, torch.Size()), exp_avg=(p.dtype, p.shape),
                      exp_avg_sq=(p.dtype, p.shape))
        if theirs != wanted:
            raise ValueError(f"AdamW's parameter {i} needs the state {wanted}, found {theirs}")


@torch.no_grad()
def resume(training: Training, saved: dict[str, typing.Any], args: Hyperparameters,
           folder: Path) -> list[str]:
    """Put a checkpoint's state in place. Returns what of it does not fit: a UserError, unless resume_anyway;
    with that the optimizers take their state but keep this run's settings."""
    current, unfit = training.state(), []

    def attempt(part: str, load: typing.Callable[[dict[str, typing.Any]], None]) -> None:
        state = saved[part]
        try:
            if args.resume_anyway and "param_groups" in (current[part] or {}):
                state = {**state, "param_groups": current[part]["param_groups"]}
            load(state)
        except torch.OutOfMemoryError:
            raise
        # whatever a foreign state meets in there
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as e:
            unfit.append(f"{part}'s state not taken ({type(e).__name__}: {' '.join(str(e).split())[:300]})")

    model, theirs = current["model"], saved["model"]
    fits = {n: theirs[n] for n, t in model.items() if isinstance(theirs.get(n), Tensor)
            and (theirs[n].shape, theirs[n].dtype) == (t.shape, t.dtype)}
    training.model.load_state_dict({**model, **fits})
    if len(fits) < len(model) or len(theirs) > len(model):
        unfit.append(f"only {len(fits)} of {len(model)} parameters taken, {len(theirs)} are there")

    def load_adam(state: dict[str, typing.Any]) -> None:
        check_adam_state(training.adam, state)
        training.adam.load_state_dict(state)

    attempt("adam", load_adam)
    attempt("muon", training.muon.load_state_dict)
    if snoo := training.snoo:
        torch._foreach_copy_(snoo.outer_buf, snoo.params)  # unless its state fits, they start from the model
        settings = dict(lr=snoo.lr, momentum=snoo.momentum, k=snoo.k, nesterov=snoo.nesterov)
        attempt("snoo", snoo.load_state_dict)
        # the average changes with the momentum, so that SGD's buffer would stay what it was
        torch._foreach_mul_(snoo.average_move, (1 - settings["momentum"]) / (1 - snoo.momentum))
        vars(snoo).update(settings)
    attempt("rng", training.load_rng)
    if unfit and not args.resume_anyway:
        raise UserError(f"{folder}: its state does not fit this model ({'; '.join(unfit)})")
    return unfit

# ------------------------------------------------------------------------------------------------------------
# The run: checks, set-up, loop. One clock: it starts after the warm-up and stands still in validation and
# saving.


class Clock:
    def __init__(self, ctx: Distributed, ms: float) -> None:
        self.ctx, self.before, self.since = ctx, ms, 0.0

    def start(self) -> None:
        self.ctx.synchronize()
        self.since = time.perf_counter()

    def stop(self) -> float:
        self.ctx.synchronize()
        self.before = self.ms()
        return self.before

    def ms(self) -> float:
        """Train time so far, of a running clock; without a wait for the device, so it may be a few steps
        early."""
        return self.before + 1e3 * (time.perf_counter() - self.since)


@dataclass
class Checked:
    """What the checks before the run have found."""
    source: bytes  # the script's own, as read at start
    train_shards: list[Shard]
    val_shards: list[Shard]
    published: Published | None
    comparison: str  # what the log says about it
    folder: Path  # of the run's log
    checkpoint: Path | None = None  # that --resume names
    saved: dict[str, typing.Any] | None = None  # what it holds
    differing: list[str] = dataclasses.field(default_factory=list)  # in what it is another run's


def local_checks(command: Command, rank: int, local_rank: int, world_size: int) -> Checked:
    """All that this rank can find wrong before any process group or model exists: UserError."""
    args, source = command.args, Path(__file__).read_bytes()
    if torch.cuda.is_available() and local_rank >= torch.cuda.device_count():
        raise UserError(f"local rank {local_rank} has no GPU: {torch.cuda.device_count()} are there; start "
                        f"at most that many ranks a node (NPROC=N ./run.sh, or --nproc_per_node=N)")
    if args.fused_mlp and not (torch.cuda.is_available() and triton is not None):
        raise UserError("--fused_mlp true: its kernel needs a CUDA GPU and the package triton")
    train_shards, val_shards = find_shards(args.train_files), find_shards(args.val_files)
    batch_tokens, val_batch = args.batch_sequences * args.train_seq_len, world_size * args.val_seq_len
    check_enough(train_shards, batch_tokens, args.num_iterations, "training", args.train_files)
    check_enough(val_shards, val_batch, args.val_tokens // val_batch, "validation", args.val_files)
    published, comparison = find_published(command)
    folder = local_path(args.log_dir) / args.run_name
    if rank == 0:
        reason = None
        try:
            existing = next(p for p in (folder, *folder.parents) if p.exists())
            if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
                reason = f"{existing} is {'not writable' if existing.is_dir() else 'not a folder'}"
        except OSError as e:  # a name that is too long
            reason = e.strerror
        if reason:
            raise UserError(f"{folder}: the run's log cannot be written there ({reason}); --log_dir names "
                            f"another folder")
    checked = Checked(source, train_shards, val_shards, published, comparison, folder)
    if args.resume:
        checked.checkpoint, checked.saved = open_checkpoint(args)
    if checked.saved is not None:
        checked.differing = check_resumable(checked.saved, args, source, train_shards, checked.checkpoint)
    return checked


def plan(command: Command, world_size: int) -> list[str]:
    """What the run will do, in a few lines for the console and the log."""
    args = command.args
    batch_tokens = args.batch_sequences * args.train_seq_len
    lines = [f"recipe {command.recipe}, scale {command.scale}, {world_size} ranks, "
             f"{args.batch_sequences // world_size} micro-batches each",
             f"tokens: {args.num_iterations} steps of {batch_tokens} = "
             f"{args.num_iterations * batch_tokens / 1e6:.1f} million; validation "
             f"{args.val_tokens / 1e6:.2f} million"]
    if args.snoo:
        count, trailing = outer_steps(args)
        lines.append(f"snoo: {count} outer steps, every {args.snoo_k} inner steps from the first on; "
                     f"{trailing} inner steps trail the last one")
    return lines


def peak_memory(ctx: Distributed) -> str:
    """In MiB: the device's on CUDA; on a CPU the process's peak resident size, for both."""
    if ctx.device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, but bytes on macOS
        allocated = reserved = peak >> (10 if sys.platform == "linux" else 20)
    return f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB"


def failure_text(error: Exception, rank: int, step: int, ctx: Distributed) -> str:
    text = " ".join(str(error).split())[:1000] or "no message"
    if isinstance(error, NotFinite):  # every rank says the same
        return text
    if isinstance(error, torch.OutOfMemoryError):
        return (f"rank {rank} ran out of GPU memory at step {step} ({peak_memory(ctx)}); lower it with "
                f"--head_chunks 8 (logits), --train_seq_len (activations) or --val_seq_len, or --snoo false "
                f"(two copies of the model); {text}")
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return f"rank {rank} failed at step {step}: {kind}{text}"


def is_symptom(error: Exception) -> bool:
    """Whether a collective failed: because of another rank, then. Gloo raises plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and re.search(
        "gloo|NCCL|pair closure|Connection", str(error)) is not None)


def how_to_resume(progress: Progress, args: Hyperparameters) -> str:
    if progress.kept:
        return f"resume with the same command and --resume auto, which finds {progress.kept[-1]}"
    again = f"resume with --resume {args.resume} once more" if args.resume else "see --save_every"
    return f"nothing was saved, {again}"


def train(training: Training, progress: Progress, args: Hyperparameters, published: Published | None,
          save: typing.Callable[[], None], log: RunLog, watch: Watch, ctx: Distributed) -> int:
    """The loop. Returns the signal that ended it, or 0. `save` writes a checkpoint of `progress`."""
    total, first = args.num_iterations, progress.step
    terminal = ctx.rank == 0 and sys.stdout.isatty()
    batches = token_batches(args.train_files, args.batch_sequences * args.train_seq_len, ctx.rank,
                            ctx.world_size, first, args.vocab_size)
    batch = to_device(next(batches), ctx) if first < total else None
    clock, bad_step = Clock(ctx, progress.train_time_ms), FirstBadStep(ctx)
    watch.begin(first)
    clock.start()
    for step in range(first, total + 1):
        # validation and saving, off the clock
        validating = step == total or (args.val_loss_every > 0 and step % args.val_loss_every == 0)
        saving = (step == total and args.save_final) or (args.save_every > 0 and step % args.save_every == 0
                                                         and step > first)
        watch.ending = step == total  # then a signal has nothing left to stop
        signum, bad = (0, NEVER) if watch.ending else watch.agreed(step, bad_step.seen())
        pausing = validating or saving or signum > 0
        if pausing:
            progress.step, progress.train_time_ms = step, clock.stop()
            bad = min(bad, *ctx.share(bad_step.seen()))  # the clock has waited for the device
        if bad < NEVER:
            raise NotFinite(f"the training loss of step {bad + 1}/{total} is not finite: the run diverged")
        if signum:
            watch.ending = True
            if (args.save_every > 0 or args.save_final) and step > first:
                save()
            return signum
        if validating:
            loss = validate(training, step, args, ctx)
            if not math.isfinite(loss):
                raise NotFinite(f"the validation loss at step {step}/{total} is not finite: the run diverged")
            progress.val_losses = [pair for pair in progress.val_losses if pair[0] < step] + [[step, loss]]
            average = progress.train_time_ms / max(step, 1)
            line = (f"step:{step}/{total} val_loss:{loss:.6f} train_time:{progress.train_time_ms:.0f}ms "
                    f"step_avg:{average:.2f}ms{published.remark(step, loss) if published else ''}")
            log.write(line)
            left = average * (total - step) / 6e4
            if ctx.rank == 0:
                console(f"{chr(13) if terminal else ''}{line} time_left:{left:.1f}min")
        if saving:
            save()
        if step == total:
            return 0
        if pausing:
            clock.start()

        # training; the next batch is made ready while the device works on this one
        progress.step = step
        bad_step.add(step, train_step(training, batch, step, args, ctx))
        if step + 1 < total:
            batch = to_device(next(batches), ctx)
        ms = clock.ms()
        line = f"step:{step + 1}/{total} train_time:{ms:.0f}ms step_avg:{ms / (step + 1):.2f}ms"
        log.write(line)
        if terminal:
            console(f"\r{line} ", end="")
    raise AssertionError("the loop ends by validating")


def agree_on_run(args: Hyperparameters, checked: Checked, ctx: Distributed) -> str:
    """Fill in seed and run_id, the same on all ranks, and return the log's name without its ending."""
    if args.seed is None and checked.saved:
        args.seed = checked.saved["hyperparameters"].get("seed")
    if not isinstance(args.seed, int):
        args.seed = int.from_bytes(os.urandom(4), "little")
    if args.run_id is None:
        args.run_id = next_run_id(checked.folder)
    name = f"{args.run_id:03d}_{uuid.uuid4()}"
    args.seed, args.run_id, name = ctx.share((args.seed, args.run_id, name))[0]  # what rank 0 drew or found
    same = ctx.share((dataclasses.asdict(args), checked.checkpoint and checked.checkpoint.parts[-2:]))
    if any(other != same[0] for other in same):
        raise UserError("the ranks were started with different hyperparameters or checkpoints; start all "
                        "with one command")
    return name


def write_header(log: RunLog, command: Command, checked: Checked, remarks: list[str],
                 ctx: Distributed) -> None:
    """The log's second part, up to the line of =: what a stranger needs to rerun the run from its log alone,
    one `key: value` a line, and what the run will do, which the console says too."""
    if log.path is None:
        return
    gpus = "none"
    if ctx.device.type == "cuda":
        try:
            gpus = "\n" + subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=60,
                                         check=True).stdout
        except (OSError, subprocess.SubprocessError):  # a container without the tool still has the devices
            gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    args, saved = command.args, checked.saved
    lines = dict(
        run=f"{args.run_name}/{log.path.stem}",
        command=shlex.join([Path(__file__).name, *command.words]), recipe=command.recipe, scale=command.scale,
        world_size=ctx.world_size, overrides=json.dumps(command.overrides),
        source_sha256=hashlib.sha256(checked.source).hexdigest())
    lines |= dict(parent=saved["log"]) if saved else {}
    lines |= dict(python=platform.python_version(), pytorch=torch.__version__, cuda=torch.version.cuda,
                  device=ctx.device.type, threads=torch.get_num_threads(),
                  started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"))
    lines |= {f"hyperparameter {name}": json.dumps(v) for name, v in dataclasses.asdict(args).items()}
    for key, value in lines.items():
        log.write(f"{key}: {value}")
    for shard in (*checked.train_shards, *checked.val_shards):
        log.write(f"data: {shard.path} {shard.num_tokens} tokens")
    log.write(f"gpus: {gpus}")
    for line in [*plan(command, ctx.world_size), checked.comparison]:
        log.say(line)
    if saved:
        log.say(f"resumed from: {checked.checkpoint} at step {saved['step']}")
    elif args.resume:
        log.say(f"resumed from: nothing, no unfinished run under {checked.folder} has a checkpoint; "
                f"starting at step 0")
    for line in remarks:
        log.write(f"resumed anyway: {line}")
    log.write(SEPARATOR)


def checkpoint_saver(training: Training, progress: Progress, command: Command, checked: Checked, name: str,
                     log: RunLog, watch: Watch, ctx: Distributed) -> typing.Callable[[], None]:
    """The function that writes a checkpoint of where the run stands."""
    args = command.args
    about = dict(format=CHECKPOINT_FORMAT, recipe=command.recipe, scale=command.scale,
                 world_size=ctx.world_size, log=f"{args.run_name}/{name}.txt",
                 hyperparameters=dataclasses.asdict(args),
                 source_sha256=hashlib.sha256(checked.source).hexdigest())

    def save() -> None:
        batch_tokens = args.batch_sequences * args.train_seq_len
        position = dict(data_position=stream_position(checked.train_shards, batch_tokens, progress.step))
        save_checkpoint(training, progress, about | position, args.keep_checkpoints, log,
                        checked.folder / f"{name}_checkpoints", ctx)
        watch.beat, watch.how_to_resume = time.monotonic(), how_to_resume(progress, args)

    return save


def report(command: Command, progress: Progress, signum: int, checked: Checked, log: RunLog, watch: Watch,
           ctx: Distributed) -> None:
    """The last lines of log and console."""
    losses = [loss for _, loss in progress.val_losses]
    if not signum and checked.published and (verdict := checked.published.verdict(losses[-1])):
        log.say(verdict)
    log.write(peak_memory(ctx))
    if signum:
        log.say(f"interrupted at step {progress.step}: {watch.how_to_resume}")
    if ctx.rank == 0:
        if not signum:
            mark_finished(progress.kept, checked.folder)
        console(f"{'interrupted' if signum else 'finished'}: recipe {command.recipe}, scale {command.scale}, "
                f"{progress.step} steps on {ctx.world_size} ranks\nlog: {log.path}\n"
                f"val_loss: {f'{losses[-1]:.6f}' if losses else 'none yet'}")


def run(command: Command, rank: int, local_rank: int, world_size: int) -> None:
    args = command.args
    check_hyperparameters(args, world_size)
    if command.dry_run == "options":
        return
    problem = checked = None
    try:
        checked = local_checks(command, rank, local_rank, world_size)
    except UserError as e:
        if world_size == 1 or command.dry_run:
            raise
        problem = str(e)  # another rank may see no fault: all are told below, and rank 0 prints
    if command.dry_run:
        if rank == 0:
            print("\n".join([*plan(command, world_size), checked.comparison, f"log: {checked.folder}/"]
                            + [f"  --{name} {value}" for name, value in dataclasses.asdict(args).items()]))
        return

    ctx = start_distributed(args, rank, local_rank, world_size)
    watch, log, progress = Watch(ctx, args.step_timeout), RunLog(None), Progress()
    try:
        ctx.agree(problem)
        name = agree_on_run(args, checked, ctx)
        # state before the log: a checkpoint that does not fit leaves nothing behind
        training = build_training(args, ctx)
        saved, remarks = checked.saved, checked.differing
        try:
            if saved:
                remarks = [*remarks, *resume(training, saved, args, checked.checkpoint)]
                progress = Progress(saved["step"], saved["train_time_ms"], saved["val_losses"], saved["kept"])
            if rank == 0:
                log = watch.log = RunLog(checked.folder / f"{name}.txt", checked.source)
        except UserError as e:
            problem = str(e)
        ctx.agree(problem)
        remarks = list(dict.fromkeys(remark for ours in ctx.share(remarks) for remark in ours))
        write_header(log, command, checked, remarks, ctx)
        if rank == 0 and (args.save_every or args.save_final):
            clear_leftovers(checked.folder)
        saved = checked.saved = None  # gigabytes
        watch.how_to_resume = how_to_resume(progress, args)

        warm_up(training, args, ctx)
        save = checkpoint_saver(training, progress, command, checked, name, log, watch, ctx)
        signum = train(training, progress, args, checked.published, save, log, watch, ctx)
        report(command, progress, signum, checked, log, watch, ctx)
        log.close()
        watch.close()
    except Exception as e:
        known = isinstance(e, (torch.OutOfMemoryError, UserError))
        at_start = isinstance(e, UserError) and not watch.training
        text = str(e) if at_start else failure_text(e, rank, progress.step, ctx)
        if world_size > 1:
            end_failed_rank(text, "" if known else traceback.format_exc(), is_symptom(e), log, ctx)
        log.write(f"failed: {text}")
        log.close()
        watch.close()
        if known:
            raise UserError(text) from None
        raise
    if world_size > 1:
        dist.destroy_process_group()
    if signum:
        os._exit(128 + signum)


def main(argv: list[str] | None = None) -> None:
    """The run, with the command line's words (default: sys.argv[1:]). A user's mistake prints one message on
    rank 0 and raises SystemExit(1)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # paths may hold anything
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    rank = 0
    try:
        rank, local_rank, world_size = environment_ranks()
        command = parse_command(sys.argv[1:] if argv is None else list(argv))
        run(command, rank, local_rank, world_size)
    except UserError as e:
        if rank == 0:
            print(f"error: {e}", file=sys.stderr, flush=True)
        tell_launcher(f"error: {e}")
        raise SystemExit(1) from None
    except Exception:
        tell_launcher(traceback.format_exc())
        raise


if __name__ == "__main__":
    main()
