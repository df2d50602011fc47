"""The model against a restatement of DESIGN: float64, plain loops, the mask from its definition, nothing of the script's.

What is compared: loss and every gradient; then, position by position, what may see what.
"""
from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

import train_gpt_medium as t

LAYERS, EOT = 16, 3
WIDTH, HEADS, HEAD_DIM, VOCAB = 16, 2, 8, 70
LONG_LAYERS = (0, 4, 11, 15)
VALUE_EMBED = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 11: 0, 12: 1, 13: 2, 14: 3, 15: 4}

# ---------------------------------------------------------------------------------------------------------------------
# The oracle


def allowed_pairs(tokens: list[int], window: int, eot: int) -> np.ndarray:
    """(T, T) bool: which key k each query q sees with a window of `window` blocks, straight from the rules' text."""
    docs, count = [], 0
    for token in tokens:
        count += token == eot
        docs.append(count)
    size = 128
    low, high = docs[::size], docs[size - 1::size]
    seen = np.zeros((len(tokens), len(tokens)), dtype=bool)
    for i in range(len(low)):
        partial, full = [], []
        for j in range(i, -1, -1):  # from the nearest block backwards
            any_ = j <= i and low[i] <= high[j]
            all_ = j < i and low[i] == high[j] and high[i] == low[j]
            if all_:
                full.append(j)
            elif any_:
                partial.append(j)
        kept_partial = partial[:max(max(window - len(full), 1), 0)]
        kept_full = full[:max(window - 1, 0)]
        for j in kept_full:
            seen[i * size:(i + 1) * size, j * size:(j + 1) * size] = True
        for j in kept_partial:
            for q in range(i * size, (i + 1) * size):
                for k in range(j * size, (j + 1) * size):
                    if k <= q and docs[q] == docs[k]:
                        seen[q, k] = True
    return seen


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()


def rotate_by_hand(x: torch.Tensor) -> torch.Tensor:
    """(T, head_dim): the pair (i, i + head_dim / 2) turned by position * frequency_i, the last quarter of pairs not at all."""
    quarter, half = x.size(1) // 4, x.size(1) // 2
    columns: list[torch.Tensor] = [x[:, 0]] * x.size(1)
    position = torch.arange(x.size(0), dtype=torch.float64)
    for i in range(half):
        frequency = (1 / 1024) ** (i / (quarter - 1) if quarter > 1 else 0.0) if i < quarter else 0.0
        c, s = torch.cos(position * frequency), torch.sin(position * frequency)
        columns[i] = x[:, i] * c + x[:, half + i] * s
        columns[half + i] = -x[:, i] * s + x[:, half + i] * c
    return torch.stack(columns, 1)


def oracle_loss(w: dict[str, torch.Tensor], tokens: list[int], targets: list[int], window: int, heads: int = HEADS,
                head_dim: int = HEAD_DIM, eot: int = EOT, backout: bool = False, smear: bool = False) -> torch.Tensor:
    ids, size = torch.tensor(tokens), len(tokens)
    scalars = w["scalars"]
    skip, extra = scalars[:16], scalars[16 * 6:]
    block = [scalars[16 + 3 * i: 16 + 3 * i + 3] for i in range(16)]
    attn = [scalars[64 + 2 * i: 64 + 2 * i + 2] for i in range(16)]
    seen = {True: torch.from_numpy(allowed_pairs(tokens, window, eot)),
            False: torch.from_numpy(allowed_pairs(tokens, window // 2, eot))}
    x00, x01 = rms(w["embed1"][ids]), rms(w["embed2"][ids])
    x, out = x00, []
    for i in range(16):
        if i in (9, 10, 11):
            source = {9: 6, 10: 4, 11: 2}[i]
            x = x + skip[source] * out[source]
        x = block[i][0] * x + block[i][1] * x00 + block[i][2] * x01
        if i != 7:
            wq, wk, wv, wo = w[f"qkvo.{i}"]
            q, k, v = x @ wq.T, x @ wk.T, x @ wv.T
            parts = []
            for h in range(heads):
                span = slice(h * head_dim, (h + 1) * head_dim)
                qh, kh, vh = rotate_by_hand(rms(q[:, span])), rotate_by_hand(rms(k[:, span])), rms(v[:, span])
                vh = attn[i][0] * vh
                if i in VALUE_EMBED:
                    vh = vh + attn[i][1] * w[f"value_embed.{VALUE_EMBED[i]}"][ids][:, span]
                score = (0.12 * qh @ kh.T).exp() * seen[i in LONG_LAYERS]
                parts.append(score / score.sum(1, keepdim=True) @ vh)
            x = x + torch.cat(parts, 1) @ wo.T
        hidden = rms(x) @ w[f"fc.{i}"].T
        x = x + (hidden * (hidden > 0)).pow(2) @ w[f"proj.{i}"].T
        out.append(x)
    final = rms(x)
    if backout:
        final = extra[0] * final + extra[1] * rms(out[11])
    if smear:
        rows = [final[0]] + [final[p] + extra[-1] * final[p - 1] for p in range(1, size)]
        final = torch.stack(rows)
    z = final @ w["head"].T
    z = 15 * z / (z * z + 225).sqrt()
    return torch.stack([z[p].exp().sum().log() - z[p, targets[p]] for p in range(size)]).mean()


def named_weights(model: t.GPT) -> dict[str, torch.Tensor]:
    """The model's parameters under the names of the oracle."""
    found = {"scalars": model.scalars, "head": model.lm_head_w, "embed1": model.embed1.weight, "embed2": model.embed2.weight}
    found |= {f"value_embed.{i}": e.weight for i, e in enumerate(model.value_embeds)}
    found |= {f"qkvo.{i}": model.attentions[str(i)].qkvo_w for i in range(16) if i != 7}
    found |= {f"fc.{i}": m.fc_w for i, m in enumerate(model.mlps)} | {f"proj.{i}": m.proj_w for i, m in enumerate(model.mlps)}
    assert sorted(map(id, found.values())) == sorted(map(id, model.parameters()))
    return found


def random_model(seed: int, max_seq_len: int = 1024, width: int = WIDTH, heads: int = HEADS, vocab: int = VOCAB,
                 **options) -> t.GPT:
    """A model whose zeros are random too: head, projections, and every scalar near what it starts at."""
    torch.manual_seed(seed)
    model = t.GPT(vocab, LAYERS, heads, width, max_seq_len, head_dim=width // heads, eot_token=EOT, **options)
    with torch.no_grad():
        for a in model.attentions.values():
            a.qkvo_w.normal_(0, width**-0.5)
        for m in model.mlps:
            m.proj_w.normal_(0, 0.3 * width**-0.5)
        model.lm_head_w.normal_(0, 1.0)
        model.scalars.add_(torch.empty_like(model.scalars).uniform_(-0.4, 0.4))
    return model


def random_tokens(seed: int, length: int, eots: list[int], vocab: int = VOCAB) -> list[int]:
    tokens = torch.randint(EOT + 1, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    for position in eots:
        tokens[position] = EOT
    return tokens


def call(model: t.GPT, tokens: list[int], targets: list[int], window: int) -> torch.Tensor:
    return model(torch.tensor(tokens, dtype=torch.int32), torch.tensor(targets), torch.tensor(window, dtype=torch.int32))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())

# ---------------------------------------------------------------------------------------------------------------------
# Loss and gradients


@pytest.mark.parametrize("length, eots, window, options", [
    (768, [0, 300, 301], 4, {}),  # long rows cut at 4 blocks, short ones at 2
    (640, [128, 383, 384], 3, dict(backout=True, smear=True)),  # documents that begin on a block's edges
    (640, [], 27, dict(head_chunks=4)),  # no document mark at all, a window longer than the sequence
    (256, [5], 1, dict(smear=True)),  # the first window of a run: short masks of 0 blocks
])
def test_float64_model_equals_the_restatement_in_loss_and_every_gradient(length, eots, window, options):
    model = random_model(length + window, length, **options).double()
    tokens, targets = random_tokens(window, length, eots), random_tokens(99, length, [7])
    weights = {name: p.detach().clone().requires_grad_() for name, p in named_weights(model).items()}
    extensions = {name: value for name, value in options.items() if name in ("backout", "smear")}
    expected = oracle_loss(weights, tokens, targets, window, **extensions)
    expected.backward()
    loss = call(model, tokens, targets, window)
    loss.backward()
    loss, expected = loss.detach(), expected.detach()
    assert loss.dtype == torch.float64 and loss.shape == ()
    assert abs(float(loss) - float(expected)) <= 1e-9 * float(expected)
    for name, p in named_weights(model).items():
        assert weights[name].grad.norm() > 0, name
        assert p.grad.dtype == torch.float64
        assert relative(p.grad, weights[name].grad) < 1e-9, name
    # the scalars one by one: those that nothing reads have no gradient, the others agree
    dead = {i for i in range(16) if i not in (2, 4, 6)} | {64 + 14, 64 + 15}
    dead |= {64 + 2 * i + 1 for i in range(16) if i not in VALUE_EMBED}
    for i, (ours, theirs) in enumerate(zip(model.scalars.grad.tolist(), weights["scalars"].grad.tolist())):
        assert (ours == theirs == 0) if i in dead else abs(ours - theirs) <= 1e-9 * float(weights["scalars"].grad.norm()), i
        assert i in dead or theirs != 0, i
    model.eval()
    with torch.no_grad():
        assert abs(float(call(model, tokens, targets, window)) - float(expected)) <= 1e-9 * float(expected)


def test_bf16_model_is_within_rounding_of_its_float64_copy():
    """The record's arithmetic: bf16 storage and activations. The same weights, exactly, in float64, are the oracle."""
    model = random_model(3, 512, width=64, heads=1)
    tokens, targets = random_tokens(1, 512, [100, 256]), random_tokens(2, 512, [])
    exact = copy.deepcopy(model).double()
    loss, expected = call(model, tokens, targets, 3), call(exact, tokens, targets, 3)
    loss.backward(), expected.backward()
    loss, expected = loss.detach(), expected.detach()
    assert loss.dtype == torch.float32
    assert abs(float(loss) - float(expected)) < 1e-3 * float(expected)
    for (name, p), q in zip(named_weights(model).items(), named_weights(exact).values()):
        assert p.grad.dtype == p.dtype == (torch.float32 if name in ("head", "scalars") else torch.bfloat16), name
        assert relative(p.grad, q.grad) < 0.06, name  # 16 blocks of 2^-9 roundings each; a wrong formula is off by 1
    model.eval()
    with torch.no_grad():
        assert abs(float(call(model, tokens, targets, 3)) - float(loss)) < 1e-3


def test_first_loss_at_full_vocabulary_is_the_published_one():
    model = t.GPT(50257, 16, 2, 16, 128, head_dim=8)
    tokens = torch.randint(50257, (129,))
    for training in (True, False):
        model.train(training)
        loss = model(tokens[:-1].to(torch.int32), tokens[1:], torch.tensor(1, dtype=torch.int32)).detach()
        assert f"{float(loss):.6f}" in ("10.825840", "10.825839", "10.825841")  # 10.825840 to float32 rounding
        assert abs(float(loss) - math.log(50304)) < 2e-6


def test_fresh_parameters_are_the_designs():
    torch.manual_seed(0)
    model = t.GPT(257, 16, 2, 128, 128, head_dim=64, eot_token=256)
    weights = named_weights(model)
    assert weights["scalars"].tolist() == [1.0] * 16 + [1.0, 0.0, 0.0] * 16 + [0.5] * 32
    assert weights["head"].shape == (384, 128) and weights["head"].dtype == torch.float32 and not weights["head"].any()
    bound = math.sqrt(3) * 0.5 * 128**-0.5
    for name, p in weights.items():
        assert p.requires_grad and (p.dtype == torch.bfloat16 or name in ("head", "scalars"))
        if name.startswith(("embed", "value_embed")):
            assert p.shape == (257, 128) and abs(float(p.float().std()) - 1) < 0.02 and abs(float(p.float().mean())) < 0.03
        if name.startswith(("qkvo", "fc")):
            uniform = (p[:3] if name.startswith("qkvo") else p).float()
            assert p.shape == ((4, 128, 128) if name.startswith("qkvo") else (512, 128))
            assert 0.98 * bound < float(uniform.abs().max()) < 1.005 * bound  # uniform: it reaches the bound, and ends there
            assert abs(float(uniform.std()) / (0.5 * 128**-0.5) - 1) < 0.02
            assert name.startswith("fc") or not p[3].any()
        if name.startswith("proj"):
            assert p.shape == (128, 512) and not p.any()
    assert len({p.float().flatten()[:50].sum().item() for n, p in weights.items() if "embed" in n}) == 7  # drawn, not shared


def test_double_leaves_no_cast_down():
    """Weights that differ beyond float32's digits make losses that do: nothing in the way is rounded to float32."""
    model = random_model(5, 128).double()
    tokens, targets = random_tokens(1, 128, []), random_tokens(2, 128, [])
    losses = []
    for name in ("head", "scalars", "qkvo.3", "fc.2", "value_embed.1"):
        nudged = copy.deepcopy(model)
        with torch.no_grad():
            named_weights(nudged)[name].mul_(1 + 1e-11)
            losses.append(float(call(nudged.eval(), tokens, targets, 2)) - float(call(model.eval(), tokens, targets, 2)))
    assert all(0 < abs(change) < 1e-8 for change in losses), losses

# ---------------------------------------------------------------------------------------------------------------------
# What may see what


def hidden_states(model: t.GPT, tokens: list[int], window: int) -> torch.Tensor:
    """The (T, dim) states that the head reads, through the public forward: with a zero head the gradient of head row r is
    sum over positions of (1/V - [target == r]) x / T, so that distinct targets give each position's x."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head_w.zero_()
    size, rows = len(tokens), model.lm_head_w.size(0)
    assert size < rows
    call(model, tokens, list(range(size)), window).backward()
    grad = model.lm_head_w.grad
    return (grad[rows - 1] - grad[:size]) * size


@pytest.fixture(scope="module")
def wide_vocabulary() -> t.GPT:
    return random_model(11, 640, vocab=700).double()


@pytest.mark.parametrize("where", [0, 127, 128, 300, 511])
def test_a_token_changes_nothing_before_it_and_nothing_in_other_documents(wide_vocabulary, where):
    tokens = random_tokens(4, 512, [130, 256, 400], vocab=700)
    document_end = min(e for e in (130, 256, 400, 512) if e > where)
    other = list(tokens)
    other[where] = 600 if tokens[where] != 600 else 601
    change = (hidden_states(wide_vocabulary, other, 27) - hidden_states(wide_vocabulary, tokens, 27)).abs().amax(1)
    assert change[:where].numel() == 0 or change[:where].max() < 1e-12
    assert change[document_end:].numel() == 0 or change[document_end:].max() < 1e-12
    assert change[where] > 1e-3
    assert where + 1 == document_end or (change[where + 1:document_end] > 1e-9).all()


def test_the_window_ends_what_a_token_can_reach(wide_vocabulary):
    """One document, one block of window: with w = 1 the long masks keep the row's own block, the short ones too."""
    tokens = random_tokens(4, 512, [], vocab=700)
    other = [*tokens[:5], 650, *tokens[6:]]
    change = (hidden_states(wide_vocabulary, other, 1) - hidden_states(wide_vocabulary, tokens, 1)).abs().amax(1)
    assert (change[6:128] > 1e-9).all() and change[128:].max() < 1e-12
    further = (hidden_states(wide_vocabulary, other, 4) - hidden_states(wide_vocabulary, tokens, 4)).abs().amax(1)
    assert (further[128:512] > 1e-9).all()


def expected_lists(docs: list[int], window: int | None) -> tuple[list[list[int]], list[list[int]]]:
    """Per row the partial and full key blocks, nearest first, cut to the window."""
    low, high, partials, fulls = docs[::128], docs[127::128], [], []
    for i in range(len(low)):
        some = [j for j in range(len(low)) if j <= i and low[i] <= high[j]]
        full = [j for j in reversed(some) if j < i and low[i] == high[j] and high[i] == low[j]]
        partial = [j for j in reversed(some) if j not in full]
        if window is not None:
            partial, full = partial[:max(window - len(full), 1)], full[:max(window - 1, 0)]
        partials.append(partial), fulls.append(full)
    return partials, fulls


def layouts() -> list[list[int]]:
    """20 rows of document counts: none, every token, on the edges, one block long, and random ones."""
    random, made = np.random.default_rng(0), []
    for n in range(20):
        blocks = 28 if n == 0 else int(random.integers(3, 9))
        starts = {0: [0, 1000, 2000], 1: [], 2: range(0, blocks * 128, 128), 3: range(0, blocks * 128),
                  4: [127, 128, 255, 256], 5: [0, 256], 6: [blocks * 128 - 1]}.get(n)
        if starts is None:
            starts = random.integers(0, blocks * 128, int(random.integers(1, 7))).tolist()
            starts += (random.integers(1, blocks, 2) * 128).tolist() if n % 2 else []
        marks = np.zeros(blocks * 128, dtype=int)
        marks[[s for s in starts if s < len(marks)]] = 1
        made.append(np.cumsum(marks).tolist())
    return made


def test_block_lists_and_dense_mask_equal_brute_force_for_every_window():
    made = layouts()
    assert len(made) == 20
    for n, docs in enumerate(made):
        tensor = torch.tensor(docs, dtype=torch.int32)
        partial_num, partial_idx, full_num, full_idx = t.block_lists(tensor)
        for window in range(28):
            blocks = len(docs) // 128
            kept_partial, kept_full = t.windowed(partial_num, full_num, torch.tensor(window, dtype=torch.int32))
            partials, fulls = expected_lists(docs, window)
            assert [partial_idx[i, :kept_partial[i]].tolist() for i in range(blocks)] == partials, (n, window)
            assert [full_idx[i, :kept_full[i]].tolist() for i in range(blocks)] == fulls, (n, window)
            if blocks > 10 and window not in (1, 2, 13, 27):
                continue
            expected = np.zeros((len(docs), len(docs)), dtype=bool)
            d = np.array(docs)
            for i in range(blocks):
                rows = slice(i * 128, i * 128 + 128)
                for j in fulls[i]:
                    expected[rows, j * 128: j * 128 + 128] = True
                for j in partials[i]:
                    columns = slice(j * 128, j * 128 + 128)
                    q, k = np.arange(len(d))[rows, None], np.arange(len(d))[None, columns]
                    expected[rows, columns] = (k <= q) & (d[rows, None] == d[None, columns])
            assert np.array_equal(t.dense_mask(tensor, torch.tensor(window, dtype=torch.int32)).numpy(), expected), (n, window)
        unwindowed = expected_lists(docs, None)
        assert [partial_idx[i, :c].tolist() for i, c in enumerate(partial_num)] == unwindowed[0]
        assert [full_idx[i, :c].tolist() for i, c in enumerate(full_num)] == unwindowed[1]


def test_attention_masks_are_long_and_half_as_long():
    docs = torch.tensor(layouts()[1], dtype=torch.int32)
    for window in (1, 2, 3, 5):
        long, short = t.attention_masks(docs, torch.tensor(window, dtype=torch.int32))
        for mask, w in ((long, window), (short, window // 2)):
            reach = [int((mask[row].nonzero().min()) // 128) for row in range(127, len(docs), 128)]
            assert reach == [max(i - max(w - 1, 0), 0) for i in range(len(reach))], (window, w)

# ---------------------------------------------------------------------------------------------------------------------
# Compilation


def test_compiles_whole_and_only_once_while_the_window_grows():
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter
    torch._dynamo.reset()
    counter = CompileCounter()
    model = random_model(2, 256)
    tokens, targets = random_tokens(0, 256, [9]), random_tokens(1, 256, [])
    forward = torch.compile(model, dynamic=False, fullgraph=True, backend=counter)
    graphs = []
    for window in (1, 2, 3, 27):
        loss = forward(torch.tensor(tokens, dtype=torch.int32), torch.tensor(targets), torch.tensor(window, dtype=torch.int32))
        loss.backward()
        graphs.append(counter.frame_count)
        assert abs(float(loss.detach()) - float(call(model, tokens, targets, window).detach())) < 1e-3
    assert graphs == [1] * 4
    torch._dynamo.reset()
