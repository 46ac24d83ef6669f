"""Decoding: one step of a generating model, and the choice of the next token."""
