"""Forms of a graph that compute the same for some masks, faster on a GPU: packed, by lengths, without a mask."""
