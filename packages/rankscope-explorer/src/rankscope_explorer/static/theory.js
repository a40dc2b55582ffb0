// What stands behind each control and each figure: short, with a pointer to the paper or the documentation.
const DONG = "Dong, Cordonnier, Loukas 2021, arXiv 2103.03404";
const WU = "Wu et al. 2024, arXiv 2405.18781";

export const THEORY = {
  tokens: {
    title: "Tokens",
    text: [
      "Tokens are the rows of a matrix X. The text is split into tokens as the model does it, and cut to this many. A random network gives every word a random vector, the same wherever the word stands, plus one for its position.",
    ],
  },
  residual: {
    title: "Residual by layer",
    text: [
      "The residual of X is what is left of it after the nearest matrix with equal rows is taken away: res X = X − 1xᵀ. Drawn is ‖res X‖₁,∞ / ‖X‖₁,∞ with ‖A‖₁,∞ = √(‖A‖₁ ‖A‖∞) and x the mean token: 1 or so when tokens have little in common, 0 when all are the same.",
      "Computed in deviation arithmetic, which carries the residual apart from the tokens with a scale of its own. It has no floor: 10⁻⁴⁰⁰⁰ is as exact as 0.1. Where the axis spans over forty decades it is logarithmic in the exponent, so that a doubly exponential fall is a straight line.",
    ],
    theorem: "Pure attention: ‖res X_L‖ ≤ (4γβH/√d)^((3ᴸ−1)/2) · ‖res X₀‖^(3ᴸ). Each layer cubes the residual.",
    source: `${DONG}, theorem 2.3; docs/deviation.md`,
  },
  cloud: {
    title: "The token cloud",
    text: [
      "Every token as a point, on the two leading principal axes of the residuals of all layers together. As it is, distances are shares of the tokens' own length, and the cloud shrinks as tokens become the same. Magnified, every layer is drawn at the same size, and one sees the shape that is left: often a line, since the leading direction outlives the others.",
      "Colours show the place in the text, from dark to light. Settings that begin with the same tokens share their axes.",
    ],
    source: "docs/idea.md",
  },
  skip: {
    title: "Skip weight",
    text: [
      "A skip adds a sub-block's input to its output: X ← λX + SA(X). It carries tokens past the averaging unchanged; with λ = 0 it is taken out. This sets the weight of both skips, around attention and around the MLP.",
      "A path that takes the skip in every layer never meets an average. So with skips there are lower bounds: collapse can be excluded.",
    ],
    theorem: "μ' ≥ |λ + a| μ, where a = ⟨res SA(X), res X⟩ / ‖res X‖² is how far the branch adds to the deviation itself (aligned-skip).",
    source: `${DONG}, section 3.1; docs/theory.md, “Lower bounds”`,
  },
  mlp: {
    title: "MLP",
    text: [
      "The MLP acts on each token alone. It can stretch differences between tokens by at most its Lipschitz constant λ, so it slows the collapse of attention and cannot stop it for good unless it stretches as fast as attention contracts.",
      "Off: the MLP, its skip and its norm are taken out.",
    ],
    theorem: "‖res X_L‖ ≤ (4γβHλ/√d)^((3ᴸ−1)/2) · ‖res X₀‖^(3ᴸ).",
    source: `${DONG}, corollary 3.2`,
  },
  norm: {
    title: "Norm",
    text: [
      "A norm rescales each token. It cannot make equal tokens different, but it undoes the shrinking of what is common, and with it attention has equilibria of every rank between one and full: tokens need not collapse. Off: every norm is taken out.",
    ],
    theorem: "With LayerNorm and suitable values, from almost every start tokens can converge to an equilibrium of any rank 1 < k ≤ d; with orthogonal values and a mask with a centre they collapse exponentially.",
    source: `${WU}, theorems 2 and 3`,
  },
  mask: {
    title: "Mask",
    text: [
      "Who attends to whom, as a graph. Tokens can only become the same as fast as information crosses it: with a centre (a token that reaches all others) within r steps, every r layers shrink what tokens differ by.",
      "Spellings: complete, causal, window:w, unidirectional, dilated:w:s, strided[:s], prefix:p, longformer:w:g, bigbird:w:g:r[:seed], edges:0>1,0>2; a&b keeps what both allow; several joined by ; take turns by layer.",
    ],
    theorem: "μ(X_t) ≤ C (1 − εʳ)^⌊t/r⌋, with ε the smallest attention weight on an edge and r the radius of the mask's graph.",
    source: `${WU}, theorem 1`,
  },
  window: {
    title: "Window",
    text: [
      "No token sees further than this many tokens to either side, whatever else the mask allows. A narrow window makes the graph long: its radius is about (tokens / 2) / window, and the collapse is that much slower. At 0 every token sees only itself, and attention mixes nothing.",
    ],
    source: `${WU}, section 4.1`,
  },
  temperature: {
    title: "Temperature",
    text: [
      "Scores are divided by the score divisor times the temperature before the softmax. Hot attention is nearly uniform, and a complete mask then makes all tokens equal in one layer. Cold attention looks at few tokens; averages over few contract less.",
    ],
    theorem: "The cubic law's constant is 4γβH / divisor: the fall is faster the larger the divisor.",
    source: `${DONG}, theorem 2.3; ${WU}, section 4.1 (ε)`,
  },
  divisor: {
    title: "Score divisor",
    text: [
      "P = softmax(Q Kᵀ / divisor), usually √d with d the width of a head (T5 has 1). Left empty: the model's own. The temperature multiplies it.",
    ],
    source: "docs/idea.md",
  },
  depth: {
    title: "Depth",
    text: [
      "The layers of the model, repeated in order until there are this many, or the first of them alone. Repeated layers share their weights. Deviation arithmetic follows a collapse to any depth.",
    ],
    source: `${DONG}, figure 2; docs/deviation.md`,
  },
  remedies: {
    title: "Remedies against collapse",
    text: [
      "Since 2021 about twenty changes of the transformer were published that are meant to keep tokens apart. Here a remedy is put on the weights as they are, with its published numbers; parameters that it would train stay at their initial values. Some remedies do nothing at these values, some undo what the weights have learnt.",
      "Several remedies are put on one after another. Depth is changed first and everything else after, so that a remedy can be seen without skips, MLP or norm. If a remedy does not fit the network, or a figure cannot show it, the page says so.",
    ],
    source: "docs/remedies.md",
  },
  paths: {
    title: "Path shares",
    text: [
      "A path takes one head in every layer, or goes past the heads by the skip; its length is the number of heads in it. With attention, norms and MLP gates held as measured, the output is exactly the sum over all (1 + H)ᴸ paths. Drawn is what all paths of one length carry together: ⟨term, output⟩ / ⟨output, output⟩. Shares add up to one; a negative one works against the output.",
      "Long paths average often, and their sum is more uniform. Networks with skips work through the short ones.",
    ],
    theorem: "SAN(X) = Σ_path P_path X W_path + 1bᵀ.",
    source: `${DONG}, theorem 2.1; docs/paths.md`,
  },
  forecast: {
    title: "Forecast",
    text: [
      "What is to be expected of this network, were it trained for 300 steps at a rate of 0.001 to say the next character of a text. Nothing is trained: its tokens, gradients and losses are read at these weights, and compared with those of some two thousand small networks that were trained. Learning means a loss below that of guessing characters by their frequency.",
      "Text and tokens of this page make no difference to it. A network that sees what lies ahead gets a causal mask; the sentences say so, and what else the numbers stand under.",
      "Mends are changes of the network, each with a forecast of its own. They take a minute or more.",
    ],
    source: "docs/forecast.md",
  },
  bounds: {
    title: "Bounds",
    text: [
      "What is proved of this network on this text, next to what is measured, in the quantity that each theorem is about. Every hypothesis is checked: a theorem whose hypotheses fail gives no number and says which one failed. One that holds but says nothing new (an upper bound as large as the tokens, a lower bound of zero) is called vacuous and drawn hollow.",
      "The table has every theorem, and the reason where one does not apply.",
    ],
    source: "docs/theory.md, with every derivation",
  },
};
