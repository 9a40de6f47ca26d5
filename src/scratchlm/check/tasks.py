"""The functions a learner writes, in teaching order: signature, formula, shapes, where explained.

Names and arguments are those of the CS336 course's adapters, so that its file is accepted as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from typing import Any

from scratchlm.check import driving
from scratchlm.check.cases import CASES
from scratchlm.check.definitions import DEFINITIONS
from scratchlm.check.driving import Case, Driver
from scratchlm.check.outcomes import Outcome


@dataclass(frozen=True)
class Task:
    """One function to write."""

    name: str
    short: str  # what one types: softmax
    arguments: str
    returns: str
    text: str  # formula, shapes and rules, for the stub's docstring
    where: str  # where it is explained
    drive: Driver = driving.drive_tensors

    @cached_property
    def cases(self) -> list[Case]:
        """Everything it is tried on, smallest first."""
        return CASES[self.name]()

    @property
    def definition(self) -> Callable[..., Any]:
        """The function as it is defined."""
        function: Callable[..., Any] = getattr(DEFINITIONS, self.name)
        return function


_REFERENCE = "scratchlm.ops.reference"

TASKS = (
    Task(
        "run_linear",
        "linear",
        "d_in: int, d_out: int, weights: Tensor, in_features: Tensor",
        "Tensor",
        """y = W x, for every vector of the batch; no bias.

weights (d_out, d_in), in_features (…, d_in) → (…, d_out)""",
        f"{_REFERENCE}: linear",
    ),
    Task(
        "run_embedding",
        "embedding",
        "vocab_size: int, d_model: int, weights: Tensor, token_ids: Tensor",
        "Tensor",
        """Row `id` of the table, for every id.

weights (vocab_size, d_model), token_ids (…) of int64 → (…, d_model)""",
        f"{_REFERENCE}: embedding",
    ),
    Task(
        "run_softmax",
        "softmax",
        "in_features: Tensor, dim: int",
        "Tensor",
        """softmax(x)ᵢ = exp(xᵢ) / Σⱼ exp(xⱼ), the sum along `dim`.

exp(1000) is infinite: subtract from each slice its maximum first, which changes nothing else.
in_features (any shape) → the same shape""",
        f"{_REFERENCE}: softmax",
    ),
    Task(
        "run_silu",
        "silu",
        "in_features: Tensor",
        "Tensor",
        """SiLU(x) = x · σ(x), σ(x) = 1 / (1 + exp(−x)); finite for every finite x.

in_features (any shape) → the same shape""",
        f"{_REFERENCE}: silu; arXiv:1702.03118",
    ),
    Task(
        "run_rmsnorm",
        "rmsnorm",
        "d_model: int, eps: float, weights: Tensor, in_features: Tensor",
        "Tensor",
        """y = x / sqrt(mean(x²) + ε) · g, the mean along the last axis, g the weights.

Squares of 16-bit input overflow: compute in float32 there, and return the input's dtype.
weights (d_model), in_features (…, d_model) → (…, d_model)""",
        f"{_REFERENCE}: rms_norm; arXiv:1910.07467 eq. 4",
    ),
    Task(
        "run_rope",
        "rope",
        "d_k: int, theta: float, max_seq_len: int, in_query_or_key: Tensor,"
        " token_positions: Tensor",
        "Tensor",
        """Rotate the channel pairs (0, 1), (2, 3), … of the vector at position p:

    (a, b) → (a cos φ − b sin φ, a sin φ + b cos φ),  φ = p · θ^(−2i/d_k) for pair i = 0, 1, …

p is token_positions[…, s], which need not be 0, 1, 2, …
in_query_or_key (…, seq, d_k), token_positions (seq) or (batch, seq) → (…, seq, d_k)""",
        "scratchlm.model.rotary; arXiv:2104.09864 eq. 34",
    ),
    Task(
        "run_scaled_dot_product_attention",
        "attention",
        "Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None",
        "Tensor",
        """softmax(Q Kᵀ / √d_k) V, the softmax over the keys.

mask is boolean, True where a query may see a key; elsewhere the score is −∞ before the softmax.
A query that may see nothing gets zeros.
Q (…, queries, d_k), K (…, keys, d_k), V (…, keys, d_v), mask (…, queries, keys)
→ (…, queries, d_v)""",
        f"{_REFERENCE}: scaled_dot_product_attention; arXiv:1706.03762 eq. 1",
    ),
    Task(
        "run_swiglu",
        "swiglu",
        "d_model: int, d_ff: int, w1_weight: Tensor, w2_weight: Tensor, w3_weight: Tensor,"
        " in_features: Tensor",
        "Tensor",
        """y = W2 (SiLU(W1 x) ⊙ W3 x).

w1_weight and w3_weight (d_ff, d_model), w2_weight (d_model, d_ff),
in_features (…, d_model) → (…, d_model)""",
        f"{_REFERENCE}: swiglu; arXiv:2002.05202 eq. 6",
    ),
    Task(
        "run_multihead_self_attention",
        "mha",
        "d_model: int, num_heads: int, q_proj_weight: Tensor, k_proj_weight: Tensor,"
        " v_proj_weight: Tensor, o_proj_weight: Tensor, in_features: Tensor",
        "Tensor",
        """Causal attention of several heads, without positions.

Q, K, V = W_Q x, W_K x, W_V x, each cut into num_heads heads of d_head = d_model / num_heads
consecutive channels; attention in every head, token s seeing tokens 0 … s; the heads side by
side again, and W_O of that.
weights (d_model, d_model), in_features (…, seq, d_model) → (…, seq, d_model)""",
        "scratchlm.model.attention; arXiv:1706.03762, section 3.2.2",
    ),
    Task(
        "run_multihead_self_attention_with_rope",
        "mha_rope",
        "d_model: int, num_heads: int, max_seq_len: int, theta: float, q_proj_weight: Tensor,"
        " k_proj_weight: Tensor, v_proj_weight: Tensor, o_proj_weight: Tensor,"
        " in_features: Tensor, token_positions: Tensor | None = None",
        "Tensor",
        """The same, with RoPE on queries and keys of every head (d_k = d_head), not on values.

token_positions (seq) or (batch, seq); None stands for 0, 1, 2, …""",
        "scratchlm.model.attention",
    ),
    Task(
        "run_transformer_block",
        "block",
        "d_model: int, num_heads: int, d_ff: int, max_seq_len: int, theta: float,"
        " weights: dict[str, Tensor], in_features: Tensor",
        "Tensor",
        """y = x + Attention(RMSNorm₁(x));  z = y + SwiGLU(RMSNorm₂(y)).

Attention is causal and has RoPE; ε = 1e-5 in both norms. The names of the weights:
ln1.weight, attn.{q_proj,k_proj,v_proj,output_proj}.weight, ln2.weight, ffn.{w1,w2,w3}.weight
in_features (batch, seq, d_model) → (batch, seq, d_model)""",
        "scratchlm.model.block",
    ),
    Task(
        "run_transformer_lm",
        "lm",
        "vocab_size: int, context_length: int, d_model: int, num_layers: int, num_heads: int,"
        " d_ff: int, rope_theta: float, weights: dict[str, Tensor], in_indices: Tensor",
        "Tensor",
        """Embedding → num_layers blocks → RMSNorm (ε = 1e-5) → linear: the logits, no softmax.

The names of the weights: token_embeddings.weight, layers.{i}. and a name of the block for
i = 0, 1, …, ln_final.weight, lm_head.weight. `context_length` is the block's max_seq_len.
in_indices (batch, seq) of int64 → (batch, seq, vocab_size)""",
        "scratchlm.model.transformer",
    ),
    Task(
        "run_cross_entropy",
        "cross_entropy",
        "inputs: Tensor, targets: Tensor, ignore_index: int = -100",
        "Tensor",
        """The mean of log Σⱼ exp(xⱼ) − x[target] over the targets that are not `ignore_index`.

Never form log(softmax(x)): where the softmax is 0, that is −∞. Subtract the maximum first.
inputs (…, vocab), targets (…) of int64 → a tensor of one number""",
        f"{_REFERENCE}: cross_entropy",
    ),
    Task(
        "get_adamw_cls",
        "adamw",
        "",
        "type[torch.optim.Optimizer]",
        """Return your class, AdamW(params, lr, betas, eps, weight_decay), whose step() does

    θ ← θ − lr·λ·θ                                        λ is weight_decay
    m ← β₁m + (1 − β₁)g,  v ← β₂v + (1 − β₂)g²            0 at the start
    θ ← θ − lr · m̂ / (√v̂ + ε),  m̂ = m / (1 − β₁ᵗ),  v̂ = v / (1 − β₂ᵗ),  t = 1, 2, …

for every parameter that has a gradient. Read lr, betas, eps and weight_decay from its group at
every step, and count t for every parameter.""",
        "scratchlm.training.optimizers; arXiv:1711.05101, algorithm 2",
        driving.drive_optimizer,
    ),
    Task(
        "run_get_lr_cosine_schedule",
        "schedule",
        "it: int, max_learning_rate: float, min_learning_rate: float, warmup_iters: int,"
        " cosine_cycle_iters: int",
        "float",
        """The learning rate at step `it`:

    max · it / warmup                                     it < warmup
    min + ½ (1 + cos(π p)) (max − min)                    p = (it − warmup) / (cycle − warmup)
    min                                                   it > cycle""",
        "scratchlm.training.schedules",
        driving.drive_schedule,
    ),
    Task(
        "run_gradient_clipping",
        "clipping",
        "parameters: Iterable[torch.nn.Parameter], max_l2_norm: float",
        "None",
        """Where the norm of all gradients together, √Σ g² over all cells of all gradients, exceeds
max_l2_norm, multiply every gradient by max_l2_norm / (norm + 1e-6), in place.

`parameters` may be a generator, and some may have no gradient.""",
        "scratchlm.training.optimizers: clip_grad_norm",
        driving.drive_clipping,
    ),
    Task(
        "run_train_bpe",
        "train_bpe",
        "input_path: str, vocab_size: int, special_tokens: list[str]",
        "tuple[dict[int, bytes], list[tuple[bytes, bytes]]]",
        """Learn byte-level BPE from a file: the vocabulary, and the merges in the order learnt.

Cut the text at the special tokens, and what lies between into words by `PATTERN` (above). A
word is a sequence of single bytes at first. Count all adjacent pairs within words; merge the
most frequent pair everywhere, from the left; of pairs equally frequent, the greater one (`max`
of the tuples of bytes). Stop at vocab_size, or when no pair is left.
The vocabulary: the 256 bytes, the merges, the special tokens.""",
        "scratchlm.tokenizer.naive; arXiv:1508.07909",
        driving.drive_bpe_training,
    ),
    Task(
        "get_tokenizer",
        "tokenizer",
        "vocab: dict[int, bytes], merges: list[tuple[bytes, bytes]],"
        " special_tokens: list[str] | None = None",
        "object",
        """Return an object with encode(text) → list of ids, encode_iterable(texts) → iterator of
ids, and decode(ids) → text.

Encoding: cut at the special tokens (the longest that fits), each of which is one id; what lies
between, into words as in training. A word starts as its bytes; while any adjacent pair is a
merge, merge the one that was learnt first (of equal ones the leftmost).
Decoding: join all bytes, then decode UTF-8 with errors="replace".""",
        "scratchlm.tokenizer.naive",
        driving.drive_tokenizer,
    ),
)
BY_NAME = {task.name: task for task in TASKS}


def find_task(name: str) -> Task:
    """Return a task by its short or full name."""
    for task in TASKS:
        if name in (task.short, task.name):
            return task
    known = [task.short for task in TASKS]
    near = ", ".join(get_close_matches(name, known) or known)
    raise ValueError(f"no function is called {name!r}; did you mean {near}?")


@cache
def expected(name: str) -> tuple[Outcome, ...]:
    """Return what the definition gives in every case."""
    task = BY_NAME[name]
    return tuple(task.drive(task.definition, case) for case in task.cases)
