"""Newton-Schulz against an SVD, Muon and Snoo against plain restatements and hand-worked numbers, groups, schedules."""
from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

import train_gpt_medium as t
from train_helpers import call_on_ranks

COEFFICIENTS = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
                (2.8366, -3.0525, 1.2012))

# ---------------------------------------------------------------------------------------------------------------------
# Newton-Schulz


def polynomial(s: torch.Tensor) -> torch.Tensor:
    """What the five steps make of one singular value: s <- a s + b s^3 + c s^5."""
    for a, b, c in COEFFICIENTS:
        s = a * s + b * s**3 + c * s**5
    return s


def orthogonalised(G: torch.Tensor) -> torch.Tensor:
    """The same result by another road: U p(S / (norm + 1e-7)) V^T of the SVD, in float64."""
    U, S, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    norm = G.double().norm(dim=(-2, -1))[..., None] + 1e-7
    return U * polynomial(S / norm)[..., None, :] @ Vh


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16), (4, 12, 20), (3, 20, 12), (2, 3, 8, 8), (1, 9), (9, 1)])
def test_newton_schulz_equals_the_svd_with_the_iterations_singular_values(shape):
    G = matrix(*shape)
    exact = t.newton_schulz(G)
    assert exact.dtype == torch.float64 and exact.shape == G.shape
    assert torch.allclose(exact, orthogonalised(G), rtol=0, atol=1e-10)
    rounded = t.newton_schulz(G.float())
    assert rounded.dtype == torch.bfloat16 and rounded.shape == G.shape
    expected = orthogonalised(G.bfloat16())
    # one row or column has no neighbours over which bf16's roundings could average out
    assert (rounded.double() - expected).norm() < (0.03 if min(shape[-2:]) > 1 else 0.12) * expected.norm()


def test_singular_values_end_in_the_iterations_band():
    """Where the band is, from the scalar iteration alone; then that whole matrices, badly conditioned ones too, lie in it."""
    grid = torch.linspace(0.005, 1, 100_000, dtype=torch.float64)
    low, high = float(polynomial(grid).min()), float(polynomial(grid).max())
    assert 0.5 < low < 1 < high < 1.3
    for shape in ((30, 30), (16, 48), (48, 16)):
        U, _, Vh = torch.linalg.svd(matrix(*shape), full_matrices=False)
        S = torch.logspace(0, -1.5, min(shape), dtype=torch.float64)
        values = torch.linalg.svdvals(t.newton_schulz((U * S) @ Vh))
        assert low - 1e-9 <= values.min() and values.max() <= high + 1e-9
        values = torch.linalg.svdvals(t.newton_schulz(((U * S) @ Vh).float()).double())
        assert low - 0.05 <= values.min() and values.max() <= high + 0.05
    assert torch.equal(t.newton_schulz(1e4 * matrix(8, 8)).sign(), t.newton_schulz(matrix(8, 8)).sign())  # scale is divided out


def test_newton_schulz_of_zeros_one_row_and_fewer_steps():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert not t.newton_schulz(torch.zeros(3, 6, 4, dtype=dtype)).any()
    G = torch.zeros(2, 6, 8, dtype=torch.float64)
    G[0, 2] = torch.arange(1, 9)
    G[1] = matrix(6, 8)
    expected = G[0, 2] / G[0, 2].norm() * polynomial(torch.tensor(1.0, dtype=torch.float64))
    for result, error in ((t.newton_schulz(G), 1e-7), (t.newton_schulz(G.float()).double(), 0.12)):
        assert (result[0, 2] - expected).norm() < error * expected.norm()
        assert not result[0, [0, 1, 3, 4, 5]].any()  # rows of zeros beside another stay zero
        assert (result[1] - orthogonalised(G[1])).norm() < error * 2
    one = some_steps(G[1], 1)
    assert torch.allclose(t.newton_schulz(G[1], steps=1), one, atol=1e-12)
    assert torch.allclose(t.newton_schulz(G[1], steps=0), G[1] / (G[1].norm() + 1e-7), atol=1e-14)


def some_steps(G: torch.Tensor, steps: int) -> torch.Tensor:
    U, S, Vh = torch.linalg.svd(G, full_matrices=False)
    S = S / (G.norm() + 1e-7)
    for a, b, c in COEFFICIENTS[:steps]:
        S = a * S + b * S**3 + c * S**5
    return (U * S) @ Vh

# ---------------------------------------------------------------------------------------------------------------------
# Muon

SHAPES = [(4, 12, 12), (40, 10), (10, 40), (4, 12, 12), (6, 6), (40, 10), (10, 40)]


def muon_oracle(start: torch.Tensor, grads: list[torch.Tensor], lr: list[float], wd: float, mu: list[float],
                beta: float = 0.0, interpolated: bool = False) -> list[torch.Tensor]:
    """The float64 master weight after each step, from the text: nothing is split, stacked or rounded."""
    w, m, s, made = start.double(), torch.zeros_like(start.double()), torch.zeros_like(start.double()), []
    rows, cols = start.shape[-2:]
    for g, rate, momentum in zip(grads, lr, mu):
        g = g.double()
        m = momentum * m + (1 - momentum) * g
        v = orthogonalised(momentum * m + (1 - momentum) * g)
        s = beta * s + (1 - beta) * v
        update = v if beta == 0 else beta * s + (1 - beta) * v if interpolated else s
        w = w * (1 - rate * wd)
        w = w - rate * math.sqrt(max(1, rows / cols)) * update
        made.append(w)
    return made


def master(p: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The float32 number whose upper 16 bits are the parameter's and whose lower ones are the mantissa's, by integers."""
    high = p.detach().view(torch.int16).to(torch.int64) & 0xFFFF
    bits = high * 65536 + (low.view(torch.int16).to(torch.int64) & 0xFFFF)
    bits = torch.where(bits >= 2**31, bits - 2**32, bits)
    return bits.to(torch.int32).view(torch.float32)


def matrices(seed: int = 0) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(matrix(*shape, seed=seed + i).mul(0.1).bfloat16()) for i, shape in enumerate(SHAPES)]


def gradients(step: int) -> list[torch.Tensor]:
    return [matrix(*shape, seed=1000 * (step + 1) + i).bfloat16() for i, shape in enumerate(SHAPES)]


RATES, MOMENTA = [0.02, 0.02, 0.015, 0.01, 0.005], [0.85, 0.86, 0.9, 0.93, 0.95]


def five_muon_steps(params: list[torch.nn.Parameter], **options) -> Iterator[t.Muon]:
    muon = t.Muon([dict(params=params[:3], weight_decay=0.1), dict(params=params[3:], weight_decay=0.2)], lr=0.02,
                  weight_decay=0.1, momentum=0.85, **options)
    for step in range(5):
        for group in muon.param_groups:
            group["lr"], group["momentum"] = RATES[step], MOMENTA[step]
        for p, g in zip(params, gradients(step)):
            p.grad = g.clone()
        muon.step()
        yield muon


def decay(i: int) -> float:
    return 0.1 if i < 3 else 0.2


def test_five_muon_steps_equal_float64_with_the_halves_reassembled(monkeypatch):
    """With an exact orthogonalisation what is left is float32 arithmetic, so the halves must carry all of float32's digits."""
    monkeypatch.setattr(t, "newton_schulz", lambda G, steps=5: orthogonalised(G).float())
    params = matrices()
    start = [p.detach().clone() for p in params]
    expected = [muon_oracle(w, [gradients(s)[i] for s in range(5)], RATES, decay(i), MOMENTA) for i, w in enumerate(start)]
    for step, muon in enumerate(five_muon_steps(params)):
        for i, p in enumerate(params):
            state = muon.state[p]
            assert p.dtype == torch.bfloat16 and state["mantissa"].dtype == torch.uint16 and state["momentum"].dtype == torch.float32
            ours, theirs = master(p, state["mantissa"]).double(), expected[i][step]
            # 2^-24 an operation relative to the largest term; bf16 alone would be off by up to 2^-8
            assert (ours - theirs).abs().max() < 1e-6 * theirs.abs().max(), (step, i)
            assert (p.double() - theirs).abs().max() > 1e-5 * theirs.abs().max()  # so the low half matters
            assert torch.equal(t.join_halves(p.detach(), state["mantissa"]), master(p, state["mantissa"]))
    assert step == 4


def test_five_muon_steps_with_the_real_iteration_are_within_its_bf16():
    params = matrices()
    start = [p.detach().clone() for p in params]
    for muon in five_muon_steps(params):
        pass
    for i, p in enumerate(params):
        theirs = muon_oracle(start[i], [gradients(s)[i] for s in range(5)], RATES, decay(i), MOMENTA)[-1]
        moved = (theirs - start[i].double()).norm()
        assert (master(p, muon.state[p]["mantissa"]).double() - theirs).norm() < 0.03 * moved, i


def test_halves_split_and_reassemble_bit_for_bit():
    bits = torch.randint(-2**31, 2**31 - 1, (100_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 3.4e38, 1e-45, float("inf"), -float("inf")]).view(torch.int32)
    values = torch.cat([bits, special]).view(torch.float32)
    high, low = t.split_halves(values)
    assert high.dtype == torch.bfloat16 and low.dtype == torch.uint16
    assert torch.equal(t.join_halves(high, low).view(torch.int32), values.view(torch.int32))
    assert torch.equal(high.view(torch.int16).to(torch.int32), values.view(torch.int32) >> 16)  # cut off, not rounded


def test_muon_refuses_what_it_cannot_update():
    for bad in (torch.nn.Parameter(torch.zeros(4, 4)), torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))):
        with pytest.raises(ValueError, match="bf16 matrices"):
            t.Muon([bad], lr=0.1, weight_decay=0.0, momentum=0.9)
    with pytest.raises(ValueError):
        t.Muon([], lr=0.1, weight_decay=0.0, momentum=0.9)


def muon_on_rank(rank: int, world: int) -> dict:
    """Five steps where the ranks' gradients differ, but have exactly the mean that one rank gets."""
    import datetime
    import torch.distributed as dist
    if world > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=50))
    params = matrices()
    muon = t.Muon(params, lr=0.02, weight_decay=0.1, momentum=0.9, update_smoothing=0.2, rank=rank, world_size=world)
    for step in range(5):
        for p, g in zip(params, gradients(step)):
            p.grad = g.clone() if world == 1 else 2 * g if rank == 0 else torch.zeros_like(g)
        if step % 2:
            muon.start_reduction()
        muon.step()
    owned = [i for i, p in enumerate(params) if p in muon.state]
    state = {i: {k: v.clone() for k, v in muon.state[params[i]].items()} for i in owned}
    return dict(params=[p.detach() for p in params], state=state)


def test_two_gloo_ranks_equal_one_and_share_the_state():
    one, = call_on_ranks("test_train_optimizers:muon_on_rank", 1)
    two = call_on_ranks("test_train_optimizers:muon_on_rank", 2)
    for rank in two:
        assert all(torch.equal(a, b) for a, b in zip(rank["params"], one["params"], strict=True))
        for i, state in rank["state"].items():
            assert state.keys() == {"momentum", "mantissa", "smoothing"}
            assert all(torch.equal(state[k].view(torch.uint8), one["state"][i][k].view(torch.uint8)) for k in state)
    # sorted by shape, largest first (stable): matrix n of that list is rank n % 2's, who alone holds its state
    order = sorted(range(len(SHAPES)), key=lambda i: SHAPES[i], reverse=True)
    assert [sorted(r["state"]) for r in two] == [sorted(order[0::2]), sorted(order[1::2])]

# ---------------------------------------------------------------------------------------------------------------------
# Snoo


# start 0, the inner optimizer adds 1 before each call, lr 1/2, momentum 1/2, Nesterov. k = 2, worked by hand:
#   call 0: d = 0 - 1 = -1, buffer -1, step -1 - 1/2 = -1.5, slow 0.75;  call 1 counts;  call 2: fast 2.75, d = -2,
#   buffer -2.5, step -3.25, slow 2.375;  call 4: fast 4.375, d = -2, buffer -3.25, step -3.625, slow 4.1875.
HAND_WORKED = {
    1: [0.75, 1.625, 2.5625],  # d always -1; buffers -1, -1.5, -1.75; steps -1.5, -1.75, -1.875
    2: [0.75, 1.75, 2.375, 3.375, 4.1875],
    3: [0.75, 1.75, 2.75, 3.125, 4.125, 5.125, 5.8125],  # d -1, -3, -3; buffers -1, -3.5, -4.75; steps -1.5, -4.75, -5.375
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", HAND_WORKED)
def test_snoo_gives_the_hand_worked_numbers(k, dtype):
    """All numbers are exact in both types. The second parameter mirrors the first, so that neither is left out."""
    params = [torch.zeros(2, dtype=dtype), torch.zeros(3, 1, dtype=dtype)]
    snoo = t.Snoo(iter(params), lr=0.5, momentum=0.5, k=k)
    for call, expected in enumerate(HAND_WORKED[k]):
        params[0] += 1
        params[1] -= 1
        snoo.step()
        assert params[0].tolist() == [expected] * 2 and params[1].flatten().tolist() == [-expected] * 3, call
        assert snoo.state_dict()["current_step"] == call + 1
        if call % k == 0:
            assert snoo.state_dict()["outer_buf"][0].tolist() == [expected] * 2
    assert all(p.dtype == b.dtype for p, b in zip(params, snoo.state_dict()["outer_buf"]))


@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_snoo_equals_torch_sgd_on_the_slow_weights(dtype, error, nesterov):
    """The published class kept a torch.optim.SGD beside the slow weights: the same to a rounding or two an outer step (SGD
    rounds momentum * buffer before it adds; Snoo averages in one operation). float64 shows that the formula is the same."""
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Linear(5, 7, dtype=dtype)
    snoo = t.Snoo(module, lr=0.68, momentum=0.37, k=3, nesterov=nesterov)
    fast = [p.detach().clone() for p in module.parameters()]
    slow = [torch.nn.Parameter(p.clone()) for p in fast]
    sgd = torch.optim.SGD(slow, lr=0.68, momentum=0.37, nesterov=nesterov)
    for call in range(10):
        for p, mirror in zip(module.parameters(), fast):
            change = torch.randn(p.shape, generator=generator).to(dtype)
            p.data += change
            mirror += change
        snoo.step()
        if call % 3 == 0:
            for s, f in zip(slow, fast):
                s.grad = s.detach() - f
            sgd.step()
            fast = [s.detach().clone() for s in slow]
        for p, f in zip(module.parameters(), fast):
            assert (p.detach().double() - f.double()).abs().max() <= error * f.double().abs().max(), call
    assert all(p.grad is None for p in module.parameters())


def test_without_momentum_snoo_is_lookahead():
    """Lookahead (Zhang et al., 2019): every k inner steps slow += alpha (fast - slow), fast = slow; here from call 0 on."""
    p = torch.zeros(50, dtype=torch.float64)
    snoo, generator = t.Snoo([p], lr=0.3, momentum=0.0, k=4), torch.Generator().manual_seed(1)
    slow, fast = p.clone(), p.clone()
    for call in range(13):
        change = torch.randn(50, generator=generator, dtype=torch.float64)
        p += change
        fast = fast + change
        snoo.step()
        if call % 4 == 0:
            slow = slow + 0.3 * (fast - slow)
            fast = slow.clone()
        assert torch.allclose(p, fast, rtol=0, atol=1e-13), call


def test_with_k_1_and_without_nesterov_snoo_averages_the_updates():
    """Parameter after each call = its last value + EMA of the inner updates, beta = momentum, from 0."""
    p = torch.zeros(20, dtype=torch.float64)
    snoo, generator = t.Snoo([p], 0.25, 0.75, 1, nesterov=False), torch.Generator().manual_seed(2)
    expected, average = p.clone(), p.clone()
    for call in range(12):
        change = torch.randn(20, generator=generator, dtype=torch.float64)
        p += change
        snoo.step()
        average = 0.75 * average + 0.25 * change
        expected = expected + average
        assert torch.allclose(p, expected, rtol=0, atol=1e-13), call


def drifting(p: list[torch.Tensor], call: int) -> None:
    for i, x in enumerate(p):
        x += torch.randn(x.shape, generator=torch.Generator().manual_seed(100 * call + i)).to(x.dtype)


@pytest.mark.parametrize("calls", [0, 1, 4, 5, 6])  # k = 5: never, once, then k - 1, k, k + 1
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_snoo_state_round_trip(calls, dtype, tmp_path):
    first = [torch.ones(3, 4, dtype=dtype), torch.ones(5, dtype=dtype)]
    snoo = t.Snoo(first, 0.68, 0.37, 5)
    for call in range(calls):
        drifting(first, call)
        snoo.step()
    torch.save(snoo.state_dict(), tmp_path / "snoo.pt")
    second = [x.clone() for x in first]
    other = t.Snoo([torch.zeros_like(x) for x in second], 0.1, 0.9, 2, nesterov=False)
    other.params = second
    other.load_state_dict(torch.load(tmp_path / "snoo.pt", weights_only=True))
    assert other.state_dict().keys() == {"current_step", "lr", "momentum", "k", "outer_buf", "optimizer_state_dict"}
    for call in range(calls, calls + 12):
        drifting(first, call), drifting(second, call)
        snoo.step(), other.step()
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(first, second)), call


def test_snoo_refuses_states_that_do_not_fit_and_keeps_its_own():
    params = [torch.ones(3, 4), torch.ones(5), torch.ones(4, 3)]
    snoo = t.Snoo(params, 0.5, 0.5, 2)
    for call in range(3):
        drifting(params, call)
        snoo.step()
    good = copy.deepcopy(snoo.state_dict())
    slow = good["outer_buf"]
    momenta = copy.deepcopy(good["optimizer_state_dict"])
    momenta["average_move"][0] = torch.ones(3)
    broken = {
        "2 tensors for 3": dict(outer_buf=slow[:2]), "4 tensors for 3": dict(outer_buf=[*slow, slow[0]]),
        r"outer_buf\[0\]": dict(outer_buf=slow[::-1]), r"outer_buf\[1\]": dict(outer_buf=[slow[0], slow[1][:4], slow[2]]),
        r"outer_buf\[2\]": dict(outer_buf=[*slow[:2], slow[2].bfloat16()]), r"average_move\[0\]": dict(optimizer_state_dict=momenta),
    }
    for message, change in broken.items():
        changed = {**good, "current_step": 77, "lr": 9.0, **change}
        with pytest.raises(ValueError, match=message):
            snoo.load_state_dict(changed)
    others = {"current_step": 77, "lr": 9.0}
    for key in good:
        with pytest.raises(ValueError, match=key):
            snoo.load_state_dict({k: v for k, v in (good | others).items() if k != key})
    optimizer = good["optimizer_state_dict"]
    for key in optimizer:
        with pytest.raises(ValueError, match=key):
            snoo.load_state_dict(good | others | {"optimizer_state_dict": {k: v for k, v in optimizer.items() if k != key}})
    now = snoo.state_dict()
    assert (now["current_step"], now["lr"], now["momentum"], now["k"]) == (3, 0.5, 0.5, 2)
    assert all(torch.equal(a, b) for a, b in zip(now["outer_buf"], slow))


@pytest.mark.parametrize("lr, momentum, k", [
    (0, 0.5, 1), (-1, 0.5, 1), (math.nan, 0.5, 1), (0.5, 1.0, 1), (0.5, -0.1, 1), (0.5, 0.5, 0), (0.5, 0.5, 1.5)])
def test_snoo_refuses_settings_outside_its_rules(lr, momentum, k):
    with pytest.raises(ValueError, match="Snoo needs"):
        t.Snoo([torch.zeros(1)], lr, momentum, k)
    with pytest.raises(ValueError, match="at least one"):
        t.Snoo([], 0.5, 0.5, 1)


def test_snoo_rewrites_a_muon_matrix_by_at_most_its_high_half():
    """The master = high|low: after an outer step the high half is Snoo's, the low half is Muon's, untouched."""
    p = torch.nn.Parameter(matrix(6, 6).mul(0.1).bfloat16())
    muon = t.Muon([p], lr=0.02, weight_decay=0.0, momentum=0.9)
    snoo = t.Snoo([p], 0.5, 0.5, 1)
    for step in range(3):
        p.grad = matrix(6, 6, seed=step).bfloat16()
        muon.step()
        low = muon.state[p]["mantissa"].clone()
        snoo.step()
        assert low.to(torch.int32).any() and torch.equal(muon.state[p]["mantissa"].view(torch.int16), low.view(torch.int16))
        assert torch.equal(p.detach(), snoo.state_dict()["outer_buf"][0])
        assert ((master(p, low).double() - p.double()).abs() <= 2.0**-7 * p.double().abs() + 1e-30).all()  # one bf16 ulp

# ---------------------------------------------------------------------------------------------------------------------
# Groups and schedules


def test_groups_cover_every_parameter_once_with_the_designs_settings():
    args = t.Hyperparameters(vocab_size=257, eot_token=256, num_heads=1, head_dim=16, model_dim=16, compile=False)
    model = t.GPT(257, 16, 1, 16, 128, head_dim=16, eot_token=256)
    adam, muon, snoo = t.build_optimizers(model, args)
    groups = [*adam.param_groups, *muon.param_groups]
    covered = [id(p) for g in groups for p in g["params"]]
    assert sorted(covered) == sorted(map(id, model.parameters())) and len(set(covered)) == len(covered)
    assert [id(p) for p in snoo.params] == [id(p) for p in model.parameters()]
    of = {id(p): g for g in groups for p in g["params"]}
    for name, p in model.named_parameters():
        group = of[id(p)]
        if name in ("lm_head_w", "scalars") or "embed" in name:
            lr = {"lm_head_w": 1 / 320, "scalars": 0.015}.get(name, 0.3)
            assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (lr, (0.8, 0.95), 1e-10, 0), name
        else:
            decay = 0.02 if name.endswith(("fc_w", "proj_w")) else 0.01
            assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.027, decay, 0.85), name
    assert (snoo.lr, snoo.momentum, snoo.k, snoo.nesterov) == (0.68, 0.37, 28, True)
    assert t.build_optimizers(model, t.Hyperparameters(**{**vars(args), "snoo": False}))[2] is None


def test_learning_rate_scale_at_ends_and_joint():
    args = t.Hyperparameters()
    joint = 1692  # 0.3 * 5640
    exact = {0: 1, joint - 1: 1, joint: 1, joint + 1: Fraction(3947, 5640) / Fraction(7, 10), 3666: 0.5, 5640: 0}
    expected = {s: float(v) for s, v in exact.items()}
    assert {s: t.learning_rate_scale(s, args) for s in exact} == pytest.approx(expected, abs=1e-12)
    ending = t.Hyperparameters(final_lr_scale=0.01, num_iterations=5610)
    assert t.learning_rate_scale(5610, ending) == pytest.approx(0.01, abs=1e-15)
    assert t.learning_rate_scale(1683, ending) == pytest.approx(1, abs=1e-12)
    assert t.learning_rate_scale(5610 - 561, ending) == pytest.approx(1 / 7 * 0.99 + 0.01, abs=1e-12)
    constant = t.Hyperparameters(cooldown_frac=0.0)
    assert {t.learning_rate_scale(s, constant) for s in (0, 1, 5639)} == {1.0}
    values = [t.learning_rate_scale(s, args) for s in range(5641)]
    assert all(a >= b for a, b in zip(values, values[1:]))


def test_momentum_ramp_at_ends_and_joint():
    args = t.Hyperparameters()
    expected = {0: 0.85, 1: 0.85 + 0.1 / 300, 150: 0.9, 299: 0.95 - 0.1 / 300, 300: 0.95, 301: 0.95, 5640: 0.95}
    assert {s: t.muon_momentum(s, args) for s in expected} == pytest.approx(expected, abs=1e-12)
    assert t.muon_momentum(0, t.Hyperparameters(muon_momentum_steps=0)) == 0.95


def test_window_is_the_cubic_rounded_up_in_exact_arithmetic():
    args, last = t.Hyperparameters(), 0
    for step in range(5641):
        x = Fraction(step, 5640)
        blocks = max(math.ceil(3456 * (4 * x**3 - 6 * x**2 + 3 * x) / 128), 1)
        assert t.window_blocks(step, args) == blocks >= last, step
        last = blocks
    assert (t.window_blocks(0, args), t.window_blocks(1, args), last) == (1, 1, 27)


def test_outer_steps_of_the_record():
    """5640 = 201 * 28 + 12: outer steps after inner steps 1, 29, ..., 5629; eleven trail."""
    for n, k in ((5640, 28), (1, 28), (28, 28), (29, 28), (30, 28), (7, 1), (7, 3)):
        fired = [call for call in range(n) if call % k == 0]
        assert t.outer_steps(t.Hyperparameters(num_iterations=n, snoo_k=k)) == (len(fired), n - 1 - fired[-1])
    assert t.outer_steps(t.Hyperparameters()) == (202, 11)
