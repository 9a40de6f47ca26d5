"""Your own tokenizer: learn merges, see them at work, save, load, and count what they save."""

import tempfile
from pathlib import Path

from scratchlm import Tokenizer, load_tokenizer, train_bpe

folder = Path(tempfile.mkdtemp())
corpus = folder / "corpus.txt"
corpus.write_text("low lower lowest, new newer newest, wide wider widest. " * 100)

vocab, merges = train_bpe([str(corpus)], 300, ["<|endoftext|>"])
tokenizer = Tokenizer(vocab, merges, ["<|endoftext|>"])
print("first merges:", [(left + right).decode() for left, right in merges[:8]])

text = "the newest and the widest<|endoftext|>"
ids = tokenizer.encode(text)
print("pieces:", [tokenizer.decode([token]) for token in ids])
assert tokenizer.decode(ids) == text

tokenizer.save(folder / "tok")
again = load_tokenizer(folder / "tok")
assert again.encode(text) == ids
assert again.fingerprint() == tokenizer.fingerprint()

sample = corpus.read_text()
print(f"{len(sample.encode()) / len(tokenizer.encode(sample)):.2f} bytes a token")
