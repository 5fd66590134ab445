"""The prose around the results. Owns: what was done, in words that hold whatever comes out. No numbers."""

from __future__ import annotations

from bench.evidence_arms import AGAIN, SECOND, SHIPPED

METHOD_NAMES = {
    "random": "a random head",
    "uniform": "the middle layer (8 heads)",
    "divergence": "the KL-guided layer (8 heads)",
    "attribution": "attribution's head",
    "ablation": "the most necessary head",
    "sharpen_layer": "sharpen's layer (8 heads)",
    "sharpen": "sharpen's head",
}
SHORT_NAMES = {
    "random": "random head",
    "uniform": "middle layer",
    "divergence": "KL's layer",
    "attribution": "attribution",
    "ablation": "most necessary",
    "sharpen_layer": "sharpen's layer",
    "sharpen": "sharpen",
}
# Arms at sharpen's site, in the order in which they are shown.
VARIANTS = {
    "unsupervised": "no attention supervision",
    "random-init": "random projections",
    "random-init-narrow": "random projections, as narrow as copies",
    "random-init-unsupervised": "random projections, no supervision",
    "replace": "in the head's place",
    "replace-random-init": "in the head's place, random projections",
    "linear": "linear attention",
    "linear-unsupervised": "linear attention, no supervision",
    "hidden-supervised": "no splice, its hidden attention supervised",
    "two-heads": "two heads",
    "four-heads": "four heads",
    "new-heads-only": "only the new head trains",
    "lora": "new head and LoRA",
}
HEAD = """
# Evidence

Does it matter which head of a state-space model gets an attention branch, and does the sharpen test (the gain from a
perfect read, see [Locating](ARCHITECTURE.md#locating)) find the right one? Every arm has the same steps on the same
documents and answers the same prompts. The answers come first; how it was measured, and what does not follow, below.
"""
SECTIONS = {
    "how": "## How it was measured",
    SHIPPED: """
`checkpoints/pico-mamba2`: 4 layers of 8 heads, state 8. Key and value fit its short convolution, so it needs no Gather
head, and nearly all of the reading is done in layer 0.
""",
    SECOND: """
`bench/evidence_base.yaml`: the same shape with a state of 16, and transformers' own initialisation of dt and A. It was
made because on the shipped base nearly everything happens in one layer, so that methods can hardly differ.
""",
    AGAIN: """
The same recipe once more: what holds for one pretraining need not hold for another. These arms began from the same seed
on another processor, whose rounding ends at other weights; `make evidence` pretrains with the next seed where it finds
no such base.
""",
    "comparison": """
**The comparison.** Each row is the arm that the method points at. Layer rows splice all 8 heads of the layer: eight
times the new weights. What a spliced head is supervised to read (the end of the segment, or the value) is what the
sharpen test says for that head, so rivals get this much of it too. Intervals are Wilson's over all prompts of all
seeds. `facts`: closed-book questions that no training showed; `perplexity`: sentences likewise; both have to stay. The
last test is exact McNemar, two-sided, on the pairs (prompt, seed); * stands with the family-wise error of this table at
0.05 (Holm).
""",
    "variants": """
**What is put there.** All at the site that the sharpen test chose with that seed's prompts: one head beside the SSM,
copies of its projections, softmax, supervised, all weights train, unless said otherwise.

- Linear attention: the same branch with `q.k` where softmax has its exponential; causal, divided by the sum of the
  absolute weights. An RMSNorm follows, so that scale is lost in the output; supervision sees the absolute weights.
- Hidden attention supervised: no splice; cross-entropy of the SSM head's own row `|a[t,s]| |x_s|`, divided by its sum,
  at the same positions and with the same weight.
- LoRA: PEFT, rank 8, on `in_proj` and `out_proj` of every layer, at the new heads' learning rate; the other old weights
  are frozen. PEFT refuses `out_proj` of the model types whose fused kernel reads it; hybrids are not on its list, and
  without kernels the adapter is used.
- Random projections: query and key of 32 channels; copies are as wide as the state, 8 on the shipped base and 16 on the
  second, and so are random projections "as narrow as copies": the beginning alone differs there.
- Two and four heads: each the one that gains most from a perfect read given those before it.
""",
    "sites": """
**Is the gain foreseen?** Each head was trained as the only site, like sharpen's. The prediction is made before
training: the larger of the sharpen test's two gains, or what ablating the head costs; means over the seeds' prompts.
95% intervals: sites resampled. Heads of a layer are alike, so these intervals are rather too narrow than too wide.
""",
    "gap": """
Gap closed = (arm - no splice) / (Transformer - no splice), in mean accuracy over seeds, on the shipped base. The
Transformer is `checkpoints/pico-transformer` (Llama's class, rotary positions, 4 layers, the same width, within 3% as
many weights, another recipe: on the base's own it learned nothing to retrieve). It gets the arms' budget unspliced.
Where it is no better than the control there is no gap to close, and the share says nothing.
""",
}
LIMITS = """
## What does not follow

- These are models of half a million weights on generated text. Which head wins in a large model is not measured here.
- Prompts are the same in all seeds. Pooled intervals and tests are about these prompts; the dots in the figures show
  what seeds add.
- An arm is short. It says what a site brings within this budget, not where long training would end.
- The sharpen test asks what the base can already use: a perfect read where nothing above it takes it up gains nothing.
  Many new heads together may build a reader of their own where no single one can, as a whole layer with all weights
  trained; the test does not foresee that, and a layer's perfect read does not either.
- Rivals are supervised at the position that the sharpen test names, and the KL-guided choice is the untrained form of
  the published method (arXiv 2512.20569 trains one layer at a time towards a teacher).
"""
