"""Where a training step's time goes, on the machine it runs on: `python tests/bench.py [PART ...]`.

    step        data, forward + backward, reduce, inner optimizers, outer step; tokens/s, model FLOPs
                utilisation, peak memory; all against a plain version in the same run: whole logits through
                log_softmax, Muon matrix by matrix, AdamW and Snoo parameter by parameter
    muon        the blocks' matrices in one batched Newton-Schulz a shape, against one by one
    snoo        one outer step over 120 parameters, against the published per-parameter loop; aim 0.6 of its
                time
    reduction   collectives and bytes a step and rank, counted on full-size fake tensors in a world of 8
    host        loader and log at the record's sizes: shards of 1e8 tokens, rank 3's eighth of 524288; aim
                0.5 ms

On a GPU, `step` takes the record's sizes with one micro-batch of 65536 tokens, compiled, tuning off (under 5
minutes); on a CPU the rehearsal's sizes, eager (all parts under 2 minutes). Under torchrun, `step` runs on
all ranks.

FLOPs, with T tokens a sequence, d model_dim, L layers, V vocabulary rows of the head; a product's multiply
and add count as two, and the backward of a product is two products:
    products    6 T N, N = 4 d^2 (L - 1) + 8 d^2 L + V d: q, k, v, o of the L - 1 attention layers, the two
                MLP matrices, the head. 97.8 TFLOP at the record's sizes.
    attention   12 d for each pair (query, key) in a kept block of 128 x 128, summed over the layers' masks:
                two products forward, four backward; its recomputation of q.k in the backward is left out.
                Where no document ends inside the window: 25.4 TFLOP at the end of the run, half of it on
                average over the run's windows.
Embeddings, norms and optimizers are left out: utilisation is (products + attention) / (step time * the
device's peak). The peak of a GPU is its dense bf16 rate from PEAKS; that of a CPU is a float32 product timed
in this run.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import tempfile
import time
import typing
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt_medium as script

PEAKS = {
    "H100": 989.4,
    "H200": 989.4,
    "A100": 312.0,
    "B200": 2250.0,
    "L40S": 362.0,
}  # dense bf16 TFLOP/s by name
PHASES = ("data", "forward + backward", "reduce", "inner optimizers", "outer step")

# -----------------------------------------------------------------------------------------------------------
# FLOPs and peaks.


def product_flops(args: script.Hyperparameters, tokens: int) -> int:
    """FLOPs of the model's matrix products in one forward and backward of `tokens` tokens."""
    d, layers, rows = args.model_dim, args.num_layers, -(-args.vocab_size // 128) * 128
    return 6 * tokens * (4 * d * d * (layers - 1) + 8 * d * d * layers + rows * d)


def attention_flops(args: script.Hyperparameters, pairs: int) -> int:
    """FLOPs of one layer's attention, forward and backward, over `pairs` (query, key) pairs."""
    return 12 * args.model_dim * pairs


def layer_windows(args: script.Hyperparameters, window: int) -> list[int]:
    """Window in blocks of each attention layer: layers 0, 4, the fifth from the end and the last are long."""
    n = args.num_layers
    long = {0, 4, n - 5, n - 1}
    return [window if i in long else window // 2 for i in range(n) if i != script.NO_ATTENTION]


def block_pairs(docs: Tensor, window: int) -> int:
    """Pairs in the blocks that a mask of `window` blocks keeps."""
    partial, _, full, _ = script.block_lists(docs)
    partial, full = script.windowed(
        partial, full, torch.tensor(window, dtype=torch.int32, device=docs.device)
    )
    return int(partial.sum() + full.sum()) * script.BLOCK**2


def model_flops(args: script.Hyperparameters, tokens: int, docs: Tensor, window: int) -> tuple[int, int]:
    """(products, attention) of one sequence."""
    pairs = {w: block_pairs(docs, w) for w in set(layer_windows(args, window))}
    return product_flops(args, tokens), sum(
        attention_flops(args, pairs[w]) for w in layer_windows(args, window)
    )


def peak_rate(device: torch.device) -> tuple[float, str]:
    """(FLOP/s, where the figure is from)."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for key, tflops in PEAKS.items():
            if key in name:
                return tflops * 1e12, f"{key}, dense bf16"
        return math.nan, f"{name} is not in PEAKS"
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best = min(timed(lambda: a @ b, 10, device))
    return 2 * 1024**3 / best, "float32 product of 1024, best of 10 in this run"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(call: typing.Callable[[], typing.Any], repeats: int, device: torch.device) -> list[float]:
    """Seconds of each call, after one that does not count."""
    call()
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds


def in_turns(
    calls: dict[str, typing.Callable[[], typing.Any]], repeats: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of each call, taken in turns: a busy machine slows all of them alike."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


# -----------------------------------------------------------------------------------------------------------
# The plain version of each part: what the script's fused one must equal.


class PlainMuon:
    """The script's Muon, one matrix at a time, with the same state and arithmetic. One rank."""

    def __init__(self, muon: script.Muon) -> None:
        assert muon.world_size == 1
        self.muon, self.param_groups, self.process_group = muon, muon.param_groups, None

    def start_reduction(self) -> None:
        pass

    @torch.no_grad()
    def step(self) -> None:
        for bucket in self.muon.buckets:
            g = bucket.group
            for i in bucket.slots[0]:
                p = self.muon.matrices[i]
                scalars = [
                    torch.tensor(v, dtype=torch.float32)
                    for v in (
                        g["momentum"],
                        1 - g["lr"] * g["weight_decay"],
                        g["lr"] * max(1, p.size(-2) / p.size(-1)) ** 0.5,
                        g["beta"],
                    )
                ]
                state = self.muon.state[p]
                stacks = [p, p.grad, state["mantissa"], state["momentum"], state.get("smoothing")]
                for j in range(p.size(0) if p.ndim > 2 else 1):
                    one = [None if t is None else t[j] if p.ndim > 2 else t for t in stacks]
                    one[0].copy_(script.muon_update(*one, *scalars, self.muon.smoothing_interpolated))


class PlainSnoo:
    """The published loop: gradients made parameter by parameter, torch.optim.SGD, copies back."""

    def __init__(self, params: list[Tensor], lr: float, momentum: float, k: int) -> None:
        self.params, self.k, self.current_step = params, k, 0
        self.slow = [p.detach().clone() for p in params]
        self.sgd = torch.optim.SGD(params, lr=lr, momentum=momentum, nesterov=True, foreach=False)

    @torch.no_grad()
    def step(self) -> None:
        if self.current_step % self.k == 0:
            for p, slow in zip(self.params, self.slow):
                p.grad = slow - p
                p.copy_(slow)
            self.sgd.step()
            for p, slow in zip(self.params, self.slow):
                slow.copy_(p)
        self.current_step += 1


def plain_loss(model: script.GPT, inputs: Tensor, targets: Tensor, window: Tensor) -> Tensor:
    """GPT.forward with a head that keeps its logits and leaves its gradient to autograd."""
    logits = script.linear(
        model.hidden(inputs, window), model.lm_head_w.to(model.embed1.weight.dtype)
    ).float()
    logits = model.logit_softcap * logits * torch.rsqrt(logits.square() + model.logit_softcap**2)
    return -logits.log_softmax(-1).gather(-1, targets[:, None]).mean()


def plain_training(args: script.Hyperparameters, ctx: script.Distributed) -> script.Training:
    training = script.build_training(args, ctx)
    model = training.model
    groups = [{**g} for g in training.adam.param_groups]
    training.adam = torch.optim.AdamW(
        [dict(params=g["params"], lr=g["lr"], base_lr=g["base_lr"]) for g in groups],
        betas=groups[0]["betas"],
        eps=groups[0]["eps"],
        weight_decay=groups[0]["weight_decay"],
        foreach=False,
        fused=False,
    )
    training.muon = PlainMuon(training.muon)
    if training.snoo:
        training.snoo = PlainSnoo(list(model.parameters()), args.snoo_lr, args.snoo_momentum, args.snoo_k)

    def forward(inputs: Tensor, targets: Tensor, window: Tensor) -> Tensor:
        return plain_loss(model, inputs, targets, window)

    training.forward = torch.compile(forward, dynamic=False, fullgraph=True) if args.compile else forward
    return training


# -----------------------------------------------------------------------------------------------------------
# The parts.


class Stopwatch:
    """Seconds by phase, by wrapping the calls that end or make one up. Each border waits for the device."""

    def __init__(self, training: script.Training, ctx: script.Distributed) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.device, self.losses, self.mark = ctx.device, [], 0.0
        forward = training.forward

        def noting(*args: Tensor) -> Tensor:
            loss = forward(*args)
            self.losses.append(loss.detach())
            return loss

        training.forward = noting
        self.wrap(training.muon, "start_reduction", before="forward + backward", during="reduce")
        self.wrap(training.adam, "step", before="reduce", during="inner optimizers")
        self.wrap(training.muon, "step", before="inner optimizers", during="inner optimizers")
        if training.snoo:
            self.wrap(training.snoo, "step", before="inner optimizers", during="outer step")

    def lap(self, phase: str) -> None:
        synchronize(self.device)
        now = time.perf_counter()
        self.seconds[phase] += now - self.mark
        self.mark = now

    def wrap(self, owner: typing.Any, name: str, before: str, during: str) -> None:
        call = getattr(owner, name)

        def wrapped() -> None:
            self.lap(before)
            call()
            self.lap(during)

        setattr(owner, name, wrapped)


def step_sizes(device: torch.device, ranks: int) -> script.Hyperparameters:
    """The record's sizes with one micro-batch a rank on a GPU; the rehearsal's on a CPU. Every step is an
    outer one, so that its time is seen; the window is the widest."""
    common = dict(run_name="bench", seed=1234, snoo_k=1, num_iterations=100, cooldown_frac=0.0)
    if device.type == "cuda":
        return script.Hyperparameters(**common, batch_sequences=ranks, coordinate_descent_tuning=False)
    return script.Hyperparameters(**{**script.SCALES["rehearsal"], **common})


def run_steps(
    training: script.Training, args: script.Hyperparameters, ctx: script.Distributed, steps: int, pattern: str
) -> tuple[dict[str, float], float, list[float]]:
    """(median seconds by phase, median seconds a step, losses). The first two steps, which compile and make
    the optimizers' state, do not count."""
    watch, laps, totals = Stopwatch(training, ctx), [], []
    batches = script.token_batches(
        pattern, args.batch_sequences * args.train_seq_len, ctx.rank, ctx.world_size
    )
    for _ in range(steps + 2):
        watch.seconds = dict.fromkeys(PHASES, 0.0)
        synchronize(ctx.device)
        start = watch.mark = time.perf_counter()
        batch = script.to_device(next(batches), ctx)
        watch.lap("data")
        script.train_step(training, batch, args.num_iterations, args, ctx)
        watch.lap("outer step")  # with the release of the gradients
        laps.append(watch.seconds)
        totals.append(time.perf_counter() - start)
    by_phase = {phase: statistics.median(lap[phase] for lap in laps[2:]) for phase in PHASES}
    return by_phase, statistics.median(totals[2:]), [float(x) for x in watch.losses]


def write_shard(path: Path, tokens: int, vocab_size: int, eot_token: int, document: int = 1000) -> None:
    """A shard of random tokens, a document every `document` of them."""
    header = torch.zeros(256, dtype=torch.int32)
    header[:3] = torch.tensor([script.SHARD_MAGIC, script.SHARD_VERSION, tokens], dtype=torch.int32)
    body = torch.randint(
        vocab_size, (tokens,), generator=torch.Generator().manual_seed(0), dtype=torch.int32
    ).to(torch.uint16)
    body.view(torch.int16)[::document] = torch.tensor([eot_token]).to(torch.uint16).view(torch.int16).item()
    with open(path, "wb") as f:
        f.write(header.numpy().tobytes())
        f.write(body.numpy().tobytes())


def bench_step(
    ctx: script.Distributed, steps: int, args: script.Hyperparameters | None = None
) -> dict[str, typing.Any]:
    args = args or step_sizes(ctx.device, ctx.world_size)
    script.check_hyperparameters(args, ctx.world_size)
    micro_batches = args.batch_sequences // ctx.world_size
    window = script.window_blocks(args.num_iterations, args)
    results: dict[str, typing.Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        batch_tokens = args.batch_sequences * args.train_seq_len
        write_shard(
            Path(folder) / "bench_0.bin", (steps + 3) * batch_tokens + 2, args.vocab_size, args.eot_token
        )
        pattern = str(Path(folder) / "*.bin")
        tokens = script.load_shard(Path(folder) / "bench_0.bin")[: args.train_seq_len].to(torch.int32)
        docs = (tokens == args.eot_token).cumsum(0, dtype=torch.int32)
        makers = {"ours": script.build_training}
        if ctx.world_size == 1:
            makers["plain"] = plain_training
        for name, make in makers.items():
            if ctx.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            training = make(args, ctx)
            phases, total, losses = run_steps(training, args, ctx, steps, pattern)
            results[name] = dict(phases=phases, total=total, losses=losses, memory=script.peak_memory(ctx))
            del training  # and what refers to it: two of them do not fit into 80 GB
            torch._dynamo.reset()
            gc.collect()
    peak, source = peak_rate(ctx.device)
    products, attention = (micro_batches * n for n in model_flops(args, args.train_seq_len, docs, window))
    per_rank = micro_batches * args.train_seq_len
    for name, r in results.items():
        r["tokens_per_s"] = ctx.world_size * per_rank / r["total"]
        r["utilisation"] = (products + attention) / (r["total"] * peak)
    results |= dict(products=products, attention=attention, peak=peak)
    if ctx.rank == 0:
        names = [n for n in ("ours", "plain") if n in results]
        print(
            f"step: {ctx.world_size} ranks of {micro_batches} x {args.train_seq_len} tokens, "
            f"dim {args.model_dim}, window {window} blocks, "
            f"{ctx.device.type}, {'compiled' if args.compile else 'eager'}; medians of {steps} steps"
        )
        print(f"  {'ms':22}" + "".join(f"{n:>12}" for n in names) + f"{'ratio':>9}" * (len(names) > 1))

        def row(title: str, values: list[float]) -> None:
            ratio = f"{values[0] / values[1]:9.2f}" if len(values) > 1 and values[1] else ""
            print(f"  {title:22}" + "".join(f"{1e3 * v:12.2f}" for v in values) + ratio)

        for phase in PHASES:
            row(phase, [results[n]["phases"][phase] for n in names])
        row("whole step", [results[n]["total"] for n in names])
        print(f"  {'tokens/s':22}" + "".join(f"{results[n]['tokens_per_s']:12,.0f}" for n in names))
        print(
            f"  {'FLOPs utilisation, %':22}"
            + "".join(f"{100 * results[n]['utilisation']:12.1f}" for n in names)
        )
        for n in names:
            print(f"  {n}: {results[n]['memory']}")
        print(
            f"  FLOPs a step and rank: products {products / 1e12:.4g} T, attention {attention / 1e12:.4g} T; "
            f"at the peak of {peak / 1e12:.4g} TFLOP/s ({source}): "
            f"{1e3 * (products + attention) / peak:.2f} ms"
        )
        if len(names) > 1:
            apart = max(abs(a - b) for a, b in zip(results["ours"]["losses"], results["plain"]["losses"]))
            print(
                f"  losses, ours and plain, differ by at most {apart:.5f} over "
                f"{len(results['ours']['losses'])} micro-batches"
            )
            results["apart"] = apart
    return results


class Products(TorchDispatchMode):
    """Counts matrix products, batched ones once: each is a kernel launch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: typing.Any, types: typing.Any, args: typing.Any = (), kwargs: typing.Any = None
    ) -> typing.Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        return func(*args, **(kwargs or {}))


def bench_muon(device: torch.device, dim: int, repeats: int = 7) -> dict[str, float]:
    """A rank's matrices in the record's proportions: 2 stacks of 4 attention matrices, 4 MLP matrices."""
    generator = torch.Generator().manual_seed(0)
    stacks = [
        torch.randn(*shape, generator=generator).to(device)
        for shape in ((2, 4, dim, dim), (2, 4 * dim, dim), (2, dim, 4 * dim))
    ]

    def batched() -> list[Tensor]:
        return [script.newton_schulz(s) for s in stacks]

    def one_by_one() -> list[Tensor]:
        return [torch.stack([script.newton_schulz(m) for m in s.flatten(0, -3)]).view_as(s) for s in stacks]

    for a, b in zip(batched(), one_by_one()):
        assert (a.float() - b.float()).abs().max() < 0.05 * b.float().abs().max(), (
            "batched and one by one differ"
        )
    calls = dict(batched=batched, one_by_one=one_by_one)
    counts = {}
    for name, call in calls.items():
        with Products() as products:
            call()
        counts[name] = products.count
    times = in_turns(calls, repeats, device)
    times |= dict(
        ratio=times["batched"] / times["one_by_one"], products=counts["batched"] / counts["one_by_one"]
    )
    print(
        f"muon: 8 matrices {dim} x {dim}, 4 of {4 * dim} and {dim}: "
        f"batched {1e3 * times['batched']:.2f} ms, one by one "
        f"{1e3 * times['one_by_one']:.2f} ms, ratio {times['ratio']:.2f}; "
        f"{counts['batched']} and {counts['one_by_one']} matrix products"
    )
    return times


def bench_snoo(device: torch.device, elements: int, repeats: int = 21) -> dict[str, float]:
    """An outer step over 120 bf16 parameters."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(elements, generator=generator).to(device, torch.bfloat16) for _ in range(120)]
    move = [torch.randn(elements, generator=generator).to(device, torch.bfloat16) * 0.01 for _ in range(120)]
    sets = {name: [torch.nn.Parameter(p.clone()) for p in start] for name in ("foreach", "loop")}
    outers = dict(
        foreach=script.Snoo(sets["foreach"], 0.68, 0.37, 1), loop=PlainSnoo(sets["loop"], 0.68, 0.37, 1)
    )
    for name, params in sets.items():  # the same to rounding over three steps
        for _ in range(3):
            with torch.no_grad():
                torch._foreach_add_(params, move)
            outers[name].step()
    apart = max(float((a - b).detach().abs().max()) for a, b in zip(sets["foreach"], sets["loop"]))
    assert apart < 0.05, f"foreach and loop are {apart} apart"
    times = in_turns({name: outer.step for name, outer in outers.items()}, repeats, device)
    times["ratio"] = times["foreach"] / times["loop"]
    print(
        f"snoo: 120 parameters of {elements}: foreach {1e3 * times['foreach']:.3f} ms, "
        f"loop {1e3 * times['loop']:.3f} ms, ratio "
        f"{times['ratio']:.2f} (aim 0.6: {'met' if times['ratio'] <= 0.6 else 'MISSED'})"
    )
    return times


def bench_reduction(ranks: int = 8, num_layers: int = 16) -> dict[str, tuple[int, int]]:
    """Collective -> (calls, bytes of its full-size side) of one step of a rank; fake tensors, no traffic."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    counts: dict[str, tuple[int, int]] = {}

    def counting(name: str, call: typing.Callable, sized: int) -> typing.Callable:
        def wrapped(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
            calls, size = counts.get(name, (0, 0))
            counts[name] = calls + 1, size + args[sized].nbytes
            return call(*args, **kwargs)

        return wrapped

    assert not dist.is_initialized(), "the reduction is counted in one process"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    kept = script.reduce_scatter_flat, script.all_gather_flat, dist.all_reduce
    try:
        script.reduce_scatter_flat = counting("reduce_scatter of Muon's gradients", kept[0], 1)
        script.all_gather_flat = counting("all_gather of Muon's weights", kept[1], 0)
        dist.all_reduce = counting("all_reduce of AdamW's gradients", kept[2], 0)
        args = script.Hyperparameters(batch_sequences=ranks, compile=False, num_layers=num_layers)
        with FakeTensorMode():
            model = script.GPT(args.vocab_size, args.num_layers, args.num_heads, args.model_dim, 128)
            adam, muon, _ = script.build_optimizers(model, args, 0, ranks)

            def forward(*_: Tensor) -> Tensor:  # a gradient for every parameter, in its dtype
                return sum(p.float().sum() for p in model.parameters())

            training = script.Training(model, forward, adam, muon, None)
            ctx = script.Distributed(0, 0, ranks, torch.device("cpu"))
            batch = (
                torch.zeros(args.train_seq_len, dtype=torch.int32),
                torch.zeros(args.train_seq_len, dtype=torch.int64),
            )
            script.train_step(training, batch, 0, args, ctx)
    finally:
        script.reduce_scatter_flat, script.all_gather_flat, dist.all_reduce = kept
        dist.destroy_process_group()
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    total = sum(size for _, size in counts.values())
    print(f"reduction, a step of one of {ranks} ranks; gradients {gradients / 1e6:.1f} MB:")
    for name, (calls, size) in counts.items():
        print(f"  {name:36}{calls:4} calls {size / 1e6:9.1f} MB")
    print(f"  {'in all':36}{sum(c for c, _ in counts.values()):4} calls {total / 1e6:9.1f} MB")
    return counts


def bench_host(
    shard_tokens: int = 10**8, batch_tokens: int = 524288, ranks: int = 8, steps: int = 150
) -> dict[str, float]:
    """Seconds of host time a step: the loader's next batch and the log's line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench_0.bin"
        write_shard(path, shard_tokens, 50257, 50256)
        steps = min(steps, script.batches_in_shard(shard_tokens, batch_tokens))
        log = script.RunLog(Path(folder) / "log.txt", b"source")
        batches = script.token_batches(str(path), batch_tokens, 3, ranks, vocab_size=50257)
        next(batches)
        loads, logs = [], []
        for step in range(1, steps):
            start = time.perf_counter()
            batch = next(batches)
            middle = time.perf_counter()
            log.write(f"step:{step}/5640 train_time:{249 * step:.0f}ms step_avg:{249:.2f}ms")
            loads.append(middle - start)
            logs.append(time.perf_counter() - middle)
        log.close()
    assert batch[0].numel() == batch_tokens // ranks
    both = [a + b for a, b in zip(loads, logs)]
    result = dict(
        load=statistics.median(loads),
        log=statistics.median(logs),
        median=statistics.median(both),
        worst=max(both),
    )
    print(
        f"host: {shard_tokens:.0e} tokens a shard, {batch_tokens} a batch, rank 3 of {ranks}: "
        f"loader {1e3 * result['load']:.3f} ms, log {1e3 * result['log']:.3f} ms a step; "
        f"both {1e3 * result['median']:.3f} ms, at worst {1e3 * result['worst']:.3f} ms "
        f"(aim 0.5: {'met' if result['median'] < 5e-4 else 'MISSED'})"
    )
    return result


def main(argv: list[str]) -> None:
    parts = ("step", "muon", "snoo", "reduction", "host")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(parts)} (default: all)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (default %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="although a GPU is there")
    options = parser.parse_args(argv)
    if unknown := [p for p in options.parts if p not in parts]:
        parser.error(f"no part {', '.join(unknown)}; there are: {', '.join(parts)}")
    wanted = options.parts or list(parts)
    rank, local_rank, ranks = script.environment_ranks()
    if ranks > 1 and wanted != ["step"]:
        parser.error("several ranks run the part `step` alone")
    device = (
        torch.device("cuda", local_rank)
        if torch.cuda.is_available() and not options.cpu
        else torch.device("cpu")
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    if rank == 0:
        threads, load = torch.get_num_threads(), os.getloadavg()[0]
        print(f"torch {torch.__version__}, {name}, {threads} threads, load {load:.1f}", flush=True)
    if "step" in wanted:
        if ranks > 1:
            ctx = script.start_distributed(step_sizes(device, ranks), rank, local_rank, ranks)
        else:
            ctx = script.Distributed(0, 0, 1, device)
        bench_step(ctx, options.steps)
        if ranks > 1:
            dist.destroy_process_group()
    full = device.type == "cuda"
    if "muon" in wanted:
        for dim in (1024,) if full else (16, 128):
            bench_muon(device, dim)
    if "snoo" in wanted:
        for elements in (1000, 2**14, 2**16, 2**20) if not full else (2**14, 2**20, 2**22):
            bench_snoo(device, elements)
    if "reduction" in wanted:
        bench_reduction()
    if "host" in wanted:
        bench_host()


if __name__ == "__main__":
    main(sys.argv[1:])
