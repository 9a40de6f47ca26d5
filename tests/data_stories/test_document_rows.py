"""One document a row: whole documents, each once, nothing counted twice."""

import numpy as np
import pytest
import torch

from scratchlm.data import IGNORE_INDEX, TokenFile, write_token_file
from scratchlm.data.documents import DocumentBatches, DocumentValidationBatches
from scratchlm.errors import ScratchLMError

END = 9
DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 1, 2], [3, 3], [], [2, 8, 8, 8], [7, 1]]


@pytest.fixture
def tokens(tmp_path):
    return make(tmp_path, DOCUMENTS)


def make(folder, documents, last=END):
    ids = [*[i for document in documents for i in [*document, END]][:-1], last]
    write_token_file(folder / "t", ids, vocab_size=10, tokenizer="x", end_of_text=END)
    return TokenFile(folder / "t")


def read(batch):
    """Give each row's inputs and targets where the targets count."""
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        live = [t for t in targets if t != IGNORE_INDEX]
        assert targets[: len(live)] == live
        yield inputs[: len(live)], live


def test_validation_holds_every_document_once_from_its_beginning(tokens):
    rows = [row for batch in DocumentValidationBatches(tokens, 7, 3) for row in read(batch)]
    rows = [row for row in rows if row[1]]
    assert rows == [([END, *document], [*document, END]) for document in DOCUMENTS]


def test_validation_batches_all_have_the_full_shape(tokens):
    assert [tuple(b.inputs.shape) for b in DocumentValidationBatches(tokens, 8, 3)] == [(3, 8)] * 3


def test_an_epoch_of_training_holds_every_document_once_with_or_without_end_first(tokens):
    batches = DocumentBatches(tokens, 7, len(DOCUMENTS), seed=5)
    opened = set()
    for epoch in range(20):
        found = []
        for inputs, targets in read(batches.batch(epoch)):
            opened.add(inputs[0] == END)
            document = inputs[1:] if inputs[0] == END else inputs
            assert targets == [*inputs[1:], END]
            found.append(document)
        assert sorted(found) == sorted(DOCUMENTS)
    assert opened == {True, False}


def test_training_order_is_a_function_of_seed_and_step(tokens):
    one, other = (DocumentBatches(tokens, 7, 4, seed=s) for s in (1, 2))
    assert torch.equal(one.batch(6).inputs, DocumentBatches(tokens, 7, 4, seed=1).batch(6).inputs)
    assert any(not torch.equal(one.batch(i).inputs, other.batch(i).inputs) for i in range(4))


def test_ranks_share_the_rows_of_one_batch(tokens):
    whole = DocumentBatches(tokens, 7, 4, seed=1).batch(2)
    parts = [DocumentBatches(tokens, 7, 4, 1, rank, 2).batch(2) for rank in (0, 1)]
    assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)


def test_a_document_too_long_for_a_row_is_refused(tokens):
    with pytest.raises(
        ScratchLMError, match="a document of 7 ids does not fit in context_length=6"
    ):
        DocumentBatches(tokens, 6, 2, seed=0)


def test_a_file_that_does_not_end_a_document_is_refused(tmp_path):
    with pytest.raises(ScratchLMError, match="must each end with the end-of-text id"):
        DocumentValidationBatches(make(tmp_path, DOCUMENTS, last=1), 8, 2)


def test_documents_are_found_across_the_chunks_a_file_is_read_in(tokens, monkeypatch):
    ids = tokens.read(0, len(tokens))
    monkeypatch.setattr(TokenFile, "chunks", lambda self: iter(np.array_split(ids, 5)))
    rows = [row for batch in DocumentValidationBatches(tokens, 7, 3) for row in read(batch)]
    assert [row[1] for row in rows if row[1]] == [[*document, END] for document in DOCUMENTS]
