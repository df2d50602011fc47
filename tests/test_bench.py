"""tests/bench.py and tests/gpu_smoke.py: their counts against torch's counter and by hand, their parts run
small."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import types
import weakref
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench
import gpu_smoke
from bench import script

CPU = torch.device("cpu")
TINY = dict(
    num_heads=1, head_dim=32, model_dim=32, vocab_size=257, eot_token=256, train_seq_len=256, val_seq_len=256
)


@pytest.fixture(scope="module")
def tiny() -> script.Hyperparameters:
    return script.Hyperparameters(
        **{**script.SCALES["rehearsal"], **TINY, "num_iterations": 100},
        run_name="bench",
        seed=1,
        snoo_k=1,
        cooldown_frac=0.0,
    )


@pytest.mark.parametrize("plain", [False, True])
def test_products_are_what_torch_counts(plain: bool, tiny: script.Hyperparameters) -> None:
    a = tiny
    model = script.GPT(a.vocab_size, a.num_layers, a.num_heads, a.model_dim, 256, a.head_dim, a.eot_token)
    batch = (
        torch.randint(257, (256,), dtype=torch.int32),
        torch.randint(257, (256,)),
        torch.tensor(1, dtype=torch.int32),
    )
    with FlopCounterMode(display=False) as counter:
        (bench.plain_loss(model, *batch) if plain else model(*batch)).backward()
    by_operation = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in by_operation.items() if str(op) in ("aten.mm", "aten.addmm"))
    assert products == bench.product_flops(a, 256)


def test_products_at_the_records_size_by_hand() -> None:
    attention, mlp, head = 15 * 4 * 1024**2, 16 * 2 * 4096 * 1024, 50304 * 1024
    assert (
        bench.product_flops(script.Hyperparameters(), 65536)
        == 6 * 65536 * (attention + mlp + head)
        == 97_770_635_526_144
    )


def test_attention_by_hand_and_as_torch_counts() -> None:
    args, docs = script.Hyperparameters(), torch.zeros(65536, dtype=torch.int32)
    # one long document: row i keeps itself and the w - 1 blocks before it, where there are as many
    blocks = {w: sum(min(i + 1, w) for i in range(512)) for w in (27, 13)}
    assert {w: bench.block_pairs(docs, w) for w in blocks} == {w: n * 128**2 for w, n in blocks.items()}
    assert bench.layer_windows(args, 27) == [
        13 if i not in (0, 4, 11, 15) else 27 for i in range(16) if i != 7
    ]
    _, attention = bench.model_flops(args, 65536, docs, 27)
    assert attention == 12 * 1024 * 128**2 * (4 * blocks[27] + 11 * blocks[13])
    assert 25.2e12 < attention < 25.9e12
    # all pairs of one unmasked layer, counted by torch: forward and backward, without a recomputed product
    q = torch.randn(1, 2, 256, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        (q @ q.transpose(-1, -2) @ q).sum().backward()
    assert counter.get_total_flops() == bench.attention_flops(types.SimpleNamespace(model_dim=32), 256 * 256)


def test_pairs_are_those_of_the_dense_masks_blocks() -> None:
    docs = gpu_smoke.some_docs(2048, CPU)
    for window in (1, 3, 16):
        dense = script.dense_mask(docs, torch.tensor(window, dtype=torch.int32))
        tiles = dense.view(16, 128, 16, 128).any(dim=3).any(dim=1)
        assert bench.block_pairs(docs, window) == int(tiles.sum()) * 128**2


def test_step_splits_the_time_and_equals_the_plain_version(
    tiny: script.Hyperparameters, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    build, models = script.build_training, []

    def noting(*args: object) -> script.Training:
        training = build(*args)
        assert all(model() is None for model in models), "the one before is still in memory"
        models.append(weakref.ref(training.model))
        return training

    monkeypatch.setattr(script, "build_training", noting)
    gc.disable()  # it must not come to pass by luck
    try:
        found = bench.bench_step(script.Distributed(0, 0, 1, CPU), 1, tiny)
    finally:
        gc.enable()
    assert len(models) == 2
    printed = capsys.readouterr().out
    assert all(phase in printed for phase in bench.PHASES)
    monkeypatch.setattr(bench, "bench_step", lambda *_: found)
    text, right = gpu_smoke.check_step(CPU)
    assert right and "utilisation" in text
    monkeypatch.setattr(bench, "bench_step", lambda *_: found | {"apart": 0.06})
    assert not gpu_smoke.check_step(CPU)[1]
    ours, losses = found["ours"], found["ours"]["losses"]
    assert set(ours["phases"]) == set(bench.PHASES) and all(v > 0 for v in ours["phases"].values())
    assert sum(ours["phases"].values()) == pytest.approx(ours["total"], rel=0.1)
    assert ours["tokens_per_s"] == pytest.approx(tiny.batch_sequences * 256 / ours["total"])
    assert found["products"] == tiny.batch_sequences * bench.product_flops(tiny, 256)
    assert 0 < ours["utilisation"] < 1 and len(losses) == 3 * tiny.batch_sequences
    assert losses[-1] != losses[0] and found["apart"] < 0.05


def test_the_plain_optimizers_are_the_scripts_to_rounding(tiny: script.Hyperparameters) -> None:
    ctx = script.Distributed(0, 0, 1, CPU)
    both = [make(tiny, ctx) for make in (script.build_training, bench.plain_training)]
    start = [p.detach().clone() for p in both[0].model.parameters()]
    for step in range(2):
        for training in both:
            generator = torch.Generator().manual_seed(step)
            for p in training.model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            training.adam.step()
            training.muon.start_reduction()
            training.muon.step()
            training.snoo.step()
    for name, before, a, b in zip(
        dict(both[0].model.named_parameters()), start, *(t.model.parameters() for t in both)
    ):
        assert gpu_smoke.relative(a - before, b - before) < 0.03, name
        assert not torch.equal(a, before), name


def test_muon_and_snoo_parts_compare_equal_work(capsys: pytest.CaptureFixture) -> None:
    for times in (bench.bench_muon(CPU, 32, 1), bench.bench_snoo(CPU, 1000, 3)):
        assert times["ratio"] > 0 and times.get("products", 0.25) == 0.25
    printed = capsys.readouterr().out
    assert "8 matrices 32 x 32" in printed and "120 parameters of 1000" in printed


def test_the_reductions_bytes_by_hand() -> None:
    counts = bench.bench_reduction(8)
    head, embeds, scalars = 50304 * 1024 * 4, 7 * 50257 * 1024 * 2, 16 * 6 * 4
    sixteen = (
        2 * 1024**2 * 16 * (4 + 4 + 4)
    )  # bf16; 15 attention stacks and twice 16 MLP matrices, padded to two a rank
    assert counts["all_reduce of AdamW's gradients"][1] == head + embeds + scalars
    assert (
        counts["reduce_scatter of Muon's gradients"] == counts["all_gather of Muon's weights"] == (3, sixteen)
    )
    assert not torch.distributed.is_initialized()


def test_host_part(capsys: pytest.CaptureFixture) -> None:
    found = bench.bench_host(shard_tokens=10**6, batch_tokens=524288 // 16, ranks=8, steps=20)
    assert 0 < found["load"] < found["worst"] and found["log"] > 0
    assert "a step" in capsys.readouterr().out


def test_a_written_shard_is_one_that_the_script_reads(tmp_path: Path) -> None:
    bench.write_shard(tmp_path / "a.bin", 1000, 50257, 50256, document=100)
    tokens = script.load_shard(tmp_path / "a.bin").to(torch.int32)
    assert tokens.numel() == 1000 and (tokens[::100] == 50256).all() and tokens.unique().numel() > 500


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        bench.main(["stepp"])
    assert "no part stepp; there are: step, muon" in capsys.readouterr().err


# -----------------------------------------------------------------------------------------------------------
# The smoke, part by part, pointed at the CPU.


@pytest.mark.parametrize("check", [gpu_smoke.check_masks, gpu_smoke.check_attention, gpu_smoke.check_model])
def test_smoke_parts_hold_on_a_cpu(check) -> None:
    text, right = check(CPU)
    assert right, text


def test_smoke_of_the_fused_mlp_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    text, right = gpu_smoke.check_fused_mlp(CPU, tokens=256, dim=32)
    assert right and "within 0.0e+00" in text
    monkeypatch.setattr(gpu_smoke, "relative", lambda a, b: 0.03)
    assert not gpu_smoke.check_fused_mlp(CPU, tokens=256, dim=32)[1]


def test_block_lists_written_out_are_the_dense_mask() -> None:
    docs = gpu_smoke.some_docs(2048, CPU)
    for blocks in (1, 3, 16):
        window = torch.tensor(blocks, dtype=torch.int32)
        partial, partial_idx, full, full_idx = script.block_lists(docs)
        partial, full = script.windowed(partial, full, window)
        mask = BlockMask.from_kv_blocks(
            partial[None, None],
            partial_idx[None, None],
            full[None, None],
            full_idx[None, None],
            BLOCK_SIZE=128,
            mask_mod=lambda b, h, q, k: (q >= k) & (docs[q] == docs[k]),
        )
        assert torch.equal(gpu_smoke.written_out(mask, docs), script.dense_mask(docs, window))
        mask.full_kv_num_blocks = (full - 1).clamp_min(0)[None, None]
        if int(full.max()) > 0:
            assert not torch.equal(gpu_smoke.written_out(mask, docs), script.dense_mask(docs, window))


def test_smoke_resume_on_a_cpu() -> None:
    extra = (
        "--num_heads",
        "1",
        "--head_dim",
        "32",
        "--model_dim",
        "32",
        "--train_seq_len",
        "128",
        "--val_seq_len",
        "128",
    )
    text, right = gpu_smoke.check_resume(CPU, extra)
    assert right, text


def test_the_smokes_parts_can_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def narrower(docs: torch.Tensor, window: torch.Tensor):
        return script.dense_mask(docs, window - 1), script.dense_mask(docs, window // 2)

    def broken(device: torch.device) -> gpu_smoke.Row:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(script, "attention_masks", narrower)
    assert not gpu_smoke.check_masks(CPU)[1] and not gpu_smoke.check_attention(CPU)[1]
    monkeypatch.setattr(
        gpu_smoke,
        "CHECKS",
        {"masks": gpu_smoke.check_masks, "broken": broken, "fine": lambda device: ("1 ms", True)},
    )
    assert gpu_smoke.main(CPU) == 1
    table = capsys.readouterr().out
    assert (
        "broken     FAILED" in table and "RuntimeError: no such kernel" in table and "fine       ok" in table
    )
    monkeypatch.setattr(gpu_smoke, "CHECKS", {"fine": lambda device: ("1 ms", True)})
    assert gpu_smoke.main(CPU) == 0


def test_without_a_gpu_the_smoke_says_so_and_ends() -> None:
    ended = subprocess.run(
        [sys.executable, gpu_smoke.__file__],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert ended.returncode == 1
    assert ended.stderr.strip() == "tests/gpu_smoke.py needs a GPU, and torch sees none on this machine."
