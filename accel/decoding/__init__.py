"""Decoding: one step of a generating model, and the choice of the next token.

In: sessions with a state, prompts as tokens. Out: tokens, the state after them, and final pieces of text. `step` runs a decoder's graph,
`kv_cache` is its state as a transformers cache, `next_token` chooses tokens by `generation_options` and transformers' settings,
`token_loop` repeats both for rows that start together, and `stop_text` turns tokens into text. `generate`, the server's continuous
batching and `accel generate` drive them; a Triton repository has a copy of its own without torch, tested on the same cases.
"""
