"""Forms of a graph that give the same results for some masks and are faster on a GPU: packed, with lengths, without a mask."""
