"""Known mistakes in the Transformer block and in the language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from scratchlm.check.definitions import DEFINITIONS, EPS, Weights, layer_weights
from scratchlm.check.mistakes.attention import wrong_heads
from scratchlm.check.mistakes.table import Table
from scratchlm.ops import reference

MODEL = Table()
BLOCK, LM = "run_transformer_block", "run_transformer_lm"


def wrong_block(**knobs: Any) -> Callable[..., Tensor]:
    """Make a block with something wrong in it."""

    def block(
        d: int, heads: int, d_ff: int, longest: int, theta: float, w: Weights, x: Tensor
    ) -> Tensor:
        def norm(name: str, y: Tensor) -> Tensor:
            name = knobs.get("norms", {}).get(name, name)
            eps = knobs.get("eps", EPS)
            return y if name == "none" else reference.rms_norm(y, w[f"{name}.weight"], eps)

        def attention(y: Tensor) -> Tensor:
            run = knobs.get("attention", DEFINITIONS.run_multihead_self_attention_with_rope)
            names = ("q_proj", "k_proj", "v_proj", "output_proj")
            projections = (w[f"attn.{n}.weight"] for n in names)
            return run(d, heads, longest, theta, *projections, y, None)

        def ffn(y: Tensor) -> Tensor:
            return reference.swiglu(y, *(w[f"ffn.{n}.weight"] for n in ("w1", "w2", "w3")))

        steps: Callable[..., Tensor] = knobs.get("steps", _pre_norm)
        return steps(x, norm, attention, ffn)

    return block


Part = Callable[[Tensor], Tensor]
Norm = Callable[[str, Tensor], Tensor]


def _pre_norm(x: Tensor, norm: Norm, attention: Part, ffn: Part) -> Tensor:
    y = x + attention(norm("ln1", x))
    return y + ffn(norm("ln2", y))


def _post_norm(x: Tensor, norm: Norm, attention: Part, ffn: Part) -> Tensor:
    y = norm("ln1", x + attention(x))
    return norm("ln2", y + ffn(y))


def _from_normed(x: Tensor, norm: Norm, attention: Part, ffn: Part) -> Tensor:
    x = norm("ln1", x)
    y = norm("ln2", x + attention(x))
    return y + ffn(y)


def _first_missing(x: Tensor, norm: Norm, attention: Part, ffn: Part) -> Tensor:
    y = attention(norm("ln1", x))
    return y + ffn(norm("ln2", y))


def _second_missing(x: Tensor, norm: Norm, attention: Part, ffn: Part) -> Tensor:
    return ffn(norm("ln2", x + attention(norm("ln1", x))))


def _both_missing(x: Tensor, norm: Norm, attention: Part, ffn: Part) -> Tensor:
    return ffn(norm("ln2", attention(norm("ln1", x))))


def _adds_input(x: Tensor, norm: Norm, attention: Part, ffn: Part) -> Tensor:
    return x + ffn(norm("ln2", x + attention(norm("ln1", x))))


def _side_by_side(x: Tensor, norm: Norm, attention: Part, ffn: Part) -> Tensor:
    return x + attention(norm("ln1", x)) + ffn(norm("ln2", x))


def _wrong_order(x: Tensor, norm: Norm, attention: Part, ffn: Part) -> Tensor:
    y = x + ffn(norm("ln2", x))
    return y + attention(norm("ln1", y))


def _block(name: str, hints: tuple[str, str, str], *knobs: dict[str, Any]) -> None:
    MODEL.add(BLOCK, name, hints, *(wrong_block(**one) for one in knobs))


_FIRST, _SECOND = "y = x + attention(norm(ln1, x))", "z = y + swiglu(norm(ln2, y))"
_block(
    "post-norm: the norms come after the sums",
    ("Is the stream itself ever normed?", "Norm what enters a part, not the sum.", _FIRST),
    {"steps": _post_norm},
)
_block(
    "the residual starts from the normed x",
    ("What is added to attention's output?", "x as it came in, before the norm.", _FIRST),
    {"steps": _from_normed},
)
_block(
    "a residual connection is missing",
    ("Set all of a part's weights to 0: what comes out?", "Both parts add to x.", _SECOND),
    {"steps": _first_missing},
    {"steps": _second_missing},
    {"steps": _both_missing},
)
_block(
    "the second residual adds x, not y",
    ("What has attention written that is lost?", "The stream goes on from y.", _SECOND),
    {"steps": _adds_input},
)
_block(
    "feed-forward beside attention, not after it",
    ("Does the feed-forward layer see what attention found?", "It takes y, not x.", _SECOND),
    {"steps": _side_by_side},
)
_block(
    "feed-forward before attention",
    ("Which comes first?", "Attention, then the feed-forward layer.", _FIRST),
    {"steps": _wrong_order},
)
_block(
    "one norm's weights are used twice",
    ("Which weights does each norm have?", "ln1 before attention, ln2 before SwiGLU.", _SECOND),
    {"norms": {"ln2": "ln1"}},
    {"norms": {"ln1": "ln2"}},
)
_block(
    "the two norms' weights are exchanged",
    ("Which weights does each norm have?", "ln1 before attention, ln2 before SwiGLU.", _FIRST),
    {"norms": {"ln1": "ln2", "ln2": "ln1"}},
)
_block(
    "a norm is missing",
    ("Multiply x by 1000: what reaches each part?", "Each part takes a normed input.", _SECOND),
    {"norms": {"ln1": "none"}},
    {"norms": {"ln2": "none"}},
    {"norms": {"ln1": "none", "ln2": "none"}},
)
_block(
    "RoPE is missing from attention",
    (
        "Does the block know in which order the tokens came?",
        "Attention here is the one with RoPE.",
        "run_multihead_self_attention_with_rope(…)",
    ),
    {"attention": wrong_heads(True, rotated="")},
)
_block(
    "no causal mask: tokens see the future",
    (
        "Change the last token: which results change?",
        "Token s sees 0 … s.",
        "mask = torch.tril(torch.ones(seq, seq, dtype=torch.bool))",
    ),
    {"attention": wrong_heads(True, mask=lambda m: m)},
)


def wrong_lm(**knobs: Any) -> Callable[..., Tensor]:
    """Make a language model with something wrong in it."""

    def model(
        vocab: int,
        longest: int,
        d: int,
        layers: int,
        heads: int,
        d_ff: int,
        theta: float,
        weights: Weights,
        ids: Tensor,
    ) -> Tensor:
        x = weights["token_embeddings.weight"][ids] * knobs.get("scale", lambda d: 1.0)(d)
        for layer in knobs.get("order", range)(layers):
            own = layer_weights(weights, layer)
            x = DEFINITIONS.run_transformer_block(d, heads, d_ff, longest, theta, own, x)
        if not knobs.get("no_norm"):
            x = reference.rms_norm(x, weights["ln_final.weight"], EPS)
        head = "token_embeddings.weight" if knobs.get("tied") else "lm_head.weight"
        after: Callable[[Tensor], Tensor] = knobs.get("after", lambda y: y)
        return after(x @ weights[head].mT)

    return model


def _lm(name: str, hints: tuple[str, str, str], *knobs: dict[str, Any]) -> None:
    MODEL.add(LM, name, hints, *(wrong_lm(**one) for one in knobs))


_lm(
    "the final norm is missing",
    (
        "What comes between the last block and the head?",
        "A pre-norm stream is never normed on its way; it is at the end.",
        "x = rmsnorm(d_model, 1e-5, weights['ln_final.weight'], x)",
    ),
    {"no_norm": True},
)
_lm(
    "a softmax is applied to the logits",
    (
        "Can a logit be negative?",
        "The loss takes logits and forms its own normaliser.",
        "return run_linear(d_model, vocab_size, weights['lm_head.weight'], x)",
    ),
    {"after": reference.softmax},
    {"after": reference.log_softmax},
)
_lm(
    "every layer has the first layer's weights",
    ("Do two layers differ in your model?", "The layer's number is in the name.", "f'layers.{i}.'"),
    {"order": lambda n: [0] * n},
)
_lm(
    "a layer is left out",
    ("How often does the loop run?", "range(num_layers) ends before num_layers.", "range(layers)"),
    {"order": lambda n: range(n - 1)},
    {"order": lambda n: range(1, n)},
)
_lm(
    "the layers run in reverse",
    ("Which layer comes first?", "Layer 0 takes the embeddings.", "for i in range(num_layers)"),
    {"order": lambda n: range(n - 1, -1, -1)},
)
_lm(
    "the embeddings serve as the head",
    ("Which matrix gives the logits?", "The head has weights of its own.", "lm_head.weight"),
    {"tied": True},
)
_lm(
    "the embeddings are scaled by √d_model",
    ("What enters the first block?", "The rows of the table as they are.", "weights[token_ids]"),
    {"scale": lambda d: d**0.5},
)
