"""Task heads: what they read, and their losses."""

import torch
import torch.nn.functional as F

from scratchlm.model import QuestionAnswering, SequenceClassifier
from tiny_models import PLAIN, build, ids


def test_the_classifier_reads_the_last_real_token():
    model = SequenceClassifier(PLAIN, num_labels=3, dtype=torch.float64)
    tokens = ids(2, 7)
    hidden = model.hidden(tokens)
    torch.testing.assert_close(model(tokens), model.score(hidden[:, -1]))
    for mask in (
        torch.tensor([[True] * 7, [True] * 4 + [False] * 3]),  # padding right
        torch.tensor([[True] * 7, [False] * 3 + [True] * 4]),  # padding left
    ):
        alone = model(tokens[1:, mask[1]])
        torch.testing.assert_close(model(tokens, attention_mask=mask)[1:], alone)


def test_the_classifier_loss_is_cross_entropy_and_reaches_every_weight():
    model = SequenceClassifier(PLAIN, num_labels=3)
    tokens, labels = ids(4, 7), torch.tensor([0, 2, 1, 1])
    loss = model.loss(tokens, labels)
    torch.testing.assert_close(loss, F.cross_entropy(model(tokens), labels))
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_the_answer_never_lies_in_padding():
    model = QuestionAnswering(PLAIN)
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    logits = model(ids(2, 6), attention_mask=mask)
    assert torch.equal(logits.start.isfinite(), mask)
    assert torch.equal(logits.end.isfinite(), mask)


def test_the_span_loss_is_the_mean_of_two_cross_entropies():
    model = QuestionAnswering(PLAIN)
    tokens, start, end = ids(3, 6), torch.tensor([1, 0, -100]), torch.tensor([2, 5, -100])
    logits = model(tokens)
    expected = (F.cross_entropy(logits.start, start) + F.cross_entropy(logits.end, end)) / 2
    torch.testing.assert_close(model.loss(tokens, start, end), expected)


def test_a_language_models_weights_load_into_a_head():
    trunk = build(PLAIN, dtype=torch.float32)
    head = SequenceClassifier(PLAIN, num_labels=2)
    report = head.load_state_dict(trunk.state_dict(), strict=False)
    assert report.missing_keys == ["score.weight"]
    assert report.unexpected_keys == ["lm_head.weight"]
    assert torch.equal(head.hidden(ids(1, 5)), trunk.hidden(ids(1, 5)))


def test_a_classifier_learns_a_rule():
    """Which of two tokens came first? Only attention can tell from the last token."""
    torch.manual_seed(1)
    model = SequenceClassifier(PLAIN, num_labels=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)

    def batch(n):
        tokens = torch.randint(2, 29, (n, 8), generator=generator)
        labels = torch.randint(2, (n,), generator=generator)
        tokens[torch.arange(n), 1], tokens[torch.arange(n), 4] = labels, 1 - labels
        return tokens, labels

    for _ in range(60):
        optimizer.zero_grad()
        model.loss(*batch(32)).backward()
        optimizer.step()
    tokens, labels = batch(200)
    assert (model(tokens).argmax(-1) == labels).float().mean() > 0.95
