"""Ranks as threads: an exchange in memory, and cutting tensors into the boxes of N ranks."""

import json
import threading

from scratchlm.checkpoint import Piece
from scratchlm.errors import ScratchLMError


class Exchange:
    """One rank's end of an exchange between threads; a rank that vanishes breaks the barrier."""

    def __init__(self, rank, barrier, board):
        self.rank, self.size = rank, barrier.parties
        self.barrier, self.board = barrier, board

    def gather(self, key, value):
        try:
            self.board[self.rank] = key, json.dumps(value)  # JSON and nothing else
            self.barrier.wait(timeout=600)
            assert {told for told, _ in self.board} == {key}  # every rank asks for the same
            values = [json.loads(text) for _, text in self.board]
            self.barrier.wait(timeout=600)  # nobody writes before all have read
        except threading.BrokenBarrierError:
            raise ScratchLMError("a rank did not answer") from None
        return values


def with_ranks(size, work):
    """Call work(exchange) on `size` threads; return what each returned or raised."""
    barrier, board, ended = threading.Barrier(size), [None] * size, [None] * size

    def run(rank):
        try:
            ended[rank] = work(Exchange(rank, barrier, board))
        except BaseException as error:
            ended[rank] = error
            if isinstance(error, Vanished):
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


class Vanished(BaseException):
    """A rank is killed."""


def cut(tensor, rank, size, dim):
    """Return the pieces of a rank: chunks along a dimension, the last ones short or absent."""
    shape = tuple(tensor.shape)
    if not shape:
        return [Piece.whole(tensor)] if rank == size - 1 else []
    dim %= len(shape)
    each = -(-shape[dim] // size)
    begin, end = (min(shape[dim], (rank + k) * each) for k in (0, 1))
    offsets = tuple(begin if d == dim else 0 for d in range(len(shape)))
    return [Piece(shape, offsets, tensor.narrow(dim, begin, end - begin))]


def cut_all(tensors, rank, size):
    """Return the pieces of a rank, every tensor cut along another dimension than the one before."""
    return {name: cut(one, rank, size, i) for i, (name, one) in enumerate(tensors.items())}
