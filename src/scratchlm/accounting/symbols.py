"""The symbols of all formulas, and the numbers a config binds them to."""

from __future__ import annotations

from scratchlm.accounting.expr import Number, Sym
from scratchlm.config import ModelConfig, MoE

SYMBOLS = {
    # the model
    "V": "vocab_size: tokens in the vocabulary",
    "N_ctx": "context_length: the longest sequence the model is made for",
    "d": "d_model: width of the residual stream",
    "L": "num_layers",
    "H": "num_heads: query heads",
    "H_kv": "num_kv_heads: key and value heads",
    "d_h": "d_head: width of one head",
    "d_ff": "width of the feed-forward layer, or of one expert",
    "E": "num_experts (0: no mixture)",
    "k": "experts_per_token (0: no mixture)",
    "W": "sliding_window: tokens a query sees, itself included",
    "N": "active parameters: what one token uses, embeddings and all, tied weights once",
    "N_all": "all parameters, tied weights once",
    "N_layer": "parameters of one layer",
    "N_matrices": "parameters of one layer's matrices: no norms, no biases",
    "N_wide": "parameters that stay wide beside 16-bit ones: norms, biases, embeddings",
    "N_tied": "parameters of the table that is both embedding and LM head (0: untied)",
    "r": "rank of an adapter",
    "N_lora": "parameters of an adapter",
    "V_p": "rows of the LM head in a fused loss: V, padded to 128s where it is no multiple of 8",
    # the work
    "B": "sequences in a batch (of one GPU, or of the tensor-parallel ranks that share it)",
    "S": "tokens in a sequence",
    "S_r": "tokens of a sequence in one GPU's residual stream: S, or S / G_t where that is whole",
    "m": "micro-batches in an update",
    "n_s": "rows of logits a fused loss holds at a time",
    "A": "query-key pairs of a sequence: who attends to whom",
    "M": "tokens of a sequence that pass through the layers, over the whole generation",
    "n": "tokens in the last forward pass",
    "C": "tokens already in the KV cache",
    "P": "tokens in the prompt",
    "T": "tokens generated",
    # bytes per number
    "b_w": "bytes per stored weight",
    "b_g": "bytes per gradient",
    "b_m": "bytes per number of optimizer state",
    "b_a": "bytes per activation inside a block (what the matmuls compute in)",
    "b_r": "bytes per number of the residual stream",
    "b_c": "bytes per weight of the copy cast for the matmuls (0: none is made)",
    "b_s": "bytes per number in unfused attention's products",
    "b_kv": "bytes per number in the KV cache",
    # the machines
    "G": "number of GPUs",
    "R": "GPUs the state is split over",
    "G_d": "data-parallel ranks, G / G_t: each has batches of its own",
    "G_t": "tensor-parallel ranks: GPUs that share one batch",
    "G_c": "groups of R data-parallel ranks; with hsdp a node each, with a copy of the state",
    "W_d": "bytes/s a GPU sends to its neighbour in a ring of data-parallel ranks",
    "W_t": "bytes/s a GPU sends to its neighbour in a ring of tensor-parallel ranks",
    "W_n": "bytes/s a GPU sends to its neighbour in a ring of nodes (hsdp)",
    "X_d": "bytes a GPU sends to data-parallel ranks in a step",
    "X_t": "bytes a GPU sends to tensor-parallel ranks in a step",
    "X_n": "bytes a GPU sends to its like on other nodes in a step (hsdp)",
    "F_step": "FLOPs of a micro-batch, convention full",
    "F_again": "FLOPs of a micro-batch that checkpointing repeats",
    "t_c": "seconds of arithmetic in a step",
    "t_d": "seconds of data-parallel communication in a step",
    "t_t": "seconds of tensor-parallel communication in a step",
    "t_n": "seconds of communication between copies in a step (hsdp)",
    "F_peak": "FLOP/s of the machine, dense, in the matmuls' dtype",
    "M_bw": "bytes/s between the machine's memory and its cores",
    "u": "MFU: the fraction of F_peak a run reaches",
    "D": "tokens to train on",
}

V, N_ctx, d, L = Sym("V"), Sym("N_ctx"), Sym("d"), Sym("L")
H, H_kv, d_h, d_ff = Sym("H"), Sym("H_kv"), Sym("d_h"), Sym("d_ff")
E, k, W, N = Sym("E"), Sym("k"), Sym("W"), Sym("N")
B, S, A, C, P, T = Sym("B"), Sym("S"), Sym("A"), Sym("C"), Sym("P"), Sym("T")
S_r, m, N_wide = Sym("S_r"), Sym("m"), Sym("N_wide")
M, N_all, N_layer, N_matrices = Sym("M"), Sym("N_all"), Sym("N_layer"), Sym("N_matrices")
N_tied, V_p, n_s = Sym("N_tied"), Sym("V_p"), Sym("n_s")
r, N_lora = Sym("r"), Sym("N_lora")
b_w, b_g, b_m, b_a = Sym("b_w"), Sym("b_g"), Sym("b_m"), Sym("b_a")
b_r, b_c, b_s, b_kv = Sym("b_r"), Sym("b_c"), Sym("b_s"), Sym("b_kv")
R, F_peak, M_bw = Sym("R"), Sym("F_peak"), Sym("M_bw")
u, G, D, G_d, G_t = Sym("u"), Sym("G"), Sym("D"), Sym("G_d"), Sym("G_t")
W_d, W_t, X_d, X_t = Sym("W_d"), Sym("W_t"), Sym("X_d"), Sym("X_t")
G_c, W_n, X_n, t_n = Sym("G_c"), Sym("W_n"), Sym("X_n"), Sym("t_n")
F_step, F_again, t_c, t_d, t_t = (Sym(n) for n in ("F_step", "F_again", "t_c", "t_d", "t_t"))


def model_symbols(config: ModelConfig) -> dict[str, Number]:
    """Bind the model's symbols."""
    moe = config.ffn if isinstance(config.ffn, MoE) else None
    return {
        "V": config.vocab_size,
        "N_ctx": config.context_length,
        "d": config.d_model,
        "L": config.num_layers,
        "H": config.num_heads,
        "H_kv": config.num_kv_heads,
        "d_h": config.d_head,
        "d_ff": config.d_ff,
        "E": moe.num_experts if moe else 0,
        "k": moe.experts_per_token if moe else 0,
        # without a window a query sees all the model is made for; formulas that use W are then
        # not built, so this number is only shown
        "W": config.attention.sliding_window or config.context_length,
    }
