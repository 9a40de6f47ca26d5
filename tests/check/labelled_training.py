"""Learners' files for loss, AdamW, schedule and clipping."""

from check.learner import Learner

TRAINING = [
    Learner(
        "cross_entropy",
        """
def run_cross_entropy(inputs, targets, ignore_index=-100):
    x = inputs.reshape(-1, inputs.shape[-1])
    t = targets.reshape(-1)
    keep = t != ignore_index
    x, t = x[keep], t[keep]
    x = x - x.max(dim=-1, keepdim=True).values
    logp = x - torch.log(torch.exp(x).sum(dim=-1, keepdim=True))
    loss = -logp[torch.arange(len(t)), t]
    return loss.sum() / len(t)
""",
        [
            ("the sum, not the mean", " / len(t)", ""),
            ("ignored targets count: a mean over padding", "/ len(t)", "/ keep.numel()"),
            ("targets of −100 are not left out", "    x, t = x[keep], t[keep]\n", ""),
            (
                "the logarithm of a softmax that has become 0",
                "x - torch.log(torch.exp(x).sum(dim=-1, keepdim=True))",
                "torch.log(torch.exp(x) / torch.exp(x).sum(dim=-1, keepdim=True))",
            ),
            (
                "the maximum is not subtracted: exp overflows",
                "    x = x - x.max(dim=-1, keepdim=True).values\n",
                "",
            ),
            ("the sign is turned around", "loss = -logp", "loss = logp"),
            (
                "the logarithm to base 2",
                "return loss",
                "loss = loss / math.log(2)\n    return loss",
            ),
            ("divided by the vocabulary, too", "/ len(t)", "/ x.numel()"),
            ("the probability, not its logarithm", "loss = -logp[", "loss = -logp.exp()["),
            (
                "normalised over the rows, not over the vocabulary",
                "    logp = x - torch.log(torch.exp(x).sum(dim=-1, keepdim=True))",
                "    logp = x - torch.log(torch.exp(x).sum(dim=0, keepdim=True))",
            ),
        ],
        {(1, 2), (3, 8)},  # raises before the mean; exp(log(p)) is p
    ),
    Learner(
        "adamw",
        """
class AdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.count = 0
        self.start = lr, weight_decay
    def step(self, closure=None):
        for group in self.param_groups:
            lr = group["lr"]
            decay = group["weight_decay"]
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                state = self.state[p]
                t = state.get("t", 0) + 1
                self.count += 1
                m = b1 * state.get("m", 0.0) + (1 - b1) * grad
                v = b2 * state.get("v", 0.0) + (1 - b2) * grad ** 2
                state["t"], state["m"], state["v"] = t, m, v
                rate = lr * math.sqrt(1 - b2 ** t) / (1 - b1 ** t)
                p.data -= rate * m / (torch.sqrt(v) + group["eps"])
                p.data -= lr * decay * p.data
def get_adamw_cls():
    return AdamW
""",
        [
            ("no bias correction", "lr * math.sqrt(1 - b2 ** t) / (1 - b1 ** t)", "lr"),
            ("the step count starts at 0 or 2", 'state.get("t", 0) + 1', 'state.get("t", 1) + 1'),
            (
                "all parameters share one step count",
                "b2 ** t) / (1 - b1 ** t)",
                "b2 ** self.count) / (1 - b1 ** self.count)",
            ),
            (
                "L2 in the gradient instead of decoupled decay (that is Adam)",
                ("grad = p.grad.data\n", "p.data -= lr * decay"),
                ("grad = p.grad.data + decay * p.data\n", "p.data -= 0 * decay"),
            ),
            ("the decay is not multiplied by the learning rate", "lr * decay", "decay"),
            (
                "no weight decay",
                "                p.data -= lr * decay * p.data\n",
                "",
            ),
            (
                "ε inside the root",
                '(torch.sqrt(v) + group["eps"])',
                'torch.sqrt(v + group["eps"] * (1 - b2 ** t))',
            ),
            ("the root of v is missing", "(torch.sqrt(v) +", "(v +"),
            ("the two betas are exchanged", "b1, b2 = group", "b2, b1 = group"),
            ("v averages g, not g²", "grad ** 2", "grad"),
            (
                "the factor 1 − β is missing",
                """(1 - b1) * grad
                v = b2 * state.get("v", 0.0) + (1 - b2) * grad ** 2""",
                """grad
                v = b2 * state.get("v", 0.0) + grad ** 2""",
            ),
            ("the learning rate of the start is kept", 'lr = group["lr"]', "lr = self.start[0]"),
            (
                "the groups' own weight decay is ignored",
                'decay = group["weight_decay"]',
                "decay = self.start[1]",
            ),
        ],
        {(0, 1), (1, 2), (5, 12)},  # a count or a decay that is not used
    ),
    Learner(
        "schedule",
        """
def run_get_lr_cosine_schedule(
    it, max_learning_rate, min_learning_rate, warmup_iters, cosine_cycle_iters
):
    if it < warmup_iters:
        return (it / warmup_iters) * max_learning_rate
    end = min_learning_rate
    if it > cosine_cycle_iters:
        return end
    ratio = (it - warmup_iters) / (cosine_cycle_iters - warmup_iters)
    share = 0.5 * (np.cos(np.pi * ratio) + 1)
    return float(min_learning_rate * (1 - share) + max_learning_rate * share)
""",
        [
            ("the warm-up counts from 1", "(it / warmup_iters)", "((it + 1) / warmup_iters)"),
            ("no warm-up", "(it / warmup_iters) * ", ""),
            (
                "the cosine counts from step 0, not from the warm-up's end",
                "(it - warmup_iters) / (cosine_cycle_iters - warmup_iters)",
                "it / cosine_cycle_iters",
            ),
            ("0 after the end, not the minimum", "return end", "return 0.0"),
            (
                "the rate rises again after the end",
                "    if it > cosine_cycle_iters:\n        return end\n",
                "",
            ),
            ("π is missing", "np.pi * ratio", "ratio"),
            ("the factor ½ is missing", "0.5 * (np.cos", "1.0 * (np.cos"),
            ("the minimum is not added", "min_learning_rate * (1 - share) + ", ""),
            ("linear, not a cosine", "0.5 * (np.cos(np.pi * ratio) + 1)", "1 - ratio"),
        ],
    ),
    Learner(
        "clipping",
        """
def run_gradient_clipping(parameters, max_l2_norm):
    grads = [p.grad for p in parameters if p.grad is not None]
    total = 0.0
    for g in grads:
        total += float((g.detach() ** 2).sum())
    norm = total ** 0.5
    if norm > max_l2_norm:
        for g in grads:
            g *= max_l2_norm / (norm + 1e-6)
""",
        [
            (
                "each gradient is clipped by itself",
                """    if norm > max_l2_norm:
        for g in grads:
""",
                """    for g in grads:
        norm = float(g.norm())
        if norm > max_l2_norm:
""",
            ),
            (
                "clipped cell by cell",
                "            g *= max_l2_norm / (norm + 1e-6)",
                "            g.clamp_(-max_l2_norm, max_l2_norm)",
            ),
            ("gradients below the limit are scaled up", "if norm > max_l2_norm", "if True"),
            ("the root of the norm is missing", "total ** 0.5", "total"),
            (
                "the norms are added, not their squares",
                "float((g.detach() ** 2).sum())\n    norm = total ** 0.5",
                "float(g.norm())\n    norm = total",
            ),
            (
                "the L1 norm or the largest cell",
                "float((g.detach() ** 2).sum())\n    norm = total ** 0.5",
                "float(g.abs().sum())\n    norm = total",
            ),
            ("nothing is changed: the result is a copy", "g *= max", "g = g * max"),
            (
                "a parameter without a gradient is an error",
                "parameters if p.grad is not None]",
                "parameters]",
            ),
            (
                "a generator is used up by the first pass",
                "    if norm > max_l2_norm:\n        for g in grads:\n",
                """    if norm > max_l2_norm:
        for g in [p.grad for p in parameters if p.grad is not None]:
""",
            ),
        ],
        {  # a norm that is taken anew, cells that are clipped anyway, gradients that never change
            *((0, 1), (0, 3), (0, 4), (0, 5), (0, 6), (1, 2), (1, 4), (1, 5)),
            *((2, 6), (3, 6), (4, 6), (5, 6), (6, 8)),
        },
    ),
]
