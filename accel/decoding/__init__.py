"""Decoding of generating models: single decoder steps and the choice of the next token.

In: a session with a KV cache, and a prompt of token ids. Out: the generated tokens, the updated cache, and pieces of text.

`step` runs a decoder's graph. `kv_cache` gives the session's state the interface of a transformers cache. `next_token` chooses the
next token according to `generation_options` and transformers' settings. `token_loop` repeats the decoder step and the choice of a
token for all rows of a batch. `stop_text` turns tokens into text. `generate`, the server's continuous batching and `accel generate`
use this package. A Triton model repository contains a copy of this code that does not need torch. Tests run the copy and the
original on the same cases.
"""
