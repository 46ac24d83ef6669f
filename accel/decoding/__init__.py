"""Decoding: one step of a generating model, and the choice of the next token.

In: sessions with a state, logits. Out: tokens, and the state after them.
"""
