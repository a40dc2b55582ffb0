import torch

from rankscope.errors import ArchitectureError, TokensError
from rankscope.sources import PRESETS, bundled_excerpts, fresh, word_tokens
from tests.raising import raises


def test_the_bundled_prose_is_there_in_quantity() -> None:
    excerpts = bundled_excerpts(128)
    assert len(excerpts) > 100
    assert any("Call me Ishmael" in excerpt for excerpt in excerpts)


def test_the_same_word_at_two_places_differs_by_position_alone() -> None:
    X, padding = word_tokens(["a b a", "a"], width=64, max_length=3, seed=1)
    assert X.shape == (2, 3, 64)
    assert padding.tolist() == [[False] * 3, [False, True, True]]
    assert torch.equal(X[0, 0], X[1, 0])
    alike = torch.cosine_similarity(X[0, 0], X[0, 2], dim=0)
    unlike = torch.cosine_similarity(X[0, 0], X[0, 1], dim=0)
    assert alike > unlike


def test_tokens_are_normalised_and_cut_and_padding_is_zero() -> None:
    X, padding = word_tokens(["one two three four", "five"], width=32, max_length=3)
    assert X.shape[1] == 3
    assert torch.allclose(X[~padding].mean(-1), torch.zeros(4, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(X[~padding].var(-1, unbiased=False), torch.ones(4, dtype=torch.float64))
    assert not X[padding].any()


def test_an_embedding_and_a_network_of_one_seed_share_no_draws() -> None:
    words = " ".join(f"w{k}" for k in range(40))
    X, _ = word_tokens([words], width=128, max_length=40, seed=5)
    net = fresh("bert-tiny", seed=5)
    query = net.state_dict()["layers.0.attention.query.weight"].reshape(128, 128)
    alike = torch.cosine_similarity(X[0, :, None], query[None], dim=-1)
    assert float(alike.abs().max()) < 0.5


def test_text_without_words_is_a_sentence() -> None:
    with raises(TokensError, "texts"):
        word_tokens(["", "  "], width=8)


def test_usual_sizes_run_and_an_unknown_one_is_a_sentence() -> None:
    for name in PRESETS:
        small = PRESETS[name].replace(layers=1, width=32, heads=2, key_heads=1, head_width=16, mlp_width=64)
        from rankscope.nets import Transformer

        out = Transformer.random(small).run(torch.randn(1, 4, 32, dtype=torch.float64)).output
        assert bool(out.isfinite().all())
    with raises(ArchitectureError, "model"):
        fresh("bert-bse")


def test_a_texts_tokens_do_not_depend_on_the_texts_beside_it() -> None:
    texts = ["call me ishmael .", "some years ago", "never mind how long precisely"]
    together, padding = word_tokens(texts, width=16, max_length=8, seed=2)
    for row, text in enumerate(texts):
        alone, _ = word_tokens([text], width=16, max_length=8, seed=2)
        assert torch.equal(together[row][~padding[row]], alone[0])
    other, _ = word_tokens(texts, width=16, max_length=8, seed=3)
    assert not torch.isclose(other, together)[~padding].any()


def test_word_vectors_are_normal_with_the_spread_of_bert() -> None:
    """Mean, variance and fourth moment within five standard errors of N(0, 0.02), and words independent."""
    from rankscope.sources.presets import _vector

    drawn = torch.stack([torch.from_numpy(_vector(f"w{k}", 256, 0).copy()) for k in range(400)]) / 0.02
    n = drawn.numel()
    assert abs(float(drawn.mean())) < 5 / n**0.5
    assert abs(float(drawn.square().mean()) - 1) < 5 * (2 / n) ** 0.5
    assert abs(float(drawn.pow(4).mean()) - 3) < 5 * (96 / n) ** 0.5
    cosines = torch.nn.functional.normalize(drawn, dim=-1) @ torch.nn.functional.normalize(drawn, dim=-1).T
    assert float(cosines.triu(1).abs().max()) < 6 / 256**0.5
