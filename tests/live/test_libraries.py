"""Models of other libraries, as their users build them, small and random."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import rankscope
from rankscope.errors import WatchError
from rankscope.monitor import Monitor
from tests.live import reference
from tests.live.families import FAMILIES, GPT2, HEADS, LAYERS, WIDTH, WORDS, checks, seen, tiny
from tests.live.gpt import GPT, words
from tests.raising import raises
from tests.timm import timm

IDS = words()
REAL = torch.ones(2, 6, dtype=torch.bool)
REAL[1, 4:] = False
ALL = torch.ones(2, 6, dtype=torch.bool)


def by_hand(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """softmax(q k' / sqrt(d)) of `[batch, token, head * d]`."""
    q, k = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(~visible, -torch.inf).softmax(-1)


class TestXTransformers:
    """Each of its layers is a list of norms, attention or feed-forward, and the skip: a layer each."""

    def model(self, **options: Any) -> Any:
        library = pytest.importorskip("x_transformers")
        torch.manual_seed(0)
        layers = library.Decoder(dim=WIDTH, depth=2, heads=HEADS, attn_dim_head=4, **options)
        return library.TransformerWrapper(num_tokens=WORDS, max_seq_len=16, attn_layers=layers).double().eval()

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize(("flash", "pre_norm"), [(True, True), (True, False), (False, True)])
    def test_layers_and_attention(self, flash: bool, pre_norm: bool) -> None:
        """Without flash its softmax is written out, and in float32."""
        close = 1e-12 if flash else 1e-6
        model = self.model(attn_flash=flash, pre_norm=pre_norm)
        with torch.no_grad():
            plain, inside = model(IDS, mask=REAL, return_intermediates=True)
            with rankscope.watch(model, ["mu", "dobrushin", "head_mu"]) as w:
                watched = model(IDS, mask=REAL)
        assert torch.equal(watched, plain)
        profile = w.profile()
        states = inside.layer_hiddens
        assert len(states) == 5
        expected = torch.stack([reference.mu(x, REAL) for x in states], 1)
        torch.testing.assert_close(profile.curve("mu"), expected, rtol=1e-12, atol=1e-12)
        assert "Layers without attention of their tokens to themselves: 2, 4." in w.notes
        causal = torch.ones(6, 6, dtype=torch.bool).tril() & REAL[:, None, None]
        for layer in (1, 3):
            norm, attention = (model.attn_layers.layers[layer - 1][0][0], model.attn_layers.layers[layer - 1][1])
            with torch.no_grad():
                x = norm(states[layer - 1]) if pre_norm else states[layer - 1]
                P = by_hand(attention.to_q(x), attention.to_k(x), causal)
            got = profile.curve("dobrushin")[:, layer]
            torch.testing.assert_close(got, reference.dobrushin(P, REAL), rtol=close, atol=close)
        assert any("in float32 inside" in note for note in w.notes) is not flash

    def test_its_default_attention_is_the_weights_that_it_hands_out(self) -> None:
        model = self.model(attn_kv_heads=1)
        with torch.no_grad():
            _, inside = model(IDS, mask=REAL, return_intermediates=True)
            with rankscope.watch(model, "head_mu", keep="attention") as w:
                model(IDS, mask=REAL)
        for layer, each in zip((1, 3), inside.attn_intermediates, strict=True):
            assert torch.equal(w.attention[layer][0], each.post_softmax_attn)

    @pytest.mark.parametrize(
        ("option", "subject"),
        [
            ("attn_post_talking_heads", "pattern"),
            ("attn_head_learned_sink", "attention"),
            ("attn_sigmoid", "attention"),
            ("attn_hard", "pattern"),
        ],
    )
    def test_attention_of_other_kinds_is_refused(self, option: str, subject: str) -> None:
        model = self.model(**{option: True})
        with raises(WatchError, subject=subject):
            seen(model, "entropy", IDS)

    def test_generation(self) -> None:
        library = pytest.importorskip("x_transformers")
        model = library.AutoregressiveWrapper(self.model(attn_flash=True))
        with rankscope.watch(model, ["mu", "entropy"]) as w:
            model.generate(IDS, 4)
        assert checks(w)["calls_left_out"] == {"it had a single token": 3}
        prompt = seen(model.net, ["mu", "entropy"], IDS)
        for each in ("mu", "entropy"):
            torch.testing.assert_close(
                w.profile().curve(each), prompt.profile().curve(each), rtol=1e-6, atol=1e-6, equal_nan=True
            )

    def test_both_sides_and_cross_attention_of_as_many_tokens(self) -> None:
        library = pytest.importorskip("x_transformers")
        sizes = {"num_tokens": WORDS, "depth": 2, "heads": HEADS, "max_seq_len": 16, "attn_flash": True}
        sides = {f"{side}_{name}": size for side in ("enc", "dec") for name, size in sizes.items()}
        model = library.XTransformer(dim=WIDTH, **sides, enc_attn_dim_head=4, dec_attn_dim_head=4).eval()
        assert set(rankscope.watch(model).stacks) == {"encoder", "decoder"}
        with torch.no_grad(), rankscope.watch(model, "entropy", blocks="encoder") as w:
            model(IDS, words(2, 7))
        assert "Layers without attention of their tokens to themselves: 2, 4." in w.notes
        with torch.no_grad(), rankscope.watch(model, "entropy", blocks="decoder") as w:
            model(IDS, words(2, 7))  # of which the last is only foretold
        assert "Layers without attention of their tokens to themselves: 2, 3, 5, 6." in w.notes
        assert any("cross-attention, windows) was left out: 2 calls" in note for note in w.notes)


class TestTimm:
    def test_vision_transformer(self) -> None:
        library = timm()
        torch.manual_seed(0)
        sizes = {"img_size": 16, "patch_size": 4, "embed_dim": WIDTH, "depth": LAYERS, "num_heads": HEADS}
        model = library.models.vision_transformer.VisionTransformer(**sizes).double().eval()
        X = torch.randn(2, 3, 16, 16, dtype=torch.float64)
        with torch.no_grad():
            plain = model(X)
            with rankscope.watch(model, ["mu", "dobrushin", "head_mu"], keep="states") as w:
                assert torch.equal(model(X), plain)
        real = torch.ones(2, 17, dtype=torch.bool)
        for layer, block in enumerate(model.blocks, start=1):
            x = w.states[layer - 1][0]
            with torch.no_grad():
                q, k, v = block.attn.qkv(block.norm1(x)).chunk(3, -1)
                P = by_hand(q, k, torch.ones(17, 17).bool())
                spoken = P @ v.unflatten(-1, (HEADS, -1)).transpose(1, 2)
                W = block.attn.proj.weight.T.unflatten(0, (HEADS, -1))
            profile = w.profile()
            torch.testing.assert_close(profile.curve("dobrushin")[:, layer], reference.dobrushin(P, real))
            added = [reference.mu(spoken[:, head] @ W[head], real) for head in range(HEADS)]
            torch.testing.assert_close(profile.curve("head_mu")[:, layer], torch.stack(added, 1))

    def test_swin_has_its_tokens_in_rows_and_columns_and_attends_in_windows(self) -> None:
        library = timm()
        sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2)}
        model = library.models.swin_transformer.SwinTransformer(**sizes, window_size=4).eval()
        X = torch.randn(2, 3, 32, 32)
        with raises(WatchError, subject="blocks"):
            seen(model, "mu", X)
        with torch.no_grad(), rankscope.watch(model, "mu", blocks="layers.0.blocks", keep="states") as w:
            model(X)
        assert w.states[0][0].shape == (2, 64, 8)
        for part in model.modules():
            if hasattr(part, "fused_attn"):
                part.fused_attn = True  # off as it comes: then its softmax is written out
        with raises(WatchError, subject="attention"), rankscope.watch(model, "entropy", blocks="layers.0.blocks"):
            model(X)


@pytest.mark.slow
def test_sentence_transformers(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = hf.BertTokenizer(vocab={name: k for k, name in enumerate(names)})
    bert = FAMILIES["bert"].model()
    for each in (tokenizer, bert):
        each.save_pretrained(tmp_path)
    parts = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    modules = [parts.Transformer(str(tmp_path)), parts.Pooling(WIDTH)]
    model = library.SentenceTransformer(modules=modules, device="cpu").double()
    texts = ["a b c d", "e f"]
    with rankscope.watch(model, ["mu", "entropy", "head_mu"]) as w:
        model.encode(texts)
    given = tokenizer(texts, padding=True, return_tensors="pt")
    expected = seen(bert, ["mu", "entropy", "head_mu"], **given)
    for each in ("mu", "entropy", "head_mu"):
        torch.testing.assert_close(
            w.profile().curve(each), expected.profile().curve(each), rtol=1e-12, atol=1e-12, equal_nan=True
        )
    assert checks(w)["padded_tokens"] == 2


class TestAccelerate:
    """Models that it has dispatched: hooks of its own around every part."""

    METRICS = ("mu", "entropy", "head_mu")

    def model(self, **more: Any) -> Any:
        return tiny(hf.GPT2LMHeadModel, **GPT2, bos_token_id=1, eos_token_id=2)(**more).double().eval()

    def same(self, model: Any, expected: Any, metrics: tuple[str, ...] = METRICS) -> None:
        found = seen(model, list(metrics), IDS, attention_mask=REAL.long())
        for each in metrics:
            torch.testing.assert_close(
                found.profile().curve(each), expected.profile().curve(each), rtol=1e-12, atol=1e-12, equal_nan=True
            )

    def test_by_a_device_map(self, tmp_path: Path) -> None:
        pytest.importorskip("accelerate")
        model = self.model()
        model.save_pretrained(tmp_path)
        expected = seen(model, list(self.METRICS), IDS, attention_mask=REAL.long())
        mapped = hf.GPT2LMHeadModel.from_pretrained(tmp_path, device_map="cpu", dtype=torch.float64).eval()
        self.same(mapped, expected)
        assert rankscope.load(mapped).fingerprint == rankscope.load(model).fingerprint

    @pytest.mark.parametrize(
        "away",
        [("",), ("transformer.h.1", "transformer.h.2"), ("transformer.h.1.attn", "transformer.ln_f")],
        ids=["all", "blocks", "parts of a block"],
    )
    def test_partly_on_disk(self, away: tuple[str, ...], tmp_path: Path) -> None:
        pytest.importorskip("accelerate")
        model = self.model()
        model.save_pretrained(tmp_path)
        expected = seen(model, list(self.METRICS), IDS, attention_mask=REAL.long())
        leaves = [name for name, part in model.named_modules() if not list(part.children())]
        parts = {name: "disk" if name.startswith(away) else "cpu" for name in leaves}
        mapped = hf.GPT2LMHeadModel.from_pretrained(
            tmp_path, device_map=parts, dtype=torch.float64, offload_folder=tmp_path / "away"
        ).eval()
        assert any(weight.is_meta for weight in mapped.parameters())
        self.same(mapped, expected, self.METRICS[:2])
        with raises(WatchError, subject="metrics"):
            seen(mapped, "head_mu", IDS)

    def test_offloaded(self) -> None:
        accelerate = pytest.importorskip("accelerate")
        model = self.model()
        expected = seen(model, list(self.METRICS), IDS, attention_mask=REAL.long())
        model = accelerate.cpu_offload(model, execution_device="cpu")
        assert next(model.parameters()).is_meta
        self.same(model, expected, self.METRICS[:2])
        with raises(WatchError, subject="metrics"):
            seen(model, "head_mu", IDS)

    def test_dispatched(self) -> None:
        accelerate = pytest.importorskip("accelerate")
        model = self.model()
        expected = seen(model, list(self.METRICS), IDS, attention_mask=REAL.long())
        parts = dict.fromkeys(("transformer", "lm_head"), "cpu")
        model = accelerate.dispatch_model(model, parts, main_device="cpu", force_hooks=True)
        self.same(model, expected)

    def test_prepared_for_training(self, tmp_path: Path) -> None:
        accelerate = pytest.importorskip("accelerate")
        model = self.model(**dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0))
        expected = seen(model, "mu", IDS).profile().curve("mu").mean(0)
        accelerator = accelerate.Accelerator(cpu=True)
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-3))
        with Monitor(prepared, "mu", every=1, run=tmp_path / "run", alarms=()) as monitor:
            accelerator.backward(prepared.train()(IDS, labels=IDS).loss)
            optimizer.step()
            monitor.step()
        rows = rankscope.read(monitor.run).tables["training"].filter(metric="mu", step=1).sort("layer")
        assert rows["value"].to_list() == pytest.approx(expected.tolist(), rel=1e-12)


class TestPeft:
    def model(self, *targets: str) -> Any:
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        plain = tiny(hf.GPT2LMHeadModel, **GPT2, bos_token_id=1, eos_token_id=2)().double()
        config = peft.LoraConfig(target_modules=list(targets), init_lora_weights=False, fan_in_fan_out=True)
        return peft.get_peft_model(plain, config, autocast_adapter_dtype=False).double().eval()

    def test_an_adapted_model_is_the_merged_one(self) -> None:
        metrics = ["mu", "entropy", "head_mu"]
        model = self.model("c_attn")
        adapted = seen(model, metrics, input_ids=IDS).profile()
        merged = seen(model.merge_and_unload(), metrics, input_ids=IDS).profile()
        for each in metrics:
            torch.testing.assert_close(adapted.curve(each), merged.curve(each), rtol=1e-9, atol=1e-9, equal_nan=True)

    def test_an_adapted_output_projection_has_no_heads(self) -> None:
        with raises(WatchError, subject="heads"):
            seen(self.model("c_attn", "c_proj"), "head_mu", input_ids=IDS)

    def test_virtual_tokens(self) -> None:
        peft = pytest.importorskip("peft")
        plain = tiny(hf.GPT2LMHeadModel, **GPT2, bos_token_id=1, eos_token_id=2)
        prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = peft.get_peft_model(plain(), prompt).eval()
        w = seen(model, ["mu", "entropy"], input_ids=IDS, attention_mask=REAL.long())
        assert checks(w)["padded_tokens"] == 2  # of 2 x 9
        prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = peft.get_peft_model(plain(), prefix).eval()
        with raises(WatchError):
            seen(model, "entropy", input_ids=IDS, attention_mask=REAL.long()).profile()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wrapped", "in part", "in place"])
def test_a_compiled_model_is_looked_at_through_its_original(how: str) -> None:
    model = GPT().eval()
    expected = seen(model, ["mu", "entropy", "head_mu"], IDS).profile()
    called: Any = model
    if how == "wrapped":
        called = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    else:
        layers: Any = model.transformer["h"]
        layers[1] = torch.compile(layers[1], backend="eager")
    w = seen(called, ["mu", "entropy", "head_mu"], IDS)
    for each in ("mu", "entropy", "head_mu"):
        torch.testing.assert_close(w.profile().curve(each), expected.curve(each), equal_nan=True)
    assert "The model is compiled: while watched, its original ran as it was written." in w.notes


class Rows(nn.Module):
    """Tokens in rows and columns."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x).tanh()


def test_tokens_in_rows_and_columns_are_tokens() -> None:
    model, X = nn.Sequential(Rows(), Rows()), torch.randn(2, 3, 4, WIDTH)
    grid, flat = seen(model, "mu", X), seen(model, "mu", X.flatten(1, 2))
    torch.testing.assert_close(grid.profile().curve("mu"), flat.profile().curve("mu"))


@pytest.mark.parametrize("probed", [True, False])
def test_a_monitor_sees_rows_and_columns_too(probed: bool, tmp_path: Path) -> None:
    model, X = nn.Sequential(Rows(), Rows()), torch.randn(2, 3, 4, WIDTH)
    expected = seen(model, "mu", X).profile().curve("mu").mean(0)
    with Monitor(model, "mu", every=1, probe=X if probed else None, run=tmp_path / "run", alarms=()) as monitor:
        model(X).sum().backward()
        monitor.step()
    rows = rankscope.read(monitor.run).tables["training"].filter(metric="mu", step=1).sort("layer")
    torch.testing.assert_close(torch.tensor(rows["value"].to_list(), dtype=torch.float64), expected)
