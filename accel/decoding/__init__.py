"""Decoding of generating models: single decoder steps and the choice of the next token.

In: sessions with a state, and prompts as token ids. Out: tokens, the updated state, and final pieces of text. `step` runs a
decoder's graph. `kv_cache` exposes the session's state as a transformers cache. `next_token` chooses tokens according to
`generation_options` and transformers' settings. `token_loop` repeats both for rows that start together. `stop_text` turns tokens
into text. `generate`, the server's continuous batching and `accel generate` use this package. A Triton model repository contains
its own copy of the code without torch, tested on the same cases.
"""
