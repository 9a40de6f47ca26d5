"""Models whose matrices are stored in few bits: which ones, as which layers, in which layout."""
